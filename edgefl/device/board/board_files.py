"""The files in which a board says what it is: in /proc, /sys and the device tree, read as a doubter does.

They may be missing, empty, damaged, huge, closed to us or asleep; then they say nothing.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_BYTES = 256 * 1024
MAX_TEXT_CHARS = 200
MAX_STRINGS = 16
MAX_DIGITS = 15
"""What is longer is no number that a board means, and as kilobytes would not fit into 64 bits."""


def text(path: Path) -> str | None:
    """Returns what a file says without the blanks and NULs around it; None where that is nothing."""
    try:
        # A pipe in the place of a file would be waited for.
        if not stat.S_ISREG(path.stat().st_mode):
            return None
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES)
    except (OSError, ValueError):  # sysfs answers EAGAIN, EINVAL or ENODATA for a sensor that is asleep
        return None
    return raw.decode(errors="replace").strip("\0 \t\r\n") or None


def plain(value: str | None) -> str | None:
    """Returns what can be shown on a terminal and fits into a message; None where nothing is left."""
    shown = "".join(letter for letter in (value or "")[: 4 * MAX_TEXT_CHARS] if letter.isprintable())
    return shown.strip()[:MAX_TEXT_CHARS] or None


def number(path: Path, *, base: int = 10) -> int | None:
    """Returns the whole number that a file holds, None where it holds none."""
    return whole(text(path), base=base)


def whole(value: str | None, *, base: int = 10) -> int | None:
    """Returns the whole number that a text is, None where it is none."""
    if value is None or not value.isascii() or len(value) > MAX_DIGITS:
        return None
    try:
        return int(value, base)
    except ValueError:
        return None


def strings(*paths: Path) -> list[str]:
    """Returns the texts of a device-tree property, each of which ends with a NUL, of the first file that has any."""
    for path in paths:
        found = [shown for part in (text(path) or "").split("\0") if (shown := plain(part))]
        if found:
            return found[:MAX_STRINGS]
    return []


def below(root: Path, pattern: str) -> list[Path]:
    """Returns what matches a pattern below a folder, sorted; what cannot be looked into is left out."""
    try:
        return sorted(root.glob(pattern))
    except OSError:
        return []


def kilobytes(path: Path) -> dict[str, int]:
    """Returns the `Name:  123 kB` lines of a file of /proc, in kilobytes."""
    return dict(_sizes(text(path) or ""))


def _sizes(told: str) -> Iterator[tuple[str, int]]:
    for line in told.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        size = whole(words[0]) if len(words) == 2 and words[1] == "kB" else None
        if size is not None and size >= 0:
            yield name, size
