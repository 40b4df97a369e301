"""Factory of the coordinator's MQTT broker: private mosquitto, embedded, or external."""

from __future__ import annotations

import shutil
from pathlib import Path

from edgefl.coordinator.brokers.broker import Broker, BrokerTls, OnDenied, ignore_denied
from edgefl.coordinator.brokers.embedded_broker import EmbeddedBroker
from edgefl.coordinator.brokers.external_broker import parse_external_broker
from edgefl.coordinator.brokers.mosquitto import Mosquitto
from edgefl.coordinator.pki import KeyPair
from edgefl.core.errors import BrokerError, ConfigError


def make_broker(  # noqa: PLR0913 one keyword per fact
    spec: str,
    *,
    directory: Path,
    fleet: str,
    tls: BrokerTls,
    host: str,
    port: int,
    authority: KeyPair | None = None,
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
    return EmbeddedBroker(fleet=fleet, tls=tls, host=host, port=port, on_denied=on_denied)


def find_mosquitto() -> str | None:
    """Returns the mosquitto program, also from the folders of root's PATH."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")
