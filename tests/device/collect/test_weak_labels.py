"""Weak labels: of a model or functions, for what nobody has labelled; with less weight, and never tested on."""

import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from edgefl.cli.main import main
from edgefl.core.errors import ConfigError, DataError
from edgefl.core.extensions import allow_modules
from edgefl.core.types import Dataset, Role
from edgefl.device.collect.alignment import Row
from edgefl.device.collect.file_store import UNLABELLED, open_file_store
from edgefl.device.collect.label_queue import LabelQueue, open_target
from edgefl.device.collect.row_store import StoreLimits, open_row_store
from edgefl.device.collect.weak_labels import (
    LabelFunction,
    choose_guesses,
    make_function_teacher,
    update_weak_labels,
)
from edgefl.device.inference.onnx_model import ModelCheckRequest, check_model, select_check_data
from edgefl.system.row_labels import WEAK_WEIGHT, LabelKind, LabelLine, append_row_labels
from edgefl.tasks.datasets.shards import drop_weak, load_task_data, split_train_test
from edgefl.tasks.registry import make_task

LIMITS = StoreLimits(max_bytes=10**8)
TABLE = {"columns": "power", "target": "label", "labels": "off,on", "model": "linear"}
SERIES = {**TABLE, "window": 5}
TEXT = {"column": "note", "target": "label", "labels": "off,on", "size": 64}
PICTURES = {"labels": "dark,bright", "size": 8, "channels": 1, "model": "linear"}
START_S = 1000.0


def _load(name, options, folder):
    return load_task_data(make_task(name, options), str(folder))


def _rows(folder, values, persons=()):
    """Makes a shard of a row a second, and returns it cut into windows of ten; a person has labelled some."""
    with open_row_store(folder, ("power",), LIMITS) as store:
        store.commit([Row(START_S + at, (value,), 1) for at, value in enumerate(values)], {}, {}, 0.0)
    append_row_labels(folder, [_line(*person, LabelKind.PERSON) for person in persons])
    return open_target(folder, 10.0)


def _line(first, last, label, kind):
    return LabelLine(since_s=START_S + first, until_s=START_S + last, label=label, kind=kind)


def _by_power(_folder, examples):
    """Says of each window whether the power is on, the surer the larger it is."""
    powers = {example.key: float(np.mean(example.curves[0][1])) for example in examples}
    return {key: ("on" if power > 0 else "off", min(1.0, abs(power))) for key, power in powers.items()}


class ByPower(LabelFunction):
    def label(self, candidate):
        return "on" if candidate.columns["power"][0] > 0 else "off"


class Abstaining(LabelFunction):
    def label(self, candidate):
        return None


class Off(LabelFunction):
    def label(self, candidate):
        return "off"


class Unmade(LabelFunction):
    def __init__(self):
        raise RuntimeError("no such file of rules")


class Whole(LabelFunction):
    """Says yes where a window has the rows of all columns, and those that were written."""

    def label(self, candidate):
        first, *others = candidate.columns.values()
        assert (len(others), {len(values) for values in others}) == (9, {len(first)})
        return "off" if len(first) == 700 and math.isnan(others[-1][3]) and list(others[-2]) == list(first) else "on"


class ByWords(LabelFunction):
    """Says what the last text of a window is about, and that all of its texts are there."""

    def label(self, candidate):
        texts = candidate.texts["note"]
        assert (len(texts), list(candidate.texts)) == (len(candidate.columns["power"]), ["note"])
        assert list(texts[:2]) in (["7", ""], ["a dark night"] * 2)
        return "on" if "bright" in texts[-1] else "off"


class Wrong(LabelFunction):
    def label(self, candidate):
        return "a/b"


def test_a_table_trains_on_weak_labels_with_less_weight_and_never_tests_on_them(tmp_path):
    values = [at / 100 for at in range(100)]
    target = _rows(tmp_path, values, [(0, 49, "off")])
    assert update_weak_labels(target, _by_power, 1.0) == ({"on": 5}, 5)
    data = _load("table", TABLE, tmp_path)
    assert data.targets.tolist() == [0] * 50 + [1] * 50
    assert data.weights.tolist() == [1.0] * 50 + [WEAK_WEIGHT] * 50
    train, test = split_train_test(data, 0.5)
    assert not test.weak.any()
    assert int(train.weak.sum()) == 50
    assert drop_weak(data).targets.tolist() == [0] * 50
    assert Dataset.concatenate([test, train]).weak.tolist() == [False] * len(test) + train.weak.tolist()
    check = ModelCheckRequest(
        path="", former_path=None, task="table", options=TABLE, shard="", role=Role.EVALUATOR, test_fraction=0.5
    )
    assert len(select_check_data(data, check)) == 50
    assert len(select_check_data(data, replace(check, role=Role.TRAINER, test_fraction=0.0))) == 50
    assert not select_check_data(data, replace(check, role=Role.TRAINER)).weak.any()


def _texts(folder, notes):
    with open_row_store(folder, ("power", "note"), LIMITS) as store:
        store.commit([Row(START_S + at, (1.0, note), 1) for at, note in enumerate(notes)], {}, {}, 0.0)
    return open_target(folder, 10.0)


def test_texts_get_weak_labels_of_functions_that_read_them_and_train_on_them(tmp_path):
    target = _texts(tmp_path, ["7", "", *["a bright day"] * 8, *["a dark night"] * 10])
    with allow_modules(["device.collect.test_weak_labels"]):
        teacher = make_function_teacher(["device.collect.test_weak_labels:ByWords"])
        assert update_weak_labels(target, teacher, 1.0) == ({"off": 1, "on": 1}, 2)
    append_row_labels(tmp_path, [_line(0, 4, "on", LabelKind.PERSON)])
    data = _load("text", {**TEXT, "missing": "drop"}, tmp_path)
    assert data.targets.tolist() == [1] * 9 + [0] * 10  # the empty text is left out
    assert data.weak.tolist() == [False] * 4 + [True] * 15
    assert data.weights.tolist() == [1.0] * 4 + [WEAK_WEIGHT] * 15


@pytest.mark.parametrize("role", [Role.EVALUATOR, Role.TRAINER])
def test_a_new_model_is_not_checked_where_all_labels_are_weak(role, tmp_path):
    update_weak_labels(_rows(tmp_path, [0.5] * 20), _by_power, 1.0)
    check = ModelCheckRequest(
        path="", former_path=None, task="table", options=TABLE, shard=str(tmp_path), role=role, test_fraction=0.5
    )
    with pytest.raises(DataError, match="holds no examples to check a model on"):
        check_model(check)


def test_a_window_of_a_series_is_weak_where_the_row_of_its_target_is(tmp_path):
    target = _rows(tmp_path, [0.5] * 40, [(0, 21, "off")])
    update_weak_labels(target, lambda *_: {one.key: ("on", 1.0) for one in target.list_examples()}, 1.0)
    data = _load("series", SERIES, tmp_path)
    assert data.targets.tolist() == [0] * 4 + [1] * 4
    assert data.weak.tolist() == [False] * 4 + [True] * 4


def test_what_anybody_says_replaces_a_weak_label_and_what_a_person_takes_back_brings_it_again(tmp_path):
    target = _rows(tmp_path, [0.5] * 20)
    update_weak_labels(target, _by_power, 1.0)
    append_row_labels(tmp_path, [_line(0, 9, "off", LabelKind.DEFAULT), _line(10, 19, "off", LabelKind.PERSON)])
    assert _load("table", TABLE, tmp_path).weak is None
    append_row_labels(tmp_path, [_line(10, 19, "", LabelKind.CLEAR)])
    data = _load("table", TABLE, tmp_path)
    assert data.targets.tolist() == [0] * 10 + [1] * 10
    assert int(data.weak.sum()) == 10


def test_a_person_is_asked_about_what_has_only_a_weak_label(tmp_path):
    target = _rows(tmp_path, [0.5] * 30)
    update_weak_labels(target, _by_power, 1.0)
    queue = LabelQueue(open_target(tmp_path, 10.0), ["on"])
    assert queue.num_left == 3
    assert queue.current.label == ""


def test_weak_labels_of_an_earlier_call_are_replaced_and_others_stay(tmp_path):
    target = _rows(tmp_path, [0.5] * 20, [(0, 9, "off")])
    update_weak_labels(target, _by_power, 1.0)
    assert update_weak_labels(target, lambda *_: {}, 1.0) == ({}, 1)
    assert _load("table", TABLE, tmp_path).targets.tolist() == [0] * 10


def test_the_share_of_weak_labels_is_bounded_and_the_surest_of_each_class_come_first(tmp_path):
    guesses = [("on", 0.99), ("on", 0.98), ("on", 0.97), ("off", 0.6), ("off", 0.7)]
    assert choose_guesses(guesses, [1] * 5, 3) == [0, 4, 1]
    assert choose_guesses(guesses, [2] * 5, 5) == [0, 4]
    assert choose_guesses(guesses, [1] * 5, 0) == []
    target = _rows(tmp_path, [0.5] * 100, [(0, 39, "off")])
    update_weak_labels(target, _by_power, 0.3)  # 17 of 57 labels: a window of ten
    data = _load("table", TABLE, tmp_path)
    assert int(data.weak.sum()) == 10
    assert len(data) == 50
    assert update_weak_labels(_rows(tmp_path / "none", [0.5] * 20), _by_power, 0.3) == ({}, 2)


def test_functions_vote_and_one_that_fails_or_says_no_label_is_named(tmp_path):
    target = _rows(tmp_path, [0.5] * 10 + [-0.5] * 10)

    def count(*names):
        return update_weak_labels(target, make_function_teacher([f"{__name__}:{name}" for name in names]), 1.0)[0]

    with pytest.raises(ConfigError, match=f"{__name__} is not allowed here"):
        count("ByPower")
    with allow_modules([__name__]):
        assert count("ByPower") == {"off": 1, "on": 1}
        assert count("ByPower", "Abstaining") == {"off": 1, "on": 1}
        assert count("ByPower", "Off") == {"off": 1}
        with pytest.raises(DataError, match=r"Wrong must return a label or None, got 'a/b'"):
            count("Wrong")
        with pytest.raises(ConfigError, match="inherits from"):
            make_function_teacher([f"{__name__}:StoreLimits"])
        with pytest.raises(ConfigError, match="Unmade cannot be made: RuntimeError: no such file of rules"):
            make_function_teacher([f"{__name__}:Unmade"])


def test_a_function_gets_all_rows_of_all_columns_of_what_nobody_has_labelled(tmp_path):
    names = [f"c{number}" for number in range(10)]
    with open_row_store(tmp_path, names, LIMITS) as store:
        rows = [Row(START_S + at, (float(at),) * 9 + (None if at % 700 == 3 else 1.0,), 1) for at in range(2100)]
        store.commit(rows, {}, {}, 0.0)
    append_row_labels(tmp_path, [_line(700, 1399, "on", LabelKind.DEFAULT)])
    target = open_target(tmp_path, 700.0)
    with allow_modules([__name__]):
        assert update_weak_labels(target, make_function_teacher([f"{__name__}:Whole"]), 1.0) == ({"off": 2}, 2)


def test_files_without_a_class_get_weak_ones_where_they_lie_until_they_move(tmp_path, capsys):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install -e '.[pictures]'")
    with open_file_store(tmp_path, LIMITS, "oldest") as store:
        for at, label in enumerate(["dark", "dark", UNLABELLED, UNLABELLED]):
            content = io.BytesIO()
            image.fromarray(np.full((8, 8), at * 60, np.uint8)).save(content, "PNG")
            store.add(content.getvalue(), label, ".png", START_S + at)
        store.commit(store.state, 0.0)
    target = open_target(tmp_path, 60.0)
    last = target.list_examples()[-1]
    assert update_weak_labels(target, lambda *_: {last.key: ("bright", 0.99)}, 0.5) == ({"bright": 1}, 2)
    data = _load("pictures", PICTURES, tmp_path)
    assert data.targets.tolist() == [0, 0, 1]
    assert data.weak.tolist() == [False, False, True]
    assert len(target.list_examples()) == 2
    with pytest.raises(SystemExit):
        main(["device", "shard", "stats", str(tmp_path)])
    assert "weak label bright: 1" in capsys.readouterr().out
    target.label(last, "dark")
    data = _load("pictures", PICTURES, tmp_path)
    assert data.targets.tolist() == [0, 0, 0]
    assert data.weak is None


def test_the_command_says_who_guesses_and_how_many_have_a_weak_label(tmp_path, capsys):
    _rows(tmp_path, [0.5] * 20)
    guess = ["device", "shard", "guess", str(tmp_path), "--window", "10"]
    with pytest.raises(SystemExit):
        main(guess)
    assert "who guesses? Give --model FILE" in capsys.readouterr().err
    for option, least in (("--share", 0), ("--threshold", 0), ("--window", 1)):
        with pytest.raises(SystemExit):
            main([*guess, "--model", "any.onnx", option, "nan"])
        assert capsys.readouterr().err.endswith(f"{option} must be a number of at least {least}, got nan\n")
    with pytest.raises(SystemExit):
        main([*guess, "--allow-module", __name__, "--function", f"{__name__}:ByPower", "--share", "1"])
    assert "2 of 2 examples without a label have a weak one\n  on: 2" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["device", "shard", "stats", str(tmp_path), "--format", "json"])
    assert json.loads(capsys.readouterr().out)["weak_labels"] == {"on": 20}


def test_rows_are_read_to_count_weak_labels_only_where_there_are_some(tmp_path, capsys):
    _rows(tmp_path, [0.5] * 20, [(0, 9, "on")])
    (segment,) = tmp_path.glob("rows-*.csv")
    segment.unlink()
    segment.mkdir()
    for kind, code in ((LabelKind.PERSON, 0), (LabelKind.WEAK, 10)):
        append_row_labels(tmp_path, [_line(10, 19, "on", kind)])
        with pytest.raises(SystemExit) as ended:
            main(["device", "shard", "stats", str(tmp_path)])
        assert (ended.value.code or 0, "cannot be read" in capsys.readouterr().err) == (code, code > 0)
