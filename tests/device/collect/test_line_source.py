import math
import os
from collections import Counter

import pytest

from edgefl.core.errors import ConfigError
from edgefl.device.collect import line_source
from edgefl.device.collect.line_parser import parse_time
from edgefl.device.collect.line_source import MAX_LINE_BYTES, LinesSource
from edgefl.device.collect.settings import LinesSection

NOW_S = 1000.0


@pytest.fixture
def log(tmp_path):
    return tmp_path / "app.csv"


@pytest.fixture(autouse=True)
def opened():
    """What a test follows, closed at its end."""
    Followed.opened = []
    yield
    for source in Followed.opened:
        source.close()


class Followed:
    """A source of one file, and what it left out."""

    def __init__(self, path, columns=None, position="", **settings):
        self.counts = Counter()
        section = LinesSection(path=str(path), columns=columns or {"a": "A"}, **settings)
        self.source = LinesSource("tail", section, ("word",), self.counts, clock=lambda: NOW_S)
        self.source.resume(position)
        self.opened.append(self.source)

    def values(self):
        return [reading.values.get("a") for reading in self.source.read()]


def _append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_a_line_counts_once_it_has_its_end(log):
    tail = Followed(log)
    assert tail.values() == []
    _append(log, "A,B\n1,2\n3,")
    assert tail.values() == [1.0]
    assert tail.values() == []
    _append(log, "4\n5,6\n")
    assert tail.values() == [3.0, 5.0]


def test_a_rotated_file_is_read_to_its_end_before_the_new_one(log, tmp_path):
    tail = Followed(log)
    _append(log, "A\n1\n")
    assert tail.values() == [1.0]
    _append(log, "2\n")
    log.rename(tmp_path / "app.csv.1")
    _append(log, "A\n3\n")
    _append(tmp_path / "app.csv.1", "2.5\n")
    assert [tail.values(), tail.values(), tail.values()] == [[2.0, 2.5], [3.0], []]


def test_a_file_that_was_emptied_is_read_from_its_beginning(log):
    tail = Followed(log)
    _append(log, "A\n1\n2\n3\n5\n")
    assert tail.values() == [1.0, 2.0, 3.0, 5.0]
    log.write_text("B,A\n9,4\n")
    assert tail.values() == [4.0]


def test_a_source_goes_on_at_its_position_also_in_a_file_that_was_rotated_meanwhile(log, tmp_path):
    tail = Followed(log)
    _append(log, "B,A\n0,1\n0,2\n")
    tail.values()
    position = tail.source.position
    _append(log, "0,3\n")
    assert Followed(log, position=position).values() == [3.0]
    log.rename(tmp_path / "app.csv.1")
    _append(log, "A\n4\n")
    again = Followed(log, position=position)
    assert [again.values(), again.values()] == [[3.0], [4.0]]


def test_a_position_stays_while_its_file_is_absent_as_before_a_disk_is_mounted(log, tmp_path):
    tail = Followed(log)
    _append(log, "A\n1\n2\n")
    tail.values()
    position, unmounted = tail.source.position, tmp_path / "unmounted"
    log.rename(unmounted)
    again = Followed(log, position=position)
    assert again.values() == []
    assert again.source.position == position
    unmounted.rename(log)
    _append(log, "3\n")
    assert again.values() == [3.0]
    log.rename(unmounted)
    another = Followed(log, position=position)
    assert another.values() == []
    log.write_text("A\n7\n8\n9\n")
    assert another.values() == [7.0, 8.0, 9.0]
    assert another.source.position != position


def test_the_place_in_a_rotated_file_stays_while_the_new_one_cannot_be_opened(log, tmp_path, monkeypatch):
    tail = Followed(log)
    _append(log, "A\n1\n")
    tail.values()
    position = tail.source.position
    log.rename(tmp_path / "app.csv.1")
    _append(log, "A\n2\n")
    with monkeypatch.context() as patch:
        patch.setattr(type(log), "open", _refuse)
        assert tail.values() == []
        assert tail.source.position == position
    assert tail.values() == [2.0]


def _refuse(path, *_mode, **_options):
    raise PermissionError(13, "Permission denied", str(path))


def test_a_source_is_behind_until_it_has_read_all(log, tmp_path, monkeypatch):
    monkeypatch.setattr(line_source, "BLOCK_BYTES", 12)
    tail = Followed(log, time="T")
    _append(log, "T,A\n1,1\n2,2\n3,3\n4,4\n")
    log.rename(tmp_path / "app.csv.1")
    tail.source.resume("")
    _append(log, "T,A\n5,5\n")
    tail.source._open(tmp_path / "app.csv.1")
    assert [(tail.values(), tail.source.end_s) for _ in range(4)] == [
        ([1.0, 2.0], 2.0), ([3.0, 4.0], 4.0), ([5.0], math.inf), ([], math.inf),
    ]  # fmt: skip


def test_files_that_were_rotated_while_nobody_read_are_read_in_their_order(log, tmp_path):
    tail = Followed(log)
    _append(log, "A\n1\n")
    tail.values()
    position = tail.source.position
    for number, suffix in enumerate([".9", "-20260101", ".1"], 2):
        os.utime(log, (number, number))
        log.rename(f"{log}{suffix}")
        _append(log, f"A\n{number}\n")
    (tmp_path / "app.csv.bak").write_text("A\n99\n")
    again = Followed(log, position=position)
    assert [value for _ in range(6) for value in again.values()] == [2.0, 3.0, 4.0]


def test_another_file_under_the_same_inode_is_another_one(log):
    tail = Followed(log)
    _append(log, "A\n1\n2\n")
    tail.values()
    position = tail.source.position
    with log.open("r+") as file:
        file.write("A\n7\n8\n9\n")
    assert Followed(log, position=position).values() == [7.0, 8.0, 9.0]
    assert Followed(log, position="nonsense").values() == [7.0, 8.0, 9.0]


def test_json_lines_have_pointers_and_a_time_of_their_own(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = Followed(path, {"a": "#/x/y", "word": "/state"}, time="/at")
    _append(path, '{"at": "1970-01-01T00:00:05Z", "x": {"y": 2}, "state": "open"}\n\n{"at": 6.5, "x": {}}\n')
    first, second = tail.source.read()
    assert (first.time_s, first.values) == (5.0, {"a": 2.0, "word": "open"})
    assert (second.time_s, second.values) == (6.5, {})


@pytest.mark.parametrize("line", ["x", "1,2", "1e99", '"', "1\0", "é\udcff"])
def test_a_line_that_is_none_is_left_out_and_counted(log, line):
    tail = Followed(log)
    log.write_bytes(f"A\n1\n{line}\n2\n".encode(errors="surrogateescape"))
    assert tail.values() == [1.0, 2.0]
    assert tail.counts == {"tail.refused": 1}


def test_a_line_without_an_end_is_skipped_in_bounded_pieces(log):
    tail = Followed(log)
    _append(log, "A\n1\n" + "9" * (3 * MAX_LINE_BYTES))
    found = [tail.values() for _ in range(4)]
    _append(log, "9\n2\n" + "3" * (MAX_LINE_BYTES + 1) + "\n4\n")
    found += [tail.values() for _ in range(3)]
    assert [value for values in found for value in values] == [1.0, 2.0, 4.0]
    assert tail.counts == {"tail.too_long": 2}


def test_decimal_commas_are_read_where_semicolons_stand_between_cells(log):
    tail = Followed(log)
    _append(log, "A;B\n1,5;2\n")
    assert tail.values() == [1.5]


@pytest.mark.parametrize("value", [True, None, "yesterday", "nan", -1, 1e12, "9999-12-31T23:59:59-23:00"])
def test_what_is_no_time_of_this_era_is_refused(value):
    with pytest.raises(ValueError):
        parse_time(value)


def test_a_file_without_a_first_line_of_names_has_its_lines_counted(log):
    tail = Followed(log)
    _append(log, 'A"\rB\n1\n2\n')
    assert tail.values() == []
    assert tail.counts == {"tail.refused": 2}


def test_a_path_is_absolute_and_a_pointer_begins_with_a_slash():
    with pytest.raises(ConfigError, match="absolute"):
        Followed("app.csv")
    with pytest.raises(ConfigError, match="slash"):
        Followed("/app.jsonl")
