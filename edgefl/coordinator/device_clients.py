"""Services that send instructions to devices: runs, calls, deployments and installations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from edgefl.coordinator.execution.in_flight import DeviceNotifier
from edgefl.coordinator.execution.rpc import DeviceRpc
from edgefl.coordinator.rollouts.bundle_store import BundleStore
from edgefl.coordinator.rollouts.deployment_files import ExportModel
from edgefl.coordinator.rollouts.deployments import DeploymentService
from edgefl.coordinator.rollouts.installations import InstallationService
from edgefl.coordinator.runs.scheduler import RunContext, RunScheduler
from edgefl.core.errors import EdgeflError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClients:
    """Services that send instructions to devices, through `notifier`."""

    notifier: DeviceNotifier
    device_rpc: DeviceRpc
    deployments: DeploymentService
    installations: InstallationService
    run_scheduler: RunScheduler

    @classmethod
    def create(cls, context: RunContext, *, export: ExportModel, on_fatal: Callable[[EdgeflError], None]) -> Self:
        """Returns the services of one coordinator, not yet started.

        Args:
            context: shared services of runs; the deployments are notified of finished ones.
            export: exports a model to the file that devices deploy.
            on_fatal: called when the store or a journal can no longer be written.
        """
        deployments = DeploymentService(
            store=context.store,
            registry=context.roster,
            directory=context.directory,
            command_sender=context.notifier,
            export=export,
            on_fatal=on_fatal,
        )
        installations = InstallationService(
            store=context.store,
            registry=context.roster,
            bundle_store=BundleStore(context.directory.root / "bundles"),
            command_sender=context.notifier,
            on_fatal=on_fatal,
        )
        return cls(
            notifier=context.notifier,
            device_rpc=DeviceRpc(context.notifier, context.roster),
            deployments=deployments,
            installations=installations,
            run_scheduler=RunScheduler(replace(context, on_finished=deployments.on_run_finished), on_fatal=on_fatal),
        )
