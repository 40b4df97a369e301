"""Cuts a central data set into shard files, one per device and one for the coordinator's test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from edgefl.core.types import derive_rng
from edgefl.tasks.datasets.central import CentralData, load_central_data
from edgefl.tasks.registry import make_task
from edgefl.tasks.sharding.partitioning import Partitioning, parse_scheme, partition_rows
from edgefl.tasks.sharding.shard_files import write_shard
from edgefl.tasks.sharding.shard_metadata import ShardMetadata

TEST_NAME = "test.npz"


def create_shards(
    task_name: str, scheme: str, num_devices: int, out: Path, data: Path | None = None, seed: int = 7
) -> list[Path]:
    """Writes `device-01.npz` and so on and `test.npz`, each with its card, and returns the devices' paths.

    Args:
        task_name: a built-in task.
        scheme: one of `partitioning.SCHEMES`, as typed.
        num_devices: number of shards.
        out: folder to write into, created if missing.
        data: folder of the central data set; None means `$EDGEFL_DATA`/task.
        seed: equal seeds give equal shards.

    Raises:
        ConfigError: the scheme is unknown or cannot serve that many devices.
        DataError: the data set is missing or damaged, or `out` cannot be written.
        TaskError: the task has no central data set.
    """
    central, sharding = plan_shards(task_name, scheme, num_devices, data, seed)
    labels = tuple(getattr(make_task(task_name, {}), "labels", ()))
    card = ShardMetadata(task=task_name, scheme=scheme, source=central.source, labels=labels)
    write_shard(out / TEST_NAME, central.test, replace(card, scheme="test"))
    return [_write_device_shard(out, device, sharding, central, card) for device in range(num_devices)]


def plan_shards(
    task_name: str, scheme: str, num_devices: int, data: Path | None = None, seed: int = 7
) -> tuple[CentralData, Partitioning]:
    """Returns the shards of `create_shards`, and raises its errors of scheme and data; writes nothing."""
    parsed = parse_scheme(scheme)
    central = load_central_data(task_name, data)
    rng = derive_rng(seed, "shards", task_name, scheme)
    return central, partition_rows(
        parsed, labels=central.train.labels, num_devices=num_devices, rng=rng, groups=central.groups
    )


def _write_device_shard(
    out: Path, device: int, partitioning: Partitioning, central: CentralData, metadata: ShardMetadata
) -> Path:
    rows = partitioning.rows[device]
    groups = () if central.groups is None else tuple(map(str, np.unique(central.groups[rows])))
    blocks = partitioning.blocks[device] if partitioning.blocks else {}
    width = max(2, len(str(len(partitioning.rows))))
    path = out / f"device-{device + 1:0{width}}.npz"
    write_shard(path, central.train.take(rows), replace(metadata, groups=groups, blocks=blocks))
    return path
