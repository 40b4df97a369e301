"""Draining: a device finishes what it has and gets no more until it is resumed, whatever restarts meanwhile.

The coordinator's own word counts at once, also for a device that cannot be reached; the device is told as soon as it
is heard, so that it shows itself as `draining`. What was asked is in the history (`drain-asked`, `resume-asked`), and
holds over restarts of either side.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable

from edgefl.coordinator.fleet.presence import DeviceState, Transition
from edgefl.coordinator.fleet.roster import Roster, RosterEvent
from edgefl.errors import NotFoundError
from edgefl.protocol import Command, CommandKind
from edgefl.storage.news import DRAIN_ASKED, RESUME_ASKED, asked_to_drain
from edgefl.storage.store import Store

log = logging.getLogger(__name__)

Send = Callable[[str, Command], None]


class Draining:
    """Keeps who is to rest and tells the devices; safe from any thread.

    Args:
        store: where it is written what was asked.
        roster: gives drained devices no work.
        send: sends a command to a device; it may get lost.
        clock: Unix seconds.
    """

    def __init__(self, store: Store, roster: Roster, send: Send, clock: Callable[[], float]) -> None:
        self._store, self._roster, self._send, self._clock = store, roster, send, clock

    def restore(self) -> None:
        """Drains those again that were drained when the coordinator last ran; call it before any device is heard."""
        for device_id in asked_to_drain(self._store):
            self._roster.set_drained(device_id, drained=True)

    def listen(self) -> Callable[[], None]:
        """Tells devices that show themselves in the other state; returns what ends that."""
        end = self._roster.listen(self._heard)
        for info in self._roster.known():
            self._set_right(info.device_id, self._roster.state(info.device_id))
        return end

    def drain(self, device_id: str) -> None:
        """Gives a device no more work.

        Raises:
            NotFoundError: the fleet has no such device.
        """
        self._ask(device_id, drained=True)

    def resume(self, device_id: str) -> None:
        """Gives a device work again.

        Raises:
            NotFoundError: the fleet has no such device.
        """
        self._ask(device_id, drained=False)

    def _ask(self, device_id: str, *, drained: bool) -> None:
        if self._roster.info(device_id) is None:
            raise NotFoundError(f"no device {device_id!r} in the fleet; `edgefl devices list` shows them")
        if self._roster.is_drained(device_id) != drained:
            kind, message = (DRAIN_ASKED, "no more work") if drained else (RESUME_ASKED, "work again")
            with self._store.batch(durable=True):
                self._store.record_event(kind, message, at=self._clock(), device_id=device_id)
            self._roster.set_drained(device_id, drained=drained)
        self._tell(device_id, drained=drained)  # once more, if it was asked before: the device may not have heard

    def _heard(self, event: RosterEvent) -> None:
        if isinstance(event, Transition):
            self._set_right(event.device_id, event.after)

    def _set_right(self, device_id: str, state: DeviceState | None) -> None:
        drained = self._roster.is_drained(device_id)
        if (drained and state is DeviceState.ONLINE) or (not drained and state is DeviceState.DRAINING):
            self._tell(device_id, drained=drained)

    def _tell(self, device_id: str, *, drained: bool) -> None:
        kind = CommandKind.DRAIN if drained else CommandKind.RESUME
        log.info("telling %s to %s", device_id, kind)
        self._send(device_id, Command(id=f"{kind}-{uuid.uuid4().hex}", kind=kind))
