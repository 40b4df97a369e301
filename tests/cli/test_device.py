from __future__ import annotations

import json

import pytest

from edgefl.device.state import DeviceState


def test_status_says_whether_the_coordinator_is_reached(run, front_door, tmp_path):
    assert run("device", "status", "--state", tmp_path / "d").code == 36
    run("device", "join", "--token", front_door.token().text(), "--name", "pi-1", "--state", tmp_path / "d")
    value = json.loads(run("device", "status", "--state", tmp_path / "d", "--format", "json").out)
    assert (value["v"], value["device_id"], value["coordinator"]) == (1, "pi-1", front_door.address)
    assert abs(value["clock_skew_s"]) < 1
    front_door.stop()
    assert "cannot be reached" in run("device", "status", "--state", tmp_path / "d").out


def test_starting_without_a_join_says_what_to_run(run, tmp_path):
    ran = run("device", "start", "--state", tmp_path / "d")
    assert (ran.code, ran.is_one_line) == (36, True), ran.err


def test_probe_prints_text_and_json(run):
    assert "cores" in run("device", "probe").out
    assert json.loads(run("device", "probe", "--json").out)["v"] == 1


@pytest.fixture
def joined(run, front_door, shard, tmp_path):
    ran = run("device", "join", front_door.address, "--token", front_door.token().text(), "--shard", shard,
              "--name", "pi-1", "--state", tmp_path / "d", "--max-temperature", "75")  # fmt: skip
    assert ran.code == 0, ran.err
    return tmp_path / "d"


def test_a_temperature_limit_is_given_at_the_join_changed_and_taken_away(run, joined):
    assert DeviceState.load(joined).device.max_temperature_c == 75.0
    ran = run("device", "set", "--max-temperature", "68.5", "--state", joined)
    assert (ran.code, ran.out) == (0, "pi-1 rests between iterations above 68.5 °C\n")
    assert DeviceState.load(joined).device.max_temperature_c == 68.5
    assert json.loads(run("device", "status", "--state", joined, "--format", "json").out)["max_temperature_c"] == 68.5
    assert run("device", "set", "--max-temperature", "none", "--state", joined).out == "pi-1 rests never\n"
    assert DeviceState.load(joined).device.max_temperature_c is None


def test_a_limit_comes_from_the_environment_of_a_unit_too(run, joined, monkeypatch):
    monkeypatch.setenv("EDGEFL_MAX_TEMPERATURE", "61")
    assert run("device", "set", "--state", joined).code == 0
    assert DeviceState.load(joined).device.max_temperature_c == 61.0


@pytest.mark.parametrize("value", ["hot", "nan", "29", "200", "-5", ""])
def test_a_limit_that_makes_no_sense_is_refused_and_the_old_one_stays(run, joined, value):
    ran = run("device", "set", f"--max-temperature={value}", "--state", joined)
    assert ran.code == 2
    assert DeviceState.load(joined).device.max_temperature_c == 75.0


def test_there_must_be_something_to_set(run, joined):
    ran = run("device", "set", "--state", joined)
    assert ran.is_one_line
    assert "nothing to set" in ran.err


def test_a_damaged_limit_is_named(run, joined):
    path = joined / "device.json"
    path.write_text(path.read_text().replace('"max_temperature_c": 75.0', '"max_temperature_c": "hot"'))
    ran = run("device", "status", "--state", joined)
    assert ran.is_one_line
    assert "max_temperature_c must be a number or null, got 'hot'" in ran.err


def test_probe_says_with_what_this_machine_trains(run):
    facts = json.loads(run("device", "probe", "--json").out)
    assert facts["paths"]["digits"] == "numpy"
    assert facts["trains"] is True
