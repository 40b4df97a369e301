"""A board measured for the simulator: what is written is what the simulator reads."""

import json
import socket
import threading
from typing import Any

import numpy as np
import pytest
from digit_shards import digit_shard

from edgefl.cli.main import main
from edgefl.core.errors import DataError, TaskError
from edgefl.device.hardware.benchmark import (
    DEFAULT_BYTES_PER_S,
    BoardProfile,
    measure_board,
    measure_task,
    write_profile,
)
from edgefl.simulation.profiles import IterationCost, load_catalogue


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr("edgefl.device.hardware.benchmark.MEASURE_S", 0.05)


def profile(**changes):
    values: dict[str, Any] = {
        "name": "pi 5 in the shed",
        "model": 'a "Pi"',
        "iterations": {"digits": {"fixed_s": 0.001, "example_s": 0.0001, "jitter": 0.02}},
        "memory_bytes": 4_000_000_000,
        "accelerators": ["cuda"],
        "up_bytes_per_s": 1e6,
        "down_bytes_per_s": 2e6,
        "latency_s": 0.003,
        "sources": {"latency_s": "measured: twice"},
    }
    return BoardProfile(**{**values, **changes})


def test_the_simulator_reads_what_was_written(tmp_path):
    write_profile(tmp_path / "new" / "board.toml", profile())
    read = load_catalogue([tmp_path / "new" / "board.toml"]).get("pi 5 in the shed")
    assert read.model == 'a "Pi"'
    assert read.iterations == {"digits": IterationCost(fixed_s=0.001, example_s=0.0001)}
    assert (read.up_bytes_per_s, read.down_bytes_per_s, read.latency_s) == (1e6, 2e6, 0.003)
    assert (read.memory_bytes, read.accelerators, read.jitter) == (4_000_000_000, ("cuda",), 0.02)
    assert read.sources == {"latency_s": "measured: twice"}
    name = 'K\u00fcche \U0001f353 "1"\\\x7f'
    write_profile(tmp_path / "board.toml", profile(name=name, model=name))
    assert load_catalogue([tmp_path / "board.toml"]).get(name).model == name
    with pytest.raises(DataError, match="cannot be written"):
        write_profile(tmp_path / "board.toml" / "board.toml", profile())


def test_a_task_is_measured_on_its_own_shard_or_on_examples_at_random(tmp_path, monkeypatch):
    for shard in (None, str(digit_shard(tmp_path / "digits.npz", 50))):
        measured = measure_task("digits/logistic", shard)
        assert 0 <= measured["fixed_s"] < 0.1
        assert 64 * measured["example_s"] + measured["fixed_s"] > 0
        assert measured["jitter"] >= 0
    (tmp_path / "folder").mkdir()
    np.savez(tmp_path / "folder" / "none.npz", inputs=np.zeros((0, 8, 8), np.uint8), labels=np.zeros(0, np.int64))
    for shard, told in (("none.npz", "does not exist"), ("folder", "no examples")):
        with pytest.raises(DataError, match=told):
            measure_task("digits", str(tmp_path / shard))
    (tmp_path / "mute_task.py").write_text(
        "from edgefl.tasks.noop import NoopTask\nclass Mute(NoopTask):\n    name = 'mute'\n    input_shape = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("EDGEFL_ALLOW_MODULES", "mute_task")
    with pytest.raises(TaskError, match="name a shard of it"):
        measure_task("mute_task:Mute", None)


def test_the_link_is_what_the_kernel_says_or_a_default_that_says_so():
    wired = {"network": [{"state": "up", "wireless": False, "speed_mbit": 1000}]}
    found = measure_board(name="a", facts=wired, tasks={})
    assert found.up_bytes_per_s == pytest.approx(112.5e6)
    assert found.sources["up_bytes_per_s"].startswith("estimated: 90% of the wired link")
    found = measure_board(name="a", facts={}, tasks={})
    assert found.down_bytes_per_s == DEFAULT_BYTES_PER_S
    assert found.sources["down_bytes_per_s"].startswith("estimated: not measured")
    assert found.sources["latency_s"].startswith("estimated: no coordinator")


def test_latency_is_measured_against_the_first_address_that_answers():
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = []

        def accept():
            taken.extend(server.accept()[0] for _ in range(5))

        thread = threading.Thread(target=accept)
        thread.start()
        addresses = ["nowhere", "127.0.0.1:x", "127.0.0.1:1", f"127.0.0.1:{server.getsockname()[1]}"]
        found = measure_board(name="a", facts={}, tasks={}, addresses=addresses)
        thread.join(60)
        for connection in taken:
            connection.close()
    assert 0 < found.latency_s < 1
    assert found.sources["latency_s"] == "measured: 5 connections to the coordinator"


def test_probe_writes_a_profile_of_this_machine(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    file = tmp_path / "mine.toml"
    with pytest.raises(SystemExit) as ended:
        main(
            ["-q", "device", "probe", "--json", "--profile", str(file), "--task", "digits/logistic", "--name", "mine"]
        )
    assert not ended.value.code
    out, err = capsys.readouterr()
    assert json.loads(out)["v"] == 1
    assert "profile mine of digits/logistic written to" in err
    mine = load_catalogue([file]).get("mine")
    assert set(mine.iterations) == {"digits/logistic"}
    assert mine.memory_bytes
