"""Poll interval for work without a wake-up."""

from __future__ import annotations

from dataclasses import dataclass

from edgefl.core.protocol import POLL_S

INITIAL_DISCONNECTED_S = 0.5
MAX_DISCONNECTED_S = POLL_S / 2
"""Both readiness phases of a run must be answered within 30 s."""


@dataclass(slots=True)
class PollBackoff:
    """Poll back-off: long intervals while wake-ups arrive, else short after work and growing.

    A device without a broker finds the next work after at most twice the time that passed until it was ready, with a
    handful of polls. So polling costs little, however long rounds are, and an idle fleet polls rarely.

    Attributes:
        poll_s: between two polls while wake-ups arrive.
    """

    poll_s: float = POLL_S
    _disconnected_s: float = INITIAL_DISCONNECTED_S

    def compute_interval_s(self, *, is_connected: bool) -> float:
        """Returns how long to wait for a wake-up before polling."""
        if is_connected:
            self._disconnected_s = INITIAL_DISCONNECTED_S
            return self.poll_s
        wait_s, self._disconnected_s = self._disconnected_s, min(2 * self._disconnected_s, MAX_DISCONNECTED_S)
        return min(wait_s, self.poll_s)

    def on_work(self) -> None:
        """Resets the back-off after work: more may follow soon."""
        self._disconnected_s = INITIAL_DISCONNECTED_S
