"""Login and TLS of the servers that sources ask: brokers and web servers."""

from __future__ import annotations

import functools
import ssl
from pathlib import Path

from edgefl.core.errors import ConfigError

MAX_LOGIN_BYTES = 4096


def make_tls_context(name: str, ca_file: str) -> ssl.SSLContext:
    """Returns the client's side of TLS for a source; without `ca_file` the system's authorities are trusted.

    Raises:
        ConfigError: the authority's certificate cannot be used.
    """
    try:
        return _load_authority(ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"sources.{name}.ca_file {ca_file} cannot be used: {error}") from None


@functools.cache
def _load_authority(ca_file: str) -> ssl.SSLContext:
    """Returns a context of nearly a megabyte, which all sources with this authority share."""
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
