"""What a card would look like, as a difference that shows no secret."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from edgefl.provision.card import Read

MAX_TEXT_BYTES = 256 * 1024
_TOKEN = re.compile(r"efl1\.[A-Za-z0-9_=-]+")
_NAMED = re.compile(r"""(?im)^(.*?\b(?:passwd|password|psk)["']?\s*[:=]\s*)\S.*$""")


def difference(files: Mapping[str, bytes | Path], read: Read) -> Iterator[str]:
    """Yields the lines of a unified difference between the card as it is and as it would be."""
    for name, content in files.items():
        new = content if isinstance(content, bytes) else content.read_bytes()
        old = read(name)
        if old == new:
            continue
        before, after = _lines(old or b""), _lines(new)
        if before is None or after is None:
            yield f"{'new' if old is None else 'other'} file {name}, {len(new)} bytes"
            continue
        origin = f"a/{name}" if old is not None else "/dev/null"
        yield from difflib.unified_diff(before, after, origin, f"b/{name}", lineterm="")


def without_secrets(text: str) -> str:
    """Returns the text without tokens, and without what is named a password or key."""
    return _NAMED.sub(r"\1(secret)", _TOKEN.sub("efl1.(secret)", text))


def _lines(content: bytes) -> list[str] | None:
    if len(content) > MAX_TEXT_BYTES or b"\0" in content:
        return None
    try:
        return without_secrets(content.decode()).splitlines()
    except UnicodeDecodeError:
        return None
