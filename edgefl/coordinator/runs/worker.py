"""The run worker: takes queued runs one after the other and drives each to its end."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from edgefl.config import RunConfig
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.dispatch.door import NotReadyError
from edgefl.coordinator.dispatch.live_fleet import Bell, FleetRun, InterruptedRunError, LiveFleet
from edgefl.coordinator.dispatch.participants import EncodeChanges
from edgefl.coordinator.fleet.roster import Roster
from edgefl.coordinator.mail import Reply
from edgefl.coordinator.runs.admission import Admitting, terms_of
from edgefl.coordinator.runs.facts import facts_of
from edgefl.coordinator.runs.keeper import Keeper
from edgefl.coordinator.runs.kept_models import ModelKeeper
from edgefl.coordinator.runs.ledger import EventRow, Ledger
from edgefl.coordinator.runs.model_journal import ModelJournal
from edgefl.coordinator.runs.planning import Plannable
from edgefl.coordinator.runs.recorder import Recorder
from edgefl.coordinator.runs.resuming import Resumable, Resumed, check_resumable, resumed_state
from edgefl.coordinator.runs.run_meter import RunMeter
from edgefl.coordinator.superlink import SuperLink
from edgefl.errors import EdgeflError, JournalError, RunFailedError, StoreError, UsageError
from edgefl.files import write_whole
from edgefl.loop import EvaluationRule, drive
from edgefl.protocol import Command, CommandKind
from edgefl.storage.journal import WalJournal
from edgefl.storage.records import RunRecord, RunStatus
from edgefl.storage.rewinding import RESUMED
from edgefl.storage.store import Store
from edgefl.strategies.gate import StrategyGate
from edgefl.types import Json, Progress, Stop, Tensors

log = logging.getLogger(__name__)


class Assembled(Admitting, Plannable, Resumable, Protocol):
    """What `assembly.assemble` makes of a run file."""

    @property
    def evaluate(self) -> EvaluationRule: ...
    @property
    def header(self) -> Json: ...
    @property
    def needs_torch(self) -> bool: ...
    @property
    def encode(self) -> Callable[[Tensors, int], bytes]: ...
    @property
    def encode_changes(self) -> EncodeChanges | None: ...
    @property
    def decode(self) -> Callable[[bytes], Tensors]: ...


Assemble = Callable[[RunConfig, str], Assembled]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSite:
    """What a run works with.

    `on_finished` is told of a run that has reached its end, in the transaction that says so.
    """

    directory: CoordinatorDirectory
    store: Store
    roster: Roster
    superlink: SuperLink
    bell: Bell
    assemble: Assemble
    meter: RunMeter = field(default_factory=RunMeter)
    on_finished: Callable[[str, RunConfig], None] = lambda _run_id, _config: None


@dataclass(slots=True)
class _Active:
    """The run that is being driven; it has a fleet between its assembly and its end."""

    run_id: str
    fleet: LiveFleet | None = None
    ledger: Ledger | None = None
    gate: StrategyGate | None = None
    stop_reason: str | None = None


class RunWorker:
    """Drives runs in one thread; replies and progress are posted to it from others.

    A run's status changes under one lock, so that a stop is neither lost nor overtakes the end of its run. Whoever
    holds it waits for the store, so what devices send is passed on without it.

    Args:
        site: what runs work with.
        on_fatal: called when the store or the journal can no longer be written: the coordinator must stop.
    """

    def __init__(self, site: RunSite, on_fatal: Callable[[EdgeflError], None]) -> None:
        self._site, self._on_fatal = site, on_fatal
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._active: _Active | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="runs", daemon=True)

    def recover(self) -> None:
        """Marks what an earlier coordinator left running as interrupted; to be called before anybody may ask.

        A run whose devices went on meanwhile is queued again.
        """
        for status in (RunStatus.RUNNING, RunStatus.STOPPING, RunStatus.INTERRUPTED):
            for record in self._site.store.runs(status=status):
                if status is RunStatus.STOPPING and self._mark(record.run_id).exists():
                    self._end(record.run_id, RunStatus.STOPPED, record.reason or "stopped")
                elif self._mark(record.run_id).exists():
                    self._set_status(record.run_id, RunStatus.QUEUED, "its devices went on without a coordinator")
                elif status is not RunStatus.INTERRUPTED:
                    self._set_status(record.run_id, RunStatus.INTERRUPTED, "its coordinator ended without a word")

    def start(self) -> None:
        """Takes up the queue."""
        self._thread.start()

    def wake(self) -> None:
        """Says that a run was queued."""
        self._wake.set()

    def is_active(self, run_id: str) -> bool:
        """Returns whether this run is being driven now."""
        active = self._active
        return active is not None and active.run_id == run_id

    def bars(self, run_id: str, device_id: str) -> bool:
        """Returns whether a device of the active run is asked no more, since its updates were refused too often."""
        active = self._active
        if active is None or active.run_id != run_id or active.gate is None:
            return False
        return device_id in active.gate.barred

    def goes_on(self, run_id: str) -> bool:
        """Returns whether the devices of a run go on by themselves, until it is taken up again."""
        return self._mark(run_id).exists()

    def post(self, item: Reply | Progress | InterruptedRunError) -> None:
        """Hands an item to the active run, if there is one."""
        active = self._active
        fleet = active.fleet if active is not None else None
        if fleet is not None:
            fleet.post(item)

    def flush(self) -> None:
        """Writes the rows of the active run that wait; called now and then."""
        active = self._active
        ledger = active.ledger if active is not None else None
        if ledger is not None:
            ledger.flush()

    def stop_run(self, run_id: str, reason: str) -> None:
        """Ends a run: one that waits at once, the active one after what is in flight.

        Raises:
            UsageError: it is over already.
        """
        with self._lock:
            record = self._site.store.run(run_id)
            if record.status.is_final:
                raise UsageError(f"run {run_id} is {record.status} already")
            if self._active is None or self._active.run_id != run_id:
                self._tell_end(run_id)
                self._set_status(run_id, RunStatus.STOPPED, reason)
                return
            self._site.store.set_run_status(run_id, RunStatus.STOPPING, at=time.time(), reason=reason)
            self._active.stop_reason = reason
            self._site.meter.stopping(run_id)
            if self._active.fleet is not None:
                self._active.fleet.post(Stop(reason=reason))

    def resume_run(self, run_id: str) -> None:
        """Lets a run that was interrupted or stopped wait for its turn again, to go on from its newest checkpoint.

        Raises:
            UsageError: it is not over, or there is nothing to go on with.
            JournalError: its checkpoint cannot be read.
        """
        record, site = self._site.store.run(run_id), self._site
        check_resumable(record, site.directory, lambda: site.assemble(RunConfig.from_json(record.config), run_id))
        with self._lock:
            if site.store.run(run_id).status is not record.status:
                raise UsageError(f"run {run_id} has just been taken up or stopped by somebody else")
            with site.store.batch(durable=True):
                site.store.queue_again(run_id)
                site.store.record_event(RESUMED, f"was {record.status}", at=time.time(), run_id=run_id)
        self.wake()

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
                record = self._take()
                if record is None:
                    self._wake.wait(5.0)
                    self._wake.clear()
                else:
                    self._run(record)
            except (StoreError, JournalError) as error:
                self._on_fatal(error)
                return

    def _take(self) -> RunRecord | None:
        """Makes the first run of the queue the active one."""
        with self._lock:
            record = self._site.store.next_queued_run()
            if record is not None:
                self._site.store.set_run_status(record.run_id, RunStatus.RUNNING, at=time.time())
                self._active = _Active(run_id=record.run_id)
                self._site.meter.began(record)
            return record

    def _run(self, record: RunRecord) -> None:
        """Drives one run. Whatever a task or a strategy raises ends this run, never the coordinator."""
        run_id = record.run_id
        log.info("run %s (%s, %s) begins", run_id, record.task, record.strategy)
        try:
            self._drive(record, self._assembled(record))
        except InterruptedRunError as error:
            self._end(run_id, RunStatus.INTERRUPTED, str(error))
        except (StoreError, JournalError):
            raise
        except EdgeflError as error:
            log.error("run %s failed: %s", run_id, error)  # noqa: TRY400 a line for the operator, no bug of ours
            self._end(run_id, RunStatus.FAILED, str(error))
        except Exception as error:  # third-party strategies and tasks run here, and the next run must still start
            log.exception("run %s failed", run_id)
            self._end(run_id, RunStatus.FAILED, f"{type(error).__name__}: {error}")

    def _assembled(self, record: RunRecord) -> Assembled:
        """Returns the run's objects; a model file that is gone ends the run and is no fault of the store."""
        try:
            return self._site.assemble(RunConfig.from_json(record.config), record.run_id)
        except (StoreError, JournalError) as error:
            raise RunFailedError(str(error)) from error

    def _mark(self, run_id: str) -> Path:
        """Returns the file that is there while the devices of a run go on by themselves."""
        return self._site.directory.runs / run_id / "goes-on"

    def _end(self, run_id: str, status: RunStatus, reason: str) -> None:
        if status is not RunStatus.INTERRUPTED:
            self._tell_end(run_id)
        with self._lock:
            self._set_status(run_id, status, reason)
            self._active = None

    def _set_status(self, run_id: str, status: RunStatus, reason: str) -> None:
        now, store = time.time(), self._site.store
        with store.batch(durable=True):
            store.set_run_status(run_id, status, at=now, reason=reason)
            store.record_event(f"run-{status}", reason, at=now, run_id=run_id)
        self._site.meter.ended(run_id, status, reason)

    def _drive(self, record: RunRecord, assembled: Assembled) -> None:
        site, strategy, run_id = self._site, assembled.strategy, record.run_id
        goes_on_alone = bool(getattr(strategy, "goes_on_alone", False))
        ledger = Ledger(site.store, run_id, site.meter.note)
        folder = site.directory.runs / run_id / "journal"
        with WalJournal(folder, assembled.decode, time_sync=site.meter.time_sync) as wal:
            keeper = Keeper(site.directory, run_id, wal=wal, ledger=ledger, every_version=goes_on_alone)
            before = self._begun(record, assembled, wal)
            state = before.state
            # After the rewind: what was kept behind the checkpoint is kept no longer.
            models = ModelKeeper(site.directory.models, site.store, run_id, assembled.config.models)
            if goes_on_alone:
                write_whole(self._mark(run_id), b"")
            if goes_on_alone or record.resumes:
                keeper.checkpoint(state)  # so that another life of the coordinator gives other ids
            left: list[Any] = []
            recorder = Recorder(
                wal=wal,
                ledger=ledger,
                rounds=assembled.rounds,
                clock=time.time,
                monotonic=time.monotonic,
                checkpoint=keeper.after,
                flagged=lambda: assembled.gate.guard.flagged,
                facts=facts_of(strategy),
                earlier=before.unused if record.resumes else None,
            )
            fleet = self._open_fleet(assembled, ledger, before)
            try:
                state, reason = drive(
                    strategy,
                    state,
                    fleet=fleet,
                    journal=ModelJournal(recorder, models, strategy.model, lambda: wal.last_record),
                    goal=assembled.goal,
                    evaluate=assembled.evaluate,
                    rounds=assembled.rounds,
                    gate=assembled.gate,
                    earlier=before.earlier,
                    left=left.append,
                )
            except (StoreError, JournalError):
                raise
            except Exception as error:
                recorder.commit()  # what the last turn brought is history too
                ledger.finish()
                # Boards that are away must not cost a run what it has reached: it can be taken up once more.
                waits = isinstance(error, NotReadyError) and before.goes_on
                if left and (waits or isinstance(error, InterruptedRunError)):
                    keeper.checkpoint(left[-1])
                if waits:
                    raise InterruptedRunError(str(error)) from error
                raise
            finally:
                self._close_fleet(fleet)
                models.close()
            version = strategy.version(state)
            self._tell_end(run_id)
            keeper.finish(version, assembled.rounds.of(version), state, strategy.model(state), models)
            self._finish(recorder, run_id, assembled.config, reason)
            log.info("run %s is over: %s", run_id, reason)

    def _begun(self, record: RunRecord, assembled: Assembled, wal: WalJournal) -> Resumed:
        """Returns what a run begins with, or goes on with; a checkpoint that cannot be used ends it alone."""
        try:
            return resumed_state(record, assembled, self._site.directory, self._site.store, wal)
        except JournalError as error:
            raise RunFailedError(str(error)) from error

    def _tell_end(self, run_id: str) -> None:
        """Tells devices that go on by themselves that a run is over; who does not hear it rests at its limit."""
        if not self._mark(run_id).exists():
            return
        self._mark(run_id).unlink(missing_ok=True)
        for info in self._site.roster.known():
            command = Command(id=uuid.uuid4().hex, kind=CommandKind.END, argument=run_id)
            self._site.bell.command(info.device_id, command)

    def _finish(self, recorder: Recorder, run_id: str, config: RunConfig, reason: str) -> None:
        recorder.finish()
        with self._lock:
            was_stopped = self._active is not None and self._active.stop_reason == reason
            # One transaction: a coordinator that dies here has both, the end and what follows it, or neither.
            with self._site.store.batch(durable=True):
                self._set_status(run_id, RunStatus.STOPPED if was_stopped else RunStatus.FINISHED, reason)
                if not was_stopped:
                    self._site.on_finished(run_id, config)
            self._active = None

    def _open_fleet(self, assembled: Assembled, ledger: Ledger, before: Resumed) -> LiveFleet:
        config, site, lives = assembled.config, self._site, before.lives
        run_id = lives.run_id
        run = FleetRun(
            run_id=run_id,
            task=config.run.task,
            header=assembled.header,
            groups=config.devices.groups,
            names=config.devices.names,
            join_at_start=config.devices.join == "start",
            encode=assembled.encode,
            encode_changes=assembled.encode_changes,
            decode=assembled.decode,
            needs_torch=assembled.needs_torch,
            lives=lives,
        )

        def note(kind: str, device_id: str, message: str) -> None:
            ledger.event(EventRow(kind=kind, device_id=device_id or None, message=message, at=time.time()))

        link, terms = site.superlink.open_run(), terms_of(assembled, before.devices)
        fleet = LiveFleet(
            run=run, link=link, roster=site.roster, bell=site.bell, clock=time.monotonic, terms=terms, note=note
        )
        with self._lock:
            self._active = self._active or _Active(run_id=run_id)
            self._active.fleet, self._active.ledger, self._active.gate = fleet, ledger, assembled.gate
            if self._active.stop_reason is not None:
                fleet.post(Stop(reason=self._active.stop_reason))
        if self._stopping.is_set():
            fleet.post(InterruptedRunError("the coordinator was stopped"))
        return fleet

    def _close_fleet(self, fleet: LiveFleet) -> None:
        with self._lock:
            if self._active is not None:
                self._active.fleet = None
        fleet.close()
