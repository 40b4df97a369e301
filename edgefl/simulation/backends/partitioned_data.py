"""The devices' data in memory: one data set, and row numbers per device; nothing is copied or written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from edgefl.core.errors import ConfigError, DataError
from edgefl.core.named_arrays import format_rows
from edgefl.core.types import Array, Dataset, Scalar, Task, derive_rng
from edgefl.tasks.datasets.central import load_central_data, read_own_data, read_test_data
from edgefl.tasks.datasets.partitioning import parse_scheme
from edgefl.tasks.datasets.shards import (
    compute_root_fraction,
    compute_sample_hashes,
    get_metadata_path,
    pack_inputs,
    read_metadata,
    split_train_test,
    unpack_inputs,
)

_ROW_FIELDS = ("rows", "train", "test")
_OPTIONAL = ("weights", "weak")
"""Arrays that a pool may have; what its examples come from matters to the cutting alone."""
_POOL_PREFIX = "pool-"
"""Before the names of the files of the pool's arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRows:
    """One device's rows in the pool: all in the shard's order, its training rows, and its test rows.

    `blocks` maps a block of a redundant shard to its part [start, stop) of `rows`.
    """

    rows: Array
    train: Array
    test: Array
    blocks: Mapping[int, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetData:
    """A data set and its rows per device; `test` is the coordinator's, None when it has none."""

    pool: Dataset
    shards: tuple[ShardRows, ...]
    test: Dataset | None = None


def partition_in_memory(  # noqa: PLR0913 the last five by name
    task: str,
    scheme: str,
    num_devices: int,
    *,
    data: Path | None,
    seed: int,
    test_fraction: float,
    options: Mapping[str, Scalar] | None = None,
    test: Path | None = None,
) -> FleetData:
    """Returns the very shards that `create_shards` writes into files; `options` and `test` are as there.

    Raises:
        ConfigError: the scheme is unknown or cannot serve that many devices.
        DataError: the data set is missing or damaged.
        TaskError: the task has no central data set.
    """
    parsed, central = parse_scheme(scheme), load_central_data(task, data, options, test)
    rng = derive_rng(seed, "shards", task, scheme)
    partition = central.cut(parsed, num_devices, rng)
    blocks = partition.blocks or ({},) * num_devices
    return FleetData(
        pool=central.train,
        shards=_split_shards(central.train, partition.rows, blocks, test_fraction),
        test=central.test,
    )


def reserve_root(data: FleetData, num_examples: int) -> FleetData:
    """Returns the data with a shard more, at the end: that part of the coordinator's on which its evaluator trains.

    Raises:
        DataError: the coordinator has no data.
    """
    if data.test is None:
        raise DataError("the coordinator has no examples to train on: beside these shards there is no test data")
    rest, root = split_train_test(data.test, compute_root_fraction(len(data.test), num_examples))
    pool = Dataset.concatenate([data.pool, root])
    rows = np.arange(len(data.pool), len(pool))
    return FleetData(
        pool=pool, shards=(*data.shards, ShardRows(rows=rows, train=rows, test=rows[:0], blocks={})), test=rest
    )


def read_shards(
    task: Task, paths: Sequence[str | Path], *, test_fraction: float, test: Path | None = None
) -> FleetData:
    """Returns existing shards of files or folders; the coordinator has no data of its own then but `test`.

    Raises:
        DataError: one of them cannot be used.
    """
    if not paths:
        raise ConfigError("a fleet needs at least one shard")
    parts = [read_own_data(task, Path(path)) for path in paths]
    if len(kinds := {format_rows(part.inputs) for part in parts}) > 1:
        raise DataError(f"the shards hold inputs of different shapes or types: {'; '.join(sorted(kinds)[:2])}")
    pool = Dataset.concatenate(parts)
    offsets = np.cumsum([0, *map(len, parts)])
    rows = [np.arange(start, end) for start, end in pairwise(offsets)]
    blocks = [_read_card_blocks(Path(path)) for path in paths]
    return FleetData(
        pool=pool,
        shards=_split_shards(pool, rows, blocks, test_fraction),
        test=None if test is None else read_test_data(task, test, pool),
    )


def _read_card_blocks(path: Path) -> Mapping[int, tuple[int, int]]:
    return read_metadata(path).blocks if path.is_file() and get_metadata_path(path).exists() else {}


def _split_shards(
    pool: Dataset,
    rows: Sequence[Array],
    blocks: Sequence[Mapping[int, tuple[int, int]]],
    test_fraction: float,
) -> tuple[ShardRows, ...]:
    """Splits every device's rows as `split_train_test` does; each sample of the pool is hashed once."""
    if not 0.0 <= test_fraction < 1.0:
        raise ConfigError(f"test fraction must be in [0, 1), got {test_fraction}")
    in_test = compute_sample_hashes(pool.inputs) < np.uint64(test_fraction * 2.0**64)
    if pool.weak is not None:
        in_test &= ~pool.weak
    return tuple(
        ShardRows(
            rows=shard,
            train=shard[~in_test[shard]],
            test=shard[in_test[shard]],
            blocks=shard_blocks,
        )
        for shard, shard_blocks in zip(rows, blocks, strict=True)
    )


def save_data(folder: Path, data: FleetData) -> None:
    """Writes a fleet's data for other processes of this machine, which map it instead of copying it."""
    optional = {name: getattr(data.pool, name) for name in _OPTIONAL}
    for name, array in {**pack_inputs(data.pool.inputs), "targets": data.pool.targets, **optional}.items():
        if array is not None:
            np.save(folder / f"{_POOL_PREFIX}{name}.npy", array)
    for name in _ROW_FIELDS:
        arrays = [getattr(shard, name) for shard in data.shards]
        np.save(folder / f"{name}.npy", np.concatenate(arrays).astype(np.int64))
        np.save(folder / f"{name}-ends.npy", np.cumsum([len(array) for array in arrays]))
    blocks = [{str(block): span for block, span in shard.blocks.items()} for shard in data.shards]
    (folder / "blocks.json").write_text(json.dumps(blocks))


def load_data(folder: Path) -> FleetData:
    """Returns the data that `save_data` wrote, without the coordinator's own data."""
    arrays = {
        path.stem.removeprefix(_POOL_PREFIX): np.load(path, mmap_mode="r")
        for path in folder.glob(f"{_POOL_PREFIX}*.npy")
    }
    optional = {name: arrays.get(name) for name in _OPTIONAL}
    pool = Dataset(inputs=unpack_inputs(arrays), targets=arrays["targets"], **optional)
    rows = {
        name: np.split(np.load(folder / f"{name}.npy"), np.load(folder / f"{name}-ends.npy")[:-1])
        for name in _ROW_FIELDS
    }
    blocks = json.loads((folder / "blocks.json").read_text())
    shards = (
        ShardRows(
            rows=rows["rows"][index],
            train=rows["train"][index],
            test=rows["test"][index],
            blocks={int(block): (start, stop) for block, (start, stop) in shard_blocks.items()},
        )
        for index, shard_blocks in enumerate(blocks)
    )
    return FleetData(pool=pool, shards=tuple(shards))
