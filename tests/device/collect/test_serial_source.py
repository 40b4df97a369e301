"""Lines of a serial port, which is a pseudo-terminal here: half ones, noise, and a port that is unplugged."""

import contextlib
import fcntl
import math
import os
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from peer_boards import eventually

from edgefl.core.errors import ConfigError
from edgefl.device.collect import serial_source
from edgefl.device.collect.serial_source import MAX_LINE_BYTES, SerialSource
from edgefl.device.collect.settings import SerialSection

TIOCGEXCL = 0x80045440
"""Of Linux's ioctl: whether only one may open the port; the module termios lacks it."""
pytestmark = pytest.mark.timeout(60)


class Board:
    """A microcontroller at a port whose name stays, as those below /dev/serial/by-id do."""

    def __init__(self, path):
        self.path, self.handle, self.port = path, None, None

    def plug(self):
        self.handle, self.port = os.openpty()
        self.path.symlink_to(os.ttyname(self.port))

    def unplug(self):
        os.close(self.handle)
        os.close(self.port)
        self.path.unlink()

    def send(self, content):
        while content:
            content = content[os.write(self.handle, content) :]


@contextlib.contextmanager
def _source(tmp_path, columns, texts=()):
    counts = Counter()
    section = SerialSection(path=str(tmp_path / "port"), columns=columns)
    source = SerialSource("board", section, texts, counts)
    source.start()
    try:
        yield source, counts
    finally:
        source.close()


@pytest.fixture
def board(tmp_path, monkeypatch):
    monkeypatch.setattr(serial_source, "RETRY_S", 0.05)
    monkeypatch.setattr(serial_source, "WAIT_S", 0.05)
    board = Board(tmp_path / "port")
    board.plug()
    yield board
    board.unplug()


def _wait_for(source, count):
    """Returns the values of the next readings, of which there are so many."""
    found = []

    def has_all():
        found.extend(dict(reading.values) for reading in source.read())
        return len(found) >= count

    eventually(has_all)
    return found


def _count_open():
    """Returns the number of this process's threads and open files."""
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


def _is_open(source):
    return source.received_since_s < math.inf


def test_lines_of_cells_and_of_json_are_readings_and_the_rest_of_a_line_before_them_is_none(board, tmp_path):
    with _source(tmp_path, {"a": "#/0", "b": "#/1"}) as (source, counts):
        eventually(lambda: _is_open(source))
        board.send(b"9,9\r\n1,2.5\r\n3,5; 4\n\n5\t 6\r\n 7  8 \n[9, 10]\n11 , 12,\n")
        expected = [(1, 2.5), (3.5, 4), (5, 6), (7, 8), (9, 10), (11, 12)]
        assert _wait_for(source, 6) == [{"a": a, "b": b} for a, b in expected]
        assert not counts
        assert fcntl.ioctl(board.port, TIOCGEXCL, bytes(4)) != bytes(4), "another program could read along"
    with _source(tmp_path, {"t": "#/t", "door": "#/door"}, ("door",)) as (source, counts):
        eventually(lambda: _is_open(source))
        board.send(b'\n{"t": 21.5, "door": "open"}\n{"t": 22}\n')
        assert _wait_for(source, 2) == [{"t": 21.5, "door": "open"}, {"t": 22.0}]


def test_an_empty_cell_keeps_its_place(board, tmp_path):
    with _source(tmp_path, {"a": "#/0", "c": "#/2"}, ("a",)) as (source, counts):
        eventually(lambda: _is_open(source))
        board.send(b"\n1\t\t2\r\n1,,2\n1; ;2\n\t5\t6\n5\t6\t\r\n5,6,\n1,2\t3\t4,5\n")
        rows = [("1", 2.0)] * 3 + [(None, 6.0)] + [("5", None)] * 2
        assert _wait_for(source, 6) == [{"a": a, "c": c} for a, c in rows]
        eventually(lambda: counts == {"board.refused": 1})


def test_a_line_comes_whole_in_whatever_pieces_it_is_sent(board, tmp_path):
    with _source(tmp_path, {"a": "#/0"}) as (source, _):
        eventually(lambda: _is_open(source))
        board.send(b"\n12")
        time.sleep(0.2)
        assert source.read() == []
        board.send(b"34\n5")
        assert _wait_for(source, 1) == [{"a": 1234.0}]


def test_noise_and_half_lines_are_counted_and_make_no_values(board, tmp_path):
    with _source(tmp_path, {"a": "#/0", "b": "#/1"}) as (source, counts):
        eventually(lambda: _is_open(source))
        board.send(b"\n1,2\n\xff\xfe\x80,3\n4\n5,six\n{\n1e999,2\n" + b"x" * (MAX_LINE_BYTES + 1) + b"\n")
        board.send(b"y" * 3 * MAX_LINE_BYTES + b"\n7,8\n")
        assert _wait_for(source, 2) == [{"a": 1.0, "b": 2.0}, {"a": 7.0, "b": 8.0}]
        assert counts == {"board.refused": 5, "board.too_long": 2}


def test_a_port_that_is_unplugged_is_read_again_once_it_is_back_and_its_half_line_is_gone(board, tmp_path):
    with _source(tmp_path, {"a": "#/0"}) as (source, counts):
        eventually(lambda: _is_open(source))
        board.send(b"\n1\n23")
        assert _wait_for(source, 1) == [{"a": 1.0}]
        assert source.received_since_s == pytest.approx(time.time(), abs=30)
        board.unplug()
        eventually(lambda: not _is_open(source) and counts["board.errors"] > 0)
        board.plug()
        eventually(lambda: _is_open(source))
        board.send(b"45\n6\n")
        assert _wait_for(source, 1) == [{"a": 6.0}]


def test_what_is_no_port_is_waited_for_and_leaves_no_thread_and_no_open_file(tmp_path, monkeypatch):
    monkeypatch.setattr(serial_source, "RETRY_S", 0.01)
    (tmp_path / "port").write_text("1\n2\n")
    before = _count_open()
    with _source(tmp_path, {"a": "#/0"}) as (source, counts):
        eventually(lambda: counts["board.errors"] >= 2)
        assert source.read() == []
    assert _count_open() == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"baud": 12345}, "baud must be one of"), ({"path": "ttyUSB0"}, "absolute"), ({"columns": {"a": "0"}}, "slash")],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        SerialSource(
            "b", SerialSection(**{"path": "/dev/ttyUSB0", "columns": {"a": "#/0"}, **settings}), (), Counter()
        )
