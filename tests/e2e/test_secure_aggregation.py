"""Real boards whose updates the coordinator cannot read, also when one of them or the coordinator dies."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edgefl.core.config import RunConfig, parse_run
from edgefl.core.types import Array
from edgefl.simulation.local_fleet import LocalFleet
from edgefl.storage.checkpoints import load_model_file

pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]

NAMES = tuple(f"device-{number:02}" for number in range(1, 5))
LONG = 60.0
"""Epochs that take about a second, so that something can happen meanwhile."""


@pytest.fixture(scope="module")
def four(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    with tools.fleet(tmp_path_factory.mktemp("secure") / "fleet", tools.devices(4)) as fleet:
        yield fleet


def make_config(*, is_secure: bool, rounds: int, epochs: float = 1.0, **secure: Any) -> RunConfig:
    return parse_run(
        {
            "run": {"task": "digits", "rounds": rounds, "evaluate_on": "none", "local_test_fraction": 0.0},
            "strategy": {"epochs": epochs},
            "devices": {"min": 4},
            "guard": {"enabled": False, "max_weight_ratio": 0},
            **(
                {"secure_aggregation": {"enabled": True, "threshold": 0.6, "clip": 4.0, **secure}}
                if is_secure
                else {}
            ),
        }
    )


def wait_for_model(fleet: LocalFleet, run_id: str) -> tuple[dict[str, Array], list[Any]]:
    run = fleet.wait_for_run(run_id)
    assert run["status"] == "finished", run
    return load_model_file(fleet.get_model_path(run["model"])), fleet.list_history("updates", run=run_id, limit=1000)


def compute_distance(one: dict[str, Array], other: dict[str, Array]) -> float:
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def read_consents(fleet: LocalFleet, run_id: str) -> dict[str, tuple[int, str]]:
    """Returns the last version of a run that each board has consented to a sum of, and which sum that is."""
    consents = {}
    for name in NAMES:
        for path in fleet.root.rglob(f"{name}/**/secure-aggregation.json"):
            if (found := json.loads(path.read_text()).get(run_id)) is not None:
                consents[name] = found["version"], found["digest"]
    return consents


def test_the_model_is_that_of_plain_rounds(four: LocalFleet) -> None:
    expected, _ = wait_for_model(four, four.submit(make_config(is_secure=False, rounds=3)))
    run_id = four.submit(make_config(is_secure=True, rounds=3))
    model, rows = wait_for_model(four, run_id)
    assert compute_distance(expected, model) < 1e-5
    assert [row["outcome"] for row in rows] == ["used"] * 12
    assert [version for version, _ in read_consents(four, run_id).values()] == [2] * 4


def test_boards_give_the_same_model_with_the_messages_of_a_sparse_graph(four: LocalFleet) -> None:
    """Four boards draw each other, so that all have all shares; fewer shares are in the tests without a network."""
    expected, _ = wait_for_model(four, four.submit(make_config(is_secure=True, rounds=2)))
    run_id = four.submit(make_config(is_secure=True, rounds=2, graph="sparse", corrupted=0.05, dropped=0.25))
    model, rows = wait_for_model(four, run_id)
    assert compute_distance(expected, model) == 0.0
    assert [row["outcome"] for row in rows] == ["used"] * 8
    assert [version for version, _ in read_consents(four, run_id).values()] == [1] * 4


def test_a_coordinator_that_is_killed_goes_on_and_no_board_opens_two_sums(four: LocalFleet, tools: Any) -> None:
    expected, _ = wait_for_model(four, four.submit(make_config(is_secure=True, rounds=4, epochs=LONG)))
    run_id = four.submit(make_config(is_secure=True, rounds=4, epochs=LONG))
    tools.wait_rounds(four, run_id, 1)
    four.kill("coordinator")
    four.start_coordinator()
    # As soon as a board has consented: the others are about to, or all open the sum.
    before = wait_for_consent(four, run_id, version=2)
    four.kill("coordinator")
    before |= read_consents(four, run_id)
    four.start_coordinator()
    while (now := read_consents(four, run_id)).values() and min(now.values())[0] < 3:
        assert_one_sum(before, now)
        before = now
    model, rows = wait_for_model(four, run_id)
    assert compute_distance(expected, model) == 0.0, "sums of whole numbers, whatever the keys"
    assert [row["outcome"] for row in rows if row["outcome"] == "used"] == ["used"] * 16


def wait_for_consent(fleet: LocalFleet, run_id: str, *, version: int) -> dict[str, tuple[int, str]]:
    deadline_s = time.monotonic() + 120.0
    while time.monotonic() < deadline_s:
        found = read_consents(fleet, run_id)
        if any(number == version for number, _ in found.values()):
            return found
    raise AssertionError(f"no board consents to a sum of version {version}")


def assert_one_sum(before: dict[str, tuple[int, str]], now: dict[str, tuple[int, str]]) -> None:
    for name, (version, digest) in now.items():
        assert version > before[name][0] or (version, digest) == before[name], f"two sums of {version} by {name}"
        digests = {other for number, other in now.values() if number == version}
        assert digests == {digest}, f"boards open two sums of version {version}"


def test_a_board_that_is_killed_is_left_out_of_the_sum(four: LocalFleet, tools: Any) -> None:
    run_id = four.submit(make_config(is_secure=True, rounds=3, epochs=LONG))
    tools.wait_rounds(four, run_id, 1)
    four.kill("device-02")
    _, rows = wait_for_model(four, run_id)
    last = {row["device_id"] for row in rows if row["round"] == 3 and row["outcome"] == "used"}
    assert last == {"device-01", "device-03", "device-04"}
    four.start_device("device-02")
    four.wait_for_devices(4)
