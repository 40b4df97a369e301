"""Nodes that reach each other over TLS, board to board: no broker and no coordinator in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgefl.config import parse_run
from edgefl.local_fleet import free_port

NAMES = ("device-01", "device-02", "device-03")

pytestmark = pytest.mark.timeout(240)


def test_three_devices_train_in_step_over_direct_links(tools: Any, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(
        json.dumps({"hosts": [{"name": name, "addr": "127.0.0.1", "port": free_port()} for name in NAMES]})
    )
    with tools.fleet(tmp_path / "fleet", tools.devices(3), test_shards={"digits": str(tools.test_shard)}) as fleet:
        values = {
            "run": {"task": "digits", "rounds": 3},
            "strategy": {
                "name": "k-gt",
                "graph": "complete",
                "carrier": "direct",
                "hosts": str(hosts),
                "learning_rate": 0.1,
                "exchanges_per_round": 5,
            },
            "devices": {"min": 3},
        }
        run_id = fleet.submit(parse_run(values))
        assert fleet.wait_run(run_id)["status"] == "finished"
        rounds = [row for row in fleet.history("rounds", run=run_id) if row["closed_at"]]
        assert len(rounds) == 3
        # In step: nobody goes on before it has heard of both neighbours, whichever way the messages take.
        assert sum(row["facts"]["messages"] for row in rounds) == 3 * 30
        assert rounds[-1]["accuracy"] > 0.5
    tools.check_logs(fleet.root)


@pytest.mark.slow
def test_a_run_of_nodes_that_was_stopped_goes_on_where_it_was(tools: Any, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(
        json.dumps({"hosts": [{"name": name, "addr": "127.0.0.1", "port": free_port()} for name in NAMES]})
    )
    strategy = {
        "name": "k-gt", "graph": "complete", "carrier": "direct", "hosts": str(hosts), "learning_rate": 0.1,
        "exchanges_per_round": 40,
    }  # fmt: skip
    run = {"run": {"task": "digits", "rounds": 8}, "strategy": strategy, "devices": {"min": 3}}
    with tools.fleet(tmp_path / "fleet", tools.devices(3)) as fleet:
        run_id = fleet.submit(parse_run(run))

        def rounds() -> int:
            return int(fleet.operator().get(f"/edgefl/v1/runs/{run_id}")["rounds"])

        tools.eventually(lambda: rounds() >= 2, what="two rounds")
        fleet.operator().post(f"/edgefl/v1/runs/{run_id}/stop")
        tools.eventually(lambda: tools.status(fleet, run_id) == "stopped")
        assert rounds() < 8
        fleet.operator().post(f"/edgefl/v1/runs/{run_id}/resume")
        assert fleet.wait_run(run_id)["status"] == "finished"
        closed = [row["round"] for row in fleet.history("rounds", run=run_id) if row["closed_at"]]
        assert closed == list(range(1, 9))
        assert not [row for row in fleet.history("events", run=run_id) if row["kind"] == "assignment-lost"]
    tools.check_logs(fleet.root)
