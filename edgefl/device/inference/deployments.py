"""Deployment client: downloads a model, checks it on local data, activates or rejects it.

One thread executes one deployment at a time, beside training. Its state is on disk before it begins, so a killed
agent resumes at the next start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from numpy.random import Generator

from edgefl.core.errors import DataError, NotFoundError, StoreError
from edgefl.core.types import Json
from edgefl.device.background_tasks import BackgroundTaskQueue
from edgefl.device.inference.model_check import ModelCheckRequest, ModelCheckResult, check_in_subprocess
from edgefl.device.inference.model_download import DownloadSource, ModelOffer, download_model, fetch_model_offer
from edgefl.device.inference.model_store import (
    DeployedModel,
    DeploymentReport,
    DeploymentState,
    ModelStore,
    report_to_json,
)
from edgefl.device.state_dir import DeviceStateDir

log = logging.getLogger(__name__)

_FINAL_STATES = frozenset({"running", "refused", "failed", "reverted"})


class DeploymentClient:
    """Deployment client of a device; commands come from any thread.

    Args:
        state: the device's state directory.
        source: returns the present download source; raises NetworkError while there is no connection.
        on_change: called when the report in heartbeats has changed, and when the coordinator does not answer.
        rng: randomises the retries of a fleet.
        check_model: evaluates a model.
    """

    def __init__(
        self,
        state: DeviceStateDir,
        *,
        source: Callable[[], DownloadSource],
        on_change: Callable[[], None],
        rng: Generator,
        check_model: Callable[[ModelCheckRequest], ModelCheckResult] = check_in_subprocess,
    ) -> None:
        self._state_dir, self._source, self._on_change, self._check_model = state.root, source, on_change, check_model
        self._store = ModelStore(state.root)
        self._deployment_state = self._store.load()
        pending = [("deploy", self._deployment_state.pending)] if self._deployment_state.pending else []
        self._task_queue: BackgroundTaskQueue[tuple[str, str]] = BackgroundTaskQueue(
            "models", self._run_command, on_failure=self._on_failure, rng=rng, pending=pending
        )

    def start(self) -> None:
        """Starts, and resumes a deployment of an earlier run of the agent."""
        self._task_queue.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Abandons the running deployment; the next start resumes it."""
        self._task_queue.stop(timeout_s)

    @property
    def model(self) -> str | None:
        """Returns the SHA-256 of the current model's tensors; None without one."""
        current = self._deployment_state.current
        return current.model if current else None

    @property
    def report(self) -> Json | None:
        """Returns the heartbeat's report of the last deployment; None before the first."""
        return report_to_json(self._deployment_state)

    def deploy(self, deployment: str) -> None:
        """Starts a deployment; a finished one is only reported again."""
        self._task_queue.add(("deploy", deployment))

    def roll_back(self, deployment: str) -> None:
        """Rolls a deployment back: cancels it, or reactivates the former model."""
        self._task_queue.add(("rollback", deployment))

    def _run_command(self, command: tuple[str, str]) -> None:
        kind, deployment = command
        (self._deploy if kind == "deploy" else self._roll_back)(deployment)

    def _on_failure(self, command: tuple[str, str], error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        self._deployment_state = replace(
            self._deployment_state, report=DeploymentReport(id=command[1], state="failed", reason=reason)
        )
        self._on_change()

    def _deploy(self, deployment: str) -> None:
        state = self._deployment_state
        is_done = state.report is not None and state.report.id == deployment and state.report.state in _FINAL_STATES
        is_current = state.current is not None and state.current.deployment == deployment
        if state.current is not None and is_current and not is_done:
            # A late rollback of another deployment has replaced this one's report.
            self._complete(DeploymentReport(id=deployment, state="running", accuracy=state.current.accuracy))
            return
        if is_current or (is_done and state.report is not None and state.report.state != "running"):
            self._on_change()
            return
        try:
            self._save_state(
                replace(state, pending=deployment, report=DeploymentReport(id=deployment, state="fetching"))
            )
            offer, path = self._download(deployment)
            self._save_state(
                replace(self._deployment_state, report=DeploymentReport(id=deployment, state="checking"))
            )
            self._check_candidate(offer, path)
        except (DataError, StoreError, NotFoundError) as error:
            self._complete(DeploymentReport(id=deployment, state="failed", reason=str(error)))

    def _download(self, deployment: str) -> tuple[ModelOffer, Path]:
        def attempt() -> tuple[ModelOffer, Path]:
            offer = fetch_model_offer(self._source(), deployment)
            self._store.delete_unused(self._deployment_state, kept_sha256=offer.sha256)
            return offer, download_model(
                self._source(), offer, self._store.folder, lambda: not self._task_queue.is_cancelled()
            )

        return self._task_queue.retry(attempt, label=f"deployment {deployment}", on_disconnect=self._on_change)

    def _check_candidate(self, offer: ModelOffer, path: Path) -> None:
        device, former = DeviceStateDir.load(self._state_dir).settings, self._deployment_state.current
        shard = device.shards.get(offer.task)
        if shard is None:
            raise DataError(f"this device has no shard for task {offer.task!r}; edgefl device shard add")
        scores = self._check_model(
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
        self._task_queue.check_cancelled()
        report = DeploymentReport(
            id=offer.deployment,
            state="running",
            accuracy=scores.accuracy,
            former_accuracy=scores.former_accuracy,
            num_examples=scores.num_examples,
        )
        if (reason := rejection_reason(scores, offer)) is not None:
            self._complete(replace(report, state="refused", reason=reason))
            return
        deployed = DeployedModel(
            deployment=offer.deployment,
            sha256=offer.sha256,
            model=offer.model,
            task=offer.task,
            accuracy=scores.accuracy,
        )
        self._deployment_state = self._store.activate(self._deployment_state, deployed, report)
        log.info(
            "runs model %s of deployment %s, accuracy %.4f", deployed.model[:12], deployed.deployment, scores.accuracy
        )
        self._on_change()

    def _roll_back(self, deployment: str) -> None:
        state, report = self._deployment_state, DeploymentReport(id=deployment, state="reverted")
        if state.current is not None and state.current.deployment == deployment:
            self._deployment_state = self._store.roll_back(state, report)
            current = self._deployment_state.current
            log.warning(
                "deployment %s is taken back; runs %s", deployment, current.model[:12] if current else "no model"
            )
            self._on_change()
        elif state.report is not None and state.report.id == deployment and state.report.state == "reverted":
            self._on_change()
        else:
            self._complete(report)

    def _complete(self, report: DeploymentReport) -> None:
        """Stores a final report; the current model stays."""
        if report.reason:
            log.warning("deployment %s is %s: %s", report.id, report.state, report.reason)
        try:
            self._save_state(replace(self._deployment_state, report=report, pending=None))
        except StoreError as error:  # it is reported, and must not turn a finished deployment into a failure
            log.warning("what became of deployment %s cannot be kept: %s", report.id, error)
        self._store.delete_unused(self._deployment_state)

    def _save_state(self, state: DeploymentState) -> None:
        # Set first: with a full card the coordinator must still receive the report.
        self._deployment_state = state
        self._on_change()
        self._store.save(state)


def rejection_reason(result: ModelCheckResult, offer: ModelOffer) -> str | None:
    """Returns why a model must not replace the former one, or None."""
    result_text = f"accuracy {result.accuracy:.4f} on {result.num_examples} examples of its own"
    if result.accuracy < offer.min_accuracy:
        return f"{result_text}, at least {offer.min_accuracy:g} is asked for"
    former_accuracy = result.former_accuracy
    if former_accuracy is not None and result.accuracy < former_accuracy - offer.tolerance:
        return f"{result_text}, the model before has {former_accuracy:.4f} there (tolerance {offer.tolerance:g})"
    return None
