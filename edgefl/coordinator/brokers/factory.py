"""Choice of the coordinator's MQTT broker: private mosquitto, embedded, or an external one."""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import ssl
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from edgefl.coordinator.brokers.broker import (
    CONNECT_TIMEOUT_S,
    Broker,
    BrokerAddress,
    BrokerTls,
    OnDenied,
    ignore_denied,
    make_client_context,
)
from edgefl.coordinator.brokers.embedded_broker import EmbeddedBroker
from edgefl.coordinator.brokers.mosquitto import Mosquitto
from edgefl.coordinator.connections import ConnectionLimiter
from edgefl.coordinator.pki import KeyPair
from edgefl.core.errors import BrokerError, ConfigError

log = logging.getLogger(__name__)

DEFAULT_MQTTS_PORT = 8883


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalBroker:
    """A broker run outside the coordinator, with its own rules (required ones: docs/reference/protocol.md)."""

    address: BrokerAddress

    def start(self) -> BrokerAddress:
        """Returns its address; only warns if it is unreachable, since the client retries for ever."""
        try:
            self._check_handshake()
        except ssl.SSLCertVerificationError as error:
            raise BrokerError(f"{self._label} shows a certificate that does not verify: {error.reason}") from None
        except OSError as error:
            log.warning("%s cannot be reached (%s); trying again until it answers", self._label, error)
        return self.address

    def stop(self) -> None:
        """Does nothing."""

    def is_alive(self) -> bool:
        try:
            self._check_handshake()
        except OSError:
            return False
        return True

    def reload(self) -> None:
        """Does nothing: `edgefl coordinator broker` reloads a changed certificate by itself."""

    def revoke(self, names: Collection[str], serials: Collection[str] = ()) -> None:  # noqa: ARG002 see `Broker`
        """Warns that the operator of the broker has to do this."""
        if names:
            log.warning(
                "%s has to shut out the removed devices %s; `edgefl coordinator broker` does that by itself",
                self._label,
                ", ".join(sorted(names)),
            )

    @property
    def _label(self) -> str:
        return f"the broker at {self.address.host}:{self.address.port}"

    def _check_handshake(self) -> None:
        address = (self.address.host, self.address.port)
        with socket.create_connection(address, timeout=CONNECT_TIMEOUT_S) as raw, contextlib.ExitStack() as stack:
            if self.address.tls is not None:
                context = make_client_context(self.address.tls)
                stack.enter_context(context.wrap_socket(raw, server_hostname=self.address.host))


def parse_external_broker(spec: str) -> ExternalBroker:
    """Returns the broker that an mqtts:// address names.

    Raises:
        ConfigError: no host, an invalid port, unknown options, or only some of the three files.
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


def make_broker(  # noqa: PLR0913 one keyword per fact
    spec: str,
    *,
    directory: Path,
    fleet: str,
    tls: BrokerTls,
    host: str,
    port: int,
    authority: KeyPair | None = None,
    limiter: ConnectionLimiter | None = None,
    on_denied: OnDenied = ignore_denied,
) -> Broker:
    """Returns the broker that `spec` names, not yet started.

    Args:
        spec: `auto` (mosquitto when it is installed, else embedded), `mosquitto`, `embedded`, or
            `mqtts://host:port?ca=FILE&cert=FILE&key=FILE` for an external one; the files are for the coordinator's
            connection and default to its own.
        directory: of a private mosquitto's files; made with mode 0700.
        fleet: the fleet id, the third level of every topic.
        tls: the CA of the fleet, and the server's certificate and key.
        host: the address to listen on.
        port: the port to listen on.
        authority: the CA with its key; without it mosquitto rejects only names, and disconnects no client.
        limiter: of the embedded broker's connections; None for the default limits.
        on_denied: called with identity and denied action, in a thread of the broker.

    Raises:
        ConfigError: the spec is invalid.
        BrokerError: mosquitto is requested and not installed.
    """
    if spec.startswith("mqtts://"):
        return parse_external_broker(spec)
    program = find_mosquitto() if spec in {"auto", "mosquitto"} else None
    if program is not None:
        return Mosquitto(
            program, directory=directory, fleet=fleet, tls=tls, host=host, port=port, authority=authority,
            on_denied=on_denied,
        )  # fmt: skip
    if spec == "mosquitto":
        raise BrokerError("mosquitto is not installed; install it, or use the embedded broker")
    if spec not in {"auto", "embedded"}:
        raise ConfigError(f"broker must be auto, mosquitto, embedded or mqtts://HOST:PORT, got {spec!r}")
    return EmbeddedBroker(fleet=fleet, tls=tls, host=host, port=port, limiter=limiter, on_denied=on_denied)


def find_mosquitto() -> str | None:
    """Returns the mosquitto program, also from the folders of root's PATH."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")
