"""What a run goes on with, and when it may: real checkpoints, journal and store, without a fleet."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.execution.recording_fleet import FleetSnapshot
from edgefl.coordinator.runs.checkpointing import NEW_INCARNATION_FILE, create_run_snapshot
from edgefl.coordinator.runs.recovery import (
    RunStart,
    can_begin_again,
    can_resume_exactly,
    check_resumable,
    restore_exactly,
    restore_from_checkpoint,
)
from edgefl.core.config import parse_run
from edgefl.core.errors import EdgeflError, JournalError, UsageError
from edgefl.core.types import (
    DeviceInfo,
    DeviceThroughput,
    HealthMetrics,
    Progress,
    Update,
    UpdateMetrics,
    UpdateStatus,
)
from edgefl.engine.assembly.build import build_run
from edgefl.engine.assembly.components import RunComponents
from edgefl.engine.progress import ProgressTracker
from edgefl.engine.round_loop import LoopState
from edgefl.storage.checkpoints import save_state
from edgefl.storage.journal.record_encoding import CheckpointMark, TurnStarted
from edgefl.storage.journal.wal_journal import WalJournal
from edgefl.storage.repositories.records import RunRecord, RunStatus, UpdateRow
from edgefl.storage.store import Store
from edgefl.strategies.participation import RunParticipationPolicy
from edgefl.strategies.update_guard import GuardState, UpdateGuard

NAMES = ("pi-1", "pi-2")


class View:
    """Two devices with nothing to do, or at work."""

    def __init__(self, busy: dict[str, list[str]] | None = None) -> None:
        self.now_s, self.busy = 0.0, busy or {}
        self.devices = {name: DeviceInfo(device_id=name, tasks=("digits",)) for name in NAMES}
        self.idle = [name for name in NAMES if name not in self.busy]
        self.speeds: dict[str, DeviceThroughput] = {}
        self.progress: dict[str, Progress] = {}
        self.health: dict[str, HealthMetrics] = {}


@pytest.fixture
def directory(tmp_path: Path) -> CoordinatorDirectory:
    return CoordinatorDirectory(root=tmp_path, fleet="lab", hosts=())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "edgefl.db") as opened:
        yield opened


def made(name: str = "fedavg", **options: Any) -> RunComponents:
    return build_run(parse_run({"run": {"task": "digits", "rounds": 9}, "strategy": {"name": name, **options}}), "r")


def record(store: Store, status: RunStatus = RunStatus.INTERRUPTED, *, resumes: int = 0) -> RunRecord:
    run_id = f"r{len(store.list_runs())}"
    store.add_run(run_id=run_id, name="n", task="digits", strategy="x", config={}, seed=7, submitted_at=1.0)
    store.set_run_status(run_id, status, at=2.0)
    for _ in range(resumes):
        store.requeue_run(run_id)
    return store.get_run(run_id)


def advanced(run: RunComponents, rounds: int) -> Any:
    """A state after some rounds, in the middle of the next one."""
    strategy, state = run.strategy, run.strategy.init(run.model)
    for number in range(rounds + 1):
        state, decision = strategy.assign(state, View())
        for order in decision.instructions:
            if number == rounds and order.device_id == "pi-2":
                break
            state = strategy.receive(state, update(order, run))
        while number < rounds and strategy.ready(state, View()):
            state = strategy.aggregate(state)
    return state


def update(order: Any, run: RunComponents) -> Update:
    tensors = {name: np.full_like(array, 0.01) for name, array in run.model.items()}
    metrics = UpdateMetrics(iterations=1, num_examples=4)
    return Update(
        assignment_id=order.assignment_id, device_id=order.device_id, base_version=order.base_version,
        tensors=tensors, metrics=metrics,
    )  # fmt: skip


def checkpoint(directory: CoordinatorDirectory, run_id: str, state: Any) -> Path:
    folder = directory.runs / run_id
    with WalJournal(folder / "journal", lambda _: {}) as wal:
        saved = save_state(folder / "checkpoints", state, wal.last_record)
        wal.record_checkpoint(CheckpointMark(sha256=saved.sha256, last_record=saved.last_record))
    return folder / "checkpoints" / f"{saved.sha256}.safetensors"


@pytest.mark.parametrize("status", [RunStatus.QUEUED, RunStatus.RUNNING, RunStatus.FINISHED, RunStatus.FAILED])
def test_only_what_was_interrupted_or_stopped_may_go_on(
    store: Store, directory: CoordinatorDirectory, status: RunStatus
) -> None:
    with pytest.raises(UsageError, match=f"is {status}; only a run that was interrupted or stopped"):
        check_resumable(record(store, status), directory, made)


def test_a_stopped_run_needs_its_state_and_an_interrupted_one_may_begin_anew(
    store: Store, directory: CoordinatorDirectory
) -> None:
    with pytest.raises(UsageError, match="stopped before it had a checkpoint"):
        check_resumable(record(store, RunStatus.STOPPED), directory, made)
    check_resumable(record(store), directory, made)


@pytest.mark.parametrize("damage", ["checkpoint", "missing"])
def test_what_cannot_be_read_is_found_out_before_anything_changes(
    store: Store, directory: CoordinatorDirectory, damage: str
) -> None:
    run = record(store)
    path = checkpoint(directory, run.run_id, advanced(made(), 2))
    check_resumable(run, directory, made)
    if damage == "checkpoint":
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    else:
        path.unlink()
    with pytest.raises(JournalError):
        check_resumable(run, directory, made)
    assert store.get_run(run.run_id) == run


def test_a_damaged_journal_keeps_no_run_from_its_checkpoint(store: Store, directory: CoordinatorDirectory) -> None:
    run = record(store)
    checkpoint(directory, run.run_id, advanced(made(), 2))
    for file in (directory.runs / run.run_id / "journal").iterdir():
        file.write_bytes(b"nonsense" * 9)
    check_resumable(run, directory, made)  # raises where it cannot
    assert store.get_run(run.run_id) == run


def test_a_run_whose_strategy_is_another_now_is_refused(store: Store, directory: CoordinatorDirectory) -> None:
    run = record(store)
    checkpoint(directory, run.run_id, advanced(made(), 2))
    with pytest.raises(EdgeflError, match="does not fit"):
        check_resumable(run, directory, lambda: made("asgd"))


@pytest.mark.parametrize("name", ["fedavg", "ssgd", "asgd", "fedbuff", "bounded", "dc-asgd", "adacomp", "scaffold"])
def test_a_strategy_goes_on_from_its_version_and_asks_everybody_again(
    store: Store, directory: CoordinatorDirectory, name: str
) -> None:
    options = {"buffer_size": 3} if name == "fedbuff" else {}
    run, state = record(store, resumes=1), advanced(made(name, **options), 3)
    version = made(name, **options).strategy.version(state)
    checkpoint(directory, run.run_id, state)
    again = made(name, **options)
    with WalJournal(directory.runs / run.run_id / "journal", lambda _: {}) as wal:
        resumed = restore_from_checkpoint(run, again, directory, store, wal)
    assert again.strategy.version(resumed.state) == version >= 1
    _, decision = again.strategy.assign(resumed.state, View())
    assert {order.device_id for order in decision.instructions} == set(NAMES)
    assert {order.base_version for order in decision.instructions} == {version}  # type: ignore[union-attr]
    assert resumed.incarnations.assign_wire_id("a") == f"{run.run_id}/1/a"


def test_a_synchronous_round_that_was_open_is_asked_for_under_the_ids_that_it_had(
    store: Store, directory: CoordinatorDirectory
) -> None:
    run, first = record(store, resumes=1), made()
    checkpoint(directory, run.run_id, advanced(first, 3))
    again = made()
    with WalJournal(directory.runs / run.run_id / "journal", lambda _: {}) as wal:
        resumed = restore_from_checkpoint(run, again, directory, store, wal)
    _, decision = again.strategy.assign(resumed.state, View())
    assert [order.assignment_id for order in decision.instructions] == ["v3-a1-pi-1", "v3-a1-pi-2"]  # type: ignore[union-attr]


def test_a_run_that_begins_has_its_first_state_and_plain_ids(store: Store, directory: CoordinatorDirectory) -> None:
    run, begun = record(store, RunStatus.RUNNING), made()
    with WalJournal(directory.runs / run.run_id / "journal", lambda _: {}) as wal:
        first = restore_from_checkpoint(run, begun, directory, store, wal)
    assert (begun.strategy.version(first.state), first.incarnations.assign_wire_id("a")) == (0, f"{run.run_id}/a")
    assert (first.unused_updates, first.prior_progress.updates) == ((), 0)


def test_to_ask_whether_a_run_can_go_on_leaves_its_journal_to_whoever_writes_it(
    store: Store, directory: CoordinatorDirectory
) -> None:
    run = record(store)
    checkpoint(directory, run.run_id, advanced(made(), 2))
    newest = max((directory.runs / run.run_id / "journal").iterdir())
    with newest.open("ab") as file:
        file.write(b"half a record that somebody is writing")
    before = newest.read_bytes()
    check_resumable(run, directory, made)
    assert newest.read_bytes() == before


def test_a_run_whose_devices_went_on_counts_on_from_what_it_had(
    store: Store, directory: CoordinatorDirectory
) -> None:
    run, first = record(store, RunStatus.RUNNING), made("ad-psgd", carrier="peer")
    store.open_round(run.run_id, 1, started_at=10.0)
    row = UpdateRow(
        assignment_id="a", device_id="pi-1", round=1, base_version=0, outcome=UpdateStatus.USED, applied_version=0,
        bytes_up=30, bytes_down=12, received_at=15.0,
    )  # fmt: skip
    store.record_updates(run.run_id, [row])
    store.close_round(run.run_id, 1, version=2, closed_at=18.0)
    checkpoint(directory, run.run_id, first.strategy.init(first.model))
    with WalJournal(directory.runs / run.run_id / "journal", lambda _: {}) as wal:
        resumed = restore_from_checkpoint(run, made("ad-psgd", carrier="peer"), directory, store, wal)
    assert resumed.is_resumed
    assert (resumed.prior_progress.updates, resumed.prior_progress.bytes, resumed.prior_progress.seconds) == (
        1,
        42,
        8.0,
    )


def exact_checkpoint(directory: CoordinatorDirectory, run: RunRecord, made_run: RunComponents, rounds: int) -> Path:
    """A checkpoint with all that a run needs to go on there; returns the file of its state."""
    folder = directory.runs / run.run_id
    state = advanced(made_run, rounds)
    course = LoopState(ProgressTracker(version=rounds, updates=2 * rounds))
    fleet = FleetSnapshot(now_s=5.0 + rounds, at=100.0, devices=dict(View().devices))
    with WalJournal(folder / "journal", lambda _: {}) as wal:
        wal.record_turn(TurnStarted(now_s=5.0 + rounds, at=100.0))
        standing = create_run_snapshot(
            course, fleet, RunParticipationPolicy(guard=UpdateGuard(state=GuardState(refusals={"pi-2": 1})))
        )
        saved = save_state(folder / "checkpoints", state, wal.last_record, standing)
        wal.record_checkpoint(CheckpointMark(sha256=saved.sha256, last_record=saved.last_record))
    return folder / "checkpoints" / f"{saved.sha256}.safetensors"


def gone_on(
    run: RunRecord, store: Store, directory: CoordinatorDirectory, made_run: RunComponents
) -> RunStart | None:
    with WalJournal(directory.runs / run.run_id / "journal", lambda _: {}) as wal:
        return restore_exactly(run, made_run, directory, store, wal)


def test_a_run_with_a_checkpoint_does_not_begin_again_without_its_journal(
    store: Store, directory: CoordinatorDirectory
) -> None:
    run = record(store)
    assert can_begin_again(run, directory)
    checkpoint(directory, run.run_id, advanced(made(), 2))
    shutil.rmtree(directory.runs / run.run_id / "journal")
    assert not can_begin_again(run, directory)


def test_a_run_goes_on_exactly_where_its_checkpoint_and_the_journal_end(
    store: Store, directory: CoordinatorDirectory
) -> None:
    run, again = record(store, RunStatus.RUNNING), made()
    exact_checkpoint(directory, run, made(), 3)
    assert can_resume_exactly(run.run_id, directory)
    resumed = gone_on(run, store, directory, again)
    assert resumed is not None
    assert resumed.snapshot is not None
    assert (again.strategy.version(resumed.state), resumed.snapshot.loop_state.progress.updates) == (3, 6)
    assert (resumed.previous_devices, resumed.is_exact, resumed.replay.is_exhausted) == (NAMES, True, True)
    assert resumed.snapshot.guard.refusals == {"pi-2": 1}
    assert resumed.incarnations.get_wire_id("a") == f"{run.run_id}/a", (
        "boards are asked for what they have, under the same ids"
    )


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    store: Store, directory: CoordinatorDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    run, again = record(store, RunStatus.RUNNING), made()
    exact_checkpoint(directory, run, made(), 2)
    newest = exact_checkpoint(directory, run, made(), 4)
    newest.write_bytes(newest.read_bytes()[:-1] + b"x")
    resumed = gone_on(run, store, directory, again)
    assert resumed is not None
    assert again.strategy.version(resumed.state) == 2
    assert f"{newest} is missing or damaged; looking for the checkpoint before" in caplog.text


def test_a_run_out_of_a_backup_goes_on_under_other_ids(store: Store, directory: CoordinatorDirectory) -> None:
    run = record(store, RunStatus.RUNNING)
    exact_checkpoint(directory, run, made(), 3)
    (directory.runs / run.run_id / NEW_INCARNATION_FILE).touch()
    assert not can_resume_exactly(run.run_id, directory)
    assert gone_on(run, store, directory, made()) is None


def test_a_journal_without_turns_goes_on_from_its_checkpoint_only(
    store: Store, directory: CoordinatorDirectory
) -> None:
    run = record(store, RunStatus.RUNNING)
    assert gone_on(run, store, directory, made()) is None, "it begins"
    with WalJournal(directory.runs / run.run_id / "journal", lambda _: {}) as wal:
        wal.record_aggregation(1, ["a"])
    assert not can_resume_exactly(run.run_id, directory)
    assert gone_on(run, store, directory, made()) is None
