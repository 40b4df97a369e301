"""Takes up a run again: from its newest checkpoint, with its history as it was then."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.dispatch.lives import FIRST, Lives
from edgefl.coordinator.dispatch.replay import ReplayError, Script, has_turns, up_to_last_turn
from edgefl.coordinator.runs.recorder import TOLD
from edgefl.coordinator.runs.standing import ANOTHER_LIFE, LIVES, GuardStanding, Standing, load_guard
from edgefl.errors import JournalError, UsageError
from edgefl.files import write_whole
from edgefl.storage.checkpoints import (
    Checkpoint,
    checkpoint_files,
    checkpoints,
    is_whole,
    load_standing,
    load_state,
)
from edgefl.storage.journal import WalJournal, journal_entries
from edgefl.storage.journal_records import Aggregated, Entry, Turn
from edgefl.storage.records import RunRecord, RunStatus, UpdateRow
from edgefl.storage.rewinding import (
    Mark,
    SoFar,
    counted_so_far,
    forget_told,
    lives_by_time,
    rewind,
    unused_updates,
    versions_per_round,
)
from edgefl.storage.store import Store
from edgefl.storage.wal import journal_files, read_header
from edgefl.tally import Earlier, RoundCount
from edgefl.types import Decision, DeviceInfo, Recall, Role, Strategy, Tensors
from edgefl.untrusted import parse_json

log = logging.getLogger(__name__)

MAX_DEATHS = 5
"""A run of which the coordinator died more often since its newest checkpoint waits until somebody resumes it."""
RESUMABLE = frozenset({RunStatus.INTERRUPTED, RunStatus.STOPPED})


class Resumable(Protocol):
    """The part of an assembled run that goes on."""

    @property
    def model(self) -> Tensors: ...
    @property
    def strategy(self) -> Strategy[Any]: ...
    @property
    def rounds(self) -> RoundCount: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What a run begins or goes on with: the state, under which ids it gives work, and what was counted before.

    `goes_on` says that there was something before; `devices` took part in the newest round, and are given a moment to
    come back; `guard` is what the run's guard knew, for a run that goes on in another life. With a `standing` it goes
    on exactly where it was, and the `script` says what happened after that.
    """

    state: Any
    lives: Lives
    earlier: Earlier = field(default_factory=Earlier)
    unused: tuple[UpdateRow, ...] = ()
    devices: tuple[str, ...] = ()
    guard: GuardStanding = field(default_factory=GuardStanding)
    goes_on: bool = False
    standing: Standing | None = None
    script: Script = field(default_factory=Script)

    @property
    def is_exact(self) -> bool:
        """Whether the run goes on exactly where it was."""
        return self.standing is not None or not self.script.is_over


def check_resumable(record: RunRecord, directory: CoordinatorDirectory, assemble: Callable[[], Resumable]) -> None:
    """Makes sure that a run can go on, before anything of it changes.

    Raises:
        UsageError: it is not over, or there is nothing to go on with.
        EdgeflError: it cannot be assembled any more, or its checkpoint cannot be read.
    """
    check_formats(record.run_id, directory)
    if record.status not in RESUMABLE:
        raise UsageError(
            f"run {record.run_id} is {record.status}; only a run that was interrupted or stopped can be resumed"
        )
    saved = newest_checkpoint(directory, record.run_id)
    if record.status is RunStatus.STOPPED and saved is None:
        raise UsageError(f"run {record.run_id} was stopped before it had a checkpoint; submit it again")
    made = assemble()
    if saved is not None:
        load_state(_folder(directory, record.run_id), _state_class(made), saved)


def resumed_state(
    record: RunRecord, made: Resumable, directory: CoordinatorDirectory, store: Store, wal: WalJournal
) -> Resumed:
    """Returns what a run begins with; one that is taken up again goes on from its newest checkpoint.

    Its rows become those of the checkpoint: rounds behind it are done again. A run whose devices went on by
    themselves keeps all rows, and its ids are new by the state's own count.

    Raises:
        JournalError: the checkpoint or the journal behind it cannot be read.
    """
    run_id, strategy = record.run_id, made.strategy
    first, saved = strategy.init(made.model), newest_checkpoint(directory, record.run_id)
    went_on_alone = bool(getattr(strategy, "goes_on_alone", False)) and not record.resumes
    if not record.resumes and not (went_on_alone and saved is not None):
        return Resumed(state=first, lives=Lives(run_id))
    state = first if saved is None else _loaded(strategy, directory, run_id, type(first), saved)
    if went_on_alone:
        log.info("run %s goes on from its last checkpoint", run_id)
        return Resumed(
            state=state,
            lives=Lives(run_id),
            earlier=_earlier(counted_so_far(store, run_id)),
            guard=load_guard(directory.runs / run_id),
            goes_on=True,
        )
    _know_rounds(made.rounds, state, store, run_id)
    mark = _mark(made.rounds, strategy.version(state))
    behind = [] if saved is None else _behind(lambda after: wal.entries(after=after), saved)
    standing, since, another = None, None, directory.runs / run_id / ANOTHER_LIFE
    if saved is not None and saved.standing:
        with contextlib.suppress(ReplayError):
            standing = _standing(_folder(directory, run_id), saved)
        # The journal may lack what was set aside since it was damaged: the rows know what they are.
        since = _saved_at(_folder(directory, run_id), saved, standing) if another.exists() else None
    so_far = rewind(store, run_id, mark, behind, now=time.time(), since=since, keeps_nothing=saved is None)
    has_standing = saved is not None and bool(saved.standing)
    written = _written(standing) if has_standing else _written_at_end(record, directory)
    log.info("run %s goes on behind version %d, round %d", run_id, mark.version, mark.closed)
    return Resumed(
        state=state,
        lives=Lives(run_id, record.resumes, dict(so_far.lives) if written is None else written),
        earlier=_earlier(so_far),
        unused=so_far.unused,
        devices=so_far.devices,
        guard=GuardStanding() if saved is None else _guard(directory.runs / run_id, standing, saved),
        goes_on=saved is not None,
    )


def resumed_exactly(
    record: RunRecord, made: Resumable, directory: CoordinatorDirectory, store: Store, wal: WalJournal
) -> Resumed | None:
    """Returns what a run goes on with where its coordinator ended, in the middle of a round too.

    None for a run that begins, and for one whose journal does not say what the loop saw.

    Raises:
        ReplayError: what stands beside the checkpoint's state cannot be read; the run can go on from that, in another
            life.
        JournalError: no checkpoint is whole, or the journal behind it cannot be read.
    """
    if (directory.runs / record.run_id / ANOTHER_LIFE).exists():
        return None
    return _exactly(record, made, directory, store, wal, lambda entries: entries)


def followed_before_damage(
    record: RunRecord, made: Resumable, directory: CoordinatorDirectory, store: Store, wal: WalJournal
) -> Resumed | None:
    """Returns what brings a run to the last turn that begins in its journal, which ends too early.

    None for a run that cannot be followed, or not any further than its checkpoint.

    Raises:
        JournalError: no checkpoint is whole.
    """
    found = _exactly(record, made, directory, store, wal, up_to_last_turn)
    return None if found is None or found.script.is_over or found.script.ends_with_next_turn else found


def _exactly(
    record: RunRecord,
    made: Resumable,
    directory: CoordinatorDirectory,
    store: Store,
    wal: WalJournal,
    known: Callable[[Sequence[Entry]], Sequence[Entry]],
) -> Resumed | None:
    run_id, strategy = record.run_id, made.strategy
    if getattr(strategy, "goes_on_alone", False):
        return None
    first, saved, standing = strategy.init(made.model), newest_checkpoint(directory, run_id), None
    state = first
    if saved is None and record.resumes:
        return None
    if saved is not None:
        if not saved.standing:
            return None
        state = load_state(_folder(directory, run_id), type(first), saved)
        standing = _standing(_folder(directory, run_id), saved)
    behind = known(_entries_behind(wal, saved))
    if not has_turns(iter(behind)) or (saved is None and not behind):
        return None
    forget_told(store, run_id, TOLD, since=standing.fleet.at if standing is not None else 0.0)
    log.info("run %s goes on where it was, behind version %d", run_id, strategy.version(state))
    return Resumed(
        state=state,
        lives=_lives(record, standing, behind, store),
        unused=unused_updates(store, run_id, _used(behind)),
        devices=_trainers(standing, behind),
        goes_on=True,
        standing=standing,
        script=Script(behind),
    )


def _lives(record: RunRecord, standing: Standing | None, behind: Sequence[Entry], store: Store) -> Lives:
    """Returns the lives of all that was given, for a run that goes on where it was: in the life that it was in.

    By the checkpoint and the journal. Rows are asked, and clocks compared, only for what was given by an edgefl that
    wrote down neither.
    """
    life = FIRST if standing is None else standing.fleet.life
    written, is_known = _written(standing) or {}, life is not None
    for entry in behind:
        if isinstance(entry, Turn):
            life = entry.life
            is_known = is_known and life is not None
        elif isinstance(entry, Decision) and life is not None:
            given = [order.assignment_id for order in entry.orders if not isinstance(order, Recall)]
            for name in given:
                written.pop(name, None)
                written[name] = life
    by_time = {} if is_known or not record.resumes else lives_by_time(store, record.run_id)
    return Lives(record.run_id, record.resumes if life is None else life, {**by_time, **written})


def _written(standing: Standing | None) -> dict[str, int] | None:
    """Returns the lives that a checkpoint knows; None where it does not say anything of that."""
    if standing is None or standing.fleet.life is None:
        return None
    return {name: life for life, names in standing.fleet.lives.items() for name in names}


def _written_at_end(record: RunRecord, directory: CoordinatorDirectory) -> dict[str, int] | None:
    """Returns the lives of what was given before the end of a run; None where nobody wrote them down."""
    try:
        told = parse_json((directory.runs / record.run_id / LIVES).read_bytes())
        return {name: int(life) for life, names in told.items() for name in names}
    except FileNotFoundError:
        return {} if record.resumes == 1 else None  # there was but the first
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("run %s: %s cannot be read, rows and times take its place: %r", record.run_id, LIVES, error)
        return None


def check_formats(run_id: str, directory: CoordinatorDirectory) -> None:
    """Makes sure that no newer edgefl went on with a run: what is unknown must not pass for damage.

    Raises:
        StoreTooNewError: one did.
    """
    checkpoints(_folder(directory, run_id))
    for path in journal_files(directory.runs / run_id / "journal"):
        read_header(path)


def goes_on_exactly(run_id: str, directory: CoordinatorDirectory) -> bool:
    """Returns whether a run that nobody drives can go on where it was; cheap, and nothing is changed."""
    if (directory.runs / run_id / ANOTHER_LIFE).exists():
        return False
    try:
        saved = newest_checkpoint(directory, run_id)
    except JournalError as error:
        log.error("run %s: %s", run_id, error)  # noqa: TRY400 a line for the operator, no bug of ours
        return False
    if saved is not None:
        return bool(saved.standing)
    try:
        entries = journal_entries(directory.runs / run_id / "journal")
        return isinstance(next((entry for _, entry in entries), None), Turn)
    except JournalError:
        return True  # whoever takes the run up sets the damage aside, and it begins anew by itself


def has_begun(run_id: str, directory: CoordinatorDirectory) -> bool:
    """Returns whether anything was written down of what a run did."""
    try:
        if checkpoints(_folder(directory, run_id)):
            return True
        return next(journal_entries(directory.runs / run_id / "journal"), None) is not None
    except JournalError:
        return True


def may_go_on(record: RunRecord, directory: CoordinatorDirectory) -> bool:
    """Returns whether a run that its coordinator left behind goes on by itself.

    Not when it cannot go on exactly, or when its coordinators died of it again and again without a checkpoint in
    between; those that were stopped in good order do not count.
    """
    if not goes_on_exactly(record.run_id, directory):
        return False
    has_died = record.status in {RunStatus.RUNNING, RunStatus.STOPPING}
    return not (has_died and _died_too_often(record, directory))


def may_end(record: RunRecord, directory: CoordinatorDirectory) -> bool:
    """Returns whether a run, whose coordinator died while it wrote down the run's end, comes to it by itself.

    Its last checkpoint has the final state and says nothing of a round under way, so it does so in another life. Not
    when its coordinators died of that again and again.
    """
    try:
        saved = newest_checkpoint(directory, record.run_id)
    except JournalError:  # `goes_on_exactly` has said so
        return False
    return saved is not None and not saved.standing and not _died_too_often(record, directory)


def forget_death(run_id: str, directory: CoordinatorDirectory) -> None:
    """Counts a run's deaths anew: somebody resumes it, or its coordinator ended in good order.

    The status of a run that is to be stopped does not say the latter.
    """
    _deaths_note(run_id, directory).unlink(missing_ok=True)


def _died_too_often(record: RunRecord, directory: CoordinatorDirectory) -> bool:
    """Counts one more death of a coordinator since the newest checkpoint of a run."""
    note, kept = _deaths_note(record.run_id, directory), newest_checkpoint(directory, record.run_id)
    behind = 0 if kept is None else kept.last_record
    try:
        known = parse_json(note.read_bytes())
        count = int(known["count"]) + 1 if known["checkpoint"] == behind else 1
    except (OSError, ValueError, KeyError, TypeError):
        count = 1
    write_whole(note, json.dumps({"checkpoint": behind, "count": count}).encode())
    if count > MAX_DEATHS:
        log.error("run %s: the coordinator died %d times since its newest checkpoint", record.run_id, count)
    return count > MAX_DEATHS


def _deaths_note(run_id: str, directory: CoordinatorDirectory) -> Path:
    return directory.runs / run_id / "restarts.json"


def _guard(folder: Path, standing: Standing | None, saved: Checkpoint) -> GuardStanding:
    """Returns what the guard knew at a checkpoint."""
    if saved.standing:
        return GuardStanding() if standing is None else standing.guard
    return load_guard(folder)


def _standing(folder: Path, saved: Checkpoint) -> Standing:
    try:
        return load_standing(folder, Standing, saved)
    except JournalError as error:
        raise ReplayError(str(error)) from error


def _saved_at(folder: Path, saved: Checkpoint, standing: Standing | None) -> float:
    """Returns when a checkpoint with a standing was written; by its file where the standing cannot be read."""
    if standing is not None:
        return standing.fleet.at
    return checkpoint_files(folder, saved)[-1].stat().st_mtime


def _entries_behind(wal: WalJournal, saved: Checkpoint | None) -> list[Entry]:
    if saved is None:
        return [entry for _, entry in wal.entries()]
    return _behind(lambda after: wal.entries(after=after), saved)


def _used(behind: Sequence[Entry]) -> set[str]:
    return {name for entry in behind if isinstance(entry, Aggregated) for name in entry.assignment_ids}


def _trainers(standing: Standing | None, behind: Sequence[Entry]) -> tuple[str, ...]:
    """Returns who could work last."""
    devices: dict[str, DeviceInfo | None] = dict(standing.fleet.devices) if standing is not None else {}
    for entry in behind:
        if isinstance(entry, Turn):
            devices |= entry.devices
    return tuple(sorted(name for name, info in devices.items() if info is not None and info.role == Role.TRAINER))


def _earlier(so_far: SoFar) -> Earlier:
    return Earlier(updates=so_far.updates, bytes=so_far.bytes, seconds=so_far.seconds)


def _loaded(
    strategy: Strategy[Any], directory: CoordinatorDirectory, run_id: str, kind: type[Any], saved: Checkpoint
) -> Any:
    state = load_state(_folder(directory, run_id), kind, saved)
    forget_what_was_out: Callable[[Any], Any] | None = getattr(strategy, "resumed", None)
    return state if forget_what_was_out is None else forget_what_was_out(state)


def _behind(entries: Callable[[int], Iterator[tuple[int, Entry]]], saved: Checkpoint) -> list[Entry]:
    """Returns what the journal has behind a checkpoint; `entries` reads it behind a record."""
    try:
        return [entry for _, entry in entries(saved.last_record)]
    except JournalError:
        # A run that came to its end let go of all files but the newest, that with the checkpoint's own mark as well.
        return [entry for _, entry in entries(saved.last_record + 1)]


def _state_class(made: Resumable) -> type[Any]:
    return type(made.strategy.init(made.model))


def _know_rounds(rounds: RoundCount, state: Any, store: Store, run_id: str) -> None:
    """Makes rounds as long as they were: an asynchronous run takes that from the devices that it began with."""
    known = getattr(state, "round_size", 0) or versions_per_round(store, run_id)
    if rounds.versions_per_round is None and known:
        rounds.versions_per_round = known


def _mark(rounds: RoundCount, version: int) -> Mark:
    is_whole = rounds.ends_at(version)
    return Mark(version=version, closed=rounds.closed(version), open_round=None if is_whole else rounds.of(version))


def newest_checkpoint(directory: CoordinatorDirectory, run_id: str) -> Checkpoint | None:
    """Returns the newest checkpoint whose files are there and whole; those before the newest are good as well."""
    folder = _folder(directory, run_id)
    saved = checkpoints(folder)
    for checkpoint in saved:
        damaged = [path for path in checkpoint_files(folder, checkpoint) if not is_whole(path)]
        if not damaged:
            return checkpoint
        log.error("run %s: %s is missing or damaged; looking for the checkpoint before", run_id, damaged[0])
    if saved:
        raise JournalError(f"no checkpoint of run {run_id} is whole in {folder}; submit the run again")
    return None


def _folder(directory: CoordinatorDirectory, run_id: str) -> Path:
    return directory.runs / run_id / "checkpoints"
