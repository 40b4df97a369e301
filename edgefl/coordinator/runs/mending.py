"""Damage in a run's journal behind its newest checkpoint: named, set aside, and the run goes on before it.

Damage means that bytes changed which had been on the disk: a failing card, not a crash, whose torn tail is cut
without loss. What lies before the checkpoint is not read any more, so damage there does not matter.

What is whole before the damage is followed up to the turn in which the damage lies, and a checkpoint written there.
A turn is the smallest thing that can be followed: of one that is not whole nobody knows what it had decided.

From there the run goes on in another life, not in the same. Boards may hold answers to assignments that were given
behind the damage; whoever went on under the same names would give other work under them, and take such an answer for
it: counted, but never asked for. So everything that was given in that turn and later, or was out by then, is asked
for again under other names, rows of the history go back with it, and no update is counted twice. Where nothing can
be followed the run goes on from the checkpoint that it has; without any it begins anew. Only where no checkpoint is
whole it waits for somebody: there is nothing to go on with.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from edgefl.config import RunConfig
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.dispatch.journaled_fleet import NoBoards
from edgefl.coordinator.dispatch.replay import ReplayError, RunClock
from edgefl.coordinator.runs.driving import Drivable, Driver
from edgefl.coordinator.runs.keeper import Keeper
from edgefl.coordinator.runs.kept_models import ModelKeeper
from edgefl.coordinator.runs.ledger import Ledger
from edgefl.coordinator.runs.resuming import Resumable, followed_before_damage, newest_checkpoint
from edgefl.coordinator.runs.standing import ANOTHER_LIFE
from edgefl.errors import JournalError
from edgefl.files import make_private_directory, sync_directory, write_whole
from edgefl.storage.journal import WalJournal, begin_journal
from edgefl.storage.journal_reader import files_behind, read_journal
from edgefl.storage.records import RunRecord
from edgefl.storage.store import Store
from edgefl.storage.wal import RecordKind, file_number, journal_files
from edgefl.tally import RoundCount
from edgefl.types import Strategy

JOURNAL_DAMAGED = "journal-damaged"
"""The event: what is damaged, and what was set aside."""
JOURNAL_FOLLOWED = "journal-followed"
"""The event: how far the run was brought by what was whole before the damage."""
SET_ASIDE = "damaged"


@dataclass(slots=True)
class _Whole:
    """What is whole behind a record: kinds of records, and where the last of them ends."""

    kinds: list[RecordKind] = field(default_factory=list)
    path: Path | None = None
    end: int = 0


def set_damage_aside(run_id: str, directory: CoordinatorDirectory) -> str | None:
    """Returns what was damaged and is set aside now, in a line for the operator; None where all is whole.

    Afterwards the journal ends before the damage, and the run is marked to go on in another life.

    Raises:
        JournalError: no checkpoint is whole.
        StoreTooNewError: a newer edgefl wrote any of it: nothing is touched.
        StoreFullError: no room; it may be repeated.
    """
    saved = newest_checkpoint(directory, run_id)
    folder, after = directory.runs / run_id / "journal", 0 if saved is None else saved.last_record
    # The first behind a checkpoint is its own mark, which nothing depends on.
    first = 0 if saved is None else after + 1
    found = _damage(folder, sorted({after, first}))
    if found is None:
        return None
    error, whole = found
    write_whole(directory.runs / run_id / ANOTHER_LIFE, b"")
    place = folder / f"{SET_ASIDE}-{file_number(journal_files(folder)[-1]):06d}"
    make_private_directory(place)
    aside = _cut(folder, whole, place) if whole.path is not None else _begin_anew(folder, first, place)
    num_bytes = sum(path.stat().st_size for path in aside)
    return (
        f"{str(error).partition(';')[0]}; set aside in {place}: {len(aside)} files of {num_bytes} bytes; behind the "
        f"checkpoint of record {after} there are {len(whole.kinds)} records before the damage, "
        f"{whole.kinds.count(RecordKind.UPDATE)} of them updates"
    )


class Followable(Drivable, Resumable, Protocol):
    """The part of an assembled run that is needed to follow its journal."""

    @property
    def strategy(self) -> Strategy[Any]: ...
    @property
    def rounds(self) -> RoundCount: ...
    @property
    def config(self) -> RunConfig: ...


def follow_to_damage(
    record: RunRecord,
    made: Followable,
    directory: CoordinatorDirectory,
    store: Store,
    wal: WalJournal,
    ledger: Ledger,
) -> str:
    """Brings a run to the last turn that begins in its journal, which was cut, and writes a checkpoint there.

    Returns:
        How far it came, in a line for the operator.

    Raises:
        ReplayError: it cannot be followed; it has the checkpoint that it had.
        StoreError: as `Driver.drive`; it may be repeated where that passes.
    """
    try:
        before = followed_before_damage(record, made, directory, store, wal)
    except JournalError as error:
        raise ReplayError(str(error)) from error
    if before is None:
        return "goes on from the checkpoint that it had: no turn behind it is whole"
    models = ModelKeeper(directory.models, store, record.run_id, made.config.models)
    try:
        version = Driver(
            made=made,
            before=before,
            wal=wal,
            ledger=ledger,
            keeper=Keeper(directory, record.run_id, wal=wal, ledger=ledger),
            models=models,
            live=NoBoards(),
            clock=RunClock(),
        ).follow()
    finally:
        models.close()
    return f"was followed to version {version} by what was whole; what came behind that is asked for again"


def _damage(folder: Path, starts: Sequence[int]) -> tuple[JournalError, _Whole] | None:
    """Returns what is wrong behind all of these records, and what is whole before that; None for nothing."""
    found: tuple[JournalError, _Whole] | None = None
    for start in starts:
        whole = _Whole()
        try:
            for record in read_journal(folder, after=start):
                whole.kinds.append(record.kind)
                whole.path, whole.end = record.path, record.offset + len(record.body)
        except JournalError as error:
            found = error, whole
        else:
            return None
    return found


def _cut(folder: Path, whole: _Whole, place: Path) -> list[Path]:
    """Ends the journal behind what is whole; returns the files that hold what came after, where they lie now."""
    assert whole.path is not None
    files = journal_files(folder)
    later = files[files.index(whole.path) + 1 :]
    aside = [place / path.name for path in [whole.path] * (whole.path.stat().st_size > whole.end) + later]
    for path in later:
        path.rename(place / path.name)
    if whole.path.stat().st_size > whole.end:
        (place / whole.path.name).unlink(missing_ok=True)
        os.link(whole.path, place / whole.path.name)
        with whole.path.open("rb") as file:
            write_whole(whole.path, file.read(whole.end))
    sync_directory(place)
    sync_directory(folder)
    return aside


def _begin_anew(folder: Path, first: int, place: Path) -> list[Path]:
    """Lets an empty journal begin behind record `first`; returns the files that were there, where they lie now."""
    files = journal_files(folder)
    # The new file first: a coordinator that dies here finds the damage again, and no journal that ends too early.
    begin_journal(folder, number=file_number(files[-1]) + 1, first_record=first + 1)
    aside = files_behind(files, first)
    for path in aside:
        path.rename(place / path.name)
    sync_directory(place)
    sync_directory(folder)
    return [place / path.name for path in aside]
