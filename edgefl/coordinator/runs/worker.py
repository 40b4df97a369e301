"""The run worker: takes queued runs one after the other and drives each to its end."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from edgefl.config import RunConfig
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.dispatch.live_fleet import Bell, FleetRun, InterruptedRunError, LiveFleet
from edgefl.coordinator.dispatch.participants import EncodeChanges
from edgefl.coordinator.dispatch.replay import ReplayError, RunClock
from edgefl.coordinator.fleet.roster import Roster
from edgefl.coordinator.mail import Reply
from edgefl.coordinator.runs.admission import Admitting, terms_of
from edgefl.coordinator.runs.driving import Driver
from edgefl.coordinator.runs.held_up import LEAVE_AFTER_S, RUN_HELD_UP, TELL_AFTER_S, CallWatch, held_up_by, place_of
from edgefl.coordinator.runs.keeper import Keeper
from edgefl.coordinator.runs.kept_models import ModelKeeper
from edgefl.coordinator.runs.ledger import EventRow, Ledger, Rows
from edgefl.coordinator.runs.mending import JOURNAL_DAMAGED, JOURNAL_FOLLOWED, follow_to_damage, set_damage_aside
from edgefl.coordinator.runs.pauses import Patience, Pauses
from edgefl.coordinator.runs.planning import Plannable
from edgefl.coordinator.runs.recorder import Recorder
from edgefl.coordinator.runs.resuming import (
    MAX_DEATHS,
    Resumable,
    Resumed,
    check_formats,
    check_resumable,
    forget_death,
    goes_on_exactly,
    has_begun,
    may_end,
    may_go_on,
    resumed_exactly,
    resumed_state,
)
from edgefl.coordinator.runs.run_meter import RunMeter
from edgefl.coordinator.superlink import SuperLink
from edgefl.errors import (
    HINDRANCES,
    EdgeflError,
    JournalError,
    RunFailedError,
    StoreError,
    StoreTooNewError,
    UsageError,
)
from edgefl.files import write_whole
from edgefl.loop import EvaluationRule
from edgefl.protocol import Command, CommandKind
from edgefl.storage.journal import WalJournal
from edgefl.storage.records import RunRecord, RunStatus
from edgefl.storage.rewinding import RESUMED
from edgefl.storage.store import Store
from edgefl.strategies.gate import StrategyGate
from edgefl.types import Json, Progress, Stop, Tensors

log = logging.getLogger(__name__)

COORDINATOR_STOPPED = "the coordinator was stopped"
STOPPED = "stopped"


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
    pauses: Pauses = field(default_factory=Pauses)
    on_finished: Callable[[str, RunConfig], None] = lambda _run_id, _config: None


@dataclass(slots=True)
class _Active:
    """The run that is being driven; it has a fleet between its assembly and its end.

    From when somebody asks for its stop, `watch` looks at its strategy; `is_told` says that it kept the stop waiting.
    """

    run_id: str
    fleet: LiveFleet | None = None
    ledger: Ledger | None = None
    gate: StrategyGate | None = None
    strategy: object = None
    stop_reason: str | None = None
    watch: CallWatch = field(default_factory=CallWatch)
    is_told: bool = False


class RunWorker:
    """Drives runs in one thread; replies and progress are posted to it from others.

    A run's status changes under one lock, so that a stop is neither lost nor overtakes the end of its run. Whoever
    holds it waits for the store, so what devices send is passed on without it.

    Args:
        site: what runs work with.
        on_fatal: called when the store or a journal is damaged or cannot be used: the coordinator must stop. Where
            there is no room, or another program holds the store, the run is paused instead: that passes by itself.
    """

    def __init__(self, site: RunSite, on_fatal: Callable[[EdgeflError], None]) -> None:
        self._site, self._on_fatal = site, on_fatal
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._active: _Active | None = None
        self._inexact: set[str] = set()
        self._to_stop: deque[RunRecord] = deque()
        self._patience = Patience(
            directory=site.directory.runs,
            store=site.store,
            flush=self.flush,
            stopping=self._stopping,
            pauses=site.pauses,
        )
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="runs", daemon=True)

    def recover(self) -> None:
        """Queues again what an earlier coordinator left unfinished; to be called before anybody may ask.

        A run that cannot go on where it was is marked as interrupted, and so is one that a newer edgefl went on with;
        a stop that such a run was asked for waits for that edgefl.
        """
        for status in (RunStatus.RUNNING, RunStatus.STOPPING, RunStatus.INTERRUPTED):
            for record in self._site.store.runs(status=status):
                try:
                    check_formats(record.run_id, self._site.directory)
                    self._recover(record)
                except StoreTooNewError as error:
                    log.error("run %s cannot go on: %s", record.run_id, error)  # noqa: TRY400 a line for the operator
                    if status is RunStatus.RUNNING:
                        self._set_status(record.run_id, RunStatus.INTERRUPTED, str(error))

    def _recover(self, record: RunRecord) -> None:
        run_id, status = record.run_id, record.status
        ended_with_us = status is RunStatus.RUNNING or record.reason == COORDINATOR_STOPPED
        if status is RunStatus.STOPPING:
            self._recover_stop(record)
        elif self._mark(run_id).exists():
            self._set_status(run_id, RunStatus.QUEUED, "its devices went on without a coordinator")
        elif ended_with_us and may_go_on(record, self._site.directory):
            self._set_status(run_id, RunStatus.QUEUED, "goes on where its coordinator ended")
        elif status is RunStatus.RUNNING and may_end(record, self._site.directory):
            self._begin_life(record)
        elif status is not RunStatus.INTERRUPTED:
            self._set_status(run_id, RunStatus.INTERRUPTED, "its coordinator ended without a word")

    def _recover_stop(self, record: RunRecord) -> None:
        """Brings a stop to its end that somebody asked for: with the run's model, where it goes on exactly.

        The run keeps its status until then, so that a coordinator that dies of it finds the wish again; one of which
        they die again and again ends without its last model.
        """
        run_id, reason, directory = record.run_id, record.reason or STOPPED, self._site.directory
        if self._mark(run_id).exists() or not goes_on_exactly(run_id, directory):
            self._end(run_id, RunStatus.STOPPED, reason)
        elif may_go_on(record, directory):
            self._to_stop.append(record)
        else:
            told = f"{reason}; without its last model, since the coordinator died more than {MAX_DEATHS} times of it"
            self._end(run_id, RunStatus.STOPPED, told)

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

    def as_it_is(self, row: Json) -> Json:
        """Returns a row of a run, as the store has it, with what is true at this moment: it may be paused."""
        return self._site.pauses.over(row)

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
        """Writes the active run's rows that wait, and whether a stop waits for its strategy; called now and then."""
        active = self._active
        if active is not None and active.stop_reason is not None and not active.is_told:
            self._tell_held_up(active)
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
        """Lets a run that was interrupted or stopped wait for its turn again.

        It goes on where it was; from its newest checkpoint when it was stopped, or its journal does not say more.
        Deaths of coordinators that it cost before do not count any more.

        Raises:
            UsageError: it is not over, or there is nothing to go on with.
            JournalError: its checkpoint cannot be read.
        """
        record, site = self._site.store.run(run_id), self._site
        check_resumable(record, site.directory, lambda: site.assemble(RunConfig.from_json(record.config), run_id))
        with self._lock:
            if site.store.run(run_id).status is not record.status:
                raise UsageError(f"run {run_id} has just been taken up or stopped by somebody else")
            forget_death(run_id, site.directory)
            is_whole = record.status is RunStatus.INTERRUPTED and run_id not in self._inexact
            if is_whole and goes_on_exactly(run_id, site.directory):
                self._set_status(run_id, RunStatus.QUEUED, "goes on where it was")
            else:
                self._begin_life(record)
        self.wake()

    def _begin_life(self, record: RunRecord) -> None:
        """Queues a run whose assignments, from its checkpoint on, may have names that were given before."""
        with self._site.store.batch(durable=True):
            self._site.store.queue_again(record.run_id)
            self._site.store.record_event(RESUMED, f"was {record.status}", at=time.time(), run_id=record.run_id)

    def stop(self) -> None:
        """Interrupts the active run, so that it can be taken up again, and ends the thread.

        A run whose strategy does not return is left as it is after a while: everything is in its journal before it is
        acted on, and the thread ends with the process.
        """
        self._stopping.set()
        self._wake.set()
        self.post(InterruptedRunError(COORDINATOR_STOPPED))
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(LEAVE_AFTER_S)
            if self._thread.is_alive():
                self._leave_behind()

    def _leave_behind(self) -> None:
        """Says what the run's thread is at: the process ends without it, the next one follows the journal there."""
        active = self._active
        log.error(
            "run %s does not end within %.0f s, the coordinator ends without it: %s (%s)",
            active.run_id if active is not None else "",
            LEAVE_AFTER_S,
            (held_up_by(active.strategy) if active is not None else "") or "it is busy",
            place_of(self._thread),
        )

    def _tell_held_up(self, active: _Active) -> None:
        """Says it once when a method of its strategy has kept a stop from its turn for a minute."""
        lasts_s, held = active.watch.lasts_s(active.strategy, time.monotonic()), held_up_by(active.strategy)
        if not held or lasts_s < TELL_AFTER_S:
            return
        told = (
            f"cannot be stopped now: {held} for {lasts_s:.0f} s ({place_of(self._thread)}); restart the coordinator"
        )
        self._site.store.record_event(RUN_HELD_UP, told, at=time.time(), run_id=active.run_id)
        active.is_told = True
        log.warning("run %s %s", active.run_id, told)

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                record = self._take()
                if record is None:
                    self._wake.wait(5.0)
                    self._wake.clear()
                else:
                    self._run(record)
                    # The parts of a run hold each other: its models would stay until garbage is next looked for in
                    # all that a coordinator has, which it seldom is.
                    gc.collect()
            except HINDRANCES as error:  # whatever was not written is found out again, as after a restart
                self._patience.await_room("", error)
            except (StoreError, JournalError) as error:
                self._on_fatal(error)
                return

    def _take(self) -> RunRecord | None:
        """Makes the first run of the queue the active one; before all of them, one that is only to be stopped."""
        with self._lock:
            while self._to_stop:
                left = self._site.store.run(self._to_stop.popleft().run_id)
                if left.status is RunStatus.STOPPING:  # nobody has ended it meanwhile
                    self._active = _Active(run_id=left.run_id, stop_reason=left.reason or STOPPED)
                    self._site.meter.began(left)
                    return left
            record = self._site.store.next_queued_run()
            if record is not None:
                self._site.store.set_run_status(record.run_id, RunStatus.RUNNING, at=time.time())
                self._active = _Active(run_id=record.run_id)
                self._site.meter.began(record)
            return record

    def _run(self, record: RunRecord) -> None:
        """Drives one run to its end, over all pauses that a full disk or a locked store makes."""
        log.info("run %s (%s, %s) begins", record.run_id, record.task, record.strategy)
        going: RunRecord | None = record
        met: EdgeflError | None = None
        while going is not None:
            try:
                if met is not None:
                    going, met = self._paused(going, met), None
                if going is not None:
                    self._run_on(going)
                    going = None
            except HINDRANCES as error:  # also while a pause is brought to its end
                met = error

    def _paused(self, record: RunRecord, error: EdgeflError) -> RunRecord | None:
        """Waits until a run can go on; returns it if it goes on where it was, None if that is not for us to do now.

        A run that cannot go on exactly waits in the queue, and does so from its checkpoint.
        """
        run_id = record.run_id
        self._site.meter.paused(run_id)
        if not self._patience.await_room(run_id, error):
            with contextlib.suppress(*HINDRANCES):
                self._end(run_id, RunStatus.INTERRUPTED, COORDINATOR_STOPPED)
            return None
        directory, now = self._site.directory, self._site.store.run(run_id)
        if self._mark(run_id).exists() or goes_on_exactly(run_id, directory) or not has_begun(run_id, directory):
            return now
        self._go_on_from_checkpoint(now, error)
        return None

    def _run_on(self, record: RunRecord) -> None:
        """Drives one run to its end. Whatever a task or a strategy raises ends this run, never the coordinator."""
        run_id = record.run_id
        try:
            self._drive(record, self._assembled(record))
        except InterruptedRunError as error:
            self._end(run_id, RunStatus.INTERRUPTED, str(error))
        except ReplayError as error:
            log.warning("run %s cannot go on where it was, it goes on from its checkpoint: %s", run_id, error)
            self._inexact.add(run_id)
            self._go_on_from_checkpoint(record, error)
        except StoreTooNewError as error:  # of this run alone: the store itself was opened
            log.error("run %s cannot go on: %s", run_id, error)  # noqa: TRY400 a line for the operator
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
        except (*HINDRANCES, StoreTooNewError):
            raise
        except (StoreError, JournalError) as error:
            raise RunFailedError(str(error)) from error

    def _mark(self, run_id: str) -> Path:
        """Returns the file that is there while the devices of a run go on by themselves."""
        return self._site.directory.runs / run_id / "goes-on"

    def _go_on_from_checkpoint(self, record: RunRecord, error: EdgeflError) -> None:
        """Lets the active run wait for its turn, in another life; one that is to be stopped ends here."""
        reason = f"goes on from its checkpoint: {error}"
        # One transaction: a coordinator that dies here has both, that it was interrupted and that it goes on.
        with self._lock:
            with self._site.store.batch(durable=True):
                if self._ended(record.run_id, RunStatus.INTERRUPTED, reason) is RunStatus.INTERRUPTED:
                    self._begin_life(record)
            self._active = None

    def _end(self, run_id: str, status: RunStatus, reason: str) -> None:
        """Ends the driving of a run; one that is to be stopped is not interrupted."""
        with self._lock:
            self._ended(run_id, status, reason)
            self._active = None

    def _ended(self, run_id: str, status: RunStatus, reason: str) -> RunStatus:
        """Writes down how the driving of a run ends, and returns that; for who holds the lock, as a stop does."""
        active = self._active
        asked = active.stop_reason if active is not None and active.run_id == run_id else None
        if status is RunStatus.INTERRUPTED and asked is not None:
            if reason == COORDINATOR_STOPPED:  # the next one brings the stop to its end
                forget_death(run_id, self._site.directory)
                return RunStatus.STOPPING
            status, reason = RunStatus.STOPPED, asked
        if status is not RunStatus.INTERRUPTED:
            self._tell_end(run_id)
        self._set_status(run_id, status, reason)
        return status

    def _set_status(self, run_id: str, status: RunStatus, reason: str) -> None:
        now, store = time.time(), self._site.store
        with store.batch(durable=True):
            store.set_run_status(run_id, status, at=now, reason=reason)
            store.record_event(f"run-{status}", reason, at=now, run_id=run_id)
        self._site.meter.ended(run_id, status, reason)

    def _drive(self, record: RunRecord, assembled: Assembled) -> None:
        site, run_id, clock = self._site, record.run_id, RunClock()
        goes_on_alone = bool(getattr(assembled.strategy, "goes_on_alone", False))
        driver: Driver | None = None
        if self._active is not None:
            self._active.strategy = assembled.strategy

        def note(rows: Rows) -> None:
            site.meter.note(rows, is_shown_again=driver is None or not driver.is_live)

        ledger = Ledger(site.store, run_id, note, site.meter.checkpointed)
        folder = site.directory.runs / run_id / "journal"
        damage = self._mend(run_id)
        with WalJournal(folder, assembled.decode, time_sync=site.meter.time_sync) as wal:
            if damage is not None and not goes_on_alone:  # else its boards give no names that were given before
                self._follow(record, assembled, wal, ledger)
                raise ReplayError(damage)
            before = self._begun(record, assembled, wal)
            # After the rewind: what was kept behind the checkpoint is kept no longer.
            models = ModelKeeper(site.directory.models, site.store, run_id, assembled.config.models)
            if goes_on_alone:
                write_whole(self._mark(run_id), b"")
            live, is_over = self._open_fleet(assembled, ledger, before, clock), False
            driver = Driver(
                made=assembled,
                before=before,
                wal=wal,
                ledger=ledger,
                keeper=Keeper(site.directory, run_id, wal=wal, ledger=ledger, every_version=goes_on_alone),
                models=models,
                live=live,
                clock=clock,
                gives_other_ids=goes_on_alone or (bool(record.resumes) and not before.is_exact),
            )
            try:
                state, reason = driver.drive()
                is_over = True
            except (InterruptedRunError, StoreError, JournalError):
                raise
            except BaseException:
                is_over = True
                raise
            finally:
                self._close_fleet(live, goes_on=not is_over)
                models.close()
            self._tell_end(run_id)
            driver.finish(state)
            self._finish(driver.recorder, run_id, assembled.config, reason)
            log.info("run %s is over: %s", run_id, reason)

    def _mend(self, run_id: str) -> str | None:
        """Returns what was damaged in a run's journal, and is set aside now; None for nothing.

        Raises:
            InterruptedRunError: no checkpoint is whole.
        """
        try:
            damage = set_damage_aside(run_id, self._site.directory)
        except JournalError as error:
            log.error("run %s cannot go on: %s", run_id, error)  # noqa: TRY400 a line for the operator
            raise InterruptedRunError(str(error)) from error
        if damage is not None:
            log.error("run %s: %s", run_id, damage)
            with self._site.store.batch(durable=True):
                self._site.store.record_event(JOURNAL_DAMAGED, damage, at=time.time(), run_id=run_id)
        return damage

    def _follow(self, record: RunRecord, assembled: Assembled, wal: WalJournal, ledger: Ledger) -> None:
        """Brings a run to a checkpoint where its journal was cut, as far as that can be followed."""
        site, run_id = self._site, record.run_id
        try:
            told = follow_to_damage(record, assembled, site.directory, site.store, wal, ledger)
        except ReplayError as error:
            told = f"goes on from the checkpoint that it had, since it cannot be followed to the damage: {error}"
        log.warning("run %s %s", run_id, told)
        with site.store.batch(durable=True):
            site.store.record_event(JOURNAL_FOLLOWED, told, at=time.time(), run_id=run_id)

    def _begun(self, record: RunRecord, assembled: Assembled, wal: WalJournal) -> Resumed:
        """Returns what a run begins with, or goes on with; a checkpoint that cannot be used ends it alone."""
        arguments = record, assembled, self._site.directory, self._site.store, wal
        try:
            if record.run_id in self._inexact:  # once: this life has a checkpoint of its own soon
                self._inexact.discard(record.run_id)
                return resumed_state(*arguments)
            return resumed_exactly(*arguments) or resumed_state(*arguments)
        except ReplayError:  # its state can be read: it goes on from there in another life
            raise
        except JournalError as error:  # whoever repairs the file may let it go on
            log.error("run %s cannot go on: %s", record.run_id, error)  # noqa: TRY400 a line for the operator
            raise InterruptedRunError(str(error)) from error

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

    def _open_fleet(self, assembled: Assembled, ledger: Ledger, before: Resumed, clock: RunClock) -> LiveFleet:
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

        link, terms = site.superlink.open_run(), terms_of(assembled, before.devices, has_begun=before.is_exact)
        fleet = LiveFleet(
            run=run,
            link=link,
            roster=site.roster,
            bell=site.bell,
            clock=time.monotonic,
            run_clock=clock.now_s,
            terms=terms,
            note=note,
            folder=site.directory.root,
        )
        with self._lock:
            self._active = self._active or _Active(run_id=run_id)
            self._active.fleet, self._active.ledger, self._active.gate = fleet, ledger, assembled.gate
            if self._active.stop_reason is not None:
                fleet.post(Stop(reason=self._active.stop_reason))
        if self._stopping.is_set():
            fleet.post(InterruptedRunError(COORDINATOR_STOPPED))
        return fleet

    def _close_fleet(self, fleet: LiveFleet, *, goes_on: bool) -> None:
        with self._lock:
            if self._active is not None:
                self._active.fleet = None  # its ledger stays: what is ready there is durable, and is written later
        fleet.close(goes_on=goes_on)
