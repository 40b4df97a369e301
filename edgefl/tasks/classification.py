"""A classification task: a model, a shard reader, and a default plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, Dataset, Learner, ModelSpec, Scalar, Task
from edgefl.tasks.datasets.shards import read_shard


class TrainableModel(Protocol):
    """A task's model: tensors, first weights, and a learner; implemented in NumPy and torch."""

    def shapes(self) -> ModelSpec: ...
    def init(self, seed: int) -> dict[str, Array]: ...
    def learner(self, *, accelerator: str = "cpu", threads: int | None = None) -> Learner: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationTask(Task):
    """A built-in task. `input_shape` is that of one shard example, `labels` names the classes in order."""

    name: str
    model: TrainableModel
    input_shape: tuple[int, ...]
    labels: tuple[str, ...]
    defaults: Mapping[str, Scalar]

    @property
    def num_classes(self) -> int:
        return len(self.labels)

    def shapes(self) -> ModelSpec:
        return self.model.shapes()

    def init(self, seed: int) -> dict[str, Array]:
        return self.model.init(seed)

    def read(self, path: str) -> Dataset:
        return read_shard(path, self.name, input_shape=self.input_shape, num_classes=self.num_classes)

    def learner(self, *, accelerator: str = "cpu", threads: int | None = None) -> Learner:
        return self.model.learner(accelerator=accelerator, threads=threads)


def validate_choice(task: str, option: str, value: object, choices: tuple[str, ...], extra_choice: str = "") -> str:
    """Returns `value` if it is one of the choices; the message also names `extra_choice`.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(value, str) or value not in choices:
        listing = [*choices, *([extra_choice] if extra_choice else [])]
        raise ConfigError(f"{option} of task {task} must be {' or '.join(listing)}, got {value!r}")
    return value
