"""Boards of one fleet that talk to each other directly, over real sockets and TLS; and what pretends to be one."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from edgefl.coordinator import pki
from edgefl.device.peers.peer_connection import (
    FrameKind,
    PeerTimeouts,
    PeerTls,
    TransportFrame,
    read_frame,
    wrap_tls,
    write_frame,
)
from edgefl.device.peers.transports import TlsPeerTransport
from edgefl.system.atomic_files import TlsFiles

LOOPBACK = "127.0.0.1"
PATIENCE_S = 60.0
# Comes back fast, and is not taken for dead on a busy machine.
BRISK = PeerTimeouts(keep_alive_s=0.2, idle_timeout_s=10.0, max_backoff_s=0.2)
# Never gives up by itself, nor says anything unasked.
PATIENT = PeerTimeouts(keep_alive_s=60.0, idle_timeout_s=60.0)
# Gives up fast too.
HASTY = PeerTimeouts(keep_alive_s=0.1, idle_timeout_s=0.6, max_backoff_s=0.2)

Address = tuple[str, int]


def eventually(condition: Callable[[], Any], what: str = "", timeout_s: float = PATIENCE_S) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, f"{what or 'it'} did not happen within {timeout_s} s"
        time.sleep(0.005)


def direct_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("direct-")]


class Board:
    """A carrier, and what it was brought; while `gate` is closed it is busy with its first message."""

    def __init__(self, carrier_options: Mapping[str, Any]) -> None:
        self.received: list[tuple[str, bytes]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.name: str = carrier_options["device_id"]
        self.carrier = TlsPeerTransport(**carrier_options, on_message=self._take)

    @property
    def address(self) -> Address:
        return self.carrier.address

    def payloads(self) -> list[bytes]:
        return [payload for _, payload in self.received]

    def wait_for(self, *payloads: bytes) -> None:
        eventually(lambda: set(payloads) <= set(self.payloads()), f"delivery to {self.name}")

    def _take(self, sender: str, payload: bytes) -> None:
        self.received.append((sender, payload))
        self.gate.wait(PATIENCE_S)


class FakeBoard:
    """Listens with the certificate of a device; the test decides what it says."""

    def __init__(self, tls: PeerTls) -> None:
        self._tls = tls
        self._server = socket.create_server((LOOPBACK, 0))
        self._server.settimeout(PATIENCE_S)
        self.address: Address = self._server.getsockname()[:2]
        self.accepted: list[ssl.SSLSocket] = []

    def accept(self) -> ssl.SSLSocket:
        """The next connection, after its handshake."""
        plain, _ = self._server.accept()
        plain.settimeout(PATIENCE_S)
        connection = wrap_tls(plain, self._tls.server_context, is_server=True)
        self.accepted.append(connection)
        connection.do_handshake()
        return connection

    def welcome(self) -> ssl.SSLSocket:
        """The next connection, let in."""
        connection = self.accept()
        say(connection, FrameKind.WELCOME)
        return connection

    def close(self) -> None:
        for part in (self._server, *self.accepted):
            part.close()


class PeerFleet:
    """Makes certificates and boards, and stops them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.authority = pki.create_authority("lab")
        self._open: list[Any] = []

    def tls(
        self, name: str, *, authority: pki.KeyPair | None = None, certificate: pki.KeyPair | None = None
    ) -> TlsFiles:
        """Files of a device of this fleet; or with another CA, or another certificate."""
        authority = authority or self.authority
        pair = certificate or pki.issue_client_certificate(authority, name)
        folder = self.root / f"{name}-{pki.get_serial(pair.cert_pem)}"
        folder.mkdir(exist_ok=True)
        for kind, pem in (("ca", authority.cert_pem), ("cert", pair.cert_pem), ("key", pair.key_pem)):
            (folder / kind).write_bytes(pem)
        return TlsFiles(ca=folder / "ca", cert=folder / "cert", key=folder / "key")

    def board(
        self,
        name: str,
        neighbours: Collection[str] = (),
        *,
        hosts: Mapping[str, Address] | None = None,
        listen: Address = (LOOPBACK, 0),
        pace: PeerTimeouts = BRISK,
        tls: TlsFiles | None = None,
    ) -> Board:
        """A board that has started."""
        board = Board(
            {
                "device_id": name,
                "tls": tls or self.tls(name),
                "listen": listen,
                "addresses": hosts or {},
                "peers": neighbours,
                "timeouts": pace,
            }
        )
        board.carrier.start()
        self._open.append(board)
        return board

    def pair(self, pace: PeerTimeouts = BRISK) -> tuple[Board, Board]:
        """Two neighbours, a and b, that know each other's address."""
        boards = self.board("a", ["b"], pace=pace), self.board("b", ["a"], pace=pace)
        introduce(boards)
        return boards

    def fake(self, name: str, *, tls: TlsFiles | None = None) -> FakeBoard:
        fake = FakeBoard(PeerTls.load(tls or self.tls(name), name))
        self._open.append(fake)
        return fake

    def dial(self, name: str, board: Board, *, tls: TlsFiles | None = None) -> ssl.SSLSocket:
        """A connection to a board with the certificate of a device, after the handshake."""
        plain = socket.create_connection(board.address, timeout=PATIENCE_S)
        context = _raw_context(tls or self.tls(name))
        connection = wrap_tls(plain, context, is_server=False)
        self._open.append(connection)
        connection.do_handshake()
        return connection

    def enter(self, name: str, board: Board) -> ssl.SSLSocket:
        """The same, once the board has let it in."""
        connection = self.dial(name, board)
        assert hear(connection).kind is FrameKind.WELCOME
        return connection

    def close(self) -> None:
        for part in self._open:
            if isinstance(part, Board):
                part.gate.set()
                part.carrier.stop()
            else:
                part.close()


def introduce(boards: Iterable[Board]) -> None:
    hosts = {board.name: board.address for board in boards}
    for board in boards:
        board.carrier.set_addresses(hosts)


def say(connection: ssl.SSLSocket, kind: FrameKind, **content: Any) -> None:
    write_frame(connection, TransportFrame(kind=kind, **content), idle_timeout_s=PATIENCE_S)


def hear(connection: ssl.SSLSocket) -> TransportFrame:
    """The next frame that is no mere sign of life."""
    while (frame := read_frame(connection, idle_timeout_s=PATIENCE_S)).kind is FrameKind.KEEP_ALIVE:
        pass
    return frame


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end closes this connection, after waiting for that; what it says before is passed over."""
    connection.settimeout(PATIENCE_S)
    try:
        while connection.recv(1024):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def _raw_context(tls: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.load_cert_chain(tls.cert, tls.key)
    return context
