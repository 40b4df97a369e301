"""Guesses of a model over collected examples, and the order that they give; the model runs in its own process."""

import io

import numpy as np
import pytest
from onnx_graphs import constant_model

from edgefl.core.errors import DataError, TaskError
from edgefl.device.collect import label_guesses
from edgefl.device.collect.alignment import Row
from edgefl.device.collect.file_store import UNLABELLED, open_file_store
from edgefl.device.collect.label_guesses import Guesser, order_examples, sample_places
from edgefl.device.collect.label_queue import LabelQueue, RandomCheck, open_target
from edgefl.device.collect.row_store import StoreLimits, open_row_store
from edgefl.device.collect.weak_labels import make_model_teacher, update_weak_labels
from edgefl.tasks.export.model_export import export_onnx
from edgefl.tasks.registry import make_task

LIMITS = StoreLimits(max_bytes=10**8)
PICTURES = {"labels": "dark,bright", "size": 8, "channels": 1, "model": "linear"}
TABLE = {"columns": "power", "target": "label", "labels": "off,on", "model": "linear"}


def _export(path, name, options, slope):
    """Writes a model whose first class has probability 1/2 at an input of 0.5 of its range, below at less."""
    task = make_task(name, options)
    model = task.init(1)
    for values in model.values():
        values[...] = 0.0
        if values.ndim == 2:
            column = np.full(values.shape[1], slope / values.shape[1], values.dtype)
            values[...] = np.stack([-column, column])
    export_onnx(task, model, path, options=options)
    return path


def _pictures(folder, levels):
    from PIL import Image  # noqa: PLC0415 an extra

    with open_file_store(folder, LIMITS, "oldest") as store:
        for place, level in enumerate(levels):
            content = io.BytesIO()
            Image.fromarray(np.full((8, 8), level, np.uint8)).save(content, "PNG")
            store.add(content.getvalue() if level else b"no picture", UNLABELLED, ".png", 1000.0 + place)
        store.commit(store.state, 0.0)
    return open_target(folder, 60.0)


def _rows(folder, values):
    with open_row_store(folder, ("power",), LIMITS) as store:
        store.commit([Row(1000.0 + at, (value,), 1) for at, value in enumerate(values)], {}, {}, 0.0)
    return open_target(folder, 10.0)


def test_texts_of_rows_get_weak_labels_of_a_model_of_theirs(tmp_path):
    options = {"column": "note", "target": "label", "labels": "off,on", "size": 64}
    task = make_task("text", options)
    dark, bright = task.text_converter(["a dark night", "a bright day"]).astype(np.float32)
    model = task.init(1)
    for values in model.values():
        values[...] = 5.0 * np.stack([dark - bright, bright - dark]) if values.ndim == 2 else 0.0
    export_onnx(task, model, tmp_path / "model.onnx", options=options)
    notes = [*["a bright day"] * 10, *["a dark night"] * 10, *["a bright day", "a dark night"] * 5]
    with open_row_store(tmp_path / "shard", ("note",), LIMITS) as store:
        store.commit([Row(1000.0 + at, (note,), 1) for at, note in enumerate(notes)], {}, {}, 0.0)
    teacher = make_model_teacher(_guesser(tmp_path / "model.onnx", tmp_path), 0.9)
    target = open_target(tmp_path / "shard", 10.0)
    assert update_weak_labels(target, teacher, 1.0) == ({"off": 1, "on": 1}, 3)  # of the third it is not sure
    data = task.read(str(tmp_path / "shard"))
    assert (data.targets.tolist(), data.weak.all()) == ([1] * 10 + [0] * 10, True)


def _guesser(path, tmp_path, share=0.0, draw=sample_places):
    return Guesser(lambda: path, state_dir=tmp_path / "none", share=share, draw=draw)


def _walk(queue, find):
    """Returns what there is of each example in the order in which it is asked about."""
    seen = []
    while queue.current is not None:
        seen.append((find(queue.current), queue.guess and queue.guess.label))
        queue.label(queue.current.key, "seen")
    return seen


@pytest.mark.parametrize(
    ("margins", "drawn", "order"),
    [
        ((0.5, None, 0.1, 0.3), [], [2, 3, 0, 1]),
        ((0.5, 0.4, 0.3, 0.2, 0.1, 0.6, 0.7, 0.0), [4, 0], [7, 3, 2, 4, 1, 5, 6, 0]),
        ((0.5, 0.4, 0.3), [1, 2, 0], [1, 2, 0]),
        ((), [], []),
    ],
)
def test_the_least_certain_come_first_with_those_that_were_drawn_evenly_between(margins, drawn, order):
    def draw(num, num_drawn):
        assert (num, num_drawn) == (len(margins), len(drawn))
        return drawn

    assert order_examples(margins, len(drawn), draw) == (order, frozenset(drawn))


def test_places_are_drawn_from_all_alike():
    drawn = [place for _ in range(400) for place in sample_places(4, 2)]
    assert all(120 < drawn.count(place) < 280 for place in range(4))


def test_pictures_come_by_margin_and_what_is_no_picture_last(tmp_path):
    target = _pictures(tmp_path / "shard", [250, 150, 0, 20, 110])
    model = _export(tmp_path / "model.onnx", "pictures", PICTURES, 6.0)
    queue = LabelQueue(target, ["bright"], _guesser(model, tmp_path))
    assert queue.labels == ["bright", "dark"]  # what the model says may be chosen
    assert queue.guess.probability == pytest.approx(1 / (1 + np.exp(-12 * (0.5 - 110 / 255) / 0.25)), abs=1e-3)
    assert _walk(queue, lambda one: one.since_s - 1000) == [
        (4, "dark"), (1, "bright"), (3, "dark"), (0, "bright"), (2, None),
    ]  # fmt: skip


def test_rows_of_a_time_are_guessed_by_tables_and_by_series_of_long_enough_windows(tmp_path):
    target = _rows(tmp_path / "shard", [-9.0, *[9.0] * 9, *[-0.1] * 10, *[-9.0] * 10, 5.0, 5.0])
    table = _export(tmp_path / "table.onnx", "table", TABLE, 1.0)
    assert _walk(LabelQueue(target, [], _guesser(table, tmp_path)), lambda one: one.since_s - 1000) == [
        (10, "off"), (0, "on"), (30, "on"), (20, "off"),
    ]  # fmt: skip
    target = _rows(tmp_path / "other", [*[9.0] * 10, *[-0.1] * 10, 5.0, 5.0])
    options = {**TABLE, "window": 4}
    series = _export(tmp_path / "series.onnx", "series", options, 1.0)
    assert _walk(LabelQueue(target, [], _guesser(series, tmp_path)), lambda one: one.since_s - 1000) == [
        (10, "off"), (0, "on"), (20, None),
    ]  # fmt: skip


def test_of_those_drawn_at_random_no_guess_is_shown_and_its_part_that_was_right_is_counted(tmp_path):
    target = _pictures(tmp_path / "shard", [250, 150, 20, 110])
    model = _export(tmp_path / "model.onnx", "pictures", PICTURES, 6.0)
    queue = LabelQueue(target, [], _guesser(model, tmp_path, 0.5, lambda *_: [0, 2]))
    shown = []
    for label in ("dark", "bright", "bright", "bright"):
        shown.append((queue.current.since_s - 1000, queue.guess is not None, queue.check))
        queue.label(queue.current.key, label)
    assert shown == [
        (3, True, RandomCheck(0, 0)), (0, False, RandomCheck(0, 0)), (1, True, RandomCheck(1, 1)),
        (2, False, RandomCheck(1, 1)),
    ]  # fmt: skip
    assert queue.check == RandomCheck(2, 1)
    queue.undo()
    assert queue.check == RandomCheck(1, 1)


def test_a_new_model_guesses_anew_and_one_that_has_gone_leaves_the_order_of_time(tmp_path, monkeypatch):
    folder, model = tmp_path / "shard", tmp_path / "model.onnx"
    guesser = _guesser(_export(model, "pictures", PICTURES, 6.0), tmp_path)
    queue, asked = LabelQueue(_pictures(folder, [250]), [], guesser), []
    ask = guesser._ask
    monkeypatch.setattr(guesser, "_ask", lambda path, place, new: asked.append(len(new)) or ask(path, place, new))
    queue.label(queue.current.key, "bright")
    _pictures(folder, [240, 20])
    assert queue.guess.label in {"bright", "dark"}
    assert guesser.guess(folder, {one.key: one.source for one in queue._queue})
    assert asked == [2], "what was guessed is kept"
    _export(model, "pictures", PICTURES, -6.0)
    assert guesser.guess(folder, {queue.current.key: queue.current.source})
    assert asked == [2, 1]
    for _ in range(2):
        queue.label(queue.current.key, "seen")
    model.unlink()
    _pictures(folder, [10, 128])
    assert (queue.current.since_s, queue.guess) == (1000.0, None)


def test_of_lists_of_one_example_every_fourth_is_sampled_and_a_new_model_begins_a_new_count(tmp_path):
    folder, model = tmp_path / "shard", tmp_path / "model.onnx"
    _export(model, "pictures", PICTURES, 6.0)
    queue, shown = LabelQueue(_pictures(folder, [250]), [], _guesser(model, tmp_path, 0.25)), []
    for level in (240, 230, 220, 210):
        shown.append(queue.guess is not None)
        queue.label(queue.current.key, "bright")
        _pictures(folder, [level])
    assert shown == [True, True, True, False]
    assert queue.check == RandomCheck(1, 1)
    _export(model, "pictures", PICTURES, -6.0)
    queue.label(queue.current.key, "bright")
    _pictures(folder, [20])
    assert (queue.guess.label, queue.check) == ("bright", RandomCheck())


def test_a_model_of_other_columns_is_refused_and_its_own_target_may_have_any_name(tmp_path):
    target = _rows(tmp_path / "shard", [1.0] * 10 + [2.0])
    other = _export(tmp_path / "other.onnx", "table", {**TABLE, "columns": "watt"}, 1.0)
    with pytest.raises(DataError, match=r"reads none of 2 examples: .*no column 'watt'"):
        LabelQueue(target, [], _guesser(other, tmp_path))
    state = _export(tmp_path / "state.onnx", "table", {**TABLE, "target": "state"}, 1.0)
    assert LabelQueue(target, [], _guesser(state, tmp_path)).guess.label == "on"


def test_what_takes_too_long_has_no_guess_until_the_next_list(tmp_path, monkeypatch):
    target = _pictures(tmp_path / "shard", [250, 150, 20])
    guesser = _guesser(_export(tmp_path / "model.onnx", "pictures", PICTURES, 6.0), tmp_path)
    monkeypatch.setattr(label_guesses, "GUESS_S", 0.0)
    sources = {one.key: one.source for one in target.list_examples()}
    assert len(guesser.guess(target.folder, sources)) == 1
    assert len(guesser.guess(target.folder, sources)) == 2


def test_a_new_example_that_cannot_be_read_takes_no_guess_from_others_and_is_not_tried_again(tmp_path, monkeypatch):
    target, asked = _pictures(tmp_path / "shard", [250, 20]), []
    guesser = _guesser(_export(tmp_path / "model.onnx", "pictures", PICTURES, 6.0), tmp_path)
    guesser.guess(target.folder, {one.key: one.source for one in target.list_examples()})
    _pictures(tmp_path / "shard", [0, 0])
    ask = guesser._ask
    monkeypatch.setattr(guesser, "_ask", lambda *words: asked.append(len(words[2])) or ask(*words))
    for _ in range(2):
        assert len(guesser.guess(target.folder, {one.key: one.source for one in target.list_examples()})) == 2
    assert len(asked) == 1


def test_what_cannot_guess_labels_is_refused_before_the_page_is_there(tmp_path):
    target, model = _pictures(tmp_path / "shard", [250]), tmp_path / "model.onnx"
    with pytest.raises(DataError, match="there is no model file"):
        LabelQueue(target, [], _guesser(model, tmp_path))
    constant_model(model, 1)
    with pytest.raises(TaskError, match="of task 'digits'; labels are guessed by models of audio, pictures, series"):
        LabelQueue(target, [], _guesser(model, tmp_path))
    constant_model(model, 1, task="table", outputs="values")
    for facts in ({"outputs": "values"}, {"outputs": "classes", "targets": "none"}):
        constant_model(model, 1, task="table", **facts)
        with pytest.raises(DataError, match="gives clusters or values, not the task's classes"):
            LabelQueue(target, [], _guesser(model, tmp_path))


def test_a_model_gives_weak_labels_where_it_is_sure_enough(tmp_path):
    target = _rows(tmp_path / "shard", [5.0] * 10 + [0.1] * 10 + [-5.0] * 10)
    path = _export(tmp_path / "m.onnx", "table", TABLE, 1.0)
    teacher = make_model_teacher(_guesser(path, tmp_path), 0.95)
    assert update_weak_labels(target, teacher, 1.0) == ({"off": 1, "on": 1}, 3)
