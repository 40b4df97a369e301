"""Shards in memory are those that lie in files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgefl.core.errors import ConfigError, TaskError
from edgefl.simulation.backends.partitioned_data import load_data, partition_in_memory, read_shards, save_data
from edgefl.tasks.datasets.central import create_shards
from edgefl.tasks.datasets.shards import read_metadata, split_train_test
from edgefl.tasks.registry import make_task


@pytest.mark.parametrize("scheme", ["dirichlet:0.5", "duplicate:2"])
def test_cutting_in_memory_gives_what_cutting_into_files_gives(scheme: str, tmp_path: Path) -> None:
    cut = partition_in_memory("digits", scheme, 4, data=None, seed=3, test_fraction=0.2)
    paths = create_shards("digits", scheme, 4, tmp_path, None, 3)
    task = make_task("digits", {})
    read = read_shards(task, paths, test_fraction=0.2)
    assert read.test is None
    for own, other, path in zip(cut.shards, read.shards, paths, strict=True):
        np.testing.assert_array_equal(read.pool.targets[other.rows], task.read(str(path)).targets)
        assert own.blocks == other.blocks
    for shard, path in zip(cut.shards, paths, strict=True):
        data = task.read(str(path))
        train, test = split_train_test(data, 0.2)
        for rows, expected in ((shard.rows, data), (shard.train, train), (shard.test, test)):
            np.testing.assert_array_equal(cut.pool.inputs[rows], expected.inputs)
            np.testing.assert_array_equal(cut.pool.targets[rows], expected.targets)
        assert shard.blocks == read_metadata(path).blocks
    assert cut.test is not None
    np.testing.assert_array_equal(cut.test.targets, task.read(str(tmp_path / "test.npz")).targets)


def test_other_processes_see_the_same_data(tmp_path: Path) -> None:
    cut = partition_in_memory("digits", "duplicate:2", 4, data=None, seed=3, test_fraction=0.2)
    save_data(tmp_path, cut)
    there = load_data(tmp_path)
    np.testing.assert_array_equal(there.pool.inputs, cut.pool.inputs)
    for own, other in zip(cut.shards, there.shards, strict=True):
        for name in ("rows", "train", "test"):
            np.testing.assert_array_equal(getattr(own, name), getattr(other, name))
        assert own.blocks == other.blocks


def test_what_cannot_be_cut_is_said() -> None:
    with pytest.raises(TaskError, match="no data set to cut"):
        partition_in_memory("mine", "iid", 2, data=None, seed=1, test_fraction=0.1)
    with pytest.raises(ConfigError, match="scheme must be one of"):
        partition_in_memory("digits", "odd", 2, data=None, seed=1, test_fraction=0.1)
    with pytest.raises(ConfigError, match="at least one shard"):
        read_shards(make_task("digits", {}), [], test_fraction=0.1)
