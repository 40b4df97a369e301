"""The key of a Wi-Fi: computed here, so that the passphrase itself lies on no card."""

from __future__ import annotations

import hashlib
import re

from edgefl.errors import UsageError

MAX_SSID_BYTES = 32
_KEY = re.compile(r"[0-9a-fA-F]{64}\Z")
_PASSPHRASE = re.compile(r"[ -~]{8,63}\Z")
_COUNTRY = re.compile(r"[A-Z]{2}\Z")


def pre_shared_key(ssid: str, passphrase: str) -> str:
    """Returns the 64 hexadecimal digits that WPA2 makes of a passphrase; a key passes as it is.

    Raises:
        UsageError: it is neither; the message does not show it.

    Source: IEEE 802.11i, annex H.4 (PBKDF2, HMAC-SHA1, 4096 rounds).
    """
    if _KEY.match(passphrase):
        return passphrase.lower()
    if not _PASSPHRASE.match(passphrase):
        raise UsageError(
            f"a Wi-Fi password has 8 to 63 plain characters, or is a key of 64 hexadecimal digits; "
            f"got {len(passphrase)} characters"
        )
    return hashlib.pbkdf2_hmac("sha1", passphrase.encode(), ssid.encode(), 4096, 32).hex()


def checked_ssid(ssid: str) -> str:
    """Returns a network's name that can be one; raises `UsageError`."""
    if not 1 <= len(ssid.encode()) <= MAX_SSID_BYTES or not ssid.isprintable():
        raise UsageError(f"a Wi-Fi name has 1 to {MAX_SSID_BYTES} printable bytes, got {ssid!r}")
    return ssid


def checked_country(country: str) -> str:
    """Returns a country code, which the radio's rules follow; raises `UsageError`."""
    if not _COUNTRY.match(country.upper()):
        raise UsageError(f"a Wi-Fi country has two letters, such as DE or GB, got {country!r}")
    return country.upper()
