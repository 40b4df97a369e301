"""Shard uses: which runs have worked on which task's shard, and when, for an owner who forgets data."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.core.errors import StoreError
from edgefl.core.safe_parsing import parse_message
from edgefl.system.atomic_files import write_atomic

log = logging.getLogger(__name__)

USES_NAME = "shard_uses.json"
MAX_RUNS = 1000
MAX_FILE_BYTES = 1024**2
INTERVAL_S = 3600.0
"""A run's last use is written once in so long: cards wear out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUse:
    """First and last work of a run on a task's shard, in seconds since 1970; the last one up to an hour too early."""

    task: str
    run: str
    first_s: float
    last_s: float


class ShardUses:
    """Ledger of the runs that have used this board's shards; the oldest of more than `MAX_RUNS` go.

    Args:
        path: of its file.
        clock: seconds since 1970.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path, self._clock = path, clock
        self._uses = {(use.task, use.run): use for use in read_shard_uses(path)}

    def record(self, task: str, run: str) -> None:
        """Records that a run has used a shard just now; a file that cannot be written is logged."""
        now_s, known = self._clock(), self._uses.get((task, run))
        if known is not None and 0 <= now_s - known.last_s < INTERVAL_S:
            return
        self._uses[task, run] = ShardUse(task=task, run=run, first_s=known.first_s if known else now_s, last_s=now_s)
        newest = sorted(self._uses.values(), key=lambda use: use.last_s)[-MAX_RUNS:]
        self._uses = {(use.task, use.run): use for use in newest}
        rows = [[use.task, use.run, use.first_s, use.last_s] for use in newest]
        try:
            write_atomic(self._path, json.dumps({"v": 1, "uses": rows}).encode())
        except StoreError as error:
            log.warning("that run %s uses the shard of %s cannot be noted: %s", run, task, error)


def read_shard_uses(path: Path) -> list[ShardUse]:
    """Returns the uses in a ledger's file, the last one last; none where it is missing or damaged."""
    try:
        with path.open("rb") as file:
            value = parse_message(file.read(MAX_FILE_BYTES + 1))
        return [_parse_use(row) for row in value["uses"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read; which runs used this board's data is not known: %s", path, error)
        return []


def _parse_use(row: Any) -> ShardUse:
    task, run, first_s, last_s = row
    if not isinstance(task, str) or not isinstance(run, str):
        raise ValueError("task and run must be texts")  # noqa: TRY004 of a damaged file
    return ShardUse(task=task, run=run, first_s=float(first_s), last_s=float(last_s))
