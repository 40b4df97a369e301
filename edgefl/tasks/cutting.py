"""Cuts a central data set into shard files, one per device and one for the coordinator's test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from edgefl.tasks.cards import ShardCard
from edgefl.tasks.registry import make_task
from edgefl.tasks.sharding import Sharding, parse_scheme, shard_rows
from edgefl.tasks.shards import write_shard
from edgefl.tasks.sources import CentralData, central_data
from edgefl.types import derived_rng

TEST_NAME = "test.npz"


def cut_shards(
    task_name: str, scheme: str, devices: int, out: Path, data: Path | None = None, seed: int = 7
) -> list[Path]:
    """Writes `device-01.npz` and so on and `test.npz`, each with its card, and returns the devices' paths.

    Args:
        task_name: a built-in task.
        scheme: one of `sharding.SCHEMES`, as a user types it.
        devices: number of shards.
        out: folder to write into, made if need be.
        data: folder of the central data set; None means `$EDGEFL_DATA`/task.
        seed: the same seed cuts the same shards.

    Raises:
        ConfigError: the scheme is unknown or cannot serve so many devices.
        DataError: the data set is missing or damaged, or `out` cannot be written.
        TaskError: the task has no central data set.
    """
    central, sharding = plan_shards(task_name, scheme, devices, data, seed)
    labels = tuple(getattr(make_task(task_name, {}), "labels", ()))
    card = ShardCard(task=task_name, scheme=scheme, source=central.source, labels=labels)
    write_shard(out / TEST_NAME, central.test, replace(card, scheme="test"))
    return [_write_device(out, device, sharding, central, card) for device in range(devices)]


def plan_shards(
    task_name: str, scheme: str, devices: int, data: Path | None = None, seed: int = 7
) -> tuple[CentralData, Sharding]:
    """Returns what `cut_shards` would write, and raises what it would of the scheme and the data; writes nothing."""
    parsed = parse_scheme(scheme)
    central = central_data(task_name, data)
    rng = derived_rng(seed, "shards", task_name, scheme)
    return central, shard_rows(parsed, labels=central.train.labels, devices=devices, rng=rng, groups=central.groups)


def _write_device(out: Path, device: int, sharding: Sharding, central: CentralData, card: ShardCard) -> Path:
    rows = sharding.rows[device]
    groups = () if central.groups is None else tuple(map(str, np.unique(central.groups[rows])))
    blocks = sharding.blocks[device] if sharding.blocks else {}
    width = max(2, len(str(len(sharding.rows))))
    path = out / f"device-{device + 1:0{width}}.npz"
    write_shard(path, central.train.take(rows), replace(card, groups=groups, blocks=blocks))
    return path
