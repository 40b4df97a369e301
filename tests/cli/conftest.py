"""The command line in this process, and a shard for it."""

import json

import numpy as np
import pytest

from edgefl.cli.main import main
from edgefl.core.types import Dataset
from edgefl.tasks.datasets.shards import ShardMetadata, write_shard

OF_A_FLEET = ("EDGEFL_URL", "EDGEFL_TOKEN", "EDGEFL_JOIN_TOKEN")


class Ran:
    """What a command came to."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    @property
    def is_one_line(self):
        """Whether it failed as a user should see it."""
        return self.out == "" and self.err.startswith("edgefl: ") and self.err.count("\n") == 1

    @property
    def rows(self):
        """The rows of `--format json`."""
        answer = json.loads(self.out)
        assert answer["v"] == 1
        return answer["rows"]


@pytest.fixture
def command(capsys):
    """Runs the command line in this process, as the user whose environment it has."""

    def call(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["-q", *map(str, arguments)])
        out, err = capsys.readouterr()
        return Ran(int(ended.value.code or 0), out, err)

    return call


@pytest.fixture
def run(command, monkeypatch, tmp_path):
    """Runs the command line in this process, in a home of its own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in OF_A_FLEET:
        monkeypatch.delenv(name, raising=False)
    return command


@pytest.fixture
def refused(run):
    """Sees a command refused in one line, with its exit code and what the line must name."""

    def call(arguments, code, words):
        ran = run(*arguments)
        assert (ran.code, ran.is_one_line) == (code, True), ran.err
        assert words in ran.err

    return call


@pytest.fixture
def shard(tmp_path):
    """A shard of twelve digits in three classes, with its card."""
    path = tmp_path / "shards" / "device-01.npz"
    rows = np.arange(12)
    inputs = np.zeros((12, 8, 8), dtype=np.uint8)
    inputs[:, 0, 0] = rows
    write_shard(path, Dataset(inputs=inputs, targets=rows % 3), ShardMetadata(task="digits"))
    return path


@pytest.fixture
def joined(run, front_door, shard, tmp_path):
    """State directory of a device that has joined the fleet of the front door."""
    ran = run("device", "join", front_door.address, "--token", front_door.token().text(), "--shard", shard,
              "--name", "pi-1", "--state", tmp_path / "d", "--max-temperature", "75", "--accelerator", "cuda:1",
              "--threads", "1")  # fmt: skip
    assert ran.code == 0, ran.err
    assert "joined fleet lab as pi-1 (trainer)" in ran.out
    return tmp_path / "d"
