import os

import pytest

from edgefl.system import row_labels
from edgefl.system.row_labels import (
    LABELS_NAME,
    LabelKind,
    LabelLine,
    append_row_labels,
    cut_row_labels,
    read_row_labels,
    replace_weak_labels,
)


def _line(since_s, until_s, label, kind=LabelKind.EVENT):
    return LabelLine(since_s=since_s, until_s=until_s, label=label, kind=kind)


def _find(folder, *times):
    return read_row_labels(folder).find(times)


def test_a_person_counts_more_than_an_event_that_more_than_a_default_and_later_lines_more_than_earlier_ones(tmp_path):
    assert _find(tmp_path, 1.0, 2.0) == ["", ""]
    append_row_labels(tmp_path, [_line(0, 10, "wrong", LabelKind.PERSON), _line(3, 4, "", LabelKind.PERSON)])
    append_row_labels(tmp_path, [_line(5, 9, "x"), _line(8, 12, 'a, "b"')])
    append_row_labels(tmp_path, [_line(6, 6, "", LabelKind.CLEAR), _line(0, 20, "calm", LabelKind.DEFAULT)])
    assert _find(tmp_path, 12.0, 6.0, 3.5, 20.5, 5.0, 11, 20) == ['a, "b"', "x", "", "", "wrong", 'a, "b"', "calm"]


def test_a_line_that_is_cut_or_damaged_does_not_count_and_the_next_one_does(tmp_path):
    append_row_labels(tmp_path, [_line(0, 1, "a"), _line(2, 3, "b")])
    path = tmp_path / LABELS_NAME
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        append_row_labels(tmp_path, [_line(4, 5, "c")])
        first = "a" if length >= whole.index(b"\n") else ""
        assert _find(tmp_path, 0.5, 2.5, 4.5) == [first, "b" if length >= len(whole) - 1 else "", "c"]
    path.write_bytes(whole.replace(b",a,", b",e,") + b"nan,1,a,event,00000000\n\xff\n")
    assert _find(tmp_path, 0.5, 2.5) == ["", "b"]


def test_labels_of_a_time_are_cut_out_and_the_rest_stays(tmp_path):
    append_row_labels(tmp_path, [_line(0, 10, "a"), _line(4, 5, "b"), _line(20, 30, "c")])
    cut_row_labels(tmp_path, 3.0, 6.0)
    assert _find(tmp_path, 2.9, 3.0, 4.5, 6.0, 6.1, 25.0) == ["a", "", "", "", "a", "c"]
    assert b",b," not in (tmp_path / LABELS_NAME).read_bytes()


def test_labels_behind_the_limit_outlast_a_cut_and_one_that_makes_the_file_longer_loses_none(tmp_path, monkeypatch):
    append_row_labels(tmp_path, [_line(at, at + 0.5, f"s{at}") for at in range(100)])
    size = (tmp_path / LABELS_NAME).stat().st_size
    monkeypatch.setattr(row_labels, "MAX_BYTES", size // 2)
    monkeypatch.setattr(row_labels, "MAX_READ_BYTES", size * 3 // 4)
    assert len(read_row_labels(tmp_path).lines) < 80
    replace_weak_labels(tmp_path, [])
    cut_row_labels(tmp_path, -10, 49.7)
    assert _find(tmp_path, 49.0, 50.0, 99.5) == ["", "s50", "s99"]
    monkeypatch.undo()
    cut_row_labels(tmp_path, -10, 200)
    append_row_labels(tmp_path, [_line(at, 1000 + at, f"s{at}") for at in range(100)])
    monkeypatch.setattr(row_labels, "MAX_BYTES", (tmp_path / LABELS_NAME).stat().st_size + 1)
    cut_row_labels(tmp_path, 500.0, 501.0)
    assert (tmp_path / LABELS_NAME).stat().st_size > row_labels.MAX_BYTES
    assert _find(tmp_path, 499.0, 500.5, 502.0, 1099.0) == ["s99", "", "s99", "s99"]


def test_labels_that_nobody_would_read_are_refused_and_root_s_are_the_owner_s_of_the_folder(tmp_path, monkeypatch):
    append_row_labels(tmp_path, [_line(0, 1, "a")])
    size = (tmp_path / LABELS_NAME).stat().st_size
    monkeypatch.setattr(row_labels, "MAX_BYTES", size + 10)
    with pytest.raises(OSError, match="in all"):
        append_row_labels(tmp_path, [_line(2, 3, "b")])
    append_row_labels(tmp_path, [])
    assert (tmp_path / LABELS_NAME).stat().st_size == size
    if os.geteuid() == 0:
        folder = tmp_path / "of another"
        folder.mkdir(mode=0o700)
        os.chown(folder, 1234, 1234)
        append_row_labels(folder, [])
        assert {path.stat().st_uid for path in folder.iterdir()} == {1234}


def test_defaults_that_touch_become_one_line_and_say_the_same(tmp_path):
    lines = [_line(time, time + 10, "calm", LabelKind.DEFAULT) for time in range(0, 100, 10)]
    append_row_labels(
        tmp_path, [*lines[:5], _line(3, 4, "x"), *lines[6:], _line(100, 120, "other", LabelKind.DEFAULT)]
    )
    before = _find(tmp_path, *range(130))
    cut_row_labels(tmp_path, 1e9, 1e9)
    assert len(read_row_labels(tmp_path).lines) == 4
    assert _find(tmp_path, *range(130)) == before
