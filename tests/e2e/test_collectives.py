"""Four real devices that add up their updates over TLS, also when one of them or the coordinator dies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edgefl.core.config import RunConfig, parse_run
from edgefl.core.types import Array
from edgefl.simulation.local_fleet import LocalFleet, find_free_port
from edgefl.storage.checkpoints import load_model_file

pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]

NAMES = tuple(f"device-{number:02}" for number in range(1, 5))
LONG = 60.0
"""Epochs that take about a second, so that something can happen meanwhile."""


@pytest.fixture(scope="module")
def four(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    root = tmp_path_factory.mktemp("collectives")
    hosts = [{"name": name, "addr": "127.0.0.1", "port": find_free_port()} for name in NAMES]
    (root / "hosts.json").write_text(json.dumps({"hosts": hosts}))
    with tools.fleet(root / "fleet", tools.devices(4)) as fleet:
        yield fleet


def run_of(fleet: LocalFleet, collective: str, reductions: int, rounds: int, epochs: float = 1.0) -> RunConfig:
    hosts = str(fleet.root.parent / "hosts.json")
    aggregation = {"collective": collective, "reductions": reductions, "hosts": hosts}
    return parse_run(
        {
            "run": {"task": "digits", "rounds": rounds, "evaluate_on": "none", "local_test_fraction": 0.0},
            "strategy": {"epochs": epochs},
            "devices": {"min": 4},
            "guard": {"enabled": False, "max_weight_ratio": 0},
            "aggregation": {} if collective == "coordinator" else aggregation,
        }
    )


def finished(fleet: LocalFleet, run_id: str) -> tuple[dict[str, Array], list[Any]]:
    """Returns the last model and the rows of updates, no one of which was used twice."""
    run = fleet.wait_for_run(run_id)
    assert run["status"] == "finished"
    rows = fleet.list_history("updates", run=run_id, limit=1000)
    used = [row for row in rows if row["outcome"] == "used"]
    assert len({(row["round"], row["device_id"]) for row in used}) == len(used)
    for number in {row["round"] for row in used}:
        assert len({row["metrics"].get("reductions") for row in used if row["round"] == number}) == 1
    return load_model_file(fleet.get_model_path(run["model"])), rows


def read_logs(fleet: LocalFleet) -> str:
    return "".join((fleet.root / f"{name}.log").read_text() for name in NAMES)


def distance(one: dict[str, Array], other: dict[str, Array]) -> float:
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def test_the_model_is_the_coordinator_s_and_hardly_a_byte_passes_it(four: LocalFleet) -> None:
    expected, usual = finished(four, four.submit(run_of(four, "coordinator", 1, 4)))
    for collective, reductions in (("ring", 1), ("butterfly", 2), ("auto", 4)):
        model, rows = finished(four, four.submit(run_of(four, collective, reductions, 4 // reductions)))
        assert distance(expected, model) < 1e-6
        assert {row["metrics"]["reductions"] for row in rows} == {float(reductions)}
        size = 4 * sum(tensor.size for tensor in model.values())
        sent = [row["metrics"]["peer_bytes_up"] / reductions for row in rows]
        assert max(sent) < 1.6 * size, "2 (n - 1)/n models, and headers"
        later = [row["bytes_down"] for row in rows if row["round"] > 1]
        assert all(count < 3000 for count in later), "they have the model already"
        uploads = [row["device_id"] for row in sorted(rows, key=lambda row: row["round"]) if row["bytes_up"] > size]
        assert uploads == list(NAMES[: len(uploads)]), "in turns"
    assert all(row["bytes_up"] > size for row in usual)


def test_a_coordinator_that_is_killed_goes_on_to_the_same_model(four: LocalFleet, tools: Any) -> None:
    expected, _ = finished(four, four.submit(run_of(four, "ring", 2, 3, LONG)))
    run_id = four.submit(run_of(four, "ring", 2, 3, LONG))
    tools.wait_rounds(four, run_id, 1)
    four.kill("coordinator")
    four.start_coordinator()
    model, rows = finished(four, run_id)
    assert distance(expected, model) < 1e-6
    assert [row["outcome"] for row in rows] == ["used"] * 12


def test_a_device_that_is_killed_leaves_its_round_to_the_coordinator(four: LocalFleet, tools: Any) -> None:
    run_id = four.submit(run_of(four, "ring", 2, 3, LONG))
    tools.wait_rounds(four, run_id, 1)
    four.kill("device-02")
    tools.eventually(lambda: "device-02 has ended" in read_logs(four), what="its machine refuses connections")
    _, rows = finished(four, run_id)
    assert [row["device_id"] for row in rows if row["outcome"] == "lost"][:1] == ["device-02"]
    last = {row["device_id"]: row["metrics"]["reductions"] for row in rows if row["round"] == 3 and row["metrics"]}
    assert last == dict.fromkeys(("device-01", "device-03", "device-04"), 2.0), "the three are a group again"
    four.start_device("device-02")
    four.wait_for_devices(4)
    finished(four, four.submit(run_of(four, "binary-blocks", 2, 2)))
