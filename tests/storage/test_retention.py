"""What is forgotten, and what stays."""

import pytest

from edgefl.coordinator.fleet.presence import DevicePresence
from edgefl.core.protocol import Heartbeat
from edgefl.storage import store as store_module
from edgefl.storage.queries.history import read_history
from edgefl.storage.repositories.records import HeartbeatRow, RunStatus

DAY = 86_400.0


@pytest.fixture
def lived(store, monkeypatch):
    monkeypatch.setattr(store_module, "PRUNE_BATCH_ROWS", 2)
    for run_id, status, at in (
        ("old", RunStatus.FINISHED, 10 * DAY), ("new", RunStatus.STOPPED, 90 * DAY),
        ("cut-off", RunStatus.INTERRUPTED, 10 * DAY), ("on", RunStatus.RUNNING, 10 * DAY),
    ):  # fmt: skip
        store.submit(run_id, submitted_at=at)
        store.record_round(run_id, 1, ["a", "b", "c"], at=at)
        store.evaluate(run_id, 1, "coordinator", at=at)
        store.set_run_status(run_id, status, at=at + 9)
    for at in (10 * DAY, 90 * DAY):
        store.record_heartbeats(
            [HeartbeatRow(device_id="a", at=at, heartbeat=Heartbeat(seq=1, session_no=1, uptime_s=1.0))]
        )
    store.prune_heartbeats(100 * DAY)
    return store


def runs_of(store, kind):
    return sorted({row["run_id"] for row in read_history(store, kind)})


def test_updates_of_runs_that_ended_before_go_and_all_others_stay(lived):
    assert lived.prune_history(50 * DAY) == 3 + 1
    assert runs_of(lived, "updates") == ["cut-off", "new", "on"]
    assert [row["at"] for row in read_history(lived, "heartbeats")] == [90 * DAY]
    assert lived.prune_history(50 * DAY) == 0


def test_sums_rounds_and_evaluations_stay(lived):
    kinds = ("runs", "rounds", "evaluations", "accuracy", "slow", "traffic", "dropouts", "stale")
    before = {kind: read_history(lived, kind, run="old") for kind in kinds}
    lived.prune_history(50 * DAY)
    after = {kind: read_history(lived, kind, run="old") for kind in kinds}
    gone = dict.fromkeys(("outcome", "iterations", "compute_s", "send_s", "bytes_up", "bytes_down"))
    assert after.pop("slow") == [{**row, **gone} for row in before.pop("slow")]
    assert after == before


def test_a_run_that_is_taken_up_again_keeps_the_sums_of_rounds_whose_updates_are_gone(lived):
    lived.prune_history(100 * DAY)
    before = read_history(lived, "rounds", run="new")
    lived.requeue_run("new")
    lived.record_round("new", 2, ["a", "b"], at=101 * DAY)
    lived.update_round_sums("new")
    first, second = read_history(lived, "rounds", run="new")
    assert [first] == before
    assert (first["num_updates"], second["num_updates"]) == (3, 2)


def test_of_a_run_that_is_taken_up_again_meanwhile_nothing_more_goes(lived):
    assert lived._prune_updates("on") == 0, "as a run that was over a moment ago"
    assert lived._prune_updates("new") == 3


def test_who_came_and_went_long_ago_goes_and_every_other_event_stays(store, monkeypatch):
    monkeypatch.setattr(store_module, "PRUNE_BATCH_ROWS", 2)
    for at in (10 * DAY, 90 * DAY):
        for kind in (
            "device-online",
            "device-gone",
            "device-restarted",
            "request-rejected",
            "device-joined",
            "drain-requested",
        ):
            store.record_event(kind, "", at=at, device_id="a")
    assert store.prune_history(50 * DAY) == 4
    left = [(row["kind"], row["at"] / DAY) for row in read_history(store, "events")]
    assert left[:2] == [("device-joined", 10), ("drain-requested", 10)]
    assert len(left) == 2 + 6


def test_of_what_was_refused_only_the_newest_events_stay_however_long_history_is_kept(store, monkeypatch):
    monkeypatch.setattr(store_module, "PRUNE_BATCH_ROWS", 2)
    monkeypatch.setattr(store_module, "MAX_REJECTED_EVENTS", 3)
    for number in range(8):
        store.record_event("request-rejected", str(number), at=1.0)
        store.record_event("device-joined", str(number), at=1.0, device_id="a")
        if number == 2:
            assert store.prune_rejected_events() == 0
    assert store.prune_rejected_events() == 5
    left = [(row["kind"], row["message"]) for row in read_history(store, "events")]
    assert [message for kind, message in left if kind == "request-rejected"] == ["5", "6", "7"]
    assert len(left) == 3 + 8


def test_the_kinds_that_go_are_those_that_presence_writes():
    assert {f"device-{state}" for state in DevicePresence} <= set(store_module.PRESENCE_EVENT_KINDS)
