"""Deployments of models to devices: exports the file, notifies devices, and survives restarts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.rollouts.controller import RolloutController
from edgefl.coordinator.rollouts.deployment_files import ExportModel, make_deployment_file, prune_deployment_files
from edgefl.coordinator.rollouts.deployment_requests import DeploymentRequest, can_use, select_devices
from edgefl.coordinator.rollouts.notifications import (
    CommandSender,
    RolloutNotifier,
    StatusUpdates,
    list_present,
    make_rollout_id,
    parse_reason,
)
from edgefl.coordinator.rollouts.state_machine import (
    STAGES_BEFORE_REPORT,
    RolloutTransition,
    advance_rollout,
    fail_removed_devices,
    fail_rollout,
    start_rollout,
)
from edgefl.core.config import RunConfig
from edgefl.core.errors import EdgeflError, NotFoundError, StoreError
from edgefl.core.protocol import CommandKind, Heartbeat, finite_or_none
from edgefl.core.types import Json
from edgefl.storage.repositories.deployment_records import (
    DeploymentDeviceRecord,
    DeploymentRecord,
    RolloutStage,
    RolloutStatus,
)
from edgefl.storage.repositories.saved_models import find_model
from edgefl.storage.store import Store

log = logging.getLogger(__name__)

MAX_FILES = 50
"""Number of newest deployments whose files are kept; a late device gets one of these."""
IN_PROGRESS_STATES = frozenset({"fetching", "checking"})

_TARGET_STAGES = frozenset({RolloutStage.NOTIFIED, RolloutStage.RUNNING})
_PENDING_STAGES = frozenset({RolloutStage.PENDING, RolloutStage.NOTIFIED})


class DeploymentService:
    """All deployments of a coordinator; `submit` and `on_heartbeat` may be called from any thread.

    Args:
        store: has the deployments.
        registry: of the devices and their data.
        directory: has the runs' models, and the files for devices.
        command_sender: sends commands to devices.
        export: exports a model to the file for devices.
        on_fatal: called when the store can no longer be written.
    """

    def __init__(
        self,
        *,
        store: Store,
        registry: DeviceRegistry,
        directory: CoordinatorDirectory,
        command_sender: CommandSender,
        export: ExportModel,
        on_fatal: Callable[[EdgeflError], None],
    ) -> None:
        self._store, self._registry, self._export = store, registry, export
        self._models, self._folder = directory.models, directory.root / "deployments"
        self._status_updates, self._notifier = StatusUpdates(), RolloutNotifier(registry, command_sender)
        self._controller = RolloutController("deployments", self._reconcile, on_fatal)

    def start(self) -> None:
        self._controller.start()

    def stop(self) -> None:
        self._controller.stop()

    def submit(self, request: DeploymentRequest) -> DeploymentRecord:
        """Stores a new deployment and returns it; everything else happens later.

        Raises:
            NotFoundError: no such model, run or device.
            UsageError: no device could use it.
        """
        saved_model = find_model(self._store, request.model)
        model, run_id = saved_model["sha256"], saved_model["run_id"]
        config = RunConfig.from_json(self._store.get_run(run_id).config)
        names = select_devices(self._registry, config.run.task, request.devices)
        record = DeploymentRecord(
            deployment_id=make_rollout_id(),
            run_id=run_id,
            model=model,
            task=config.run.task,
            options=dict(config.task),
            devices=request.devices,
            canary=request.canary,
            canary_s=request.canary_s,
            tolerance=request.tolerance,
            min_accuracy=request.min_accuracy,
            test_fraction=config.run.local_test_fraction,
            status=RolloutStatus.PREPARING,
            created_at=time.time(),
        )
        self._store.add_deployment(record, names)
        self._record_event(record, "submitted", f"model {model[:12]} to {len(names)} devices")
        self._controller.wake()
        return record

    def on_run_finished(self, run_id: str, config: RunConfig) -> None:
        """Deploys the model of a finished run, if its run file says so; a failure becomes an event."""
        if not config.models.auto_deploy:
            return
        try:
            self.submit(DeploymentRequest(model=f"{run_id}:latest", canary=config.models.canary))
        except StoreError:
            raise
        except EdgeflError as error:
            log.warning("the model of run %s is not deployed: %s", run_id, error)
            self._store.record_event("deployment-failed", str(error), at=time.time(), run_id=run_id)

    def on_heartbeat(self, device_id: str, heartbeat: Heartbeat) -> None:
        """Records the deployment status in a heartbeat."""
        if self._status_updates.record(device_id, heartbeat.deployment):
            self._controller.wake()

    def offer(self, deployment_id: str, device_id: str) -> Json:
        """Returns the offer that a device needs to fetch and check the model.

        Raises:
            NotFoundError: there is no such deployment for this device.
        """
        record = self._find_offered(deployment_id, device_id)
        return {
            "deployment": record.deployment_id,
            "model": record.model,
            "sha256": record.onnx_sha256,
            "bytes": record.bytes_file,
            "task": record.task,
            "options": dict(record.options),
            "tolerance": record.tolerance,
            "min_accuracy": record.min_accuracy,
            "test_fraction": record.test_fraction,
        }

    def get_file(self, deployment_id: str, device_id: str) -> Path:
        """Returns the file that a device fetches; raises as `offer`."""
        record = self._find_offered(deployment_id, device_id)
        return self._folder / f"{record.onnx_sha256}.onnx"

    def _find_offered(self, deployment_id: str, device_id: str) -> DeploymentRecord:
        record = self._store.get_deployment(deployment_id)
        rows = {row.device_id: row.state for row in self._store.list_deployment_devices(record.deployment_id)}
        if record.onnx_sha256 is None or rows.get(device_id) not in _TARGET_STAGES:
            raise NotFoundError(f"deployment {deployment_id} is not for {device_id} now")
        return record

    def _reconcile(self) -> bool:
        all_reported = self._controller.run_each(
            self._status_updates.list_pending(), lambda name: self._status_updates.dispatch(name, self._on_report)
        )
        all_advanced = self._controller.run_each(self._store.list_open_deployments(), self._advance)
        self._add_late_devices()
        return all_reported and all_advanced

    def _on_report(self, device_id: str, report: Json) -> None:
        """Records a device's report; a device that runs another model is notified again."""
        rows = self._store.list_device_deployments(device_id)
        row = next((row for row in rows if row.deployment_id == report.get("id")), None)
        state = report.get("state") if isinstance(report.get("state"), str) else None
        if (
            row is not None
            and state in set(STAGES_BEFORE_REPORT)
            and row.state is STAGES_BEFORE_REPORT[RolloutStage(state)]
        ):
            self._record_report(row, RolloutStage(state), report)
            return
        runs = report.get("runs")
        if any(row.state is RolloutStage.REVERTING for row in rows):
            return
        # Newest first: rows before the one that it should run are newer, and may be on their way or rejected.
        newest = next((row for row in rows if row.deployment_id == runs or row.state in _TARGET_STAGES), None)
        if newest is not None and newest.state is RolloutStage.RUNNING and runs != newest.deployment_id:
            log.warning("%s does not run the model of deployment %s any more", device_id, newest.deployment_id)
            renotified = {"state": RolloutStage.NOTIFIED, "reason": "ran another model; told again"}
            self._store.update_deployment_devices(newest.deployment_id, {device_id: renotified})

    def _record_report(self, row: DeploymentDeviceRecord, state: RolloutStage, report: Json) -> None:
        reason, examples = parse_reason(report), report.get("num_examples")
        values = {
            "state": state,
            "reason": reason,
            "accuracy": finite_or_none(report.get("accuracy")),
            "former_accuracy": finite_or_none(report.get("former_accuracy")),
            "num_examples": examples if isinstance(examples, int) and not isinstance(examples, bool) else None,
            "reported_at": time.time(),
        }
        with self._store.batch(durable=True):
            self._store.update_deployment_devices(row.deployment_id, {row.device_id: values})
            message = f"{row.deployment_id}: {state}" + (f", {reason}" if reason else "")
            self._store.record_event(f"model-{state}", message, at=time.time(), device_id=row.device_id)
        log.info("%s: deployment %s", row.device_id, message)

    def _advance(self, record: DeploymentRecord) -> None:
        rows = self._store.list_deployment_devices(record.deployment_id)
        now = time.time()
        if (step := fail_removed_devices(rows, self._is_known)) is not None:
            self._apply(record, step)
            rows = self._store.list_deployment_devices(record.deployment_id)
        if record.status is RolloutStatus.PREPARING:
            self._apply(record, self._prepare(record, rows, now))
            self._prune()
        elif (step := advance_rollout(record, rows, now)) is not None:
            self._apply(record, step)
        self._notify_devices(record.deployment_id)

    def _prepare(
        self, record: DeploymentRecord, rows: Sequence[DeploymentDeviceRecord], now: float
    ) -> RolloutTransition:
        """Exports the file for the devices and returns the first step."""
        if all(row.state is RolloutStage.SUPERSEDED for row in rows):
            values = {"status": RolloutStatus.SUPERSEDED, "reason": "a newer deployment came", "finished_at": now}
            return RolloutTransition(values=values)
        try:
            sha256, num_bytes = make_deployment_file(record, self._export, models=self._models, folder=self._folder)
        except StoreError:
            raise
        except Exception as error:  # a user's task is exported here; its error fails this deployment
            log.warning("the model of deployment %s cannot be exported", record.deployment_id, exc_info=True)
            return fail_rollout(record, rows, f"the model cannot be exported: {error}", now)
        first_step = start_rollout(record, rows, list_present(self._registry), now)
        return RolloutTransition(
            values={**first_step.values, "onnx_sha256": sha256, "bytes_file": num_bytes}, devices=first_step.devices
        )

    def _prune(self) -> None:
        """Removes files of deployments that no device can get any more."""
        recent = [*self._store.list_deployments(limit=MAX_FILES), *self._store.list_open_deployments()]
        prune_deployment_files(self._folder, {record.onnx_sha256 for record in recent if record.onnx_sha256})

    def _apply(self, record: DeploymentRecord, step: RolloutTransition) -> None:
        status, reason = step.values.get("status"), step.values.get("reason")
        with self._store.batch(durable=True):
            self._store.update_deployment_devices(record.deployment_id, step.devices)
            if step.values:
                self._store.update_deployment(record.deployment_id, **step.values)
            if status is not None:
                self._record_event(record, str(status), str(reason or f"model {record.model[:12]}"))

    def _record_event(self, record: DeploymentRecord, kind: str, message: str) -> None:
        log.info("deployment %s is %s: %s", record.deployment_id, kind, message)
        text = f"{record.deployment_id}: {message}"
        self._store.record_event(f"deployment-{kind}", text, at=time.time(), run_id=record.run_id)

    def _notify_devices(self, deployment_id: str) -> None:
        """Sends commands to present devices that have not acted on them; the others get theirs later."""

        def is_in_progress(heartbeat: Heartbeat) -> bool:
            status = heartbeat.deployment or {}
            return status.get("id") == deployment_id and str(status.get("state")) in IN_PROGRESS_STATES

        for row in self._store.list_deployment_devices(deployment_id):
            if row.state is RolloutStage.NOTIFIED:
                self._notifier.notify(row.device_id, CommandKind.DEPLOY, deployment_id, is_in_progress=is_in_progress)
            elif row.state is RolloutStage.REVERTING:
                self._notifier.notify(
                    row.device_id, CommandKind.ROLLBACK, deployment_id, is_in_progress=lambda _: False
                )

    def _add_late_devices(self) -> None:
        """Adds devices that joined, or got data, later to the newest deployment for all devices."""
        newest: dict[str, DeploymentRecord] = {}
        active_statuses = {RolloutStatus.ROLLING, RolloutStatus.DONE}
        for record in self._store.list_deployments(limit=MAX_FILES):
            if record.devices is None and record.status in active_statuses:
                newest.setdefault(record.task, record)
        for record in newest.values():
            known = {row.device_id for row in self._store.list_deployment_devices(record.deployment_id)}
            candidates = [info.device_id for info in list_present(self._registry) if can_use(info, record.task)]
            if added := [name for name in candidates if name not in known and self._is_free_for(name, record)]:
                self._store.add_deployment_devices(record.deployment_id, added, RolloutStage.NOTIFIED)

    def _is_known(self, device_id: str) -> bool:
        return self._registry.get_device(device_id) is not None

    def _is_free_for(self, device_id: str, record: DeploymentRecord) -> bool:
        """Returns whether a device has no newer or pending deployment: two would cancel each other."""
        rows = self._store.list_device_deployments(device_id)
        if any(row.state in _PENDING_STAGES for row in rows):
            return False
        return all(self._store.get_deployment(row.deployment_id).created_at <= record.created_at for row in rows[:1])
