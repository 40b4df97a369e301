"""Draining: a device finishes its work and gets no more until it is resumed.

The coordinator's decision applies at once, also to an unreachable device; the device gets the command at its next
contact, and then reports itself as `draining`. Requests are in the history (`drain-asked`, `resume-asked`), and hold
over restarts of either side.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable

from edgefl.coordinator.fleet.presence import DevicePresence, PresenceChanged
from edgefl.coordinator.fleet.registry import DeviceRegistry, RegistryEvent
from edgefl.core.errors import NotFoundError
from edgefl.core.protocol import Command, CommandKind
from edgefl.storage.queries.changes import DRAIN_REQUESTED, RESUME_REQUESTED, list_draining_devices
from edgefl.storage.store import Store

log = logging.getLogger(__name__)

SendCommand = Callable[[str, Command], None]


class DrainController:
    """Records which devices are drained, and sends them the commands. Thread-safe.

    Args:
        store: has the requests as events.
        registry: gives drained devices no work.
        send_command: sends a command to a device; it may get lost.
        clock: Unix seconds.
    """

    def __init__(
        self, store: Store, registry: DeviceRegistry, send_command: SendCommand, clock: Callable[[], float]
    ) -> None:
        self._store, self._registry, self._send_command, self._clock = store, registry, send_command, clock

    def restore(self) -> None:
        """Restores the drained devices from the store; call it before any device message is handled."""
        for device_id in list_draining_devices(self._store):
            self._registry.set_drained(device_id, drained=True)

    def subscribe(self) -> Callable[[], None]:
        """Sends commands to devices that report the other state; returns a function that ends that."""
        end = self._registry.subscribe(self._on_registry_event)
        for info in self._registry.list_devices():
            self._sync_device(info.device_id, self._registry.get_state(info.device_id))
        return end

    def drain(self, device_id: str) -> None:
        """Gives a device no more work.

        Raises:
            NotFoundError: the fleet has no such device.
        """
        self._request(device_id, drained=True)

    def resume(self, device_id: str) -> None:
        """Gives a device work again.

        Raises:
            NotFoundError: the fleet has no such device.
        """
        self._request(device_id, drained=False)

    def _request(self, device_id: str, *, drained: bool) -> None:
        if self._registry.get_device(device_id) is None:
            raise NotFoundError(f"no device {device_id!r} in the fleet; `edgefl devices list` shows them")
        if self._registry.is_drained(device_id) != drained:
            kind, message = (DRAIN_REQUESTED, "no more work") if drained else (RESUME_REQUESTED, "work again")
            with self._store.batch(durable=True):
                self._store.record_event(kind, message, at=self._clock(), device_id=device_id)
            self._registry.set_drained(device_id, drained=drained)
        self._notify_device(
            device_id, drained=drained
        )  # repeated for a drained device: an earlier command may be lost

    def _on_registry_event(self, event: RegistryEvent) -> None:
        if isinstance(event, PresenceChanged):
            self._sync_device(event.device_id, event.after)

    def _sync_device(self, device_id: str, state: DevicePresence | None) -> None:
        drained = self._registry.is_drained(device_id)
        if (drained and state is DevicePresence.ONLINE) or (not drained and state is DevicePresence.DRAINING):
            self._notify_device(device_id, drained=drained)

    def _notify_device(self, device_id: str, *, drained: bool) -> None:
        kind = CommandKind.DRAIN if drained else CommandKind.RESUME
        log.info("telling %s to %s", device_id, kind)
        self._send_command(device_id, Command(id=f"{kind}-{uuid.uuid4().hex}", kind=kind))
