"""Damage in a run's journal behind its newest checkpoint: named, set aside, and the run goes on from the checkpoint.

Damage means that bytes changed which had been on the disk: a failing card, not a crash, whose torn tail is cut
without loss. What lies before the checkpoint is not read any more, so damage there does not matter.

What is whole before the damage is not followed to its end either. Boards may hold answers to assignments that were
given behind it; whoever went on from the middle would give other work under the same names, and take such an answer
for it: counted, but never asked for. So the run goes on from its checkpoint in another life: everything given behind
it is out again under other names, rows of the history go back with it, and no update is counted twice. Without any
checkpoint it begins anew. Only where no checkpoint is whole it waits for somebody: there is nothing to go on with.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.runs.resuming import newest_checkpoint
from edgefl.coordinator.runs.standing import ANOTHER_LIFE
from edgefl.errors import JournalError
from edgefl.files import make_private_directory, sync_directory, write_whole
from edgefl.storage.journal import begin_journal
from edgefl.storage.journal_reader import files_behind, read_journal
from edgefl.storage.wal import RecordKind, file_number, journal_files

JOURNAL_DAMAGED = "journal-damaged"
"""The event: what is damaged, and what was set aside."""
SET_ASIDE = "damaged"


def set_damage_aside(run_id: str, directory: CoordinatorDirectory) -> str | None:
    """Returns what was damaged and is set aside now, in a line for the operator; None where all is whole.

    Afterwards the journal is empty behind the checkpoint, and the run is marked to go on in another life.

    Raises:
        JournalError: no checkpoint is whole.
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
    files = journal_files(folder)
    aside = files_behind(files, first)
    place = folder / f"{SET_ASIDE}-{file_number(files[-1]):06d}"
    make_private_directory(place)
    num_bytes = sum(path.stat().st_size for path in aside)
    # The new file first: a coordinator that dies here finds the damage again, and no journal that ends too early.
    begin_journal(folder, number=file_number(files[-1]) + 1, first_record=first + 1)
    for path in aside:
        path.rename(place / path.name)
    sync_directory(place)
    sync_directory(folder)
    return (
        f"{str(error).partition(';')[0]}; set aside in {place}: {len(aside)} files of {num_bytes} bytes, before the "
        f"damage {len(whole)} records, {whole.count(RecordKind.UPDATE)} of them updates; what came behind the "
        f"checkpoint of record {after} is asked for again"
    )


def _damage(folder: Path, starts: Sequence[int]) -> tuple[JournalError, list[RecordKind]] | None:
    """Returns what is wrong behind all of these records, and what is whole before that; None for nothing."""
    found: tuple[JournalError, list[RecordKind]] | None = None
    for start in starts:
        whole: list[RecordKind] = []
        try:
            for record in read_journal(folder, after=start):
                whole.append(record.kind)  # noqa: PERF401 what was read before the error counts
        except JournalError as error:
            found = error, whole
        else:
            return None
    return found
