"""Deployments of models to devices: the file that they fetch, exported from a run's model, and who can use it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.rollouts.installations import SIGNED_SUFFIX, BundleStore, read_signed
from edgefl.coordinator.rollouts.service import RolloutService, list_present, make_rollout_id
from edgefl.coordinator.rollouts.state_machine import MIN_JUDGES, check_canaries, check_judges
from edgefl.core.clusters import select_cluster
from edgefl.core.config import RunConfig
from edgefl.core.errors import ConfigError, EdgeflError, NotFoundError, StoreBusyError, UsageError
from edgefl.core.protocol import EVALUATOR_NAME, MAX_MODEL_BYTES, CommandKind, finite_or_none
from edgefl.core.types import DeviceInfo, Json, Scalar
from edgefl.storage.checkpoints import load_model_file, save_model
from edgefl.storage.repositories.rollouts import DeploymentRecord, RolloutDeviceRecord, RolloutStage, RolloutStatus
from edgefl.storage.repositories.saved_models import LATEST, find_clusters, find_model, list_models
from edgefl.storage.store import Store
from edgefl.strategies.registry import get_settings
from edgefl.system.atomic_files import compute_sha256, make_private_directory, sync_directory
from edgefl.system.bundles.archive import WheelEntry

log = logging.getLogger(__name__)

DEFAULT_CANARY_S = 600.0
DEFAULT_TOLERANCE = 0.02
SUFFIX = ".onnx"
MAX_FILES = 50
"""Number of newest deployments whose files are kept; a late device gets one of these."""

ExportModel = Callable[[str, Mapping[str, Scalar], Path, Path], None]
"""(task, its options, safetensors file, ONNX file to write)."""

_TARGET_STAGES = frozenset({RolloutStage.NOTIFIED, RolloutStage.RUNNING})
_PENDING_STAGES = frozenset({RolloutStage.PENDING, RolloutStage.NOTIFIED})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRequest:
    """An operator's request for a deployment.

    Attributes:
        model: a saved model, as `saved_models.find_model` takes it.
        bundle: SHA-256 of the signed bundle with its file, which the coordinator has; None to export it, unsigned.
        devices: by name; None for every device with a shard for the model's task, or those of the cluster.
        cluster: of a run with `ifca`, whose model goes to the devices that took it last; None for one model of all.
        canary: number of devices that get it first, at least three unless the run file trusts a single evaluation; 0
            for all at once, each of which decides for itself.
        canary_s: how long these have to report that they run it.
        tolerance: how much lower than the previous model's its accuracy on a device's own data may be, 0 to 1.
        min_accuracy: minimum accuracy there in any case, 0 to 1.
    """

    model: str
    bundle: str | None = None
    devices: tuple[str, ...] | None = None
    cluster: int | None = None
    canary: int = 0
    canary_s: float = DEFAULT_CANARY_S
    tolerance: float = DEFAULT_TOLERANCE
    min_accuracy: float = 0.0

    def __post_init__(self) -> None:
        if self.cluster is not None and self.bundle is not None:
            raise ConfigError("a signed bundle has one cluster's model; leave out cluster, and name its devices")
        check_canaries(self.canary, self.canary_s)
        for name, value in (("tolerance", self.tolerance), ("min_accuracy", self.min_accuracy)):
            if not 0 <= value <= 1:
                raise ConfigError(f"{name} must be an accuracy in 0 to 1, got {value}")


DeploymentService = RolloutService[DeploymentRequest, DeploymentRecord]


class Deployments:
    """The kind of rollout that brings a model; see `RolloutKind`.

    Args:
        store: has the deployments.
        registry: of the devices and their data.
        directory: has the runs' models, and the files for devices.
        export: exports a model to the file for devices.
        bundle_store: has the signed ones.
    """

    request = DeploymentRequest
    artefact = "model"
    commands: Mapping[RolloutStage, CommandKind] = {
        RolloutStage.NOTIFIED: CommandKind.DEPLOY,
        RolloutStage.REVERTING: CommandKind.ROLLBACK,
    }
    reports: Mapping[RolloutStage, Collection[RolloutStage]] = {
        RolloutStage.RUNNING: {RolloutStage.NOTIFIED},
        RolloutStage.REJECTED: {RolloutStage.NOTIFIED},
        RolloutStage.FAILED: {RolloutStage.NOTIFIED},
        RolloutStage.REVERTED: {RolloutStage.REVERTING},
    }
    states_in_progress: Collection[str] = ("fetching", "checking")
    offered_stages: Collection[RolloutStage] = _TARGET_STAGES
    is_ready = False
    is_queued = False

    def __init__(
        self,
        *,
        store: Store,
        registry: DeviceRegistry,
        directory: CoordinatorDirectory,
        export: ExportModel,
        bundle_store: BundleStore,
    ) -> None:
        self.repository = store.deployments
        self._store, self._registry, self._export, self._bundle_store = store, registry, export, bundle_store
        self._models, self._folder = directory.models, directory.root / "deployments"

    def plan(self, request: DeploymentRequest) -> tuple[DeploymentRecord, list[str], None]:
        saved_model = find_model(self._store, request.model)
        config = RunConfig.from_json(self._store.get_run(saved_model["run_id"]).config)
        if request.cluster is not None and request.devices is None:
            request = replace(request, devices=self._find_members(request.cluster, saved_model, config))
        names = select_devices(self._registry, config.run.task, request.devices)
        entry = self._find_signed_file(request, saved_model["sha256"], names)
        canary = request.canary
        if canary and not config.run.trust_single_evaluation:
            canary = check_judges(max(canary, MIN_JUDGES), len(names))
        record = DeploymentRecord(
            deployment_id=make_rollout_id(),
            run_id=saved_model["run_id"],
            model=self._find_model_for(saved_model["sha256"], request.cluster),
            task=config.run.task,
            options=dict(config.task),
            devices=request.devices,
            canary=canary,
            canary_s=request.canary_s,
            tolerance=request.tolerance,
            min_accuracy=request.min_accuracy,
            test_fraction=config.run.local_test_fraction,
            onnx_sha256=entry.sha256 if entry is not None else None,
            bytes_file=entry.num_bytes if entry is not None else None,
            status=RolloutStatus.PREPARING,
            created_at=time.time(),
        )
        return record, names, None

    def _find_members(self, cluster: int, saved_model: Json, config: RunConfig) -> tuple[str, ...]:
        """Returns the devices of a cluster that are still here with their data."""
        num_clusters = _count_clusters(config)
        if not 0 <= cluster < num_clusters:
            known = f"cluster 0 to {num_clusters - 1}" if num_clusters else "one model; leave --cluster out"
            raise UsageError(f"run {saved_model['run_id']} has no cluster {cluster}, it has {known}")
        clusters = find_clusters(self._store, saved_model["run_id"], saved_model["version"], num_clusters)
        members = {name for name, number in clusters.items() if number == cluster}
        if found := members.intersection(select_devices(self._registry, config.run.task, None)):
            return tuple(sorted(found))
        raise UsageError(
            f"no device of the fleet took the model of cluster {cluster} last in run {saved_model['run_id']}; taken "
            f"were {', '.join(map(str, sorted(set(clusters.values())))) or 'none'}; name devices to bring it to"
        )

    def _find_model_for(self, sha256: str, cluster: int | None) -> str:
        """Returns the SHA-256 of what goes to devices; a cluster's model becomes a file of its own."""
        if cluster is None:
            return sha256
        whole = load_model_file(self._models / f"{sha256}.safetensors")
        return save_model(self._models, select_cluster(whole, cluster))[0]

    def _find_signed_file(self, request: DeploymentRequest, model: str, names: Sequence[str]) -> WheelEntry | None:
        """Returns the file of a signed model, None for an unsigned one, which no device may be known to refuse."""
        if request.bundle is None:
            refusing = [name for name in names if demands_signature(self._registry.get_device(name))]
            if refusing:
                raise UsageError(
                    f"{', '.join(refusing[:5])} run only signed models: edgefl model export, then edgefl coordinator "
                    "sign --kind model, then deploy it with --bundle FILE"
                )
            return None
        manifest = self._bundle_store.find(request.bundle).manifest
        if manifest.model is None or manifest.model.sha256 != model:
            raise UsageError(f"{manifest.kind} {manifest.name} was signed, and not model {model[:12]}")
        if manifest.wheels[0].num_bytes > MAX_MODEL_BYTES:
            raise UsageError(
                f"its file has {manifest.wheels[0].num_bytes} bytes, devices take {MAX_MODEL_BYTES} at most"
            )
        return manifest.wheels[0]

    def on_submitted(self, record: DeploymentRecord, names: Sequence[str]) -> None:
        self.on_status(record, "submitted", f"model {record.model[:12]} to {len(names)} devices")

    def prepare(self, record: DeploymentRecord) -> Mapping[str, Any]:
        if record.onnx_sha256 is not None:
            self._bundle_store.extract_model(record.onnx_sha256, self._folder)
            return {}
        sha256, num_bytes = make_deployment_file(record, self._export, models=self._models, folder=self._folder)
        return {"onnx_sha256": sha256, "bytes_file": num_bytes}

    def prune(self) -> None:
        recent = [*self.repository.list_newest(limit=MAX_FILES), *self.repository.list_open()]
        prune_deployment_files(self._folder, {record.onnx_sha256 for record in recent if record.onnx_sha256})

    def make_offer(self, record: DeploymentRecord) -> Json:
        return {
            "deployment": record.deployment_id, "model": record.model, "sha256": record.onnx_sha256,
            "bytes": record.bytes_file, "task": record.task, "options": dict(record.options),
            "tolerance": record.tolerance, "min_accuracy": record.min_accuracy, "test_fraction": record.test_fraction,
            "signed": read_signed(self._folder, record.onnx_sha256),
        }  # fmt: skip

    def get_path(self, record: DeploymentRecord) -> Path:
        return self._folder / f"{record.onnx_sha256}{SUFFIX}"

    def on_status(self, record: DeploymentRecord, status: str, reason: str | None) -> None:
        text = f"{record.deployment_id}: {reason or f'model {record.model[:12]}'}"
        self._store.record_event(f"deployment-{status}", text, at=time.time(), run_id=record.run_id)

    def describe_report(self, record: DeploymentRecord, stage: RolloutStage) -> tuple[str, str]:  # noqa: ARG002 the kinds' interface
        return f"model-{stage}", str(stage)

    def parse_scores(self, report: Json) -> Mapping[str, Any]:
        examples = report.get("num_examples")
        return {
            "accuracy": finite_or_none(report.get("accuracy")),
            "former_accuracy": finite_or_none(report.get("former_accuracy")),
            "num_examples": examples if isinstance(examples, int) and not isinstance(examples, bool) else None,
        }

    def on_other_report(self, device_id: str, rows: Sequence[RolloutDeviceRecord], report: Json) -> None:
        """Notifies a device again that runs another model than it should."""
        runs = report.get("runs")
        if any(row.state is RolloutStage.REVERTING for row in rows):
            return
        # Newest first: rows before the one that it should run are newer, and may be on their way or rejected.
        newest = next((row for row in rows if row.rollout_id == runs or row.state in _TARGET_STAGES), None)
        if newest is not None and newest.state is RolloutStage.RUNNING and runs != newest.rollout_id:
            log.warning("%s does not run the model of deployment %s any more", device_id, newest.rollout_id)
            renotified = {"state": RolloutStage.NOTIFIED, "reason": "ran another model; told again"}
            self.repository.update_devices(newest.rollout_id, {device_id: renotified})

    def add_late_devices(self) -> None:
        """Adds devices that joined, or got data, later to the newest deployment for all devices."""
        newest: dict[str, DeploymentRecord] = {}
        active_statuses = {RolloutStatus.ROLLING, RolloutStatus.DONE}
        for record in self.repository.list_newest(limit=MAX_FILES):
            if record.devices is None and record.status in active_statuses:
                newest.setdefault(record.task, record)
        for record in newest.values():
            known = {row.device_id for row in self.repository.list_devices(record.deployment_id)}
            candidates = [info.device_id for info in list_present(self._registry) if can_use(info, record.task)]
            if added := [name for name in candidates if name not in known and self._is_free_for(name, record)]:
                self.repository.add_devices(record.deployment_id, added, RolloutStage.NOTIFIED)

    def _is_free_for(self, device_id: str, record: DeploymentRecord) -> bool:
        """Returns whether a device has no newer or pending deployment: two would cancel each other."""
        rows = self.repository.list_of_device(device_id)
        if any(row.state in _PENDING_STAGES for row in rows):
            return False
        return all(self.repository.get(row.rollout_id).sequence <= record.sequence for row in rows[:1])


def plan_deployments(
    deployments: DeploymentService, store: Store, run_id: str, config: RunConfig
) -> Callable[[], None]:
    """Plans to deploy the model of a run at its end, if its run file says so, each cluster's to its devices.

    This reads and writes files. What it returns writes to the store alone, in the transaction that records the end:
    the deployments, and an event for each that failed, so that a full disk does not undo the end.

    Raises:
        StoreBusyError: the store is in use, and the run has not ended.
    """
    plans: list[tuple[DeploymentRecord, list[str], dict[str, str] | None]] = []
    failures: list[str] = []
    if config.models.auto_deploy:
        for cluster in _list_clusters(store, run_id, config):
            try:
                request = DeploymentRequest(model=f"{run_id}:latest", cluster=cluster, canary=config.models.canary)
                plans.append(deployments.kind.plan(request))
            except StoreBusyError:
                raise
            except (EdgeflError, OSError) as error:
                failures.append(str(error) if cluster is None else f"cluster {cluster}: {error}")
                log.warning("the model of run %s is not deployed: %s", run_id, failures[-1])

    def record_deployments() -> None:
        for plan in plans:
            deployments.add(*plan)
        for failure in failures:
            store.record_event("deployment-failed", failure, at=time.time(), run_id=run_id)

    return record_deployments


def _list_clusters(store: Store, run_id: str, config: RunConfig) -> Sequence[int | None]:
    """Returns the clusters of a run's latest model that a device took; None alone where there is none."""
    num_clusters = _count_clusters(config)
    latest = next((row for row in list_models(store, run_id) if row[LATEST]), None) if num_clusters else None
    if latest is None:  # the plan says so where a model is missing
        return [None]
    return sorted(set(find_clusters(store, run_id, latest["version"], num_clusters).values())) or [None]


def _count_clusters(config: RunConfig) -> int:
    """Returns the number of cluster models of a run; 0 of one with one model."""
    section = config.strategy
    return int({**get_settings("ifca"), **section.options}["clusters"]) if section.name == "ifca" else 0


def demands_signature(info: DeviceInfo | None) -> bool:
    """Returns whether a device says that it runs only models that its signers have signed."""
    return info is not None and info.capabilities.get("signed_models") is True


def select_devices(registry: DeviceRegistry, task: str, names: Sequence[str] | None) -> list[str]:
    """Returns the devices to deploy a model of this task to.

    Raises:
        NotFoundError: a named device is not in the fleet.
        UsageError: a named device, or every device, has no data to check the model on.
    """
    capable = {info.device_id for info in registry.list_devices() if can_use(info, task)}
    if names is None:
        if not capable:
            raise UsageError(f"no device has a shard for task {task}; edgefl device shard add {task} PATH")
        return sorted(capable)
    for name in names:
        if registry.get_device(name) is None:
            raise NotFoundError(f"no device {name!r}; `edgefl devices list` shows them")
        if name not in capable:
            raise UsageError(f"{name} has no shard for task {task}, so it cannot check the model")
    return sorted(set(names))


def can_use(info: DeviceInfo, task: str) -> bool:
    """Returns whether a device can check a model of this task; not the coordinator's own evaluator."""
    return info.device_id != EVALUATOR_NAME and task in info.tasks


def make_deployment_file(
    record: DeploymentRecord, export: ExportModel, *, models: Path, folder: Path, max_bytes: int = MAX_MODEL_BYTES
) -> tuple[str, int]:
    """Exports the file for devices, durably, and returns its SHA-256 and size.

    Raises:
        UsageError: it is too large for devices.
        EdgeflError: the export failed.
    """
    make_private_directory(folder)
    temporary_file = folder / f".{record.deployment_id}{SUFFIX}"
    temporary_file.unlink(missing_ok=True)  # left over from a killed coordinator
    try:
        export(record.task, dict(record.options), models / f"{record.model}.safetensors", temporary_file)
        sha256, num_bytes = compute_sha256(temporary_file), temporary_file.stat().st_size
        if num_bytes > max_bytes:
            raise UsageError(f"its file has {num_bytes} bytes, devices take {max_bytes} at most")
        with temporary_file.open("rb+") as file:
            os.fsync(file.fileno())
        temporary_file.replace(folder / f"{sha256}{SUFFIX}")
    finally:
        temporary_file.unlink(missing_ok=True)
    sync_directory(folder)
    return sha256, num_bytes


def prune_deployment_files(folder: Path, keep: Collection[str]) -> None:
    """Removes all complete files but those whose SHA-256 is in `keep`."""
    for suffix in (SUFFIX, SIGNED_SUFFIX):
        for path in folder.glob(f"[!.]*{suffix}"):
            if path.stem not in keep:
                path.unlink(missing_ok=True)
