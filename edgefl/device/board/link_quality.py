"""How good the board's network link is: signal strength and rate of the interface that leads to the coordinator.

Wi-Fi tells its signal in /proc/net/wireless and its rate through an ioctl of the kernel, wired links their speed in
/sys. What a link does not tell is None.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SIOCGIWRATE = 0x8B21
PLAUSIBLE_DBM = (-200.0, 0.0)
# Drivers of older kernels tell a negative level as an unsigned byte.
_BYTE = 256.0

WirelessRate = Callable[[str], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkQuality:
    """One reading."""

    signal_dbm: float | None = None
    link_bits_per_s: float | None = None


def wireless_bits_per_s(interface: str) -> float | None:
    """Returns the present bit rate of a Wi-Fi interface of this machine, None for any other."""
    request = struct.pack("16s16x", interface.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            answer = fcntl.ioctl(any_socket.fileno(), SIOCGIWRATE, request)
    except OSError:
        return None
    (rate,) = struct.unpack_from("i", answer, 16)
    return float(rate) if rate > 0 else None


def link_quality(root: Path, wireless_rate: WirelessRate = wireless_bits_per_s) -> LinkQuality:
    """Returns what the interface of the default route says; where there is none, the first that is up."""
    interface = _interface(root)
    if interface is None:
        return LinkQuality()
    signal_dbm = _signal_dbm(root, interface)
    if signal_dbm is None and not (root / "sys/class/net" / interface / "wireless").exists():
        return LinkQuality(link_bits_per_s=_wired_bits_per_s(root, interface))
    return LinkQuality(signal_dbm=signal_dbm, link_bits_per_s=wireless_rate(interface))


def _interface(root: Path) -> str | None:
    routes = []
    for line in _lines(root / "proc/net/route")[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == "00000000" and fields[6].isdecimal():
            routes.append((int(fields[6]), fields[0]))
    if routes:
        return min(routes)[1]
    for path in sorted(root.glob("sys/class/net/*")):
        if path.name != "lo" and _lines(path / "operstate") == ["up"]:
            return path.name
    return None


def _signal_dbm(root: Path, interface: str) -> float | None:
    for line in _lines(root / "proc/net/wireless"):
        name, _, rest = line.partition(":")
        fields = rest.split()
        if name.strip() == interface and len(fields) >= 3:
            try:
                level = float(fields[2].rstrip("."))
            except ValueError:
                return None
            level = level - _BYTE if level > 0 else level
            return level if PLAUSIBLE_DBM[0] <= level < PLAUSIBLE_DBM[1] else None
    return None


def _wired_bits_per_s(root: Path, interface: str) -> float | None:
    (text, *_) = _lines(root / "sys/class/net" / interface / "speed") or [""]
    # A cable that is not plugged in has the speed -1.
    return int(text) * 1e6 if text.isdecimal() and int(text) > 0 else None


def _lines(path: Path) -> list[str]:
    # /sys answers EINVAL for the speed of an interface that is down or has none.
    try:
        return path.read_text(errors="replace").strip().splitlines()
    except OSError:
        return []
