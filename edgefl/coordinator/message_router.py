"""Routes device messages to services; drops them before start-up is complete."""

from __future__ import annotations

import time
from collections.abc import Callable

from edgefl.coordinator.device_clients import DeviceClients
from edgefl.coordinator.flower.messages import Reply
from edgefl.core.protocol import Command, CommandKind, Heartbeat
from edgefl.core.types import Progress

END_RESEND_S = 60.0


class DeviceMessageRouter:
    """Routes device messages in the thread that received them. Drops them before `open`.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._clients: DeviceClients | None = None

    def open(self, clients: DeviceClients) -> None:
        """Starts routing to `clients`."""
        self._clients = clients

    def route_reply(self, item: Reply | Progress) -> None:
        """Routes a reply or progress to the active run."""
        if self._clients is not None:
            self._clients.run_scheduler.post(item)

    def on_command_reply(self, device_id: str, payload: bytes) -> None:
        """Routes a reply to a call; see `DeviceRpc.on_reply`."""
        if self._clients is not None:
            self._clients.device_rpc.on_reply(device_id, payload)

    def on_heartbeat(self, device_id: str, heartbeat: Heartbeat) -> None:
        """Routes a heartbeat to the rollouts, and cancels work of runs that are over."""
        clients = self._clients
        if clients is None:
            return
        clients.deployments.on_heartbeat(device_id, heartbeat)
        clients.installations.on_heartbeat(device_id, heartbeat)
        _cancel_stale_work(clients, device_id, heartbeat, self._clock())


def _cancel_stale_work(clients: DeviceClients, device_id: str, heartbeat: Heartbeat, now_s: float) -> None:
    """Recalls work of a run that is over, which a killed coordinator could not; it might take hours.

    Likewise ends an autonomous node that is blocked.
    """
    scheduler, assignment, run = clients.run_scheduler, heartbeat.assignment, heartbeat.run
    if run is None:
        return
    is_current = scheduler.is_active(run) or scheduler.is_autonomous(run)
    if is_current and (assignment or not scheduler.is_blocked(run, device_id)):
        return
    if assignment:
        # The same id each time: a device obeys a command once.
        recall = Command(id=f"recall-{assignment}", kind=CommandKind.RECALL, argument=assignment)
        clients.notifier.send_command(device_id, recall)
    else:  # an autonomous node
        # Another id after a while: it may have ended, and started again when the run was resumed.
        end_id = f"end-{run}-{int(now_s / END_RESEND_S)}"
        clients.notifier.send_command(device_id, Command(id=end_id, kind=CommandKind.END, argument=run))
