"""Board health: temperature, throttling, load, memory, disk, battery, power; and pacing of training by temperature.

Read from files on Raspberry Pi, Jetson and other Linux boards; a vendor's tool is the last resort. Unknown values
are None. All paths are relative to a root, so that a tree of files can replace a board.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from edgefl.core.types import Json
from edgefl.device.hardware.board_reader import (
    BoardReader,
    compute_memory_left_bytes,
    parse_int,
    read_int,
    read_kilobytes,
    read_text,
)
from edgefl.device.hardware.board_sensors import (
    read_battery_fraction,
    read_jetson_status,
    read_power_w,
    read_supply_status,
    read_throttle_status,
)

# In order of preference: the processor itself, then the hottest point of the chip, then zones of PCs.
ZONE_TYPES = ("cpu-thermal", "cpu_thermal", "CPU-therm", "tj-thermal", "soc-thermal", "x86_pkg_temp", "acpitz")
PLAUSIBLE_C = (-40.0, 150.0)
MAX_UPTIME_S = 1e10


class HealthReader:
    """Health reader; keeps CPU counters, since load is the difference of two readings."""

    def __init__(self, state_dir: Path, *, root: Path = Path("/")) -> None:
        self._state_dir = state_dir
        self._root, self._board = root, BoardReader(root)
        self._cpu_counters = _read_cpu_counters(root)

    def read(self) -> Json:
        """Returns the fields of a heartbeat that tell the board's health.

        `memory_bytes` is this process's PSS, or RSS where that is unknown.
        """
        former_counters, self._cpu_counters = self._cpu_counters, _read_cpu_counters(self._root)
        return {
            "uptime_s": _read_uptime_s(self._root),
            "temperature_c": read_temperature_c(self._board),
            "throttled": read_throttled(self._board),
            "cpu_fraction": _compute_load(former_counters, self._cpu_counters),
            "memory_fraction": read_memory_fraction(self._root),
            "memory_bytes": read_process_memory_bytes(self._root),
            "disk_free_bytes": _read_disk_free_bytes(self._state_dir),
            "battery_fraction": read_battery_fraction(self._board),
            "power_w": read_power_w(self._board),
        }


def read_temperature_c(board: BoardReader) -> float | None:
    """Returns the processor's temperature; without such a zone, the hottest of all."""
    zones = dict(_read_thermal_zones(board))
    for kind in ZONE_TYPES:
        if kind in zones:
            return zones[kind]
    return max(zones.values(), default=None)


def read_throttled(board: BoardReader) -> str | None:
    """Returns `ok` or the present throttle reasons (comma-separated); None when unknown."""
    status = read_throttle_status(board)
    return None if status is None else status.now


def read_memory_fraction(root: Path) -> float | None:
    """Returns the fraction of the board's memory in use and not available."""
    sizes = read_kilobytes(root / "proc/meminfo")
    total, available = sizes.get("MemTotal"), sizes.get("MemAvailable")
    return None if not total or available is None else min(1.0, max(0.0, 1 - available / total))


def read_available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Returns the memory in bytes still available to this process; None when unknown."""
    available = read_kilobytes(root / "proc/meminfo").get("MemAvailable")
    sizes = [None if available is None else available * 1024, compute_memory_left_bytes(root)]
    return min((size for size in sizes if size is not None), default=None)


def read_process_memory_bytes(root: Path) -> int | None:
    """Returns the PSS of this process (shared pages divided by their users), or RSS where unknown."""
    size = read_kilobytes(root / "proc/self/smaps_rollup").get("Pss")
    if size is None:
        size = read_kilobytes(root / "proc/self/status").get("VmRSS")
    return None if size is None else size * 1024


def _read_thermal_zones(board: BoardReader) -> Iterator[tuple[str, float]]:
    for zone in board.find_paths("sys/class/thermal/thermal_zone*"):
        kind, millidegrees = read_text(zone / "type"), read_int(zone / "temp")
        # A Jetson's zones of powered-down units cannot be read, or read as -256.
        if kind and millidegrees is not None and PLAUSIBLE_C[0] <= millidegrees / 1000 <= PLAUSIBLE_C[1]:
            yield kind, millidegrees / 1000


def _read_cpu_counters(root: Path) -> tuple[int, int] | None:
    """Returns busy and total ticks since boot, over all cores."""
    first = (read_text(root / "proc/stat") or "").partition("\n")[0].split()
    ticks = [
        tick for field in first[1:9] if (tick := parse_int(field)) is not None
    ]  # guest time is part of user time
    if len(first) < 6 or first[0] != "cpu" or len(ticks) != len(first[1:9]):
        return None
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _compute_load(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    if before is None or after is None or after[1] <= before[1]:
        return None
    return min(1.0, max(0.0, (after[0] - before[0]) / (after[1] - before[1])))


def _read_uptime_s(root: Path) -> float:
    try:
        uptime_s = float((read_text(root / "proc/uptime") or "").split()[0])
    except (ValueError, IndexError):
        return 0.0
    return uptime_s if 0 <= uptime_s <= MAX_UPTIME_S else 0.0


def _read_disk_free_bytes(directory: Path) -> int | None:
    try:
        disk = os.statvfs(directory)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize


def read_board_status(board: BoardReader, *, is_jetson: bool) -> Json:
    """Returns temperature, throttling, GPU load, power and supply; unknown values are missing."""
    throttle_status = read_throttle_status(board)
    values = {
        "temperature_c": read_temperature_c(board),
        "throttled": throttle_status.now if throttle_status else None,
        "throttled_since_boot": throttle_status.since_boot if throttle_status else None,
        "power_w": read_power_w(board),
        **read_supply_status(board),
        **(read_jetson_status(board) if is_jetson else {}),
    }
    return {name: value for name, value in values.items() if value is not None}


log = logging.getLogger(__name__)

HYSTERESIS_C = 5.0
"""Hysteresis below the limit before training resumes, which avoids pausing at every iteration."""
READ_INTERVAL_S = 1.0
POLL_INTERVAL_S = 0.2
"""Interval at which `should_stop` is polled."""
LOG_INTERVAL_S = 60.0
LIMIT_RANGE_C = (30.0, 110.0)


def create_thermal_pacer(get_limit_c: Callable[[], float | None]) -> ThermalPacer:
    """Returns the pacer of this machine."""
    board = BoardReader()
    return ThermalPacer(get_limit_c, lambda: read_temperature_c(board))


class ThermalPacer:
    """Thermal pacer, reset for each assignment.

    Args:
        get_limit_c: degrees Celsius, read at the start of every assignment; None for no limit.
        get_temperature_c: reads the board; None where it has no sensor.
        clock: monotonic seconds.
        sleep: sleeps for so many seconds.
    """

    def __init__(
        self,
        get_limit_c: Callable[[], float | None],
        get_temperature_c: Callable[[], float | None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._get_limit_c, self._get_temperature_c, self._clock, self._sleep = (
            get_limit_c,
            get_temperature_c,
            clock,
            sleep,
        )
        self.start()

    def start(self) -> None:
        """Resets the paced time and reads the limit."""
        self._limit_c = self._get_limit_c()
        self._checked_s: float | None = None
        self._paced_s: float | None = None

    def get_metrics(self) -> Json:
        """Returns `paced_s`, the seconds paused since `start`; empty without a limit or a sensor."""
        return {} if self._paced_s is None else {"paced_s": self._paced_s}

    def wait_until_cool(self, should_stop: Callable[[], bool]) -> None:
        """Returns once the board is cool enough, or `should_stop` returns True."""
        if self._limit_c is None:
            return
        started_s = self._clock()
        if self._checked_s is not None and started_s - self._checked_s < READ_INTERVAL_S:
            return
        self._checked_s, temperature_c = started_s, self._get_temperature_c()
        if temperature_c is None:
            return
        former_paced_s = self._paced_s or 0.0
        self._paced_s = former_paced_s
        if temperature_c > self._limit_c:
            self._wait_for_cooling(self._limit_c, temperature_c, should_stop)
            self._checked_s = self._clock()
            self._paced_s = former_paced_s + self._checked_s - started_s

    def _wait_for_cooling(self, limit_c: float, temperature_c: float, should_stop: Callable[[], bool]) -> None:
        checked_s = logged_s = self._clock()
        log.info("rests: it is at %.0f °C, and its limit is %.0f °C", temperature_c, limit_c)
        while not should_stop():
            self._sleep(POLL_INTERVAL_S)
            now_s = self._clock()
            if now_s - checked_s < READ_INTERVAL_S:
                continue
            checked_s, current_c = now_s, self._get_temperature_c()
            if current_c is None or current_c <= limit_c - HYSTERESIS_C:
                return
            if now_s - logged_s >= LOG_INTERVAL_S:
                logged_s = now_s
                log.warning("still rests: %.0f °C, and its limit is %.0f °C", current_c, limit_c)
