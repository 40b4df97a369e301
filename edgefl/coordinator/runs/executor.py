"""Run executor: the round loop with the run's journal, history and fleet; and the repair of a damaged journal.

Damage means changed bytes that had been durable: a failing card, not a crash, whose torn tail is truncated without
loss. The journal before the checkpoint is no longer read, so damage there does not matter.

The intact entries before the damage are replayed up to the turn with the damage, and checkpointed there. A turn is
the smallest unit of a replay: the decision of an incomplete one is unknown.

From there the run goes on in another incarnation. Devices may hold answers to assignments dispatched after the
damage; under the same ids the run would dispatch other work, and count such an answer for it. So everything
dispatched in that turn and later, or in flight by then, is dispatched again under other ids, the history is rolled
back with it, and no update is counted twice. Without a replayable turn the run goes on from its checkpoint; without
any checkpoint it starts anew. Only where no checkpoint is intact it waits for the operator.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.execution.admission import NotEnoughDevicesError
from edgefl.coordinator.execution.live_fleet import InterruptedRunError
from edgefl.coordinator.execution.recording_fleet import RecordingFleet, ReplayOnlyFleet, UnderlyingFleet
from edgefl.coordinator.execution.replay import ReplayError, RunClock
from edgefl.coordinator.runs.app_recorder import AppRecorder
from edgefl.coordinator.runs.checkpointing import (
    NEW_INCARNATION_FILE,
    Checkpointer,
    close_spend_recorder,
    create_run_snapshot,
)
from edgefl.coordinator.runs.history_recorder import HistoryRecorder
from edgefl.coordinator.runs.history_writer import EventRow, HistoryWriter
from edgefl.coordinator.runs.model_retention import EvaluatedModelSaver, ModelRetention
from edgefl.coordinator.runs.recovery import RunStart, find_newest_checkpoint, has_only_waited, restore_before_damage
from edgefl.core.errors import JournalError, NotKeptError, StoreError, StrategyError
from edgefl.core.types import TrainInstruction
from edgefl.engine.assembly.privacy import get_private_mean
from edgefl.engine.round_loop import LoopState, RunLog, run_rounds
from edgefl.storage.journal.file_format import (
    RecordKind,
    list_files_after,
    list_journal_files,
    parse_file_number,
    read_records,
)
from edgefl.storage.journal.wal_journal import WalJournal, create_journal_file
from edgefl.storage.repositories.records import RunRecord
from edgefl.storage.state_serialisation import count_encoded_updates
from edgefl.storage.store import Store
from edgefl.strategies.private_mean import PrivacySpend, PrivateMean
from edgefl.system.atomic_files import make_private_directory, sync_directory, write_atomic

if TYPE_CHECKING:
    from edgefl.engine.assembly.components import RunComponents

JOURNAL_DAMAGED = "journal-damaged"
"""Event kind: the damage, and the quarantined files."""
JOURNAL_REPLAYED = "journal-replayed"
"""Event kind: how far the intact entries before the damage were replayed."""
PRIVACY_SPENT = "privacy-spent"
"""Event kind: what a private run has spent that goes on from an older version."""
QUARANTINE_PREFIX = "damaged"


class _ReplayFinishedError(Exception):
    """Raised when a replay has reached its last turn."""


@dataclass(slots=True, kw_only=True)
class RunExecutor:
    """Executes one run, once. Not thread-safe: used by the run's thread alone.

    Attributes:
        components, start: the run's objects, and the state it starts or resumes from.
        wal, history, checkpointer, model_retention: where its records, rows, states and models go.
        live_fleet, clock: the live devices, and the run's own time.
        has_new_ids: write a checkpoint before the first dispatch, so that a restarted coordinator assigns other ids.
    """

    components: RunComponents
    start: RunStart
    wal: WalJournal
    history: HistoryWriter
    checkpointer: Checkpointer
    model_retention: ModelRetention
    live_fleet: UnderlyingFleet
    clock: RunClock
    has_new_ids: bool = False
    _recorder: HistoryRecorder = field(init=False)
    _log: RunLog = field(init=False)
    _fleet: RecordingFleet = field(init=False)
    _last_turn: tuple[Any, LoopState] | None = None

    def __post_init__(self) -> None:
        components, start, snapshot = self.components, self.start, self.start.snapshot
        self._fleet = RecordingFleet(
            self.live_fleet,
            self.wal,
            start.replay,
            self.clock,
            None if snapshot is None else snapshot.fleet,
            incarnations=start.incarnations,
            task=components.config.run.task,
        )
        read_reply = components.read_reply
        make_recorder = HistoryRecorder if read_reply is None else partial(AppRecorder, read_reply=read_reply)
        self._recorder = make_recorder(
            history=self.history,
            rounds=components.rounds,
            clock=self.clock.unix_s,
            monotonic=self.clock.now_s,
            get_blocked=lambda: components.policy.blocked_devices,
            compute_metrics=components.strategy.facts,
            metrics=components.metrics,
            needed_updates=components.strategy.needed_updates,
            unused_updates=start.unused_updates,
            can_repeat=start.incarnations.current > 0 and not start.is_exact,
        )
        saver = EvaluatedModelSaver(
            self.model_retention,
            lambda state: components.make_whole(components.strategy.model(state)),
            lambda: self.wal.last_record,
            components.metrics,
        )
        self._log = RunLog(self._fleet, [self._recorder, saver])

    def run(self) -> tuple[Any, str]:
        """Returns the last state and the reason of the run's end.

        Raises:
            InterruptedRunError: the coordinator stops, or previous devices are away; the run can be resumed.
            ReplayError: the replay deviates from the journal.
            EdgeflError: it has failed.
        """
        version = self.components.strategy.version(self.start.state)
        self.checkpointer.start(version, is_due_now=self.has_new_ids, is_due_soon=self.start.is_exact)
        try:
            return self._run_loop(self._on_turn)
        except (StoreError, JournalError):
            raise
        except Exception as error:  # a strategy of others may raise anything
            if not self._fleet.is_live:  # the journaled turns did not fail before: the replay deviates
                raise ReplayError(f"{type(error).__name__}: {error}") from error
            # Absent devices must not cost a run its progress: it can be resumed once more.
            is_awaiting_devices = isinstance(error, NotEnoughDevicesError) and self.start.is_resumed
            is_interrupted = is_awaiting_devices or isinstance(error, InterruptedRunError)
            if isinstance(self._recorder, AppRecorder) and not is_interrupted:
                self._recorder.on_finish()  # an app that is resumed begins anew; others go on in their round
            self._log.commit()  # the last turn is history too
            self.history.finish()
            if self._last_turn and is_interrupted and not has_only_waited(self.checkpointer.run_folder):
                self._checkpoint_unless_updates_pending(*self._last_turn)
            if is_awaiting_devices:
                raise InterruptedRunError(str(error)) from error
            raise

    def replay(self) -> int:
        """Replays a run of an earlier incarnation to its last turn, without contacting any device.

        Returns:
            The version there, which is checkpointed: the run goes on from it in another incarnation.

        Raises:
            ReplayError: the replay deviates from the journal.
            StoreError: as `run`.
        """
        try:
            self._run_loop(self._on_replayed_turn)
        except _ReplayFinishedError:
            assert self._last_turn is not None
            self._save_checkpoint(*self._last_turn, is_of_previous_incarnation=True)
            return self._last_turn[1].progress.version
        except (StoreError, JournalError):
            raise
        except Exception as error:  # likewise
            raise ReplayError(f"{type(error).__name__}: {error}") from error
        raise ReplayError("the run ends before its journal does")

    @property
    def is_live(self) -> bool:
        """Whether the replay is over, and everything recorded is new."""
        return self._fleet.is_live

    def finish(self, state: Any) -> None:
        """Saves the last state and the model of a run that is over."""
        strategy = self.components.strategy
        version = strategy.version(state)
        number, model, incarnations = (
            self.components.rounds.get_round(version),
            self.components.make_whole(strategy.model(state)),
            self.start.incarnations,
        )
        self.checkpointer.save_guard(self.components.policy.guard.state)
        try:
            self.checkpointer.finish(version, number, state, model, self.model_retention, incarnations)
        except NotKeptError as error:
            self.finish_history()  # the history up to here is kept nevertheless
            raise self._create_save_error(version, error) from error
        if (privacy := get_private_mean(strategy)) is not None:
            close_spend_recorder(privacy.recorder)

    def finish_history(self) -> None:
        """Writes the rest of the rows of a run that is over."""
        self._log.finish()
        self.history.finish()

    def _run_loop(self, on_turn: Callable[[Any, LoopState], None]) -> tuple[Any, str]:
        try:
            return self._run_rounds(on_turn)
        except NotKeptError as error:
            raise StrategyError(f"strategy {self._strategy_name}: gave what no journal keeps: {error}") from error

    def _create_save_error(self, version: int, error: NotKeptError) -> StrategyError:
        methods = "assign, receive or aggregate" if version else "init, assign or receive"
        return StrategyError(
            f"strategy {self._strategy_name}: {methods} made a state of version {version} "
            f"that cannot be saved: {error}"
        )

    @property
    def _strategy_name(self) -> str:
        return str(getattr(self.components.strategy, "name", type(self.components.strategy).__name__))

    def _run_rounds(self, on_turn: Callable[[Any, LoopState], None]) -> tuple[Any, str]:
        components, start = self.components, self.start
        loop_state = None
        if (privacy := get_private_mean(components.strategy)) is not None:
            self._prepare_record(privacy)
        if start.snapshot is not None:
            start.snapshot.restore(components.policy)
            loop_state = start.snapshot.restore_loop_state(components.rounds)
            in_flight = (dispatched.instruction for dispatched in start.snapshot.fleet.in_flight.values())
            assignments = [instruction for instruction in in_flight if isinstance(instruction, TrainInstruction)]
            self._recorder.resume(assignments, loop_state.progress.version, start.snapshot.opened_s, start.state)
        elif start.is_resumed and not start.is_exact:
            components.policy.guard.restore(start.guard_state)
            self._recorder.resume_after(components.strategy.version(start.state), start.state)
        return run_rounds(
            components.strategy,
            start.state,
            fleet=self._fleet,
            journal=self._log,
            goal=components.goal,
            evaluate=components.evaluate,
            rounds=components.rounds,
            policy=components.policy,
            prior_progress=start.prior_progress,
            loop_state=loop_state,
            on_turn=on_turn,
            on_abort=self._on_abort,
            on_score=self._log.record_score,
            on_clipped=self._log.record_clipped,
            divergence=components.divergence,
            on_divergence=self._log.record_divergence,
        )

    def _prepare_record(self, privacy: PrivateMean) -> None:
        """Has the journal synced before each release is recorded, and records what will be released anew.

        After a power cut the sum of a recorded release must come back from the journal as it was.
        """
        recorder, version = privacy.recorder, self.components.strategy.version(self.start.state)
        save = recorder.save

        def save_behind_journal(spend: PrivacySpend) -> None:
            self.wal.sync()
            save(spend)

        recorder.save = save_behind_journal
        if self.start.is_exact:
            return
        recorder.restart(version)
        self.start.state.participations = privacy.restore_participations()
        if recorder.spend.newest > version:
            spent = privacy.compute_epsilon(recorder.spend.sampled, recorder.spend.repeated)
            message = f"epsilon {spent:.4g} is spent; versions behind {version} are made anew, and count again"
            self.history.add_event(EventRow(kind=PRIVACY_SPENT, device_id=None, message=message, at=time.time()))

    def _on_replayed_turn(self, state: Any, loop_state: LoopState) -> None:
        self._last_turn = state, loop_state
        if self.start.replay.is_at_last_turn:
            raise _ReplayFinishedError

    def _on_turn(self, state: Any, loop_state: LoopState) -> None:
        self._last_turn = state, loop_state
        if self._fleet.is_live and self.checkpointer.is_due(loop_state.progress.version):
            self._save_checkpoint(state, loop_state)

    def _on_abort(self, state: Any) -> None:
        if self._last_turn is not None:
            self._last_turn = state, self._last_turn[1]

    def _checkpoint_unless_updates_pending(self, state: Any, loop_state: LoopState) -> None:
        """Checkpoints an interrupted run, unless its state holds unused updates.

        These are decoded, each a model's worth of memory and of disk. The journal has them too, and a replay
        restores them.
        """
        num_pending = count_encoded_updates(state) + len(self.components.policy.guard.state.held)
        if self._is_autonomous or num_pending == 0:
            self._save_checkpoint(state, loop_state)

    @property
    def _is_autonomous(self) -> bool:
        return self.components.strategy.is_autonomous

    def _save_checkpoint(
        self, state: Any, loop_state: LoopState, *, is_of_previous_incarnation: bool = False
    ) -> None:
        snapshot = None
        if self._is_autonomous:
            self.checkpointer.save_guard(self.components.policy.guard.state)
        else:
            snapshot = create_run_snapshot(
                loop_state, self._fleet.create_snapshot(), self.components.policy, self._recorder.round_starts_s
            )
        try:
            self.checkpointer.save(state, snapshot, is_of_previous_incarnation=is_of_previous_incarnation)
        except NotKeptError as error:
            raise self._create_save_error(loop_state.progress.version, error) from error


@dataclass(slots=True)
class _ValidPrefix:
    """Intact records after a given one: their kinds, and where the last of them ends."""

    kinds: list[RecordKind] = field(default_factory=list)
    path: Path | None = None
    end: int = 0


def quarantine_damage(run_id: str, directory: CoordinatorDirectory) -> str | None:
    """Quarantines damage and returns a line about it for the operator; None if there is none.

    Afterwards the journal ends before the damage, and the run is marked to go on in another incarnation.

    Raises:
        JournalError: no checkpoint is intact.
        StoreTooNewError: a newer edgefl wrote part of it: nothing is changed.
        StoreFullError: no room; it may be repeated.
    """
    checkpoint = find_newest_checkpoint(directory, run_id)
    folder, after = directory.runs / run_id / "journal", 0 if checkpoint is None else checkpoint.last_record
    # The first record after a checkpoint is its own mark, which nothing depends on.
    first = 0 if checkpoint is None else after + 1
    damage = _find_damage(folder, sorted({after, first}))
    if damage is None:
        return None
    error, prefix = damage
    write_atomic(directory.runs / run_id / NEW_INCARNATION_FILE, b"")
    if not list_journal_files(folder):
        make_private_directory(folder)
        create_journal_file(folder, number=1, first_record=first + 1)
        return f"journal {folder} is missing or empty; what was behind the checkpoint of record {after} is lost"
    quarantine = folder / f"{QUARANTINE_PREFIX}-{parse_file_number(list_journal_files(folder)[-1]):06d}"
    make_private_directory(quarantine)
    quarantined = (
        _truncate_journal(folder, prefix, quarantine)
        if prefix.path is not None
        else _start_empty_journal(folder, first, quarantine)
    )
    num_bytes = sum(path.stat().st_size for path in quarantined)
    return (
        f"{str(error).partition(';')[0]}; set aside in {quarantine}: {len(quarantined)} files of {num_bytes} bytes; "
        f"behind the checkpoint of record {after} there are {len(prefix.kinds)} records before the damage, "
        f"{prefix.kinds.count(RecordKind.UPDATE)} of them updates"
    )


def replay_to_damage(  # noqa: PLR0913 the parts of a run, by name
    record: RunRecord,
    components: RunComponents,
    directory: CoordinatorDirectory,
    store: Store,
    *,
    wal: WalJournal,
    history: HistoryWriter,
    open_models: Callable[[], ModelRetention],
) -> str:
    """Replays a truncated journal to its last turn, and writes a checkpoint there.

    `open_models` is called after the rollback, which removes models saved after the checkpoint.

    Returns:
        How far it came, in a line for the operator.

    Raises:
        ReplayError: it cannot be replayed; its checkpoint is unchanged.
        StoreError: as `RunExecutor.run`; it may be retried where that passes.
    """
    try:
        start = restore_before_damage(record, components, directory, store, wal)
    except JournalError as error:
        raise ReplayError(str(error)) from error
    if start is None:
        return "goes on from the checkpoint that it had: no turn behind it is whole"
    models = open_models()
    try:
        version = RunExecutor(
            components=components,
            start=start,
            wal=wal,
            history=history,
            checkpointer=Checkpointer(directory, record.run_id, wal=wal, history=history),
            model_retention=models,
            live_fleet=ReplayOnlyFleet(),
            clock=RunClock(),
        ).replay()
    finally:
        models.close()
    return f"was followed to version {version} by what was whole; what came behind that is asked for again"


def _find_damage(folder: Path, starts: Sequence[int]) -> tuple[JournalError, _ValidPrefix] | None:
    """Returns the damage after all of these records, and the intact records before it; None if there is none."""
    damage: tuple[JournalError, _ValidPrefix] | None = None
    for start in starts:
        prefix = _ValidPrefix()
        try:
            for record in read_records(folder, after=start):
                prefix.kinds.append(record.kind)
                prefix.path, prefix.end = record.path, record.offset + len(record.body)
        except JournalError as error:
            damage = error, prefix
        else:
            return None
    return damage


def _truncate_journal(folder: Path, prefix: _ValidPrefix, quarantine: Path) -> list[Path]:
    """Truncates the journal after its intact prefix; returns the quarantined files."""
    assert prefix.path is not None
    files = list_journal_files(folder)
    later = files[files.index(prefix.path) + 1 :]
    quarantined = [
        quarantine / path.name for path in [prefix.path] * (prefix.path.stat().st_size > prefix.end) + later
    ]
    for path in later:
        path.rename(quarantine / path.name)
    if prefix.path.stat().st_size > prefix.end:
        (quarantine / prefix.path.name).unlink(missing_ok=True)
        os.link(prefix.path, quarantine / prefix.path.name)
        with prefix.path.open("rb") as file:
            write_atomic(prefix.path, file.read(prefix.end))
    sync_directory(quarantine)
    sync_directory(folder)
    return quarantined


def _start_empty_journal(folder: Path, first_record: int, quarantine: Path) -> list[Path]:
    """Starts an empty journal after record `first_record`; returns the quarantined files."""
    files = list_journal_files(folder)
    # The new file first: a coordinator that dies here finds the damage again, and no journal that ends too early.
    create_journal_file(folder, number=parse_file_number(files[-1]) + 1, first_record=first_record + 1)
    replaced = list_files_after(files, first_record)
    for path in replaced:
        path.rename(quarantine / path.name)
    sync_directory(quarantine)
    sync_directory(folder)
    return [quarantine / path.name for path in replaced]
