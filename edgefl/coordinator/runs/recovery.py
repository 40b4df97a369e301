"""Recovery of runs: from the newest checkpoint, with the history rolled back to it."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.execution.headers import FIRST_INCARNATION, RunIncarnations
from edgefl.coordinator.execution.replay import JournalReplay, ReplayError, can_replay, select_complete_turns
from edgefl.coordinator.runs.checkpointing import (
    INCARNATIONS_FILE,
    NEW_INCARNATION_FILE,
    RunSnapshot,
    load_guard_state,
)
from edgefl.coordinator.runs.history_recorder import DERIVED_EVENT_KINDS
from edgefl.core.config import JOB_STRATEGY, RunConfig
from edgefl.core.errors import JournalError, UsageError
from edgefl.core.safe_parsing import SHA256, parse_json
from edgefl.core.types import BASE_SUFFIX, Decision, DeviceInfo, FinishEarlyInstruction, Role, Strategy, Update
from edgefl.engine.progress import DeviceWork, PriorProgress, RoundCounter
from edgefl.storage.checkpoints import (
    Checkpoint,
    is_intact,
    list_checkpoint_files,
    list_checkpoints,
    load_run_snapshot,
    load_state,
)
from edgefl.storage.journal.file_format import list_journal_files, read_header
from edgefl.storage.journal.record_encoding import Aggregation, JournalEntry, TurnStarted
from edgefl.storage.journal.wal_journal import WalJournal, load_journal_entries
from edgefl.storage.repositories.records import RunRecord, RunStatus, UpdateRow
from edgefl.storage.rollback import (
    ProgressAtRollback,
    RollbackPoint,
    count_versions_per_round,
    delete_events,
    get_progress,
    list_unused_updates,
    roll_back_history,
)
from edgefl.storage.store import Store
from edgefl.strategies.update_guard import GuardState
from edgefl.system.atomic_files import compute_sha256, make_private_directory, write_atomic

if TYPE_CHECKING:
    from edgefl.engine.assembly.components import RunComponents

log = logging.getLogger(__name__)

BASE_FILE = "base.sha256"
"""In a run's folder: the SHA-256 of the base that it began with."""
MAX_CRASHES = 5
"""A run with more coordinator crashes since it last got on waits for the operator to resume it."""
RESUMABLE_STATUSES = frozenset({RunStatus.INTERRUPTED, RunStatus.STOPPED})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """State that a run starts or resumes from, with its incarnations and earlier progress.

    `is_resumed` is False for a new run; `previous_devices` took part in the newest round, and are given a moment to
    come back; `guard_state` is the run's guard, for a run that goes on in another incarnation. With a `snapshot`
    it goes on exactly where it was, and `replay` has what happened after that.
    """

    state: Any
    incarnations: RunIncarnations
    prior_progress: PriorProgress = field(default_factory=PriorProgress)
    unused_updates: tuple[UpdateRow, ...] = ()
    previous_devices: tuple[str, ...] = ()
    guard_state: GuardState = field(default_factory=GuardState)
    is_resumed: bool = False
    snapshot: RunSnapshot | None = None
    replay: JournalReplay = field(default_factory=JournalReplay)

    @property
    def is_exact(self) -> bool:
        """Whether the run goes on exactly where it was."""
        return self.snapshot is not None or not self.replay.is_exhausted


def check_resumable(
    record: RunRecord, directory: CoordinatorDirectory, build_run: Callable[[], RunComponents]
) -> None:
    """Checks that a run can be resumed, without changing it.

    Raises:
        UsageError: it is not over, or has no checkpoint.
        EdgeflError: it cannot be assembled any more, or its checkpoint cannot be read.
    """
    check_formats(record.run_id, directory)
    if record.status not in RESUMABLE_STATUSES:
        raise UsageError(
            f"run {record.run_id} is {record.status}; only a run that was interrupted or stopped can be resumed"
        )
    checkpoint = find_newest_checkpoint(directory, record.run_id)
    if record.status is RunStatus.STOPPED and checkpoint is None:
        raise UsageError(f"run {record.run_id} was stopped before it had a checkpoint; submit it again")
    components = build_run()
    check_base(components, record.run_id, directory)
    if checkpoint is not None:
        load_state(_checkpoint_folder(directory, record.run_id), _get_state_class(components), checkpoint)


def pin_base(config: RunConfig, run_id: str, directory: CoordinatorDirectory) -> RunConfig:
    """Returns a run's settings with the pretrained base that it began with, whatever its name means by now.

    They are unchanged if it has not started, or that file is not there or damaged.
    """
    sha256 = _read_base(run_id, directory)
    if config.adapt.base is None or not SHA256.match(sha256):
        return config
    path = directory.bases / f"{sha256}{BASE_SUFFIX}"
    if not path.is_file() or compute_sha256(path) != sha256:
        return config
    return replace(config, adapt=replace(config.adapt, base=sha256))


def check_base(components: RunComponents, run_id: str, directory: CoordinatorDirectory) -> None:
    """Checks that a run trains on the base that it began with.

    Raises:
        UsageError: it is another one.
    """
    known = _read_base(run_id, directory)
    if components.adapted is None or not known or known == components.adapted.plan.sha256:
        return
    raise UsageError(
        f"run {run_id} must go on with the base that it began with, SHA-256 {known:.64}, got "
        f"{components.adapted.plan.sha256}: bring that file again, by edgefl base add FILE or to where run.init is"
    )


def record_base(components: RunComponents, run_id: str, directory: CoordinatorDirectory) -> None:
    """Writes the SHA-256 of a run's base into its folder when it first starts; checks it later, as `check_base`."""
    check_base(components, run_id, directory)
    if components.adapted is not None and not _read_base(run_id, directory):
        make_private_directory(directory.runs / run_id)
        write_atomic(directory.runs / run_id / BASE_FILE, f"{components.adapted.plan.sha256}\n".encode())


def _read_base(run_id: str, directory: CoordinatorDirectory) -> str:
    """Returns the SHA-256 of the base that a run began with; empty if it has not started, or has none."""
    try:
        return (directory.runs / run_id / BASE_FILE).read_text(errors="replace").strip()
    except FileNotFoundError:
        return ""


def restore_from_checkpoint(
    record: RunRecord, components: RunComponents, directory: CoordinatorDirectory, store: Store, wal: WalJournal
) -> RunStart:
    """Returns the start of a run; a resumed one goes on from its newest checkpoint.

    Its history is rolled back to the checkpoint: later rounds are repeated. A run whose devices went on
    autonomously keeps all rows, and its ids are new by the state's own count.

    Raises:
        JournalError: the checkpoint or the journal behind it cannot be read.
    """
    run_id, strategy = record.run_id, components.strategy
    initial_state, checkpoint = strategy.init(components.model), find_newest_checkpoint(directory, record.run_id)
    is_autonomous = strategy.is_autonomous and not record.resumes
    if not record.resumes and not (is_autonomous and checkpoint is not None):
        return RunStart(state=initial_state, incarnations=RunIncarnations(run_id))
    state = (
        initial_state
        if checkpoint is None
        else _load_checkpoint_state(strategy, directory, run_id, type(initial_state), checkpoint)
    )
    if is_autonomous:
        return _continue_autonomous(run_id, state, directory, store)
    _restore_round_size(components.rounds, state, store, run_id)
    rollback_point = _create_rollback_point(components.rounds, strategy.version(state))
    entries, snapshot, after = [], None, None
    has_snapshot = checkpoint is not None and bool(checkpoint.snapshot_sha256)
    if checkpoint is not None:
        entries = _list_entries_after(wal, checkpoint)
        if has_snapshot:
            with contextlib.suppress(ReplayError):
                snapshot = _load_snapshot(_checkpoint_folder(directory, run_id), checkpoint)
            # The journal may lack quarantined entries: the rows have their own order.
            after = checkpoint if (directory.runs / run_id / NEW_INCARNATION_FILE).exists() else None
    restored = roll_back_history(
        store, run_id, rollback_point, entries, now=time.time(), after=after, should_reset=checkpoint is None
    )
    incarnations = _get_saved_incarnations(snapshot) if has_snapshot else _load_final_incarnations(record, directory)
    if incarnations is None:
        incarnations = dict(restored.incarnations)
    log.info(
        "run %s goes on behind version %d, round %d", run_id, rollback_point.version, rollback_point.num_closed_rounds
    )
    guard_state = (
        GuardState() if checkpoint is None else _get_guard_state(directory.runs / run_id, snapshot, checkpoint)
    )
    return RunStart(
        state=state,
        incarnations=RunIncarnations(run_id, record.resumes, incarnations),
        prior_progress=_create_prior_progress(restored),
        unused_updates=restored.unused_updates,
        previous_devices=restored.participants,
        guard_state=guard_state,
        is_resumed=checkpoint is not None,
    )


def _continue_autonomous(run_id: str, state: object, directory: CoordinatorDirectory, store: Store) -> RunStart:
    """Returns the start of a run whose devices went on without the coordinator."""
    log.info("run %s goes on from its last checkpoint", run_id)
    return RunStart(
        state=state,
        incarnations=RunIncarnations(run_id),
        prior_progress=_create_prior_progress(get_progress(store, run_id)),
        guard_state=load_guard_state(directory.runs / run_id),
        is_resumed=True,
    )


def restore_exactly(
    record: RunRecord, components: RunComponents, directory: CoordinatorDirectory, store: Store, wal: WalJournal
) -> RunStart | None:
    """Returns the start of a run resumed where its coordinator ended, also in the middle of a round.

    None for a new run, and for one whose journal has no turns.

    Raises:
        ReplayError: the checkpoint's snapshot cannot be read; the run can go on from its state, in another
            incarnation.
        JournalError: no checkpoint is intact, or the journal after it cannot be read.
    """
    if (directory.runs / record.run_id / NEW_INCARNATION_FILE).exists():
        return None
    return _restore_with_replay(record, components, directory, store, wal, lambda entries: entries)


def restore_before_damage(
    record: RunRecord, components: RunComponents, directory: CoordinatorDirectory, store: Store, wal: WalJournal
) -> RunStart | None:
    """Returns the start for a replay of a truncated journal to its last turn.

    None for a run that cannot be replayed beyond its checkpoint.

    Raises:
        JournalError: no checkpoint is intact.
    """
    start = _restore_with_replay(record, components, directory, store, wal, select_complete_turns)
    return None if start is None or start.replay.is_exhausted or start.replay.is_at_last_turn else start


def _restore_with_replay(
    record: RunRecord,
    components: RunComponents,
    directory: CoordinatorDirectory,
    store: Store,
    wal: WalJournal,
    select_entries: Callable[[Sequence[JournalEntry]], Sequence[JournalEntry]],
) -> RunStart | None:
    run_id, strategy = record.run_id, components.strategy
    if strategy.is_autonomous:
        return None
    initial_state, checkpoint, snapshot = (
        strategy.init(components.model),
        find_newest_checkpoint(directory, run_id),
        None,
    )
    state = initial_state
    if checkpoint is None and record.resumes:
        return None
    if checkpoint is not None:
        if not checkpoint.snapshot_sha256:
            return None
        state = load_state(_checkpoint_folder(directory, run_id), type(initial_state), checkpoint)
        snapshot = _load_snapshot(_checkpoint_folder(directory, run_id), checkpoint)
    replayed = select_entries(_list_entries_after(wal, checkpoint))
    if not can_replay(iter(replayed)) or (checkpoint is None and not replayed):
        return None
    delete_events(
        store, run_id, DERIVED_EVENT_KINDS, after_id=0 if checkpoint is None else checkpoint.newest_event_id
    )
    log.info("run %s goes on where it was, behind version %d", run_id, strategy.version(state))
    return RunStart(
        state=state,
        incarnations=_restore_incarnations(run_id, snapshot, replayed),
        unused_updates=list_unused_updates(store, run_id, _list_used_ids(replayed)),
        previous_devices=_list_trainers(snapshot, replayed),
        is_resumed=True,
        snapshot=snapshot,
        replay=JournalReplay(replayed),
    )


def _restore_incarnations(
    run_id: str, snapshot: RunSnapshot | None, entries: Sequence[JournalEntry]
) -> RunIncarnations:
    """Returns the incarnations of all assignments by checkpoint and journal, for a run that goes on where it was."""
    incarnation = FIRST_INCARNATION if snapshot is None else snapshot.fleet.incarnation
    recorded = _get_saved_incarnations(snapshot) or {}
    for entry in entries:
        if isinstance(entry, TurnStarted):
            incarnation = entry.incarnation
        elif isinstance(entry, Decision):
            assignment_ids = [
                instruction.assignment_id
                for instruction in entry.instructions
                if not isinstance(instruction, FinishEarlyInstruction)
            ]
            for name in assignment_ids:
                recorded.pop(name, None)
                recorded[name] = incarnation
    return RunIncarnations(run_id, incarnation, recorded)


def _get_saved_incarnations(snapshot: RunSnapshot | None) -> dict[str, int] | None:
    """Returns the incarnations by assignment in a snapshot; None without one."""
    if snapshot is None:
        return None
    return {
        assignment_id: incarnation
        for incarnation, assignment_ids in snapshot.fleet.past_incarnations.items()
        for assignment_id in assignment_ids
    }


def _load_final_incarnations(record: RunRecord, directory: CoordinatorDirectory) -> dict[str, int] | None:
    """Returns the incarnations by assignment of a run that ended; None if they were not recorded."""
    try:
        recorded = parse_json((directory.runs / record.run_id / INCARNATIONS_FILE).read_bytes())
        return {
            assignment_id: int(incarnation)
            for incarnation, assignment_ids in recorded.items()
            for assignment_id in assignment_ids
        }
    except FileNotFoundError:
        return {} if record.resumes == 1 else None  # there was only the first
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning(
            "run %s: %s cannot be read, the rows' order takes its place: %r",
            record.run_id,
            INCARNATIONS_FILE,
            error,
        )
        return None


def check_formats(run_id: str, directory: CoordinatorDirectory) -> None:
    """Checks that no newer edgefl wrote to a run: an unknown format must not pass for damage.

    Raises:
        StoreTooNewError: a newer one did.
    """
    list_checkpoints(_checkpoint_folder(directory, run_id))
    for path in list_journal_files(directory.runs / run_id / "journal"):
        read_header(path)


def can_resume_exactly(run_id: str, directory: CoordinatorDirectory) -> bool:
    """Returns whether an inactive run can go on where it was; cheap and read-only."""
    if (directory.runs / run_id / NEW_INCARNATION_FILE).exists():
        return False
    try:
        checkpoint = find_newest_checkpoint(directory, run_id)
    except JournalError as error:
        log.error("run %s: %s", run_id, error)  # noqa: TRY400 a line for the operator, no bug of ours
        return False
    if checkpoint is not None:
        return bool(checkpoint.snapshot_sha256)
    try:
        entries = load_journal_entries(directory.runs / run_id / "journal")
        return isinstance(next((entry for _, entry in entries), None), TurnStarted)
    except JournalError:
        return True  # the damage is quarantined on the resume, and the run starts anew


def list_previous_devices(run_id: str, directory: CoordinatorDirectory) -> tuple[str, ...]:
    """Returns the trainers that an inactive run had last, as far as checkpoint and journal can be read."""
    folder, snapshot, after = _checkpoint_folder(directory, run_id), None, 0
    with contextlib.suppress(JournalError):
        if (checkpoint := find_newest_checkpoint(directory, run_id)) is not None:
            after = checkpoint.last_record
            snapshot = load_run_snapshot(folder, RunSnapshot, checkpoint) if checkpoint.snapshot_sha256 else None

    def read_entries() -> Iterator[JournalEntry]:
        with contextlib.suppress(JournalError):  # what is readable is enough: this claims boards alone
            yield from (entry for _, entry in load_journal_entries(folder.with_name("journal"), after=after))

    return _list_trainers(snapshot, read_entries())


def is_started(run_id: str, directory: CoordinatorDirectory) -> bool:
    """Returns whether a run has a checkpoint or a journal entry."""
    try:
        if list_checkpoints(_checkpoint_folder(directory, run_id)):
            return True
        return next(load_journal_entries(directory.runs / run_id / "journal"), None) is not None
    except JournalError:
        return True


def has_only_waited(run_folder: Path) -> bool:
    """Returns whether a run has decided nothing yet: it has no checkpoint, and turns alone in its journal."""
    try:
        if list_checkpoints(run_folder / "checkpoints"):
            return False
        return all(isinstance(entry, TurnStarted) for _, entry in load_journal_entries(run_folder / "journal"))
    except JournalError:
        return False


def can_auto_resume(record: RunRecord, directory: CoordinatorDirectory) -> bool:
    """Returns whether an unfinished run is resumed without the operator.

    Not when it cannot go on exactly, or after more than `MAX_CRASHES` crashes without a checkpoint in between; clean
    stops do not count.
    """
    if not can_resume_exactly(record.run_id, directory):
        return False
    has_crashed = record.status in {RunStatus.RUNNING, RunStatus.STOPPING}
    return not (has_crashed and _has_crashed_too_often(record, directory))


def can_begin_again(record: RunRecord, directory: CoordinatorDirectory) -> bool:
    """Returns whether a run begins again whose coordinator ended before it had a journal or a checkpoint.

    So it was while its task compiled.

    Not after more than `MAX_CRASHES` crashes.
    """
    folder = directory.runs / record.run_id
    if (folder / "journal").exists() or is_started(record.run_id, directory):
        return False
    if record.status is not RunStatus.RUNNING:
        return True
    make_private_directory(directory.runs)
    make_private_directory(folder)
    return not _has_crashed_too_often(record, directory)


def can_auto_finish(record: RunRecord, directory: CoordinatorDirectory) -> bool:
    """Returns whether a run whose coordinator crashed while ending it is finished without the operator.

    Its last checkpoint has the final state and no snapshot, so it is finished in another incarnation. Not after more
    than `MAX_CRASHES` crashes.
    """
    try:
        checkpoint = find_newest_checkpoint(directory, record.run_id)
    except JournalError:  # `can_resume_exactly` has logged it
        return False
    return checkpoint is not None and not checkpoint.snapshot_sha256 and not _has_crashed_too_often(record, directory)


def remove_crash_count(run_id: str, directory: CoordinatorDirectory) -> None:
    """Resets a run's crash count: the operator resumes it, or its coordinator stopped cleanly.

    The status of a run that is to be stopped does not show the latter.
    """
    _crash_count_path(run_id, directory).unlink(missing_ok=True)


def _has_crashed_too_often(record: RunRecord, directory: CoordinatorDirectory) -> bool:
    """Counts a crash since a run last got on; returns whether there are too many."""
    path, last_record = _crash_count_path(record.run_id, directory), _find_progress(record, directory)
    try:
        recorded = parse_json(path.read_bytes())
        count = int(recorded["count"]) + 1 if recorded["record"] == last_record else 1
    except (OSError, ValueError, KeyError, TypeError):
        count = 1
    write_atomic(path, json.dumps({"record": last_record, "count": count}).encode())
    if count > MAX_CRASHES:
        log.error("run %s: the coordinator died %d times since it last got on", record.run_id, count)
    return count > MAX_CRASHES


def _find_progress(record: RunRecord, directory: CoordinatorDirectory) -> int:
    """Returns the journal's record with which a run last got on: that of its newest checkpoint.

    A job has one version, so its checkpoints do not tell: every update of one counts, too.
    """
    checkpoint = find_newest_checkpoint(directory, record.run_id)
    last_record = 0 if checkpoint is None else checkpoint.last_record
    if record.strategy != JOB_STRATEGY:
        return last_record
    entries = load_journal_entries(directory.runs / record.run_id / "journal", after=last_record)
    with contextlib.suppress(JournalError):  # what takes the run up says so
        last_record = max((number for number, entry in entries if isinstance(entry, Update)), default=last_record)
    return last_record


def _crash_count_path(run_id: str, directory: CoordinatorDirectory) -> Path:
    return directory.runs / run_id / "restarts.json"


def _get_guard_state(folder: Path, snapshot: RunSnapshot | None, checkpoint: Checkpoint) -> GuardState:
    """Returns the guard at a checkpoint."""
    if checkpoint.snapshot_sha256:
        return GuardState() if snapshot is None else snapshot.guard
    return load_guard_state(folder)


def _load_snapshot(folder: Path, checkpoint: Checkpoint) -> RunSnapshot:
    try:
        return load_run_snapshot(folder, RunSnapshot, checkpoint)
    except JournalError as error:
        raise ReplayError(str(error)) from error


def _list_entries_after(wal: WalJournal, checkpoint: Checkpoint | None) -> list[JournalEntry]:
    """Returns the journal entries after a checkpoint, all of them if there is none."""
    if checkpoint is None:
        return [entry for _, entry in wal.read_entries()]
    try:
        return [entry for _, entry in wal.read_entries(after=checkpoint.last_record)]
    except JournalError:
        # A finished run pruned all files but the newest, so that with the checkpoint's own mark may be gone.
        return [entry for _, entry in wal.read_entries(after=checkpoint.last_record + 1)]


def _list_used_ids(entries: Sequence[JournalEntry]) -> set[str]:
    return {name for entry in entries if isinstance(entry, Aggregation) for name in entry.assignment_ids}


def _list_trainers(snapshot: RunSnapshot | None, entries: Iterable[JournalEntry]) -> tuple[str, ...]:
    """Returns the trainers that were available last."""
    devices: dict[str, DeviceInfo | None] = dict(snapshot.fleet.devices) if snapshot is not None else {}
    for entry in entries:
        if isinstance(entry, TurnStarted):
            devices |= entry.devices
    return tuple(sorted(name for name, info in devices.items() if info is not None and info.role == Role.TRAINER))


def _create_prior_progress(restored: ProgressAtRollback) -> PriorProgress:
    return PriorProgress(
        work={
            name: DeviceWork(iterations=iterations, num_examples=num_examples)
            for name, iterations, num_examples in restored.work
        },
        updates=restored.num_updates,
        bytes=restored.num_bytes,
        seconds=restored.elapsed_s,
    )


def _load_checkpoint_state(
    strategy: Strategy[Any], directory: CoordinatorDirectory, run_id: str, kind: type[Any], checkpoint: Checkpoint
) -> Any:
    return strategy.resumed(load_state(_checkpoint_folder(directory, run_id), kind, checkpoint))


def _get_state_class(components: RunComponents) -> type[Any]:
    return type(components.strategy.init(components.model))


def _restore_round_size(rounds: RoundCounter, state: Any, store: Store, run_id: str) -> None:
    """Restores the round size, which an asynchronous run takes from the devices that it started with."""
    round_size = getattr(state, "round_size", 0) or count_versions_per_round(store, run_id)
    if rounds.versions_per_round is None and round_size:
        rounds.versions_per_round = round_size


def _create_rollback_point(rounds: RoundCounter, version: int) -> RollbackPoint:
    is_whole = rounds.is_round_end(version)
    return RollbackPoint(
        version=version,
        num_closed_rounds=rounds.count_closed(version),
        open_round=None if is_whole else rounds.get_round(version),
    )


def find_newest_checkpoint(directory: CoordinatorDirectory, run_id: str) -> Checkpoint | None:
    """Returns the newest checkpoint whose files are intact, an older one if the newest is damaged.

    Raises:
        JournalError: there are checkpoints, and none is intact.
    """
    folder = _checkpoint_folder(directory, run_id)
    checkpoints = list_checkpoints(folder)
    for checkpoint in checkpoints:
        damaged = [path for path in list_checkpoint_files(folder, checkpoint) if not is_intact(path)]
        if not damaged:
            return checkpoint
        log.error("run %s: %s is missing or damaged; looking for the checkpoint before", run_id, damaged[0])
    if checkpoints:
        raise JournalError(f"no checkpoint of run {run_id} is whole in {folder}; submit the run again")
    return None


def _checkpoint_folder(directory: CoordinatorDirectory, run_id: str) -> Path:
    return directory.runs / run_id / "checkpoints"
