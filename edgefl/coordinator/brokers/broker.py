"""What every MQTT broker has in common: its Protocol, its TLS files, and who may read and write what.

Who may do what is decided here once (`may_write`, `may_read`); mosquitto gets it as an ACL file, the embedded broker
asks the functions. The identity of a client is the common name of its certificate, never a name that it sends.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgefl.errors import BrokerError, PortInUseError
from edgefl.protocol import COORDINATOR_NAME, FROM_DEVICE, PEER, TO_DEVICE, Topic, is_slug

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""The largest MQTT packet that our brokers take: an edge variable of a large model, never a flood."""
MAX_RETAINED_BYTES = 16 * MAX_MESSAGE_BYTES
"""Of one device, at the embedded broker; mosquitto has a limit for all together."""
MAX_QUEUED_BYTES = 16 * MAX_MESSAGE_BYTES
"""What may wait for one client."""
CONNECT_TIMEOUT_S = 5.0

# What a device may do below its fleet, as mosquitto's patterns: %u is its name, + one level of any content.
DEVICE_WRITES = (*(f"%u/{kind}" for kind in FROM_DEVICE), f"%u/{PEER}/+")
# Its own status as well: a device must see an `offline` that it did not send, to say that it lives.
DEVICE_READS = (*(f"%u/{kind}" for kind in (*TO_DEVICE, Topic.STATUS)), f"+/{PEER}/%u")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerTls:
    """Paths of PEM files: the CA that the other side must come from, our certificate and its key."""

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAddress:
    """Where clients connect. `tls`, when set, replaces the coordinator's own client certificate for its bus."""

    host: str
    port: int
    tls: BrokerTls | None = None


OnDenied = Callable[[str, str], None]
"""Told who tried what in vain; the name is empty where no certificate has proven it."""


UNTRUSTED = "a connection with a certificate that does not count"
NAMELESS = "a connection without a certificate"


def nobody_is_told(_who: str, _what: str) -> None:
    """Takes what was denied and forgets it."""


class Broker(Protocol):
    """A broker that the coordinator starts and stops."""

    def start(self) -> BrokerAddress:
        """Returns where it listens, once it does.

        Raises:
            PortInUseError: the port is taken.
            BrokerError: it does not come up.
        """

    def stop(self) -> None:
        """Ends it; harmless when it is not running."""

    def alive(self) -> bool: ...

    def refuse(self, names: Collection[str], serials: Collection[str] = ()) -> None:
        """Shuts out identities and certificates that are good by themselves: removed devices, and what was renewed.

        Whoever is connected under one of the names is dropped. Serials are hexadecimal.
        """

    def reload(self) -> None:
        """Takes the server's certificate from its files again; connections that are open stay."""


def may_write(fleet: str, identity: str, name: str) -> bool:
    """Returns whether a client may publish to this topic."""
    return not {"+", "#"} & set(name) and _is_allowed(fleet, identity, name, DEVICE_WRITES)


def may_read(fleet: str, identity: str, name: str) -> bool:
    """Returns whether a client may receive this topic, or subscribe to this filter."""
    return _is_allowed(fleet, identity, name, DEVICE_READS)


def acl_file(fleet: str, refused: Collection[str] = ()) -> str:
    """Returns the same rules in mosquitto's words."""
    lines = [f"user {COORDINATOR_NAME}", f"topic readwrite edgefl/v1/{fleet}/#", ""]
    for name in sorted(refused):
        lines += [f"user {name}", "topic deny #", ""]
    # Patterns hold for every user, so they must name the user (%u) and not only the place.
    lines += [f"pattern write edgefl/v1/{fleet}/{pattern}" for pattern in sorted(DEVICE_WRITES)]
    lines += [f"pattern read edgefl/v1/{fleet}/{pattern}" for pattern in sorted(DEVICE_READS)]
    return "\n".join(lines) + "\n"


def check_port_is_free(host: str, port: int) -> None:
    """Raises PortInUseError when nobody can listen on host:port now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise port_error(host, port, error) from None


def port_error(host: str, port: int, error: OSError) -> PortInUseError | BrokerError:
    """Returns the error for a failed bind, in words that say what to do."""
    if error.errno == 98:  # EADDRINUSE
        return PortInUseError(f"port {port} on {host} is already in use; choose another one for the broker")
    return BrokerError(f"the broker cannot listen on {host}:{port}: {error.strerror or error}")


def connect_host(host: str) -> str:
    """Returns the address at which this machine reaches a listener on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104 - compared only


def client_context(tls: BrokerTls) -> ssl.SSLContext:
    """Returns a TLS context of a client that trusts this CA alone and shows its own certificate."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_verify_locations(tls.ca)
        context.load_cert_chain(tls.cert, tls.key)
        context.sslsocket_class = _TidySocket
    except (OSError, ssl.SSLError) as error:
        raise BrokerError(
            f"the TLS files for the broker cannot be used ({tls.ca}, {tls.cert}, {tls.key}): {error}"
        ) from None
    return context


class _TidySocket(ssl.SSLSocket):
    """Closes when the handshake fails; paho leaves that to the garbage collector."""

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except OSError:
            self.close()
            raise


def _is_allowed(fleet: str, identity: str, name: str, patterns: Collection[str]) -> bool:
    root = f"edgefl/v1/{fleet}/"
    if not name.startswith(root):
        return False
    if identity == COORDINATOR_NAME:
        return True
    levels = name[len(root) :].split("/")
    # A name with a wildcard in it would turn every pattern into one for all devices.
    return is_slug(identity) and any(
        _covers(pattern.replace("%u", identity).split("/"), levels) for pattern in patterns
    )


def _covers(pattern: Sequence[str], levels: Sequence[str]) -> bool:
    """Returns whether every topic that a topic or filter of these levels stands for matches the pattern."""
    return len(pattern) == len(levels) and all(
        wanted in {"+", level} and level != "#" for wanted, level in zip(pattern, levels, strict=True)
    )
