"""A board measured for the simulator: what is written is what the simulator reads."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl.cli.main import main
from edgefl.device.profile import (
    DEFAULT_BYTES_PER_S,
    BoardProfile,
    Measured,
    measure_board,
    measure_task,
    write_profile,
)
from edgefl.errors import DataError, TaskError
from edgefl.simulation.profiles import IterationCost, load_catalogue
from edgefl.tasks.cutting import cut_shards


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgefl.device.profile.MEASURE_S", 0.05)


def profile(**changes: Any) -> BoardProfile:
    values: dict[str, Any] = {
        "name": "pi 5 in the shed",
        "model": 'a "Pi"',
        "iterations": {"digits": Measured(fixed_s=0.001, example_s=0.0001, jitter=0.02)},
        "memory_bytes": 4_000_000_000,
        "accelerators": ["cuda"],
        "up_bytes_per_s": 1e6,
        "down_bytes_per_s": 2e6,
        "latency_s": 0.003,
        "sources": {"latency_s": "measured: twice"},
    }
    return BoardProfile(**{**values, **changes})


def test_the_simulator_reads_what_was_written(tmp_path: Path) -> None:
    write_profile(tmp_path / "new" / "board.toml", profile())
    read = load_catalogue([tmp_path / "new" / "board.toml"]).named("pi 5 in the shed")
    assert read.model == 'a "Pi"'
    assert read.iterations == {"digits": IterationCost(fixed_s=0.001, example_s=0.0001)}
    assert (read.up_bytes_per_s, read.down_bytes_per_s, read.latency_s) == (1e6, 2e6, 0.003)
    assert (read.memory_bytes, read.accelerators, read.jitter) == (4_000_000_000, ("cuda",), 0.02)
    assert read.sources == {"latency_s": "measured: twice"}


def test_any_name_that_a_person_gives_is_read_again(tmp_path: Path) -> None:
    name = 'K\u00fcche \U0001f353 "1"\\\x7f'
    write_profile(tmp_path / "board.toml", profile(name=name, model=name))
    assert load_catalogue([tmp_path / "board.toml"]).named(name).model == name


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write_profile(tmp_path / "file" / "board.toml", profile())


def test_larger_models_take_longer() -> None:
    small, large = measure_task("digits/logistic", None), measure_task("fashion-mnist/logistic", None)
    assert 0 <= small.fixed_s < 0.1
    assert 64 * large.example_s + large.fixed_s > 0
    assert small.jitter >= 0


def test_a_task_is_measured_on_its_own_shard(tmp_path: Path) -> None:
    (path, _) = cut_shards("digits", "iid", 2, tmp_path, None, 7)
    assert measure_task("digits", str(path)).fixed_s >= 0
    with pytest.raises(DataError, match="does not exist"):
        measure_task("digits", str(tmp_path / "none.npz"))


def test_a_shard_without_examples_is_said(tmp_path: Path) -> None:
    paths = cut_shards("digits", "iid", 2, tmp_path, None, 0)
    with np.load(paths[0]) as whole:
        shard = {name: whole[name][:0] for name in whole.files}
    (tmp_path / "folder").mkdir()
    np.savez(tmp_path / "folder" / "none.npz", allow_pickle=False, **shard)
    with pytest.raises(DataError, match="no examples"):
        measure_task("digits", str(tmp_path / "folder"))


def test_a_task_that_does_not_say_its_examples_needs_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mute_task.py").write_text(
        "from edgefl.tasks.noop import NoopTask\nclass Mute(NoopTask):\n    name = 'mute'\n    input_shape = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TaskError, match="name a shard of it"):
        measure_task("mute_task:Mute", None)


def test_the_link_is_what_the_kernel_says_or_a_default_that_says_so() -> None:
    wired = {"network": [{"state": "up", "wireless": False, "speed_mbit": 1000}]}
    found = measure_board(name="a", facts=wired, tasks={})
    assert found.up_bytes_per_s == pytest.approx(112.5e6)
    assert found.sources["up_bytes_per_s"].startswith("estimated: 90% of the wired link")
    found = measure_board(name="a", facts={}, tasks={})
    assert found.down_bytes_per_s == DEFAULT_BYTES_PER_S
    assert found.sources["down_bytes_per_s"].startswith("estimated: not measured")
    assert found.sources["latency_s"].startswith("estimated: no coordinator")


def test_latency_is_measured_against_the_first_address_that_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def accept() -> None:
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


def test_probe_writes_a_profile_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    mine = load_catalogue([file]).named("mine")
    assert set(mine.iterations) == {"digits/logistic"}
    assert mine.memory_bytes
