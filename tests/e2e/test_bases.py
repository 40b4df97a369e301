"""A pretrained base over real processes: fetched once by each board, gone on with after a kill, never sent again."""

import hashlib

import numpy as np
import pytest
from peer_boards import eventually

from edgefl.core.config import parse_run
from edgefl.simulation.local_fleet import partition_devices
from edgefl.storage.checkpoints import load_model_file
from edgefl.system.confinement import find_gaps
from edgefl.tasks.adaptation.base_file import encode_base
from edgefl.tasks.registry import make_task

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

NUM_DEVICES = 2
RUN = {
    "run": {"task": "digits", "rounds": 2},
    "adapt": {"method": "lora", "rank": 2, "base": "digits-base"},
    "strategy": {"learning_rate": 0.05},
    "devices": {"require": NUM_DEVICES, "ready_s": 120},
}


@pytest.fixture
def base(tmp_path):
    """A base of the digits' network, with the last layer of another task."""
    tensors = {**make_task("digits", {}).init(99), "more.weight": np.zeros((1000, 64), np.float32)}
    path = tmp_path / "digits.safetensors"
    path.write_bytes(encode_base(tensors))
    return path


def count_bytes_down(fleet, run_id):
    rows = fleet.list_history("updates", run=run_id)
    names = [f"device-{number:02}" for number in range(1, NUM_DEVICES + 1)]
    return {name: sum(row["bytes_down"] for row in rows if row["device_id"] == name) for name in names}


@pytest.mark.parametrize("confine", ["never", "always"])
def test_boards_fetch_a_named_base_once_and_go_on_where_a_kill_ended_it(tools, tmp_path, base, confine):
    if confine == "always" and find_gaps():
        pytest.skip(f"this machine cannot confine: {find_gaps()[0]}")
    devices, _ = partition_devices("digits", "iid", NUM_DEVICES, tmp_path / "shards", None, 7)
    content = base.read_bytes()
    with tools.fleet(tmp_path / "fleet", devices, scored=True, environment={"EDGEFL_CONFINE": confine}) as fleet:
        added = fleet.run_command("base", "add", str(base), "--name", "digits-base", "--dir", str(fleet.directory))
        sha256 = added.split()[2].rstrip(":")
        # As a kill leaves it: the agent writes what arrives, piece by piece.
        folder = fleet.root / "device-01" / "bases"
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / f"{sha256}.part").write_bytes(content[:200_000])
        first = fleet.wait_for_run(fleet.submit(parse_run(RUN)))
        downs = count_bytes_down(fleet, first["run_id"])
        assert downs["device-02"] > len(content)
        assert len(content) - 200_000 < downs["device-01"] < len(content)
        for name in downs:
            assert (fleet.root / name / "bases" / f"{sha256}.safetensors").read_bytes() == content
        fleet.kill("device-02")
        fleet.start_device("device-02")
        fleet.wait_for_devices(NUM_DEVICES + 1)
        second = fleet.wait_for_run(fleet.submit(parse_run(RUN)))
        assert max(count_bytes_down(fleet, second["run_id"]).values()) < len(content) / 10
        model = load_model_file(fleet.get_model_path(second["model"]))
    pretrained = make_task("digits", {}).init(99)
    assert model.keys() == pretrained.keys()
    assert np.array_equal(model["fc1.bias"], pretrained["fc1.bias"])
    assert not np.array_equal(model["fc1.weight"], pretrained["fc1.weight"])
    assert first["accuracy"] == second["accuracy"]


def test_an_agent_that_is_killed_while_a_base_comes_goes_on_from_there(tools, tmp_path, base):
    devices, _ = partition_devices("digits", "iid", NUM_DEVICES, tmp_path / "shards", None, 7)
    content = base.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    with (
        tools.fleet(tmp_path / "fleet", devices) as fleet,
        tools.led_by(fleet, "device-02") as weather,
    ):
        fleet.run_command("base", "add", str(base), "--name", "digits-base", "--dir", str(fleet.directory))
        part = fleet.root / "device-02" / "bases" / f"{sha256}.part"
        weather.bytes_per_s = 20_000
        run_id = fleet.submit(parse_run({**RUN, "run": {**RUN["run"], "evaluate_on": "none"}}))
        eventually(lambda: part.is_file() and part.stat().st_size > len(content) / 4, what="a part of the base")
        fleet.kill("device-02")
        present = part.stat().st_size
        assert len(content) / 4 < present < len(content)
        weather.bytes_per_s = None
        fleet.start_device("device-02")
        assert fleet.wait_for_run(run_id)["status"] == "finished"
        assert part.with_suffix(".safetensors").read_bytes() == content
        downs = count_bytes_down(fleet, run_id)
        # What the killed agent had received it told nobody, and it is not sent again.
        assert downs["device-02"] < len(content) - present + 100_000
        assert downs["device-01"] > len(content)


def test_a_board_takes_a_base_from_a_stick_and_the_coordinator_sends_it_none(tools, tmp_path, base):
    devices, _ = partition_devices("digits", "iid", NUM_DEVICES, tmp_path / "shards", None, 7)
    content = base.read_bytes()
    stick = tmp_path / "stick"
    stick.mkdir()
    with tools.fleet(tmp_path / "fleet", devices) as fleet:
        fleet.run_command("base", "add", str(base), "--name", "digits-base", "--dir", str(fleet.directory))
        fleet.run_command("base", "copy", "digits-base", str(stick), "--dir", str(fleet.directory))
        state = fleet.root / "device-02"
        fleet.run_command("device", "set", "--base-source", str(stick), "--state", str(state))
        run = {**RUN, "run": {**RUN["run"], "evaluate_on": "none"}}
        done = fleet.wait_for_run(fleet.submit(parse_run(run)))
        downs = count_bytes_down(fleet, done["run_id"])
        sha256 = hashlib.sha256(content).hexdigest()
        assert (state / "bases" / f"{sha256}.safetensors").read_bytes() == content
    assert done["status"] == "finished"
    assert downs["device-01"] > len(content) > 10 * downs["device-02"]
