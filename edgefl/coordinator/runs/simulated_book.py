"""The history of a simulated run: the live recorder and ledger, in virtual time and without a journal.

Nothing is recovered: a simulation that is cut off is made again, and gives the same rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgefl.config import RunConfig
from edgefl.coordinator.runs.facts import Facts, no_facts
from edgefl.coordinator.runs.ledger import Ledger
from edgefl.coordinator.runs.recorder import Recorder
from edgefl.storage.checkpoints import save_model
from edgefl.storage.records import CheckpointRow, RunStatus, VirtualDeviceRow
from edgefl.storage.store import Store
from edgefl.strategies.gate import StrategyGate
from edgefl.tally import RoundCount
from edgefl.types import Decision, DeviceInfo, Event, Json, Tensors

EPOCH = 946_684_800.0
"""Virtual time begins on the first of January 2000; runs in one store follow each other."""
BETWEEN_RUNS_S = 60.0
FLUSH_EVERY = 500
"""Rows are written after so many turns of the loop, and at the end."""

OnChange = Callable[[Json], None]


class RunBook:
    """Opens a run in the store, and closes it.

    Args:
        store: where it is kept.
        config: the run file.
        devices: who may take part.
        clock: virtual seconds since the run began.
        on_change: told after every round how far the run is.
    """

    def __init__(
        self,
        store: Store,
        config: RunConfig,
        devices: Sequence[DeviceInfo],
        *,
        clock: Callable[[], float],
        on_change: OnChange | None = None,
    ) -> None:
        self._store, self._clock, self._on_change = store, clock, on_change
        self._begun_at = _after_the_last(store)
        self._config = config.to_json()
        # How many processes train, and where the data lies, changes nothing that is kept.
        for name in ("workers", "data"):
            self._config["simulation"].pop(name, None)
        self._config.pop("models", None)  # a simulation keeps its last one
        self.run_id = _free_id(store, self._config, devices)
        self._name = config.run.name or f"{config.run.task}-{config.strategy.name}"
        self._ledger = _BatchedLedger(store, self.run_id)
        self._recorder: Recorder | None = None
        store.add_run(
            run_id=self.run_id,
            name=self._name,
            task=config.run.task,
            strategy=config.strategy.name,
            config=self._config,
            seed=config.run.seed,
            submitted_at=self._begun_at,
        )
        store.set_run_status(self.run_id, RunStatus.RUNNING, at=self._begun_at)
        store.add_virtual_devices([_row(info) for info in devices], at=self._begun_at)

    def recorder(self, rounds: RoundCount, gate: StrategyGate, facts: Facts = no_facts) -> Recorder:
        """Returns the journal for the loop; `gate` says whom nobody asks any more, `facts` are the strategy's."""

        def after(version: int) -> None:
            if self._on_change is not None and rounds.ends_at(version):
                self._on_change(self._progress(RunStatus.RUNNING, rounds.of(version)))

        self._recorder = Recorder(
            wal=_Nothing(),
            ledger=self._ledger,
            rounds=rounds,
            clock=self._now,
            monotonic=self._clock,
            on_version=after,
            flagged=lambda: gate.guard.flagged,
            facts=facts,
        )
        return self._recorder

    def finish(self, reason: str, models: Path, model: Tensors | None, version: int, number: int) -> None:
        """Writes everything, and the model where there is one."""
        if self._recorder is not None:
            self._recorder.finish()
        if model is not None:
            sha256, path = save_model(models, model)
            row = CheckpointRow(
                version=version,
                round=number,
                last_record=0,
                sha256=sha256,
                bytes_file=path.stat().st_size,
                at=self._now(),
                accuracy=self._ledger.newest_accuracy,
            )
            self._store.record_checkpoint(self.run_id, row)
        self._end(RunStatus.FINISHED, reason)

    def fail(self, error: BaseException) -> None:
        """Writes what there is, and why there is no more."""
        self._ledger.finish()
        if isinstance(error, KeyboardInterrupt):
            self._end(RunStatus.INTERRUPTED, "Ctrl-C")
        else:
            self._end(RunStatus.FAILED, str(error) or type(error).__name__)

    def _end(self, status: RunStatus, reason: str) -> None:
        now = self._now()
        with self._store.batch(durable=True):
            self._store.set_run_status(self.run_id, status, at=now, reason=reason)
            self._store.record_event(f"run-{status}", reason, at=now, run_id=self.run_id)
        if self._on_change is not None:
            self._on_change(self._progress(status, self._store.run(self.run_id).rounds))

    def _now(self) -> float:
        return self._begun_at + self._clock()

    def _progress(self, status: RunStatus, rounds: int) -> Json:
        return {
            "run_id": self.run_id,
            "name": self._name,
            "status": str(status),
            "rounds": rounds,
            "accuracy": self._ledger.newest_accuracy,
            "config": self._config,
        }


class _BatchedLedger(Ledger):
    """Writes rows now and then in the thread of the run, which is the only one."""

    def __init__(self, store: Store, run_id: str) -> None:
        super().__init__(store, run_id)
        self._turns = 0
        self.newest_accuracy: float | None = None

    def accuracy(self, accuracy: float) -> None:
        self.newest_accuracy = accuracy
        super().accuracy(accuracy)

    def publish(self) -> None:
        # Rows gather where they are taken: each publishing copies all that waits to be written.
        self._turns += 1
        if self._turns >= FLUSH_EVERY:
            self.flush()

    def flush(self) -> None:
        self._turns = 0
        super().publish()
        super().flush()


class _Nothing:
    """A write-ahead log that keeps nothing: updates stay in memory until they are used."""

    def received(self, events: Sequence[Event]) -> Sequence[Event]:
        return events

    def decided(self, decision: Decision) -> None: ...
    def aggregated(self, version: int, assignment_ids: Sequence[str]) -> None: ...
    def commit(self) -> None: ...


def _row(info: DeviceInfo) -> VirtualDeviceRow:
    return VirtualDeviceRow(
        device_id=info.device_id,
        role=str(info.role),
        groups=info.groups,
        examples=info.examples,
        facts=info.capabilities,
    )


def _after_the_last(store: Store) -> float:
    """Returns when the run begins: when virtual time does, or some time after the runs before it in the store."""
    ends = [record.finished_at or record.started_at or record.submitted_at for record in store.runs()]
    return max(ends) + BETWEEN_RUNS_S if ends else EPOCH


def _free_id(store: Store, config: Mapping[str, Any], devices: Sequence[DeviceInfo]) -> str:
    """Returns an id that follows from what is run; with a number behind it when the store has it already."""
    facts = [[info.device_id, dict(info.capabilities), dict(info.examples)] for info in devices]
    text = json.dumps([config, facts], sort_keys=True, default=str)
    own = f"sim-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    taken = {record.run_id for record in store.runs()}
    numbers = (f"{own}-{number}" for number in range(2, len(taken) + 3))
    return own if own not in taken else next(name for name in numbers if name not in taken)
