"""Redaction of texts: secrets are removed, addresses and host names become pseudonyms.

A pseudonym is the same for the same name within one report, so that connections can be followed, and reveals nothing
else: it is a hash with a discarded salt.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from edgefl.device.diagnostics.json_log import REDACTED, remove_secrets

MIN_SECRET_CHARS = 8
MIN_NAME_CHARS = 3
PSEUDONYM_CHARS = 8

_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]+-----.*?(?:-----END [A-Z0-9 ]+-----|\Z)", re.DOTALL)
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\w)")
_IPV6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f:]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*(?:%\w+)?(?!\w)")
_MAC = re.compile(r"(?<![\w:-])(?:[0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}(?![\w:-])")
_MAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_LONG_HEX = re.compile(r"(?<!\w)[0-9A-Fa-f]{40,}(?!\w)")
"""Fingerprints of keys and certificates: no secrets, but they identify the fleet."""


class Redactor:
    """Redactor of one board's secrets and names.

    Args:
        secrets: texts that are redacted everywhere, such as the lines of a key.
        hosts: host names and addresses to replace by pseudonyms, beside all that look like an address.
        folders: paths and their replacements, such as `~` for the home folder.
        salt: of the pseudonyms; random by default.
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
        self._secrets = sorted({text for text in secrets if len(text) >= MIN_SECRET_CHARS}, key=len, reverse=True)
        names = sorted({text for text in hosts if len(text) >= MIN_NAME_CHARS}, key=len, reverse=True)
        self._hosts = re.compile(rf"(?i)(?<![\w.-])(?:{'|'.join(map(re.escape, names))})(?![\w-])") if names else None
        self._folders = sorted((folders or {}).items(), key=lambda item: -len(item[0]))

    def redact_text(self, value: str) -> str:
        """Returns the redacted text."""
        value = _PEM.sub(REDACTED, remove_secrets(value))
        for secret in self._secrets:
            value = value.replace(secret, REDACTED)
        for folder, replacement in self._folders:
            value = value.replace(folder, replacement)
        value = _MAIL.sub(lambda match: self._make_pseudonym("mail", match[0]), value)
        value = _MAC.sub(lambda match: self._make_pseudonym("mac", match[0].lower()), value)
        value = _LONG_HEX.sub(lambda match: self._make_pseudonym("hash", match[0].lower()), value)
        if self._hosts is not None:
            value = self._hosts.sub(lambda match: self._make_pseudonym("host", match[0].lower()), value)
        return _IPV6.sub(self._redact_address, _IPV4.sub(self._redact_address, value))

    def redact_json(self, value: Any) -> Any:
        """Returns the JSON value with redacted texts and keys."""
        if isinstance(value, str):
            return self.redact_text(value)
        if isinstance(value, Mapping):
            return {self.redact_text(str(key)): self.redact_json(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.redact_json(item) for item in value]
        return value

    def _redact_address(self, match: re.Match[str]) -> str:
        try:
            address = ipaddress.ip_address(match[0].partition("%")[0])
        except ValueError:  # a version number, or a time of day
            return match[0]
        return (
            match[0]
            if address.is_loopback or address.is_unspecified
            else self._make_pseudonym("host", match[0].lower())
        )

    def _make_pseudonym(self, kind: str, name: str) -> str:
        return f"<{kind} {hashlib.sha256(self._salt + name.encode()).hexdigest()[:PSEUDONYM_CHARS]}>"
