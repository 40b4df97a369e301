"""An MQTT broker that somebody else runs."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from edgefl.coordinator.brokers.broker import CONNECT_TIMEOUT_S, BrokerAddress, BrokerTls, client_context
from edgefl.errors import BrokerError, ConfigError

log = logging.getLogger(__name__)

DEFAULT_MQTTS_PORT = 8883


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalBroker:
    """A broker that somebody else runs, with rules of its own (docs/reference/protocol.md says which it needs)."""

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

    def reload(self) -> None:
        """Leaves it alone: `edgefl coordinator broker` sees by itself when the certificate has changed."""

    def refuse(self, names: Collection[str], serials: Collection[str] = ()) -> None:  # noqa: ARG002 see `Broker`
        """Says that this is up to whoever runs the broker."""
        if names:
            log.warning(
                "%s has to shut out the removed devices %s; `edgefl coordinator broker` does that by itself",
                self._name,
                ", ".join(sorted(names)),
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
