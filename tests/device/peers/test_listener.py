"""What a board does with whom it did not invite, and with neighbours that behave badly."""

import contextlib
import errno
import socket
import ssl
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

from peer_boards import HASTY, LOOPBACK, PATIENCE_S, PATIENT, direct_threads, eventually, hear, is_closed, say

from edgefl.coordinator import pki
from edgefl.core.protocol import MAX_PEER_BYTES
from edgefl.device.peers.listener import ACCEPT_RETRY_S, MAX_UNAUTHENTICATED
from edgefl.device.peers.peer_connection import FRAME_VERSION, HEADER, MAGIC, FrameKind, PeerTimeouts

MIB = 2**20


def still_works(peers, board):
    """b brings the board a message, and is told that it was taken."""
    connection = peers.enter("b", board)
    say(connection, FrameKind.MESSAGE, session=99, number=1, payload=b"all is well")
    assert hear(connection).kind is FrameKind.ACK
    assert ("b", b"all is well") in board.received


def header(length, *, magic=MAGIC, version=FRAME_VERSION, kind=2):
    return HEADER.pack(magic, version, kind, length, 7, 1)


def test_memory_grows_with_what_arrives_not_with_what_is_announced(peers):
    a = peers.board("a", ["b"], pace=HASTY)
    for num_malformed, length in ((1, MAX_PEER_BYTES + 1), (2, 2**32 - 1), (2, MAX_PEER_BYTES)):
        connection = peers.enter("b", a)
        tracemalloc.start()
        try:
            connection.sendall(header(length) + b"x" * 1000)
            assert is_closed(connection)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < MIB
        eventually(lambda: a.carrier.counters.malformed == num_malformed)  # noqa: B023 called at once
    still_works(peers, a)


GARBAGE = [
    header(4, magic=b"HTTP") + b"body",
    header(4, version=FRAME_VERSION + 1) + b"body",
    header(4, kind=0) + b"body",
    header(0, kind=9),
    header(4, kind=FrameKind.KEEP_ALIVE) + b"body",
    header(0, kind=FrameKind.ACK),
    header(0, kind=FrameKind.WELCOME),
    b"\xff" * 4096,
]


def test_a_neighbour_that_sends_no_frame_is_cut_off_and_counted(peers):
    a = peers.board("a", ["b"])
    for number, garbage in enumerate(GARBAGE, 1):
        connection = peers.enter("b", a)
        connection.sendall(garbage)
        assert is_closed(connection)
        eventually(lambda: a.carrier.counters.malformed == number, repr(garbage))  # noqa: B023 called at once
    assert a.received == []
    still_works(peers, a)


def test_a_stranger_that_speaks_no_tls_or_has_no_certificate_is_refused(peers):
    a = peers.board("a", ["b"], pace=HASTY)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 500, b"\x16\x03\x01\xff\xff" + b"\x01" * 600):
        with socket.create_connection(a.address) as stranger:
            stranger.sendall(garbage)
            assert is_closed(stranger)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection(a.address) as plain, context.wrap_socket(plain) as stranger:
        assert is_closed(stranger)
    eventually(lambda: a.carrier.counters.refused == 4)
    still_works(peers, a)


def test_a_certificate_of_another_fleet_or_of_the_coordinator_lets_nobody_in(peers):
    a = peers.board("a", ["b"])
    foreign = pki.issue_client_certificate(pki.create_authority("lab"), "b")
    server = pki.issue_server_certificate(peers.authority, ["b"])
    for number, certificate in enumerate((foreign, server), 1):
        connection = peers.dial("b", a, tls=peers.tls("b", certificate=certificate))
        assert is_closed(connection)
        eventually(lambda: a.carrier.counters.refused == number)  # noqa: B023 called at once


def test_a_device_of_the_fleet_that_is_no_neighbour_is_closed_before_it_can_send_and_logged_once(peers, caplog):
    a = peers.board("a", ["b"])
    for _ in range(3):
        connection = peers.dial("c", a)
        with contextlib.suppress(OSError):
            say(connection, FrameKind.MESSAGE, session=7, number=1, payload=b"b says: take this")
        assert is_closed(connection)
    assert (a.received, a.carrier.counters.refused) == ([], 3)
    (line,) = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert line == f"refused a connection of c from {LOOPBACK}: it is no neighbour"


def test_idle_strangers_are_closed_in_time_and_keep_no_neighbour_out(peers):
    a = peers.board("a", ["b"], pace=PeerTimeouts(idle_timeout_s=2.0))
    strangers = [socket.create_connection(a.address) for _ in range(3 * MAX_UNAUTHENTICATED)]
    still_works(peers, a)
    first, last = strangers[0], strangers[-1]
    started_s = time.monotonic()
    assert is_closed(first)
    # The oldest went when others came, the newest when its time was over.
    assert time.monotonic() - started_s < 1.0
    assert is_closed(last)
    for stranger in strangers:
        stranger.close()


def test_whoever_dribbles_or_falls_silent_is_cut_off(peers):
    a = peers.board("a", ["b", "c", "d"], pace=HASTY)
    handshake = socket.create_connection(a.address)
    head, message, silent = (peers.enter(name, a) for name in ("b", "c", "d"))
    message.sendall(header(MAX_PEER_BYTES // 4096))
    dribbles = {
        handshake: b"\x16\x03\x01\x02\x00",
        head: header(0, kind=FrameKind.KEEP_ALIVE),
        message: b"x" * 1000,
        silent: b"",
    }
    with ThreadPoolExecutor() as pool:
        assert max(pool.map(lasts_s, dribbles, dribbles.values())) < 15 * HASTY.idle_timeout_s
    handshake.close()
    assert a.received == []
    still_works(peers, a)


def lasts_s(connection, content):
    """How long the other end takes a byte every tenth of a second, or none at all."""
    started_s = time.monotonic()
    if not content:
        assert is_closed(connection)
    connection.settimeout(0.1)
    for byte in content * 100:
        try:
            connection.sendall(bytes([byte]))
            if not connection.recv(1024):
                break
        except TimeoutError:
            pass
        except OSError:
            break
        assert time.monotonic() - started_s < PATIENCE_S
    return time.monotonic() - started_s


def test_who_gives_a_sign_of_life_or_brings_a_long_message_slowly_hears_that_somebody_listens(peers):
    a = peers.board("a", ["b"], pace=PeerTimeouts(keep_alive_s=0.1))
    connection = peers.enter("b", a)
    connection.sendall(header(0, kind=FrameKind.KEEP_ALIVE))
    assert connection.recv(1024) == header(0, kind=FrameKind.KEEP_ALIVE)
    payload = b"x" * 500_000
    connection.sendall(header(len(payload)))
    connection.settimeout(0.01)
    sent, heard = 0, b""
    while not heard:
        connection.sendall(payload[sent : sent + 1000])
        sent += 1000
        with contextlib.suppress(TimeoutError):
            heard = connection.recv(HEADER.size)
    assert HEADER.unpack(heard)[2] == FrameKind.KEEP_ALIVE
    connection.settimeout(PATIENCE_S)
    connection.sendall(payload[sent:])
    assert hear(connection).kind is FrameKind.ACK
    assert a.payloads() == [payload]


def test_a_message_that_comes_again_is_confirmed_again_but_taken_once(peers):
    a = peers.board("a", ["b"])
    for _ in range(2):
        connection = peers.enter("b", a)
        say(connection, FrameKind.MESSAGE, session=7, number=1, payload=b"1")
        answer = hear(connection)
        assert (answer.kind, answer.session, answer.number) == (FrameKind.ACK, 7, 1)
    say(connection, FrameKind.MESSAGE, session=7, number=2, payload=b"2")
    assert hear(connection).number == 2
    assert a.payloads() == [b"1", b"2"]
    assert a.carrier.counters.repeated == 1
    connection = peers.enter("b", a)  # it has restarted, and counts from one
    say(connection, FrameKind.MESSAGE, session=8, number=1, payload=b"3")
    assert hear(connection).session == 8
    assert a.payloads() == [b"1", b"2", b"3"]


def test_a_neighbour_has_one_connection_the_newest_and_none_when_its_edge_is_removed(peers):
    a = peers.board("a", ["b"], pace=PATIENT)
    older = peers.enter("b", a)
    newer = peers.enter("b", a)
    assert is_closed(older)
    say(newer, FrameKind.MESSAGE, session=7, number=1, payload=b"1")
    assert hear(newer).kind is FrameKind.ACK
    a.carrier.set_peers([])
    assert is_closed(newer)


def test_a_new_connection_waits_until_what_came_over_the_old_one_is_done(peers):
    a = peers.board("a", ["b"])
    a.gate.clear()
    older = peers.enter("b", a)
    say(older, FrameKind.MESSAGE, session=7, number=1, payload=b"1")
    a.wait_for(b"1")
    # The board is at work on the first: the second waits in the old connection, the third in the new one.
    say(older, FrameKind.MESSAGE, session=7, number=2, payload=b"2")
    newer = peers.enter("b", a)
    say(newer, FrameKind.MESSAGE, session=7, number=3, payload=b"3")
    a.gate.set()
    assert hear(newer).number == 3
    assert is_closed(older)
    assert a.payloads() == [b"1", b"3"]


class NotedLock:
    """Tells how many have asked for it."""

    def __init__(self):
        self._lock, self.num_askers = threading.Lock(), 0

    def acquire(self, timeout):
        self.num_askers += 1
        return self._lock.acquire(timeout=timeout)

    def release(self):
        self._lock.release()


def test_what_waits_while_its_edge_is_removed_is_not_taken(peers):
    a = peers.board("a", ["b"])
    a.carrier._listener._received["b"].lock = lock = NotedLock()
    a.gate.clear()
    for number in (1, 2):
        connection = peers.enter("b", a)
        say(connection, FrameKind.MESSAGE, session=7, number=number, payload=b"%d" % number)
        eventually(lambda: lock.num_askers == number)  # noqa: B023 called at once
    a.carrier.set_peers([])
    a.gate.set()
    assert is_closed(connection)
    eventually(lambda: "direct-from-b" not in direct_threads())
    assert a.payloads() == [b"1"]


def test_a_board_that_can_start_no_thread_for_a_moment_takes_neighbours_again(peers, monkeypatch):
    a = peers.board("a", ["b"])
    shortages = [RuntimeError("can't start new thread"), MemoryError(), MemoryError()]
    start, failed_s = threading.Thread.start, []

    def start_unless_short(thread):
        if thread.name == "direct-from-stranger" and shortages:
            failed_s.append(time.monotonic())
            raise shortages.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_unless_short)
    for _ in range(3):
        with socket.create_connection(a.address) as refused:
            assert is_closed(refused)
    assert failed_s[-1] - failed_s[0] >= 2 * ACCEPT_RETRY_S  # it does not spin meanwhile
    still_works(peers, a)


def test_a_board_without_ipv6_listens_at_all_its_ipv4_addresses(peers, monkeypatch):
    create = socket.create_server

    def create_without_ipv6(address, *, family, **options):
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return create(address, family=family, **options)

    monkeypatch.setattr(socket, "create_server", create_without_ipv6)
    a = peers.board("a", ["b"], listen=("::", 0))
    assert a.address[0] == "0.0.0.0"
    monkeypatch.undo()
    with socket.create_connection((LOOPBACK, a.address[1])):
        pass
