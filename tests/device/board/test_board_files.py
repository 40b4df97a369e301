"""Files of a board, read as a doubter does."""

from pathlib import Path

import pytest

from edgefl.device.board.board_files import MAX_FILE_BYTES, below, kilobytes, number, plain, strings, text


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
    assert number(written(tmp_path / "x", content)) == value


def test_a_file_without_end_is_read_to_a_limit_and_what_is_none_says_nothing(tmp_path):
    told = text(written(tmp_path / "x", b"a" * (4 * MAX_FILE_BYTES)))
    assert told is not None
    assert len(told) == MAX_FILE_BYTES
    assert [text(Path("/dev/zero")), text(tmp_path), text(tmp_path / "missing")] == [None] * 3
    assert below(tmp_path / "missing", "*") == []
    first, second = written(tmp_path / "a", b"\0\0"), written(tmp_path / "b", b"one\0two\0")
    assert strings(tmp_path / "missing", first, second) == ["one", "two"]


def test_kilobytes_are_read_line_by_line_and_what_is_no_size_is_passed_over(tmp_path):
    path = written(tmp_path / "x", "Total:  8 kB\nFree: many kB\nHuge: -2 kB\nPages: 7\nOdd: ٣ kB\n".encode())
    assert kilobytes(path) == {"Total": 8}


def test_what_is_shown_is_printable_and_short():
    assert plain(" a\x1b[1m\u202eb\n") == "a[1mb"
    assert plain("\x07") is plain(None) is None
    assert len(plain("x" * 9999) or "") == 200
