"""Deployments on the device: a fetched model is checked on local data, and activated or rejected."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from edgefl.core.errors import DataError
from edgefl.core.protocol import MAX_MODEL_BYTES
from edgefl.core.types import Json
from edgefl.device.inference.model_check import ModelCheckRequest, ModelCheckResult, check_in_subprocess
from edgefl.device.inference.model_store import DeployedModel, ModelStore, report_to_json
from edgefl.device.rollouts.client import RolloutClient, RolloutReport
from edgefl.device.rollouts.download import Artefact
from edgefl.device.state_dir import DeviceStateDir

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
