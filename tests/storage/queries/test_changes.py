from __future__ import annotations

from pathlib import Path

from edgefl.storage.queries.changes import list_draining_devices, list_events_after, list_run_summaries
from edgefl.storage.store import Store


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
            ("a", "drain-asked"), ("b", "drain-asked"), ("b", "resume-asked"), ("c", "drain-asked"),
            ("c", "device-joined"), ("a", "device-online"),
        ):  # fmt: skip
            store.record_event(kind, "m", at=1.0, device_id=device)
        assert list_draining_devices(store) == ["a"]
