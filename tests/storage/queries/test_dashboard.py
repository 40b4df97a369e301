from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgefl.storage.queries.dashboard import (
    downsample_indices,
    find_newest_rounds,
    get_device_timeline,
    get_run_curve,
    list_closed_rounds,
    list_draining_devices,
    list_events_after,
    list_run_summaries,
)
from edgefl.storage.queries.history import read_history
from edgefl.storage.repositories.records import AssignmentRow, EvaluationRow, RoundMetrics, UpdateRow
from edgefl.storage.store import Store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A run of 40 closed rounds and one open one; round 23 took long, 31 lost its accuracy for once."""
    with Store.open(tmp_path_factory.mktemp("curves") / "edgefl.db") as opened, opened.batch():
        opened.add_run(run_id="r", name="n", task="t", strategy="s", config={}, seed=1, submitted_at=0.0)
        for number in range(1, 42):
            at = 100.0 * number
            opened.open_round("r", number, started_at=at, num_devices=2)
            for device, compute_s in (("fast", 1.0), ("slow", 3.0)):
                name = f"{device}-{number}"
                dispatch = AssignmentRow(
                    assignment_id=name, device_id=device, round=number, base_version=number - 1, dispatched_at=at
                )
                opened.record_assignments("r", [dispatch])
                update = UpdateRow(
                    assignment_id=name, device_id=device, round=number, base_version=number - 1, bytes_up=10,
                    bytes_down=20, compute_s=compute_s, send_s=0.5, wait_s=4 - compute_s, received_at=at + 4,
                )  # fmt: skip
                opened.record_updates("r", [update])
            if number == 41:
                break
            opened.close_round("r", number, version=number, closed_at=at + (60.0 if number == 23 else 5.0))
            evaluation = EvaluationRow(
                assignment_id=f"e-{number}", round=number, version=number, device_id="own", source="coordinator",
                loss=1.0, accuracy=0.1 if number == 31 else number / 100, num_examples=10, at=at + 6,
            )  # fmt: skip
            opened.record_evaluations("r", [evaluation])
        yield opened


def test_a_course_says_what_the_view_of_rounds_says(store: Store) -> None:
    judged = EvaluationRow(
        assignment_id="e-d", round=7, version=7, device_id="fast", source="device", loss=3.0, accuracy=0.9,
        num_examples=30, at=9.0,
    )  # fmt: skip
    own = EvaluationRow(
        assignment_id="e-s", round=8, version=8, device_id="fast", source="coordinator", loss=3.0, accuracy=0.9,
        num_examples=30, at=9.0, subject="fast",
    )  # fmt: skip
    store.record_evaluations("r", [judged, own])
    told = {row["round"]: row for row in read_history(store, "rounds") if row["closed_at"] is not None}
    rows = list_closed_rounds(store, "r")
    assert [row["round"] for row in rows] == list(range(1, 41))
    for row in rows:
        for name in ("accuracy", "loss", "train_loss", "bytes_up", "bytes_down", "closed_at", "num_updates"):
            assert row[name] == told[row["round"]][name], name
    assert rows[22]["seconds"] == 60.0
    assert list_closed_rounds(store, "r", after=38) == rows[38:]


def test_a_thinned_curve_keeps_its_ends_its_extremes_and_its_totals(store: Store) -> None:
    num_rounds, rows = get_run_curve(store, "r", 20)
    assert num_rounds == 40
    assert len(rows) < 20
    rounds = [row["round"] for row in rows]
    assert {1, 23, 31, 40} <= set(rounds)
    assert rounds == sorted(rounds)
    for row in rows:
        assert (row["total_up"], row["total_down"]) == (20 * row["round"], 40 * row["round"])


def test_a_curve_says_how_far_the_devices_models_lie_apart_where_that_is_known(store: Store) -> None:
    store.set_round_metrics("r", 7, RoundMetrics(facts={"disagreement": 0.25}))
    rows = {row["round"]: row for row in get_run_curve(store, "r", 40)[1]}
    assert (rows[7]["disagreement"], rows[8]["disagreement"]) == (0.25, None)


def test_a_curve_of_enough_points_is_whole_and_one_of_no_rounds_empty(store: Store) -> None:
    assert len(get_run_curve(store, "r", 40)[1]) == 40
    store.add_run(run_id="new", name="n", task="t", strategy="s", config={}, seed=1, submitted_at=0.0)
    assert get_run_curve(store, "new", 40) == (0, [])


def test_spans_are_of_closed_rounds_with_those_who_were_busy_longest_first_to_be_kept(store: Store) -> None:
    assert find_newest_rounds(store, "r", 2) == (39, 40)
    assert find_newest_rounds(store, "nobody's", 2) is None
    found = get_device_timeline(store, "r", 39, 40)
    assert (found["num_devices"], len(found["rows"])) == (2, 4)
    assert {row["device_id"] for row in get_device_timeline(store, "r", 39, 40, max_devices=1)["rows"]} == {"slow"}
    first = found["rows"][0]
    assert (first["round"], first["dispatched_at"], first["compute_s"], first["wait_s"]) == (39, 3900.0, 1.0, 3.0)


def test_only_newer_events_are_told_and_of_too_many_the_newest(tmp_path: Path) -> None:
    with Store.open(tmp_path / "edgefl.db") as store:
        for number in range(5):
            store.record_event("device-online", str(number), at=float(number), device_id="pi")
        rows = list_events_after(store, 0, limit=3)
        assert [row["message"] for row in rows] == ["2", "3", "4"]
        assert [row["message"] for row in list_events_after(store, rows[1]["id"], limit=3)] == ["4"]
        assert list_events_after(store, rows[-1]["id"], limit=3) == []


def test_a_run_s_head_knows_its_goal_in_rounds_where_it_has_one(tmp_path: Path) -> None:
    with Store.open(tmp_path / "edgefl.db") as store:
        for run_id, config in (("a", {"run": {"rounds": 20}}), ("b", {"run": {"seconds": 5.0}})):
            store.add_run(run_id=run_id, name="n", task="t", strategy="s", config=config, seed=1, submitted_at=1.0)
        assert [(row["run_id"], row["goal_rounds"]) for row in list_run_summaries(store, limit=9)] == [
            ("b", None),
            ("a", 20),
        ]
        assert "config" not in list_run_summaries(store, limit=1)[0]


def test_who_was_asked_last_to_drain_is_drained(tmp_path: Path) -> None:
    with Store.open(tmp_path / "edgefl.db") as store:
        for device, kind in (
            ("a", "drain-requested"), ("b", "drain-requested"), ("b", "resume-requested"), ("c", "drain-requested"),
            ("c", "device-joined"), ("a", "device-online"),
        ):  # fmt: skip
            store.record_event(kind, "m", at=1.0, device_id=device)
        assert list_draining_devices(store) == ["a"]


def test_a_long_curve_keeps_its_ends_its_extremes_and_how_far_each_stretch_swings():
    assert downsample_indices([np.arange(10.0)], 10) == list(range(10)), "a short one keeps every point"
    values = np.sin(np.arange(100_000) / 500)
    values[77_777], values[12_345] = -3.0, 4.0
    places = downsample_indices([values], 200)
    assert len(places) <= 202
    assert {0, 12_345, 77_777, 99_999} <= set(places)
    assert places == sorted(set(places))
    values = np.tile([0.0, 1.0, -1.0, 0.5], 1000)
    kept = values[downsample_indices([values], 100)]
    assert min(np.sum(kept == 1.0), np.sum(kept == -1.0)) >= 50


def test_places_where_nothing_is_known_are_no_extremes() -> None:
    unknown, known = np.full(100, np.nan), np.arange(100.0)
    known[50] = -1
    assert downsample_indices([unknown, known], 4) == [0, 50, 99]
