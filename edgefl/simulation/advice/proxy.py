"""Proxy shards: the coordinator's data cut so that each board has as many examples as it reported.

Nothing is fetched from the boards. A scheme says how labels are spread, since boards report counts of examples alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.core.config import RunConfig
from edgefl.core.types import Array, Dataset, derive_rng
from edgefl.simulation.local_fleet import default_scheme
from edgefl.simulation.simulated_run import make_device_names
from edgefl.tasks.datasets.central import TEST_NAME, plan_shards
from edgefl.tasks.datasets.shards import ShardMetadata, pack_inputs, write_shard
from edgefl.tasks.registry import BUILT_IN, CONFIGURED, make_task

MAX_EXAMPLES = 50_000
"""Of one board: what a board reports of itself bounds no memory here."""
MAX_ALL_EXAMPLES = 200_000
"""Of all boards together."""
_HASHED_ROWS = 4096


def limit_counts(counts: Sequence[int]) -> tuple[list[int], str]:
    """Returns the examples of each board in the proxy, and a sentence where these are fewer than reported."""
    capped = [min(max(1, count), MAX_EXAMPLES) for count in counts]
    share = min(1.0, MAX_ALL_EXAMPLES / sum(capped))
    found = [max(1, int(count * share)) for count in capped]
    if sum(found) >= sum(counts):
        return found, ""
    return found, (
        f"the boards reported {sum(counts):,} examples, and the proxy has {sum(found):,} (at most {MAX_EXAMPLES:,} "
        f"of a board, {MAX_ALL_EXAMPLES:,} of all): a round that is an amount of epochs takes longer than simulated"
    )


def write_proxy_shards(
    config: RunConfig, counts: Sequence[int], folder: Path, *, data: Path | None, scheme: str | None
) -> tuple[list[Path], Path]:
    """Writes one shard a board and the coordinator's test data below a folder; returns their paths.

    A board with more examples than its part has gets some of them several times. Equal arguments and equal data give
    equal files, in the same place; other data gives another place. The run file's own test data is used.

    Raises:
        EdgeflError: as `create_shards`.
    """
    section, seed = config.simulation, config.run.seed
    scheme = scheme or section.scheme or default_scheme(config.run.task)
    central, partitioning = plan_shards(
        config.run.task,
        scheme,
        len(counts),
        data or (None if section.data is None else Path(section.data)),
        seed,
        options=config.task,
        test=None if section.test is None else Path(section.test),
    )
    text = json.dumps([config.run.task, dict(config.task), scheme, seed, [*counts], central.source], default=str)
    digest = hashlib.sha256(text.encode())
    for part in (central.train, central.test):
        _add_dataset(digest, part)
    for rows in partitioning.rows:
        _add_array(digest, rows)
    out = folder / f"proxy-{digest.hexdigest()[:16]}"
    out.mkdir(parents=True, exist_ok=True)
    task = make_task(config.run.task, config.task)
    card = ShardMetadata(
        task=config.run.task,
        scheme=f"{scheme}, as many as reported",
        source=central.source,
        labels=tuple(getattr(task, "labels", ())),
        is_dataset=config.run.task not in BUILT_IN or config.run.task in CONFIGURED,
        options=getattr(task, "shard_options", {}),
    )
    paths = [out / f"{name}.npz" for name in make_device_names(len(counts))]
    if not (test := out / TEST_NAME).exists():  # written last, so that it stands for all
        for number, (path, rows, count) in enumerate(zip(paths, partitioning.rows, counts, strict=True)):
            chosen = _resize(rows, count, seed, number)
            write_shard(path, central.train.take(chosen), card)
        write_shard(test, central.test, card)
    return paths, test


def _add_dataset(digest: Any, data: Dataset) -> None:
    for name, array in sorted(pack_inputs(data.inputs).items()):
        digest.update(name.encode())
        _add_array(digest, array)
    for part in (data.targets, data.weights, data.weak):
        if part is not None:
            _add_array(digest, part)


def _add_array(digest: Any, array: Any) -> None:
    digest.update(f"{array.dtype}{array.shape}".encode())
    for start in range(0, len(array), _HASHED_ROWS):
        digest.update(np.asarray(array[start : start + _HASHED_ROWS]).tobytes())


def _resize(rows: Array, count: int, seed: int, number: int) -> Array:
    """Returns `count` of the rows in their order; all of them as often as they go in, the rest sampled."""
    times, rest = divmod(count, len(rows))
    sampled = derive_rng(seed, "proxy", str(number)).permutation(len(rows))[:rest]
    return np.sort(np.concatenate([*([rows] * times), rows[sampled]]))
