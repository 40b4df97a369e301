"""How a board sends: to whom alone, and what it does when the answer does not come."""

import socket
import time

import pytest
from peer_boards import HASTY, PATIENCE_S, PATIENT, direct_threads, eventually, hear, is_closed, say

from edgefl.coordinator import pki
from edgefl.device.peers import sender
from edgefl.device.peers.peer_connection import FrameKind, PeerTimeouts, read_frame


def confirm(connection):
    """Takes the next message and says so."""
    frame = hear(connection)
    say(connection, FrameKind.ACK, session=frame.session, number=frame.number)
    return frame.payload


def test_what_was_not_confirmed_comes_again_unless_it_is_a_state_and_there_is_a_newer_one(peers):
    b = peers.fake("b")
    a = peers.board("a", ["b"], hosts={"b": b.address})

    def brings(connection):
        """What comes without being confirmed; the connection is lost."""
        frame = hear(connection)
        connection.close()
        return frame

    a.carrier.send("b", b"1")
    lost, again = brings(b.welcome()), brings(b.welcome())
    assert (again.session, again.number, again.payload) == (lost.session, lost.number, b"1")
    assert a.carrier.counters.delivered == 0
    connection = b.welcome()
    hear(connection)
    a.carrier.send("b", b"2")
    connection.close()
    connection = b.welcome()
    newer = hear(connection)
    assert (newer.number, newer.payload, a.carrier.counters.superseded) == (lost.number + 1, b"2", 1)
    say(connection, FrameKind.ACK, session=newer.session, number=newer.number)
    a.carrier.send("b", b"answer 1", is_reply=True)
    hear(connection)
    a.carrier.send("b", b"state")
    a.carrier.send("b", b"answer 2", is_reply=True)
    connection.close()
    last = b.welcome()
    assert [confirm(last) for _ in range(3)] == [b"answer 1", b"answer 2", b"state"]
    eventually(lambda: a.carrier.counters.delivered == 4)


@pytest.mark.parametrize("certificate", ["another fleet's", "the coordinator's"])
def test_nothing_is_sent_to_who_has_no_device_certificate_of_the_fleet(peers, certificate):
    foreign = pki.issue_client_certificate(pki.create_authority("lab"), "b")
    server = pki.issue_server_certificate(peers.authority, ["b"])
    b = peers.fake("b")
    b._tls.server_context.load_cert_chain(*_files(peers, foreign if certificate == "another fleet's" else server))
    a = peers.board("a", ["b"], hosts={"b": b.address})
    a.carrier.send("b", b"secret")
    assert is_closed(b.welcome())
    eventually(lambda: a.carrier.counters.refused >= 1)


def _files(peers, certificate):
    tls = peers.tls("b", certificate=certificate)
    return tls.cert, tls.key


@pytest.mark.parametrize("greeting", [None, FrameKind.KEEP_ALIVE, FrameKind.ACK])
def test_nothing_is_sent_to_a_neighbour_that_does_not_begin_with_welcome(peers, greeting):
    b = peers.fake("b")
    a = peers.board("a", ["b"], hosts={"b": b.address}, pace=HASTY)
    a.carrier.send("b", b"1")
    connection = b.accept()
    if greeting is not None:
        say(connection, greeting)
    assert connection.recv(1024) == b""
    assert not a.carrier.list_connected_peers()
    assert confirm(b.welcome()) == b"1"


def test_a_confirmation_of_another_message_confirms_nothing(peers):
    b = peers.fake("b")
    a = peers.board("a", ["b"], hosts={"b": b.address})
    a.carrier.send("b", b"1")
    connection = b.welcome()
    frame = hear(connection)
    say(connection, FrameKind.ACK, session=frame.session, number=frame.number + 1)
    assert is_closed(connection)
    assert confirm(b.welcome()) == b"1"


def test_a_neighbour_that_no_longer_answers_is_given_up_in_time(peers):
    b = peers.fake("b")
    a = peers.board("a", ["b"], hosts={"b": b.address}, pace=HASTY)
    connection = b.welcome()
    eventually(a.carrier.list_connected_peers)
    started_s = time.monotonic()
    eventually(lambda: not a.carrier.list_connected_peers())
    assert time.monotonic() - started_s < 10 * HASTY.idle_timeout_s
    assert is_closed(connection)


def test_a_neighbour_that_is_at_it_for_long_is_not_given_up_while_it_gives_signs_of_life(peers):
    b = peers.fake("b")
    pace = PeerTimeouts(keep_alive_s=0.1, idle_timeout_s=1.0, max_backoff_s=0.2)
    a = peers.board("a", ["b"], hosts={"b": b.address}, pace=pace)
    a.carrier.send("b", b"long")
    connection = b.welcome()
    frame = hear(connection)
    until_s = time.monotonic() + 1.5 * pace.idle_timeout_s
    while time.monotonic() < until_s:
        say(connection, FrameKind.KEEP_ALIVE)
        time.sleep(pace.idle_timeout_s / 10)
    say(connection, FrameKind.ACK, session=frame.session, number=frame.number)
    eventually(lambda: a.carrier.counters.delivered == 1)
    assert len(b.accepted) == 1


def test_a_neighbour_is_left_when_its_edge_is_removed(peers):
    b = peers.fake("b")
    a = peers.board("a", ["b"], hosts={"b": b.address}, pace=PATIENT)
    connection = b.welcome()
    eventually(a.carrier.list_connected_peers)
    own = a.carrier._senders["b"]._connection
    assert own is not None
    assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "small messages wait for full packets"
    a.carrier.set_peers([])
    assert is_closed(connection)
    eventually(lambda: "direct-to-b" not in direct_threads())


def test_an_idle_connection_carries_signs_of_life(peers):
    b = peers.fake("b")
    a = peers.board("a", ["b"], hosts={"b": b.address}, pace=PeerTimeouts(keep_alive_s=0.05))
    connection = b.welcome()
    for _ in range(3):
        frame = read_frame(connection, idle_timeout_s=PATIENCE_S)
        assert frame.kind is FrameKind.KEEP_ALIVE
        say(connection, FrameKind.KEEP_ALIVE)
    assert a.carrier.list_connected_peers() == {"b"}


def test_a_neighbour_that_breaks_off_at_once_is_tried_less_and_less_often(peers):
    b = peers.fake("b")
    a = peers.board("a", ["b"], hosts={"b": b.address}, pace=PeerTimeouts(keep_alive_s=0.01, max_backoff_s=60.0))
    a.carrier.send("b", b"1")
    connection = b.welcome()
    started_s = time.monotonic()
    for _ in range(3):
        connection.close()
        connection = b.welcome()
    # At least half of the waits, which are 0.2, 0.4 and 0.8 s.
    assert time.monotonic() - started_s > 0.69
    assert confirm(connection) == b"1"


def test_a_board_without_memory_for_a_moment_dials_again(peers, monkeypatch):
    wrapped = sender.wrap_tls
    shortages = [MemoryError(), MemoryError()]

    def wrap_unless_short(plain, *rest, **options):
        if shortages:
            plain.close()
            raise shortages.pop()
        return wrapped(plain, *rest, **options)

    monkeypatch.setattr(sender, "wrap_tls", wrap_unless_short)
    a, b = peers.pair()
    a.carrier.send("b", b"state")
    b.wait_for(b"state")
