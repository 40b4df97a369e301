"""Common parts of all MQTT brokers: the Protocol, TLS files, access rules, and revocation.

The access rules are defined here once (`can_publish`, `can_subscribe`); mosquitto gets them as an ACL file, the
embedded broker calls the functions. A client's identity is the common name of its certificate, never a name it sends.

Certificates of removed devices are still valid by themselves, so a broker needs the list. A broker without a
command to disconnect a client is connected to under its name, which ends the client's own session; only the CA can
issue a certificate with that name, valid for a short time.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import ssl
import struct
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgefl.coordinator import pki
from edgefl.core.errors import BrokerError, PortInUseError
from edgefl.core.protocol import COORDINATOR_NAME, FROM_DEVICE, PEER, TO_DEVICE, Topic, is_slug
from edgefl.storage.repositories.certificates import list_revoked_serials
from edgefl.storage.store import Store
from edgefl.system.atomic_files import TlsFiles
from edgefl.system.https_client import ClosingSocket

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Maximum MQTT packet of our brokers: room for an edge variable of a large model, never a flood."""
MAX_RETAINED_BYTES = 16 * MAX_MESSAGE_BYTES
"""Maximum per device, at the embedded broker; mosquitto has a limit for all together."""
MAX_QUEUED_BYTES = 16 * MAX_MESSAGE_BYTES
"""Maximum bytes queued for one client."""
CONNECT_TIMEOUT_S = 5.0
TEMPORARY_CERTIFICATE_DAYS = 1 / 24

# Topics of a device below its fleet, as mosquitto's patterns: %u is its name, + one level of any content.
DEVICE_PUBLISH_TOPICS = (*(f"%u/{kind}" for kind in FROM_DEVICE), f"%u/{PEER}/+")
# Its own status as well: a device must see an `offline` that it did not send, to correct it.
DEVICE_SUBSCRIBE_TOPICS = (*(f"%u/{kind}" for kind in (*TO_DEVICE, Topic.STATUS)), f"+/{PEER}/%u")
UNTRUSTED_CERTIFICATE = "a connection with a certificate that does not count"
MISSING_CERTIFICATE = "a connection without a certificate"
RENEWED_INTERVAL_S = 120.0
"""Removed devices are revoked at once; replaced certificates together, at most this often."""
TAKEOVER_TIMEOUT_S = 2.0
DISCONNECT = b"\xe0\x00"

OnDenied = Callable[[str, str], None]
"""(identity, denied action); the identity is empty without a valid certificate"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAddress:
    """Address for clients. `tls`, if set, replaces the coordinator's own client certificate."""

    host: str
    port: int
    tls: TlsFiles | None = None


def ignore_denied(_identity: str, _action: str) -> None:
    """Ignores a denied action."""


class Broker(Protocol):
    """A broker that the coordinator starts and stops."""

    def start(self) -> BrokerAddress:
        """Starts it, and returns its address once it listens.

        Raises:
            PortInUseError: the port is taken.
            BrokerError: it does not start.
        """

    def stop(self) -> None:
        """Stops it; harmless if it is not running."""

    def is_alive(self) -> bool: ...

    def revoke(self, names: Collection[str], serials: Collection[str] = ()) -> None:
        """Revokes identities of removed devices, and replaced certificates.

        Clients connected under one of the names are disconnected. Serials are hexadecimal.
        """

    def reload(self) -> None:
        """Loads the server's certificate from its files again; open connections stay."""


class RevocationSync:
    """Keeps the revocations of a broker equal to those of the store.

    `get_own_serial` returns the serial of the coordinator's own.
    """

    def __init__(
        self,
        broker: Broker,
        store: Store,
        *,
        get_own_serial: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._broker, self._store, self._get_own_serial, self._clock = broker, store, get_own_serial, clock
        self._applied: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        self._checked_at: float | None = None

    def update(self) -> None:
        """Updates the broker's revocations if devices were removed or joined again, or certificates are due.

        Raises:
            StoreError: the store cannot be read; the broker keeps its last revocations.
        """
        removed, now = self._store.list_removed_device_ids(), self._clock()
        is_due = self._checked_at is None or abs(now - self._checked_at) >= RENEWED_INTERVAL_S
        if removed == self._applied[0] and not is_due:
            return
        revocations = removed, list_revoked_serials(self._store, now=now, own_serial=self._get_own_serial())
        if revocations != self._applied:
            self._broker.revoke(*revocations)
            self._applied = revocations
        self._checked_at = now


def disconnect_client(host: str, port: int, name: str, *, authority: pki.KeyPair, ca: Path) -> bool:
    """Disconnects the client `name`; returns whether that succeeded. It may reconnect unless revoked."""
    try:
        with issue_temporary_identity(authority, name, ca=ca) as tls:
            context = make_client_context(tls)
        context.check_hostname = False  # this machine's own broker; the CA vouches for it
        with (
            socket.create_connection((host, port), timeout=TAKEOVER_TIMEOUT_S) as raw_socket,
            context.wrap_socket(raw_socket) as tls_socket,
        ):
            tls_socket.sendall(_encode_connect(name))
            is_accepted = bool(tls_socket.recv(4))
            tls_socket.sendall(DISCONNECT)
    except (OSError, BrokerError) as error:
        log.warning("%s may still be connected to the broker, where it is not heard: %s", name, error)
        return False
    if not is_accepted:
        log.warning("%s may still be connected to the broker, which hung up on who spoke under that name", name)
    return is_accepted


def _encode_connect(name: str) -> bytes:
    """Returns the first packet of MQTT 3.1.1, with a clean session and without a will."""
    text = name.encode()
    body = struct.pack("!H4sBBHH", 4, b"MQTT", 4, 0x02, 10, len(text)) + text
    return bytes([0x10, len(body)]) + body


def can_publish(fleet: str, identity: str, name: str) -> bool:
    """Returns whether a client may publish to this topic."""
    return not {"+", "#"} & set(name) and _is_allowed(fleet, identity, name, DEVICE_PUBLISH_TOPICS)


def can_subscribe(fleet: str, identity: str, name: str) -> bool:
    """Returns whether a client may receive this topic, or subscribe to this filter."""
    return _is_allowed(fleet, identity, name, DEVICE_SUBSCRIBE_TOPICS)


def render_acl_file(fleet: str, revoked: Collection[str] = ()) -> str:
    """Returns the same rules as mosquitto's ACL file."""
    lines = [f"user {COORDINATOR_NAME}", f"topic readwrite edgefl/v1/{fleet}/#", ""]
    for name in sorted(revoked):
        lines += [f"user {name}", "topic deny #", ""]
    # Patterns hold for every user, so they must name the user (%u) and not only the topic.
    lines += [f"pattern write edgefl/v1/{fleet}/{pattern}" for pattern in sorted(DEVICE_PUBLISH_TOPICS)]
    lines += [f"pattern read edgefl/v1/{fleet}/{pattern}" for pattern in sorted(DEVICE_SUBSCRIBE_TOPICS)]
    return "\n".join(lines) + "\n"


def check_port_is_free(host: str, port: int) -> None:
    """Raises PortInUseError if host:port is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise make_port_error(host, port, error) from None


def make_port_error(host: str, port: int, error: OSError) -> PortInUseError | BrokerError:
    """Returns the error for a failed bind, with a remedy."""
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(f"port {port} on {host} is already in use; choose another one for the broker")
    return BrokerError(f"the broker cannot listen on {host}:{port}: {error.strerror or error}")


def get_connect_host(host: str) -> str:
    """Returns the address at which this machine reaches a listener on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104 - compared only


def make_client_context(tls: TlsFiles) -> ssl.SSLContext:
    """Returns a client's TLS context, which trusts only this CA and sends its own certificate."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_verify_locations(tls.ca)
        context.load_cert_chain(tls.cert, tls.key)
        context.sslsocket_class = ClosingSocket
    except (OSError, ssl.SSLError) as error:
        raise BrokerError(
            f"the TLS files for the broker cannot be used ({tls.ca}, {tls.cert}, {tls.key}): {error}"
        ) from None
    return context


@contextlib.contextmanager
def issue_temporary_identity(authority: pki.KeyPair, name: str, *, ca: Path) -> Iterator[TlsFiles]:
    """Yields a client certificate that is valid for an hour; its files are removed at the end."""
    pair = pki.issue_client_certificate(authority, name, days=TEMPORARY_CERTIFICATE_DAYS)
    with tempfile.TemporaryDirectory() as folder:
        tls = TlsFiles(ca=ca, cert=Path(folder) / "cert.pem", key=Path(folder) / "key.pem")
        tls.key.touch(mode=0o600)
        tls.key.write_bytes(pair.key_pem)
        tls.cert.write_bytes(pair.cert_pem)
        yield tls


def _is_allowed(fleet: str, identity: str, name: str, patterns: Collection[str]) -> bool:
    root = f"edgefl/v1/{fleet}/"
    if not name.startswith(root):
        return False
    if identity == COORDINATOR_NAME:
        return True
    levels = name[len(root) :].split("/")
    # A name with a wildcard in it would turn every pattern into one for all devices.
    return is_slug(identity) and any(
        _is_topic_match(pattern.replace("%u", identity).split("/"), levels) for pattern in patterns
    )


def _is_topic_match(pattern: Sequence[str], levels: Sequence[str]) -> bool:
    """Returns whether every topic that a topic or filter of these levels covers matches the pattern."""
    return len(pattern) == len(levels) and all(
        pattern_level in {"+", level} and level != "#" for pattern_level, level in zip(pattern, levels, strict=True)
    )
