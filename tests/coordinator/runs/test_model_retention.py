"""What stays of a run's models, on a real store and real files."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgefl.coordinator.runs import model_retention
from edgefl.coordinator.runs.model_retention import (
    EvaluatedModelSaver,
    ModelRetention,
    remove_orphans,
    remove_unreferenced,
    save_base,
    select_retained,
)
from edgefl.core.config import ModelsSection
from edgefl.core.errors import DataError, StoreError, StoreFullError
from edgefl.core.metrics import MetricSet
from edgefl.core.types import (
    Decision,
    EvaluateInstruction,
    EvaluateResult,
    Event,
    InstructionFailed,
    SparseTensor,
    TrainConfig,
    TrainInstruction,
    UpdateStatus,
)
from edgefl.engine.evaluations import VersionAccuracy
from edgefl.engine.progress import ProgressTracker
from edgefl.engine.round_loop import RunLog
from edgefl.storage.checkpoints import load_model_file
from edgefl.storage.repositories.records import SavedModelRow
from edgefl.storage.repositories.saved_models import list_models as rows_of
from edgefl.storage.repositories.saved_models import save_model_rows
from edgefl.storage.store import Store
from edgefl.tasks.metrics.registry import make_metric


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "edgefl.db") as opened:
        for run_id in ("r", "other"):
            opened.add_run(
                run_id=run_id, name=run_id, task="digits", strategy="fedavg", config={}, seed=7, submitted_at=1.0
            )
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def keep(store: Store, folder: Path) -> Iterator[Callable[..., ModelRetention]]:
    made: list[ModelRetention] = []

    def make(run_id: str = "r", pace: dict[str, Any] | None = None, **rule: Any) -> ModelRetention:
        made.append(ModelRetention(folder, store, run_id, ModelsSection(**rule), clock=lambda: 5.0, **(pace or {})))
        return made[-1]

    yield make
    for keeper in made:
        keeper.close()


def model(version: int) -> dict[str, np.ndarray]:
    return {"w": np.full(4, version, np.float32)}


def versions(store: Store, run_id: str = "r") -> list[int]:
    return [row["version"] for row in rows_of(store, run_id)]


def files(folder: Path) -> set[str]:
    return {path.stem for path in folder.iterdir()} if folder.exists() else set()


def named(store: Store) -> set[str]:
    return {row["sha256"] for row in rows_of(store)}


def eventually(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.01)


def play(keeper: ModelRetention, accuracies: list[float | None], *, end: bool = True) -> None:
    for version, accuracy in enumerate(accuracies, start=1):
        keeper.add(version, version, 10 * version, model(version))
        keeper.record_accuracy(version, accuracy)
    if end:
        last = len(accuracies)
        keeper.finish(last, last, 10 * last + 5, model(last))


def rows(*pairs: tuple[int, float | None]) -> list[SavedModelRow]:
    return [
        SavedModelRow(version=v, round=v, last_record=v, sha256="", bytes_file=0, at=0.0, accuracy=a)
        for v, a in pairs
    ]


@pytest.mark.parametrize(
    ("rule", "awaited", "stays"),
    [
        ({}, (), {2, 6, 7, 8}),
        ({"keep_last": 1}, (), {2, 8}),
        ({"keep_best": False}, (), {6, 7, 8}),
        ({"keep_last": 1, "keep_every": 3}, (), {2, 3, 6, 8}),
        ({"keep_last": 1}, (4, 5), {2, 4, 5, 8}),
        ({"keep_last": 99}, (), set(range(1, 9))),
    ],
)
def test_the_last_the_best_and_every_nth_stay(
    rule: dict[str, Any], awaited: tuple[int, ...], stays: set[int]
) -> None:
    made = rows((1, 0.5), (2, 0.9), (3, 0.5), (4, None), (5, None), (6, 0.5), (7, 0.5), (8, 0.6))
    assert select_retained(made, ModelsSection(**rule), awaited) == stays


def test_of_equally_good_ones_the_newest_is_the_best() -> None:
    assert select_retained(rows((1, 0.9), (2, 0.9), (3, 0.1)), ModelsSection(keep_last=1)) == {2, 3}
    assert select_retained([], ModelsSection()) == set()


def test_a_run_leaves_its_last_three_and_its_best(store: Store, folder: Path, keep: Any) -> None:
    play(keep(), [0.1, 0.9, 0.3, 0.4, 0.5, 0.6])
    kept = rows_of(store, "r")
    assert [(row["version"], row["accuracy"]) for row in kept] == [(2, 0.9), (4, 0.4), (5, 0.5), (6, 0.6)]
    assert [(row["version"], row["latest"], row["best"]) for row in kept if row["latest"] or row["best"]] == [
        (2, False, True), (6, True, False),
    ]  # fmt: skip
    assert files(folder) == named(store)
    for row in kept:
        tensors = load_model_file(folder / f"{row['sha256']}.safetensors")
        np.testing.assert_array_equal(tensors["w"], model(row["version"])["w"])
        assert row["bytes_file"] == (folder / f"{row['sha256']}.safetensors").stat().st_size


def test_the_last_version_has_one_row_of_the_run_s_last_record_and_keeps_its_accuracy(
    store: Store, keep: Any
) -> None:
    play(keep(), [0.1, 0.9])
    assert [(r["version"], r["last_record"], r["accuracy"]) for r in rows_of(store, "r")] == [
        (1, 10, 0.1),
        (2, 25, 0.9),
    ]


def test_no_model_of_a_replayed_journal_whose_last_record_they_share_goes_with_another(
    store: Store, folder: Path, keep: Any
) -> None:
    keeper = keep(keep_last=1, pace={"write_every_s": 0.01})
    keeper.add(1, 1, 70, model(1))
    eventually(lambda: versions(store) == [1])
    keeper.add(2, 2, 70, model(2))
    keeper.record_accuracy(2, 0.9)
    eventually(lambda: versions(store) == [1, 2])
    keeper.add(3, 3, 80, model(3))
    keeper.record_accuracy(1, 0.8)
    eventually(lambda: versions(store) == [2, 3])
    keeper.finish(3, 3, 80, model(3))
    assert [(row["version"], row["accuracy"]) for row in rows_of(store)] == [(2, 0.9), (3, None)]
    assert files(folder) == named(store)


def test_a_run_that_nobody_evaluates_keeps_its_last_model(store: Store, folder: Path, keep: Any) -> None:
    keep().finish(7, 7, 70, model(7))
    assert versions(store) == [7]
    assert len(files(folder)) == 1


def test_models_are_on_disk_while_the_run_goes_on_and_the_best_as_soon_as_it_is_known(
    store: Store, folder: Path, keep: Any
) -> None:
    keeper = keep(keep_last=1, pace={"write_every_s": 0.01})
    keeper.add(1, 1, 10, model(1))
    eventually(lambda: versions(store) == [1])
    keeper.add(2, 2, 20, model(2))
    eventually(lambda: versions(store) == [1, 2])  # 1 may yet be the best
    keeper.record_accuracy(1, 0.5)
    keeper.record_accuracy(2, 0.6)
    eventually(lambda: versions(store) == [2])
    eventually(lambda: files(folder) == named(store))
    assert rows_of(store, "r")[0]["accuracy"] == 0.6


def test_a_model_that_the_next_ones_replace_before_the_disk_is_ready_is_never_written(
    store: Store, folder: Path, keep: Any
) -> None:
    written: set[str] = set()
    keeper = keep(keep_last=1)
    for version in range(1, 200):
        keeper.add(version, version, version, model(version))
        keeper.record_accuracy(version, 0.5)
        written |= files(folder)
    keeper.finish(199, 199, 500, model(199))
    assert versions(store) == [199]
    assert len(written | files(folder)) < 20


def test_what_the_run_changes_later_is_not_in_the_file(store: Store, folder: Path, keep: Any) -> None:
    shared, keeper = model(1), keep()
    keeper.add(1, 1, 10, shared)
    shared["w"][:] = 99.0
    keeper.close()
    (row,) = rows_of(store, "r")
    assert load_model_file(folder / f"{row['sha256']}.safetensors")["w"].tolist() == [1.0] * 4


def test_sparse_tensors_are_written_dense(store: Store, folder: Path, keep: Any) -> None:
    sparse = SparseTensor(indices=np.array([1]), values=np.array([2.0], np.float32), shape=(3,))
    keeper = keep()
    keeper.add(1, 1, 10, {"w": sparse})
    keeper.finish(1, 1, 11, {"w": sparse})
    (row,) = rows_of(store, "r")
    assert load_model_file(folder / f"{row['sha256']}.safetensors")["w"].tolist() == [0.0, 2.0, 0.0]


def test_an_interrupted_run_keeps_what_it_had_and_another_coordinator_counts_it(store: Store, keep: Any) -> None:
    first = keep()
    play(first, [0.1, 0.9, 0.3, 0.4], end=False)
    first.close()
    assert versions(store) == [2, 3, 4]
    again = keep()
    again.add(5, 5, 50, model(5))
    again.record_accuracy(5, 0.5)
    again.finish(6, 6, 60, model(6))
    assert versions(store) == [2, 4, 5, 6]


def test_no_run_writes_or_removes_files_while_another_one_of_the_folder_does(folder: Path, keep: Any) -> None:
    lock = threading.Lock()
    first = keep(pace={"files_lock": lock})
    with lock:
        ending = threading.Thread(target=first.finish, args=(1, 1, 1, model(1)))
        ending.start()
        ending.join(0.3)
        assert files(folder) == set()
    ending.join(60)
    assert len(files(folder)) == 1


def test_files_that_another_run_or_a_run_file_names_stay(store: Store, folder: Path, keep: Any) -> None:
    first = keep()
    first.finish(1, 1, 10, model(1))
    (shared,) = files(folder)
    keeper = keep("other", keep_last=1, keep_best=False)
    keeper.add(1, 1, 10, model(1))  # the same bytes, so the same file
    keeper.finish(2, 2, 20, model(2))
    assert versions(store, "other") == [2]
    assert shared in files(folder)
    (mine,) = [row["sha256"] for row in rows_of(store, "other")]
    store.add_run(
        run_id="later", name="later", task="digits", strategy="fedavg", seed=7, submitted_at=2.0,
        config={"run": {"task": "digits", "init": str(folder / f"{mine}.safetensors")}},
    )  # fmt: skip
    save_model_rows(store, "other", [], [2])
    remove_unreferenced(folder, store, {mine})
    assert mine in files(folder)


def test_a_full_disk_ends_the_run_with_the_store_s_error(store: Store, folder: Path, keep: Any) -> None:
    folder.write_text("no folder")
    keeper = keep()
    keeper.add(1, 1, 10, model(1))
    eventually(lambda: keeper._error)
    with pytest.raises(StoreError, match="cannot be made"):
        keeper.add(2, 2, 20, model(2))
    with pytest.raises(StoreError, match="cannot be made"):
        keeper.finish(1000, 1000, 10_000, model(1000))
    assert versions(store) == []


def test_models_that_wait_are_bounded_and_the_run_waits_for_the_disk_instead(store: Store, keep: Any) -> None:
    # Two of these models fit, and the writer would pause for a minute if nobody woke it.
    keeper = keep(keep_every=1, pace={"max_pending_bytes": 40, "write_every_s": 60.0})
    most = 0
    for version in range(1, 30):
        keeper.add(version, version, version, model(version))
        most = max(most, sum(waiting.num_bytes for waiting in keeper._pending.values()))
    keeper.finish(29, 29, 500, model(29))
    assert most <= 40
    assert versions(store) == list(range(1, 30))


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (MemoryError("no 300 MB"), StoreError, "run r cannot be written: MemoryError"),
        (OSError(errno.EMFILE, "Too many open files"), StoreError, "models cannot be written: Too many open files"),
        (OSError(errno.ENOSPC, "No space left on device"), StoreFullError, "free some space"),
    ],
    ids=["no memory", "no file left", "no room"],
)
def test_whatever_ends_the_writing_is_told_to_a_run_that_waits_for_room(
    error: Exception, kind: type[Exception], told: str, store: Store, keep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_full = threading.Event()

    def fail(*_args: Any) -> None:
        is_full.wait(60.0)
        raise error

    monkeypatch.setattr(model_retention, "save_model", fail)
    keeper, raised = keep(keep_every=1, pace={"max_pending_bytes": 16}), list[BaseException]()
    keeper.add(1, 1, 10, model(1))

    def take() -> None:
        try:
            keeper.add(2, 2, 20, model(2))
        except StoreError as met:
            raised.append(met)

    run = threading.Thread(target=take, daemon=True)
    run.start()
    eventually(lambda: keeper._needed_bytes)
    is_full.set()
    run.join(60.0)
    assert not run.is_alive()
    assert type(raised[0]) is kind
    assert told in str(raised[0])
    with pytest.raises(kind, match="cannot be written"):
        keeper.finish(3, 3, 30, model(3))
    assert versions(store) == []


def test_a_run_that_is_cut_off_ends_without_the_models_that_cannot_be_written(
    store: Store, keep: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = keep(pace={"write_every_s": 60.0})
    keeper.add(1, 1, 10, model(1))
    eventually(lambda: versions(store) == [1])

    def fail(*_args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(model_retention, "save_model", fail)
    keeper.add(2, 2, 20, model(2))
    keeper.close()
    assert "the last models of run r are not kept" in caplog.text


def test_evaluations_that_never_end_keep_a_few_models_only(store: Store, keep: Any) -> None:
    keeper = keep()
    for version in range(1, 60):
        keeper.add(version, version, version, model(version))
    assert len(keeper._pending) + len(keeper._saved_rows) <= 3 + model_retention.MAX_UNSCORED + 3
    keeper.finish(59, 59, 600, model(59))
    assert versions(store) == [57, 58, 59]


KILLED = """
import os, sys
from pathlib import Path
import numpy as np
from edgefl.core.config import ModelsSection
from edgefl.coordinator.runs import model_retention
from edgefl.storage.store import Store
root, where = Path(sys.argv[1]), sys.argv[2]
def die(*args, **kwargs): os.kill(os.getpid(), 9)
store = Store.open(root / "edgefl.db")
keeper = model_retention.ModelRetention(root / "models", store, "r", ModelsSection(keep_last=1, keep_best=False))
setattr(model_retention, where, die)
keeper.finish(2, 2, 20, {"w": np.full(4, 2.0, np.float32)})
"""


@pytest.mark.parametrize(
    ("where", "left"), [("save_model", [1]), ("save_model_rows", [1]), ("find_orphaned_models", [2])], ids=str
)
def test_killed_at_any_step_every_row_has_its_file(
    where: str, left: list[int], store: Store, folder: Path, tmp_path: Path, keep: Any
) -> None:
    keep(keep_last=1, keep_best=False).finish(1, 1, 10, model(1))
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), where], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -9, done.stderr
    assert versions(store) == left
    assert named(store) <= files(folder)
    orphans = files(folder) - named(store)
    assert len(orphans) == (0 if where == "save_model" else 1)
    remove_orphans(folder, store, now=time.time())
    assert files(folder) - named(store) == orphans, "a young file may be one whose row comes next"
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    (folder / "mine.safetensors").write_bytes(b"somebody's own")
    os.utime(folder / "mine.safetensors", (0, 0))
    remove_orphans(folder, store, now=time.time())
    assert files(folder) == named(store) | {"mine"}


def test_a_sweep_of_no_folder_does_nothing(store: Store, tmp_path: Path) -> None:
    remove_orphans(tmp_path / "none", store, now=0.0)
    assert not (tmp_path / "none").exists()


def test_the_name_of_a_file_is_its_hash(store: Store, folder: Path, keep: Any) -> None:
    keep().finish(1, 1, 10, model(1))
    (path,) = folder.iterdir()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == path.stem


class Noted:
    """A journal and a keeper that write down what they are told, in one list."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def record_events(self, events: Any) -> Any:
        self.told.append(("received", len(events)))
        return [*events, "from the journal"]

    def record_decision(self, decision: Decision) -> None:
        self.told.append(("decided", len(decision.instructions)))

    def record_aggregation(self, version: int, ids: Any) -> None:
        self.told.append(("aggregated", version, ids))

    def commit(self) -> None:
        self.told.append(("commit",))

    def add(self, version: int, number: int, last_record: int, model: Any) -> None:
        self.told.append(("take", version, number, last_record, model))

    def record_accuracy(self, version: int, accuracy: float | None, quality: float | None) -> None:
        self.told.append(("score", version, accuracy) if quality is None else ("score", version, accuracy, quality))


@pytest.fixture
def noted() -> Noted:
    return Noted()


class ScoredLog(RunLog):
    """The log of a run whose loop counts the answers to its evaluations."""

    def __init__(self, noted: Noted) -> None:
        keeper: Any = noted
        saver = EvaluatedModelSaver(keeper, lambda state: {"model of": state}, lambda: 42)
        super().__init__(noted, [saver])
        self.progress = ProgressTracker()

    def record_decision(self, decision: Decision) -> None:
        super().record_decision(decision)
        self.progress.record_dispatch(decision.instructions, 0.0)

    def record_events(self, events: Sequence[Event]) -> Sequence[Event]:
        journaled = super().record_events(events)
        for score in [score for event in events for score in self.progress.record_event(event)]:
            self.record_score(score)
        return journaled


@pytest.fixture
def journal(noted: Noted) -> ScoredLog:
    return ScoredLog(noted)


def asks(version: int, *devices: str, subject: str = "") -> Decision:
    return Decision(
        instructions=tuple(
            EvaluateInstruction(
                assignment_id=f"{d}{version}{subject}", device_id=d, version=version, round=9, subject=subject
            )
            for d in devices
        )
    )


def answer(
    version: int, device: str, accuracy: float, num_examples: int = 10, source: str = "evaluator"
) -> EvaluateResult:
    return EvaluateResult(
        assignment_id=f"{device}{version}", device_id=device, version=version, round=9, source=source,
        num_examples=num_examples, loss=1.0, accuracy=accuracy,
    )  # fmt: skip


def test_the_model_is_taken_when_its_evaluation_is_asked_for_and_after_the_journal_knows(
    journal: ScoredLog, noted: Noted
) -> None:
    journal.record_aggregation(3, ["a"], "state")
    journal.record_decision(asks(3, "one", "two"))
    journal.commit()
    assert noted.told == [
        ("aggregated", 3, ["a"]), ("decided", 2), ("take", 3, 9, 42, {"model of": "state"}), ("commit",),
    ]  # fmt: skip


def test_it_is_taken_once_however_often_it_is_asked_for(journal: ScoredLog, noted: Noted) -> None:
    journal.record_aggregation(3, [], "state")
    for device in ("one", "two"):
        journal.record_decision(asks(3, device))
    assert [entry[0] for entry in noted.told].count("take") == 1


def test_its_accuracy_is_known_when_all_have_answered_or_are_lost(journal: ScoredLog, noted: Noted) -> None:
    journal.record_aggregation(3, [], "state")
    journal.record_decision(asks(3, "one", "two", "gone"))
    assert journal.record_events([answer(3, "one", 0.5, 30)])[-1] == "from the journal"
    lost = InstructionFailed(device_id="gone", assignment_id="gone3", outcome=UpdateStatus.LOST, reason="away")
    journal.record_events([lost])
    assert not [entry for entry in noted.told if entry[0] == "score"]
    journal.record_events([answer(3, "two", 0.9, 10)])
    assert noted.told[-1] == ("score", 3, None)  # of two evaluators alone


def test_one_rogue_evaluator_of_three_does_not_say_how_good_a_model_is(journal: ScoredLog, noted: Noted) -> None:
    journal.record_aggregation(3, [], "state")
    journal.record_decision(asks(3, "one", "two", "rogue"))
    journal.record_events([answer(3, "one", 0.5), answer(3, "two", 0.6), answer(3, "rogue", 1.0, 2**53)])
    assert noted.told[-1] == ("score", 3, 0.6)


def test_a_version_that_nobody_could_evaluate_has_no_accuracy(journal: ScoredLog, noted: Noted) -> None:
    journal.record_aggregation(3, [], "state")
    journal.record_decision(asks(3, "one"))
    journal.record_events(
        [InstructionFailed(device_id="one", assignment_id="one3", outcome=UpdateStatus.LOST, reason="away")]
    )
    assert noted.told[-1] == ("score", 3, None)


def test_models_of_single_devices_other_orders_and_older_versions_are_not_taken(
    journal: ScoredLog, noted: Noted
) -> None:
    journal.record_decision(asks(0, "one"))  # before anything was aggregated there is no state
    journal.record_aggregation(3, [], "state")
    journal.record_decision(asks(3, "one", subject="pi-1"))
    journal.record_decision(asks(2, "one"))
    order = TrainInstruction(assignment_id="a", device_id="one", base_version=3, plan=TrainConfig(iterations=1))
    journal.record_decision(Decision(instructions=(order,)))
    journal.record_events([answer(3, "stranger", 0.5)])
    assert not [entry for entry in noted.told if entry[0] in {"take", "score"}]


def test_the_best_is_chosen_by_quality_where_a_version_has_it() -> None:
    by_accuracy = rows((1, 0.9), (2, 0.5), (3, 0.6), (4, 0.7))
    by_quality = [
        replace(row, quality=quality) for row, quality in zip(by_accuracy, (-3.0, -1.0, -2.0, None), strict=True)
    ]
    rule = ModelsSection(keep_last=1)
    assert select_retained(by_accuracy, rule) == {1, 4}
    assert select_retained(by_quality, rule) == {2, 4}


def test_of_a_regression_the_best_stays_by_its_quality_alone(store: Store, keep: Any) -> None:
    keeper = keep(keep_last=1)
    for version, quality in enumerate((-3.0, -1.0, -2.0, -4.0), start=1):
        keeper.add(version, version, 10 * version, model(version))
        keeper.record_accuracy(version, None, quality)
    keeper.finish(4, 4, 45, model(4))
    kept = rows_of(store, "r")
    assert [(row["version"], row["quality"], row["best"]) for row in kept] == [(2, -1.0, True), (4, -4.0, False)]


def test_a_model_is_recorded_with_the_first_metric_of_its_task_negative_where_less_is_better(noted: Noted) -> None:
    keeper: Any = noted
    metrics = MetricSet({"rmse": make_metric("rmse"), "r2": make_metric("r2")})
    saver = EvaluatedModelSaver(keeper, lambda state: state, lambda: 42, metrics)
    saver.on_score(VersionAccuracy(version=3, accuracy=0.5, is_newest=True, trusted_metrics={"rmse": 2.5, "r2": 0.9}))
    saver.on_score(VersionAccuracy(version=4, accuracy=0.5, is_newest=True, trusted=0.5, trusted_metrics={"r2": 0.9}))
    assert noted.told == [("score", 3, None, -2.5), ("score", 4, 0.5)]


def test_a_base_is_saved_under_its_own_hash_alone(tmp_path: Path) -> None:
    source, folder = tmp_path / "given.safetensors", tmp_path / "bases"
    source.write_bytes(b"good")
    sha256 = hashlib.sha256(b"good").hexdigest()
    adapted = SimpleNamespace(plan=SimpleNamespace(sha256=sha256), path=source)
    run: Any = SimpleNamespace(adapted=adapted)
    source.write_bytes(b"evil")
    with pytest.raises(DataError, match=f"must have SHA-256 {sha256}, got "):
        save_base(run, folder)
    assert list(folder.iterdir()) == []
    source.write_bytes(b"good")
    save_base(run, folder)
    adapted.path = folder / f"{sha256}.safetensors"
    adapted.path.write_bytes(b"evil")
    with pytest.raises(DataError, match=r"edgefl base add FILE"):
        save_base(run, folder)
    assert adapted.path.read_bytes() == b"evil", "it is not copied onto itself"
