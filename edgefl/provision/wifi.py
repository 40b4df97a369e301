"""Wi-Fi keys: computed here, so that no card holds the passphrase itself."""

from __future__ import annotations

import hashlib
import re

from edgefl.core.errors import UsageError

MAX_SSID_BYTES = 32
_KEY = re.compile(r"[0-9a-fA-F]{64}\Z")
_PASSPHRASE = re.compile(r"[ -~]{8,63}\Z")
_COUNTRY = re.compile(r"[A-Z]{2}\Z")


def compute_pre_shared_key(ssid: str, passphrase: str) -> str:
    """Returns WPA2's 64 hexadecimal digits of a passphrase; a key passes unchanged.

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


def validate_ssid(ssid: str) -> str:
    """Returns a valid network name; raises `UsageError`."""
    if not 1 <= len(ssid.encode()) <= MAX_SSID_BYTES or not ssid.isprintable():
        raise UsageError(f"a Wi-Fi name has 1 to {MAX_SSID_BYTES} printable bytes, got {ssid!r}")
    return ssid


def validate_country(country: str) -> str:
    """Returns a valid country code, for the radio's rules; raises `UsageError`."""
    if not _COUNTRY.match(country.upper()):
        raise UsageError(f"a Wi-Fi country has two letters, such as DE or GB, got {country!r}")
    return country.upper()
