"""What a board feels like: temperature, throttling, load, memory, disk, battery and power, for its heartbeat.

Raspberry Pi, Jetson and any other Linux board say these things in files; a vendor's tool is the last resort. What a
board does not say is None. All paths hang off a root, so that a tree of files can stand in for a board.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgefl.device.board.board import Board
from edgefl.device.board.board_files import kilobytes, number, text, whole
from edgefl.device.board.cgroups import memory_left_bytes
from edgefl.device.board.jetson import power_w
from edgefl.device.board.supplies import battery_fraction
from edgefl.device.board.throttling import throttling

# In order of preference: the processor itself, then the hottest point of the chip, then what PCs have.
ZONE_TYPES = ("cpu-thermal", "cpu_thermal", "CPU-therm", "tj-thermal", "soc-thermal", "x86_pkg_temp", "acpitz")
PLAUSIBLE_C = (-40.0, 150.0)
MAX_UPTIME_S = 1e10


@dataclass(frozen=True, slots=True, kw_only=True)
class VitalSigns:
    """One reading; fractions lie in 0-1. `memory_bytes` is what this process takes (PSS where the kernel tells)."""

    uptime_s: float = 0.0
    temperature_c: float | None = None
    throttled: str | None = None
    cpu_fraction: float | None = None
    memory_fraction: float | None = None
    memory_bytes: int | None = None
    disk_free_bytes: int | None = None
    battery_fraction: float | None = None
    power_w: float | None = None


class Vitals:
    """Reads the board; remembers the processor's counters, since a load is a difference of two readings."""

    def __init__(self, state_dir: Path, *, root: Path = Path("/")) -> None:
        self._state_dir = state_dir
        self._root, self._board = root, Board(root)
        self._cpu = _cpu_counters(root)

    def read(self) -> VitalSigns:
        before, self._cpu = self._cpu, _cpu_counters(self._root)
        return VitalSigns(
            uptime_s=_uptime_s(self._root),
            temperature_c=temperature_c(self._board),
            throttled=throttled(self._board),
            cpu_fraction=_load(before, self._cpu),
            memory_fraction=memory_fraction(self._root),
            memory_bytes=memory_bytes(self._root),
            disk_free_bytes=_disk_free_bytes(self._state_dir),
            battery_fraction=battery_fraction(self._board),
            power_w=power_w(self._board),
        )


def temperature_c(board: Board) -> float | None:
    """Returns the processor's temperature; where no zone is called so, the hottest of all."""
    zones = dict(_thermal_zones(board))
    for kind in ZONE_TYPES:
        if kind in zones:
            return zones[kind]
    return max(zones.values(), default=None)


def throttled(board: Board) -> str | None:
    """Returns `ok`, or what holds the board back now (comma-separated); None when the board does not say."""
    found = throttling(board)
    return None if found is None else found.now


def memory_fraction(root: Path) -> float | None:
    """Returns how much of the board's memory is in use and cannot be had."""
    sizes = kilobytes(root / "proc/meminfo")
    total, available = sizes.get("MemTotal"), sizes.get("MemAvailable")
    return None if not total or available is None else min(1.0, max(0.0, 1 - available / total))


def memory_available_bytes(root: Path = Path("/")) -> int | None:
    """Returns what this process may still take of the board's memory; None where it is not told."""
    available = kilobytes(root / "proc/meminfo").get("MemAvailable")
    told = [None if available is None else available * 1024, memory_left_bytes(root)]
    return min((size for size in told if size is not None), default=None)


def memory_bytes(root: Path) -> int | None:
    """Returns the PSS of this process (shared pages divided by their users), or its RSS where that is not told."""
    size = kilobytes(root / "proc/self/smaps_rollup").get("Pss")
    if size is None:
        size = kilobytes(root / "proc/self/status").get("VmRSS")
    return None if size is None else size * 1024


def _thermal_zones(board: Board) -> Iterator[tuple[str, float]]:
    for zone in board.paths("sys/class/thermal/thermal_zone*"):
        kind, millidegrees = text(zone / "type"), number(zone / "temp")
        # A Jetson's zones of units that are switched off cannot be read, or read as -256.
        if kind and millidegrees is not None and PLAUSIBLE_C[0] <= millidegrees / 1000 <= PLAUSIBLE_C[1]:
            yield kind, millidegrees / 1000


def _cpu_counters(root: Path) -> tuple[int, int] | None:
    """Returns busy and total time since boot, in ticks, over all cores."""
    first = (text(root / "proc/stat") or "").partition("\n")[0].split()
    ticks = [tick for field in first[1:9] if (tick := whole(field)) is not None]  # guest time is part of user time
    if len(first) < 6 or first[0] != "cpu" or len(ticks) != len(first[1:9]):
        return None
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _load(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    if before is None or after is None or after[1] <= before[1]:
        return None
    return min(1.0, max(0.0, (after[0] - before[0]) / (after[1] - before[1])))


def _uptime_s(root: Path) -> float:
    try:
        uptime_s = float((text(root / "proc/uptime") or "").split()[0])
    except (ValueError, IndexError):
        return 0.0
    return uptime_s if 0 <= uptime_s <= MAX_UPTIME_S else 0.0


def _disk_free_bytes(directory: Path) -> int | None:
    try:
        disk = os.statvfs(directory)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize
