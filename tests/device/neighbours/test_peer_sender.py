"""How a board sends: to whom alone, and what it does when the answer does not come."""

from __future__ import annotations

import socket
import ssl
import time
from typing import Any

import pytest
from peer_boards import HASTY, PATIENCE_S, PATIENT, PeerFleet, direct_threads, eventually, hear, is_closed, say

from edgefl.coordinator import pki
from edgefl.device.neighbours import peer_sender
from edgefl.device.neighbours.direct import PeerPace
from edgefl.device.neighbours.peer_frames import FrameKind, read_frame


def confirm(connection: ssl.SSLSocket) -> bytes:
    """Takes the next message and says so."""
    frame = hear(connection)
    say(connection, FrameKind.TAKEN, session=frame.session, number=frame.number)
    return frame.payload


def test_a_message_that_was_not_confirmed_comes_again_under_the_same_number(peers: PeerFleet) -> None:
    b = peers.fake("b")
    a = peers.board("a", ["b"], hosts={"b": b.address})
    a.carrier.send("b", b"1")
    first = b.welcome()
    lost = hear(first)
    first.close()
    again = hear(b.welcome())
    assert (again.session, again.number, again.payload) == (lost.session, lost.number, b"1")
    assert a.carrier.counts.delivered == 0


def test_a_newer_state_goes_before_one_that_was_not_confirmed(peers: PeerFleet) -> None:
    b = peers.fake("b")
    a = peers.board("a", ["b"], hosts={"b": b.address})
    a.carrier.send("b", b"1")
    first = b.welcome()
    lost = hear(first)
    a.carrier.send("b", b"2")
    first.close()
    newer = hear(b.welcome())
    assert (newer.number, newer.payload) == (lost.number + 1, b"2")
    assert a.carrier.counts.superseded == 1


def test_an_answer_that_was_not_confirmed_goes_before_everything_newer(peers: PeerFleet) -> None:
    b = peers.fake("b")
    a = peers.board("a", ["b"], hosts={"b": b.address})
    a.carrier.send("b", b"answer 1", keep_all=True)
    first = b.welcome()
    hear(first)
    a.carrier.send("b", b"state")
    a.carrier.send("b", b"answer 2", keep_all=True)
    first.close()
    second = b.welcome()
    assert [confirm(second) for _ in range(3)] == [b"answer 1", b"answer 2", b"state"]
    eventually(lambda: a.carrier.counts.delivered == 3)


@pytest.mark.parametrize("certificate", ["another fleet's", "the coordinator's"])
def test_nothing_is_sent_to_who_has_no_device_certificate_of_the_fleet(peers: PeerFleet, certificate: str) -> None:
    foreign = pki.issue_client(pki.create_authority("lab"), "b")
    server = pki.issue_server(peers.authority, ["b"])
    b = peers.fake("b")
    b._tls.listening.load_cert_chain(*_files(peers, foreign if certificate == "another fleet's" else server))
    a = peers.board("a", ["b"], hosts={"b": b.address})
    a.carrier.send("b", b"secret")
    assert is_closed(b.welcome())
    eventually(lambda: a.carrier.counts.refused >= 1)


def _files(peers: PeerFleet, certificate: pki.KeyPair) -> tuple[object, object]:
    tls = peers.tls("b", certificate=certificate)
    return tls.cert, tls.key


def test_nothing_is_sent_before_the_neighbour_has_let_us_in(peers: PeerFleet) -> None:
    b = peers.fake("b")
    a = peers.board("a", ["b"], hosts={"b": b.address}, pace=HASTY)
    a.carrier.send("b", b"1")
    connection = b.accept()
    assert connection.recv(1024) == b""
    assert not a.carrier.reachable()
    assert confirm(b.welcome()) == b"1"


@pytest.mark.parametrize("greeting", [FrameKind.ALIVE, FrameKind.TAKEN])
def test_a_neighbour_that_begins_with_something_else_than_welcome_is_left(
    peers: PeerFleet, greeting: FrameKind
) -> None:
    b = peers.fake("b")
    a = peers.board("a", ["b"], hosts={"b": b.address})
    a.carrier.send("b", b"1")
    connection = b.accept()
    say(connection, greeting)
    assert connection.recv(1024) == b""
    assert confirm(b.welcome()) == b"1"


def test_a_confirmation_of_another_message_confirms_nothing(peers: PeerFleet) -> None:
    b = peers.fake("b")
    a = peers.board("a", ["b"], hosts={"b": b.address})
    a.carrier.send("b", b"1")
    connection = b.welcome()
    frame = hear(connection)
    say(connection, FrameKind.TAKEN, session=frame.session, number=frame.number + 1)
    assert is_closed(connection)
    assert confirm(b.welcome()) == b"1"


def test_a_neighbour_that_no_longer_answers_is_given_up_in_time(peers: PeerFleet) -> None:
    b = peers.fake("b")
    a = peers.board("a", ["b"], hosts={"b": b.address}, pace=HASTY)
    connection = b.welcome()
    eventually(a.carrier.reachable)
    started_s = time.monotonic()
    eventually(lambda: not a.carrier.reachable())
    assert time.monotonic() - started_s < 10 * HASTY.silence_s
    assert is_closed(connection)


def test_a_neighbour_that_is_at_it_for_long_is_not_given_up_while_it_gives_signs_of_life(peers: PeerFleet) -> None:
    b = peers.fake("b")
    pace = PeerPace(keep_alive_s=0.2, silence_s=2.0, max_backoff_s=0.2)
    a = peers.board("a", ["b"], hosts={"b": b.address}, pace=pace)
    a.carrier.send("b", b"long")
    connection = b.welcome()
    frame = hear(connection)
    until_s = time.monotonic() + 1.5 * pace.silence_s
    while time.monotonic() < until_s:
        say(connection, FrameKind.ALIVE)
        time.sleep(pace.silence_s / 10)
    say(connection, FrameKind.TAKEN, session=frame.session, number=frame.number)
    eventually(lambda: a.carrier.counts.delivered == 1)
    assert len(b.accepted) == 1


def test_a_neighbour_is_left_when_its_edge_is_removed(peers: PeerFleet) -> None:
    b = peers.fake("b")
    a = peers.board("a", ["b"], hosts={"b": b.address}, pace=PATIENT)
    connection = b.welcome()
    eventually(a.carrier.reachable)
    a.carrier.set_neighbours([])
    assert is_closed(connection)
    eventually(lambda: "direct-to-b" not in direct_threads())


def test_small_messages_do_not_wait_for_full_packets(peers: PeerFleet) -> None:
    b = peers.fake("b")
    a = peers.board("a", ["b"], hosts={"b": b.address})
    b.welcome()
    eventually(a.carrier.reachable)
    connection = a.carrier._senders["b"]._connection
    assert connection is not None
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_idle_connection_carries_signs_of_life(peers: PeerFleet) -> None:
    b = peers.fake("b")
    a = peers.board("a", ["b"], hosts={"b": b.address}, pace=PeerPace(keep_alive_s=0.05))
    connection = b.welcome()
    for _ in range(3):
        frame = read_frame(connection, silence_s=PATIENCE_S)
        assert frame.kind is FrameKind.ALIVE
        say(connection, FrameKind.ALIVE)
    assert a.carrier.reachable() == {"b"}


def test_a_neighbour_that_breaks_off_at_once_is_tried_less_and_less_often(peers: PeerFleet) -> None:
    b = peers.fake("b")
    a = peers.board("a", ["b"], hosts={"b": b.address}, pace=PeerPace(keep_alive_s=0.01, max_backoff_s=60.0))
    a.carrier.send("b", b"1")
    connection = b.welcome()
    started_s = time.monotonic()
    for _ in range(3):
        connection.close()
        connection = b.welcome()
    # At least half of the waits, which are 0.2, 0.4 and 0.8 s.
    assert time.monotonic() - started_s > 0.69
    assert confirm(connection) == b"1"


def test_a_board_without_memory_for_a_moment_dials_again(peers: PeerFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = peer_sender.wrap
    shortages = [MemoryError(), MemoryError()]

    def wrap_unless_short(plain: socket.socket, *rest: Any, **options: Any) -> ssl.SSLSocket:
        if shortages:
            plain.close()
            raise shortages.pop()
        return wrapped(plain, *rest, **options)

    monkeypatch.setattr(peer_sender, "wrap", wrap_unless_short)
    a, b = peers.pair()
    a.carrier.send("b", b"state")
    b.wait_for(b"state")
