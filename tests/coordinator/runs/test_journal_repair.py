"""Damaged journals of runs: what is set aside, what is left, and what does not matter."""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.runs.checkpointing import NEW_INCARNATION_FILE, RunSnapshot
from edgefl.coordinator.runs.executor import quarantine_damage
from edgefl.core.errors import JournalError, StoreTooNewError
from edgefl.core.types import Update, UpdateMetrics
from edgefl.storage.checkpoints import FORMAT_VERSION, list_checkpoints, save_state
from edgefl.storage.journal.file_format import HEADER_BYTES, list_journal_files
from edgefl.storage.journal.record_encoding import CheckpointMark, TurnStarted
from edgefl.storage.journal.wal_journal import WalJournal, load_journal_entries

NUM_TURNS = 5


class Run:
    """A journal with a checkpoint in it, or none, and turns and an update on both sides, all of it durable."""

    def __init__(self, root: Path) -> None:
        self.directory = CoordinatorDirectory(root=root, fleet="lab", hosts=())
        self.folder = root / "runs" / "r"
        self.journal = self.folder / "journal"

    def write(self, *, has_checkpoint: bool = True) -> None:
        with WalJournal(self.journal, lambda _: {}) as wal:
            self._turns(wal)
            if has_checkpoint:
                self.checkpoint(wal)
            self._turns(wal)

    def checkpoint(self, wal: WalJournal) -> None:
        wal.sync()
        saved = save_state(self.folder / "checkpoints", RunSnapshot(), wal.last_record)
        wal.record_checkpoint(CheckpointMark(sha256=saved.sha256, last_record=saved.last_record))

    def _turns(self, wal: WalJournal) -> None:
        metrics = UpdateMetrics(iterations=1, num_examples=4)
        tensors: Any = {"w": np.ones(3)}
        wal.record_events(
            [Update(assignment_id="a", device_id="pi", base_version=0, tensors=tensors, metrics=metrics, body=b"x")]
        )
        for number in range(NUM_TURNS):
            wal.record_turn(TurnStarted(now_s=float(number), at=100.0))
            wal.sync()

    def damage(self, path: Path, at: int) -> None:
        content = bytearray(path.read_bytes())
        content[at] ^= 4
        path.write_bytes(content)

    def goes_on(self, *, num_kept: int = 0) -> int:
        """The number of the first record that is written from now on, `num_kept` others behind the checkpoint."""
        saved = list_checkpoints(self.folder / "checkpoints")
        after = saved[0].last_record + 1 if saved else 0
        assert len(list(load_journal_entries(self.journal, after=after))) == num_kept
        with WalJournal(self.journal, lambda _: {}) as wal:
            first = wal.last_record + 1
            wal.record_turn(TurnStarted(now_s=1.0, at=100.0))
            self.checkpoint(wal)
        newest = list_checkpoints(self.folder / "checkpoints")[0]
        assert newest.last_record == first
        assert quarantine_damage("r", self.directory) is None
        return first


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_journal_that_is_whole_is_left_alone(run: Run) -> None:
    assert quarantine_damage("r", run.directory) is None
    run.write()
    before = [path.read_bytes() for path in list_journal_files(run.journal)]
    assert quarantine_damage("r", run.directory) is None
    assert [path.read_bytes() for path in list_journal_files(run.journal)] == before
    assert not (run.folder / NEW_INCARNATION_FILE).exists()


def test_a_torn_tail_is_no_damage(run: Run) -> None:
    run.write()
    with list_journal_files(run.journal)[-1].open("ab") as file:
        file.write(b"half a record")
    assert quarantine_damage("r", run.directory) is None


@pytest.mark.parametrize(
    ("place", "num_kept", "num_updates"),
    [("header", 0, 0), ("first record", 0, 0), ("last but one", NUM_TURNS - 1, 1)],
)
def test_damage_behind_the_checkpoint_is_set_aside_and_what_was_whole_before_it_stays(
    run: Run, place: str, num_kept: int, num_updates: int
) -> None:
    run.write()
    damaged = list_journal_files(run.journal)[-1]
    last_but_one = damaged.read_bytes().rfind(b"\xe5WR\x01", 0, damaged.read_bytes().rfind(b"\xe5WR\x01"))
    run.damage(damaged, {"header": 3, "first record": HEADER_BYTES + 8, "last but one": last_but_one + 8}[place])
    content = damaged.read_bytes()
    told = quarantine_damage("r", run.directory)
    assert told is not None
    assert f"journal {damaged} is damaged at byte" in told
    assert f"{num_kept} records before the damage, {num_updates} of them updates" in told
    assert f"{2 if place == 'header' else 1} files of" in told
    assert next(run.journal.glob(f"damaged-*/{damaged.name}")).read_bytes() == content
    assert (run.folder / NEW_INCARNATION_FILE).exists()
    assert run.goes_on(num_kept=num_kept) == 1 + NUM_TURNS + 2 + num_kept


def test_damage_before_the_checkpoint_does_not_matter(run: Run) -> None:
    run.write()
    for at in (3, HEADER_BYTES + 8):
        run.damage(list_journal_files(run.journal)[0], at)
        assert quarantine_damage("r", run.directory) is None


def test_a_file_that_is_missing_behind_the_checkpoint_is_damage(run: Run) -> None:
    run.write()
    with WalJournal(run.journal, lambda _: {}, max_file_bytes=1) as wal:
        for _ in range(3):
            wal.record_turn(TurnStarted(now_s=1.0, at=100.0))
    missing = list_journal_files(run.journal)[-2]
    missing.unlink()
    assert "is missing" in (quarantine_damage("r", run.directory) or "")
    run.goes_on(num_kept=1 + NUM_TURNS + 1)


@pytest.mark.parametrize("is_folder_left", [False, True])
def test_a_deleted_journal_is_said_and_the_run_goes_on_from_its_checkpoint(run: Run, is_folder_left: bool) -> None:
    run.write()
    shutil.rmtree(run.journal)
    if is_folder_left:
        run.journal.mkdir()
    line = quarantine_damage("r", run.directory)
    assert line is not None
    assert f"journal {run.journal} is missing or empty; what was behind the checkpoint" in line
    assert (run.folder / NEW_INCARNATION_FILE).exists()
    saved = list_checkpoints(run.folder / "checkpoints")[0].last_record
    assert run.goes_on() > saved


def test_a_journal_that_was_cut_shares_no_file_with_what_was_set_aside(run: Run) -> None:
    run.write()
    damaged = list_journal_files(run.journal)[-1]
    run.damage(damaged, damaged.stat().st_size - 120)
    before = damaged.read_bytes()
    assert quarantine_damage("r", run.directory)
    assert before.startswith(damaged.read_bytes())
    with WalJournal(run.journal, lambda _: {}) as wal:
        wal.record_turn(TurnStarted(now_s=1.0, at=100.0))
    assert next(run.journal.glob(f"damaged-*/{damaged.name}")).read_bytes() == before


def test_without_a_checkpoint_the_journal_begins_anew(run: Run) -> None:
    run.write(has_checkpoint=False)
    run.damage(list_journal_files(run.journal)[0], HEADER_BYTES + 8)
    assert quarantine_damage("r", run.directory)
    assert run.goes_on() == 1


def newer(run: Run, what: str) -> None:
    """As a newer edgefl leaves it: whole, and of a later format."""
    if what == "a checkpoint's note":
        [note] = (run.folder / "checkpoints").glob("*.json")
        note.write_text(note.read_text().replace(f'"v": {FORMAT_VERSION}', f'"v": {FORMAT_VERSION + 1}'))
        return
    path = list_journal_files(run.journal)[0 if what == "the oldest file" else -1]
    content = bytearray(path.read_bytes())
    content[8] += 1
    content[HEADER_BYTES - 4 : HEADER_BYTES] = zlib.crc32(content[: HEADER_BYTES - 4]).to_bytes(4, "little")
    path.write_bytes(content)


@pytest.mark.parametrize("what", ["the oldest file", "the newest file", "a checkpoint's note"])
def test_what_a_newer_edgefl_wrote_is_not_damage_and_nothing_is_touched(run: Run, what: str) -> None:
    run.write()
    with WalJournal(run.journal, lambda _: {}, max_file_bytes=1) as wal:
        for _ in range(3):
            wal.record_turn(TurnStarted(now_s=1.0, at=100.0))
    list_journal_files(run.journal)[-2].unlink()  # damage, which it would be set aside for
    newer(run, what)
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    with pytest.raises(
        StoreTooNewError, match=f"has format {FORMAT_VERSION + 1}, this program reads {FORMAT_VERSION}"
    ):
        quarantine_damage("r", run.directory)
    assert {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()} == before


def test_where_no_checkpoint_is_whole_nothing_is_touched(run: Run) -> None:
    run.write()
    run.damage(list_journal_files(run.journal)[-1], HEADER_BYTES + 8)
    [state] = (run.folder / "checkpoints").glob("*.safetensors")
    run.damage(state, 20)
    with pytest.raises(JournalError, match="no checkpoint of run r is whole"):
        quarantine_damage("r", run.directory)
    assert list(run.journal.glob("damaged-*")) == []
