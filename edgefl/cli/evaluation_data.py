"""Examples for the evaluation of a retained model: a shard's, or the coordinator's test shard's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl.cli.saved_model_source import find_coordinator_shard
from edgefl.core.errors import DataError

if TYPE_CHECKING:
    from edgefl.core.types import Dataset, Json, Task

TEST_SCHEME = "test"

part_option = click.option(
    "--part",
    type=click.Choice(["test", "all"]),
    help="Which examples of the shard [default: all of one that was cut for tests, else those that devices test on].",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationData:
    """Examples of `shard`, else of the coordinator in `directory` (None: the default one)."""

    shard: Path | None
    part: str | None
    directory: Path | None

    def load(self, task: Task, row: Json) -> tuple[Path, Dataset]:
        """Returns the examples and their shard.

        Raises:
            DataError: there is no shard, or it holds no such examples.
        """
        from edgefl.tasks.datasets.train_test_split import split_train_test  # noqa: PLC0415 fast start

        path = self.shard or find_coordinator_shard(self.directory, row["task"])
        if path is None:
            raise DataError(
                f"no test shard of task {row['task']} in a coordinator's directory on this machine; name it with "
                "--dir, or give --shard PATH"
            )
        data = task.read(str(path))
        if (self.part or ("all" if _is_test_shard(path) else "test")) == "test":
            data = split_train_test(data, row["test_fraction"])[1]
            if not len(data):
                raise DataError(f"the test part of shard {path} is empty; --part all takes every example of it")
        return path, data

    def has_shard(self, task: str) -> bool:
        return bool(self.shard or find_coordinator_shard(self.directory, task))


def _is_test_shard(path: Path) -> bool:
    from edgefl.tasks.sharding.shard_metadata import get_metadata_path, read_metadata  # noqa: PLC0415 fast start

    return path.is_file() and get_metadata_path(path).exists() and read_metadata(path).scheme == TEST_SCHEME
