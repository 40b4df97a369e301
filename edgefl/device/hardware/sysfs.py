"""Defensive reading of files in /proc, /sys and the device tree.

They may be missing, empty, damaged, huge, forbidden or asleep; then the result is None or empty.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_BYTES = 256 * 1024
MAX_TEXT_CHARS = 200
MAX_STRINGS = 16
MAX_DIGITS = 15
"""Maximum digits of a number; longer ones are implausible, and as kilobytes would not fit into 64 bits."""


def read_text(path: Path) -> str | None:
    """Returns a file's text, stripped of blanks and NULs; None where empty."""
    try:
        # Opening a pipe in the place of a file would block.
        if not stat.S_ISREG(path.stat().st_mode):
            return None
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES)
    except (OSError, ValueError):  # sysfs answers EAGAIN, EINVAL or ENODATA for a sensor that is asleep
        return None
    return raw.decode(errors="replace").strip("\0 \t\r\n") or None


def sanitise_text(value: str | None) -> str | None:
    """Returns the printable part of a text, truncated; None where empty."""
    printable = "".join(character for character in (value or "")[: 4 * MAX_TEXT_CHARS] if character.isprintable())
    return printable.strip()[:MAX_TEXT_CHARS] or None


def read_int(path: Path, *, base: int = 10) -> int | None:
    """Returns the integer in a file, or None."""
    return parse_int(read_text(path), base=base)


def parse_int(value: str | None, *, base: int = 10) -> int | None:
    """Returns the integer of a text, or None."""
    if value is None or not value.isascii() or len(value) > MAX_DIGITS:
        return None
    try:
        return int(value, base)
    except ValueError:
        return None


def read_strings(*paths: Path) -> list[str]:
    """Returns the NUL-terminated texts of a device-tree property, from the first file with any."""
    for path in paths:
        texts = [text for part in (read_text(path) or "").split("\0") if (text := sanitise_text(part))]
        if texts:
            return texts[:MAX_STRINGS]
    return []


def find_paths(root: Path, pattern: str) -> list[Path]:
    """Returns sorted matches of a pattern below a folder; unreadable folders are skipped."""
    try:
        return sorted(root.glob(pattern))
    except OSError:
        return []


def read_kilobytes(path: Path) -> dict[str, int]:
    """Returns the `Name:  123 kB` lines of a file of /proc, in kilobytes."""
    return dict(_parse_sizes(read_text(path) or ""))


def _parse_sizes(content: str) -> Iterator[tuple[str, int]]:
    for line in content.splitlines():
        name, _, value = line.partition(":")
        parts = value.split()
        size = parse_int(parts[0]) if len(parts) == 2 and parts[1] == "kB" else None
        if size is not None and size >= 0:
            yield name, size
