"""When the state of a run is written down while it goes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from synced_wal import SyncedWal

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.runs import checkpointing as keeping
from edgefl.coordinator.runs.checkpointing import (
    CHECKPOINT_EVERY_VERSIONS,
    MAX_CHECKPOINT_INTERVAL_S,
    MIN_CHECKPOINT_INTERVAL_S,
    PRIVACY_FILE,
    Checkpointer,
    close_spend_recorder,
    open_spend_recorder,
)
from edgefl.coordinator.runs.history_writer import EventRow, HistoryWriter
from edgefl.core.errors import JournalError
from edgefl.engine.progress import PriorProgress
from edgefl.storage.checkpoints import save_state
from edgefl.storage.journal.wal_journal import WalJournal
from edgefl.storage.state_serialisation import decode_state
from edgefl.storage.store import Store
from edgefl.strategies.private_mean import PrivacySpend, SpendRecorder


class Site:
    def __init__(self, **options: Any) -> None:
        self.now_s = 1000.0
        directory: Any = SimpleNamespace(runs=Path("unused"))
        assert "runs" in vars(CoordinatorDirectory)
        nothing: Any = None
        self.keeper = Checkpointer(
            directory, "run-1", wal=nothing, history=nothing, clock=lambda: self.now_s, **options
        )
        self.keeper.start(0)


@pytest.fixture
def site() -> Site:
    return Site()


def test_a_long_round_is_kept_when_it_is_over_and_not_in_its_middle(site: Site) -> None:
    site.now_s += MAX_CHECKPOINT_INTERVAL_S - 1
    assert not site.keeper.is_due(0)
    assert not site.keeper.is_due(1), "it is too early"
    site.now_s += 2
    assert not site.keeper.is_due(1), "updates of the next round wait already"
    assert site.keeper.is_due(2)
    assert not site.keeper.is_due(2)


def test_short_rounds_are_kept_by_the_tenth_and_not_too_often(site: Site) -> None:
    due = []
    for version in range(1, 4 * CHECKPOINT_EVERY_VERSIONS):
        site.now_s += MIN_CHECKPOINT_INTERVAL_S / CHECKPOINT_EVERY_VERSIONS
        if site.keeper.is_due(version):
            due.append(version)
            site.keeper._saved_s = site.now_s
    assert due == [CHECKPOINT_EVERY_VERSIONS, 2 * CHECKPOINT_EVERY_VERSIONS, 3 * CHECKPOINT_EVERY_VERSIONS]


def test_every_version_is_kept_where_that_is_asked_for() -> None:
    site = Site(is_every_version_due=True)
    assert [site.keeper.is_due(version) for version in (0, 1, 1, 2)] == [False, True, False, True]


def test_what_another_life_must_not_do_again_is_kept_at_once(site: Site) -> None:
    site.keeper.start(5, is_due_now=True)
    assert site.keeper.is_due(5)
    assert not site.keeper.is_due(5)


def test_a_run_that_goes_on_is_kept_at_its_first_new_version_and_not_where_it_was(site: Site) -> None:
    site.keeper.start(5, is_due_soon=True)
    assert [site.keeper.is_due(version) for version in (8, 8, 9, 9, 10)] == [False, False, True, False, False]


@pytest.mark.parametrize("is_written", [False, True], ids=["by the checkpoint", "just before by another thread"])
def test_rows_are_on_disk_before_the_checkpoint_is(
    is_written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, seen = CoordinatorDirectory(root=tmp_path, fleet="lab", hosts=()), list[bool]()
    with (
        Store.open(tmp_path / "edgefl.db") as store,
        WalJournal(directory.runs / "r" / "journal", lambda body: {}) as wal,
    ):
        store.add_run(run_id="r", name="n", task="t", strategy="s", config={}, seed=1, submitted_at=1.0)
        synced, recorder, save = SyncedWal(store, monkeypatch), HistoryWriter(store, "r"), keeping.save_state
        monkeypatch.setattr(keeping, "save_state", lambda *args: (seen.append(synced.is_whole), save(*args))[1])
        recorder.add_event(EventRow(kind="hello", device_id=None, message="m", at=2.0))
        if is_written:
            recorder.publish()
            recorder.flush()
            assert not synced.is_whole
        Checkpointer(directory, "r", wal=wal, history=recorder).save(PriorProgress(updates=1, bytes=2, seconds=3.0))
    assert seen == [True]


def make_recorder() -> SpendRecorder:
    return SpendRecorder(spend=PrivacySpend(key=b"k" * 32))


def test_what_a_private_run_has_released_comes_back_as_it_was(tmp_path: Path) -> None:
    first, again = make_recorder(), make_recorder()
    open_spend_recorder(tmp_path / "r", first)
    first.record(1, b"one")
    first.record(2, b"two")
    first.restart(1)
    first.record(2, b"another")
    assert (tmp_path / "r" / PRIVACY_FILE).stat().st_mode & 0o777 == 0o600
    open_spend_recorder(tmp_path / "r", again)
    assert again.spend == first.spend
    assert (again.spend.sampled, again.spend.repeated, again.spend.newest) == (2, 1, 2)


def test_the_key_of_a_private_run_that_is_over_is_gone_and_its_spend_is_not(tmp_path: Path) -> None:
    recorder = make_recorder()
    open_spend_recorder(tmp_path, recorder)
    recorder.record(1, b"one")
    close_spend_recorder(recorder)
    saved = decode_state((tmp_path / PRIVACY_FILE).read_bytes(), PrivacySpend)
    assert (saved.key, saved.sampled) == (b"", 1)
    reopened = make_recorder()
    open_spend_recorder(tmp_path, reopened)
    assert len(reopened.spend.key) == 32
    assert reopened.spend.key != b"k" * 32
    assert reopened.spend.sampled == 1


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"x" * 99)])
def test_a_private_run_whose_record_is_gone_does_not_go_on(tmp_path: Path, damage: Any) -> None:
    open_spend_recorder(tmp_path, make_recorder())
    with WalJournal(tmp_path / "journal", lambda _: {}):
        damage(tmp_path / PRIVACY_FILE)
        with pytest.raises(JournalError, match="it is not known how much privacy the run has spent"):
            open_spend_recorder(tmp_path, make_recorder())


def test_a_private_run_that_has_a_checkpoint_and_nothing_else_does_not_go_on(tmp_path: Path) -> None:
    save_state(tmp_path / "checkpoints", PriorProgress(updates=1, bytes=2, seconds=3.0), 7)
    with pytest.raises(JournalError, match="it is not known how much privacy the run has spent"):
        open_spend_recorder(tmp_path, make_recorder())
