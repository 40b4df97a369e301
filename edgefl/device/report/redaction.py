"""Takes out of a text what a stranger must not read: secrets go, addresses and host names become marks.

A mark is the same for the same name within one report, so that one can follow who talks to whom, and says nothing
beyond it: it is a hash with a salt that nobody keeps.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from edgefl.device.logbook import CROSSED_OUT, without_secrets

MIN_SECRET_CHARS = 8
MIN_NAME_CHARS = 3
MARK_CHARS = 8

_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]+-----.*?(?:-----END [A-Z0-9 ]+-----|\Z)", re.DOTALL)
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\w)")
_IPV6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f:]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*(?:%\w+)?(?!\w)")
_MAC = re.compile(r"(?<![\w:-])(?:[0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}(?![\w:-])")
_MAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_LONG_HEX = re.compile(r"(?<!\w)[0-9A-Fa-f]{40,}(?!\w)")
"""Fingerprints of keys and certificates: no secrets, but they say whose fleet this is."""


class Redactor:
    """Knows the secrets and the names of one board.

    Args:
        secrets: what is crossed out wherever it stands, such as the lines of a key.
        hosts: host names and addresses that are marked, beside all that look like an address.
        folders: paths and what stands for them, such as the home folder for `~`.
        salt: for the marks; drawn when it is not given.
    """

    def __init__(
        self,
        *,
        secrets: Iterable[str] = (),
        hosts: Iterable[str] = (),
        folders: Mapping[str, str] | None = None,
        salt: bytes | None = None,
    ) -> None:
        self._salt = os.urandom(16) if salt is None else salt
        self._secrets = sorted({each for each in secrets if len(each) >= MIN_SECRET_CHARS}, key=len, reverse=True)
        names = sorted({each for each in hosts if len(each) >= MIN_NAME_CHARS}, key=len, reverse=True)
        self._hosts = re.compile(rf"(?i)(?<![\w.-])(?:{'|'.join(map(re.escape, names))})(?![\w-])") if names else None
        self._folders = sorted((folders or {}).items(), key=lambda item: -len(item[0]))

    def text(self, value: str) -> str:
        """Returns the text without them."""
        value = _PEM.sub(CROSSED_OUT, without_secrets(value))
        for secret in self._secrets:
            value = value.replace(secret, CROSSED_OUT)
        for folder, short in self._folders:
            value = value.replace(folder, short)
        value = _MAIL.sub(lambda match: self._mark("mail", match[0]), value)
        value = _MAC.sub(lambda match: self._mark("mac", match[0].lower()), value)
        value = _LONG_HEX.sub(lambda match: self._mark("hash", match[0].lower()), value)
        if self._hosts is not None:
            value = self._hosts.sub(lambda match: self._mark("host", match[0].lower()), value)
        return _IPV6.sub(self._address, _IPV4.sub(self._address, value))

    def json(self, value: Any) -> Any:
        """Returns JSON values whose texts, keys among them, are without them."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.json(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.json(item) for item in value]
        return value

    def _address(self, match: re.Match[str]) -> str:
        try:
            address = ipaddress.ip_address(match[0].partition("%")[0])
        except ValueError:  # a version number, or a time of day
            return match[0]
        return match[0] if address.is_loopback or address.is_unspecified else self._mark("host", match[0].lower())

    def _mark(self, kind: str, name: str) -> str:
        return f"<{kind} {hashlib.sha256(self._salt + name.encode()).hexdigest()[:MARK_CHARS]}>"
