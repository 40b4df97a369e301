"""Proxy shards: the coordinator's data cut so that each board has as many examples as it reported.

Nothing is fetched from the boards. A scheme says how labels are spread, since boards report counts of examples alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgefl.core.config import RunConfig
from edgefl.core.types import Array, derive_rng
from edgefl.simulation.local_fleet import default_scheme
from edgefl.simulation.simulated_run import make_device_names
from edgefl.tasks.datasets.central import TEST_NAME, plan_shards
from edgefl.tasks.datasets.shards import ShardMetadata, write_shard
from edgefl.tasks.registry import BUILT_IN, CONFIGURED, make_task

MAX_EXAMPLES = 50_000
"""Of one board: what a board reports of itself bounds no memory here."""


def write_proxy_shards(
    config: RunConfig, counts: Sequence[int], folder: Path, *, data: Path | None, scheme: str | None
) -> tuple[list[Path], Path]:
    """Writes one shard a board and the coordinator's test data below a folder; returns their paths.

    A board with more examples than its part has gets some of them several times. Equal arguments give equal files,
    in the same place.

    Raises:
        EdgeflError: as `create_shards`.
    """
    scheme, seed = scheme or config.simulation.scheme or default_scheme(config.run.task), config.run.seed
    central, partitioning = plan_shards(config.run.task, scheme, len(counts), data, seed, options=config.task)
    text = json.dumps([config.run.task, dict(config.task), scheme, seed, [*counts], str(data)], default=str)
    out = folder / f"proxy-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
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
            chosen = _resize(rows, min(max(1, count), MAX_EXAMPLES), seed, number)
            write_shard(path, central.train.take(chosen), card)
        write_shard(test, central.test, card)
    return paths, test


def _resize(rows: Array, count: int, seed: int, number: int) -> Array:
    """Returns `count` of the rows in their order; all of them as often as they go in, the rest sampled."""
    times, rest = divmod(count, len(rows))
    sampled = derive_rng(seed, "proxy", str(number)).permutation(len(rows))[:rest]
    return np.sort(np.concatenate([*([rows] * times), rows[sampled]]))
