"""The main job with both brokers: devices train real digits, and the store remembers all of it."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgefl.config import parse_run
from edgefl.coordinator.brokers.choice import mosquitto_path
from edgefl.local_fleet import LocalDevice, LocalFleet

ROUNDS = 20
TRAINERS = [f"device-{n:02}" for n in range(1, 5)]


@dataclass
class Job:
    fleet: LocalFleet
    run_id: str
    devices_run_id: str

    def sql(self, query: str) -> list[Any]:
        connection = sqlite3.connect(self.fleet.database)
        connection.row_factory = sqlite3.Row
        try:
            return connection.execute(query).fetchall()
        finally:
            connection.close()


@pytest.fixture(scope="module", params=["mosquitto", pytest.param("embedded", marks=pytest.mark.slow)])
def job(request: pytest.FixtureRequest, tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    if request.param == "mosquitto" and mosquitto_path() is None:
        pytest.skip("mosquitto is not installed")
    root = tmp_path_factory.mktemp(request.param)
    judge = LocalDevice(name="judge", shards={"digits": str(tools.test_shard)}, role="evaluator")
    devices = [*tools.devices(4), judge]
    with tools.fleet(root, devices, test_shards={"digits": str(tools.test_shard)}, broker=request.param) as fleet:
        main = parse_run(
            {"run": {"task": "digits", "name": "main", "rounds": ROUNDS, "seed": 7}, "devices": {"min": 4}}
        )
        run_id = fleet.submit(main)
        on_devices = {"task": "digits", "name": "local", "rounds": 2, "evaluate_on": "devices"}
        devices_run_id = fleet.submit(parse_run({"run": on_devices, "devices": {"min": 4}}))
        for waiting in (run_id, devices_run_id):
            assert fleet.wait_run(waiting)["status"] == "finished"
        yield Job(fleet, run_id, devices_run_id)
    tools.check_logs(root)


def test_the_model_learns(job: Job) -> None:
    (row,) = job.sql(f"SELECT accuracy, rounds, status FROM runs WHERE run_id = '{job.run_id}'")
    assert row["accuracy"] >= 0.93
    assert (row["rounds"], row["status"]) == (ROUNDS, "finished")


def test_there_is_one_row_a_round(job: Job) -> None:
    rows = job.sql(f"SELECT round, num_updates, closed_at FROM rounds WHERE run_id = '{job.run_id}' ORDER BY round")
    assert [row["round"] for row in rows] == list(range(1, ROUNDS + 1))
    assert {row["num_updates"] for row in rows} == {4}
    assert all(row["closed_at"] for row in rows)


def test_there_is_one_used_update_for_every_device_and_round_with_what_it_cost(job: Job) -> None:
    rows = job.sql(f"SELECT * FROM updates WHERE run_id = '{job.run_id}'")
    assert sorted((row["round"], row["device_id"]) for row in rows) == [
        (number, name) for number in range(1, ROUNDS + 1) for name in TRAINERS
    ]
    assert {row["outcome"] for row in rows} == {"used"}
    for row in rows:
        assert row["bytes_up"] > 19_000
        assert row["bytes_down"] > 19_000
        assert row["compute_s"] > 0
        assert row["send_s"] > 0
        assert row["wait_s"] >= 0
        assert row["loss"] > 0
        assert row["num_examples"] > 0


def test_every_device_was_heard_and_has_said_what_it_is(job: Job) -> None:
    names = {*TRAINERS, "judge", "coordinator-evaluator"}
    assert {row["device_id"] for row in job.sql("SELECT DISTINCT device_id FROM heartbeats")} == names
    facts = {row["device_id"]: json.loads(row["facts"]) for row in job.sql("SELECT * FROM capabilities")}
    assert set(facts) == names
    assert all(entry["cores"] >= 1 for entry in facts.values())


def test_evaluations_of_all_three_sources_are_in_the_history_and_marked(job: Job) -> None:
    sources = job.sql(f"SELECT DISTINCT source FROM evaluations WHERE run_id = '{job.run_id}'")
    assert {row["source"] for row in sources} == {"coordinator", "evaluator"}
    assert min(row["bytes_down"] for row in job.sql("SELECT bytes_down FROM evaluations")) > 4_810 * 4, "a model each"
    rows = job.sql(f"SELECT * FROM evaluations WHERE run_id = '{job.devices_run_id}'")
    assert {(row["source"], row["device_id"]) for row in rows} == {("device", name) for name in TRAINERS}
    assert len(rows) == 2 * 4


def test_the_same_seed_gives_the_same_model_and_another_seed_another(job: Job) -> None:
    models = []
    for seed in (7, 7, 8):
        values = {"task": "digits", "rounds": 2, "seed": seed, "evaluate_on": "none"}
        config = parse_run({"run": values, "devices": {"min": 4}})
        models.append(job.fleet.wait_run(job.fleet.submit(config))["model"])
    assert models[0] == models[1] != models[2]


@pytest.mark.parametrize(
    ("kind", "query"),
    [
        ("updates", "SELECT * FROM updates WHERE run_id = '{run}' ORDER BY id"),
        ("rounds", "SELECT * FROM v_rounds WHERE run_id = '{run}' ORDER BY round"),
        ("evaluations", "SELECT * FROM evaluations WHERE run_id = '{run}' ORDER BY at, id"),
        ("events", "SELECT * FROM events WHERE run_id = '{run}' ORDER BY at, id"),
    ],
)
def test_the_history_command_says_what_the_database_says(job: Job, kind: str, query: str) -> None:
    answer = json.loads(
        job.fleet.command("history", kind, "--run", job.run_id, "--format", "json", "--limit", "1000")
    )
    rows = job.sql(query.format(run=job.run_id))
    assert answer["v"] == 1
    assert rows
    for told, stored in zip(answer["rows"], rows, strict=True):
        for name, value in told.items():
            kept = stored[name]
            assert value == (json.loads(kept) if isinstance(value, dict | list) else kept), name


def test_the_history_of_a_store_is_the_same_as_of_its_coordinator(job: Job) -> None:
    words = ("--run", job.run_id, "--format", "csv", "--limit", "1000")
    asked = job.fleet.command("history", "updates", *words)
    assert job.fleet.command("history", "updates", "--dir", str(job.fleet.directory), *words) == asked


def test_a_device_process_has_no_torch_and_stays_small(job: Job) -> None:
    for name in TRAINERS:
        process = Path("/proc") / str(job.fleet.processes[name].pid)
        assert "torch" not in (process / "maps").read_text()
        pss_kb = int(re.search(r"^Pss:\s+(\d+)", (process / "smaps_rollup").read_text(), re.MULTILINE)[1])
        assert pss_kb < 85_000


def test_sums_and_reasons_of_a_live_coordinator_are_those_of_its_rows(job: Job) -> None:
    rows = job.sql(
        f"SELECT device_id, sum(bytes_up) AS bytes_up FROM updates WHERE run_id = '{job.run_id}' GROUP BY device_id"
    )
    told = job.fleet.history("traffic", run=job.run_id)
    assert [(row["device_id"], row["bytes_up"]) for row in told] == [tuple(row) for row in rows]
    why = job.fleet.operator().get("/edgefl/v1/history/why", {"run": "main", "round": 3})
    assert why["sentence"].startswith("Round 3 waited ")
    assert sorted(row["device_id"] for row in why["devices"]) == TRAINERS
    (slowest,) = job.fleet.history("slow", run=job.run_id, limit=1)
    assert slowest["waited_for"] in TRAINERS
    assert slowest["seconds"] == max(row["seconds"] for row in job.fleet.history("rounds", run=job.run_id))
