"""The command line in this process, and a shard for it."""

from __future__ import annotations

import numpy as np
import pytest

from edgefl.cli.main import main
from edgefl.tasks.cards import ShardCard
from edgefl.tasks.shards import write_shard
from edgefl.types import Dataset


class Ran:
    """What a command came to."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    @property
    def is_one_line(self):
        """Whether it failed as a user should see it."""
        return self.out == "" and self.err.startswith("edgefl: ") and self.err.count("\n") == 1


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Runs the command line in this process, in a home of its own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))

    def call(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["-q", *map(str, arguments)])
        out, err = capsys.readouterr()
        return Ran(int(ended.value.code or 0), out, err)

    return call


@pytest.fixture
def shard(tmp_path):
    """A shard of twelve digits in three classes, with its card."""
    path = tmp_path / "shards" / "device-01.npz"
    rows = np.arange(12)
    inputs = np.zeros((12, 8, 8), dtype=np.uint8)
    inputs[:, 0, 0] = rows
    write_shard(path, Dataset(inputs=inputs, labels=rows % 3), ShardCard(task="digits"))
    return path
