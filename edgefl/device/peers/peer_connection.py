"""Messages between two boards: the interface of transports, and connections with mutual TLS and frames.

A device certificate is valid for clients only: were it valid for servers too, any board could impersonate the
coordinator. OpenSSL rejects such certificates at the dialled end, so the dialling side verifies them itself: it
accepts the handshake, in which the other end proves possession of the key, and verifies the certificate as a client's
before any data is sent or trusted. The listening side lets OpenSSL verify, and then does the same. Every certificate
that a device of the fleet ever got is accepted. As everywhere on a board, dates are not checked.

A frame is 28 bytes of header, then the message. The sender dials. The receiver sends WELCOME once it has
authenticated the sender; then each MESSAGE is answered with ACK, and each KEEP_ALIVE, which is sent when idle, with
KEEP_ALIVE. While a long message arrives its receiver sends KEEP_ALIVE too, so that a slow link is not mistaken for a
dead peer. TLS protects the integrity of the bytes.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Protocol

from cryptography import x509
from cryptography.x509.oid import NameOID
from cryptography.x509.verification import PolicyBuilder, Store

from edgefl.core.errors import NetworkError, NotJoinedError
from edgefl.core.protocol import MAX_PEER_BYTES, host_and_port, single_certificate
from edgefl.core.types import GossipConfig
from edgefl.system.atomic_files import TlsFiles
from edgefl.system.https_client import X509_V_FLAG_NO_CHECK_TIME
from edgefl.system.retries import RateLimitedLog

log = logging.getLogger(__name__)

MAGIC = b"EFLP"
FRAME_VERSION = 1
HEADER = struct.Struct("<4sHHIQQ")
"""Little-endian: magic, version, kind, length of the payload in bytes, session, number."""
MIN_BYTES_PER_S = 8 * 1024
_CHUNK_BYTES = 16 * 1024

OnPeerMessage = Callable[[str, bytes], None]
"""Callback with the sender's device id and payload; called in a thread of the transport, one call at a time for each
sender, and should return soon: until it does, its sender's next message waits."""


class FrameKind(IntEnum):
    WELCOME = 1
    MESSAGE = 2
    ACK = 3
    KEEP_ALIVE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportFrame:
    """Frame; `session` is the sender's random incarnation, `number` grows with its messages; ACK repeats both."""

    kind: FrameKind
    session: int = 0
    number: int = 0
    payload: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTimeouts:
    """Timeouts for dead peers and reconnects.

    A connection carries a frame at least every `keep_alive_s`, and is closed after `idle_timeout_s` without one;
    connecting and each step of it may take as long. Attempts are at most `max_backoff_s` apart.
    """

    keep_alive_s: float = 2.0
    idle_timeout_s: float = 6.0
    max_backoff_s: float = 5.0


def write_frame(connection: socket.socket, frame: TransportFrame, *, idle_timeout_s: float) -> None:
    """Sends a frame.

    Raises:
        OSError: the connection broke, or accepted nothing for `idle_timeout_s`.
    """
    connection.settimeout(idle_timeout_s)
    payload = memoryview(frame.payload)
    header = HEADER.pack(MAGIC, FRAME_VERSION, frame.kind, len(payload), frame.session, frame.number)
    # A small message is sent in one packet, a large one is not copied.
    connection.sendall(header + payload[:_CHUNK_BYTES])
    if len(payload) > _CHUNK_BYTES:
        connection.sendall(payload[_CHUNK_BYTES:])


def read_frame(
    connection: socket.socket, *, idle_timeout_s: float, on_chunk: Callable[[], None] = lambda: None
) -> TransportFrame:
    """Returns the next frame; memory grows with the received, not with the announced bytes.

    Args:
        connection: to read from.
        idle_timeout_s: how long to wait for the header, and for each chunk of the payload.
        on_chunk: called for each chunk.

    Raises:
        NetworkError: the frame is malformed or too long; nothing more was read.
        OSError: the connection broke, is silent or too slow (TimeoutError), or was closed (ConnectionError).
    """
    started_s = time.monotonic()
    header = _receive_exactly(connection, HEADER.size, started_s + idle_timeout_s, idle_timeout_s, lambda: None)
    frame, length = _parse_header(header)
    if not length:
        return frame
    until_s = time.monotonic() + idle_timeout_s + length / MIN_BYTES_PER_S
    payload = _receive_exactly(connection, length, until_s, idle_timeout_s, on_chunk)
    return TransportFrame(kind=frame.kind, session=frame.session, number=frame.number, payload=payload)


def _parse_header(header: bytes) -> tuple[TransportFrame, int]:
    magic, version, kind, length, session, number = HEADER.unpack(header)
    if magic != MAGIC or version != FRAME_VERSION:
        raise NetworkError(f"a frame must begin with {MAGIC!r} and version {FRAME_VERSION}, got {header[:6]!r}")
    if kind not in set(FrameKind):
        raise NetworkError(f"a frame must be of kind 1 to {len(FrameKind)}, got {kind}")
    max_length = MAX_PEER_BYTES if kind == FrameKind.MESSAGE else 0
    if length > max_length:
        raise NetworkError(f"a {FrameKind(kind).name} frame must have at most {max_length} bytes, got {length}")
    return TransportFrame(kind=FrameKind(kind), session=session, number=number), length


def _receive_exactly(
    connection: socket.socket, num_bytes: int, until_s: float, idle_timeout_s: float, on_chunk: Callable[[], None]
) -> bytes:
    chunks: list[bytes] = []
    while num_bytes:
        remaining_s = until_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("it sends too slowly")
        connection.settimeout(min(remaining_s, idle_timeout_s))
        chunk = connection.recv(min(num_bytes, _CHUNK_BYTES))
        if not chunk:
            raise ConnectionError("it closed the connection")
        chunks.append(chunk)
        num_bytes -= len(chunk)
        on_chunk()
    return b"".join(chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTls:
    """TLS contexts for each side of a peer connection, and the fleet's CA."""

    authority: x509.Certificate
    client_context: ssl.SSLContext
    server_context: ssl.SSLContext

    @classmethod
    def load(cls, files: TlsFiles, device_id: str) -> PeerTls:
        """Returns the peer TLS configuration of device `device_id`.

        Raises:
            NotJoinedError: the enrolment files are missing, damaged, or of another device.
        """
        try:
            ca_pem = single_certificate(files.ca.read_bytes())
            authority = x509.load_pem_x509_certificate(ca_pem)
            certificate_name = verify_certificate(ssl.PEM_cert_to_DER_cert(files.cert.read_text("ascii")), authority)
            client_context, server_context = _make_client_context(), _make_server_context(ca_pem.decode("ascii"))
            for context in (client_context, server_context):
                context.load_cert_chain(files.cert, files.key)
        except (OSError, ValueError, KeyError, x509.InvalidVersion, NetworkError) as error:
            raise NotJoinedError(
                f"the device's certificates in {files.ca.parent} cannot be used ({error}); join again"
            ) from None
        if certificate_name != device_id:
            raise NotJoinedError(
                f"{files.cert} is the certificate of {certificate_name!r}, not of this device, {device_id!r}"
            )
        return cls(authority=authority, client_context=client_context, server_context=server_context)

    def verify_peer(self, connection: ssl.SSLSocket) -> str:
        """Returns the device id of the other end, after the handshake.

        Raises:
            NetworkError: it has no device certificate of this fleet.
        """
        certificate = connection.getpeercert(binary_form=True)
        if certificate is None:
            raise NetworkError("it shows no certificate")
        return verify_certificate(certificate, self.authority)


def verify_certificate(der: bytes, authority: x509.Certificate) -> str:
    """Returns the common name of a client certificate signed by this CA, ignoring dates.

    Raises:
        NetworkError: it is invalid, or has not exactly one name.
    """
    try:
        certificate = x509.load_der_x509_certificate(der)
        both_valid = max(certificate.not_valid_before_utc, authority.not_valid_before_utc)
        verifier = PolicyBuilder().store(Store([authority])).time(both_valid).build_client_verifier()
        verifier.verify(certificate, [])
        names = [name.value for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    except Exception as error:  # untrusted bytes, for which some versions of the parser raise KeyError
        raise NetworkError(f"it shows no device certificate of this fleet: {error}") from error
    if len(names) != 1 or not isinstance(names[0], str):
        raise NetworkError(f"its certificate must have one common name, got {names!r}")
    return names[0]


def wrap_tls(plain_socket: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> ssl.SSLSocket:
    """Returns the TLS connection before its handshake; `plain_socket` is closed or taken over."""
    # Closing a socket that was taken over does nothing.
    with plain_socket:
        # Small messages are acknowledged one by one: Nagle's algorithm would cost 40 ms each.
        plain_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return context.wrap_socket(plain_socket, server_side=is_server, do_handshake_on_connect=False)


def shutdown_socket(connection: socket.socket) -> None:
    """Shuts a connection down from another thread; its I/O fails and its thread closes it."""
    # Not SSLSocket.shutdown, which would remove the encryption while that thread uses it.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _make_client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # `PeerTls.verify_peer` checks: see the module
    return _harden(context)


def _make_server_context(ca_pem: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_verify_locations(cadata=ca_pem)
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.verify_flags |= ssl.VerifyFlags(X509_V_FLAG_NO_CHECK_TIME)
    context.num_tickets = 0
    return _harden(context)


def _harden(context: ssl.SSLContext) -> ssl.SSLContext:
    """Returns the context without old protocol versions and renegotiation."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    return context


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCounters:
    """Counters since the start: messages `delivered` to and `received` from neighbours.

    `superseded` messages were replaced by a newer one before delivery; `repeated` ones came again after a lost ACK,
    and were dropped. `refused` connections were of a peer with a wrong identity, in either direction; `malformed`
    ones broke off because of an invalid frame.
    """

    delivered: int = 0
    superseded: int = 0
    received: int = 0
    repeated: int = 0
    refused: int = 0
    malformed: int = 0


class PeerMetrics:
    """Thread-safe counters and rate-limited log."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = PeerCounters()
        self._log = RateLimitedLog(log)

    @property
    def counters(self) -> PeerCounters:
        return self._counters

    def increment(self, name: str) -> None:
        """Increments a field of `PeerCounters`."""
        with self._lock:
            self._counters = replace(self._counters, **{name: getattr(self._counters, name) + 1})

    def log_warning(self, peer: str, text: str, *values: object) -> None:
        """Logs a warning, one a minute for each peer and text; `peer` has to come from a small set of names."""
        self._log.warning(f"{peer} {text}", text, *values)


class PeerTransport(Protocol):
    """Asynchronous message transport to neighbours.

    A message is state, not an increment: of unsent messages only the newest to each receiver is kept. A delivered
    message may come again, or after a newer one, when a device restarts: receivers check step numbers.
    """

    def start(self) -> None:
        """Starts sending and receiving; returns at once.

        Raises:
            NetworkError: this device cannot receive, for instance because its port is taken.
        """

    def stop(self) -> None:
        """Stops sending, receiving and all threads; unsent messages are dropped."""

    def send(self, receiver: str, payload: bytes, *, is_reply: bool = False) -> bool:
        """Queues a message and returns at once, whether the receiver is reachable or not.

        Args:
            receiver: the device id of a neighbour.
            payload: at most `MAX_PEER_BYTES`.
            is_reply: the message is a reply, which no later one replaces: these are sent in order, before the state.

        Returns:
            Whether it was queued; False if the receiver is no neighbour, or too many replies to it are queued.

        Raises:
            UsageError: the payload is too large.
        """

    def is_drained(self) -> bool:
        """Returns whether all messages have been sent, except those to unreachable peers."""

    def list_connected_peers(self) -> frozenset[str]:
        """Returns the peers that are reached, as far as is known here."""

    def get_refusal_times(self) -> Mapping[str, float]:
        """Returns when, on the monotonic clock, the last connection to a peer was tried whose machine refused it."""

    def set_peers(self, peers: Collection[str]) -> None:
        """Sets the peers; drops messages queued for others and rejects their connections."""

    def set_addresses(self, addresses: Mapping[str, tuple[str, int]]) -> None:
        """Sets the listening addresses of devices; ignored by transports without addresses."""


MakePeerTransport = Callable[[GossipConfig, OnPeerMessage], PeerTransport]
"""(plan, callback of messages) -> transport, not yet started."""


def get_peer_addresses(plan: GossipConfig) -> dict[str, tuple[str, int]]:
    """Returns the known listening addresses of a node's neighbours."""
    return {edge.neighbour: host_and_port(edge.address) for edge in plan.edges if edge.address}
