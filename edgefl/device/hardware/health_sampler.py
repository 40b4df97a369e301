"""Board health and link quality during one assignment, sampled by the training thread, at most once a second.

Heartbeats contain the same values, but are kept for a day only, and a short assignment may contain none. Wi-Fi signal
comes from /proc/net/wireless, its rate from an ioctl of the kernel, the speed of wired links from /sys. Unknown
values are None.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgefl.core.types import Json
from edgefl.device.hardware.board_reader import BoardReader, read_int, read_text
from edgefl.device.hardware.board_sensors import NOT_THROTTLED, THROTTLED_BITS, read_power_w
from edgefl.device.hardware.health import read_temperature_c, read_throttled

SAMPLE_INTERVAL_S = 1.0
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
    # A cable that is not plugged in has the speed -1.
    megabits = read_int(root / "sys/class/net" / interface / "speed")
    return megabits * 1e6 if megabits is not None and megabits > 0 else None


def _read_lines(path: Path) -> list[str]:
    return (read_text(path) or "").splitlines()


class HealthSampler:
    """Sampler of board health between `start` and `stop`.

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
