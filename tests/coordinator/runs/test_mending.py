"""Damaged journals of runs: what is set aside, what is left, and what does not matter."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.runs.mending import set_damage_aside
from edgefl.coordinator.runs.standing import ANOTHER_LIFE, Standing
from edgefl.errors import JournalError, StoreTooNewError
from edgefl.storage.checkpoints import checkpoints, save_state
from edgefl.storage.journal import WalJournal, journal_entries
from edgefl.storage.journal_records import CheckpointMark, Turn
from edgefl.storage.wal import HEADER_BYTES, journal_files
from edgefl.types import Update, UpdateMetrics

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
        saved = save_state(self.folder / "checkpoints", Standing(), wal.last_record)
        wal.checkpointed(CheckpointMark(sha256=saved.sha256, last_record=saved.last_record))

    def _turns(self, wal: WalJournal) -> None:
        metrics = UpdateMetrics(iterations=1, num_examples=4)
        tensors: Any = {"w": np.ones(3)}
        wal.received(
            [Update(assignment_id="a", device_id="pi", base_version=0, tensors=tensors, metrics=metrics, body=b"x")]
        )
        for number in range(NUM_TURNS):
            wal.turned(Turn(now_s=float(number), at=100.0))
            wal.sync()

    def damage(self, path: Path, at: int) -> None:
        content = bytearray(path.read_bytes())
        content[at] ^= 4
        path.write_bytes(content)

    def goes_on(self, *, num_kept: int = 0) -> int:
        """The number of the first record that is written from now on, `num_kept` others behind the checkpoint."""
        saved = checkpoints(self.folder / "checkpoints")
        after = saved[0].last_record + 1 if saved else 0
        assert len(list(journal_entries(self.journal, after=after))) == num_kept
        with WalJournal(self.journal, lambda _: {}) as wal:
            first = wal.last_record + 1
            wal.turned(Turn(now_s=1.0, at=100.0))
            self.checkpoint(wal)
        newest = checkpoints(self.folder / "checkpoints")[0]
        assert newest.last_record == first
        assert set_damage_aside("r", self.directory) is None
        return first


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_journal_that_is_whole_is_left_alone(run: Run) -> None:
    assert set_damage_aside("r", run.directory) is None
    run.write()
    before = [path.read_bytes() for path in journal_files(run.journal)]
    assert set_damage_aside("r", run.directory) is None
    assert [path.read_bytes() for path in journal_files(run.journal)] == before
    assert not (run.folder / ANOTHER_LIFE).exists()


def test_a_torn_tail_is_no_damage(run: Run) -> None:
    run.write()
    with journal_files(run.journal)[-1].open("ab") as file:
        file.write(b"half a record")
    assert set_damage_aside("r", run.directory) is None


@pytest.mark.parametrize(
    ("place", "num_kept", "num_updates"),
    [("header", 0, 0), ("first record", 0, 0), ("last but one", NUM_TURNS - 1, 1)],
)
def test_damage_behind_the_checkpoint_is_set_aside_and_what_was_whole_before_it_stays(
    run: Run, place: str, num_kept: int, num_updates: int
) -> None:
    run.write()
    damaged = journal_files(run.journal)[-1]
    last_but_one = damaged.read_bytes().rfind(b"\xe5WR\x01", 0, damaged.read_bytes().rfind(b"\xe5WR\x01"))
    run.damage(damaged, {"header": 3, "first record": HEADER_BYTES + 8, "last but one": last_but_one + 8}[place])
    content = damaged.read_bytes()
    told = set_damage_aside("r", run.directory)
    assert told is not None
    assert f"journal {damaged} is damaged at byte" in told
    assert f"{num_kept} records before the damage, {num_updates} of them updates" in told
    assert f"{2 if place == 'header' else 1} files of" in told
    assert next(run.journal.glob(f"damaged-*/{damaged.name}")).read_bytes() == content
    assert (run.folder / ANOTHER_LIFE).exists()
    assert run.goes_on(num_kept=num_kept) == 1 + NUM_TURNS + 2 + num_kept


def test_damage_before_the_checkpoint_does_not_matter(run: Run) -> None:
    run.write()
    for at in (3, HEADER_BYTES + 8):
        run.damage(journal_files(run.journal)[0], at)
        assert set_damage_aside("r", run.directory) is None


def test_a_file_that_is_missing_behind_the_checkpoint_is_damage(run: Run) -> None:
    run.write()
    with WalJournal(run.journal, lambda _: {}, max_file_bytes=1) as wal:
        for _ in range(3):
            wal.turned(Turn(now_s=1.0, at=100.0))
    missing = journal_files(run.journal)[-2]
    missing.unlink()
    assert "is missing" in (set_damage_aside("r", run.directory) or "")
    run.goes_on(num_kept=1 + NUM_TURNS + 1)


def test_a_journal_that_was_cut_shares_no_file_with_what_was_set_aside(run: Run) -> None:
    run.write()
    damaged = journal_files(run.journal)[-1]
    run.damage(damaged, damaged.stat().st_size - 120)
    before = damaged.read_bytes()
    assert set_damage_aside("r", run.directory)
    assert before.startswith(damaged.read_bytes())
    with WalJournal(run.journal, lambda _: {}) as wal:
        wal.turned(Turn(now_s=1.0, at=100.0))
    assert next(run.journal.glob(f"damaged-*/{damaged.name}")).read_bytes() == before


def test_without_a_checkpoint_the_journal_begins_anew(run: Run) -> None:
    run.write(has_checkpoint=False)
    run.damage(journal_files(run.journal)[0], HEADER_BYTES + 8)
    assert set_damage_aside("r", run.directory)
    assert run.goes_on() == 1


def newer(run: Run, what: str) -> None:
    """As a newer edgefl leaves it: whole, and of a later format."""
    if what == "a checkpoint's note":
        [note] = (run.folder / "checkpoints").glob("*.json")
        note.write_text(note.read_text().replace('"v": 1', '"v": 2'))
        return
    path = journal_files(run.journal)[0 if what == "the oldest file" else -1]
    content = bytearray(path.read_bytes())
    content[8] = 2
    content[HEADER_BYTES - 4 : HEADER_BYTES] = zlib.crc32(content[: HEADER_BYTES - 4]).to_bytes(4, "little")
    path.write_bytes(content)


@pytest.mark.parametrize("what", ["the oldest file", "the newest file", "a checkpoint's note"])
def test_what_a_newer_edgefl_wrote_is_not_damage_and_nothing_is_touched(run: Run, what: str) -> None:
    run.write()
    with WalJournal(run.journal, lambda _: {}, max_file_bytes=1) as wal:
        for _ in range(3):
            wal.turned(Turn(now_s=1.0, at=100.0))
    journal_files(run.journal)[-2].unlink()  # damage, which it would be set aside for
    newer(run, what)
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    with pytest.raises(StoreTooNewError, match="has format 2, this program knows 1"):
        set_damage_aside("r", run.directory)
    assert {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()} == before


def test_where_no_checkpoint_is_whole_nothing_is_touched(run: Run) -> None:
    run.write()
    run.damage(journal_files(run.journal)[-1], HEADER_BYTES + 8)
    [state] = (run.folder / "checkpoints").glob("*.safetensors")
    run.damage(state, 20)
    with pytest.raises(JournalError, match="no checkpoint of run r is whole"):
        set_damage_aside("r", run.directory)
    assert list(run.journal.glob("damaged-*")) == []
