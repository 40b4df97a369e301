"""Journal repair: quarantines damage after a run's newest checkpoint, and resumes the run before it.

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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.execution.recording_fleet import ReplayOnlyFleet
from edgefl.coordinator.execution.replay import ReplayError, RunClock
from edgefl.coordinator.runs.checkpointing import Checkpointer
from edgefl.coordinator.runs.executor import ExecutableRun, RunExecutor
from edgefl.coordinator.runs.history_writer import HistoryWriter
from edgefl.coordinator.runs.model_retention import ModelRetention
from edgefl.coordinator.runs.recovery import ResumableRun, find_newest_checkpoint, restore_before_damage
from edgefl.coordinator.runs.run_snapshot import NEW_INCARNATION_FILE
from edgefl.core.config import RunConfig
from edgefl.core.errors import JournalError
from edgefl.core.types import Strategy
from edgefl.engine.stopping import RoundCounter
from edgefl.storage.journal.file_format import RecordKind, list_journal_files, parse_file_number
from edgefl.storage.journal.reader import list_files_after, read_records
from edgefl.storage.journal.wal_journal import WalJournal, create_journal_file
from edgefl.storage.repositories.records import RunRecord
from edgefl.storage.store import Store
from edgefl.system.atomic_files import make_private_directory, sync_directory, write_atomic

JOURNAL_DAMAGED = "journal-damaged"
"""Event kind: the damage, and the quarantined files."""
JOURNAL_REPLAYED = "journal-followed"
"""Event kind: how far the intact entries before the damage were replayed."""
QUARANTINE_PREFIX = "damaged"


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


class ReplayableRun(ExecutableRun, ResumableRun, Protocol):
    """The part of an assembled run that a replay needs."""

    @property
    def strategy(self) -> Strategy[Any]: ...
    @property
    def rounds(self) -> RoundCounter: ...
    @property
    def config(self) -> RunConfig: ...


def replay_to_damage(
    record: RunRecord,
    components: ReplayableRun,
    directory: CoordinatorDirectory,
    store: Store,
    wal: WalJournal,
    history: HistoryWriter,
) -> str:
    """Replays a truncated journal to its last turn, and writes a checkpoint there.

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
    models = ModelRetention(directory.models, store, record.run_id, components.config.models)
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
