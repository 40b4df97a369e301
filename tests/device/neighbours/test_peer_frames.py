import socket

import pytest

from edgefl.device.neighbours.peer_frames import Frame, FrameKind, read_frame, write_frame
from edgefl.errors import NetworkError

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    "frame",
    [
        Frame(kind=FrameKind.WELCOME),
        Frame(kind=FrameKind.MESSAGE, session=2**64 - 1, number=3, payload=b"hello"),
        Frame(kind=FrameKind.MESSAGE, session=1, number=2**64 - 1),
        Frame(kind=FrameKind.MESSAGE, payload=bytes(range(256)) * 200),
        Frame(kind=FrameKind.TAKEN, session=1, number=3),
        Frame(kind=FrameKind.ALIVE),
    ],
)
def test_a_frame_is_read_as_it_was_written(pair, frame):
    write_frame(pair[0], frame, silence_s=5.0)
    assert read_frame(pair[1], silence_s=5.0) == frame


def test_the_bytes_of_a_frame_are_these(pair):
    write_frame(pair[0], Frame(kind=FrameKind.MESSAGE, session=5, number=258, payload=b"hi"), silence_s=5.0)
    sent = pair[1].recv(100)
    assert sent.hex(" ") == (
        "45 46 4c 50 01 00 02 00 02 00 00 00 05 00 00 00 00 00 00 00 02 01 00 00 00 00 00 00 68 69"
    )


def test_a_damaged_header_is_refused_at_every_byte_that_has_one_meaning(pair):
    write_frame(pair[0], Frame(kind=FrameKind.MESSAGE), silence_s=5.0)
    valid = pair[1].recv(100)
    for place in (*range(8), 11):  # magic, version, kind, and the length's highest byte
        damaged = bytearray(valid)
        damaged[place] ^= 0x80
        ends = socket.socketpair()
        with ends[0], ends[1]:
            ends[0].sendall(damaged)
            with pytest.raises(NetworkError):
                read_frame(ends[1], silence_s=5.0)


def test_a_frame_that_breaks_off_is_told_from_one_that_is_late(pair):
    write_frame(pair[0], Frame(kind=FrameKind.MESSAGE, payload=b"12345"), silence_s=5.0)
    whole = pair[1].recv(100)
    pair[0].sendall(whole[:-1])
    with pytest.raises(TimeoutError):
        read_frame(pair[1], silence_s=0.05)
    pair[0].sendall(whole[:-1])
    pair[0].close()
    with pytest.raises(ConnectionError, match="closed the connection"):
        read_frame(pair[1], silence_s=5.0)
