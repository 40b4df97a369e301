"""Brings models to devices and knows what became of them: makes the file, tells, hears, and goes on after a crash."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from edgefl.config import RunConfig
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.fleet.roster import Roster
from edgefl.coordinator.rollouts.deployment_files import Export, make_file, prune_files
from edgefl.coordinator.rollouts.deployment_wishes import DeploymentWish, can_use, targets
from edgefl.coordinator.rollouts.rollout import REPORTED, Step, advance, begin, failed, removed
from edgefl.coordinator.rollouts.rollout_thread import RolloutThread
from edgefl.coordinator.rollouts.telling import Commander, News, Teller, new_id, present, reason_of
from edgefl.errors import EdgeflError, NotFoundError, StoreError
from edgefl.protocol import CommandKind, Heartbeat, finite
from edgefl.storage.deployment_records import (
    DeploymentDeviceRecord,
    DeploymentRecord,
    DeploymentStatus,
    DeviceStage,
)
from edgefl.storage.model_rows import find_model
from edgefl.storage.store import Store
from edgefl.types import Json

log = logging.getLogger(__name__)

KEPT_FILES = 50
"""Files of so many newest deployments stay; a device that joins later is told of one of these."""
AT_WORK = frozenset({"fetching", "checking"})

_EXPECTED = frozenset({DeviceStage.TOLD, DeviceStage.RUNNING})
_AWAITED = frozenset({DeviceStage.HELD, DeviceStage.TOLD})


class Deployments:
    """All deployments of a coordinator; `submit` and `heard` may be called from any thread.

    Args:
        store: where they are kept.
        roster: who is there, and with what data.
        directory: where the runs' models lie, and the files for devices.
        commander: carries commands.
        export: makes a file for devices.
        on_fatal: called when the store can no longer be written.
    """

    def __init__(
        self,
        *,
        store: Store,
        roster: Roster,
        directory: CoordinatorDirectory,
        commander: Commander,
        export: Export,
        on_fatal: Callable[[EdgeflError], None],
    ) -> None:
        self._store, self._roster, self._export = store, roster, export
        self._models, self._folder = directory.models, directory.root / "deployments"
        self._news, self._teller = News(), Teller(roster, commander)
        self._thread = RolloutThread("deployments", self._look, on_fatal)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._thread.stop()

    def submit(self, wish: DeploymentWish) -> DeploymentRecord:
        """Keeps a new deployment and returns it; all else happens later.

        Raises:
            NotFoundError: no such model, run or device.
            UsageError: no device could use it.
        """
        found = find_model(self._store, wish.model)
        model, run_id = found["sha256"], found["run_id"]
        config = RunConfig.from_json(self._store.run(run_id).config)
        names = targets(self._roster, config.run.task, wish.devices)
        record = DeploymentRecord(
            deployment_id=new_id(),
            run_id=run_id,
            model=model,
            task=config.run.task,
            options=dict(config.task),
            devices=wish.devices,
            canary=wish.canary,
            canary_s=wish.canary_s,
            tolerance=wish.tolerance,
            min_accuracy=wish.min_accuracy,
            test_fraction=config.run.local_test_fraction,
            status=DeploymentStatus.PREPARING,
            created_at=time.time(),
        )
        self._store.add_deployment(record, names)
        self._note(record, "submitted", f"model {model[:12]} to {len(names)} devices")
        self._thread.wake()
        return record

    def after_run(self, run_id: str, config: RunConfig) -> None:
        """Deploys the model of a run that has finished, if its run file says so; what hinders that is an event."""
        if not config.models.auto_deploy:
            return
        try:
            self.submit(DeploymentWish(model=f"{run_id}:latest", canary=config.models.canary))
        except StoreError:
            raise
        except EdgeflError as error:
            log.warning("the model of run %s is not deployed: %s", run_id, error)
            self._store.record_event("deployment-failed", str(error), at=time.time(), run_id=run_id)

    def heard(self, device_id: str, heartbeat: Heartbeat) -> None:
        """Takes note of what a device says about its model."""
        if self._news.note(device_id, heartbeat.deployment):
            self._thread.wake()

    def offer(self, deployment_id: str, device_id: str) -> Json:
        """Returns what a device has to know to fetch and judge the model.

        Raises:
            NotFoundError: there is no such deployment for this device.
        """
        record = self._offered(deployment_id, device_id)
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

    def file(self, deployment_id: str, device_id: str) -> Path:
        """Returns the file that a device fetches; raises as `offer`."""
        record = self._offered(deployment_id, device_id)
        return self._folder / f"{record.onnx_sha256}.onnx"

    def _offered(self, deployment_id: str, device_id: str) -> DeploymentRecord:
        record = self._store.deployment(deployment_id)
        rows = {row.device_id: row.state for row in self._store.deployment_devices(record.deployment_id)}
        if record.onnx_sha256 is None or rows.get(device_id) not in _EXPECTED:
            raise NotFoundError(f"deployment {deployment_id} is not for {device_id} now")
        return record

    def _look(self) -> bool:
        heard = self._thread.each(self._news.waiting(), lambda name: self._news.hand_on(name, self._take))
        went_well = self._thread.each(self._store.open_deployments(), self._step)
        self._adopt()
        return heard and went_well

    def _take(self, device_id: str, said: Json) -> None:
        """Keeps what a device reports; one that runs something else than it should is told again."""
        rows = self._store.device_deployments(device_id)
        row = next((row for row in rows if row.deployment_id == said.get("id")), None)
        state = said.get("state") if isinstance(said.get("state"), str) else None
        if row is not None and state in set(REPORTED) and row.state is REPORTED[DeviceStage(state)]:
            self._report(row, DeviceStage(state), said)
            return
        runs = said.get("runs")
        if any(row.state is DeviceStage.REVERTING for row in rows):
            return
        # Newest first: what comes before the one that it should run is newer, and may be on its way or refused.
        newest = next((row for row in rows if row.deployment_id == runs or row.state in _EXPECTED), None)
        if newest is not None and newest.state is DeviceStage.RUNNING and runs != newest.deployment_id:
            log.warning("%s does not run the model of deployment %s any more", device_id, newest.deployment_id)
            again = {"state": DeviceStage.TOLD, "reason": "ran another model; told again"}
            self._store.set_deployment_devices(newest.deployment_id, {device_id: again})

    def _report(self, row: DeploymentDeviceRecord, state: DeviceStage, said: Json) -> None:
        reason, examples = reason_of(said), said.get("num_examples")
        values = {
            "state": state,
            "reason": reason,
            "accuracy": finite(said.get("accuracy")),
            "former_accuracy": finite(said.get("former_accuracy")),
            "num_examples": examples if isinstance(examples, int) and not isinstance(examples, bool) else None,
            "reported_at": time.time(),
        }
        with self._store.batch(durable=True):
            self._store.set_deployment_devices(row.deployment_id, {row.device_id: values})
            message = f"{row.deployment_id}: {state}" + (f", {reason}" if reason else "")
            self._store.record_event(f"model-{state}", message, at=time.time(), device_id=row.device_id)
        log.info("%s: deployment %s", row.device_id, message)

    def _step(self, record: DeploymentRecord) -> None:
        rows = self._store.deployment_devices(record.deployment_id)
        now = time.time()
        if (step := removed(rows, self._is_known)) is not None:
            self._apply(record, step)
            rows = self._store.deployment_devices(record.deployment_id)
        if record.status is DeploymentStatus.PREPARING:
            self._apply(record, self._prepared(record, rows, now))
            self._prune()
        elif (step := advance(record, rows, now)) is not None:
            self._apply(record, step)
        self._tell(record.deployment_id)

    def _prepared(self, record: DeploymentRecord, rows: Sequence[DeploymentDeviceRecord], now: float) -> Step:
        """Makes the file for the devices and returns the first step after that."""
        if all(row.state is DeviceStage.SUPERSEDED for row in rows):
            values = {"status": DeploymentStatus.SUPERSEDED, "reason": "a newer deployment came", "finished_at": now}
            return Step(values=values)
        try:
            sha256, num_bytes = make_file(record, self._export, models=self._models, folder=self._folder)
        except StoreError:
            raise
        except Exception as error:  # a task of the user's own is exported here; its fault is this deployment's
            log.warning("the model of deployment %s cannot be exported", record.deployment_id, exc_info=True)
            return failed(record, rows, f"the model cannot be exported: {error}", now)
        first = begin(record, rows, present(self._roster), now)
        return Step(values={**first.values, "onnx_sha256": sha256, "bytes_file": num_bytes}, devices=first.devices)

    def _prune(self) -> None:
        """Lets go of files that no device can be told of any more."""
        recent = [*self._store.deployments(limit=KEPT_FILES), *self._store.open_deployments()]
        prune_files(self._folder, {record.onnx_sha256 for record in recent if record.onnx_sha256})

    def _apply(self, record: DeploymentRecord, step: Step) -> None:
        status, reason = step.values.get("status"), step.values.get("reason")
        with self._store.batch(durable=True):
            self._store.set_deployment_devices(record.deployment_id, step.devices)
            if step.values:
                self._store.set_deployment(record.deployment_id, **step.values)
            if status is not None:
                self._note(record, str(status), str(reason or f"model {record.model[:12]}"))

    def _note(self, record: DeploymentRecord, what: str, message: str) -> None:
        log.info("deployment %s is %s: %s", record.deployment_id, what, message)
        text = f"{record.deployment_id}: {message}"
        self._store.record_event(f"deployment-{what}", text, at=time.time(), run_id=record.run_id)

    def _tell(self, deployment_id: str) -> None:
        """Sends commands to those that are there and have not acted on them yet; the others get theirs later."""

        def is_at_it(heartbeat: Heartbeat) -> bool:
            said = heartbeat.deployment or {}
            return said.get("id") == deployment_id and str(said.get("state")) in AT_WORK

        for row in self._store.deployment_devices(deployment_id):
            if row.state is DeviceStage.TOLD:
                self._teller.tell(row.device_id, CommandKind.DEPLOY, deployment_id, is_at_it=is_at_it)
            elif row.state is DeviceStage.REVERTING:
                self._teller.tell(row.device_id, CommandKind.ROLLBACK, deployment_id, is_at_it=lambda _: False)

    def _adopt(self) -> None:
        """Gives the newest deployment for everybody to devices that joined, or got data, after it."""
        newest: dict[str, DeploymentRecord] = {}
        live = {DeploymentStatus.ROLLING, DeploymentStatus.DONE}
        for record in self._store.deployments(limit=KEPT_FILES):
            if record.devices is None and record.status in live:
                newest.setdefault(record.task, record)
        for record in newest.values():
            have = {row.device_id for row in self._store.deployment_devices(record.deployment_id)}
            new = [info.device_id for info in present(self._roster) if can_use(info, record.task)]
            if added := [name for name in new if name not in have and self._is_free_for(name, record)]:
                self._store.add_deployment_devices(record.deployment_id, added, DeviceStage.TOLD)

    def _is_known(self, device_id: str) -> bool:
        return self._roster.info(device_id) is not None

    def _is_free_for(self, device_id: str, record: DeploymentRecord) -> bool:
        """Returns whether a device has nothing newer, and waits for nothing else: two would call each other off."""
        rows = self._store.device_deployments(device_id)
        if any(row.state in _AWAITED for row in rows):
            return False
        return all(self._store.deployment(row.deployment_id).created_at <= record.created_at for row in rows[:1])
