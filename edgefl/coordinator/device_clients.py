"""Services that send instructions to devices, and the router of the devices' messages to them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from edgefl.coordinator.execution.messaging import DeviceNotifier, DeviceRpc
from edgefl.coordinator.execution.site_rounds import SiteRounds
from edgefl.coordinator.flower.messages import Reply
from edgefl.coordinator.rollouts.deployments import Deployments, DeploymentService, ExportModel, plan_deployments
from edgefl.coordinator.rollouts.installations import BundleStore, Installations, InstallationService
from edgefl.coordinator.runs.scheduler import RunContext, RunScheduler
from edgefl.core.conditions import parse_blocker
from edgefl.core.errors import EdgeflError
from edgefl.core.protocol import Command, CommandKind, Heartbeat
from edgefl.core.types import Progress

END_RESEND_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClients:
    """Services that send instructions to devices, through `notifier`."""

    notifier: DeviceNotifier
    device_rpc: DeviceRpc
    deployments: DeploymentService
    installations: InstallationService
    bundle_store: BundleStore
    run_scheduler: RunScheduler

    @classmethod
    def create(cls, context: RunContext, *, export: ExportModel, on_fatal: Callable[[EdgeflError], None]) -> Self:
        """Returns the services of one coordinator, not yet started.

        Args:
            context: shared services of runs; the deployments are notified of finished ones.
            export: exports a model to the file that devices deploy.
            on_fatal: called when the store or a journal can no longer be written.
        """
        store, registry = context.store, context.registry
        bundle_store = BundleStore(context.directory.root / "bundles")
        deployments = DeploymentService(
            Deployments(
                store=store,
                registry=registry,
                directory=context.directory,
                export=export,
                bundle_store=bundle_store,
            ),
            store=store,
            registry=registry,
            send_command=context.notifier.send_command,
            on_fatal=on_fatal,
        )
        installations = InstallationService(
            Installations(store=store, registry=registry, bundle_store=bundle_store),
            store=store,
            registry=registry,
            send_command=context.notifier.send_command,
            on_fatal=on_fatal,
        )
        return cls(
            notifier=context.notifier,
            device_rpc=DeviceRpc(context.notifier, context.registry),
            deployments=deployments,
            installations=installations,
            bundle_store=bundle_store,
            run_scheduler=RunScheduler(
                replace(context, plan_deployments=partial(plan_deployments, deployments, store)), on_fatal=on_fatal
            ),
        )


class DeviceMessageRouter:
    """Routes device messages in the thread that received them. Drops them before `open`.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._clients: DeviceClients | None = None
        self._site: SiteRounds | None = None

    def open(self, clients: DeviceClients) -> None:
        """Starts routing to `clients`."""
        self._clients = clients

    def open_site(self, site: SiteRounds) -> None:
        """Starts routing to the rounds of a gateway, too."""
        self._site = site

    @property
    def has_site(self) -> bool:
        """Whether the boards work for a coordinator upstream."""
        return self._site is not None

    def route_reply(self, item: Reply | Progress) -> None:
        """Routes a reply or progress to the active run, and to the gateway's round."""
        if self._site is not None:
            self._site.post(item)
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
        site = self._site
        if site is not None and heartbeat.run and site.is_current(heartbeat.run):
            return
        _cancel_stale_work(clients, device_id, heartbeat, self._clock())
        blocker = parse_blocker(heartbeat.blocked)
        if blocker is not None and site is not None and site.is_current(blocker.run):
            return
        if blocker is not None and blocker.run and not _is_current(clients, blocker.run):
            _send_end(clients, device_id, blocker.run, self._clock())  # it keeps the conditions of a run that is over


def _cancel_stale_work(clients: DeviceClients, device_id: str, heartbeat: Heartbeat, now_s: float) -> None:
    """Recalls work of a run that is over, which a killed coordinator could not; it might take hours.

    Likewise ends an autonomous node that is blocked.
    """
    scheduler, assignment, run = clients.run_scheduler, heartbeat.assignment, heartbeat.run
    if run is None:
        return
    if _is_current(clients, run) and (assignment or not scheduler.is_blocked(run, device_id)):
        return
    if assignment:
        # The same id each time: a device obeys a command once.
        command = Command(id=f"finish-early-{assignment}", kind=CommandKind.FINISH_EARLY, argument=assignment)
        clients.notifier.send_command(device_id, command)
    else:  # an autonomous node
        _send_end(clients, device_id, run, now_s)


def _is_current(clients: DeviceClients, run: str) -> bool:
    return clients.run_scheduler.is_active(run) or clients.run_scheduler.is_autonomous(run)


def _send_end(clients: DeviceClients, device_id: str, run: str, now_s: float) -> None:
    # Another id after a while: it may have ended, and started again when the run was resumed.
    end_id = f"end-{run}-{int(now_s / END_RESEND_S)}"
    clients.notifier.send_command(device_id, Command(id=end_id, kind=CommandKind.END, argument=run))
