"""Login and TLS of servers that are not the fleet's: brokers and web servers."""

from __future__ import annotations

import functools
import ssl
from pathlib import Path

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from edgefl.core.errors import ConfigError
from edgefl.core.settings import BrokerSection

CONNECT_TIMEOUT_S = 5.0
KEEP_ALIVE_S = 30
MAX_RECONNECT_S = 60
MAX_LOGIN_BYTES = 4096


def make_broker_client(table: str, section: BrokerSection, client_id: str = "") -> mqtt.Client:
    """Returns a client for the broker of a table of settings, which is not connected.

    With a `client_id` the broker ends an older connection of it, and sends the will of that, before this one counts;
    without one it makes a new id for each connection.

    Raises:
        ConfigError: the login or the authority is none.
    """
    client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id, protocol=mqtt.MQTTv5)
    if section.login_file:
        client.username_pw_set(*read_login(Path(section.login_file)))
    if section.tls:
        client.tls_set_context(make_tls_context(table, section.ca_file))
    client.connect_timeout = CONNECT_TIMEOUT_S
    client.reconnect_delay_set(1, MAX_RECONNECT_S)
    return client


def make_tls_context(table: str, ca_file: str) -> ssl.SSLContext:
    """Returns the client's side of TLS for a table of settings.

    Without `ca_file` the system's authorities are trusted.

    Raises:
        ConfigError: the authority's certificate cannot be used.
    """
    try:
        return _load_authority(ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{table}.ca_file {ca_file} cannot be used: {error}") from None


@functools.cache
def _load_authority(ca_file: str) -> ssl.SSLContext:
    """Returns a context of nearly a megabyte, which all with this authority share."""
    return ssl.create_default_context(cafile=ca_file or None)


def read_login(path: Path) -> tuple[str, str]:
    """Returns user and password; raises a `ConfigError` that shows neither."""
    try:
        with path.open(encoding="utf-8") as file:
            user, _, rest = file.read(MAX_LOGIN_BYTES).partition("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"the login file {path} cannot be read: {reason}") from None
    if not user.strip():
        raise ConfigError(f"the login file {path} must have the user in its first line, the password in its second")
    return user.strip(), rest.partition("\n")[0].rstrip("\r")
