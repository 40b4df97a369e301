"""HTTP server of the label page, with bounds for strangers, and what lets a person in: PIN, sessions and TLS.

Whoever reaches the port may connect, so everything is counted before a PIN is asked for: connections, in all and of
one address, bytes of a request, and the time that it takes to come.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import http.client
import io
import ipaddress
import logging
import math
import secrets
import socket
import socketserver
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from edgefl.core.errors import ConfigError

log = logging.getLogger(__name__)

MAX_WRONG, LOCK_S = 5, 60.0
MAX_SESSIONS = 16
MAX_CONNECTIONS, MAX_OF_ADDRESS = 16, 8
REQUEST_S, IDLE_TIMEOUT_S, POLL_S = 20.0, 30.0, 0.2
MAX_BODY_BYTES, MAX_REQUEST_BYTES = 4096, 20_480
CERTIFICATE_DAYS = 396
"""Browsers refuse certificates of more than 398 days."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_ELSEWHERE = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}  # noqa: S104 not to listen on
"""Addresses of nobody (RFC 5737, RFC 3849), by that of all interfaces; the way there begins at the board's own."""


class Gate:
    """PIN and sessions; used by many threads.

    Args:
        pin: that opens a session.
        clock: seconds, monotonic.
    """

    def __init__(self, pin: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._pin, self._clock, self._lock = pin, clock, threading.Lock()
        self._num_wrong, self._locked_until_s = 0, 0.0
        self._sessions: dict[str, str] = {}

    def open(self, pin: str) -> str | None:
        """Returns a new session; None for a wrong PIN, or any while too many were wrong."""
        with self._lock:
            if self._clock() < self._locked_until_s:
                return None
            if not hmac.compare_digest(pin.encode(), self._pin.encode()):
                self._num_wrong += 1
                if self._num_wrong >= MAX_WRONG:
                    self._num_wrong, self._locked_until_s = 0, self._clock() + LOCK_S
                    log.warning("%d wrong PINs; none counts for %g s", MAX_WRONG, LOCK_S)
                return None
            self._num_wrong = 0
            session = secrets.token_urlsafe(32)
            self._sessions[session] = secrets.token_urlsafe(32)
            while len(self._sessions) > MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
            return session

    @property
    def is_locked(self) -> bool:
        return self._clock() < self._locked_until_s

    def find_token(self, session: str) -> str | None:
        """Returns the token that changes of a session need; None for a session that there is not."""
        with self._lock:
            return self._sessions.get(session)


class BoundedHttpServer(ThreadingHTTPServer):
    """HTTP server of a thread for each connection, at most `MAX_CONNECTIONS`; further ones wait to be accepted.

    Of one address there are `MAX_OF_ADDRESS` at most, and others are closed. A request that has not come whole in
    `REQUEST_S` is cut off.

    Args:
        address: to listen on, as IP address and port.
        handler: of a request; a subclass of `BoundedHandler`.
        tls: of the server; None for none.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[BoundedHandler], tls: ssl.SSLContext | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.scheme = "http" if tls is None else "https"
        self._changed = threading.Condition()
        self._connections: dict[socket.socket, tuple[str, float]] = {}
        super().__init__(address, handler)
        if tls is not None:
            # The handshake is done by the thread of the connection: a silent one keeps nobody waiting.
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    @property
    def url(self) -> str:
        """Returns the page's address, which of all interfaces is the board's own."""
        host, port = self.server_address[:2]
        return f"{self.scheme}://{_format_host(find_own_address(str(host)))}:{port}/"

    def server_bind(self) -> None:
        """Binds without the library's look-up of the board's name, which waits for a DNS server that is away."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def get_request(self) -> tuple[socket.socket, Any]:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._connections) < MAX_CONNECTIONS, POLL_S):
                raise TimeoutError("all connections are in use")
        try:
            request, address = super().get_request()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                time.sleep(POLL_S)  # the connection still waits, and would be asked for again at once
            raise
        with self._changed:
            self._connections[request] = (address[0], time.monotonic() + REQUEST_S)
        return request, address

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002 the library's interface
        with self._changed:
            hosts = [host for host, _ in self._connections.values()]
        return hosts.count(client_address[0]) <= MAX_OF_ADDRESS

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection; the library calls it of each, however it ends."""
        try:
            super().shutdown_request(request)
        finally:
            with self._changed:
                self._connections.pop(request, None)
                self._changed.notify_all()

    def service_actions(self) -> None:
        """Cuts off requests that come too slowly; the library calls it several times a second."""
        now_s = time.monotonic()
        with self._changed:
            late = [request for request, (_, deadline_s) in self._connections.items() if deadline_s < now_s]
        for request in late:
            with contextlib.suppress(OSError):
                # The method of TLS would first take the encryption from the thread that reads.
                socket.socket.shutdown(request, socket.SHUT_RDWR)

    def end_deadline(self, request: socket.socket) -> None:
        """Lets the answer take its time, once a request has come whole."""
        with self._changed:
            if request in self._connections:
                self._connections[request] = (self._connections[request][0], math.inf)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 the library's interface
        error = sys.exception()
        if isinstance(error, OSError | http.client.HTTPException):
            log.debug("a connection from %s broke: %s", client_address[0], error)
        else:
            log.error("a request from %s failed", client_address[0], exc_info=error)


class BoundedHandler(BaseHTTPRequestHandler):
    """Handler that reads at most `MAX_REQUEST_BYTES`."""

    server: BoundedHttpServer
    timeout = IDLE_TIMEOUT_S

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_BoundedReader(self.connection.makefile("rb", 0), MAX_REQUEST_BYTES))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 the library's name
        log.debug(format, *args)


class _BoundedReader(io.RawIOBase):
    def __init__(self, file: io.RawIOBase, num_bytes: int) -> None:
        super().__init__()
        self._file, self._num_left = file, num_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if not self._num_left:
            raise http.client.HTTPException("the request is too long")
        count = self._file.readinto(memoryview(buffer)[: self._num_left])
        self._num_left -= count or 0
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def list_own_names(local: str, port: int, scheme: str) -> set[str]:
    """Returns what a request may have as `Host`: no name that leads here (DNS rebinding).

    Args:
        local: IP address that it came to.
        port: likewise; browsers leave out 80, with TLS 443.
        scheme: http or https.
    """
    hosts = {_format_host(local), "localhost"}
    names = {f"{host}:{port}" for host in hosts}
    return names | hosts if port == _DEFAULT_PORTS[scheme] else names


def find_own_address(host: str) -> str:
    """Returns an IP address; for that of all interfaces the one that packets leave the board with."""
    if host not in _ELSEWHERE:
        return host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ELSEWHERE[host], 9))  # sends nothing
        except OSError:  # no network
            return "::1" if family == socket.AF_INET6 else "127.0.0.1"
        return str(probe.getsockname()[0])


def make_server_context(host: str) -> tuple[ssl.SSLContext, str]:
    """Returns the server's side of TLS and the SHA-256 of its certificate, to compare with what a browser shows.

    Key and certificate are made at every start, for one address, and signed by themselves: the process that reads
    what strangers send does not have the board's own key.

    Args:
        host: IP address that the page listens on.

    Raises:
        ConfigError: it is none.
    """
    try:
        address = x509.IPAddress(ipaddress.ip_address(find_own_address(host)))
    except ValueError as error:
        raise ConfigError(f"--host must be an IP address of this board: {error}") from None
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "edgefl label")])
    builder = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=CERTIFICATE_DAYS))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    )
    certificate = builder.sign(key, hashes.SHA256())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with tempfile.NamedTemporaryFile(prefix="edgefl-label-", suffix=".pem") as file:  # of mode 0600
        pem, format_ = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        file.write(key.private_bytes(pem, format_, serialization.NoEncryption()) + certificate.public_bytes(pem))
        file.flush()
        context.load_cert_chain(file.name)
    return context, certificate.fingerprint(hashes.SHA256()).hex(":").upper()


def make_pin() -> str:
    """Returns six random digits."""
    return f"{secrets.randbelow(10**6):06d}"


def _format_host(address: str) -> str:
    """Returns an IP address as in a URL."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ip.ipv4_mapped) if ip.ipv4_mapped else f"[{ip.compressed.partition('%')[0]}]"
    return address
