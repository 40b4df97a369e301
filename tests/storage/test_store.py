"""Devices and tokens, runs and rounds, heartbeats."""

import json
import math
import threading

import pytest
from filled_store import FilledStore

from edgefl.core.errors import (
    JoinError,
    NameTakenError,
    NotFoundError,
    StoreError,
    TokenExpiredError,
    TokenInvalidError,
    TokenUsedError,
)
from edgefl.core.protocol import Heartbeat
from edgefl.core.types import UpdateStatus
from edgefl.storage.repositories.heartbeats import RAW_RETENTION_S, ROLLUP_BUCKET_S
from edgefl.storage.repositories.records import EvaluationRow, HeartbeatRow, RunStatus, SavedModelRow, UpdateRow


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.extended)])
def store(request, tmp_path):
    """An empty store, in each kind of database."""
    where = tmp_path / "edgefl.db"
    if request.param == "postgresql":
        server, first = request.getfixturevalue("postgres")
        where = server.url(server.new_database(like=first))
    with FilledStore.open(where) as opened:
        yield opened


def sql(store, query):
    with store.database.read() as connection:
        return [
            tuple(round(value, 6) if isinstance(value, float) else value for value in row)
            for row in connection.exec_driver_sql(query)
        ]


def heartbeat(device, at, **values):
    message = Heartbeat(**{"seq": 1, "session_no": 1, "uptime_s": 5.0, **values})
    return HeartbeatRow(device_id=device, at=at, heartbeat=message)


def test_a_join_takes_one_use_and_the_groups_and_role_of_the_token(store):
    store.make_token(groups=("lab",), role="evaluator", uses=2)
    device = store.join("pi-1", groups=("attic",), version="0.1.0", issue_certificate=lambda: "serial-1")
    assert (device.groups, device.role, device.version) == (("attic", "lab"), "evaluator", "0.1.0")
    assert (device.certificate_serial, device.joined_at, device.node_id) == ("serial-1", 1000.0, None)
    assert store.list_tokens()[0].uses_left == 1
    assert store.get_device("pi-1") == device


def test_a_repeated_join_with_the_same_key_takes_no_use_even_when_the_token_is_over(store):
    store.make_token()
    first = store.join("pi-1", issue_certificate=lambda: "serial-1")
    again = store.join("pi-1", now=9999.0, issue_certificate=lambda: "serial-2")
    assert again.joined_at == first.joined_at
    assert again.certificate_serial == "serial-2"
    assert store.list_tokens()[0].uses_left == 0


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"token_id": "unknown"}, TokenInvalidError),
        ({"secret": "cd" * 32}, TokenInvalidError),
        ({"secret": "\u00e9"}, TokenInvalidError),
        ({"now": 2000.0}, TokenExpiredError),
        ({"device_id": "other", "key": b"another key"}, NameTakenError),
        ({"device_id": "third", "key": b"key of other"}, NameTakenError),
    ],
)
def test_a_refused_join_changes_nothing(store, changes, refusal):
    store.make_token(uses=2)
    store.join("other", key=b"key of other")
    before = store.list_devices(), store.list_tokens()
    called = []
    with pytest.raises(refusal) as error:
        store.join(**{"device_id": "new", "issue_certificate": lambda: called.append(1) or "s", **changes})
    assert "\n" not in str(error.value)
    assert (store.list_devices(), store.list_tokens()) == before
    assert called == []


def test_of_rounds_that_are_not_all_open_none_is_closed_and_a_second_time_takes_no_run_back(store, run_id):
    store.open_round(run_id, 1, started_at=1.0)
    with pytest.raises(NotFoundError, match="no round 2"):
        store.close_rounds(run_id, {1: (1, 2.0), 2: (2, 3.0)})
    assert sql(store, "SELECT closed_at FROM rounds") == [(None,)]
    for number in (1, 2, 3):
        store.record_round(run_id, number, ["a"])
    store.close_rounds(run_id, {1: (1, 2000.0), 2: (2, 2001.0)})
    assert (store.get_run(run_id).rounds, store.get_run(run_id).version) == (3, 3)


def test_one_use_admits_one_of_many_at_the_same_time(store):
    store.make_token()
    admitted, refused = [], []

    def try_to_join(number):
        try:
            admitted.append(store.join(f"pi-{number}").device_id)
        except JoinError as error:
            refused.append(type(error))

    threads = [threading.Thread(target=try_to_join, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(admitted) == 1
    assert refused == [TokenUsedError] * 7


def test_the_name_of_a_removed_device_is_free_and_its_history_stays(store, run_id):
    store.make_token(uses=2)
    store.join("pi-1", key=b"old")
    store.record_round(run_id, 1, ["pi-1"])
    store.set_node_id("pi-1", 2**64 - 1)
    assert store.get_device("pi-1").node_id == 2**64 - 1
    store.remove_device("pi-1", at=1500.0)
    assert store.list_devices() == []
    assert store.get_device("pi-1").removed_at == 1500.0
    assert store.list_removed_device_ids() == {"pi-1"}
    again = store.join("pi-1", key=b"new")
    assert store.list_removed_device_ids() == set()
    assert (again.public_key, again.node_id, again.removed_at) == (b"new", None, None)
    assert sql(store, "SELECT count(*) FROM updates WHERE device_id = 'pi-1'") == [(1,)]


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.get_device("ghost"),
        lambda store: store.update_device("ghost", presence="online"),
        lambda store: store.remove_device("ghost", at=1.0),
        lambda store: store.set_node_id("ghost", 1),
        lambda store: store.record_capabilities("ghost", {}, {}, 1.0),
        lambda store: store.get_run("ghost"),
        lambda store: store.set_run_status("ghost", RunStatus.RUNNING, at=1.0),
        lambda store: store.close_round("ghost", 1, version=1, closed_at=1.0),
    ],
)
def test_what_is_not_there_is_a_not_found_error(store, call):
    with pytest.raises(NotFoundError, match="ghost"):
        call(store)


def test_capabilities_become_a_row_only_when_they_change(store):
    store.make_token()
    store.join("pi-1")
    assert store.record_capabilities("pi-1", {"cores": 4}, {"digits": 10}, 1.0)
    assert not store.record_capabilities("pi-1", {"cores": 4}, {"digits": 10}, 2.0)
    assert store.record_capabilities("pi-1", {"cores": 4}, {"digits": 11}, 3.0)
    assert store.record_capabilities("pi-1", {"cores": 4}, {"digits": 10}, 4.0)
    assert [row[0] for row in sql(store, "SELECT at FROM capabilities ORDER BY id")] == [1.0, 3.0, 4.0]
    newest = store.get_all_capabilities()["pi-1"]
    assert (newest.at, newest.facts, newest.shards) == (4.0, {"cores": 4}, {"digits": 10})
    assert store.get_capabilities("pi-1") == newest
    assert store.get_capabilities("pi-2") is None


def test_a_run_keeps_its_whole_file_and_its_id_is_unique(store, run_id):
    assert store.get_run(run_id).config == {"run": {"rounds": 3}}
    assert store.get_run(run_id).status is RunStatus.QUEUED
    with pytest.raises(StoreError, match="already"):
        store.submit(run_id)


def test_a_resumed_run_keeps_when_it_started_and_is_not_finished(store, run_id):
    store.set_run_status(run_id, RunStatus.RUNNING, at=10.0)
    store.set_run_status(run_id, RunStatus.INTERRUPTED, at=20.0, reason="coordinator stopped")
    store.set_run_status(run_id, RunStatus.RUNNING, at=30.0)
    run = store.get_run(run_id)
    assert (run.started_at, run.finished_at, run.reason) == (10.0, None, None)
    store.set_run_status(run_id, RunStatus.FINISHED, at=40.0, reason="3 rounds")
    assert (store.get_run(run_id).finished_at, store.get_run(run_id).reason) == (40.0, "3 rounds")


def test_a_closed_round_sums_its_updates(store, run_id):
    store.record_round(run_id, 1, ["a", "b"], loss=0.5)
    assert sql(store, "SELECT num_devices, num_updates, bytes_up, bytes_down, version, closed_at FROM rounds") == [
        (2, 2, 200, 400, 1, 1003.0)
    ]
    ((loss,),) = sql(store, "SELECT loss FROM rounds")
    assert loss == pytest.approx((0.5 * 10 + 1.5 * 20) / 30)
    assert (store.get_run(run_id).rounds, store.get_run(run_id).version) == (1, 1)


def test_a_lost_update_counts_as_a_device_but_not_as_an_update_of_the_round(store, run_id):
    store.open_round(run_id, 1, started_at=1.0, num_devices=1)
    lost = UpdateRow(
        assignment_id="x", device_id="d", round=1, base_version=0, outcome=UpdateStatus.LOST, reason="gone"
    )
    store.record_updates(run_id, [lost])
    store.close_round(run_id, 1, version=0, closed_at=2.0)
    assert sql(store, "SELECT num_devices, num_updates, loss FROM rounds") == [(1, 0, None)]


def test_the_same_rows_again_change_nothing(store, run_id):
    store.record_round(run_id, 1, ["a", "b"])
    store.evaluate(run_id, 1, "coordinator")
    before = sql(store, "SELECT * FROM updates"), sql(store, "SELECT * FROM rounds")
    store.record_round(run_id, 1, ["a", "b"])
    store.evaluate(run_id, 1, "coordinator")
    assert (sql(store, "SELECT * FROM updates"), sql(store, "SELECT * FROM rounds")) == before
    assert sql(store, "SELECT count(*) FROM evaluations") == [(1,)]


def test_staleness_is_the_distance_to_the_version_that_an_update_met(store, run_id):
    rows = [UpdateRow(assignment_id=f"x{v}", device_id="d", round=1, base_version=v) for v in (3, 5)]
    store.record_updates(run_id, rows)
    store.mark_applied(run_id, ["x3", "x5"], applied_version=5, round_number=2)
    assert sql(store, "SELECT staleness, applied_version, outcome, round FROM updates ORDER BY id") == [
        (2, 5, "used", 2),
        (0, 5, "used", 2),
    ]


def test_an_update_of_an_unknown_run_is_a_store_error(store):
    with pytest.raises(StoreError, match=r"(?i)foreign key") as error:
        store.record_updates("ghost", [UpdateRow(assignment_id="x", device_id="d", round=1, base_version=0)])
    assert "\n" not in str(error.value)


def test_numbers_that_no_column_holds_become_null(store, run_id):
    update = UpdateRow(
        assignment_id="x",
        device_id="d",
        round=1,
        base_version=0,
        loss=math.nan,
        metrics={"grad": math.inf, "n": 2**70},
    )
    store.record_updates(run_id, [update])
    store.record_evaluations(
        run_id,
        [
            EvaluationRow(
                assignment_id="e", round=1, version=1, device_id="d", source="device", num_examples=1, at=1.0,
                loss=math.inf, accuracy=math.nan,
            )
        ],
    )  # fmt: skip
    store.record_heartbeats(
        [heartbeat("d", 1.0, seq=2**80, temperature_c=math.nan, throttled="half \ud800 \0 letter")]
    )
    ((loss, metrics),) = sql(store, "SELECT loss, metrics FROM updates")
    assert loss is None
    assert (json.loads(metrics) if isinstance(metrics, str) else metrics)["grad"] is None
    assert sql(store, "SELECT loss, accuracy FROM evaluations") == [(None, None)]
    assert sql(store, "SELECT seq, temperature_c, throttled FROM heartbeats") == [(None, None, "half ?  letter")]


def test_deeply_nested_facts_do_not_stop_a_join(store):
    store.make_token()
    store.join("pi-1")
    facts = {}
    for _ in range(5000):
        facts = {"deeper": facts}
    assert store.record_capabilities("pi-1", facts, {}, 1.0)


def test_checkpoints_come_newest_first(store, run_id):
    rows = [
        SavedModelRow(version=v, round=v, last_record=10 * v, sha256=f"{v}" * 64, bytes_file=5, at=float(v))
        for v in (1, 2)
    ]
    for row in (*rows, rows[0]):
        store.record_saved_model(run_id, row)
    assert store.list_saved_models(run_id) == [rows[1], rows[0]]


def test_heartbeats_move_when_a_device_was_last_seen_but_never_back(store):
    store.make_token()
    store.join("pi-1")
    store.record_heartbeats([heartbeat("pi-1", 1010.0), heartbeat("pi-1", 1005.0), heartbeat("stranger", 1.0)])
    assert store.get_device("pi-1").last_seen_at == 1010.0
    store.record_heartbeats([heartbeat("pi-1", 1007.0)])
    assert store.get_device("pi-1").last_seen_at == 1010.0
    assert sql(store, "SELECT count(*) FROM heartbeats") == [(4,)]


def test_a_device_that_was_last_seen_in_the_future_is_last_seen_now(store):
    store.make_token()
    store.join("pi-1")
    store.record_heartbeats([heartbeat("pi-1", 9e8)])
    store.record_heartbeats([heartbeat("pi-1", 1010.0)])
    assert store.get_device("pi-1").last_seen_at == 1010.0


def test_heartbeats_older_than_a_day_become_five_minute_rows(store):
    start = 10 * ROLLUP_BUCKET_S
    now = start + ROLLUP_BUCKET_S + RAW_RETENTION_S
    store.record_heartbeats(
        [
            heartbeat("a", start, temperature_c=40.0, cpu_fraction=0.2, battery_fraction=0.9, uptime_s=5.0),
            heartbeat("a", start + 299, temperature_c=60.0, cpu_fraction=0.4, battery_fraction=0.8, throttled="0x1"),
            heartbeat("b", start + 10, cpu_fraction=0.7),
            heartbeat("a", start + ROLLUP_BUCKET_S, cpu_fraction=0.5),
        ]
    )
    assert store.prune_heartbeats(now) == 3
    assert store.prune_heartbeats(now) == 0
    rolled = sql(
        store,
        "SELECT device_id, at, num_heartbeats, temperature_c, cpu_fraction, battery_fraction, throttled "
        "FROM heartbeats_5min ORDER BY device_id",
    )
    assert rolled == [("a", start, 2, 60.0, 0.3, 0.8, "0x1"), ("b", start, 1, None, 0.7, None, None)]
    assert sql(store, "SELECT count(*) FROM heartbeats") == [(1,)]
    assert sql(store, "SELECT sum(num_heartbeats) FROM v_heartbeats") == [(4,)]


@pytest.mark.parametrize("values", [("frequency-capped", "ok"), ("ok", "frequency-capped"), (None, "throttled")])
def test_throttling_shows_in_five_minutes_however_well_the_board_was_for_the_rest(store, values):
    late = RAW_RETENTION_S + 2 * ROLLUP_BUCKET_S
    store.record_heartbeats([heartbeat("a", float(i), throttled=value) for i, value in enumerate(values)])
    store.record_heartbeats([heartbeat("b", 1.0, throttled=values[0])])
    store.prune_heartbeats(late)
    store.record_heartbeats([heartbeat("b", 2.0, throttled=values[1])])
    store.prune_heartbeats(late)
    trouble = next(value for value in values if value not in {None, "ok"})
    assert sql(store, "SELECT device_id, throttled FROM heartbeats_5min ORDER BY 1") == [
        ("a", trouble),
        ("b", trouble),
    ]


def test_five_minutes_that_come_twice_are_merged(store):
    for temperature, cpu in ((50.0, 0.2), (70.0, None), (60.0, 0.4)):
        store.record_heartbeats(
            [heartbeat("a", 10.0, temperature_c=temperature, cpu_fraction=cpu, disk_free_bytes=9)]
        )
        store.prune_heartbeats(RAW_RETENTION_S + 2 * ROLLUP_BUCKET_S)
    rolled = sql(store, "SELECT num_heartbeats, temperature_c, cpu_fraction, disk_free_bytes FROM heartbeats_5min")
    assert rolled == [(3, 70.0, 0.3, 9)]


def test_durable_writes_are_synced_and_the_others_need_not_be(tmp_path):
    store, seen = FilledStore.open(tmp_path / "edgefl.db"), {}
    with store.database.write(durable=True) as connection:
        seen["devices"] = connection.exec_driver_sql("PRAGMA synchronous").scalar()
    with store.database.write() as connection:
        seen["heartbeats"] = connection.exec_driver_sql("PRAGMA synchronous").scalar()
    store.close()
    assert seen == {"devices": 2, "heartbeats": 1}


def test_what_is_known_of_a_round_is_added_and_the_newest_measured_round_is_found(store, run_id):
    for number in (1, 2):
        store.record_round(run_id, number, ["a"])
    assert store.get_newest_measured_round(run_id, "node_accuracy") == {}
    assert store.get_newest_measured_round("another", "metrics") == {}
    store.set_round_metrics(run_id, 1, {"facts": {"disagreement": 0.5, "bound": float("inf")}})
    store.set_round_metrics(run_id, 1, {"node_accuracy": 0.5, "worst_node_accuracy": 0.25})
    store.set_round_metrics(run_id, 0, {"node_accuracy": 0.125})
    store.update_round_sums(run_id)
    found = store.get_newest_measured_round(run_id, "node_accuracy")
    assert (found["round"], found["node_accuracy"], found["worst_node_accuracy"]) == (1, 0.5, 0.25)
    assert found["facts"] == {"disagreement": 0.5, "bound": None}
    store.set_round_metrics(run_id, 2, {"metrics": {"rmse": 2.5, "r2": math.nan}})
    assert store.get_newest_measured_round(run_id, "node_accuracy")["round"] == 1
    newest = store.get_newest_measured_round(run_id, "metrics")
    assert (newest["round"], newest["metrics"], newest["facts"]) == (2, {"rmse": 2.5, "r2": None}, None)


def test_rounds_closed_at_once_are_as_if_closed_one_by_one(store):
    rows = {}
    for run_id in ("one-by-one", "at-once"):
        store.submit(run_id)
        for number, devices in ((1, ["a", "b"]), (2, []), (3, ["a"])):
            store.record_round(run_id, number, devices, at=1000.0 * number)
        closed = {number: (number + 10, 1000.0 * number + 7) for number in (2, 3, 1)}
        if run_id == "at-once":
            store.close_rounds(run_id, closed)
        else:
            for number, (version, at) in closed.items():
                store.close_round(run_id, number, version=version, closed_at=at)
        columns = (
            "round, version, started_at, closed_at, seconds, num_devices, num_updates, loss, bytes_up, waited_for"
        )
        rows[run_id] = sql(store, f"SELECT {columns}, waited_s FROM rounds WHERE run_id = '{run_id}' ORDER BY round")
        assert (store.get_run(run_id).rounds, store.get_run(run_id).version) == (3, 13)
    assert rows["at-once"] == rows["one-by-one"]
    assert [row[:5] for row in rows["at-once"]] == [(n, n + 10, 1000.0 * n, 1000.0 * n + 7, 7.0) for n in (1, 2, 3)]
