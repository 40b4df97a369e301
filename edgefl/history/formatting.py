"""Formatting of quantities and names for people."""

from __future__ import annotations

from collections.abc import Sequence

MAX_NAMES = 3
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB")
_BIT_UNITS = ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")


def format_seconds(seconds: float | None) -> str:
    """Returns a duration: whole seconds from ten on, milliseconds below a second."""
    if seconds is None:
        return "an unknown time"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"


def format_bytes(num_bytes: float) -> str:
    """Returns a size with a decimal unit."""
    return _format_scaled(num_bytes, _BYTE_UNITS)


def format_bit_rate(bits_per_s: float) -> str:
    """Returns a rate with a decimal unit."""
    return _format_scaled(bits_per_s, _BIT_UNITS)


def format_names(names: Sequence[str]) -> str:
    """Returns `a`, `a and b`, `a, b and c`, or the first and the number of others, without unprintables."""
    printable = ["".join(letter if letter.isprintable() else "\ufffd" for letter in name) for name in names]
    if len(printable) > MAX_NAMES:
        printable = [*printable[: MAX_NAMES - 1], f"{len(printable) - MAX_NAMES + 1} more"]
    *leading, last = printable or [""]
    return f"{', '.join(leading)} and {last}" if leading else last


def _format_scaled(value: float, units: Sequence[str]) -> str:
    size = float(value)
    for unit in units[:-1]:
        if abs(size) < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} {units[-1]}"
