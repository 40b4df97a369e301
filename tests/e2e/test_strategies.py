"""Every strategy over real processes, on boards of unequal speed whose clocks are days off."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from edgefl.core.config import RunConfig, parse_run
from edgefl.core.protocol import EVALUATOR_NAME
from edgefl.simulation.local_fleet import COORDINATOR, LocalFleet
from edgefl.strategies.registry import BUILT_IN_STRATEGIES
from edgefl.tasks.datasets.central import create_shards

pytestmark = pytest.mark.extended

NAMES = ("device-01", "device-02", "device-03")
ROUNDS = 4
EXCHANGING = {"d2", "gradient-tracking"}
"""They exchange after every iteration."""
ASYNCHRONOUS = {"asgd", "fedbuff", "adacomp"}
WHOLE_BYTES = 4_810 * 4
"""The digits' model in single precision."""
DAYS_OFF_S = {"device-01": 2 * 86_400.0, "device-02": -2 * 86_400.0, "device-03": 0.0}
# What a wrong clock is to a Python program; nothing of ours is changed.
_PROGRAM = """
import datetime, sys, time
real_time, real_time_ns, off_s = time.time, time.time_ns, float(sys.argv.pop(1))
time.time = lambda: real_time() + off_s
time.time_ns = lambda: real_time_ns() + int(off_s * 1e9)
class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().fromtimestamp(time.time(), tz)
datetime.datetime = Shifted
from edgefl.cli.main import main
main()
"""
PACES_S = {"device-01": 0.03, "device-02": 0.06, "device-03": 0.24}
PACED_ROUNDS = 8
KNOWN_FROM = 3
"""Rounds before this one measure; the budgets rest on them."""


@contextmanager
def make_fleet(tools: Any, root: Path) -> Iterator[LocalFleet]:
    """Three devices with redundant shards of the digits, which serve every strategy, and own ones of another task."""
    blocks = create_shards("digits", "redundant:2", len(NAMES), root / "blocks")
    devices = [
        replace(
            device,
            shards={**device.shards, "digits": str(path)},
            program=(sys.executable, "-c", _PROGRAM, str(DAYS_OFF_S[device.name])),
        )
        for device, path in zip(tools.own_devices(root / "shards", 3, tools.gated), blocks, strict=True)
    ]
    with tools.fleet(root, devices, scored=True) as running:
        yield running


def run_of(name: str, *, down: str = "dense", options: dict[str, Any] | None = None, **run: Any) -> RunConfig:
    strategy = {"name": name, "iterations": 3, "learning_rate": 0.1, "batch_size": 16, **(options or {})}
    if name == "esync":
        del strategy["iterations"]  # it finds them out itself
    if name in EXCHANGING:
        strategy["iterations"] = 1
    names, task = run.pop("names", NAMES), run.pop("of_task", {})
    return parse_run(
        {
            "run": {"task": "digits", "rounds": ROUNDS, "evaluate_every": 100, "local_test_fraction": 0.0, **run},
            "task": task,
            "strategy": strategy,
            "compression": {"down": down},
            "devices": {"min": len(names), "names": list(names)},
        }
    )


def check_history(fleet: LocalFleet, tools: Any, run_id: str) -> list[Any]:
    """Returns the used updates: every assignment has one row, versions are met in order by as many as are told."""
    rows, used = fleet.list_history("updates", run=run_id), tools.used(fleet, run_id)
    closed = [row for row in fleet.list_history("rounds", run=run_id) if row["closed_at"] is not None]
    assert len({row["assignment_id"] for row in rows}) == len(rows)
    assert sum(row["num_updates"] for row in closed) == len(used)
    assert [row["version"] for row in closed] == sorted(row["version"] for row in closed)
    assert all(row["base_version"] + row["staleness"] == row["applied_version"] for row in used)
    assert all(0 < row["send_s"] < 60 for row in used), "nothing is measured across two clocks"
    return used


@pytest.mark.parametrize("name", sorted(BUILT_IN_STRATEGIES))
def test_a_run_ends_with_every_update_counted_once(fleet: LocalFleet, tools: Any, name: str) -> None:
    run = fleet.wait_for_run(fleet.submit(run_of(name)))
    assert (run["status"], run["reason"]) == ("finished", f"rounds reached {ROUNDS}")
    used = check_history(fleet, tools, run["run_id"])
    trained = {row["device_id"] for row in used} - ({EVALUATOR_NAME} if name == "fltrust" else set())
    if name == "redundant":  # each block is on two boards, whose first answer is used: the slowest may have none
        assert len(trained) >= 2
        assert trained <= set(NAMES)
    else:
        assert trained == ({"device-01"} if name == "local" else set(NAMES))
    if name in ASYNCHRONOUS - {"fedbuff"}:
        assert sorted(row["applied_version"] for row in used) == list(range(len(used))), "each makes a version"
        assert max(row["staleness"] for row in used) > 0, "they meet newer models than their own"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(BUILT_IN_STRATEGIES) - {"redundant", "fltrust"}))
def test_a_killed_device_stops_no_run(fleet: LocalFleet, tools: Any, name: str) -> None:
    run_id = fleet.submit(run_of(name, task=tools.gated, of_task={"pace_s": 0.3}, rounds=8, evaluate_on="none"))
    tools.eventually(lambda: tools.used(fleet, run_id), what="the first update is in")
    fleet.kill("device-03")
    run = fleet.wait_for_run(run_id)
    assert (run["status"], run["reason"]) == ("finished", "rounds reached 8")
    check_history(fleet, tools, run_id)


@pytest.mark.timeout(400)
def test_a_coordinator_that_is_killed_knows_which_board_was_seldom_asked_without_rounds(
    fleet: LocalFleet, tools: Any
) -> None:
    fleet.kill("device-03")
    tools.eventually(lambda: fleet.get_presence()["device-03"] != "online", what="it is gone")
    tables = run_of("fedasync", task=tools.gated, of_task={"pace_s": 0.1}, rounds=60, evaluate_on="none").to_json()
    tables["devices"] |= {"min": 1, "count": 1}
    tables["selection"] = {"rule": "utility", "fairness": 1.0, "exploration": 1.0, "exploration_decay": 1.0}
    run_id = fleet.submit(parse_run(tables))
    tools.eventually(lambda: len(tools.used(fleet, run_id)) >= 12, what="two boards were asked some times")
    fleet.kill(COORDINATOR)
    fleet.start_device("device-03")
    fleet.start_coordinator()
    assert fleet.wait_for_run(run_id)["status"] == "finished"
    rows = sorted(tools.used(fleet, run_id), key=lambda row: row["applied_version"])
    assert [row["applied_version"] for row in rows] == list(range(60)), "none is lost, none is doubled"
    order = [row["device_id"] for row in rows]
    first = order.index("device-03")
    num_asked = Counter(order[:first])
    assert max(num_asked.values()) - min(num_asked.values()) <= 2
    num_missed = min(min(num_asked.values()) - 2, len(order) - first)
    assert num_missed >= 4
    assert order[first : first + num_missed] == ["device-03"] * num_missed


def test_their_clocks_skew_is_reported(fleet: LocalFleet, tools: Any) -> None:
    for name, off_s in DAYS_OFF_S.items():
        told = tools.eventually(
            lambda name=name: [
                row["clock_skew_s"]
                for row in fleet.list_history("heartbeats", device=name)
                if row["clock_skew_s"] is not None
            ]
        )
        assert told[-1] == pytest.approx(-off_s, abs=5)


def test_a_sparse_downlink_sends_a_fraction_and_changes_nothing_of_the_result(fleet: LocalFleet, tools: Any) -> None:
    """One device, so that both runs are the same sequence of updates."""
    models, bytes_down = [], []
    for down in ("dense", "delta|dense"):
        run_id = fleet.submit(run_of("adacomp", down=down, rounds=30, evaluate_on="none", names=NAMES[:1]))
        models.append(fleet.wait_for_run(run_id)["model"])
        rows = sorted(tools.used(fleet, run_id), key=lambda row: row["base_version"])
        assert len(rows) == 30
        bytes_down.append([row["bytes_down"] for row in rows])
    assert models[0] == models[1]
    assert min(bytes_down[0]) > WHOLE_BYTES
    assert bytes_down[1][0] > WHOLE_BYTES, "the first model is a whole one"
    assert max(bytes_down[1][1:]) < WHOLE_BYTES / 5


def test_a_new_agent_in_the_middle_of_work_is_sent_a_whole_model_and_nothing_is_lost(
    fleet: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    gate = tools.gate(tmp_path / "gate")
    gate.open()
    task = {"pace_s": 0.1, "gate": str(gate.folder)}
    run = {"task": tools.gated, "of_task": task, "rounds": 8, "evaluate_on": "none", "names": NAMES[1:2]}
    run_id = fleet.submit(run_of("adacomp", down="delta|dense", **run))
    tools.eventually(lambda: tools.used(fleet, run_id), what="it holds a model")
    gate.close()
    assert tools.status(fleet, run_id) == "running"
    fleet.kill("device-02")
    fleet.start_device("device-02")
    gate.open()
    assert fleet.wait_for_run(run_id)["status"] == "finished"
    assert {row["outcome"] for row in fleet.list_history("updates", run=run_id)} == {"used"}


def test_redundant_shards_give_the_same_model_bit_for_bit_when_a_holder_of_its_blocks_is_gone(
    fleet: LocalFleet, tools: Any
) -> None:
    models, used = [], []
    for names in (NAMES, ("device-01", "device-03")):
        if "device-02" not in names:
            fleet.terminate("device-02")
            tools.eventually(lambda: fleet.get_presence()["device-02"] == "offline", what="it has left")
        run = fleet.wait_for_run(fleet.submit(run_of("redundant", rounds=3, evaluate_on="none", names=names)))
        assert run["status"] == "finished"
        models.append(run["model"])
        used.append(tools.used(fleet, run["run_id"]))
    assert [len(rows) for rows in used] == [3 * len(NAMES)] * 2, "one copy of every block in every round"
    assert {row["device_id"] for row in used[1]} == {"device-01", "device-03"}
    assert models[0] == models[1]


FOUR = tuple(f"device-{number:02}" for number in range(1, 5))


@pytest.fixture(scope="module")
def holders(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    """Four devices, each block of the digits on three of them, so that any two may be gone."""
    root = tmp_path_factory.mktemp("holders")
    blocks = create_shards("digits", "redundant:3", len(FOUR), root / "blocks")
    devices = [
        replace(device, shards={"digits": str(path)})
        for device, path in zip(tools.devices(len(FOUR)), blocks, strict=True)
    ]
    with tools.fleet(root / "fleet", devices) as running:
        yield running


def list_parts(tools: Any, fleet: LocalFleet, run_id: str) -> list[tuple[int, str, str]]:
    """Returns round, block, and part of each update that was used: a part such as `1:3`, `1:1` for the whole."""
    found = []
    for row in tools.used(fleet, run_id):
        block = re.search(r"-b(\d+)(-|$)", row["assignment_id"])
        part = re.match(r"slice:(\d+:\d+)", row["codec"] or "")
        assert block
        found.append((row["round"], block[1], part[1] if part else "1:1"))
    return found


@pytest.mark.timeout(400)
def test_holders_that_send_slices_reach_the_same_model_bit_for_bit_however_many_are_killed(
    holders: LocalFleet, tools: Any
) -> None:
    undisturbed_config, config = (
        parse_run(
            {
                "run": {"task": "digits", "rounds": 10, "evaluate_on": "none", "local_test_fraction": 0.0},
                "strategy": {
                    "name": "redundant",
                    "copies": "slices",
                    "iterations": 200,
                    "batch_size": 16,
                    "learning_rate": 0.1,  # a scaled one depends on how many were there so far
                },
                "devices": {"min": minimum},
                "guard": {"enabled": False},
            }
        )
        for minimum in (len(FOUR), 2)
    )
    holders.wait_for_devices(4)
    undisturbed = holders.wait_for_run(holders.submit(undisturbed_config))
    later = [row for row in tools.used(holders, undisturbed["run_id"]) if row["round"] > 1]
    assert max(row["bytes_up"] for row in later) < 0.4 * WHOLE_BYTES, "a third of the entries, and a header"

    run_id = holders.submit(config)
    tools.wait_rounds(holders, run_id, 1)
    holders.kill("device-02")
    without = 2 + tools.run(holders, run_id)["rounds"]
    tools.wait_rounds(holders, run_id, without)
    holders.kill(COORDINATOR)
    holders.start_coordinator()
    holders.start_device("device-02")
    tools.wait_rounds(holders, run_id, without + 2)
    for name in ("device-01", "device-03"):
        holders.kill(name)
    for name in ("device-01", "device-03"):
        holders.start_device(name)
    run = holders.wait_for_run(run_id)

    assert (run["status"], run["reason"]) == ("finished", "rounds reached 10")
    rows = holders.list_history("updates", run=run_id, limit=1000)
    assert len({row["assignment_id"] for row in rows}) == len(rows)
    assert "device-02" not in {row["device_id"] for row in tools.used(holders, run_id) if row["round"] == without}
    parts_of = defaultdict(list)
    for number, block, part in list_parts(tools, holders, run_id):
        parts_of[number, block].append(part)
    assert len(parts_of) == 10 * len(FOUR), "each block counts in each round"
    for parts in parts_of.values():
        assert sorted(parts) == [f"{place}:{len(parts)}" for place in range(1, 1 + len(parts))], "each part once"
    assert run["model"] == undisturbed["model"], "not a bit differs"


@pytest.fixture
def paced(fleet: LocalFleet, tools: Any) -> Iterator[LocalFleet]:
    """The fleet while its devices are of unequal speed."""
    files = {device.name: Path(device.shards[tools.gated]).with_suffix(".pace") for device in fleet.devices}
    for name, file in files.items():
        file.write_text(str(PACES_S[name]))
    yield fleet
    for file in files.values():
        file.unlink()


def paced_updates(paced: LocalFleet, tools: Any, name: str, **options: Any) -> list[Any]:
    """Returns the used updates of a run of eight rounds."""
    run = {"task": tools.gated, "rounds": PACED_ROUNDS, "evaluate_on": "none"}
    run_id = paced.submit(run_of(name, options={"iterations": 1, **options}, **run))
    assert paced.wait_for_run(run_id)["status"] == "finished"
    return sorted(tools.used(paced, run_id), key=lambda row: (row["round"], row["device_id"]))


def waiting(rows: list[Any]) -> float:
    """The share of the time of all devices that they wait for the others, after the first rounds."""
    known = [row for row in rows if row["round"] >= KNOWN_FROM]
    waited_s = sum(row["wait_s"] for row in known)
    return waited_s / sum(row["compute_s"] + row["send_s"] + row["wait_s"] for row in known)


def test_fast_devices_do_more_while_the_slowest_does_one_and_wait_little(paced: LocalFleet, tools: Any) -> None:
    in_step = paced_updates(paced, tools, "ssgd")
    assert [row["iterations"] for row in in_step] == [1] * len(NAMES) * PACED_ROUNDS
    assert waiting(in_step) > 0.25
    for mode in ("budget", "live", "query"):
        rows, done = paced_updates(paced, tools, "esync", mode=mode), defaultdict(list)
        for row in rows:
            if row["round"] >= KNOWN_FROM:
                done[row["device_id"]].append(row["iterations"])
        assert set(done["device-03"]) == {1}
        # In one round or another the machine holds one of them up, and the others rightly do more meanwhile.
        assert 4 <= median(done["device-01"]) <= 9
        assert 2 <= median(done["device-02"]) <= 9
        assert waiting(rows) < waiting(in_step) / 2


def test_devices_that_ask_fall_back_to_their_budgets_while_the_coordinator_is_killed(
    paced: LocalFleet, tools: Any
) -> None:
    paces_s, absence_s = {"device-01": 0.15, "device-02": 0.3, "device-03": 1.5}, 6.0
    for name, pace_s in paces_s.items():
        next(Path(d.shards[tools.gated]) for d in paced.devices if d.name == name).with_suffix(".pace").write_text(
            str(pace_s)
        )
    run = {"task": tools.gated, "rounds": 6, "evaluate_on": "none"}
    run_id = paced.submit(run_of("esync", options={"mode": "query"}, **run))
    tools.wait_rounds(paced, run_id, 3)
    paced.kill("coordinator")
    tools.pause(absence_s)  # the slowest is back after 1.5 s, and four more such rounds are gone
    paced.start_coordinator()
    assert paced.wait_for_run(run_id)["status"] == "finished"
    used = tools.used(paced, run_id)
    assert Counter(row["round"] for row in used) == dict.fromkeys(range(1, 7), 3), "none is lost, none is doubled"
    assert {row["outcome"] for row in paced.list_history("updates", run=run_id)} == {"used"}
    slowest_s = {row["round"]: row["compute_s"] for row in used if row["device_id"] == "device-03"}
    fast = [row for row in used if row["device_id"] == "device-01" and row["round"] >= KNOWN_FROM]
    assert 4 <= median(row["iterations"] for row in fast) <= 10
    for row in fast:
        limit_s = slowest_s[row["round"]] + absence_s / 2  # the machine may hold one of them up
        assert row["iterations"] * paces_s["device-01"] < limit_s, "none goes on while it cannot ask"


def test_with_double_buffering_a_device_has_its_next_work_before_the_round_is_closed(
    paced: LocalFleet, tools: Any
) -> None:
    rows = paced_updates(paced, tools, "ssgd", double_buffering=True)
    assert [row["staleness"] for row in rows] == [0] * 3 + [1] * (len(rows) - 3), "the gradients of one model before"
    closed_at = {row["round"]: row["closed_at"] for row in paced.list_history("rounds", run=rows[0]["run_id"])}
    for name in NAMES:
        own = [row for row in rows if row["device_id"] == name]
        assert all(later["dispatched_at"] < closed_at[sooner["round"]] for sooner, later in pairwise(own))
