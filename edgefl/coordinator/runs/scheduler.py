"""Run scheduler: executes queued runs, one after the other or side by side; one that lacks boards gives way.

Each active run has a thread and a journal of its own, and boards that work for it alone (see `allotments`). With one
slot, runs follow one another. With several, a run that begins takes boards of active runs of lower priority, and the
place of one where all slots are taken.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.execution.fleet_view import RunSpec, ignore_shortages
from edgefl.coordinator.execution.live_fleet import InterruptedRunError, LiveFleet, RunGivesWayError
from edgefl.coordinator.execution.messaging import DeviceNotifier
from edgefl.coordinator.execution.replay import ReplayError, RunClock
from edgefl.coordinator.fleet.allotments import BoardClaim
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.flower.messages import Reply
from edgefl.coordinator.flower.superlink import SuperLink
from edgefl.coordinator.runs.checkpointing import Checkpointer, delete_noise_key, open_spend_recorder
from edgefl.coordinator.runs.compilation import Compiler, may_compile, should_compile
from edgefl.coordinator.runs.executor import (
    JOURNAL_DAMAGED,
    JOURNAL_REPLAYED,
    RunExecutor,
    quarantine_damage,
    replay_to_damage,
)
from edgefl.coordinator.runs.history_writer import EventRow, HistoryRows, HistoryWriter
from edgefl.coordinator.runs.model_retention import ModelRetention, save_base
from edgefl.coordinator.runs.planning import BuildRun, create_admission_requirements, is_selected_trainer
from edgefl.coordinator.runs.recovery import (
    MAX_CRASHES,
    RunStart,
    can_auto_finish,
    can_auto_resume,
    can_begin_again,
    can_resume_exactly,
    check_formats,
    check_resumable,
    has_only_waited,
    is_started,
    list_previous_devices,
    pin_base,
    record_base,
    remove_crash_count,
    restore_exactly,
    restore_from_checkpoint,
)
from edgefl.coordinator.runs.run_metrics import RunMetrics
from edgefl.coordinator.runs.run_queue import MAX_CONSIDERED, RunQueue
from edgefl.coordinator.runs.scales import record_scales
from edgefl.coordinator.runs.stalls import (
    COMPILING,
    COMPILING_REASON,
    GIVE_WAY_AFTER_S,
    LOOK_INTERVAL_S,
    REPORT_AFTER_S,
    RUN_STALLED,
    STOP_TIMEOUT_S,
    WAITING,
    IdleRuns,
    SlowCallWatchdog,
    StorageBackoff,
    format_current_frame,
    format_running_call,
)
from edgefl.coordinator.split.service import SplitRun, SplitRuns
from edgefl.core.config import RunConfig
from edgefl.core.errors import (
    RETRYABLE_STORE_ERRORS,
    ConfigError,
    EdgeflError,
    JournalError,
    RunFailedError,
    StoreError,
    StoreTooNewError,
    UsageError,
)
from edgefl.core.protocol import Command, CommandKind
from edgefl.core.sites import SITE_KEY
from edgefl.core.types import Json, Progress, StopRequested
from edgefl.engine.assembly.normalisation import SCALES_ANALYSIS
from edgefl.engine.assembly.privacy import get_private_mean
from edgefl.storage.journal.wal_journal import WalJournal
from edgefl.storage.lineage import Lineage, save_run_record
from edgefl.storage.repositories.records import RunRecord, RunStatus
from edgefl.storage.rollback import record_resume
from edgefl.storage.store import Store
from edgefl.strategies.participation import RunParticipationPolicy
from edgefl.strategies.private_mean import SpendRecorder
from edgefl.system.atomic_files import write_atomic
from edgefl.system.processes import StoppedCallError

if TYPE_CHECKING:
    from edgefl.engine.assembly.components import RunComponents
    from edgefl.storage.mirror import DirectoryMirror

log = logging.getLogger(__name__)

QUEUE_INTERVAL_S = 5.0
"""How often the queue is looked at for runs whose boards have come."""
COORDINATOR_STOPPED = "the coordinator was stopped"
DEFAULT_STOP_REASON = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Shared services that runs work with.

    `plan_deployments` is called with a run that has finished, before the transaction that records its end; what it
    returns is called in that. At most `num_slots` runs are active at a time.
    """

    directory: CoordinatorDirectory
    store: Store
    registry: DeviceRegistry
    superlink: SuperLink
    notifier: DeviceNotifier
    build_run: BuildRun
    metrics: RunMetrics = field(default_factory=RunMetrics)
    idle_runs: IdleRuns = field(default_factory=IdleRuns)
    split_runs: SplitRuns = field(default_factory=SplitRuns)
    lineage: Lineage | None = None
    num_slots: int = 1
    model_files_lock: threading.Lock = field(default_factory=threading.Lock)
    mirror: DirectoryMirror | None = None
    plan_deployments: Callable[[str, RunConfig], Callable[[], None]] = lambda _run_id, _config: lambda: None


@contextlib.contextmanager
def _end_by_missing_file() -> Iterator[None]:
    """Lets a missing or damaged model file end the run: it is not a fault of the store."""
    try:
        yield
    except (*RETRYABLE_STORE_ERRORS, StoreTooNewError):
        raise
    except (StoreError, JournalError) as error:
        raise RunFailedError(str(error)) from error


@dataclass(slots=True)
class _ActiveExecution:
    """An active run in its thread; it has a fleet between its assembly and its end.

    From the request of a stop on, `watchdog` observes its strategy; `is_stall_reported` once it delayed the stop.
    `keeps_place` if it gives way to no other, which is looked for at `look_s` while it lacks boards.
    """

    run_id: str
    priority: int = 0
    is_autonomous: bool = False
    is_preempted: bool = False
    was_recovered: bool = False
    thread: threading.Thread = field(default_factory=threading.current_thread)
    fleet: LiveFleet | None = None
    history: HistoryWriter | None = None
    policy: RunParticipationPolicy | None = None
    strategy: object = None
    stop_reason: str | None = None
    watchdog: SlowCallWatchdog = field(default_factory=SlowCallWatchdog)
    is_stall_reported: bool = False
    keeps_place: bool = False
    look_s: float | None = None


def _drop_journal(run_folder: Path) -> None:
    """Removes the journal of a run, whole or not at all; where it stays, the run goes on where it was."""
    waited = run_folder / "journal-of-waiting"
    shutil.rmtree(waited, ignore_errors=True)  # of a coordinator that died meanwhile
    with contextlib.suppress(OSError):
        (run_folder / "journal").rename(waited)
    shutil.rmtree(waited, ignore_errors=True)


class RunScheduler:
    """Executes each run in a thread; replies and progress are posted to it from others.

    A run's status changes under one lock, so that a stop is neither lost nor overtakes the end of its run. Its holder
    waits for the store, so messages of devices are passed on without it.

    Args:
        context: shared services of runs.
        on_fatal: called when the store or a journal is damaged or unusable: the coordinator must stop. Where there
            is no room, or another program locks the store, the run is paused instead: that is temporary.
    """

    def __init__(self, context: RunContext, on_fatal: Callable[[EdgeflError], None]) -> None:
        self._context, self._on_fatal = context, on_fatal
        self._wake_event, self._stop_event = threading.Event(), threading.Event()
        self._active: Mapping[str, _ActiveExecution] = {}  # replaced under the lock, read without it
        self._preempt_s = self._reasons_s = 0.0  # when to look next
        self._inexact_ids: set[str] = set()
        self._recovered_ids: set[str] = set()
        self._to_stop: deque[RunRecord] = deque()
        self._queue = RunQueue(context.store, context.registry, context.directory)
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(
                target=self._run_thread, name="runs" if number == 0 else f"runs-{number + 1}", daemon=True
            )
            for number in range(context.num_slots)
        ]

    def _make_backoff(self) -> StorageBackoff:
        return StorageBackoff(
            directory=self._context.directory.runs,
            store=self._context.store,
            flush=self.flush,
            stop_event=self._stop_event,
            idle_runs=self._context.idle_runs,
        )

    def recover(self) -> None:
        """Queues the unfinished runs of an earlier coordinator again.

        Call it before heartbeats are routed, which would recall their work, and before the API is served.

        A run that cannot go on where it was is marked as interrupted, and so is one that a newer edgefl wrote to; a
        stop requested of such a run waits for that edgefl.
        """
        for status in (RunStatus.RUNNING, RunStatus.STOPPING, RunStatus.INTERRUPTED):
            for record in self._context.store.list_runs(status=status):
                try:
                    check_formats(record.run_id, self._context.directory)
                    self._recover(record)
                except StoreTooNewError as error:
                    log.error("run %s cannot go on: %s", record.run_id, error)  # noqa: TRY400 a line for the operator
                    if status is RunStatus.RUNNING:
                        self._set_status(record.run_id, RunStatus.INTERRUPTED, str(error))
        self._reserve_boards()

    def _reserve_boards(self) -> None:
        """Claims the boards that recovered runs had, before one of them gives work to those of another."""
        num_slots, store, directory = self._context.num_slots, self._context.store, self._context.directory
        if num_slots == 1:
            return
        queued = [record for record in store.list_queued_runs() if record.run_id in self._recovered_ids]
        for record in [*self._to_stop, *queued][:num_slots]:
            run = _ActiveExecution(run_id=record.run_id, priority=record.priority, was_recovered=True)
            with contextlib.suppress(ConfigError):  # it ends with its reason
                previous_ids = list_previous_devices(record.run_id, directory)
                self._claim_boards(run, RunConfig.from_json(record.config), previous_ids)

    def _recover(self, record: RunRecord) -> None:
        run_id, status = record.run_id, record.status
        was_cut_off = status is RunStatus.RUNNING or record.reason == COORDINATOR_STOPPED
        if status is RunStatus.STOPPING:
            self._recover_stop(record)
        elif self._autonomous_marker(run_id).exists():
            self._set_status(run_id, RunStatus.QUEUED, "its devices went on without a coordinator")
        elif was_cut_off and can_begin_again(record, self._context.directory):
            self._set_status(run_id, RunStatus.QUEUED, "its coordinator ended before it began")
        elif was_cut_off and can_auto_resume(record, self._context.directory):
            self._set_status(run_id, RunStatus.QUEUED, "goes on where its coordinator ended")
            self._recovered_ids.add(run_id)
        elif status is RunStatus.RUNNING and can_auto_finish(record, self._context.directory):
            self._queue_new_incarnation(record)
        elif status is not RunStatus.INTERRUPTED:
            self._set_status(run_id, RunStatus.INTERRUPTED, "its coordinator ended without a word")

    def _recover_stop(self, record: RunRecord) -> None:
        """Completes a requested stop, with the run's model where it can be resumed exactly.

        The run keeps its status until then, so that the request survives a crash of the coordinator; after more than
        `MAX_CRASHES` it ends without its last model.
        """
        run_id, reason, directory = record.run_id, record.reason or DEFAULT_STOP_REASON, self._context.directory
        if self._autonomous_marker(run_id).exists() or not can_resume_exactly(run_id, directory):
            self._end_run(run_id, RunStatus.STOPPED, reason)
        elif can_auto_resume(record, directory):
            self._to_stop.append(record)
            self._recovered_ids.add(run_id)
        else:
            message = (
                f"{reason}; without its last model, since the coordinator died more than {MAX_CRASHES} times of it"
            )
            self._end_run(run_id, RunStatus.STOPPED, message)

    def start(self) -> None:
        """Starts the threads that execute the queue."""
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """Wakes the threads after a run was queued."""
        self._preempt_s = self._reasons_s = 0.0
        self._wake_event.set()

    def is_active(self, run_id: str) -> bool:
        """Returns whether a run is being executed, or was recovered and no other is executed before it."""
        active = self._active
        return run_id in active or (len(active) < self._context.num_slots and run_id in self._recovered_ids)

    def apply_idle_state(self, row: Json) -> Json:
        """Returns a run's row, with its status and reason replaced while it is paused or waits."""
        return self._context.idle_runs.apply_to(row)

    def is_blocked(self, run_id: str, device_id: str) -> bool:
        """Returns whether a device of an active run is blocked after too many rejected updates."""
        active = self._active.get(run_id)
        if active is None or active.policy is None:
            return False
        return device_id in active.policy.blocked_devices

    def is_autonomous(self, run_id: str) -> bool:
        """Returns whether the devices of a run go on autonomously, until it is resumed."""
        return self._autonomous_marker(run_id).exists()

    def post(self, item: Reply | Progress | InterruptedRunError) -> None:
        """Passes an item to the active run that it names; one that names none of them, to all."""
        active = self._active
        run_id = "" if isinstance(item, InterruptedRunError) else _get_run_id(item)
        for run in [active[run_id]] if run_id in active else active.values():
            fleet = run.fleet
            if fleet is not None:
                fleet.post(item)

    def flush(self) -> None:
        """Flushes the active runs' rows, and reports stops delayed by a strategy; called periodically."""
        for run in self._active.values():
            if run.stop_reason is not None and not run.is_stall_reported:
                self._report_stall(run)
            history = run.history
            if history is not None:
                history.flush()
        self._update_queue_reasons()
        self._preempt()

    def stop_run(self, run_id: str, reason: str) -> None:
        """Stops a run: a queued one at once, the active one after its in-flight work.

        Raises:
            UsageError: it is over already.
        """
        with self._lock:
            record = self._context.store.get_run(run_id)
            if record.status.is_final:
                raise UsageError(f"run {run_id} is {record.status} already")
            active = self._active.get(run_id)
            if active is None:
                self._recovered_ids.discard(run_id)
                self._context.registry.close_run(run_id)
                self._send_end(run_id)
                self._set_status(run_id, RunStatus.STOPPED, reason)
                return
            self._context.store.set_run_status(run_id, RunStatus.STOPPING, at=time.time(), reason=reason)
            active.stop_reason = reason
            self._context.metrics.on_run_stopping(run_id)
            if active.fleet is not None:
                active.fleet.post(StopRequested(reason=reason))

    def resume_run(self, run_id: str) -> None:
        """Queues an interrupted or stopped run again.

        It goes on where it was; from its newest checkpoint if it was stopped, or its journal has no turns. Its crash
        count is reset.

        Raises:
            UsageError: it is not over, or has no checkpoint.
            JournalError: its checkpoint cannot be read.
        """
        record, context = self._context.store.get_run(run_id), self._context
        check_resumable(record, context.directory, lambda: self._assemble(record))
        with self._lock:
            if context.store.get_run(run_id).status is not record.status:
                raise UsageError(f"run {run_id} has just been taken up or stopped by somebody else")
            remove_crash_count(run_id, context.directory)
            can_be_exact = record.status is RunStatus.INTERRUPTED and run_id not in self._inexact_ids
            if can_be_exact and can_resume_exactly(run_id, context.directory):
                self._set_status(run_id, RunStatus.QUEUED, "goes on where it was")
            else:
                self._queue_new_incarnation(record)
        self.wake()

    def _queue_new_incarnation(self, record: RunRecord) -> None:
        """Queues a run in a new incarnation: its assignments from the checkpoint on may repeat ids."""
        with self._context.store.batch(durable=True):
            self._context.store.requeue_run(record.run_id)
            record_resume(self._context.store, record.run_id, f"was {record.status}", at=time.time())

    def stop(self) -> None:
        """Interrupts the active runs, so that they can be resumed, and ends the threads.

        A run whose strategy does not return is abandoned after `STOP_TIMEOUT_S`: everything is in its journal before
        it is acted on, and the thread ends with the process.
        """
        self._stop_event.set()
        self._wake_event.set()
        self.post(InterruptedRunError(COORDINATOR_STOPPED))
        until_s = time.monotonic() + STOP_TIMEOUT_S
        for thread in self._threads:
            if thread.is_alive() and threading.current_thread() is not thread:
                thread.join(max(0.0, until_s - time.monotonic()))
        for run in self._active.values():
            if run.thread.is_alive() and threading.current_thread() is not run.thread:
                _log_stop_timeout(run)

    def _report_stall(self, current: _ActiveExecution) -> None:
        """Reports, once, a strategy call that delays a stop for `REPORT_AFTER_S`."""
        call_s, call = (
            current.watchdog.compute_call_s(current.strategy, time.monotonic()),
            format_running_call(current.strategy),
        )
        if not call or call_s < REPORT_AFTER_S:
            return
        place = format_current_frame(current.thread)
        message = f"cannot be stopped now: {call} for {call_s:.0f} s ({place}); restart the coordinator"
        self._context.store.record_event(RUN_STALLED, message, at=time.time(), run_id=current.run_id)
        current.is_stall_reported = True
        log.warning("run %s %s", current.run_id, message)

    def _run_thread(self) -> None:
        backoff = self._make_backoff()  # one for each thread: it counts the failures of one pause
        while not self._stop_event.is_set():
            try:
                record = self._get_next_run()
                self._update_queue_reasons()
                if record is None:
                    self._wake_event.wait(QUEUE_INTERVAL_S)
                    self._wake_event.clear()
                else:
                    self._wake_event.set()  # another thread may execute the next one
                    self._run_with_pauses(record, backoff)
                    # The objects of a run reference each other: its models would stay until the next full garbage
                    # collection, which is rare.
                    gc.collect()
            except RETRYABLE_STORE_ERRORS as error:  # unwritten state is recovered, as after a restart
                backoff.wait_until_writable("", error)
            except (StoreError, JournalError) as error:
                self._on_fatal(error)
                return

    def _get_next_run(self) -> RunRecord | None:
        """Returns the next run and makes it active: first those to be stopped, then the queue."""
        with self._lock:
            while self._to_stop:
                stopping = self._context.store.get_run(self._to_stop.popleft().run_id)
                if stopping.status is RunStatus.STOPPING:  # not ended meanwhile
                    self._activate(stopping, stop_reason=stopping.reason or DEFAULT_STOP_REASON)
                    return stopping
            record = self._queue.get_next(self._recovered_ids, is_alone=not self._active)
            if record is not None:
                self._context.store.set_run_status(record.run_id, RunStatus.RUNNING, at=time.time())
                self._activate(record)
            return record

    def _activate(self, record: RunRecord, stop_reason: str | None = None) -> None:
        """Makes a run active, with the boards that it gets. The caller holds the lock."""
        run_id = record.run_id
        self._active = {
            **self._active,
            run_id: _ActiveExecution(
                run_id=run_id,
                priority=record.priority,
                stop_reason=stop_reason,
                was_recovered=run_id in self._recovered_ids or stop_reason is not None,
            ),
        }
        self._recovered_ids.discard(run_id)
        self._reasons_s = 0.0
        with contextlib.suppress(ConfigError):  # it ends with its reason
            self._claim_boards(self._active[run_id], RunConfig.from_json(record.config))
        self._context.metrics.on_run_started(record)

    def _deactivate(self, run_id: str) -> None:
        """Releases the slot and the boards of a run. The caller holds the lock."""
        self._active = {name: run for name, run in self._active.items() if name != run_id}
        self._context.registry.close_run(run_id)
        self._preempt_s = self._reasons_s = 0.0
        self._wake_event.set()

    def _claim_boards(self, run: _ActiveExecution, config: RunConfig, previous_ids: Collection[str] = ()) -> None:
        """Claims the boards that a run file selects; those of before a restart where others claim them too."""
        self._context.registry.open_run(
            BoardClaim(
                run_id=run.run_id,
                selects=lambda info: is_selected_trainer(info, config),
                priority=run.priority,
                is_kept=run.is_autonomous,
                preferred_ids=frozenset(previous_ids if run.was_recovered else ()),
            )
        )

    def _update_queue_reasons(self) -> None:
        """Says of queued runs why they have not begun beside the active ones, every `LOOK_INTERVAL_S` or on a change.

        It looks at many runs and devices, so call it without the lock.
        """
        num_slots, num_active, now_s = self._context.num_slots, len(self._active), time.monotonic()
        if num_slots == 1 or now_s < self._reasons_s:
            return
        self._reasons_s = now_s + LOOK_INTERVAL_S
        queued = self._context.store.list_queued_runs()[:MAX_CONSIDERED] if num_active else []
        if num_active >= num_slots:
            reason = f"{num_active} runs are active, and --parallel-runs is {num_slots}"
            reasons = {record.run_id: reason for record in queued}
        else:
            reasons = {record.run_id: self._queue.explain_wait(record) for record in queued}
        self._context.idle_runs.queue_reasons = reasons

    def _preempt(self) -> None:
        """Interrupts the active run of lowest priority for a queued one above it, where all slots are taken."""
        active, now_s = self._active, time.monotonic()
        if self._context.num_slots == 1 or len(active) < self._context.num_slots or now_s < self._preempt_s:
            return
        if any(run.is_preempted for run in active.values()):
            return
        self._preempt_s = now_s + LOOK_INTERVAL_S
        # Of equals, the one that has been active for the shortest time has the least to lose.
        victims = [run for run in reversed(list(active.values())) if run.fleet is not None and not run.is_autonomous]
        victim = min(victims, key=lambda run: run.priority, default=None)
        if victim is None:
            return
        successor, fleet = self._queue.find_successor(victim.run_id, above=victim.priority), victim.fleet
        if successor is not None and fleet is not None:
            reason = f"gives way to run {successor.run_id}, whose priority is {successor.priority}"
            victim.is_preempted = True
            fleet.post(RunGivesWayError(reason))

    def _run_with_pauses(self, record: RunRecord, backoff: StorageBackoff) -> None:
        """Executes one run to its end, over all pauses for a full disk or a locked store."""
        log.info("run %s (%s, %s) begins", record.run_id, record.task, record.strategy)
        current: RunRecord | None = record
        pending_error: EdgeflError | None = None
        while current is not None:
            try:
                if pending_error is not None:
                    current, pending_error = self._wait_for_storage(current, pending_error, backoff), None
                if current is not None:
                    self._run_once(current)
                    current = None
            except RETRYABLE_STORE_ERRORS as error:  # also while a pause ends
                pending_error = error

    def _wait_for_storage(self, record: RunRecord, error: EdgeflError, backoff: StorageBackoff) -> RunRecord | None:
        """Waits until storage is writable; returns the run to go on with, None if there is none.

        A run that cannot go on exactly is queued again, from its checkpoint.
        """
        run_id = record.run_id
        with self._lock:
            if (active := self._active.get(run_id)) is not None:
                active.is_preempted = False  # its fleet is closed, and with it the request to give way is gone
        self._context.metrics.on_run_paused(run_id)
        if not backoff.wait_until_writable(run_id, error):
            with contextlib.suppress(*RETRYABLE_STORE_ERRORS):
                self._end_run(run_id, RunStatus.INTERRUPTED, COORDINATOR_STOPPED)
            return None
        directory, now = self._context.directory, self._context.store.get_run(run_id)
        if (
            self._autonomous_marker(run_id).exists()
            or can_resume_exactly(run_id, directory)
            or not is_started(run_id, directory)
        ):
            return now
        self._requeue_from_checkpoint(now, error)
        return None

    def _run_once(self, record: RunRecord) -> None:
        """Executes one run. An error of its task or strategy ends the run, never the coordinator."""
        run_id = record.run_id
        try:
            record = self._record_compiled(self._record_scales(record))
            self._execute(record, self._build_run(record))
        except RunGivesWayError as error:
            self._requeue_lacking(run_id, str(error))
        except InterruptedRunError as error:
            self._end_run(run_id, RunStatus.INTERRUPTED, str(error))
        except ReplayError as error:
            log.warning("run %s cannot go on where it was, it goes on from its checkpoint: %s", run_id, error)
            self._inexact_ids.add(run_id)
            self._requeue_from_checkpoint(record, error)
        except StoreTooNewError as error:  # of this run alone: the store itself was opened
            log.error("run %s cannot go on: %s", run_id, error)  # noqa: TRY400 a line for the operator
            self._end_run(run_id, RunStatus.INTERRUPTED, str(error))
        except (StoreError, JournalError):
            raise
        except EdgeflError as error:
            log.error("run %s failed: %s", run_id, error)  # noqa: TRY400 a line for the operator, no bug of ours
            self._end_run(run_id, RunStatus.FAILED, str(error))
        except Exception as error:  # third-party strategies and tasks run here, and the next run must still start
            log.exception("run %s failed", run_id)
            self._end_run(run_id, RunStatus.FAILED, f"{type(error).__name__}: {error}")

    def _build_run(self, record: RunRecord) -> RunComponents:
        """Returns the run's objects."""
        with _end_by_missing_file():
            return self._assemble(record)

    def _record_scales(self, record: RunRecord) -> RunRecord:
        with _end_by_missing_file():
            return record_scales(record, self._context.store, self._context.directory)

    def _assemble(self, record: RunRecord) -> RunComponents:
        context, run_id = self._context, record.run_id
        return context.build_run(pin_base(RunConfig.from_json(record.config), run_id, context.directory), run_id)

    def _record_compiled(self, record: RunRecord) -> RunRecord:
        """Compiles the task of a run that starts, where boards without torch are to train it."""
        context = self._context
        if is_started(record.run_id, context.directory) or not may_compile(
            RunConfig.from_json(record.config), context.registry
        ):
            return record
        run = self._build_run(record)
        if not should_compile(run, context.registry):
            return record
        compiler = Compiler(
            context.directory.bases,
            context.directory.compiled,
            context.registry,
            context.store,
            lambda: self._is_stopping(record.run_id),
        )
        context.idle_runs.add(record.run_id, COMPILING_REASON, COMPILING)
        try:
            return compiler.record_compiled(record, run)
        except StoppedCallError:
            is_run_stopped = not self._stop_event.is_set()
            raise InterruptedRunError(DEFAULT_STOP_REASON if is_run_stopped else COORDINATOR_STOPPED) from None
        finally:
            context.idle_runs.remove(record.run_id)

    def _is_stopping(self, run_id: str) -> bool:
        """Returns whether an active run, or the coordinator, is to stop."""
        active = self._active.get(run_id)
        return self._stop_event.is_set() or (active is not None and active.stop_reason is not None)

    def _record_base(self, components: RunComponents, run_id: str) -> None:
        """Keeps which base a run began with; one that would go on with another waits for the operator."""
        try:
            record_base(components, run_id, self._context.directory)
        except UsageError as error:
            log.error("%s", error)  # noqa: TRY400 a line for the operator
            raise InterruptedRunError(str(error)) from None

    def _open_spend_recorder(self, run_id: str, recorder: SpendRecorder) -> None:
        """Continues the record of a private run's releases; one that has lost it waits for the operator."""
        try:
            open_spend_recorder(self._context.directory.runs / run_id, recorder)
        except JournalError as error:
            log.error("run %s cannot go on: %s", run_id, error)  # noqa: TRY400 a line for the operator
            raise InterruptedRunError(str(error)) from error

    def _autonomous_marker(self, run_id: str) -> Path:
        """Returns the marker file of a run whose devices go on autonomously."""
        return self._context.directory.runs / run_id / "autonomous"

    def _requeue_lacking(self, run_id: str, reason: str) -> None:
        """Queues the active run again; one that has only waited begins anew in its turn.

        A board that came in the same moment may have work of it already: such a run goes on where it was, or from
        its checkpoint in another incarnation if it cannot.
        """
        folder, store = self._context.directory.runs / run_id, self._context.store
        with self._lock:
            active = self._active.get(run_id)
            if active is not None and active.stop_reason is not None:
                self._record_end(run_id, RunStatus.INTERRUPTED, reason)
            else:
                has_waited = has_only_waited(folder)
                if has_waited:
                    _drop_journal(folder)
                with store.batch(durable=True):
                    if not has_waited and not can_resume_exactly(run_id, self._context.directory):
                        self._queue_new_incarnation(store.get_run(run_id))
                    self._set_status(run_id, RunStatus.QUEUED, reason)
            self._deactivate(run_id)

    def _requeue_from_checkpoint(self, record: RunRecord, error: EdgeflError) -> None:
        """Queues the active run in another incarnation; one that is to be stopped ends here."""
        reason = f"goes on from its checkpoint: {error}"
        # One transaction: a coordinator that dies here has both, that it was interrupted and that it goes on.
        with self._lock:
            with self._context.store.batch(durable=True):
                if self._record_end(record.run_id, RunStatus.INTERRUPTED, reason) is RunStatus.INTERRUPTED:
                    self._queue_new_incarnation(record)
            self._deactivate(record.run_id)

    def _end_run(self, run_id: str, status: RunStatus, reason: str) -> None:
        """Ends the execution of a run; one that is to be stopped is not interrupted."""
        with self._lock:
            self._record_end(run_id, status, reason)
            self._deactivate(run_id)

    def _record_end(self, run_id: str, status: RunStatus, reason: str) -> RunStatus:
        """Records how the execution of a run ends, and returns the status. The caller holds the lock."""
        active = self._active.get(run_id)
        stop_reason = active.stop_reason if active is not None else None
        if status is RunStatus.INTERRUPTED and stop_reason is not None:
            if reason == COORDINATOR_STOPPED:  # the next coordinator completes the stop
                remove_crash_count(run_id, self._context.directory)
                return RunStatus.STOPPING
            status, reason = RunStatus.STOPPED, stop_reason
        if status is not RunStatus.INTERRUPTED:
            self._send_end(run_id)
        if status is RunStatus.FAILED:
            delete_noise_key(self._context.directory.runs / run_id)
        self._set_status(run_id, status, reason)
        return status

    def _set_status(self, run_id: str, status: RunStatus, reason: str) -> None:
        now, store = time.time(), self._context.store
        with store.batch(durable=True):
            store.set_run_status(run_id, status, at=now, reason=reason)
            store.record_event(f"run-{status}", reason, at=now, run_id=run_id)
        self._context.metrics.on_run_ended(run_id, status, reason)

    def _execute(self, record: RunRecord, components: RunComponents) -> None:
        context, run_id, clock = self._context, record.run_id, RunClock()
        is_autonomous = components.strategy.is_autonomous
        executor: RunExecutor | None = None
        if (active := self._active.get(run_id)) is not None:
            active.strategy, active.is_autonomous = components.strategy, is_autonomous

        def record_rows(rows: HistoryRows) -> None:
            context.metrics.record_rows(run_id, rows, is_replay=executor is None or not executor.is_live)

        history = HistoryWriter(context.store, run_id, record_rows, partial(context.metrics.on_checkpoint, run_id))
        folder = context.directory.runs / run_id / "journal"
        if (privacy := get_private_mean(components.strategy)) is not None:
            self._open_spend_recorder(run_id, privacy.recorder)
        damage = self._repair_journal(run_id)
        self._record_base(components, run_id)
        save_base(components, context.directory.bases)
        with WalJournal(
            folder, components.decode, sync_timer=context.metrics.time_sync, mirror=context.mirror
        ) as wal:
            save_run_record(context.directory.runs, record)
            if damage is not None and not is_autonomous:  # autonomous devices repeat no ids
                self._replay_to_damage(record, components, wal, history)
                raise ReplayError(damage)
            start = self._load_run_start(record, components, wal)
            # After the rollback, which removed the models saved after the checkpoint.
            models = self._open_models(components, run_id)
            if is_autonomous:
                write_atomic(self._autonomous_marker(run_id), b"")
            fleet, is_over = self._open_fleet(components, history, start, clock, wal), False
            executor = RunExecutor(
                components=components,
                start=start,
                wal=wal,
                history=history,
                checkpointer=Checkpointer(
                    context.directory, run_id, wal=wal, history=history, is_every_version_due=is_autonomous
                ),
                model_retention=models,
                live_fleet=fleet,
                clock=clock,
                has_new_ids=is_autonomous or (bool(record.resumes) and not start.is_exact),
            )
            try:
                state, reason = executor.run()
                is_over = True
            except (InterruptedRunError, StoreError, JournalError):
                raise
            except BaseException:  # an interrupt too: its devices are told that it is over
                is_over = True
                raise
            finally:
                self._close_fleet(fleet, will_resume=not is_over)
                models.close()
            self._send_end(run_id)
            executor.finish(state)
            executor.finish_history()
            self._complete_run(run_id, components.config, reason)
            log.info("run %s is over: %s", run_id, reason)

    def _repair_journal(self, run_id: str) -> str | None:
        """Quarantines damage in a run's journal and returns a line about it; None if there is none.

        Raises:
            InterruptedRunError: no checkpoint is intact.
        """
        try:
            damage = quarantine_damage(run_id, self._context.directory)
        except JournalError as error:
            log.error("run %s cannot go on: %s", run_id, error)  # noqa: TRY400 a line for the operator
            raise InterruptedRunError(str(error)) from error
        if damage is not None:
            log.error("run %s: %s", run_id, damage)
            with self._context.store.batch(durable=True):
                self._context.store.record_event(JOURNAL_DAMAGED, damage, at=time.time(), run_id=run_id)
        return damage

    def _replay_to_damage(
        self, record: RunRecord, components: RunComponents, wal: WalJournal, history: HistoryWriter
    ) -> None:
        """Replays a truncated journal as far as possible, to a checkpoint."""
        context, run_id = self._context, record.run_id
        try:
            open_models = partial(self._open_models, components, run_id)
            message = replay_to_damage(
                record,
                components,
                context.directory,
                context.store,
                wal=wal,
                history=history,
                open_models=open_models,
            )
        except ReplayError as error:
            message = f"goes on from the checkpoint that it had, since it cannot be followed to the damage: {error}"
        log.warning("run %s %s", run_id, message)
        with context.store.batch(durable=True):
            context.store.record_event(JOURNAL_REPLAYED, message, at=time.time(), run_id=run_id)

    def _open_models(self, components: RunComponents, run_id: str) -> ModelRetention:
        context = self._context
        return ModelRetention(
            context.directory.models,
            context.store,
            run_id,
            components.config.models,
            files_lock=context.model_files_lock,
        )

    def _load_run_start(self, record: RunRecord, components: RunComponents, wal: WalJournal) -> RunStart:
        """Returns the start of a run; an unusable checkpoint ends only this run."""
        arguments = record, components, self._context.directory, self._context.store, wal
        try:
            if record.run_id in self._inexact_ids:  # once: this incarnation has a checkpoint of its own soon
                self._inexact_ids.discard(record.run_id)
                return restore_from_checkpoint(*arguments)
            return restore_exactly(*arguments) or restore_from_checkpoint(*arguments)
        except ReplayError:  # its state can be read: it goes on from there in another incarnation
            raise
        except JournalError as error:  # it can be resumed once the file is repaired
            log.error("run %s cannot go on: %s", record.run_id, error)  # noqa: TRY400 a line for the operator
            raise InterruptedRunError(str(error)) from error

    def _send_end(self, run_id: str) -> None:
        """Sends gateways, and autonomous devices, the end of a run; a device that misses it stops at its limit."""
        is_autonomous = self._autonomous_marker(run_id).exists()
        self._autonomous_marker(run_id).unlink(missing_ok=True)
        for info in self._context.registry.list_devices():
            if not is_autonomous and SITE_KEY not in info.capabilities:
                continue
            command = Command(id=uuid.uuid4().hex, kind=CommandKind.END, argument=run_id)
            self._context.notifier.send_command(info.device_id, command)

    def _complete_run(self, run_id: str, config: RunConfig, reason: str) -> None:
        active = self._active.get(run_id)
        was_stopped = active is not None and active.stop_reason == reason
        # Before the lock and the transaction: others wait for these, and it reads and writes models.
        record_deployments = None if was_stopped else self._context.plan_deployments(run_id, config)
        with self._lock:
            # One transaction: a coordinator that dies here has both, the end and what follows it, or neither.
            with self._context.store.batch(durable=True):
                self._set_status(run_id, RunStatus.STOPPED if was_stopped else RunStatus.FINISHED, reason)
                if record_deployments is not None:
                    record_deployments()
            self._deactivate(run_id)

    def _open_fleet(
        self, components: RunComponents, history: HistoryWriter, start: RunStart, clock: RunClock, wal: WalJournal
    ) -> LiveFleet:
        context, run_id, split = self._context, start.incarnations.run_id, components.split
        active = self._active[run_id]
        split_run = None if split is None else SplitRun(split, components.header, components.shapes)
        if split_run is not None:
            context.split_runs.open(run_id, split_run)
        run = self._make_run_spec(components, start, wal, split_run)
        if active.is_autonomous or active.was_recovered:
            self._claim_boards(active, components.config, start.previous_devices)

        # Autonomous devices train without the coordinator.
        keeps_place = components.strategy.is_autonomous or components.config.devices.wait_s is not None

        def record_event(kind: str, device_id: str, message: str) -> None:
            history.add_event(EventRow(kind=kind, device_id=device_id or None, message=message, at=time.time()))

        def set_waiting(reason: str) -> None:
            if reason:
                is_needed = components.config.strategy.name == SCALES_ANALYSIS
                context.idle_runs.add(run_id, reason, WAITING, is_needed=is_needed, gives_way=not keeps_place)
                self._give_way(run_id, components.config, fleet, reason)
            else:
                context.idle_runs.remove(run_id)

        transport, requirements = (
            context.superlink.open_run(components.make_bundle),
            create_admission_requirements(components, start.previous_devices, is_resumed=start.is_exact),
        )
        fleet = LiveFleet(
            run=run,
            transport=transport,
            registry=context.registry,
            notifier=context.notifier,
            clock=time.monotonic,
            run_clock=clock.now_s,
            requirements=requirements,
            record_event=record_event,
            spool_folder=context.directory.root,
            on_waiting=set_waiting,
        )
        with self._lock:
            active.fleet, active.history, active.policy = fleet, history, components.policy
            active.keeps_place = keeps_place
            if active.stop_reason is not None:
                fleet.post(StopRequested(reason=active.stop_reason))
        if self._stop_event.is_set():
            fleet.post(InterruptedRunError(COORDINATOR_STOPPED))
        return fleet

    def _give_way(self, run_id: str, config: RunConfig, fleet: LiveFleet, reason: str) -> None:
        """Lets a run that has long lacked boards, to begin or to go on, give way to a queued one that can begin."""
        active, now_s = self._active.get(run_id), time.monotonic()
        if active is None or active.keeps_place:
            return
        if self._queue.has_boards(run_id, config, has_started=fleet.has_started, priority=active.priority):
            active.look_s = None
            return
        if active.look_s is None:
            active.look_s = now_s + GIVE_WAY_AFTER_S
        if now_s < active.look_s:
            return
        active.look_s = now_s + LOOK_INTERVAL_S
        successor = self._queue.find_successor(run_id)
        if successor is not None:
            fleet.post(RunGivesWayError(f"gives way to run {successor.run_id}: {reason}"))

    def _make_run_spec(
        self, components: RunComponents, start: RunStart, wal: WalJournal, split_run: SplitRun | None
    ) -> RunSpec:
        config, split, planner = components.config, components.split, components.policy.planner
        return RunSpec(
            run_id=start.incarnations.run_id,
            task=config.run.task,
            header=components.header,
            groups=config.devices.groups,
            names=config.devices.names,
            excluded=config.devices.exclude,
            join_at_start=config.devices.join == "start",
            encode=components.encode if split is None else split.encode_front,
            encode_whole=None if split is None else components.encode,
            split=split_run,
            encode_changes=components.encode_changes,
            encode_input=components.encode_input,
            decode=components.decode,
            metrics=components.metrics,
            needs_torch=components.needs_torch,
            incarnations=start.incarnations,
            lineage=self._context.lineage,
            get_newest_record=lambda: wal.synced_record,
            max_weight_ratio=config.guard.max_weight_ratio,
            min_devices=1 if start.is_resumed and not start.is_exact else config.devices.min,
            wait_s=config.devices.wait_s,
            find_shortage=ignore_shortages if planner is None else planner.find_shortage,
        )

    def _close_fleet(self, fleet: LiveFleet, *, will_resume: bool) -> None:
        with self._lock:
            if (active := self._active.get(fleet.run_id)) is not None:
                active.fleet = None  # its history stays: published rows are durable in the journal, and written later
        self._context.idle_runs.remove(fleet.run_id)
        fleet.close(will_resume=will_resume)
        self._context.split_runs.close(fleet.run_id)


def _get_run_id(item: Reply | Progress) -> str:
    """Returns the run that a message names, by the wire id `RUN/...` of its assignment; empty where it names none."""
    wire_id = item.header.get("assignment") if isinstance(item, Reply) else item.assignment_id
    return str(wire_id or "").partition("/")[0]


def _log_stop_timeout(active: _ActiveExecution) -> None:
    """Logs where a run's thread is: the process ends without it, the next one replays the journal."""
    log.error(
        "run %s does not end within %.0f s, the coordinator ends without it: %s (%s)",
        active.run_id,
        STOP_TIMEOUT_S,
        format_running_call(active.strategy) or "it is busy",
        format_current_frame(active.thread),
    )
