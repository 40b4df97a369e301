"""A classification task: a model, how to read its shards, and the plan that suits it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from edgefl.errors import ConfigError
from edgefl.tasks.shards import read_shard
from edgefl.types import Array, Dataset, Learner, Scalar, Shapes


class Model(Protocol):
    """What a task trains: tensors, their first values, and a learner; NumPy and torch models both are one."""

    def shapes(self) -> Shapes: ...
    def init(self, seed: int) -> dict[str, Array]: ...
    def learner(self, *, accelerator: str = "cpu", threads: int | None = None) -> Learner: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationTask:
    """A built-in task. `input_shape` is that of one example in a shard, `labels` names the classes in order."""

    name: str
    model: Model
    input_shape: tuple[int, ...]
    labels: tuple[str, ...]
    defaults: Mapping[str, Scalar]

    @property
    def num_classes(self) -> int:
        return len(self.labels)

    def shapes(self) -> Shapes:
        return self.model.shapes()

    def init(self, seed: int) -> dict[str, Array]:
        return self.model.init(seed)

    def read(self, path: str) -> Dataset:
        return read_shard(path, self.name, input_shape=self.input_shape, num_classes=self.num_classes)

    def learner(self, *, accelerator: str = "cpu", threads: int | None = None) -> Learner:
        return self.model.learner(accelerator=accelerator, threads=threads)


def checked_choice(task: str, option: str, value: object, choices: tuple[str, ...], other: str = "") -> str:
    """Returns `value` if it is one of the choices; `other` is what the message names beside them.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(
            f"{option} of task {task} must be {' or '.join([*choices, *([other] if other else [])])}, got {value!r}"
        )
    return value
