"""History recorder of a simulated run: as the live one, in virtual time and without a journal.

Nothing is recovered: an interrupted simulation is run again and gives the same rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgefl.coordinator.runs.history_recorder import ComputeMetrics, HistoryRecorder, compute_no_metrics
from edgefl.coordinator.runs.history_writer import EventRow, HistoryWriter
from edgefl.core.config import INDIFFERENT_SETTINGS, RunConfig
from edgefl.core.metrics import NO_METRICS, MetricSet
from edgefl.core.types import DeviceInfo, Json, Tensors
from edgefl.engine.evaluations import DeviceAccuracy, VersionAccuracy
from edgefl.engine.progress import RoundCounter
from edgefl.engine.round_loop import OnScore, RunLog
from edgefl.storage.checkpoints import save_model
from edgefl.storage.queries.history import read_history
from edgefl.storage.repositories.records import RunStatus, SavedModelRow, SimulatedDeviceRow
from edgefl.storage.store import Store
from edgefl.strategies.participation import RunParticipationPolicy

SIMULATION_EPOCH = 946_684_800.0
"""Virtual time begins on the first of January 2000; runs in one store follow each other."""
BETWEEN_RUNS_S = 60.0
FLUSH_EVERY_TURNS = 500
"""Turns of the loop between writes of rows; the last write is at the end."""

OnChange = Callable[[Json], None]
EarlyStop = Callable[[int, Callable[[], Sequence[Mapping[str, Any]]]], str]
"""(round that was evaluated, reads the rows of the rounds so far) -> why the run ends there, or an empty text."""


class StoppedEarlyError(Exception):
    """The run ends in the middle of a round; its text is the reason."""


class SimulationHistory:
    """Opens a run in the store, and closes it.

    Args:
        store: the store.
        config: the run file.
        devices: the eligible devices.
        clock: virtual seconds since the run began.
        on_change: called with the run's progress after every round.
        run_id: of the run, with a number appended if the store has it already; None for one that follows from the
            run's content.
    """

    def __init__(
        self,
        store: Store,
        config: RunConfig,
        devices: Sequence[DeviceInfo],
        *,
        clock: Callable[[], float],
        on_change: OnChange | None = None,
        run_id: str | None = None,
    ) -> None:
        self._store, self._clock, self._on_change = store, clock, on_change
        self._started_at = _compute_start_time(store)
        self._config = config.to_json()
        # Where it trains and where the data is change nothing in the history.
        for name in (*INDIFFERENT_SETTINGS, "data"):
            self._config["simulation"].pop(name, None)
        self._config.pop("models", None)  # a simulation keeps its last one
        self.run_id = _make_unique(store, run_id or _hash_content(self._config, devices))
        self._name = make_run_name(config)
        self._history = _BatchedHistoryWriter(store, self.run_id)
        self._log: RunLog | None = None
        store.add_run(
            run_id=self.run_id,
            name=self._name,
            task=config.run.task,
            strategy=config.strategy.name,
            config=self._config,
            seed=config.run.seed,
            submitted_at=self._started_at,
        )
        store.set_run_status(self.run_id, RunStatus.RUNNING, at=self._started_at)
        store.add_simulated_devices([_create_device_row(info) for info in devices], at=self._started_at)

    def create_log(
        self,
        rounds: RoundCounter,
        policy: RunParticipationPolicy,
        compute_metrics: ComputeMetrics = compute_no_metrics,
        needed_updates: int = 0,
        metrics: MetricSet = NO_METRICS,
    ) -> RunLog:
        """Returns the loop's journal.

        Args:
            rounds: of the run.
            policy: lists excluded devices.
            compute_metrics: of the strategy.
            needed_updates: of the strategy.
            metrics: of the task.
        """

        def after(version: int) -> None:
            if self._on_change is not None and rounds.is_round_end(version):
                self._on_change(self._create_progress_row(RunStatus.RUNNING, rounds.get_round(version)))

        recorder = HistoryRecorder(
            history=self._history,
            rounds=rounds,
            clock=self._now,
            monotonic=self._clock,
            on_version=after,
            get_blocked=lambda: policy.blocked_devices,
            compute_metrics=compute_metrics,
            metrics=metrics,
            needed_updates=needed_updates,
        )
        self._log = RunLog(None, [recorder])
        return self._log

    def watch_scores(self, log: RunLog, rounds: RoundCounter, early_stop: EarlyStop | None) -> OnScore:
        """Returns what records accuracies, and raises `StoppedEarlyError` where the run is to end after one."""
        if early_stop is None:
            return log.record_score

        def read_rounds() -> list[dict[str, Any]]:
            self._history.flush()
            return read_history(self._store, "rounds", run=self.run_id)

        def record(score: VersionAccuracy | DeviceAccuracy) -> None:
            log.record_score(score)
            if isinstance(score, VersionAccuracy) and (
                reason := early_stop(rounds.get_round(score.version), read_rounds)
            ):
                raise StoppedEarlyError(reason)

        return record

    def record_event(self, kind: str, device_id: str, message: str) -> None:
        """Adds an event of a device to the history."""
        self._history.add_event(EventRow(kind=kind, device_id=device_id, message=message, at=self._now()))

    def finish(self, reason: str, models: Path, model: Tensors | None, version: int, round_number: int) -> None:
        """Writes all rows, and the model where there is one."""
        if self._log is not None:
            self._log.finish()
            self._history.finish()
        if model is not None:
            sha256, path = save_model(models, model)
            row = SavedModelRow(
                version=version,
                round=round_number,
                last_record=0,
                sha256=sha256,
                bytes_file=path.stat().st_size,
                at=self._now(),
                accuracy=self._history.newest_accuracy,
            )
            self._store.record_saved_model(self.run_id, row)
        self._record_end(RunStatus.FINISHED, reason)

    def stop(self, reason: str) -> None:
        """Writes the rows so far of a run that is stopped early; it has no model."""
        self._history.finish()
        self._record_end(RunStatus.STOPPED, reason)

    def fail(self, error: BaseException) -> None:
        """Writes the rows so far, and the reason of the failure."""
        self._history.finish()
        if isinstance(error, KeyboardInterrupt):
            self._record_end(RunStatus.INTERRUPTED, "Ctrl-C")
        else:
            self._record_end(RunStatus.FAILED, str(error) or type(error).__name__)

    def _record_end(self, status: RunStatus, reason: str) -> None:
        now = self._now()
        with self._store.batch(durable=True):
            self._store.set_run_status(self.run_id, status, at=now, reason=reason)
            self._store.record_event(f"run-{status}", reason, at=now, run_id=self.run_id)
        if self._on_change is not None:
            self._on_change(self._create_progress_row(status, self._store.get_run(self.run_id).rounds))

    def _now(self) -> float:
        return self._started_at + self._clock()

    def _create_progress_row(self, status: RunStatus, rounds: int) -> Json:
        return {
            "run_id": self.run_id,
            "name": self._name,
            "status": str(status),
            "rounds": rounds,
            "accuracy": self._history.newest_accuracy,
            "reason": self._history.newest_reason,
            "config": self._config,
        }


class _BatchedHistoryWriter(HistoryWriter):
    """Writes rows in batches, in the run's only thread."""

    def __init__(self, store: Store, run_id: str) -> None:
        super().__init__(store, run_id)
        self._turns = 0
        self.newest_accuracy: float | None = None
        self.newest_reason: str | None = None

    def update_accuracy(self, accuracy: float) -> None:
        self.newest_accuracy = accuracy
        super().update_accuracy(accuracy)

    def update_reason(self, reason: str) -> None:
        self.newest_reason = reason
        super().update_reason(reason)

    def publish(self) -> None:
        # Rows gather here first: each publishing copies all pending rows.
        self._turns += 1
        if self._turns >= FLUSH_EVERY_TURNS:
            self.flush()

    def flush(self) -> None:
        self._turns = 0
        super().publish()
        super().flush()


def make_run_name(config: RunConfig) -> str:
    """Returns the name that a run has in the history: its own, or else of its task and strategy."""
    return config.run.name or f"{config.run.task}-{config.strategy.name}"


def _create_device_row(info: DeviceInfo) -> SimulatedDeviceRow:
    return SimulatedDeviceRow(
        device_id=info.device_id,
        role=str(info.role),
        groups=info.groups,
        examples=info.examples,
        facts=info.capabilities,
    )


def _compute_start_time(store: Store) -> float:
    """Returns the run's start: that of virtual time, or some time after the store's earlier runs."""
    newest = store.find_newest_run_time()
    return SIMULATION_EPOCH if newest is None else newest + BETWEEN_RUNS_S


def _hash_content(config: Mapping[str, Any], devices: Sequence[DeviceInfo]) -> str:
    facts = [[info.device_id, dict(info.capabilities), dict(info.examples)] for info in devices]
    text = json.dumps([config, facts], sort_keys=True, default=str)
    return f"sim-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def _make_unique(store: Store, run_id: str) -> str:
    """Returns the id, with a number appended if the store has it already."""
    existing_ids = {record.run_id for record in store.list_runs(prefix=run_id)}
    numbers = (f"{run_id}-{number}" for number in range(2, len(existing_ids) + 3))
    return run_id if run_id not in existing_ids else next(name for name in numbers if name not in existing_ids)
