"""Deployments on the device: a fetched model is checked on local data, and activated or rejected.

The store holds files by SHA-256, and a state file that names the current one. It is replaced atomically, so a power
cut leaves the former or the new model, never a mix. The former model is kept, for a rollback.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from edgefl.core.errors import DataError
from edgefl.core.protocol import MAX_MODEL_BYTES
from edgefl.core.safe_parsing import SHA256, parse_json, parse_record
from edgefl.core.types import Json
from edgefl.device.inference.model_check import ModelCheckRequest, ModelCheckResult, check_in_subprocess
from edgefl.device.rollouts.client import RolloutClient, RolloutReport
from edgefl.device.rollouts.download import Artefact
from edgefl.device.state_dir import DeviceStateDir
from edgefl.system.atomic_files import make_private_directory, write_atomic

STATE_FILE = "current.json"
STATE_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedModel:
    """Deployed model: `sha256` names its file, `model` the tensors that it was made from."""

    deployment: str
    sha256: str
    model: str
    task: str
    accuracy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentState:
    """Persistent state of deployments."""

    current: DeployedModel | None = None
    former: DeployedModel | None = None
    report: RolloutReport | None = None


class ModelStore:
    """Model folder of a state directory; written by one agent, read by others."""

    def __init__(self, state_dir: Path) -> None:
        self.folder = state_dir / "models"

    @property
    def state_path(self) -> Path:
        return self.folder / STATE_FILE

    def load(self) -> DeploymentState:
        """Returns the stored state; a damaged file counts as none, with a warning."""
        try:
            value = parse_json(self.state_path.read_bytes())
            return _parse_state(value)
        except FileNotFoundError:
            return DeploymentState()
        except (OSError, ValueError, TypeError, AttributeError) as error:
            log.warning("%s is damaged and left aside: %s", self.state_path, error)
            return DeploymentState()

    def save(self, state: DeploymentState) -> None:
        """Replaces the state file, durably.

        Raises:
            StoreError: it cannot be written; the former one stays.
        """
        make_private_directory(self.folder)
        write_atomic(self.state_path, json.dumps({"v": STATE_FORMAT, **asdict(state)}).encode())

    def path(self, model: DeployedModel) -> Path:
        return self.folder / f"{model.sha256}.onnx"

    def activate(self, state: DeploymentState, new: DeployedModel, report: RolloutReport) -> DeploymentState:
        """Makes `new` the current model and returns the new state."""
        # A model deployed twice must not replace the former one, which is needed for a rollback.
        former = state.former if state.current and state.current.sha256 == new.sha256 else state.current
        new_state = DeploymentState(current=new, former=former, report=report)
        self.save(new_state)
        return new_state

    def roll_back(self, state: DeploymentState, report: RolloutReport) -> DeploymentState:
        """Reactivates the former model; without one, the board has none."""
        new_state = DeploymentState(current=state.former, report=report)
        self.save(new_state)
        return new_state


def report_to_json(state: DeploymentState) -> Json | None:
    """Returns the heartbeat's report of the last deployment; `runs` is the deployment of the current model."""
    if state.report is None:
        return None
    return {**state.report.to_json(), "runs": state.current.deployment if state.current else None}


def _parse_state(value: Mapping[str, Any]) -> DeploymentState:
    if value.get("v") != STATE_FORMAT:
        raise ValueError(f"format {value.get('v')!r}, this program reads {STATE_FORMAT}")
    current, former = (parse_record(DeployedModel, value.get(name)) for name in ("current", "former"))
    report = parse_record(RolloutReport, value.get("report"))
    for model in (current, former):
        if model is not None and not SHA256.match(model.sha256):
            raise ValueError(f"no SHA-256: {model.sha256[:80]!r}")
    return DeploymentState(current=current, former=former, report=report)


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOffer:
    """Coordinator's description of a model before its download."""

    model: str
    task: str
    options: Mapping[str, Any]
    tolerance: float
    min_accuracy: float
    test_fraction: float

    @classmethod
    def from_json(cls, value: Json) -> Self:
        """Returns the offer in an answer of the coordinator; raises DataError for a malformed one."""
        try:
            return cls(
                model=str(value["model"]),
                task=str(value["task"]),
                options=dict(value["options"]),
                tolerance=float(value["tolerance"]),
                min_accuracy=float(value["min_accuracy"]),
                test_fraction=float(value["test_fraction"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the coordinator's offer makes no sense: {error!r}") from None


class DeployedModels:
    """Handler of rollouts that bring a model.

    Args:
        state: the device's state directory.
        check_model: evaluates a model.
    """

    artefact = Artefact(rollout="deployment", name="model", suffix=".onnx", max_bytes=MAX_MODEL_BYTES)
    cancels_running = True

    def __init__(
        self,
        state: DeviceStateDir,
        *,
        check_model: Callable[[ModelCheckRequest], ModelCheckResult] = check_in_subprocess,
    ) -> None:
        self._state_dir, self._check_model, self._store = state.root, check_model, ModelStore(state.root)
        self.folder, self._state = self._store.folder, self._store.load()

    @property
    def model(self) -> str | None:
        """Returns the SHA-256 of the current model's tensors; None without one."""
        current = self._state.current
        return current.model if current else None

    @property
    def report(self) -> RolloutReport | None:
        return self._state.report

    def encode_report(self) -> Json | None:
        return report_to_json(self._state)

    def set_report(self, report: RolloutReport) -> None:
        self._state = replace(self._state, report=report)

    def save(self) -> None:
        self._store.save(self._state)

    def list_used(self) -> Collection[str]:
        return {model.sha256 for model in (self._state.current, self._state.former) if model is not None}

    def find_result(self, rollout_id: str) -> RolloutReport | None:
        report, current = self._state.report, self._state.current
        known = report if report is not None and report.id == rollout_id and report.is_final else None
        if current is not None and current.deployment == rollout_id:
            # A late rollback of another deployment may have replaced this one's report.
            return known or RolloutReport(id=rollout_id, state="running", accuracy=current.accuracy)
        return known if known is not None and known.state != "running" else None

    def apply(self, rollout_id: str, client: RolloutClient[Any]) -> RolloutReport:
        client.save(RolloutReport(id=rollout_id, state="fetching"))
        offer, path = client.fetch(rollout_id, ModelOffer.from_json)
        client.save(RolloutReport(id=rollout_id, state="checking"))
        scores = self._check(offer, path)
        client.queue.check_cancelled()
        report = RolloutReport(
            id=rollout_id,
            state="running",
            accuracy=scores.accuracy,
            former_accuracy=scores.former_accuracy,
            num_examples=scores.num_examples,
        )
        if (reason := rejection_reason(scores, offer)) is not None:
            return replace(report, state="rejected", reason=reason)
        deployed = DeployedModel(
            deployment=rollout_id,
            sha256=path.stem,
            model=offer.model,
            task=offer.task,
            accuracy=scores.accuracy,
        )
        self._state = self._store.activate(self._state, deployed, report)
        log.info("runs model %s of deployment %s, accuracy %.4f", deployed.model[:12], rollout_id, scores.accuracy)
        return report

    def roll_back(self, rollout_id: str) -> RolloutReport:
        """Reactivates the former model, if the current one is of this deployment."""
        report = RolloutReport(id=rollout_id, state="reverted")
        if self._state.current is not None and self._state.current.deployment == rollout_id:
            self._state = self._store.roll_back(self._state, report)
            log.warning("deployment %s is taken back; runs %s", rollout_id, (self.model or "no model")[:12])
        return report

    def _check(self, offer: ModelOffer, path: Path) -> ModelCheckResult:
        device, former = DeviceStateDir.load(self._state_dir).settings, self._state.current
        shard = device.shards.get(offer.task)
        if shard is None:
            raise DataError(f"this device has no shard for task {offer.task!r}; edgefl device shard add")
        return self._check_model(
            ModelCheckRequest(
                path=str(path),
                former_path=str(self._store.path(former)) if former and former.task == offer.task else None,
                task=offer.task,
                options=offer.options,
                shard=shard,
                role=device.role,
                test_fraction=offer.test_fraction,
            )
        )


def rejection_reason(result: ModelCheckResult, offer: ModelOffer) -> str | None:
    """Returns why a model must not replace the former one, or None."""
    result_text = f"accuracy {result.accuracy:.4f} on {result.num_examples} examples of its own"
    if result.accuracy < offer.min_accuracy:
        return f"{result_text}, at least {offer.min_accuracy:g} is asked for"
    former_accuracy = result.former_accuracy
    if former_accuracy is not None and result.accuracy < former_accuracy - offer.tolerance:
        return f"{result_text}, the model before has {former_accuracy:.4f} there (tolerance {offer.tolerance:g})"
    return None
