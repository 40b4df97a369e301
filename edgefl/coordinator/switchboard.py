"""What devices say, handed to whoever asked for it: they speak before a coordinator that starts has all its parts."""

from __future__ import annotations

import time
from collections.abc import Callable

from edgefl.coordinator.askers import Askers
from edgefl.coordinator.mail import Reply
from edgefl.protocol import Command, CommandKind, Heartbeat
from edgefl.types import Progress

END_AGAIN_S = 60.0


class Switchboard:
    """Hands on what devices say, in whatever thread has heard it. Before `open` nobody has asked anything.

    Args:
        clock: seconds, monotone.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._askers: Askers | None = None

    def open(self, askers: Askers) -> None:
        """Hands everything on to these from now on."""
        self._askers = askers

    def post(self, item: Reply | Progress) -> None:
        """Takes a reply or the progress of a device, for the active run."""
        if self._askers is not None:
            self._askers.worker.post(item)

    def answer(self, device_id: str, payload: bytes) -> None:
        """Takes one message of an answer to a question; see `Questions.answered`."""
        if self._askers is not None:
            self._askers.questions.answered(device_id, payload)

    def heartbeat(self, device_id: str, heartbeat: Heartbeat) -> None:
        """Takes what a device says of itself, and takes back work that nobody wants any more."""
        askers = self._askers
        if askers is None:
            return
        askers.deployments.heard(device_id, heartbeat)
        askers.installations.heard(device_id, heartbeat)
        _call_back(askers, device_id, heartbeat, self._clock())


def _call_back(askers: Askers, device_id: str, heartbeat: Heartbeat, now_s: float) -> None:
    """Recalls work for a run that is over; a coordinator that was killed could not, and it may take hours.

    Likewise ends a node that nobody listens to any more, since it is flagged.
    """
    worker, assignment, run = askers.worker, heartbeat.assignment, heartbeat.run
    if run is None:
        return
    is_wanted = worker.is_active(run) or worker.goes_on(run)
    if is_wanted and (assignment or not worker.bars(run, device_id)):
        return
    if assignment:
        # The same id each time: a device obeys a command once.
        recall = Command(id=f"recall-{assignment}", kind=CommandKind.RECALL, argument=assignment)
        askers.bell.command(device_id, recall)
    else:  # a node that goes on by itself
        # Another id after a while: it may have obeyed, and begun again when the run was resumed.
        end_id = f"end-{run}-{int(now_s / END_AGAIN_S)}"
        askers.bell.command(device_id, Command(id=end_id, kind=CommandKind.END, argument=run))
