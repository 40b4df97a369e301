"""Board health during one assignment, sampled by the training thread, at most once a second.

Heartbeats contain the same values, but are kept for a day only, and a short assignment may contain none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from edgefl.core.types import Json
from edgefl.device.hardware.board_reader import BoardReader
from edgefl.device.hardware.health import read_temperature_c, read_throttled
from edgefl.device.hardware.jetson import read_power_w
from edgefl.device.hardware.link_quality import LinkQuality, read_link_quality
from edgefl.device.hardware.throttling import NOT_THROTTLED, THROTTLED_BITS

SAMPLE_INTERVAL_S = 1.0


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
