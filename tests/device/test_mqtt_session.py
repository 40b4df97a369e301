from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgefl.coordinator import pki
from edgefl.coordinator.brokers.broker import Broker, BrokerAddress, BrokerTls
from edgefl.coordinator.brokers.choice import make_broker
from edgefl.device.link import Link, LinkCallbacks, LinkIdentity, LinkPace
from edgefl.device.mqtt_session import LinkTls
from edgefl.local_fleet import free_port
from edgefl.protocol import Heartbeat

BUSY_S = 1.5


class Fleet:
    def __init__(self, root: Path) -> None:
        authority = pki.create_authority("lab")
        self._root = root
        self.server = BrokerTls(**self._files("server", authority, pki.issue_server(authority, ["127.0.0.1"])))
        self.device = LinkTls(**self._files("pi", authority, pki.issue_client(authority, "pi")))

    def _files(self, name: str, authority: pki.KeyPair, pair: pki.KeyPair) -> dict[str, Path]:
        content = {"ca": authority.cert_pem, "cert": pair.cert_pem, "key": pair.key_pem}
        for kind, pem in content.items():
            (self._root / f"{name}.{kind}").write_bytes(pem)
        return {kind: self._root / f"{name}.{kind}" for kind in content}


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


@pytest.fixture
def address(fleet: Fleet, tmp_path: Path) -> Iterator[BrokerAddress]:
    broker: Broker = make_broker(
        "auto", directory=tmp_path / "b", fleet="lab", tls=fleet.server, host="127.0.0.1", port=free_port()
    )
    yield broker.start()
    broker.stop()


def test_threads_that_publish_at_once_do_not_tear_the_connection(fleet: Fleet, address: BrokerAddress) -> None:
    sessions: list[int] = []
    link = Link(
        [(address.host, address.port)],
        fleet.device,
        LinkIdentity(fleet="lab", device_id="pi", boot_id="b", version="0.1.0"),
        LinkCallbacks(on_bell=lambda: None, on_command=lambda _: None),
        next_session_no=lambda: sessions.append(1) or len(sessions),  # type: ignore[func-returns-value] # append, then count
    )
    link.start()
    try:
        assert link.wait_connected(60)
        until_s = time.monotonic() + BUSY_S
        _together(until_s, lambda: link.publish_heartbeat(Heartbeat(seq=1, session_no=0, uptime_s=1.0)))
        assert link.is_connected()
    finally:
        link.stop()
    assert len(sessions) == 1


def _together(until_s: float, beat: object) -> None:
    def busy(link_call: object) -> None:
        while time.monotonic() < until_s:
            for _ in range(50):
                link_call()  # type: ignore[operator] # a call without arguments
            time.sleep(0.001)

    threads = [threading.Thread(target=busy, args=(beat,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


SLOW_BYTES = 600_000
PIECE_BYTES = 10_000
KEEP_ALIVE_S = 2


class SlowUplink:
    """Passes a piece up to the broker every 0.1 s and everything down at once; nothing while it is `clogged`."""

    def __init__(self, address: BrokerAddress) -> None:
        self._there = (address.host, address.port)
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE_BYTES)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.port = int(self._listener.getsockname()[1])
        self.clogged, self._ended = threading.Event(), threading.Event()
        self.num_bytes = 0
        self._closers = contextlib.ExitStack()
        self._thread = self._start(self._accept)

    def close(self) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self._closers.close()

    def _start(self, work: Callable[..., None], *arguments: socket.socket) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        thread.start()
        return thread

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                board = self._closers.enter_context(self._listener.accept()[0])
                broker = self._closers.enter_context(socket.create_connection(self._there))
                self._start(self._up, board, broker)
                self._start(self._down, broker, board)

    def _up(self, board: socket.socket, broker: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not self._ended.wait(0.1):
                piece = b"" if self.clogged.is_set() else board.recv(PIECE_BYTES)
                broker.sendall(piece)
                self.num_bytes += len(piece)

    def _down(self, broker: socket.socket, board: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := broker.recv(65536):
                board.sendall(b"" if self.clogged.is_set() else piece)


@pytest.fixture
def uplink(address: BrokerAddress) -> Iterator[SlowUplink]:
    uplink = SlowUplink(address)
    yield uplink
    uplink.close()


@pytest.fixture
def slow_link(fleet: Fleet, uplink: SlowUplink) -> Iterator[tuple[Link, list[int]]]:
    sessions: list[int] = []
    link = Link(
        [("127.0.0.1", uplink.port)],
        fleet.device,
        LinkIdentity(fleet="lab", device_id="pi", boot_id="b"),
        LinkCallbacks(on_bell=lambda: None, on_command=lambda _: None),
        next_session_no=lambda: sessions.append(1) or len(sessions),  # type: ignore[func-returns-value] # append, then count
        pace=LinkPace(keep_alive_s=KEEP_ALIVE_S, max_backoff_s=0.2),
    )
    link.start()
    assert link.wait_connected(60)
    yield link, sessions
    uplink.clogged.clear()
    link.stop()


def _eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_a_packet_that_takes_longer_than_the_keep_alive_arrives(
    uplink: SlowUplink, slow_link: tuple[Link, list[int]]
) -> None:
    link, sessions = slow_link
    started_s = time.monotonic()
    link.publish_peer("pi-2", bytes(SLOW_BYTES))
    _eventually(lambda: uplink.num_bytes > SLOW_BYTES)
    assert time.monotonic() - started_s > 2.5 * KEEP_ALIVE_S
    assert len(sessions) == 1


def test_a_broker_that_takes_nothing_more_is_left_all_the_same(
    uplink: SlowUplink, slow_link: tuple[Link, list[int]]
) -> None:
    link, sessions = slow_link
    link.publish_peer("pi-2", bytes(SLOW_BYTES))
    _eventually(lambda: uplink.num_bytes > SLOW_BYTES / 8)
    uplink.clogged.set()
    _eventually(lambda: not link.is_connected(), 4 * KEEP_ALIVE_S)
    uplink.clogged.clear()
    _eventually(lambda: len(sessions) > 1 and link.is_connected())
