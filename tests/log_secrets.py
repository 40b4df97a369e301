"""What must never be written to a log, and where it was all the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

# Keys as PEM hold lines of base64; the first ones of a kind are alike, so a line counts only where it is long.
_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----(.*?)-----END", re.DOTALL)
_TOKEN = re.compile(rb'^\w*token\s*=\s*"([^"]+)"', re.MULTILINE)
_KEY_START = 40
"""The first bytes of an EC key say only which curve it is."""


def secrets_of(root: Path) -> dict[bytes, str]:
    """Returns the keys and access tokens that lie below `root`, each with the file it is from."""
    found: dict[bytes, str] = {}
    for path in sorted(path for path in root.rglob("*") if path.suffix in {".key", ".pem", ".toml"}):
        body = path.read_bytes()
        for key in _KEY.findall(body):
            packed = b"".join(key.split())[_KEY_START:]
            found |= {packed[at : at + 24]: f"the key {path.name}" for at in range(0, len(packed) - 24, 12)}
        found |= dict.fromkeys(_TOKEN.findall(body), f"an access token of {path.name}")
    return found


def leaks(texts: Mapping[str, bytes], secrets: Mapping[bytes, str]) -> list[str]:
    """Returns which secret stands in which text."""
    return [
        f"{what} stands in {name}"
        for name, body in texts.items()
        for secret, what in secrets.items()
        if secret in body
    ]


def written_below(
    root: Path, patterns: Iterable[str] = ("*.log", "*.log.*", "*.jsonl*", "*.db", "*.db-wal", "*.wal")
) -> dict[str, bytes]:
    """Returns what logs and databases below `root` hold, by path."""
    return {
        str(path.relative_to(root)): path.read_bytes() for pattern in patterns for path in sorted(root.rglob(pattern))
    }
