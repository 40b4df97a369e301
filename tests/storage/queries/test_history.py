"""Questions to the history agree with plain SQL."""

import sqlite3

import pytest
from filled_store import FilledStore

from edgefl.core.errors import NotFoundError, UsageError
from edgefl.core.protocol import Heartbeat
from edgefl.core.types import UpdateStatus
from edgefl.storage.queries import history
from edgefl.storage.queries.columns import COLUMNS, SELF_ORDERED_KINDS, get_columns
from edgefl.storage.queries.dashboard import list_run_summaries
from edgefl.storage.queries.history import find_run_id, read_history, read_history_page, read_history_pages
from edgefl.storage.repositories.records import HeartbeatRow, UpdateRow


@pytest.fixture(scope="module")
def lived(tmp_path_factory):
    """A history that nobody changes."""
    with FilledStore.open(tmp_path_factory.mktemp("lived") / "edgefl.db") as store:
        yield filled(store)


def filled(store):
    """Two runs, two devices, three rounds, three kinds of evaluations."""
    store.make_token(uses=5)
    for device in ("a", "b"):
        store.join(device)
    store.submit("run-1", submitted_at=1000.0)
    store.submit("run-2", submitted_at=2000.0, name="second")
    store.record_round("run-1", 1, ["a", "b"], at=1000.0)
    store.record_round("run-1", 2, ["a"], at=1010.0)
    store.record_round("run-2", 1, ["b"], at=2000.0, bytes_up=7)
    store.evaluate("run-1", 1, "device", device="a", accuracy=0.5, num_examples=10)
    store.evaluate("run-1", 1, "device", device="b", accuracy=0.8, num_examples=20)
    store.evaluate("run-1", 2, "device", device="a", accuracy=0.1, at=1013.0)
    store.evaluate("run-1", 2, "evaluator", device="c", accuracy=0.6, at=1013.0)
    store.evaluate("run-1", 2, "coordinator", device="coordinator-evaluator", accuracy=0.9, at=1013.0)
    store.record_event("device-joined", "a joined", at=900.0, device_id="a")
    store.record_event("run-started", "go", at=1000.0, run_id="run-1", data={"by": "me"})
    for at in (1000.0, 1005.0):
        store.record_heartbeats(
            [
                HeartbeatRow(device_id=d, at=at, heartbeat=Heartbeat(seq=1, session_no=1, uptime_s=1.0, run="run-1"))
                for d in ("a", "b")
            ]
        )
    store.record_audit(actor="operator ab", source="10.0.0.5", action="POST runs", outcome="done", at=1.0)
    return store


def column(rows, name):
    return [row[name] for row in rows]


def test_every_kind_has_its_columns_in_their_order(lived):
    for kind in COLUMNS:
        rows = read_history(lived, kind)
        assert rows
        assert all(tuple(row) == get_columns(kind, "device") for row in rows)


def test_agrees_with_sql(lived):
    with sqlite3.connect(lived.database.location) as raw:
        raw.row_factory = sqlite3.Row
        in_sql = [dict(row) for row in raw.execute("SELECT * FROM updates ORDER BY id")]
        in_view = [dict(row) for row in raw.execute("SELECT * FROM v_rounds ORDER BY started_at, round")]
        of_devices = [dict(row) for row in raw.execute("SELECT * FROM v_devices ORDER BY device_id")]
        seconds = raw.execute("SELECT total_s FROM v_updates").fetchall()
    raw.close()
    for row, expected in zip(read_history(lived, "updates"), in_sql, strict=True):
        assert {**row, "metrics": {}} == {**{name: expected[name] for name in COLUMNS["updates"]}, "metrics": {}}
    assert read_history(lived, "rounds") == [{name: row[name] for name in COLUMNS["rounds"]} for row in in_view]
    sums = ("device_id", "num_assignments", "num_used", "compute_s", "bytes_up", "bytes_down")
    assert [[row[name] for name in sums] for row in read_history(lived, "devices")] == [
        [row[name] for name in sums] for row in of_devices
    ]
    assert [row[0] for row in seconds] == [2.0] * 4


def test_a_round_has_the_coordinators_evaluation_before_the_evaluators_before_the_devices_mean(lived):
    first, second, other = read_history(lived, "rounds")
    assert (first["source"], first["accuracy"]) == ("device", pytest.approx((0.5 * 10 + 0.8 * 20) / 30))
    assert (second["source"], second["accuracy"]) == ("coordinator", 0.9)
    assert (other["source"], other["accuracy"], other["loss"]) == (None, None, None)
    assert other["train_loss"] == 0.5


@pytest.mark.parametrize(
    ("kind", "filters", "count"),
    [
        ("rounds", {"run": "run-1"}, 2),
        ("rounds", {"run": "latest"}, 1),
        ("rounds", {"device": "b"}, 2),
        ("rounds", {"since": 1010.0}, 2),
        ("rounds", {"until": 1010.0}, 1),
        ("updates", {"run": "run-1"}, 3),
        ("updates", {"device": "a", "since": 1005.0}, 1),
        ("updates", {"device": "ghost"}, 0),
        ("devices", {"device": "a"}, 1),
        ("devices", {"run": "run-2"}, 1),
        ("heartbeats", {"device": "a"}, 2),
        ("heartbeats", {"since": 1005.0}, 2),
        ("heartbeats", {"run": "run-2"}, 0),
        ("events", {"run": "run-1"}, 1),
        ("events", {"device": "a"}, 1),
        ("evaluations", {"run": "run-1", "device": "a"}, 2),
        ("evaluations", {"until": 1010.0}, 2),
    ],
)
def test_a_filter_leaves_what_it_names(lived, kind, filters, count):
    assert len(read_history(lived, kind, **filters)) == count


@pytest.mark.parametrize("kind", sorted(set(COLUMNS) - SELF_ORDERED_KINDS))
def test_a_limit_keeps_the_newest_and_shows_the_oldest_of_them_first(lived, kind):
    everything = read_history(lived, kind)
    assert read_history(lived, kind, limit=1) == everything[-1:]
    assert read_history(lived, kind, limit=2) == everything[-2:]


ORDERED_COLUMNS = {
    "rounds": "round", "accuracy": "round", "events": "message", "updates": "round", "evaluations": "round",
    "audit": "action",
}  # fmt: skip


@pytest.mark.parametrize("kind", ORDERED_COLUMNS)
def test_rows_are_in_the_order_in_which_they_were_written_whatever_the_clock_said(store, run_id, monkeypatch, kind):
    for number, at in enumerate((9000.0, 9010.0, 5410.0, 5420.0), start=1):  # the clock goes back by an hour
        store.record_round(run_id, number, ["a"], at=at)
        store.evaluate(run_id, number, "device", device="a", at=at)
        store.record_event("test", str(number), at=at, run_id=run_id, device_id="a")
        store.record_audit(actor="me", source="local", action=str(number), outcome="done", at=at)
    monkeypatch.setattr(history, "PAGE_ROWS", 3)
    filters = {"run": run_id} if kind != "audit" else {}
    of_device = {**filters, "device": "a"} if kind in {"updates", "evaluations", "events"} else filters
    pages = [row for page in read_history_pages(store, kind, **filters) for row in page]
    for rows in (read_history(store, kind, **filters), read_history(store, kind, **of_device), pages):
        assert [int(row[ORDERED_COLUMNS[kind]]) for row in rows] == [1, 2, 3, 4]
    assert [int(row[ORDERED_COLUMNS[kind]]) for row in read_history(store, kind, **filters, limit=2)] == [3, 4]


def test_runs_are_in_the_order_in_which_they_were_submitted_whatever_the_clock_said(store):
    names = ["run-b", "run-d", "run-a", "run-c"]
    for name, at in zip(names, (1000.0, 5000.0, 10.0, 20.0), strict=True):  # the clock goes forward, then back
        store.submit(name, submitted_at=at, name="same")
        assert find_run_id(store, "latest") == find_run_id(store, "same") == name
    assert column(read_history(store, "runs"), "run_id") == names
    assert column(read_history(store, "runs", limit=2), "run_id") == names[2:]
    page, cursor = read_history_page(store, "runs", "", limit=3)
    assert column(page, "run_id") + column(read_history_page(store, "runs", cursor)[0], "run_id") == names
    assert column(list_run_summaries(store, limit=3), "run_id") == names[:0:-1]
    assert [record.run_id for record in store.list_runs()] == names[::-1]
    assert [record.run_id for record in store.list_queued_runs()] == names


def test_a_run_is_found_by_id_name_beginning_and_as_the_latest(store):
    lived = filled(store)
    assert find_run_id(lived, "run-1") == "run-1"
    assert find_run_id(lived, "second") == "run-2"
    assert find_run_id(lived, "latest") == "run-2"
    lived.submit("x%_odd", submitted_at=1.0)
    assert find_run_id(lived, "x%") == "x%_odd"
    for text, complaint in (("run-", "several"), ("nothing", "no run"), ("%", "no run"), ("", "several")):
        with pytest.raises(NotFoundError, match=complaint):
            find_run_id(lived, text)


def test_the_latest_of_no_runs_is_an_error_of_one_line(store):
    with pytest.raises(NotFoundError, match="no run yet"):
        read_history(store, "rounds", run="latest")


@pytest.mark.parametrize(("kind", "limit"), [("nonsense", None), ("rounds", 0)])
def test_nonsense_is_a_usage_error(store, kind, limit):
    with pytest.raises(UsageError):
        read_history(store, kind, limit=limit)


def test_the_usual_question_is_quick_over_a_long_history(store, run_id):
    with store.database.write() as connection:
        connection.exec_driver_sql(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000) "
            "INSERT INTO rounds (run_id, round, version, started_at, num_devices, num_updates, bytes_up, bytes_down) "
            "SELECT 'run-1', i, i, i, 1, 1, 1, 1 FROM n"
        )
        plan = connection.exec_driver_sql(
            "EXPLAIN QUERY PLAN SELECT * FROM v_rounds ORDER BY started_at DESC LIMIT 100"
        ).fetchall()
    assert "ix_rounds_started" in str(plan)
    assert len(read_history(store, "rounds", limit=100)) == 100


def test_evaluations_of_devices_own_models_are_rows_and_no_part_of_a_round_s_accuracy(store, run_id):
    store.record_round(run_id, 1, ["a"])
    store.record_round(run_id, 2, ["a"], at=1010.0)
    store.evaluate(run_id, 1, "device", device="a", accuracy=0.75)
    store.evaluate(run_id, 1, "device", device="a", accuracy=0.25, subject="a")
    store.evaluate(run_id, 1, "coordinator", device="own", accuracy=0.125, subject="a")
    store.evaluate(run_id, 2, "coordinator", device="own", accuracy=0.125, subject="a", at=1013.0)
    first, second = read_history(store, "rounds")
    assert (first["source"], first["accuracy"], first["loss"]) == ("device", 0.75, 1.0)
    assert (second["source"], second["accuracy"], second["loss"]) == (None, None, None)
    assert column(read_history(store, "evaluations"), "subject") == ["", "a", "a", "a"]


@pytest.mark.parametrize("kind", sorted(COLUMNS))
def test_pages_hold_every_row_once_in_their_order(lived, monkeypatch, kind):
    everything, size = read_history(lived, kind), 2
    monkeypatch.setattr(history, "PAGE_ROWS", size)
    pages = list(read_history_pages(lived, kind))
    assert [row for page in pages for row in page] == everything
    if kind in {"rounds", "updates", "slow", "heartbeats", "events", "evaluations", "runs"}:
        assert all(len(page) <= size for page in pages)


def test_pages_of_rows_of_one_instant_lose_none(store, monkeypatch):
    for number in range(7):
        store.record_event("note", str(number), at=5.0)
    monkeypatch.setattr(history, "PAGE_ROWS", 2)
    told = [row["message"] for page in read_history_pages(store, "events") for row in page]
    assert told == [str(number) for number in range(7)]


@pytest.mark.parametrize("place", ["x", "[1]", "[1,2,3]", '["a",1]', "[1,[2]]", "[NaN,1]", "9" * 500, "[" * 300])
def test_a_place_that_is_none_is_a_usage_error(store, place):
    with pytest.raises(UsageError, match="a place in the history"):
        read_history_page(store, "events", place)


@pytest.mark.parametrize(
    ("kind", "filters", "words"),
    [
        ("updates", {"by": "day"}, "can be by device, day, run; got updates by 'day'"),
        ("traffic", {"by": "week"}, "by 'week'"),
        ("accuracy", {"device": "a"}, "the accuracy is the model's"),
        ("traffic", {"since": float("nan")}, "since must be a time"),
        ("traffic", {"until": 1e300}, "until must be a time"),
    ],
)
def test_a_filter_that_makes_no_sense_is_a_usage_error(lived, kind, filters, words):
    with pytest.raises(UsageError, match=words):
        read_history(lived, kind, **filters)


def test_traffic_is_by_device_day_or_run_of_whatever_is_chosen(lived):
    def traffic(**filters):
        return [
            tuple(row[name] for name in (next(iter(row)), "bytes_up"))
            for row in read_history(lived, "traffic", **filters)
        ]

    assert traffic() == [("a", 200), ("b", 107)]
    assert traffic(run="run-1") == [("a", 200), ("b", 100)]
    assert traffic(device="b", by="run") == [("run-1", 100), ("run-2", 7)]
    assert traffic(by="run") == [("run-1", 300), ("run-2", 7)]
    assert traffic(by="day") == [("1970-01-01", 307)]
    assert traffic(by="day", run="run-2") == [("1970-01-01", 7)]
    assert traffic(since=86_400.0) == []
    assert traffic(until=86_400.0) == [("a", 200), ("b", 107)]
    assert traffic(where=["bytes_up>150"]) == [("a", 200)]


def test_accuracy_is_against_rounds_seconds_and_bytes_so_far_of_the_newest_run_or_the_named(lived):
    names = ("round", "at_s", "bytes_up", "bytes_down", "accuracy")
    rows = [tuple(row[name] for name in names) for row in read_history(lived, "accuracy", run="run-1")]
    assert rows == [(1, 3.0, 200, 400, pytest.approx(0.7)), (2, 13.0, 300, 600, 0.9)]
    assert [row["run_id"] for row in read_history(lived, "accuracy")] == ["run-2"]
    assert [row["bytes_up"] for row in read_history(lived, "accuracy", run="run-1", limit=1)] == [300]


def test_slow_rounds_come_slowest_first_with_what_each_waited_for(store, run_id):
    for number, took_s in enumerate((4.0, 9.0, 2.0), start=1):
        store.open_round(run_id, number, started_at=100.0 * number)
        rows = [
            UpdateRow(
                assignment_id=f"{number}{device}", device_id=device, round=number, base_version=number,
                applied_version=number, outcome=UpdateStatus.USED, compute_s=ended_s,
                ended_at=100.0 * number + ended_s, received_at=100.0 * number + ended_s, throttled="throttled",
            )
            for device, ended_s in (("quick", 1.0), (f"slow-{number}", took_s))
        ]  # fmt: skip
        store.record_updates(run_id, rows)
        store.close_round(run_id, number, version=number, closed_at=100.0 * number + took_s)
    names = ("round", "seconds", "waited_for", "waited_s", "compute_s", "throttled")
    rows = [tuple(row[name] for name in names) for row in read_history(store, "slow", limit=2)]
    assert rows == [(2, 9.0, "slow-2", 8.0, 9.0, "throttled"), (1, 4.0, "slow-1", 3.0, 4.0, "throttled")]
    assert column(read_history(store, "slow", device="slow-3"), "round") == [3]


def test_dropouts_and_staleness_are_counted_by_device(store, run_id):
    outcomes = {"a": UpdateStatus.USED, "b": UpdateStatus.LOST, "c": UpdateStatus.LATE, "d": UpdateStatus.USED}
    rows = [
        UpdateRow(
            assignment_id=name, device_id="pi", round=1, base_version=0, outcome=outcome, received_at=1.0,
            staleness={"a": 0, "d": 4}.get(name),
        )
        for name, outcome in outcomes.items()
    ]  # fmt: skip
    store.record_updates(run_id, rows)
    (dropped,), (stale,) = read_history(store, "dropouts"), read_history(store, "stale")
    assert (dropped["num_assignments"], dropped["num_lost"], dropped["num_late"]) == (4, 1, 1)
    assert dropped["dropout_fraction"] == 0.5
    assert (stale["num_stale"], stale["mean_staleness"], stale["stale_fraction"], stale["max_staleness"]) == (
        1,
        2,
        0.5,
        4,
    )


def test_heartbeats_of_a_device_in_a_run_are_found(store):
    lived = filled(store)
    lived.record_heartbeats(
        [
            HeartbeatRow(device_id="a", at=at, heartbeat=Heartbeat(seq=1, session_no=1, uptime_s=1.0))
            for at in (999.0, 1002.0, 1009.0)
        ]
    )
    assert column(read_history(lived, "heartbeats", run="run-1", device="a"), "at") == [1000.0, 1005.0]
