"""A run's rows are taken back to a checkpoint: no gap, and no update counted twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from edgefl.core.types import Decision, EvaluateInstruction, TrainConfig, TrainInstruction, UpdateStatus
from edgefl.storage.checkpoints import Checkpoint
from edgefl.storage.journal.record_encoding import Aggregation
from edgefl.storage.queries.history import read_history
from edgefl.storage.repositories.records import AssignmentRow, EvaluationRow, RunStatus, SavedModelRow, UpdateRow
from edgefl.storage.repositories.totals import TOTAL_KEYS, rebuild_totals
from edgefl.storage.rollback import (
    INTERRUPTION_REASON,
    RollbackPoint,
    count_versions_per_round,
    delete_events,
    get_newest_ids,
    get_progress,
    record_resume,
    roll_back_history,
)
from edgefl.storage.store import Store

RUN = "r"
NOW = 50.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "edgefl.db") as opened:
        opened.add_run(run_id=RUN, name="n", task="digits", strategy="fedavg", config={}, seed=7, submitted_at=1.0)
        yield opened


def give(store: Store, number: int, *ids: str, at: float) -> None:
    store.open_round(RUN, number, started_at=at)
    rows = [
        AssignmentRow(
            assignment_id=name, device_id=name[-4:], round=number, base_version=number - 1, dispatched_at=at
        )
        for name in ids
    ]
    store.record_assignments(RUN, rows)


def use(store: Store, number: int, *ids: str, at: float) -> None:
    receive(
        store, number, *ids, at=at, outcome=UpdateStatus.USED, applied_version=number - 1, staleness=0, wait_s=0.1
    )
    store.close_round(RUN, number, version=number, closed_at=at)
    store.record_evaluations(RUN, [score(number)])


def receive(store: Store, number: int, *ids: str, at: float, **values: Any) -> None:
    store.record_updates(
        RUN,
        [
            UpdateRow(
                assignment_id=name, device_id=name[-4:], round=number, base_version=number - 1, num_examples=8,
                iterations=2, bytes_up=10, bytes_down=20, loss=0.5, received_at=at, **values,
            )
            for name in ids
        ],
    )  # fmt: skip


def score(version: int) -> EvaluationRow:
    return EvaluationRow(
        assignment_id=f"e{version}", round=version, version=version, device_id="eval", source="coordinator",
        loss=0.1, accuracy=0.9, num_examples=5, at=1.0, bytes_up=1, bytes_down=2,
    )  # fmt: skip


def given(*ids: str) -> Decision:
    plan = TrainConfig(iterations=1)
    orders = [TrainInstruction(assignment_id=name, device_id="pi-1", base_version=2, plan=plan) for name in ids]
    return Decision(
        instructions=(*orders, EvaluateInstruction(assignment_id="e3", device_id="eval", version=3, round=3))
    )


def filled(store: Store) -> None:
    """Three rounds of two devices, the third under way in the fourth."""
    for number in (1, 2, 3):
        ids = [f"v{number - 1}-{name}" for name in ("pi-1", "pi-2")]
        give(store, number, *ids, at=10.0 * number)
        use(store, number, *ids, at=10.0 * number + 5)
    give(store, 4, "v3-pi-1", "v3-pi-2", at=40.0)
    receive(store, 4, "v3-pi-1", at=41.0)


def test_what_was_given_behind_the_checkpoint_is_gone(store: Store) -> None:
    filled(store)
    behind = [given("v2-pi-1", "v2-pi-2"), Aggregation(version=3, assignment_ids=("v2-pi-1", "v2-pi-2"))]
    so_far = roll_back_history(
        store, RUN, RollbackPoint(version=2, num_closed_rounds=2), [*behind, given("v3-pi-1", "v3-pi-2")], now=NOW
    )
    assert [row["round"] for row in read_history(store, "rounds")] == [1, 2]
    assert [row["assignment_id"] for row in read_history(store, "updates")] == [
        "v0-pi-1", "v0-pi-2", "v1-pi-1", "v1-pi-2",
    ]  # fmt: skip
    assert [row["version"] for row in read_history(store, "evaluations")] == [1, 2]
    assert (store.get_run(RUN).rounds, store.get_run(RUN).version) == (2, 2)
    assert so_far.participants == ("pi-1", "pi-2")
    assert so_far.work == (("pi-1", 4, 8), ("pi-2", 4, 8))
    assert (so_far.num_updates, so_far.num_bytes, so_far.elapsed_s, so_far.unused_updates) == (
        4,
        4 * 30 + 2 * 3,
        10.0,
        (),
    )


def test_what_was_out_at_the_checkpoint_is_lost_and_what_had_come_is_handed_over(store: Store) -> None:
    filled(store)
    so_far = roll_back_history(store, RUN, RollbackPoint(version=3, num_closed_rounds=3), [], now=NOW)
    rows = {row["assignment_id"]: row for row in read_history(store, "updates")}
    assert (rows["v3-pi-2"]["outcome"], rows["v3-pi-2"]["reason"]) == (UpdateStatus.LOST, INTERRUPTION_REASON)
    assert [row.assignment_id for row in so_far.unused_updates] == ["v3-pi-1"]
    assert [row["round"] for row in read_history(store, "rounds")] == [1, 2, 3]


def test_an_update_that_was_used_behind_the_checkpoint_is_unused_again_and_its_model_not_named(store: Store) -> None:
    filled(store)
    for version in (2, 3):
        row = SavedModelRow(
            version=version, round=version, last_record=version, sha256="ab" * 32, bytes_file=1, at=1.0
        )
        store.record_saved_model(RUN, row)
    used = Aggregation(version=3, assignment_ids=("v2-pi-1", "v2-pi-2"))
    so_far = roll_back_history(store, RUN, RollbackPoint(version=2, num_closed_rounds=2), [used], now=NOW)
    assert {row.assignment_id for row in so_far.unused_updates} == {"v2-pi-1", "v2-pi-2", "v3-pi-1"}
    assert [(row.outcome, row.applied_version, row.staleness) for row in so_far.unused_updates] == [
        (None, None, None)
    ] * 3
    assert so_far.num_updates == 4
    assert [row.version for row in store.list_saved_models(RUN)] == [2]


def test_a_round_that_was_open_at_the_checkpoint_is_open_again(store: Store) -> None:
    filled(store)
    roll_back_history(store, RUN, RollbackPoint(version=5, num_closed_rounds=1, open_round=2), [], now=NOW)
    rows = read_history(store, "rounds")
    assert [(row["round"], row["closed_at"] is None) for row in rows] == [(1, False), (2, True)]


def test_without_a_checkpoint_nothing_is_left(store: Store) -> None:
    filled(store)
    so_far = roll_back_history(
        store, RUN, RollbackPoint(version=0, num_closed_rounds=0), [], now=NOW, should_reset=True
    )
    assert (so_far.num_updates, so_far.num_bytes) == (0, 0)
    assert not any(read_history(store, kind) for kind in ("rounds", "updates", "evaluations"))


@pytest.mark.parametrize("keeps_nothing", [False, True])
def test_sums_follow_the_rows_back(store: Store, keeps_nothing: bool) -> None:
    filled(store)
    behind = [given("v2-pi-1", "v3-pi-1", "v3-pi-2"), Aggregation(version=3, assignment_ids=("v2-pi-1", "v2-pi-2"))]
    roll_back_history(
        store, RUN, RollbackPoint(version=2, num_closed_rounds=2), behind, now=NOW, should_reset=keeps_nothing
    )
    kept = sums_of(store)
    with store.database.write() as connection:
        rebuild_totals(connection)
    assert kept == sums_of(store)
    assert bool(kept) is not keeps_nothing


def sums_of(store: Store) -> list[tuple[Any, ...]]:
    with store.database.read() as connection:
        rows = [row for table in TOTAL_KEYS for row in connection.execute(select(table.__table__))]
    return [tuple(round(value, 9) if isinstance(value, float) else value for value in row) for row in rows]


def test_rounds_are_as_long_as_the_first_one_was(store: Store) -> None:
    assert count_versions_per_round(store, RUN) is None
    give(store, 1, "a-pi-1", at=1.0)
    store.close_round(RUN, 1, version=4, closed_at=2.0)
    assert count_versions_per_round(store, RUN) == 4


def test_assignments_are_told_apart_by_the_life_in_which_they_were_given(store: Store) -> None:
    filled(store)
    assert (
        roll_back_history(store, RUN, RollbackPoint(version=3, num_closed_rounds=3), [], now=NOW).incarnations == ()
    )
    for number, at in ((5, 3000.0), (6, 3.0)):  # the clock goes back by an hour
        record_resume(store, RUN, "", at=at)
        give(store, number, f"v{number - 1}-pi-1", at=at)
    lives = dict(
        roll_back_history(store, RUN, RollbackPoint(version=3, num_closed_rounds=3), [], now=NOW).incarnations
    )
    assert lives == {"v4-pi-1": 1, "v5-pi-1": 2}


def test_of_the_runs_that_wait_the_highest_priority_and_then_the_oldest_begins(store: Store) -> None:
    for number, priority in enumerate((0, 5, 5, -1), 2):
        store.add_run(
            run_id=f"r{number}", name="n", task="digits", strategy="fedavg", config={}, seed=7,
            submitted_at=float(number), priority=priority,
        )  # fmt: skip
    assert [record.run_id for record in store.list_queued_runs()] == ["r3", "r4", "r", "r2", "r5"]
    assert store.list_queued_runs()[0] == store.get_run("r3")


def test_a_run_that_is_queued_again_counts_that_and_has_no_end(store: Store) -> None:
    store.set_run_status(RUN, RunStatus.STOPPED, at=5.0, reason="because")
    store.requeue_run(RUN)
    record = store.get_run(RUN)
    assert (record.status, record.reason, record.finished_at, record.resumes) == (RunStatus.QUEUED, None, None, 1)


def test_a_round_that_goes_on_did_not_last_while_the_run_stood_still(store: Store) -> None:
    filled(store)
    receive(store, 4, "v3-pi-1", at=41.0, ended_at=41.0)
    roll_back_history(store, RUN, RollbackPoint(version=5, num_closed_rounds=3, open_round=4), [], now=90_000.0)
    store.close_round(RUN, 4, version=6, closed_at=90_002.0)
    assert read_history(store, "rounds")[-1]["seconds"] == pytest.approx(1.0 + 2.0)


def test_what_a_run_has_counted_outlasts_its_updates(store: Store) -> None:
    filled(store)
    store.set_run_status(RUN, RunStatus.STOPPED, at=50.0)
    before = get_progress(store, RUN)
    store.prune_history(60.0)
    assert read_history(store, "updates") == []
    after = roll_back_history(store, RUN, RollbackPoint(version=3, num_closed_rounds=3), [], now=NOW)
    assert (after.num_updates, after.num_bytes, after.elapsed_s) == (
        before.num_updates,
        before.num_bytes,
        before.elapsed_s,
    )
    assert after.num_updates == 6


@pytest.mark.parametrize("jump_s", [0.0, 3600.0])
def test_rows_say_what_came_behind_the_checkpoint_where_the_journal_does_not(store: Store, jump_s: float) -> None:
    """Also where the clock went back by an hour behind it."""
    give(store, 1, "v0-a1-pi-1", at=10.0 + jump_s)
    receive(store, 1, "v0-a1-pi-1", at=11.0 + jump_s)
    store.record_event("update-clipped", "before", at=12.0 + jump_s, run_id=RUN)
    checkpoint = Checkpoint(sha256="", last_record=1, bytes_file=0, **get_newest_ids(store, RUN))
    give(store, 2, "v1-a1-pi-1", at=20.0)
    use(store, 2, "v0-a1-pi-1", "v1-a1-pi-1", at=21.0)
    for kind in ("update-clipped", "run-paused"):
        store.record_event(kind, "after", at=22.0, run_id=RUN)
    for _ in range(2):  # ids of deleted rows are not given again
        point = RollbackPoint(version=1, num_closed_rounds=1)
        left = roll_back_history(store, RUN, point, [], now=NOW, after=checkpoint)
        assert [row["assignment_id"] for row in read_history(store, "updates", run=RUN)] == ["v0-a1-pi-1"]
        assert [row.assignment_id for row in left.unused_updates] == ["v0-a1-pi-1"]
        assert read_history(store, "evaluations") == []
        delete_events(store, RUN, ["update-clipped"], after_id=checkpoint.newest_event_id)
        kinds = [(row["kind"], row["message"]) for row in read_history(store, "events")]
        assert kinds == [("update-clipped", "before"), ("run-paused", "after")]
        give(store, 3, "v2-a1-pi-1", at=30.0)
        store.record_evaluations(RUN, [score(3)])


@pytest.mark.parametrize("jump_s", [43_200.0, -43_200.0])
def test_rounds_count_for_as_long_as_they_say_and_never_for_less_than_nothing(store: Store, jump_s: float) -> None:
    for number in (1, 2):
        give(store, number, f"v{number - 1}-pi-1", at=10.0 * number)
        use(store, number, f"v{number - 1}-pi-1", at=10.0 * number + 5)
    give(store, 3, "v2-pi-1", at=30.0)
    use(store, 3, "v2-pi-1", at=30.0 + jump_s)
    assert read_history(store, "rounds")[-1]["seconds"] == max(0.0, jump_s)
    store.set_round_metrics(RUN, 3, {"seconds": 5.0})
    assert roll_back_history(store, RUN, RollbackPoint(version=3, num_closed_rounds=3), [], now=NOW).elapsed_s == 15.0
    store.set_round_metrics(RUN, 3, {"seconds": -9.0})  # as earlier programs wrote it
    assert get_progress(store, RUN).elapsed_s == 10.0
