"""The boards' data in memory: one data set, and row numbers for each board. Nothing is copied, nothing is written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from edgefl.errors import ConfigError, DataError
from edgefl.tasks.cards import card_path, read_card
from edgefl.tasks.sharding import parse_scheme, shard_rows
from edgefl.tasks.sources import central_data
from edgefl.tasks.splits import sample_hashes
from edgefl.types import Array, Dataset, Task, derived_rng

_ROWS = ("rows", "train", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One board's rows in the pool: all in the shard's order, those it trains on, and those it tests on.

    `blocks` maps a block of a redundant shard to its part [start, stop) of `rows`.
    """

    rows: Array
    train: Array
    test: Array
    blocks: Mapping[int, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetData:
    """A data set and who has which of it; `test` is the coordinator's, None when it has none."""

    pool: Dataset
    shards: tuple[Shard, ...]
    test: Dataset | None = None


def cut_in_memory(
    task: str, scheme: str, num_devices: int, *, data: Path | None, seed: int, test_fraction: float
) -> FleetData:
    """Returns the very shards that `tasks.cutting.cut_shards` writes into files.

    Raises:
        ConfigError: the scheme is unknown or cannot serve so many devices.
        DataError: the data set is missing or damaged.
        TaskError: the task has no central data set.
    """
    parsed, central = parse_scheme(scheme), central_data(task, data)
    rng = derived_rng(seed, "shards", task, scheme)
    cut = shard_rows(parsed, labels=central.train.labels, devices=num_devices, rng=rng, groups=central.groups)
    blocks = cut.blocks or ({},) * num_devices
    return FleetData(
        pool=central.train,
        shards=_shards(central.train, cut.rows, blocks, test_fraction),
        test=central.test,
    )


def read_shards(task: Task, paths: Sequence[str | Path], *, test_fraction: float) -> FleetData:
    """Returns shards that there are as files or folders; the coordinator has no data of its own then.

    Raises:
        DataError: one of them cannot be used.
    """
    if not paths:
        raise ConfigError("a fleet needs at least one shard")
    parts = [task.read(str(path)) for path in paths]
    if len({part.inputs.shape[1:] for part in parts}) > 1:
        raise DataError("the shards hold inputs of different shapes")
    pool = Dataset(
        inputs=np.concatenate([part.inputs for part in parts]), labels=np.concatenate([part.labels for part in parts])
    )
    ends = np.cumsum([0, *map(len, parts)])
    rows = [np.arange(begin, end) for begin, end in pairwise(ends)]
    blocks = [_card_blocks(Path(path)) for path in paths]
    return FleetData(pool=pool, shards=_shards(pool, rows, blocks, test_fraction))


def _card_blocks(path: Path) -> Mapping[int, tuple[int, int]]:
    return read_card(path).blocks if path.is_file() and card_path(path).exists() else {}


def _shards(
    pool: Dataset,
    rows: Sequence[Array],
    blocks: Sequence[Mapping[int, tuple[int, int]]],
    test_fraction: float,
) -> tuple[Shard, ...]:
    """Splits every board's rows as `tasks.splits.local_split` does; each sample of the pool is hashed once."""
    if not 0.0 <= test_fraction < 1.0:
        raise ConfigError(f"test fraction must be in [0, 1), got {test_fraction}")
    in_test = sample_hashes(pool.inputs) < np.uint64(test_fraction * 2.0**64)
    return tuple(
        Shard(
            rows=own,
            train=own[~in_test[own]],
            test=own[in_test[own]],
            blocks=held,
        )
        for own, held in zip(rows, blocks, strict=True)
    )


def save_data(folder: Path, data: FleetData) -> None:
    """Writes a fleet's data for other processes of this machine, which map it instead of copying it."""
    np.save(folder / "inputs.npy", data.pool.inputs)
    np.save(folder / "labels.npy", data.pool.labels)
    for name in _ROWS:
        arrays = [getattr(shard, name) for shard in data.shards]
        np.save(folder / f"{name}.npy", np.concatenate(arrays).astype(np.int64))
        np.save(folder / f"{name}-ends.npy", np.cumsum([len(array) for array in arrays]))
    blocks = [{str(block): place for block, place in shard.blocks.items()} for shard in data.shards]
    (folder / "blocks.json").write_text(json.dumps(blocks))


def load_data(folder: Path) -> FleetData:
    """Returns what `save_data` wrote, without the coordinator's own data."""
    pool = Dataset(
        inputs=np.load(folder / "inputs.npy", mmap_mode="r"), labels=np.load(folder / "labels.npy", mmap_mode="r")
    )
    rows = {
        name: np.split(np.load(folder / f"{name}.npy"), np.load(folder / f"{name}-ends.npy")[:-1]) for name in _ROWS
    }
    blocks = json.loads((folder / "blocks.json").read_text())
    shards = (
        Shard(
            rows=rows["rows"][place],
            train=rows["train"][place],
            test=rows["test"][place],
            blocks={int(block): (start, stop) for block, (start, stop) in held.items()},
        )
        for place, held in enumerate(blocks)
    )
    return FleetData(pool=pool, shards=tuple(shards))
