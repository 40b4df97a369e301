"""Questions to the history agree with plain SQL."""

import sqlite3

import pytest

from edgefl.errors import NotFoundError, UsageError
from edgefl.storage.columns import COLUMNS
from edgefl.storage.queries import find_run, history
from edgefl.storage.records import HeartbeatRow


@pytest.fixture
def lived(store):
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
            [HeartbeatRow(device_id=d, at=at, seq=1, session_no=1, uptime_s=1.0, run="run-1") for d in ("a", "b")]
        )
    return store


def column(rows, name):
    return [row[name] for row in rows]


def test_every_kind_has_its_columns_in_their_order(lived):
    for kind, columns in COLUMNS.items():
        rows = history(lived, kind)
        assert rows
        assert all(tuple(row) == columns for row in rows)


def test_agrees_with_sql(lived):
    with sqlite3.connect(lived.database.where) as raw:
        raw.row_factory = sqlite3.Row
        in_sql = [dict(row) for row in raw.execute("SELECT * FROM updates ORDER BY id")]
        in_view = [dict(row) for row in raw.execute("SELECT * FROM v_rounds ORDER BY started_at, round")]
        of_devices = [dict(row) for row in raw.execute("SELECT * FROM v_devices ORDER BY device_id")]
        seconds = raw.execute("SELECT total_s FROM v_updates").fetchall()
    raw.close()
    for row, expected in zip(history(lived, "updates"), in_sql, strict=True):
        assert {**row, "metrics": {}} == {**{name: expected[name] for name in COLUMNS["updates"]}, "metrics": {}}
    assert history(lived, "rounds") == [{name: row[name] for name in COLUMNS["rounds"]} for row in in_view]
    sums = ("device_id", "num_assignments", "num_used", "compute_s", "bytes_up", "bytes_down")
    assert [[row[name] for name in sums] for row in history(lived, "devices")] == [
        [row[name] for name in sums] for row in of_devices
    ]
    assert [row[0] for row in seconds] == [2.0] * 4


def test_a_round_has_the_coordinators_evaluation_before_the_evaluators_before_the_devices_mean(lived):
    first, second, other = history(lived, "rounds")
    assert (first["source"], first["accuracy"]) == ("device", pytest.approx((0.5 * 10 + 0.8 * 20) / 30))
    assert (second["source"], second["accuracy"]) == ("coordinator", 0.9)
    assert (other["source"], other["accuracy"], other["loss"]) == (None, None, None)
    assert other["train_loss"] == 0.5


def test_the_evaluators_evaluation_counts_when_the_coordinator_has_none(store, run_id):
    store.record_round(run_id, 1, ["a"])
    store.evaluate(run_id, 1, "device")
    store.evaluate(run_id, 1, "evaluator", accuracy=0.7)
    assert [(row["source"], row["accuracy"]) for row in history(store, "rounds")] == [("evaluator", 0.7)]


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
    assert len(history(lived, kind, **filters)) == count


def test_sums_of_devices_are_those_of_the_chosen_run(lived):
    (row,) = history(lived, "devices", run="run-2")
    assert (row["device_id"], row["bytes_up"], row["num_used"]) == ("b", 7, 1)


@pytest.mark.parametrize("kind", sorted(set(COLUMNS) - {"devices"}))
def test_a_limit_keeps_the_newest_and_shows_the_oldest_of_them_first(lived, kind):
    everything = history(lived, kind)
    assert history(lived, kind, limit=1) == everything[-1:]
    assert history(lived, kind, limit=2) == everything[-2:]


def test_a_run_is_found_by_id_name_beginning_and_as_the_latest(lived):
    assert find_run(lived, "run-1") == "run-1"
    assert find_run(lived, "second") == "run-2"
    assert find_run(lived, "latest") == "run-2"
    lived.submit("x%_odd", submitted_at=1.0)
    assert find_run(lived, "x%") == "x%_odd"
    for text, complaint in (("run-", "several"), ("nothing", "no run"), ("%", "no run"), ("", "several")):
        with pytest.raises(NotFoundError, match=complaint):
            find_run(lived, text)


def test_the_latest_of_no_runs_is_an_error_of_one_line(store):
    with pytest.raises(NotFoundError, match="no run yet"):
        history(store, "rounds", run="latest")


@pytest.mark.parametrize(("kind", "limit"), [("nonsense", None), ("rounds", 0)])
def test_nonsense_is_a_usage_error(store, kind, limit):
    with pytest.raises(UsageError):
        history(store, kind, limit=limit)


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
    assert len(history(store, "rounds", limit=100)) == 100


def test_evaluations_of_devices_own_models_are_rows_and_no_part_of_a_round_s_accuracy(store, run_id):
    store.record_round(run_id, 1, ["a"])
    store.record_round(run_id, 2, ["a"], at=1010.0)
    store.evaluate(run_id, 1, "device", device="a", accuracy=0.75)
    store.evaluate(run_id, 1, "device", device="a", accuracy=0.25, subject="a")
    store.evaluate(run_id, 1, "coordinator", device="own", accuracy=0.125, subject="a")
    store.evaluate(run_id, 2, "coordinator", device="own", accuracy=0.125, subject="a", at=1013.0)
    first, second = history(store, "rounds")
    assert (first["source"], first["accuracy"], first["loss"]) == ("device", 0.75, 1.0)
    assert (second["source"], second["accuracy"], second["loss"]) == (None, None, None)
    assert column(history(store, "evaluations"), "subject") == ["", "a", "a", "a"]


def test_figures_of_a_round_come_back_as_they_were_written(store, run_id):
    store.record_round(run_id, 1, ["a"])
    store.record_round(run_id, 2, ["a"], at=1010.0)
    store.set_round_figures(run_id, 1, {"node_accuracy": 0.5, "worst_node_accuracy": 0.25, "facts": {"x": 1.5}})
    names = ("node_accuracy", "worst_node_accuracy", "facts")
    assert [tuple(row[name] for name in names) for row in history(store, "rounds")] == [
        (0.5, 0.25, {"x": 1.5}),
        (None, None, None),
    ]
