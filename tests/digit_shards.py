"""Shards of the digits task with rows at random: made at once, where no accuracy is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edgefl.core.types import Dataset
from edgefl.tasks.datasets.shards import ShardMetadata, write_shard


def some_digits(count: int, seed: int = 0) -> Dataset:
    rng = np.random.default_rng(seed)
    return Dataset(inputs=rng.integers(0, 17, (count, 8, 8)).astype(np.uint8), targets=rng.integers(0, 10, count))


def digit_shard(
    path: Path,
    count: int,
    *,
    seed: int = 0,
    task: str = "digits",
    blocks: Mapping[int, tuple[int, int]] | None = None,
) -> Path:
    """Writes a shard of so many rows; its card says it is of `task`."""
    write_shard(path, some_digits(count, seed), ShardMetadata(task=task, blocks=blocks or {}))
    return path
