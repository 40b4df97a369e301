import socket

import pytest

from edgefl.device.peers.framing import FrameKind, TransportFrame, read_frame, write_frame

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_the_bytes_of_a_frame_are_these_and_are_read_as_they_were_written(pair):
    frame = TransportFrame(kind=FrameKind.MESSAGE, session=5, number=258, payload=b"hi")
    write_frame(pair[0], frame, idle_timeout_s=5.0)
    sent = pair[1].recv(100)
    assert sent.hex(" ") == (
        "45 46 4c 50 01 00 02 00 02 00 00 00 05 00 00 00 00 00 00 00 02 01 00 00 00 00 00 00 68 69"
    )
    for each in (
        frame,
        TransportFrame(kind=FrameKind.ACK, session=2**64 - 1, number=2**64 - 1),
        TransportFrame(kind=FrameKind.KEEP_ALIVE),
    ):
        write_frame(pair[0], each, idle_timeout_s=5.0)
        assert read_frame(pair[1], idle_timeout_s=5.0) == each


def test_a_frame_that_breaks_off_is_told_from_one_that_is_late(pair):
    write_frame(pair[0], TransportFrame(kind=FrameKind.MESSAGE, payload=b"12345"), idle_timeout_s=5.0)
    whole = pair[1].recv(100)
    pair[0].sendall(whole[:-1])
    with pytest.raises(TimeoutError):
        read_frame(pair[1], idle_timeout_s=0.05)
    pair[0].sendall(whole[:-1])
    pair[0].close()
    with pytest.raises(ConnectionError, match="closed the connection"):
        read_frame(pair[1], idle_timeout_s=5.0)
