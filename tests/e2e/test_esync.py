"""Devices of unequal speed over real processes: how long they wait, and what a recall brings back."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import pytest

from edgefl.config import RunConfig, parse_run
from edgefl.local_fleet import LocalFleet

PACES_S = {"device-01": 0.03, "device-02": 0.06, "device-03": 0.24}
ROUNDS = 8
KNOWN_FROM = 3
"""Rounds before this one measure; the budgets rest on them."""


@pytest.fixture(scope="module")
def fleet(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    root = tmp_path_factory.mktemp("esync")
    with tools.fleet(root, tools.paced(root / "shards", *PACES_S.values())) as running:
        yield running
    tools.check_logs(root)


def _run(tools: Any, name: str, *, rounds: int = ROUNDS, **strategy: Any) -> RunConfig:
    return parse_run(
        {
            "run": {"task": tools.gated, "rounds": rounds, "evaluate_on": "none"},
            "strategy": {"name": name, "learning_rate": 0.1, "batch_size": 8, **strategy},
            "devices": {"min": 3},
        }
    )


def _iterations(rows: list[Any]) -> dict[str, list[int]]:
    """Iterations by device, round by round, of the rounds with known speeds."""
    found = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["round"]):
        if row["round"] >= KNOWN_FROM:
            found[row["device_id"]].append(row["iterations"])
    return dict(found)


def _waiting(rows: list[Any]) -> float:
    """The share of the time of all devices that they wait for the others, after the first rounds."""
    known = [row for row in rows if row["round"] >= KNOWN_FROM]
    waited_s = sum(row["wait_s"] for row in known)
    return waited_s / sum(row["compute_s"] + row["send_s"] + row["wait_s"] for row in known)


@pytest.mark.parametrize("mode", ["budget", "live"])
def test_fast_devices_do_more_while_the_slowest_does_one_and_wait_little(
    fleet: LocalFleet, tools: Any, mode: str
) -> None:
    rows = {}
    for name, options in (("ssgd", {}), ("esync", {"mode": mode})):
        run_id = fleet.submit(_run(tools, name, **options))
        assert fleet.wait_run(run_id)["status"] == "finished"
        rows[name] = tools.used(fleet, run_id)
        assert len(rows[name]) == 3 * ROUNDS
    done = _iterations(rows["esync"])
    assert set(done["device-03"]) == {1}
    # In one round or another the machine holds one of them up, and the others rightly do more meanwhile.
    assert 4 <= median(done["device-01"]) <= 9
    assert 2 <= median(done["device-02"]) <= 9
    assert {row["iterations"] for row in rows["ssgd"]} == {1}
    assert _waiting(rows["ssgd"]) > 0.25
    assert _waiting(rows["esync"]) < _waiting(rows["ssgd"]) / 2


def test_work_that_is_recalled_in_its_middle_brings_back_what_has_been_learnt(fleet: LocalFleet, tools: Any) -> None:
    run_id = fleet.submit(_run(tools, "fedavg", iterations=100_000, rounds=1))
    began_s = time.monotonic()
    tools.eventually(lambda: len(fleet.history("updates", run=run_id)) == 3, what="all three work")
    time.sleep(0.5)  # the time in which they do so
    fleet.command("run", "stop", run_id)
    assert fleet.wait_run(run_id)["status"] == "stopped"
    took_s = time.monotonic() - began_s
    rows = {row["device_id"]: row for row in tools.used(fleet, run_id)}
    assert set(rows) == set(PACES_S)
    for name, row in rows.items():
        assert 1 <= row["iterations"] <= took_s / PACES_S[name] + 1
    assert rows["device-01"]["iterations"] > rows["device-03"]["iterations"]
    assert rows["device-01"]["bytes_up"] > 19_000
    assert rows["device-01"]["loss"] > 0


def test_with_double_buffering_a_device_has_its_next_work_before_the_round_is_closed(
    fleet: LocalFleet, tools: Any
) -> None:
    run_id = fleet.submit(_run(tools, "ssgd", double_buffering=True))
    assert fleet.wait_run(run_id)["status"] == "finished"
    rows = fleet.history("updates", run=run_id)
    assert {row["outcome"] for row in rows} == {"used"}
    used = sorted(tools.used(fleet, run_id), key=lambda row: (row["round"], row["device_id"]))
    assert [row["staleness"] for row in used[:3]] == [0] * 3
    assert {row["staleness"] for row in used[3:]} == {1}, "the gradients of one model before"
    closed_at = {row["round"]: row["closed_at"] for row in fleet.history("rounds", run=run_id)}
    by_device = defaultdict(list)
    for row in used:
        by_device[row["device_id"]].append(row)
    for own in by_device.values():
        assert all(later["dispatched_at"] < closed_at[sooner["round"]] for sooner, later in pairwise(own))
