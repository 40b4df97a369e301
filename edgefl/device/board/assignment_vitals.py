"""What a board felt like during one assignment, looked at by the thread that trains, once a second at the most.

Heartbeats say the same of every moment, but they are kept for a day and none may fall into a short assignment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from edgefl.device.board.board import Board
from edgefl.device.board.jetson import power_w
from edgefl.device.board.link_quality import LinkQuality, link_quality
from edgefl.device.board.throttling import NOT_THROTTLED, THROTTLED_BITS
from edgefl.device.board.vitals import temperature_c, throttled
from edgefl.types import Json

LOOK_EVERY_S = 1.0


class AssignmentVitals:
    """Looks at the board between `begin` and `end`.

    Args:
        root: where the board's files hang.
        clock: monotonic seconds.
        quality: reads the network link.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        clock: Callable[[], float] = time.monotonic,
        quality: Callable[[Path], LinkQuality] = link_quality,
    ) -> None:
        self._root, self._clock, self._quality = root, clock, quality
        self._board = Board(root, clock=clock)
        self.begin()

    def begin(self) -> None:
        """Forgets what was seen; the next look is the first."""
        self._looked_s: float | None = None
        self._temperatures: list[float] = []
        self._troubles: set[str] = set()
        self._tells_throttling = False
        self._signals: list[float] = []
        self._rates: list[float] = []
        self._power_w: float | None = None
        self._energy_j: float | None = None

    def look(self) -> None:
        """Looks at the board if it is time; to be called as often as one likes."""
        if self._looked_s is None or self._clock() - self._looked_s >= LOOK_EVERY_S:
            self._look()

    def end(self) -> Json:
        """Looks once more; returns what is known, by the names of the history's columns."""
        self._look()
        return {
            name: value
            for name, value in {
                "max_temperature_c": max(self._temperatures, default=None),
                "throttled": self._throttled(),
                "signal_dbm": min(self._signals, default=None),
                "link_bits_per_s": min(self._rates, default=None),
                "energy_j": self._energy_j,
            }.items()
            if value is not None
        }

    def _look(self) -> None:
        now_s, before_s = self._clock(), self._looked_s
        self._looked_s = now_s
        self._note(self._temperatures, temperature_c(self._board))
        troubles = throttled(self._board)
        if troubles is not None:
            self._tells_throttling = True
            self._troubles |= set(troubles.split(",")) - {NOT_THROTTLED}
        quality = self._quality(self._root)
        self._note(self._signals, quality.signal_dbm)
        self._note(self._rates, quality.link_bits_per_s)
        before_w, self._power_w = self._power_w, power_w(self._board)
        if before_s is not None and before_w is not None and self._power_w is not None:
            spent_j = (now_s - before_s) * (before_w + self._power_w) / 2
            self._energy_j = (self._energy_j or 0.0) + spent_j

    @staticmethod
    def _note(seen: list[float], value: float | None) -> None:
        if value is not None:
            seen.append(value)

    def _throttled(self) -> str | None:
        words = [word for word in THROTTLED_BITS.values() if word in self._troubles]
        return (",".join(words) or NOT_THROTTLED) if self._tells_throttling else None
