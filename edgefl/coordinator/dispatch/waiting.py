"""Says that a run waits for devices: nobody should have to guess why nothing happens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from edgefl.coordinator.dispatch.participants import FleetRun

log = logging.getLogger(__name__)

WAITING = "run-waiting"
"""The event that a run leaves which waits."""
AFTER_S = 30.0
NAMED = 5


class Waiting:
    """Used by the thread of the run.

    Args:
        run: which one.
        clock: seconds, monotone.
        note: keeps an event of the run, told its kind and what it says.
    """

    def __init__(self, run: FleetRun, clock: Callable[[], float], note: Callable[[str, str], None]) -> None:
        self._run, self._clock, self._note = run, clock, note
        self._since_s: float | None = None
        self._is_told = False

    def look(self, ready: Sequence[str], *, has_work: bool) -> bool:
        """Tells, once each time, that for half a minute nobody has had work; returns whether it has told it now.

        `ready` are those who could work.
        """
        now_s = self._clock()
        if has_work:
            self._since_s, self._is_told = None, False
            return False
        self._since_s = now_s if self._since_s is None else self._since_s
        if self._is_told or now_s - self._since_s < AFTER_S:
            return False
        self._is_told = True
        said = self._said(ready)
        log.warning("run %s %s", self._run.run_id, said)
        self._note(WAITING, said)
        return True

    def next_look_s(self) -> float | None:
        """Returns when there may be something to tell."""
        return None if self._since_s is None or self._is_told else self._since_s + AFTER_S

    def _said(self, ready: Sequence[str]) -> str:
        if not ready:
            return f"waits: no device with a shard for {self._run.task} is ready; see edgefl devices list"
        names = ", ".join(ready[:NAMED]) + (", …" if len(ready) > NAMED else "")
        return (
            f"waits for more devices: {len(ready)} ready ({names}), and the strategy gives them no work yet; "
            "see [devices] in the run file, and names in its graph"
        )
