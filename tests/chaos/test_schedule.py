"""Schedules are the same for the same seed, and drive the simulator too."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from chaos.schedule import EVERYTHING, each_once, random_kills, render_fault_script

import edgefl
from edgefl.simulation.faults import load_faults

NAMES = [f"device-{number:02}" for number in range(1, 6)]


def test_the_same_seed_gives_the_same_script() -> None:
    assert each_once(3, EVERYTHING, NAMES) == each_once(3, EVERYTHING, NAMES) != each_once(4, EVERYTHING, NAMES)
    assert random_kills(3, 50, NAMES) == random_kills(3, 50, NAMES) != random_kills(4, 50, NAMES)


def test_a_script_of_everything_has_each_kind_once_and_one_fault_at_a_time() -> None:
    faults = each_once(5, EVERYTHING, NAMES)
    assert sorted((f.device if f.device not in NAMES else "device", f.kind) for f in faults) == sorted(EVERYTHING)
    for before, after in itertools.pairwise(faults):
        assert before.until_s < after.at_s


def test_random_kills_hit_everybody() -> None:
    assert {fault.device for fault in random_kills(1, 200, NAMES)} == {"coordinator", "broker", *NAMES}


@pytest.mark.filterwarnings("ignore:::sklearn")
def test_the_script_of_the_real_fleet_drives_the_virtual_one(tmp_path: Path) -> None:
    faults = each_once(5, EVERYTHING, NAMES)
    script = tmp_path / "faults.toml"
    script.write_text(render_fault_script(faults))
    assert load_faults(script) == faults
    settings = {
        "run": {"task": "digits", "rounds": 60, "seed": 7},
        "strategy": {"name": "ssgd", "iterations": 3},
        "simulation": {"iteration_s": 0.3, "jitter": 0.0, "detect_s": 0.1, "faults": str(script), "workers": 0},
    }
    disturbed = edgefl.simulate(settings, devices=5, root=tmp_path / "disturbed")
    calm = {**settings, "simulation": {**settings["simulation"], "faults": None}}
    undisturbed = edgefl.simulate(calm, devices=5, root=tmp_path / "undisturbed")
    (killed,) = [fault.device for fault in faults if fault.kind == "kill" and fault.device in NAMES]
    lost = [row["device_id"] for row in disturbed.updates if row["outcome"] == "lost"]
    assert lost == [killed]
    assert len(undisturbed.rounds) == len(disturbed.rounds) == 60
    assert disturbed.metrics["accuracy"] == pytest.approx(undisturbed.metrics["accuracy"], abs=0.05)
