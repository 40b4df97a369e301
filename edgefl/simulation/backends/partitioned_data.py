"""The devices' data in memory: one data set, and row numbers per device; nothing is copied or written."""

from __future__ import annotations

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
    find_sides,
    get_metadata_path,
    pack_inputs,
    read_metadata,
    split_train_test,
    unpack_inputs,
)
from edgefl.tasks.registry import find_split_period_s, make_task

_ROW_FIELDS = ("rows", "train", "test")
_OPTIONAL = ("weights", "weak")
"""Arrays that a pool may have; what its examples come from matters to the cutting alone."""
_POOL_PREFIX = "pool-"
"""Before the names of the pool's arrays."""
_ENDS_SUFFIX, _BLOCKS = "-ends", "blocks"
"""Of where each device's row numbers end; and [n, 4] of device, block, and the block's start and stop."""


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
    period_s = find_split_period_s(make_task(task, options))
    rng = derive_rng(seed, "shards", task, scheme)
    partition = central.cut(parsed, num_devices, rng)
    blocks = partition.blocks or ({},) * num_devices
    return FleetData(
        pool=central.train,
        shards=_split_shards(central.train, partition.rows, blocks, test_fraction, period_s),
        test=central.test,
    )


def reserve_root(data: FleetData, num_examples: int) -> FleetData:
    """Returns the data with a shard more, at the end: that part of the coordinator's on which its evaluator trains.

    Raises:
        DataError: the coordinator has no data.
    """
    if data.test is None:
        raise DataError("the coordinator has no examples to train on: beside these shards there is no test data")
    fraction = compute_root_fraction(len(data.test), num_examples)
    rest, root = split_train_test(data.test, fraction)  # by example: so few may have no whole period
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
        shards=_split_shards(pool, rows, blocks, test_fraction, find_split_period_s(task)),
        test=None if test is None else read_test_data(task, test, pool),
    )


def _read_card_blocks(path: Path) -> Mapping[int, tuple[int, int]]:
    return read_metadata(path).blocks if path.is_file() and get_metadata_path(path).exists() else {}


def _split_shards(
    pool: Dataset,
    rows: Sequence[Array],
    blocks: Sequence[Mapping[int, tuple[int, int]]],
    test_fraction: float,
    period_s: float | None,
) -> tuple[ShardRows, ...]:
    """Splits every device's rows as `split_train_test` does; each sample of the pool is hashed once."""
    in_train, in_test = find_sides(pool, test_fraction, period_s=period_s)
    return tuple(
        ShardRows(
            rows=shard,
            train=shard[in_train[shard]],
            test=shard[in_test[shard]],
            blocks=shard_blocks,
        )
        for shard, shard_blocks in zip(rows, blocks, strict=True)
    )


def pack_data(data: FleetData) -> dict[str, Array]:
    """Returns a fleet's data without the coordinator's own as few arrays, for other processes; see `unpack_data`."""
    optional = {name: getattr(data.pool, name) for name in _OPTIONAL}
    pool = {**pack_inputs(data.pool.inputs), "targets": data.pool.targets, **optional}
    packed = {f"{_POOL_PREFIX}{name}": array for name, array in pool.items() if array is not None}
    for name in _ROW_FIELDS:
        arrays = [getattr(shard, name) for shard in data.shards]
        packed[name] = np.concatenate(arrays).astype(np.int64)
        packed[f"{name}{_ENDS_SUFFIX}"] = np.cumsum([len(array) for array in arrays])
    blocks = [
        (index, block, *span) for index, shard in enumerate(data.shards) for block, span in shard.blocks.items()
    ]
    return {**packed, _BLOCKS: np.array(blocks, np.int64).reshape(-1, 4)}


def unpack_data(packed: Mapping[str, Array]) -> FleetData:
    """Returns the data of which `pack_data` made arrays; they may be read-only, and are not copied."""
    pool = {name.removeprefix(_POOL_PREFIX): array for name, array in packed.items() if name.startswith(_POOL_PREFIX)}
    optional = {name: pool.get(name) for name in _OPTIONAL}
    rows = {name: np.split(packed[name], packed[f"{name}{_ENDS_SUFFIX}"][:-1]) for name in _ROW_FIELDS}
    blocks: list[dict[int, tuple[int, int]]] = [{} for _ in rows["rows"]]
    for index, block, start, stop in packed[_BLOCKS].tolist():
        blocks[index][block] = start, stop
    shards = (
        ShardRows(rows=rows["rows"][index], train=rows["train"][index], test=rows["test"][index], blocks=shard_blocks)
        for index, shard_blocks in enumerate(blocks)
    )
    return FleetData(
        pool=Dataset(inputs=unpack_inputs(pool), targets=pool["targets"], **optional), shards=tuple(shards)
    )


def save_data(folder: Path, data: FleetData) -> None:
    """Writes a fleet's data for other processes of this machine, which map it instead of copying it."""
    for name, array in pack_data(data).items():
        np.save(folder / f"{name}.npy", array)


def load_data(folder: Path) -> FleetData:
    """Returns the data that `save_data` wrote, without the coordinator's own data."""
    # Only the pool is mapped: a file has one row number of a device here and one there.
    return unpack_data(
        {
            path.stem: np.load(path, mmap_mode="r" if path.stem.startswith(_POOL_PREFIX) else None)
            for path in folder.glob("*.npy")
        }
    )
