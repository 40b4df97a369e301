"""Takes deployments: fetches the model, judges it on the board's own data, switches to it or keeps what it has.

One thread does one deployment at a time, beside training. What it is at is on disk before it begins, so an agent that
was killed goes on when it starts again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from numpy.random import Generator

from edgefl.device.errands import Errands
from edgefl.device.inference.model_check import Question, Scores, check_apart
from edgefl.device.inference.model_fetch import Offer, Source, fetch_model, fetch_offer
from edgefl.device.inference.model_store import DeployedModel, ModelStore, Note, Report, report_json
from edgefl.device.state import DeviceState
from edgefl.errors import DataError, NotFoundError, StoreError
from edgefl.types import Json

log = logging.getLogger(__name__)

_ENDED = frozenset({"running", "refused", "failed", "reverted"})


class ModelUpdates:
    """The deploying half of a device; commands come from any thread.

    Args:
        state: the device's state directory.
        source: where and as whom to fetch now; raises NetworkError while there is no connection.
        on_change: called when what heartbeats say has changed, and when the coordinator does not answer.
        rng: spreads the attempts of a fleet.
        check: judges a model.
    """

    def __init__(
        self,
        state: DeviceState,
        *,
        source: Callable[[], Source],
        on_change: Callable[[], None],
        rng: Generator,
        check: Callable[[Question], Scores] = check_apart,
    ) -> None:
        self._root, self._source, self._on_change, self._check = state.root, source, on_change, check
        self._store = ModelStore(state.root)
        self._note = self._store.read()
        under_way = [("deploy", self._note.pending)] if self._note.pending else []
        self._errands: Errands[tuple[str, str]] = Errands(
            "models", self._carry_out, on_failure=self._failed, rng=rng, orders=under_way
        )

    def start(self) -> None:
        """Goes on with what an earlier life of the agent was at."""
        self._errands.start()

    def stop(self, within_s: float = 2.0) -> None:
        """Leaves what is under way; it is taken up again at the next start."""
        self._errands.stop(within_s)

    @property
    def model(self) -> str | None:
        """SHA-256 of the tensors of the current model; None without one."""
        current = self._note.current
        return current.model if current else None

    @property
    def report(self) -> Json | None:
        """What heartbeats say of the last deployment; None before the first."""
        return report_json(self._note)

    def deploy(self, deployment: str) -> None:
        """Begins a deployment; one that is done already is only reported again."""
        self._errands.add(("deploy", deployment))

    def roll_back(self, deployment: str) -> None:
        """Leaves a deployment: gives it up, or goes back to the model before it."""
        self._errands.add(("rollback", deployment))

    def _carry_out(self, order: tuple[str, str]) -> None:
        kind, deployment = order
        (self._deploy if kind == "deploy" else self._go_back)(deployment)

    def _failed(self, order: tuple[str, str], error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        self._note = replace(self._note, report=Report(id=order[1], state="failed", reason=reason))
        self._on_change()

    def _deploy(self, deployment: str) -> None:
        note = self._note
        is_done = note.report is not None and note.report.id == deployment and note.report.state in _ENDED
        is_current = note.current is not None and note.current.deployment == deployment
        if note.current is not None and is_current and not is_done:
            # A late order to leave another deployment has taken this one's place in the report.
            self._end(Report(id=deployment, state="running", accuracy=note.current.accuracy))
            return
        if is_current or (is_done and note.report is not None and note.report.state != "running"):
            self._on_change()
            return
        try:
            self._keep(replace(note, pending=deployment, report=Report(id=deployment, state="fetching")))
            offer, path = self._fetched(deployment)
            self._keep(replace(self._note, report=Report(id=deployment, state="checking")))
            self._judge(offer, path)
        except (DataError, StoreError, NotFoundError) as error:
            self._end(Report(id=deployment, state="failed", reason=str(error)))

    def _fetched(self, deployment: str) -> tuple[Offer, Path]:
        def attempt() -> tuple[Offer, Path]:
            offer = fetch_offer(self._source(), deployment)
            self._store.prune(self._note, keep=offer.sha256)
            return offer, fetch_model(
                self._source(), offer, self._store.folder, lambda: not self._errands.is_called_off()
            )

        return self._errands.until_done(attempt, what=f"deployment {deployment}", on_away=self._on_change)

    def _judge(self, offer: Offer, path: Path) -> None:
        device, former = DeviceState.load(self._root).device, self._note.current
        shard = device.shards.get(offer.task)
        if shard is None:
            raise DataError(f"this device has no shard for task {offer.task!r}; edgefl device shard add")
        scores = self._check(
            Question(
                path=str(path),
                former_path=str(self._store.path(former)) if former and former.task == offer.task else None,
                task=offer.task,
                options=offer.options,
                shard=shard,
                role=device.role,
                test_fraction=offer.test_fraction,
            )
        )
        self._errands.check_wanted()
        report = Report(
            id=offer.deployment,
            state="running",
            accuracy=scores.accuracy,
            former_accuracy=scores.former_accuracy,
            num_examples=scores.num_examples,
        )
        if (reason := refusal(scores, offer)) is not None:
            self._end(replace(report, state="refused", reason=reason))
            return
        new = DeployedModel(
            deployment=offer.deployment,
            sha256=offer.sha256,
            model=offer.model,
            task=offer.task,
            accuracy=scores.accuracy,
        )
        self._note = self._store.switch(self._note, new, report)
        log.info("runs model %s of deployment %s, accuracy %.4f", new.model[:12], new.deployment, scores.accuracy)
        self._on_change()

    def _go_back(self, deployment: str) -> None:
        note, report = self._note, Report(id=deployment, state="reverted")
        if note.current is not None and note.current.deployment == deployment:
            self._note = self._store.go_back(note, report)
            now = self._note.current
            log.warning("deployment %s is taken back; runs %s", deployment, now.model[:12] if now else "no model")
            self._on_change()
        elif note.report is not None and note.report.id == deployment and note.report.state == "reverted":
            self._on_change()
        else:
            self._end(report)

    def _end(self, report: Report) -> None:
        """Keeps the model that there is, and what is to be said."""
        if report.reason:
            log.warning("deployment %s is %s: %s", report.id, report.state, report.reason)
        try:
            self._keep(replace(self._note, report=report, pending=None))
        except StoreError as error:  # it is said, and must not become a failure of what has ended otherwise
            log.warning("what became of deployment %s cannot be kept: %s", report.id, error)
        self._store.prune(self._note)

    def _keep(self, note: Note) -> None:
        # Said first: a card without room must not keep the coordinator from learning so.
        self._note = note
        self._on_change()
        self._store.write(note)


def refusal(scores: Scores, offer: Offer) -> str | None:
    """Returns why a model must not replace the one before it, or None."""
    found = f"accuracy {scores.accuracy:.4f} on {scores.num_examples} examples of its own"
    if scores.accuracy < offer.min_accuracy:
        return f"{found}, at least {offer.min_accuracy:g} is asked for"
    former = scores.former_accuracy
    if former is not None and scores.accuracy < former - offer.tolerance:
        return f"{found}, the model before has {former:.4f} there (tolerance {offer.tolerance:g})"
    return None
