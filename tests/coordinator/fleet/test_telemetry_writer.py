"""What happens to a fleet's diary while it cannot be written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_fleet import SmallFleet, beat, enroll, status

from edgefl.coordinator.auth import RejectedRequestLog
from edgefl.coordinator.fleet import telemetry_writer as module
from edgefl.coordinator.fleet.registry import MAX_ERROR_CHARS, MAX_SHARD_ERRORS, parse_shard_errors
from edgefl.coordinator.fleet.telemetry_writer import SETTLING_TIME_S, TelemetryWriter, record_capabilities
from edgefl.core.claims import DATA_DRIFTED, EXAMPLES_CHANGED
from edgefl.core.errors import StoreFullError
from edgefl.core.protocol import Capabilities, Heartbeat, Topic
from edgefl.storage import store as retention
from edgefl.storage.queries.history import read_history
from edgefl.storage.repositories.records import AssignmentRow, HeartbeatRow, RunStatus
from edgefl.storage.store import Store


class FullNow:
    """A store that has no room while `is_full`."""

    def __init__(self, store: Store) -> None:
        self._store, self.is_full = store, False

    def __getattr__(self, name: str) -> Any:
        if self.is_full and name == "batch":
            raise StoreFullError("no room")
        return getattr(self._store, name)


class Site:
    def __init__(self, store: Store) -> None:
        self.store = store
        enroll(store, "pi")
        self.full: Any = FullNow(store)
        fleet = SmallFleet()
        fleet.add("pi", state=None)
        self.diary = TelemetryWriter(
            store=self.full,
            registry=fleet.registry,
            clock=lambda: self.now,
            monotonic=lambda: self.now_s,
            keep_history_days=365,
            on_progress=lambda _: None,
            on_heartbeat=lambda _name, _beat: None,
        )
        self.seq, self.now, self.now_s = 0, 1000.0, 0.0

    def beat(self, number: int) -> None:
        for _ in range(number):
            self.seq += 1
            self.diary.on_message("pi", Topic.HEARTBEAT, beat(self.seq, temperature_c=self.seq).dump())

    def rows(self, kind: str) -> list[Any]:
        return list(read_history(self.store, kind))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Store.open(tmp_path / "edgefl.db") as store:
        yield Site(store)


def test_what_cannot_be_written_waits_in_order(site: Site) -> None:
    site.full.is_full = True
    site.diary.on_message("pi", Topic.STATUS, status(version="0.9").dump())
    for _ in range(3):
        site.beat(2)
        with pytest.raises(StoreFullError):
            site.diary.flush()
    site.full.is_full = False
    site.diary.flush()
    site.diary.flush()
    assert [row["temperature_c"] for row in site.rows("heartbeats")] == [1, 2, 3, 4, 5, 6]
    assert [row["kind"] for row in site.rows("events")] == ["device-online"]
    assert site.store.get_device("pi").version == "0.9"


def test_what_waits_too_long_is_dropped_oldest_first_and_counted(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING_ROWS", 4)
    site.full.is_full = True
    for _ in range(3):
        site.beat(2)
        with pytest.raises(StoreFullError):
            site.diary.flush()
    site.beat(1)
    site.full.is_full = False
    site.diary.flush()
    assert [row["temperature_c"] for row in site.rows("heartbeats")] == [3, 4, 5, 6, 7]
    [dropped] = [row for row in site.rows("events") if row["kind"] == "events-dropped"]
    assert dropped["message"].startswith("2 heartbeats and events were dropped")


DAY = 86_400.0
YEAR = 365 * DAY


def pass_by(site: Site, seconds: float) -> None:
    site.now, site.now_s = site.now + seconds, site.now_s + seconds
    site.diary.flush()


def ended(site: Site, at: float) -> None:
    site.store.add_run(run_id="r", name="r", task="t", strategy="fedavg", config={}, seed=1, submitted_at=at)
    site.store.open_round("r", 1, started_at=at)
    row = AssignmentRow(assignment_id="a", device_id="pi", round=1, base_version=0, dispatched_at=at)
    site.store.record_assignments("r", [row])
    site.store.set_run_status("r", RunStatus.FINISHED, at=at)


def test_a_clock_that_is_years_ahead_for_a_moment_deletes_nothing(site: Site) -> None:
    site.now = 10 * YEAR
    site.beat(1)
    pass_by(site, 2 * SETTLING_TIME_S)
    ended(site, site.now)
    pass_by(site, SETTLING_TIME_S / 2)
    site.now += 2 * YEAR
    site.beat(1)
    for _ in range(5):
        pass_by(site, 600.0)
    site.now -= 2 * YEAR
    for _ in range(10):
        pass_by(site, SETTLING_TIME_S)
    assert [row["assignment_id"] for row in site.rows("updates")] == ["a"]


def test_a_clock_that_stays_where_it_was_set_is_believed_after_an_hour(site: Site) -> None:
    ended(site, 1000.0)
    site.now = 2 * YEAR
    site.beat(1)
    site.diary.flush()
    pass_by(site, SETTLING_TIME_S - 1.0)
    assert len(site.rows("updates")) == 1, "nothing that was stored before says that it is so late"
    pass_by(site, 1.0)
    assert site.rows("updates") == []


def test_a_clock_that_follows_what_is_stored_is_believed_at_once(site: Site) -> None:
    ended(site, 1000.0)
    site.store.record_heartbeats(
        [HeartbeatRow(device_id="pi", at=2 * YEAR, heartbeat=Heartbeat(seq=1, session_no=1, uptime_s=1.0))]
    )
    site.now = 2 * YEAR + 60.0
    site.diary.flush()
    assert site.rows("updates") == []


def test_heartbeats_are_rolled_up_though_the_clock_was_years_ahead_for_hours(site: Site) -> None:
    site.now = 2 * YEAR
    for _ in range(3):
        pass_by(site, SETTLING_TIME_S)
    site.now = 10 * DAY + 7.0
    site.beat(1)
    site.diary.flush()
    pass_by(site, 2 * DAY)
    assert site.store.get_newest_heartbeat_time() == 10 * DAY, "a row of five minutes"


def test_what_strangers_tried_is_kept_up_to_a_bound_for_as_long_as_it_lasts(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "MAX_REJECTED_EVENTS", 100)
    attempts = RejectedRequestLog(store=site.store, clock=lambda: site.now, monotonic=lambda: site.now_s)
    for minute in range(300):
        attempts.record("join (token-invalid)", f"10.0.{minute}.1", "no such token")
        attempts.flush()
        site.diary.flush()
        site.now, site.now_s = site.now + 60.0, site.now_s + 60.0
    assert (
        100
        <= len([row for row in read_history(site.store, "events") if row["kind"] == "request-rejected"])
        <= 100 + 60
    )


def test_a_report_of_other_numbers_of_examples_is_an_event_that_says_what_counts(site: Site) -> None:
    for count in (5, 40_000):
        site.diary.on_message("pi", Topic.CAPABILITIES, Capabilities(facts={}, shards={"digits": count}).dump())
    site.diary.flush()
    (row,) = [row for row in site.rows("events") if row["kind"] == EXAMPLES_CHANGED]
    assert (row["device_id"], row["message"]) == ("pi", "digits: 5 before, reported 40000, counted 10005")


def test_a_large_drift_is_an_event(site: Site) -> None:
    claim = {"column": "a\nb", "psi": 0.5, "ks": None, "num_reference": 200, "num_newer": 100}
    report = Capabilities(facts={"drift": {"digits": claim}}, shards={})
    site.diary.on_message("pi", Topic.CAPABILITIES, report.dump())
    site.diary.flush()
    (row,) = [row for row in site.rows("events") if row["kind"] == DATA_DRIFTED]
    assert (row["device_id"], row["message"]) == ("pi", "digits: psi 0.5 of a b, 100 examples against 200")


@pytest.mark.parametrize(
    ("told", "faults"),
    [
        ({"digits": "away"}, {"digits": "away"}),
        ({"digits": "a\n\x1b[2Jb"}, {"digits": r"a \x1b[2Jb"}),
        ({"digits": 7, "mnist": None}, {}),
        (["digits"], {}),
        ("digits", {}),
        (None, {}),
    ],
)
def test_what_a_device_tells_is_taken_as_lines_and_nothing_else(told: Any, faults: dict[str, str]) -> None:
    assert parse_shard_errors({"shard_errors": told}) == faults


def test_a_device_cannot_fill_the_events() -> None:
    found = parse_shard_errors({"shard_errors": {f"t{number}" * 200: "x" * 9999 for number in range(1000)}})
    assert len(found) == MAX_SHARD_ERRORS
    assert {len(text) for pair in found.items() for text in pair} == {MAX_ERROR_CHARS}


class Rows:
    """A store that keeps the newest report, and all events."""

    def __init__(self) -> None:
        self.newest: Any = None
        self.events: list[tuple[str, str, str]] = []

    def record_capabilities(self, _device: str, facts: Any, shards: Any, _at: float) -> bool:
        before, self.newest = self.newest, (facts, shards)
        return bool(before != self.newest)

    def record_event(self, kind: str, message: str, *, device_id: str, **_: Any) -> None:
        self.events.append((kind, message, device_id))


def test_an_event_is_written_when_it_is_new_and_not_at_every_report() -> None:
    store, report = Rows(), {"shard_errors": {"digits": "away"}}
    for at in (1.0, 2.0):
        record_capabilities(store, "pi-1", report, {}, at=at)  # type: ignore[arg-type]
    assert store.events == [("shard-unreadable", "digits: away", "pi-1")]
    record_capabilities(store, "pi-1", {}, {"digits": 3}, at=3.0)  # type: ignore[arg-type]
    assert len(store.events) == 1
