"""Which examples a kept model is tried on: a shard's, or those of the coordinator's own test shard."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl.cli.model_source import coordinator_shard
from edgefl.errors import DataError

if TYPE_CHECKING:
    from edgefl.types import Dataset, Json, Task

TEST_SCHEME = "test"

part_option = click.option(
    "--part",
    type=click.Choice(["test", "all"]),
    help="Which examples of the shard [default: all of one that was cut for tests, else those that devices test on].",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelData:
    """Which examples a user means: those of `shard`, else of the coordinator in `directory` (None: the usual one)."""

    shard: Path | None
    part: str | None
    directory: Path | None

    def read(self, task: Task, row: Json) -> tuple[Path, Dataset]:
        """Returns the examples, and the shard that they are of.

        Raises:
            DataError: there is no shard, or it holds no such examples.
        """
        from edgefl.tasks.splits import local_split  # noqa: PLC0415 fast start

        path = self.shard or coordinator_shard(self.directory, row["task"])
        if path is None:
            raise DataError(
                f"no test shard of task {row['task']} in a coordinator's directory on this machine; name it with "
                "--dir, or give --shard PATH"
            )
        data = task.read(str(path))
        if (self.part or ("all" if _is_test_shard(path) else "test")) == "test":
            data = local_split(data, row["test_fraction"])[1]
            if not len(data):
                raise DataError(f"the test part of shard {path} is empty; --part all takes every example of it")
        return path, data

    def has_shard(self, task: str) -> bool:
        return bool(self.shard or coordinator_shard(self.directory, task))


def _is_test_shard(path: Path) -> bool:
    from edgefl.tasks.cards import card_path, read_card  # noqa: PLC0415 fast start

    return path.is_file() and card_path(path).exists() and read_card(path).scheme == TEST_SCHEME
