"""Fleets of real processes in which one board lies about its work or about the model."""

import sqlite3
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgefl.core.config import parse_run
from edgefl.core.protocol import EVALUATOR_NAME
from edgefl.tasks.registry import make_task

pytestmark = pytest.mark.extended

OPPOSED, ROGUE = (
    (sys.executable, str(Path(__file__).parent / "rogue_device.py"), kind) for kind in ("opposed", "claims")
)


def test_a_board_that_claims_2_53_examples_and_iterations_counts_as_one_of_them(tools: Any, tmp_path: Path) -> None:
    rogue, *honest = tools.devices(4)
    with tools.fleet(tmp_path / "fleet", [replace(rogue, program=ROGUE), *honest], scored=True) as fleet:
        for strategy in ("fedavg", "fednova"):
            run_file = {"run": {"task": "digits", "rounds": 5}, "strategy": {"name": strategy}, "devices": {"min": 4}}
            run_id = fleet.submit(parse_run(run_file))
            assert fleet.wait_for_run(run_id)["accuracy"] > 0.75
            used = tools.used(fleet, run_id)
            weights = {row["device_id"]: row["num_examples"] for row in used}
            assert weights[rogue.name] <= 0.5 * sum(weights.values())  # 2/n of the weight of four
            assert max(row["iterations"] for row in used) < 1000
            claims = tools.events(fleet, "claim-bounded", run=run_id)
            # An honest board with much more data than the others weighs less than it has, too.
            lies = [row for row in claims if not row["message"].startswith("weight: ")]
            assert {row["device_id"] for row in lies} == {rogue.name}, lies
            assert any(row["message"].startswith("examples: claimed 9.0072e+15, counted as ") for row in claims)


def test_a_board_with_an_ordinary_token_evaluates_nothing_and_a_rogue_evaluator_ends_no_run(
    tools: Any, tmp_path: Path
) -> None:
    spare = tools.devices(1, start=4)[0]
    with tools.fleet(tmp_path / "fleet", tools.devices(3)) as fleet:
        token = fleet.make_client().post("/edgefl/v1/tokens", {})["token"]
        joined = tools.typed(
            *("device", "join", f"127.0.0.1:{fleet.port}", "--token", token, "--name", "pretender"),
            *(
                "--role",
                "evaluator",
                "--shard",
                f"digits={spare.shards['digits']}",
                "--state",
                tmp_path / "pretender",
            ),
        )
        assert joined.code == 0
        assert fleet.make_client().get("/edgefl/v1/devices/pretender")["role"] == "trainer"
        fleet.add_device(replace(spare, name="judge", role="evaluator", program=ROGUE))
        fleet.wait_for_devices(4)
        run_file = {"run": {"task": "digits", "rounds": 3, "accuracy": 0.99}, "devices": {"min": 3}}
        run_id = fleet.submit(parse_run(run_file))
        assert fleet.wait_for_run(run_id)["reason"] == "rounds reached 3"
        shown = fleet.list_history("evaluations", run=run_id)
        assert {(row["device_id"], row["accuracy"]) for row in shown} == {("judge", 1.0)}
        assert len(tools.events(fleet, "accuracy-untrusted", run=run_id)) == 1
        models = fleet.make_client().get("/edgefl/v1/models")["rows"]
        assert not any(row["best"] for row in models)


def test_with_fltrust_half_of_the_boards_may_be_rogue_and_the_coordinator_killed_in_mid_run(
    tools: Any, tmp_path: Path
) -> None:
    rogues = [replace(device, program=OPPOSED) for device in tools.devices(3, start=4)]
    run_file = {
        "run": {"task": "digits", "rounds": 40},
        "strategy": {"name": "fltrust", "learning_rate": 0.2},
        "guard": {"enabled": False},
        "devices": {"min": 6},
    }
    with tools.fleet(tmp_path / "fleet", [*tools.devices(3), *rogues], scored=True) as fleet:
        run_id = fleet.submit(parse_run(run_file))
        tools.wait_rounds(fleet, run_id, 3)
        fleet.kill("coordinator")
        with closing(sqlite3.connect(fleet.database)) as database:
            assert database.execute("SELECT status FROM runs").fetchall() == [("running",)]
        fleet.start_coordinator()
        run = fleet.wait_for_run(run_id)
        assert (run["status"], run["reason"]) == ("finished", "rounds reached 40")
        assert run["accuracy"] > 0.8
        own = [row for row in tools.used(fleet, run_id) if row["device_id"] == EVALUATOR_NAME]
        assert sorted(row["applied_version"] for row in own) == list(range(40)), "one root update a round, none twice"
        # Until the restarted coordinator's own evaluator is back, the boards evaluate on their own splits.
        scores = [row for row in fleet.list_history("evaluations", run=run_id) if row["device_id"] == EVALUATOR_NAME]
        counted = {row["num_examples"] for row in scores} | {own[0]["num_examples"]}
        assert len(counted) == 2
        assert sum(counted) == len(make_task("digits").read(str(tools.test_shard))), (
            "no example is trained and tested on"
        )


def test_a_run_that_needs_the_coordinator_s_own_examples_is_refused_where_it_has_none(
    tools: Any, tmp_path: Path
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text('[run]\ntask = "digits"\nrounds = 1\n[strategy]\nname = "fltrust"\n')
    with tools.fleet(tmp_path / "fleet", tools.devices(1)) as fleet:
        for words in ((), ("--dry-run",)):
            ended = tools.as_operator(fleet, "run", "submit", run_file, *words)
            assert ended.code == 3
            assert "fltrust trains on examples of the coordinator, which has none of digits" in ended.err
