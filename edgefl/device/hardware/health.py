"""Board health: temperature, throttling, load, memory, disk, battery, power, network link.

It is read once, sampled during an assignment, or paces training by the temperature.

Read from files on Raspberry Pi, Jetson and other Linux boards; a vendor's tool is the last resort. Unknown values
are None. All paths are relative to a root, so that a tree of files can replace a board.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edgefl.core.types import Json
from edgefl.device.hardware.board_reader import (
    NOT_THROTTLED,
    THROTTLED_BITS,
    BoardReader,
    compute_memory_left_bytes,
    parse_int,
    read_battery_fraction,
    read_int,
    read_jetson_status,
    read_kilobytes,
    read_power_w,
    read_supply_status,
    read_text,
    read_throttle_status,
)

log = logging.getLogger(__name__)

# In order of preference: the processor itself, then the hottest point of the chip, then zones of PCs.
ZONE_TYPES = ("cpu-thermal", "cpu_thermal", "CPU-therm", "tj-thermal", "soc-thermal", "x86_pkg_temp", "acpitz")
PLAUSIBLE_C = (-40.0, 150.0)
MAX_UPTIME_S = 1e10

HYSTERESIS_C = 5.0
"""Hysteresis below the limit before training resumes, which avoids pausing at every iteration."""
READ_INTERVAL_S = 1.0
POLL_INTERVAL_S = 0.2
"""Interval at which `should_stop` is polled."""
LOG_INTERVAL_S = 60.0
LIMIT_RANGE_C = (30.0, 110.0)

SAMPLE_INTERVAL_S = 1.0
SIOCGIWRATE = 0x8B21
PLAUSIBLE_DBM = (-200.0, 0.0)
# Drivers of older kernels report a negative level as an unsigned byte.
_BYTE_RANGE = 256.0

ReadWirelessRate = Callable[[str], float | None]


class HealthReader:
    """Health reader; keeps CPU counters, since load is the difference of two readings."""

    def __init__(self, state_dir: Path, *, root: Path = Path("/")) -> None:
        self._state_dir = state_dir
        self._root, self._board = root, BoardReader(root)
        self._cpu_counters = read_cpu_counters(root)

    def read(self) -> Json:
        """Returns the fields of a heartbeat that tell the board's health.

        `memory_bytes` is this process's PSS, or RSS where that is unknown.
        """
        former_counters, self._cpu_counters = self._cpu_counters, read_cpu_counters(self._root)
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


def read_cpu_counters(root: Path) -> tuple[int, int] | None:
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
    interface = find_interface(root)
    if interface is None:
        return LinkQuality()
    signal_dbm = _read_signal_dbm(root, interface)
    if signal_dbm is None and not (root / "sys/class/net" / interface / "wireless").exists():
        return LinkQuality(link_bits_per_s=_read_wired_bits_per_s(root, interface))
    return LinkQuality(signal_dbm=signal_dbm, link_bits_per_s=read_rate(interface))


def find_interface(root: Path) -> str | None:
    """Returns the interface of the default route, else the first that is up; None without one."""
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
    # A cable that is not plugged in has the speed -1.
    megabits = read_int(root / "sys/class/net" / interface / "speed")
    return megabits * 1e6 if megabits is not None and megabits > 0 else None


def _read_lines(path: Path) -> list[str]:
    return (read_text(path) or "").splitlines()


class HealthSampler:
    """Sampler of board health and link quality between `start` and `stop`, once a second at most.

    Heartbeats contain the same values, but are kept for a day only, and a short assignment may contain none. Wi-Fi
    signal comes from /proc/net/wireless, its rate from an ioctl of the kernel, the speed of wired links from /sys.

    Args:
        root: of the board's files.
        clock: monotonic seconds.
        read_quality: reads the network link.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        clock: Callable[[], float] = time.monotonic,
        read_quality: Callable[[Path], LinkQuality] = read_link_quality,
    ) -> None:
        self._root, self._clock, self._read_quality = root, clock, read_quality
        self._board = BoardReader(root, clock=clock)
        self.start()

    def start(self) -> None:
        """Resets all samples."""
        self._sampled_s: float | None = None
        self._temperatures: list[float] = []
        self._throttle_reasons: set[str] = set()
        self._has_throttle_status = False
        self._signals: list[float] = []
        self._link_rates: list[float] = []
        self._power_w: float | None = None
        self._energy_j: float | None = None

    def sample(self) -> None:
        """Takes a sample if one is due; may be called at any rate."""
        if self._sampled_s is None or self._clock() - self._sampled_s >= SAMPLE_INTERVAL_S:
            self._record_sample()

    def stop(self) -> Json:
        """Takes a last sample; returns the metrics by the names of the history's columns."""
        self._record_sample()
        return {
            name: value
            for name, value in {
                "max_temperature_c": max(self._temperatures, default=None),
                "throttled": self._format_throttle_reasons(),
                "signal_dbm": min(self._signals, default=None),
                "link_bits_per_s": min(self._link_rates, default=None),
                "energy_j": self._energy_j,
            }.items()
            if value is not None
        }

    def _record_sample(self) -> None:
        now_s, former_s = self._clock(), self._sampled_s
        self._sampled_s = now_s
        self._add_value(self._temperatures, read_temperature_c(self._board))
        throttle_reasons = read_throttled(self._board)
        if throttle_reasons is not None:
            self._has_throttle_status = True
            self._throttle_reasons |= set(throttle_reasons.split(",")) - {NOT_THROTTLED}
        quality = self._read_quality(self._root)
        self._add_value(self._signals, quality.signal_dbm)
        self._add_value(self._link_rates, quality.link_bits_per_s)
        former_w, self._power_w = self._power_w, read_power_w(self._board)
        if former_s is not None and former_w is not None and self._power_w is not None:
            used_j = (now_s - former_s) * (former_w + self._power_w) / 2
            self._energy_j = (self._energy_j or 0.0) + used_j

    @staticmethod
    def _add_value(values: list[float], value: float | None) -> None:
        if value is not None:
            values.append(value)

    def _format_throttle_reasons(self) -> str | None:
        reasons = [reason for reason in THROTTLED_BITS.values() if reason in self._throttle_reasons]
        return (",".join(reasons) or NOT_THROTTLED) if self._has_throttle_status else None
