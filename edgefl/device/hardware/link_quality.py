"""Network link quality: signal strength and bit rate of the default route's interface.

Wi-Fi signal comes from /proc/net/wireless, its rate from an ioctl of the kernel, the speed of wired links from /sys.
Unknown values are None.
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
# Drivers of older kernels report a negative level as an unsigned byte.
_BYTE_RANGE = 256.0

ReadWirelessRate = Callable[[str], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkQuality:
    """Signal strength in dBm and bit rate of a link."""

    signal_dbm: float | None = None
    link_bits_per_s: float | None = None


def read_wireless_bits_per_s(interface: str) -> float | None:
    """Returns the present bit rate of a local Wi-Fi interface, None for any other."""
    request = struct.pack("16s16x", interface.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control_socket:
            reply = fcntl.ioctl(control_socket.fileno(), SIOCGIWRATE, request)
    except OSError:
        return None
    (rate,) = struct.unpack_from("i", reply, 16)
    return float(rate) if rate > 0 else None


def read_link_quality(root: Path, read_rate: ReadWirelessRate = read_wireless_bits_per_s) -> LinkQuality:
    """Returns the quality of the default route's interface, else of the first that is up."""
    interface = _find_interface(root)
    if interface is None:
        return LinkQuality()
    signal_dbm = _read_signal_dbm(root, interface)
    if signal_dbm is None and not (root / "sys/class/net" / interface / "wireless").exists():
        return LinkQuality(link_bits_per_s=_read_wired_bits_per_s(root, interface))
    return LinkQuality(signal_dbm=signal_dbm, link_bits_per_s=read_rate(interface))


def _find_interface(root: Path) -> str | None:
    routes = []
    for line in _read_lines(root / "proc/net/route")[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == "00000000" and fields[6].isdecimal():
            routes.append((int(fields[6]), fields[0]))
    if routes:
        return min(routes)[1]
    for path in sorted(root.glob("sys/class/net/*")):
        if path.name != "lo" and _read_lines(path / "operstate") == ["up"]:
            return path.name
    return None


def _read_signal_dbm(root: Path, interface: str) -> float | None:
    for line in _read_lines(root / "proc/net/wireless"):
        name, _, values = line.partition(":")
        fields = values.split()
        if name.strip() == interface and len(fields) >= 3:
            try:
                level = float(fields[2].rstrip("."))
            except ValueError:
                return None
            level = level - _BYTE_RANGE if level > 0 else level
            return level if PLAUSIBLE_DBM[0] <= level < PLAUSIBLE_DBM[1] else None
    return None


def _read_wired_bits_per_s(root: Path, interface: str) -> float | None:
    (text, *_) = _read_lines(root / "sys/class/net" / interface / "speed") or [""]
    # A cable that is not plugged in has the speed -1.
    return int(text) * 1e6 if text.isdecimal() and int(text) > 0 else None


def _read_lines(path: Path) -> list[str]:
    # /sys answers EINVAL for the speed of an interface that is down or has none.
    try:
        return path.read_text(errors="replace").strip().splitlines()
    except OSError:
        return []
