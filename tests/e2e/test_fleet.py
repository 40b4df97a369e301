"""The main job: devices join by a token and train real digits, whoever is killed, and the store remembers it."""

from __future__ import annotations

import csv
import io
import json
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from requirements import require

from edgefl.core.config import parse_run
from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet

ROUNDS = 20
TRAINERS = [f"device-{n:02}" for n in range(1, 4)]


@dataclass
class Job:
    """A fleet of three and a judge, that has finished a run that the coordinator scored and one that devices did."""

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


# `auto` is Mosquitto where that is installed, else the embedded broker.
@pytest.fixture(scope="module", params=["auto", pytest.param("embedded", marks=pytest.mark.slow)])
def job(request: pytest.FixtureRequest, tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    if request.param == "embedded":
        require("mosquitto")  # else it is what the other one runs on
    judge = LocalDeviceSpec(name="judge", shards={"digits": str(tools.test_shard)}, role="evaluator")
    devices = [*tools.devices(3, "digits", tools.gated), judge]
    with tools.fleet(
        tmp_path_factory.mktemp("job"), devices, scored=True, broker=request.param, kind=LocalFleet
    ) as fleet:
        main = {"task": "digits", "name": "main", "rounds": ROUNDS, "seed": 7}
        on_devices = {"task": "digits", "name": "local", "rounds": 2, "evaluate_on": "devices"}
        ids = [fleet.submit(parse_run({"run": run, "devices": {"min": 3}})) for run in (main, on_devices)]
        for waiting in ids:
            assert fleet.wait_for_run(waiting)["status"] == "finished"
        yield Job(fleet, *ids)


def test_the_model_learns_and_every_update_of_every_round_has_a_row_with_what_it_cost(job: Job) -> None:
    (run,) = job.sql(f"SELECT accuracy, rounds, status FROM runs WHERE run_id = '{job.run_id}'")
    assert run["accuracy"] >= 0.9
    assert (run["rounds"], run["status"]) == (ROUNDS, "finished")
    rounds = job.sql(f"SELECT round, num_updates, closed_at FROM rounds WHERE run_id = '{job.run_id}' ORDER BY round")
    assert [(row["round"], row["num_updates"]) for row in rounds] == [(n, 3) for n in range(1, ROUNDS + 1)]
    assert all(row["closed_at"] for row in rounds)
    rows = job.sql(f"SELECT * FROM updates WHERE run_id = '{job.run_id}'")
    expected = [(number, name) for number in range(1, ROUNDS + 1) for name in TRAINERS]
    assert sorted((row["round"], row["device_id"]) for row in rows) == expected
    assert {row["outcome"] for row in rows} == {"used"}
    for row in rows:
        assert min(row["bytes_up"], row["bytes_down"]) > 19_000
        assert min(row["compute_s"], row["send_s"], row["loss"], row["num_examples"]) > 0
        assert row["wait_s"] >= 0


def test_every_device_was_heard_and_scores_of_all_three_sources_are_kept_apart(job: Job) -> None:
    names = {*TRAINERS, "judge", "coordinator-evaluator"}
    assert {row["device_id"] for row in job.sql("SELECT DISTINCT device_id FROM heartbeats")} == names
    facts = {row["device_id"]: json.loads(row["facts"]) for row in job.sql("SELECT * FROM capabilities")}
    assert {name for name, entry in facts.items() if entry["cores"] >= 1} == names
    sources = job.sql(f"SELECT DISTINCT source FROM evaluations WHERE run_id = '{job.run_id}'")
    assert {row["source"] for row in sources} == {"coordinator", "evaluator"}
    assert min(row["bytes_down"] for row in job.sql("SELECT bytes_down FROM evaluations")) > 4_810 * 4, "a model each"
    rows = job.sql(f"SELECT * FROM evaluations WHERE run_id = '{job.devices_run_id}'")
    assert sorted(row["device_id"] for row in rows) == sorted(2 * TRAINERS)
    assert {row["source"] for row in rows} == {"device"}


def test_the_history_is_what_the_database_says_over_the_api_and_from_the_folder(job: Job, tools: Any) -> None:
    for kind, table, order in (
        ("updates", "updates", "id"),
        ("rounds", "v_rounds", "round"),
        ("evaluations", "evaluations", "at, id"),
        ("events", "events", "at, id"),
    ):
        told = job.fleet.list_history(kind, run=job.run_id)
        rows = job.sql(f"SELECT * FROM {table} WHERE run_id = '{job.run_id}' ORDER BY {order}")
        assert rows
        for shown, stored in zip(told, rows, strict=True):
            for name, value in shown.items():
                kept = stored[name]
                assert value == (json.loads(kept) if isinstance(value, dict | list) else kept), (kind, name)
    words = ("history", "updates", "--run", job.run_id, "--format", "csv")
    asked = tools.as_operator(job.fleet, *words).out
    assert len(list(csv.DictReader(io.StringIO(asked)))) == 3 * ROUNDS
    assert tools.as_operator(job.fleet, *words, "--dir", job.fleet.directory).out == asked
    why = job.fleet.make_client().get("/edgefl/v1/history/why", {"run": "main", "round": 3})
    assert why["sentence"].startswith("Round 3 waited ")
    assert sorted(row["device_id"] for row in why["devices"]) == TRAINERS
    (slowest,) = job.fleet.list_history("slow", run=job.run_id, limit=1)
    assert slowest["seconds"] == max(row["seconds"] for row in job.fleet.list_history("rounds", run=job.run_id))
    sums = job.sql(f"SELECT device_id, sum(bytes_up) FROM updates WHERE run_id = '{job.run_id}' GROUP BY device_id")
    traffic = job.fleet.list_history("traffic", run=job.run_id)
    assert [(row["device_id"], row["bytes_up"]) for row in traffic] == [tuple(row) for row in sums]


def test_a_device_process_has_no_torch_and_stays_small(job: Job) -> None:
    for name in TRAINERS:
        process = Path("/proc") / str(job.fleet.processes[name].pid)
        assert "torch" not in (process / "maps").read_text()
        pss_kb = int(re.search(r"^Pss:\s+(\d+)", (process / "smaps_rollup").read_text(), re.MULTILINE)[1])
        assert pss_kb < 85_000


def test_another_seed_gives_another_model_and_a_coordinator_killed_in_the_middle_gives_the_same(
    job: Job, tools: Any
) -> None:
    """The run goes on by itself, in the round that it was in, and nothing is given out or counted twice."""
    fleet = job.fleet
    undisturbed, other = (
        fleet.wait_for_run(fleet.submit(tools.gated_run(iterations=4, rounds=10, min=3, seed=seed)))
        for seed in (7, 8)
    )
    run_id = fleet.submit(tools.gated_run(pace_s=0.03, iterations=4, rounds=10, min=3, seed=7))
    tools.wait_rounds(fleet, run_id, 3)
    fleet.kill("coordinator")
    query = f"SELECT started_at FROM rounds WHERE run_id = '{run_id}' AND closed_at > 0 ORDER BY round"
    before = [row["started_at"] for row in job.sql(query)]
    fleet.start_coordinator()
    run = fleet.wait_for_run(run_id)
    assert (run["status"], run["resumes"]) == ("finished", 0)
    rounds = fleet.list_history("rounds", run=run_id)
    assert [(row["round"], row["version"], row["num_updates"]) for row in rounds] == [(n, n, 3) for n in range(1, 11)]
    assert [row["started_at"] for row in rounds][: len(before)] == before, "nothing is done again"
    used = tools.used(fleet, run_id)
    assert sorted((row["round"], row["device_id"]) for row in used) == [
        (n, d) for n in range(1, 11) for d in TRAINERS
    ]
    assert len({row["assignment_id"] for row in used}) == 30
    assert run["model"] == undisturbed["model"] != other["model"]


def test_a_killed_device_costs_its_update_alone_and_trains_again_when_it_is_back(
    job: Job, tools: Any, tmp_path: Path
) -> None:
    fleet, gate = job.fleet, tools.gate(tmp_path / "gate")
    run_id = fleet.submit(tools.gated_run(gate, pace_s=0.05, rounds=10_000, min=2))
    tools.in_the_middle(fleet, gate, *TRAINERS)
    fleet.kill("device-03")
    gate.open()
    tools.eventually(lambda: len(fleet.list_history("rounds", run=run_id)) > 3, what="two devices go on")
    (lost,) = [row for row in fleet.list_history("updates", run=run_id) if row["outcome"] == "lost"]
    assert (lost["device_id"], lost["round"]) == ("device-03", 1)
    assert "gone" in lost["reason"]
    first = fleet.list_history("rounds", run=run_id)[0]
    assert (first["num_updates"], first["num_devices"]) == (2, 3)
    fleet.start_device("device-03")
    tools.eventually(lambda: tools.used(fleet, run_id, "device-03"), what="the device that came back trains")
    run = tools.stop(fleet, run_id)
    counted = sum(
        row["num_updates"] for row in fleet.list_history("rounds", run=run_id, limit=10_000) if row["closed_at"]
    )
    assert counted == len(tools.used(fleet, run_id)), run
