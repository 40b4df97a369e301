"""Differences between a card and its new files, with secrets redacted."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from edgefl.provision.sd_card import ReadFile

MAX_TEXT_BYTES = 256 * 1024
_TOKEN = re.compile(r"efl1\.[A-Za-z0-9_=-]+")
_NAMED_SECRET = re.compile(r"""(?im)^(.*?\b(?:passwd|password|psk)["']?\s*[:=]\s*)\S.*$""")


def render_diff(files: Mapping[str, bytes | Path], read: ReadFile) -> Iterator[str]:
    """Yields the lines of a unified diff between the present card and its new files."""
    for name, content in files.items():
        new = content if isinstance(content, bytes) else content.read_bytes()
        old = read(name)
        if old == new:
            continue
        old_lines, new_lines = _split_lines(old or b""), _split_lines(new)
        if old_lines is None or new_lines is None:
            yield f"{'new' if old is None else 'other'} file {name}, {len(new)} bytes"
            continue
        origin = f"a/{name}" if old is not None else "/dev/null"
        yield from difflib.unified_diff(old_lines, new_lines, origin, f"b/{name}", lineterm="")


def redact_secrets(text: str) -> str:
    """Returns the text without tokens and without values named a password or key."""
    return _NAMED_SECRET.sub(r"\1(secret)", _TOKEN.sub("efl1.(secret)", text))


def _split_lines(content: bytes) -> list[str] | None:
    if len(content) > MAX_TEXT_BYTES or b"\0" in content:
        return None
    try:
        return redact_secrets(content.decode()).splitlines()
    except UnicodeDecodeError:
        return None
