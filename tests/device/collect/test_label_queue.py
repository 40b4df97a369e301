import itertools
import math

import numpy as np
import pytest
from table_parts import read_table

from edgefl.core.errors import ConfigError, NotFoundError
from edgefl.device.collect.alignment import Row
from edgefl.device.collect.file_store import UNLABELLED, move_example, open_file_store
from edgefl.device.collect.label_page import _format_content
from edgefl.device.collect.label_queue import MAX_POINTS, LabelQueue, RowTarget, open_target
from edgefl.device.collect.row_store import StoreLimits, open_row_store
from edgefl.system.row_labels import LabelKind, LabelLine, append_row_labels

LIMITS = StoreLimits(max_bytes=10**8)


def _files(folder, count=3):
    with open_file_store(folder, LIMITS, "oldest") as store:
        for number in range(count):
            store.add(b"%d" % number, UNLABELLED, ".png", 1000.0 + number)
        store.commit(store.state, 0.0)
    return folder


def _rows(folder, count=40, columns=("power",)):
    with open_row_store(folder, columns, LIMITS) as store:
        values = [(float(number), "")[: len(columns)] for number in range(count)]
        store.commit([Row(1000.0 + at, row, 1) for at, row in enumerate(values)], {}, {}, 0.0)
    return folder


def _say(folder, since_s, until_s, label, kind):
    append_row_labels(folder, [LabelLine(since_s=since_s, until_s=until_s, label=label, kind=kind)])


def _label(queue, label):
    queue.label(queue.current.key, label)


def test_a_person_counts_more_than_the_event_that_moved_a_file_first(tmp_path):
    target = open_target(_files(tmp_path), 60.0)
    queue = LabelQueue(target, ())
    file = queue.current.file
    move_example(tmp_path, file, "noise")
    opened, kind = target.open(queue.current)
    with opened:
        assert (opened.read(), kind) == (b"0", "image/png")
    _label(queue, "robin")
    assert (tmp_path / "robin" / file.name).is_file()
    assert not (tmp_path / "noise").exists()
    queue.undo()
    assert (tmp_path / UNLABELLED / file.name).is_file()
    assert not (tmp_path / "robin").exists()


def test_a_file_that_is_gone_is_said_to_be_and_the_next_one_comes(tmp_path):
    queue = LabelQueue(open_target(_files(tmp_path), 60.0), ())
    gone = queue.current
    (tmp_path / UNLABELLED / gone.file.name).unlink()
    with pytest.raises(NotFoundError, match="is gone"):
        _label(queue, "robin")
    assert queue.current.file.name > gone.file.name
    assert queue.num_done == 0
    _label(queue, "robin")
    (path,) = tmp_path.glob("robin/*")
    path.unlink()
    with pytest.raises(NotFoundError, match="is gone"):
        queue.undo()
    assert (queue.num_done, queue.num_left) == (0, 1)


def test_windows_of_an_event_or_a_default_come_last_and_a_person_s_not_at_all(tmp_path):
    folder = _rows(tmp_path)
    _say(folder, 1000.0, 1009.0, "fine", LabelKind.DEFAULT)
    _say(folder, 1015.0, 1019.0, "failed", LabelKind.EVENT)
    _say(folder, 1020.0, 1029.0, "fine", LabelKind.PERSON)
    _say(folder, 1030.0, 1039.0, "fine", LabelKind.PERSON)
    _say(folder, 1030.0, 1039.0, "", LabelKind.CLEAR)
    queue = LabelQueue(open_target(folder, 10.0), ())
    windows = [(example.since_s, example.until_s, example.label) for example in queue._queue]
    assert windows == [
        (1010.0, 1014.0, ""), (1030.0, 1039.0, ""), (1000.0, 1009.0, "fine"), (1015.0, 1019.0, "failed")
    ]  # fmt: skip
    for label in ("quiet", "fine", "fine", "repaired"):
        _label(queue, label)
    assert queue.current is None
    (part, *_) = read_table(folder, "table", ("power",), ("label",))
    assert part.texts[0] == ("fine",) * 10 + ("quiet",) * 5 + ("repaired",) * 5 + ("fine",) * 20


def test_a_column_of_the_shard_s_own_that_is_called_label_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has a column 'label' of its own"):
        open_target(_rows(tmp_path, columns=("power", "label")), 10.0)


def test_a_window_that_a_collector_may_still_add_to_comes_once_it_ends(tmp_path):
    folder = _rows(tmp_path, 15)
    with open_row_store(folder, ("power",), LIMITS):
        queue = LabelQueue(open_target(folder, 10.0), ())
        assert queue.num_left == 1
        _label(queue, "on")
        assert queue.current is None
    assert queue.current.since_s == 1010.0


def test_of_a_long_window_only_the_points_that_are_drawn_are_kept(tmp_path):
    (example,) = open_target(_rows(tmp_path, 5000), 86_400.0).list_examples()
    ((name, points),) = example.curves
    assert (name, points[0], example.until_s) == ("power", 0.0, 5999.0)
    assert MAX_POINTS <= len(points) < 2 * MAX_POINTS
    assert {after - before for before, after in itertools.pairwise(points)} == {16.0}


def test_a_curve_with_missing_numbers_stays_and_one_without_any_is_none(tmp_path):
    with open_row_store(tmp_path, ("power", "light", "never"), LIMITS) as store:
        lights = [math.nan, math.nan, 2.0, math.nan, 4.0, 5.0]
        store.commit([Row(1000.0 + at, (1.0, light, None), 1) for at, light in enumerate(lights)], {}, {}, 0.0)
    (example,) = open_target(tmp_path, 60.0).list_examples()
    assert [name for name, _ in example.curves] == ["power", "light"]
    np.testing.assert_array_equal(example.curves[1][1], lights)
    page = _format_content(example)
    assert "light: 2 to 5" in page
    assert page.count("<polyline") == 3  # a gap divides one curve
    assert "nan" not in page
    with open_row_store(tmp_path / "long", ("power", "light"), LIMITS) as store:
        rows = [Row(1000.0 + at, (1.0, 5.0 if at == 1 else None), 1) for at in range(2 * MAX_POINTS)]
        store.commit(rows, {}, {}, 0.0)
    (example,) = open_target(tmp_path / "long", 3600.0).list_examples()
    assert [name for name, _ in example.curves] == ["power"]  # the only number is none of the points that are kept


def test_the_shard_is_read_again_where_it_has_changed_alone(tmp_path, monkeypatch):
    folder, times = _rows(tmp_path, 10), []
    listed = RowTarget.list_examples
    monkeypatch.setattr(RowTarget, "list_examples", lambda self, _draw: (times.append(1), listed(self))[1])
    queue = LabelQueue(open_target(folder, 10.0), ())
    _label(queue, "on")
    assert [queue.current for _ in range(5)] == [None] * 5
    assert len(times) == 2
    with open_row_store(folder, ("power",), LIMITS) as store:
        store.commit([Row(2000.0, (1.0,), 2)], {}, {}, 0.0)
    assert queue.current.since_s == 2000.0
