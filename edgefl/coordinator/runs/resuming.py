"""Takes up a run again: from its newest checkpoint, with its history as it was then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.dispatch.lives import Lives
from edgefl.errors import JournalError, UsageError
from edgefl.storage.checkpoints import Checkpoint, checkpoints, load_state
from edgefl.storage.journal import WalJournal, journal_entries
from edgefl.storage.journal_records import Entry
from edgefl.storage.records import RunRecord, RunStatus, UpdateRow
from edgefl.storage.rewinding import Mark, SoFar, counted_so_far, rewind, versions_per_round
from edgefl.storage.store import Store
from edgefl.tally import Earlier, RoundCount
from edgefl.types import Strategy, Tensors

log = logging.getLogger(__name__)

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
    come back.
    """

    state: Any
    lives: Lives
    earlier: Earlier = field(default_factory=Earlier)
    unused: tuple[UpdateRow, ...] = ()
    devices: tuple[str, ...] = ()
    goes_on: bool = False


def check_resumable(record: RunRecord, directory: CoordinatorDirectory, assemble: Callable[[], Resumable]) -> None:
    """Makes sure that a run can go on, before anything of it changes.

    Raises:
        UsageError: it is not over, or there is nothing to go on with.
        EdgeflError: it cannot be assembled any more, or its checkpoint cannot be read.
    """
    if record.status not in RESUMABLE:
        raise UsageError(
            f"run {record.run_id} is {record.status}; only a run that was interrupted or stopped can be resumed"
        )
    saved = _newest(directory, record.run_id)
    if record.status is RunStatus.STOPPED and saved is None:
        raise UsageError(f"run {record.run_id} was stopped before it had a checkpoint; submit it again")
    made = assemble()
    if saved is not None:
        load_state(_folder(directory, record.run_id), _state_class(made), saved)
        # Only read: to open it for writing would cut what somebody who was faster has begun to append.
        _behind(lambda after: journal_entries(directory.runs / record.run_id / "journal", after=after), saved)


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
    first, saved = strategy.init(made.model), _newest(directory, record.run_id)
    went_on_alone = bool(getattr(strategy, "goes_on_alone", False)) and not record.resumes
    if not record.resumes and not (went_on_alone and saved is not None):
        return Resumed(state=first, lives=Lives(run_id))
    state = first if saved is None else _loaded(strategy, directory, run_id, type(first), saved)
    if went_on_alone:
        log.info("run %s goes on from its last checkpoint", run_id)
        return Resumed(
            state=state, lives=Lives(run_id), earlier=_earlier(counted_so_far(store, run_id)), goes_on=True
        )
    _know_rounds(made.rounds, state, store, run_id)
    mark = _mark(made.rounds, strategy.version(state))
    behind = [] if saved is None else _behind(lambda after: wal.entries(after=after), saved)
    so_far = rewind(store, run_id, mark, behind, now=time.time(), keeps_nothing=saved is None)
    log.info("run %s goes on behind version %d, round %d", run_id, mark.version, mark.closed)
    return Resumed(
        state=state,
        lives=Lives(run_id, record.resumes, dict(so_far.lives)),
        earlier=_earlier(so_far),
        unused=so_far.unused,
        devices=so_far.devices,
        goes_on=saved is not None,
    )


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


def _newest(directory: CoordinatorDirectory, run_id: str) -> Checkpoint | None:
    """Returns the newest checkpoint whose file is there and whole."""
    folder = _folder(directory, run_id)
    saved = checkpoints(folder)
    if not saved:
        return None
    if not (folder / f"{saved[0].sha256}.safetensors").is_file():
        raise JournalError(f"the checkpoint of run {run_id} is missing in {folder}; submit the run again")
    return saved[0]


def _folder(directory: CoordinatorDirectory, run_id: str) -> Path:
    return directory.runs / run_id / "checkpoints"
