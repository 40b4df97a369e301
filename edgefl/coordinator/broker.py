"""The MQTT broker behind one Protocol: a private mosquitto, the embedded one, or somebody else's.

Who may do what is decided here once (`may_write`, `may_read`); mosquitto gets it as an ACL file, the embedded broker
asks the functions. The identity of a client is the common name of its certificate, never a name that it sends.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import ssl
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qsl, urlsplit

from edgefl.errors import BrokerError, ConfigError, PortInUseError
from edgefl.protocol import COORDINATOR_NAME, FROM_DEVICE, TO_DEVICE, Topic

log = logging.getLogger(__name__)

DEFAULT_MQTTS_PORT = 8883
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""The largest MQTT packet that our brokers take: an edge variable of a large model, never a flood."""
CONNECT_TIMEOUT_S = 5.0

DEVICE_WRITES = frozenset(FROM_DEVICE)
# Its own status as well: a device must see an `offline` that it did not send, to say that it lives.
DEVICE_READS = frozenset({*TO_DEVICE, Topic.STATUS})


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

    def refuse(self, names: Collection[str]) -> None:
        """Sets the identities that are shut out although their certificates are good: removed devices."""


def make_broker(spec: str, *, directory: Path, fleet: str, tls: BrokerTls, host: str, port: int) -> Broker:
    """Returns the broker that `spec` names, not yet started.

    Args:
        spec: `auto` (mosquitto when it is installed, else embedded), `mosquitto`, `embedded`, or
            `mqtts://host:port?ca=FILE&cert=FILE&key=FILE` for one that runs elsewhere; the files are what the
            coordinator connects with and default to its own.
        directory: where a private mosquitto keeps its files; made with mode 0700.
        fleet: the fleet id, the third level of every topic.
        tls: the CA of the fleet, and the server's certificate and key.
        host: the address to listen on.
        port: the port to listen on.

    Raises:
        ConfigError: the spec makes no sense.
        BrokerError: mosquitto is asked for and not installed.
    """
    if spec.startswith("mqtts://"):
        return external_broker(spec)
    program = mosquitto_path() if spec in {"auto", "mosquitto"} else None
    if program is not None:
        from edgefl.coordinator.mosquitto import Mosquitto  # noqa: PLC0415 - it needs this module's types

        return Mosquitto(program, directory=directory, fleet=fleet, tls=tls, host=host, port=port)
    if spec == "mosquitto":
        raise BrokerError("mosquitto is not installed; install it, or use --broker embedded")
    if spec not in {"auto", "embedded"}:
        raise ConfigError(f"broker must be auto, mosquitto, embedded or mqtts://HOST:PORT, got {spec!r}")
    from edgefl.coordinator.embedded_broker import EmbeddedBroker  # noqa: PLC0415 - amqtt is slow to import

    return EmbeddedBroker(fleet=fleet, tls=tls, host=host, port=port)


def mosquitto_path() -> str | None:
    """Returns the mosquitto program; distributions put it where only root's PATH looks."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


def may_write(fleet: str, identity: str, name: str) -> bool:
    """Returns whether a client may publish to this topic."""
    return _is_allowed(fleet, identity, name, DEVICE_WRITES)


def may_read(fleet: str, identity: str, name: str) -> bool:
    """Returns whether a client may receive this topic, or subscribe to this filter."""
    return _is_allowed(fleet, identity, name, DEVICE_READS)


def acl_file(fleet: str, refused: Collection[str] = ()) -> str:
    """Returns the same rules in mosquitto's words."""
    lines = [f"user {COORDINATOR_NAME}", f"topic readwrite edgefl/v1/{fleet}/#", ""]
    for name in sorted(refused):
        lines += [f"user {name}", "topic deny #", ""]
    # Patterns hold for every user, so they must name the user (%u) and not only the place.
    lines += [f"pattern write edgefl/v1/{fleet}/%u/{kind}" for kind in sorted(DEVICE_WRITES)]
    lines += [f"pattern read edgefl/v1/{fleet}/%u/{kind}" for kind in sorted(DEVICE_READS)]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalBroker:
    """A broker that somebody else runs, with rules of their own making (docs/protocol.md says which are needed)."""

    address: BrokerAddress

    def start(self) -> BrokerAddress:
        """Returns its address; one that is down now only costs a warning, since the bus tries for ever."""
        try:
            self._handshake()
        except ssl.SSLCertVerificationError as error:
            raise BrokerError(f"{self._name} shows a certificate that does not verify: {error.reason}") from None
        except OSError as error:
            log.warning("%s cannot be reached (%s); trying again until it answers", self._name, error)
        return self.address

    def stop(self) -> None:
        """Leaves it alone."""

    def alive(self) -> bool:
        try:
            self._handshake()
        except OSError:
            return False
        return True

    def refuse(self, names: Collection[str]) -> None:
        """Says that this is up to whoever runs the broker."""
        if names:
            log.warning(
                "%s is not ours: shut out the removed devices there: %s", self._name, ", ".join(sorted(names))
            )

    @property
    def _name(self) -> str:
        return f"the broker at {self.address.host}:{self.address.port}"

    def _handshake(self) -> None:
        where = (self.address.host, self.address.port)
        with socket.create_connection(where, timeout=CONNECT_TIMEOUT_S) as raw, contextlib.ExitStack() as stack:
            if self.address.tls is not None:
                context = client_context(self.address.tls)
                stack.enter_context(context.wrap_socket(raw, server_hostname=self.address.host))


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


def external_broker(spec: str) -> ExternalBroker:
    """Returns the broker that an mqtts:// address names.

    Raises:
        ConfigError: no host, a port that is none, unknown options, or only some of the three files.
    """
    try:
        url = urlsplit(spec)
        port = url.port or DEFAULT_MQTTS_PORT
    except ValueError as error:
        raise ConfigError(f"broker address {spec!r} makes no sense: {error}") from None
    options = dict(parse_qsl(url.query, keep_blank_values=True))
    if not url.hostname or url.path not in {"", "/"} or url.username is not None:
        raise ConfigError(f"broker address must look like mqtts://HOST:PORT, got {spec!r}")
    if options and set(options) != {"ca", "cert", "key"}:
        raise ConfigError(f"broker address takes ca, cert and key together, got {', '.join(sorted(options))}")
    tls = BrokerTls(**{name: Path(value).expanduser() for name, value in options.items()}) if options else None
    return ExternalBroker(address=BrokerAddress(host=url.hostname, port=port, tls=tls))


def _is_allowed(fleet: str, identity: str, name: str, kinds: Collection[Topic]) -> bool:
    root = f"edgefl/v1/{fleet}/"
    if identity == COORDINATOR_NAME:
        return name.startswith(root)
    own = f"{root}{identity}/"
    return bool(identity) and name.startswith(own) and name[len(own) :] in kinds
