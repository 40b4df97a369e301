"""Fleets of real processes in which one board lies about its work or about the model."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgefl.core.config import parse_run

pytestmark = pytest.mark.extended

ROGUE = (sys.executable, str(Path(__file__).parent / "rogue_device.py"))


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
