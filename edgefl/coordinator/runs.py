"""The run worker: takes queued runs one after the other and drives each to its end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from edgefl.config import RunConfig
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.live_fleet import Bell, FleetRun, InterruptedRunError, LiveFleet
from edgefl.coordinator.recorder import Recorder
from edgefl.coordinator.roster import Roster
from edgefl.coordinator.superlink import Reply, SuperLink
from edgefl.errors import EdgeflError, JournalError, StoreError
from edgefl.loop import EvaluationRule, Goal, drive
from edgefl.storage.checkpoints import prune_checkpoints, save_model, save_state
from edgefl.storage.journal import WalJournal
from edgefl.storage.records import CheckpointRow, RunRecord, RunStatus
from edgefl.storage.store import Store
from edgefl.types import Json, Progress, Stop, Strategy, Tensors

log = logging.getLogger(__name__)

CHECKPOINT_EVERY = 10
"""Versions between two checkpoints of a run's state; the last one is always checkpointed."""


class Assembled(Protocol):
    """What `assembly.assemble` makes of a run file."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def model(self) -> Tensors: ...
    @property
    def strategy(self) -> Strategy[Any]: ...
    @property
    def goal(self) -> Goal: ...
    @property
    def evaluate(self) -> EvaluationRule: ...
    @property
    def header(self) -> Json: ...
    @property
    def encode(self) -> Callable[[Tensors, int], bytes]: ...
    @property
    def decode(self) -> Callable[[bytes], Tensors]: ...


Assemble = Callable[[RunConfig, str], Assembled]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSite:
    """What a run works with."""

    directory: CoordinatorDirectory
    store: Store
    roster: Roster
    superlink: SuperLink
    bell: Bell
    assemble: Assemble


class RunWorker:
    """Drives runs in one thread; replies and progress are posted to it from others.

    Args:
        site: what runs work with.
        on_fatal: called when the store or the journal can no longer be written: the coordinator must stop.
    """

    def __init__(self, site: RunSite, on_fatal: Callable[[EdgeflError], None]) -> None:
        self._site, self._on_fatal = site, on_fatal
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._fleet: LiveFleet | None = None
        self._running: str | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="runs", daemon=True)

    def start(self) -> None:
        """Marks what an earlier coordinator left running as interrupted, and takes up the queue."""
        store, now = self._site.store, time.time()
        for status in (RunStatus.RUNNING, RunStatus.STOPPING):
            for record in store.runs(status=status):
                store.set_run_status(
                    record.run_id, RunStatus.INTERRUPTED, at=now, reason="its coordinator ended without a word"
                )
        self._thread.start()

    def wake(self) -> None:
        """Says that a run was queued."""
        self._wake.set()

    def post(self, item: Reply | Progress | InterruptedRunError) -> None:
        """Hands an item to the active run, if there is one."""
        with self._lock:
            if self._fleet is not None:
                self._fleet.post(item)

    def stop_run(self, run_id: str, reason: str) -> bool:
        """Asks the active run to end after what is in flight; returns whether it is this one."""
        with self._lock:
            if self._running != run_id or self._fleet is None:
                return False
            self._fleet.post(Stop(reason=reason))
            return True

    def stop(self) -> None:
        """Interrupts the active run, so that it can be taken up again, and ends the thread."""
        self._stopping.set()
        self._wake.set()
        self.post(InterruptedRunError("the coordinator was stopped"))
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                record = self._site.store.next_queued_run()
                if record is None:
                    self._wake.wait(5.0)
                    self._wake.clear()
                else:
                    self._run(record)
            except (StoreError, JournalError) as error:
                self._on_fatal(error)
                return

    def _run(self, record: RunRecord) -> None:
        """Drives one run. Whatever a task or a strategy raises ends this run, never the coordinator."""
        store, run_id = self._site.store, record.run_id
        store.set_run_status(run_id, RunStatus.RUNNING, at=time.time())
        log.info("run %s (%s, %s) begins", run_id, record.task, record.strategy)
        try:
            assembled = self._site.assemble(RunConfig.from_json(record.config), run_id)
            self._drive(record, assembled)
        except InterruptedRunError as error:
            store.set_run_status(run_id, RunStatus.INTERRUPTED, at=time.time(), reason=str(error))
        except (StoreError, JournalError):
            raise
        except EdgeflError as error:
            self._fail(run_id, str(error))
        except Exception as error:  # third-party strategies and tasks run here, and the next run must still start
            log.exception("run %s failed", run_id)
            self._fail(run_id, f"{type(error).__name__}: {error}")

    def _fail(self, run_id: str, reason: str) -> None:
        log.error("run %s failed: %s", run_id, reason)
        with self._site.store.batch(durable=True):
            self._site.store.set_run_status(run_id, RunStatus.FAILED, at=time.time(), reason=reason)
            self._site.store.record_event("run-failed", reason, at=time.time(), run_id=run_id)

    def _drive(self, record: RunRecord, assembled: Assembled) -> None:
        site, run_id = self._site, record.run_id
        folder = site.directory.runs / run_id
        with WalJournal(folder / "journal", assembled.decode) as wal:
            keeper = _Keeper(site=site, run_id=run_id, wal=wal, model_of=assembled.strategy.model)
            recorder = Recorder(
                run_id=run_id,
                store=site.store,
                wal=wal,
                clock=time.time,
                monotonic=time.monotonic,
                checkpoint=keeper.after,
            )
            fleet = self._open_fleet(run_id, assembled)
            try:
                state, reason = drive(
                    assembled.strategy,
                    assembled.strategy.init(assembled.model),
                    fleet=fleet,
                    journal=recorder,
                    goal=assembled.goal,
                    evaluate=assembled.evaluate,
                )
            finally:
                self._close_fleet(fleet)
            keeper.keep(assembled.strategy.version(state), state)
            was_stopped = site.store.run(run_id).status == RunStatus.STOPPING
            recorder.finish(RunStatus.STOPPED if was_stopped else RunStatus.FINISHED, reason)
            log.info("run %s is over: %s", run_id, reason)

    def _open_fleet(self, run_id: str, assembled: Assembled) -> LiveFleet:
        config, site = assembled.config, self._site
        run = FleetRun(
            run_id=run_id,
            task=config.run.task,
            header=assembled.header,
            groups=config.devices.groups,
            names=config.devices.names,
            join_at_start=config.devices.join == "start",
            encode=assembled.encode,
            decode=assembled.decode,
        )
        link = site.superlink.open_run()
        fleet = LiveFleet(run=run, link=link, roster=site.roster, bell=site.bell, clock=time.monotonic)
        with self._lock:
            self._fleet, self._running = fleet, run_id
        if self._stopping.is_set():
            fleet.post(InterruptedRunError("the coordinator was stopped"))
        return fleet

    def _close_fleet(self, fleet: LiveFleet) -> None:
        with self._lock:
            self._fleet, self._running = None, None
        fleet.close()


@dataclass(slots=True)
class _Keeper:
    """Checkpoints a run's state now and then, and its last model as a file of its own."""

    site: RunSite
    run_id: str
    wal: WalJournal
    model_of: Callable[[Any], Tensors]

    def after(self, version: int, state: object) -> None:
        if version % CHECKPOINT_EVERY == 0:
            self.keep(version, state)

    def keep(self, version: int, state: object) -> None:
        """Writes state and model; the journal before it is then no longer needed."""
        self.wal.commit()
        folder = self.site.directory.runs / self.run_id / "checkpoints"
        checkpoint = save_state(folder, state, self.wal.last_record)
        sha256, path = save_model(self.site.directory.models, self.model_of(state))
        row = CheckpointRow(
            version=version,
            round=version,
            last_record=checkpoint.last_record,
            sha256=sha256,
            bytes_file=path.stat().st_size,
            at=time.time(),
        )
        self.site.store.record_checkpoint(self.run_id, row)
        prune_checkpoints(folder)
        self.wal.prune(checkpoint.last_record)
