"""Reports that a run waits for devices, and why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from edgefl.coordinator.execution.eligibility import RunSpec

log = logging.getLogger(__name__)

RUN_WAITING = "run-waiting"
"""Kind of the event of a waiting run."""
REPORT_AFTER_S = 30.0
MAX_NAMES = 5


class IdleRunReporter:
    """Reports a run without work once per wait. Not thread-safe: used by the run's thread alone.

    Args:
        run: the run.
        clock: seconds, monotonic.
        record_event: (kind, message) -> None; writes an event of the run to the history.
    """

    def __init__(self, run: RunSpec, clock: Callable[[], float], record_event: Callable[[str, str], None]) -> None:
        self._run, self._clock, self._record_event = run, clock, record_event
        self._since_s: float | None = None
        self._is_reported = False

    def poll(self, idle_devices: Sequence[str], *, has_work: bool) -> bool:
        """Reports once that no device has had work for `REPORT_AFTER_S`; returns whether it just did.

        `idle_devices` are those that could work.
        """
        now_s = self._clock()
        if has_work:
            self._since_s, self._is_reported = None, False
            return False
        self._since_s = now_s if self._since_s is None else self._since_s
        if self._is_reported or now_s - self._since_s < REPORT_AFTER_S:
            return False
        self._is_reported = True
        message = self._format_message(idle_devices)
        log.warning("run %s %s", self._run.run_id, message)
        self._record_event(RUN_WAITING, message)
        return True

    def next_poll_s(self) -> float | None:
        """Returns when to poll next; None if there is nothing to report."""
        return None if self._since_s is None or self._is_reported else self._since_s + REPORT_AFTER_S

    def _format_message(self, idle_devices: Sequence[str]) -> str:
        if not idle_devices:
            return f"waits: no device with a shard for {self._run.task} is ready; see edgefl devices list"
        names = ", ".join(idle_devices[:MAX_NAMES]) + (", …" if len(idle_devices) > MAX_NAMES else "")
        return (
            f"waits for more devices: {len(idle_devices)} ready ({names}), and the strategy gives them no work yet; "
            "see [devices] in the run file, and names in its graph"
        )
