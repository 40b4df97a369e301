"""`text`: a column of texts becomes hashed n-grams, and a run file the rest."""

import unicodedata

import numpy as np
import pytest

import edgefl
from edgefl.core.errors import ConfigError, DataError
from edgefl.tasks.configured.text import MAX_TEXT_CHARS, HashedNgrams
from edgefl.tasks.datasets import table_files
from edgefl.tasks.datasets.shards import inspect_shard
from edgefl.tasks.registry import make_task
from edgefl.tasks.stored_arrays import is_stored

FAULTS = {"column": "message", "target": "kind", "labels": "heating,power"}
RUN_FILE = """
[run]
task = "text"
rounds = 10
[task]
column = "message"
target = "kind"
labels = ["heating", "power", "network"]
ngrams = ["word-1..2", "char-3"]
size = 512
"""
WORDS = {
    "heating": (("the radiator", "warm water", "the boiler"), ("stays cold", "makes noises", "drips")),
    "power": (("the fuse", "a socket", "the lamp"), ("is dead", "sparks", "trips again")),
    "network": (("wi-fi", "the router", "a cable"), ("is slow", "drops out", "shows no signal")),
}


def write_faults(path, count, seed=1):
    """Messages about things of one kind, in a quarter of them of another, that fail in the way of their kind."""
    rng = np.random.default_rng(seed)
    lines = ["id,message,kind"]
    for number in range(count):
        kind, other = (str(name) for name in rng.choice([*WORDS], 2))
        things, faults = WORDS[other if rng.random() < 0.25 else kind][0], WORDS[kind][1]
        lines.append(
            f'{number},"{rng.choice(things).capitalize()}, in room {number % 9}, {rng.choice(faults)}",{kind}'
        )
    path.write_text("\n".join(lines) + "\n")
    return path


def count(texts, *ngrams, size=64):
    return HashedNgrams(ngrams=ngrams, size=size).compute(texts)


def test_bucket_and_sign_of_an_ngram_are_the_same_on_every_machine():
    found = count(["Too hot"], "word-1", "word-2")[0]
    assert {bucket: int(found[bucket]) for bucket in np.flatnonzero(found)} == {0: 1, 11: 1, 48: -1}


def test_ngrams_of_words_and_characters_are_counted_as_often_as_they_are_there():
    a, b = count(["a", "b"], "word-1", size=1024).astype(int)
    np.testing.assert_array_equal(count(["b, a b!"], "word-1", size=1024)[0], a + 2 * b)
    pairs = count(["a b", "b a"], "word-2", size=1024).astype(int).sum(axis=0)
    np.testing.assert_array_equal(count(["a b a"], "word-1", "word-2", size=1024)[0], 2 * a + b + pairs)
    np.testing.assert_array_equal(count(["a b"], "char-3", size=1024)[0], count(["a   b "], "char-3", size=1024)[0])
    assert np.abs(count(["abcd"], "char-3", size=1024)).sum() == 4, "of ' abcd ', with the blanks around it"
    assert np.abs(count(["ab"], "char-5", size=1024)).sum() == 0, "shorter than one of them"


def test_a_word_and_the_characters_of_a_word_are_different_ngrams():
    assert (count(["a"], "word-1", size=1024) != count(["a"], "char-1", size=1024)).any()


def test_letters_of_any_case_and_form_are_the_same():
    texts = ["STRASSE \uff23afé", "straße " + unicodedata.normalize("NFD", "café")]
    first, second = count(texts, "word-1", "char-2")
    np.testing.assert_array_equal(first, second)


def test_texts_without_a_word_in_common_have_an_inner_product_of_0_in_expectation():
    texts = [" ".join(f"{side}{pair}x{word}" for word in range(40)) for pair in range(100) for side in "ab"]
    left, right = (count(texts[start::2], "word-1").astype(float) for start in (0, 1))
    products = (left * right).sum(axis=1)
    assert abs(products.mean()) < 3, "40 * 40 / 64 = 25 without signs; the mean of 100 has a deviation of 0.5"
    assert abs((left**2).sum(axis=1).mean() - 40) < 4


def test_counts_end_at_what_fits_and_texts_at_their_bound():
    (most,) = count(["hot " * 300], "word-1")
    assert most.tolist() == [127, *[0] * 63]
    long = "a " * (MAX_TEXT_CHARS // 2)
    np.testing.assert_array_equal(*count([long, long + " something else"], "word-1"))


def test_features_have_length_1_and_a_text_without_ngrams_has_none():
    features = make_task("text", FAULTS).model.prepare(count(["too hot", "!"], "word-1"))
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), [1.0, 0.0], atol=1e-6)


def test_a_run_file_of_ten_lines_trains_a_model(tmp_path):
    assert len(RUN_FILE.split("\n")) <= 15
    (tmp_path / "run.toml").write_text(RUN_FILE)
    data = write_faults(tmp_path / "faults.csv", 500)
    result = edgefl.simulate(tmp_path / "run.toml", devices=3, data=data, root=tmp_path / "history")
    assert (result.status, result.metrics["accuracy"] >= 0.95) == ("finished", True), result.metrics


@pytest.mark.extended
def test_three_devices_train_live_each_on_texts_of_its_own(tmp_path):
    (tmp_path / "run.toml").write_text(RUN_FILE + "[devices]\nmin = 3\n")
    shards = [write_faults(tmp_path / f"board-{seed}.csv", 200, seed) for seed in range(3)]
    result = edgefl.run(tmp_path / "run.toml", devices=shards, root=tmp_path / "fleet")
    assert (result.status, len({row["device_id"] for row in result.updates})) == ("finished", 3)
    assert result.metrics["accuracy"] > 0.9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": "a"}, "task.labels must name at least 2, got a"),
        ({"column": "kind"}, "task.column must not be 'kind', which is the target or the group"),
        ({"column": ""}, "task.column must hold names of 1 to 100 characters, got ''"),
        ({"ngrams": "word-6"}, "task.ngrams must be of word-1 to word-5 and char-1 to char-8, got 'word-6'"),
        ({"ngrams": "char-0..3"}, "got 'char-0'"),
        ({"ngrams": "word-1,word-1..2"}, "task.ngrams names 'word-1' twice"),
        ({"size": 63}, "task.size must be from 64 to 16384, got 63"),
        ({"size": 20_000}, "task.size must be from 64 to 16384, got 20000"),
        ({"model": "gru"}, "model of task text must be mlp .* got 'gru'"),
        ({"loss": "mae"}, "must be cross-entropy or mse where there are labels"),
    ],
)
def test_options_that_make_no_sense_are_one_clear_line(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        make_task("text", FAULTS | options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("message,kind\ncold,heating\nsparks,fire\n", "row 2 holds something else"),
        ("message,kind\ncold,heating\n,power\n", "row 2: message is missing"),
        ("message,kind\n", "holds no rows"),
        ("text,kind\ncold,heating\n", "has no column 'message'; its columns are text, kind"),
        ("message,kind\ncold,heating,now\n", "3 cells, the first line has 2"),
    ],
)
def test_a_file_that_is_no_such_table_is_one_clear_line_without_a_text(tmp_path, content, message):
    path = tmp_path / "faults.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=message) as error:
        make_task("text", FAULTS).read(str(path))
    assert "\n" not in str(error.value)
    assert "cold" not in str(error.value)


def test_a_row_with_an_empty_cell_is_left_out_where_the_run_file_says_so(tmp_path):
    (tmp_path / "faults.csv").write_text('message,kind\n"cold,\nwet",heating\n,power\nsparks,\nsparks,power\n')
    data = make_task("text", FAULTS | {"missing": "drop", "ngrams": "word-1", "size": 64}).read(str(tmp_path))
    np.testing.assert_array_equal(data.inputs, count(["cold wet", "sparks"], "word-1"))
    assert (data.inputs.dtype, data.targets.tolist()) == (np.int8, [0, 1])


def test_rows_are_read_in_parts_counted_over_all_of_them_and_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "CHUNK_ROWS", 2)
    path = write_faults(tmp_path / "faults.csv", 5)
    task = make_task("text", FAULTS | {"labels": [*WORDS], "group": "id"})
    data = task.read(str(path))
    assert (data.inputs.shape, data.groups.tolist()) == ((5, 4096), [*"01234"])
    path.write_text(path.read_text() + "5,dark,moon\n")
    with pytest.raises(DataError, match="column 'kind' must hold one of heating, power, network; row 6 holds"):
        task.read(str(path))
    monkeypatch.setattr("edgefl.tasks.configured.text.MAX_CELLS", 4 * 4096)
    with pytest.raises(DataError, match="has more than the 4 texts that are held with size = 4096"):
        task.read(str(path))


def test_a_board_counts_rows_without_a_run_file(tmp_path):
    report = inspect_shard("text", str(write_faults(tmp_path / "faults.csv", 7)), is_detailed=True)
    assert (report.num_examples, report.details[1:]) == (7, ("message: texts", "kind: texts"))


def test_features_of_a_large_shard_lie_in_a_file_and_not_in_memory(tmp_path):
    path = tmp_path / "rows.csv"
    texts = [f"word{row} is it number {row % 7}" for row in range(2100)]
    path.write_text("text,kind\n" + "".join(f"{text},{'xy'[row % 2]}\n" for row, text in enumerate(texts)))
    task = make_task("text", {"column": "text", "target": "kind", "labels": "x,y", "size": 16_384})
    data = task.read(str(path))
    assert is_stored(data.inputs)
    features = HashedNgrams(ngrams=("word-1", "word-2"), size=16_384)
    np.testing.assert_array_equal(data.inputs[2040:2060], features.compute(texts[2040:2060]))
    assert data.targets.tolist() == [row % 2 for row in range(2100)]


def test_a_text_that_many_rows_share_is_hashed_once(monkeypatch):
    count, seen = HashedNgrams._count, []
    monkeypatch.setattr(HashedNgrams, "_count", lambda self, text, find: seen.append(text) or count(self, text, find))
    found = HashedNgrams(ngrams=("word-1",), size=64).compute(iter(["on", "off", "on"]))
    assert seen == ["on", "off"]
    np.testing.assert_array_equal(found[0], found[2])
    assert (found[0] != found[1]).any()
