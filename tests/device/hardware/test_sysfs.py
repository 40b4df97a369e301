"""Files of a board, read as a doubter does."""

from pathlib import Path

import pytest

from edgefl.device.hardware.sysfs import (
    MAX_FILE_BYTES,
    find_paths,
    read_int,
    read_kilobytes,
    read_strings,
    read_text,
    sanitise_text,
)


def written(path, content):
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b"42\n", 42), (b"-5\0", -5), (b"", None), (b"4.2", None), ("²".encode(), None), ("٣".encode(), None),
        (b"9" * 15, 10**15 - 1), (b"9" * 16, None), (b"\xff", None),
    ],
)  # fmt: skip
def test_a_number_is_one_that_a_board_can_mean(tmp_path, content, value):
    assert read_int(written(tmp_path / "x", content)) == value


def test_a_file_without_end_is_read_to_a_limit_and_what_is_none_says_nothing(tmp_path):
    told = read_text(written(tmp_path / "x", b"a" * (4 * MAX_FILE_BYTES)))
    assert told is not None
    assert len(told) == MAX_FILE_BYTES
    assert [read_text(Path("/dev/zero")), read_text(tmp_path), read_text(tmp_path / "missing")] == [None] * 3
    assert find_paths(tmp_path / "missing", "*") == []
    first, second = written(tmp_path / "a", b"\0\0"), written(tmp_path / "b", b"one\0two\0")
    assert read_strings(tmp_path / "missing", first, second) == ["one", "two"]


def test_kilobytes_are_read_line_by_line_and_what_is_no_size_is_passed_over(tmp_path):
    path = written(tmp_path / "x", "Total:  8 kB\nFree: many kB\nHuge: -2 kB\nPages: 7\nOdd: ٣ kB\n".encode())
    assert read_kilobytes(path) == {"Total": 8}


def test_what_is_shown_is_printable_and_short():
    assert sanitise_text(" a\x1b[1m\u202eb\n") == "a[1mb"
    assert sanitise_text("\x07") is sanitise_text(None) is None
    assert len(sanitise_text("x" * 9999) or "") == 200
