"""What a board feels like: temperature, throttling, load, memory, disk, battery and power, read from /proc and /sys.

No vendor tool and no library: Raspberry Pi, Jetson and any other Linux board say these things in files. What a board
does not say is None. All paths hang off a root, so that a tree of files can stand in for a board.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# In order of preference: the processor itself, then the hottest point of the chip, then what PCs have.
ZONE_TYPES = ("cpu-thermal", "cpu_thermal", "CPU-therm", "tj-thermal", "soc-thermal", "x86_pkg_temp", "acpitz")
PLAUSIBLE_C = (-40.0, 150.0)
NOT_THROTTLED = "ok"
# The bits of the Raspberry Pi firmware's get_throttled that speak of now; 16 to 19 say the same of the past.
THROTTLED_BITS = {0: "under-voltage", 1: "frequency-capped", 2: "throttled", 3: "soft-temperature-limit"}


LOOK_AGAIN_S = 60.0
"""Sensors are searched for so often: their drivers may come late, and a search takes longer than all readings."""


class Board:
    """The files of a board; remembers for a minute where its sensors are."""

    def __init__(self, root: Path = Path("/"), *, clock: Callable[[], float] = time.monotonic) -> None:
        self.root, self._clock = root, clock
        self._found: dict[str, tuple[float, list[Path]]] = {}

    def paths(self, pattern: str) -> list[Path]:
        """Returns what matches below the root, sorted, as it was at most a minute ago."""
        now_s = self._clock()
        known = self._found.get(pattern)
        if known is None or now_s - known[0] >= LOOK_AGAIN_S:
            known = self._found[pattern] = now_s, sorted(self.root.glob(pattern))
        return known[1]


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
    for path in board.paths("sys/devices/platform/soc*/**/get_throttled"):
        bits = _number(path, base=16)
        if bits is not None:
            return ",".join(name for bit, name in THROTTLED_BITS.items() if bits >> bit & 1) or NOT_THROTTLED
    for hwmon in _hwmons(board, "rpi_volt"):
        alarm = _number(hwmon / "in0_lcrit_alarm")
        if alarm is not None:
            return THROTTLED_BITS[0] if alarm else NOT_THROTTLED
    return None


def memory_fraction(root: Path) -> float | None:
    """Returns how much of the board's memory is in use and cannot be had."""
    sizes = _kilobytes(root / "proc/meminfo")
    total, available = sizes.get("MemTotal"), sizes.get("MemAvailable")
    return None if not total or available is None else min(1.0, max(0.0, 1 - available / total))


def memory_available_bytes(root: Path = Path("/")) -> int | None:
    """Returns what programs may still take of the board's memory; None where it is not told."""
    available = _kilobytes(root / "proc/meminfo").get("MemAvailable")
    return None if available is None else available * 1024


def memory_bytes(root: Path) -> int | None:
    """Returns the PSS of this process (shared pages divided by their users), or its RSS where that is not told."""
    size = _kilobytes(root / "proc/self/smaps_rollup").get("Pss")
    if size is None:
        size = _kilobytes(root / "proc/self/status").get("VmRSS")
    return None if size is None else size * 1024


def battery_fraction(board: Board) -> float | None:
    """Returns the charge of the board's own battery, not that of a mouse."""
    for supply in board.paths("sys/class/power_supply/*"):
        if _text(supply / "type") != "Battery" or _text(supply / "scope") == "Device":
            continue
        percent = _number(supply / "capacity")
        if percent is not None:
            return min(1.0, max(0.0, percent / 100))
    return None


def power_w(board: Board) -> float | None:
    """Returns the power that the board draws, from the INA3221 monitors of a Jetson.

    VDD_IN is the whole board where it exists (Orin Nano, NX); otherwise the rails add up (AGX).
    """
    rails = dict(rail for hwmon in _hwmons(board, "ina3221") for rail in _rails(hwmon))
    return rails.get("VDD_IN", sum(rails.values())) if rails else None


def _rails(hwmon: Path) -> Iterator[tuple[str, float]]:
    for label_path in sorted(hwmon.glob("in?_label")):
        number = label_path.name[2]
        label = _text(label_path)
        millivolts = _number(hwmon / f"in{number}_input")
        milliamperes = _number(hwmon / f"curr{number}_input")
        if label and label != "NC" and millivolts is not None and milliamperes is not None:
            yield label, millivolts * milliamperes / 1e6


def _thermal_zones(board: Board) -> Iterator[tuple[str, float]]:
    for zone in board.paths("sys/class/thermal/thermal_zone*"):
        kind, millidegrees = _text(zone / "type"), _number(zone / "temp")
        # A Jetson's zones of units that are switched off cannot be read, or read as -256.
        if kind and millidegrees is not None and PLAUSIBLE_C[0] <= millidegrees / 1000 <= PLAUSIBLE_C[1]:
            yield kind, millidegrees / 1000


def _hwmons(board: Board, name: str) -> list[Path]:
    return [path for path in board.paths("sys/class/hwmon/*") if _text(path / "name") == name]


def _cpu_counters(root: Path) -> tuple[int, int] | None:
    """Returns busy and total time since boot, in ticks, over all cores."""
    first = (_text(root / "proc/stat") or "").partition("\n")[0].split()
    if len(first) < 6 or first[0] != "cpu" or not all(field.isdecimal() for field in first[1:]):
        return None
    ticks = [int(field) for field in first[1:9]]  # guest time is part of user time already
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _load(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    if before is None or after is None or after[1] <= before[1]:
        return None
    return min(1.0, max(0.0, (after[0] - before[0]) / (after[1] - before[1])))


def _uptime_s(root: Path) -> float:
    try:
        return float((_text(root / "proc/uptime") or "").split()[0])
    except (ValueError, IndexError):
        return 0.0


def _disk_free_bytes(directory: Path) -> int | None:
    try:
        disk = os.statvfs(directory)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize


def _kilobytes(path: Path) -> dict[str, int]:
    """Returns the `Name:  123 kB` lines of a file of /proc."""
    sizes = {}
    for line in (_text(path) or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdecimal():
            sizes[name] = int(words[0])
    return sizes


def _number(path: Path, *, base: int = 10) -> int | None:
    try:
        return int(_text(path) or "", base)
    except ValueError:
        return None


def _text(path: Path) -> str | None:
    # /sys answers EAGAIN, EINVAL or ENODATA for a sensor that is asleep.
    try:
        return path.read_text(errors="replace").strip("\0 \n")
    except OSError:
        return None
