"""Interface of an analysis: what a board sums over its examples, and what follows from all boards' sums."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import numpy as np

from edgefl.core.analyses import BoardSums
from edgefl.core.types import Array, Dataset, Json, ModelSpec, TensorKind, Tensors, TensorSpec

RESULT = "result"
"""Name of the only tensor, of bytes, of an answer that is no model, as of a job's result."""


class Analysis(ABC):
    """A question that sums over all examples answer; the same object stands on the boards and at the coordinator.

    Attributes:
        is_of_whole_shard: a board sums over its test examples, too.
        has_task_model: the answer is a model of the task, to be evaluated, exported and deployed as any other.
        request_spec: of what boards are sent beside the question, which follows from the model.
        sums_spec: of what a board answers.
    """

    is_of_whole_shard: bool
    has_task_model: bool
    request_spec: ModelSpec
    sums_spec: ModelSpec

    @abstractmethod
    def make_model(self) -> dict[str, Array]:
        """Returns the model before the first answers."""

    @abstractmethod
    def make_request(self, model: Tensors) -> Mapping[str, Array]:
        """Returns what boards are sent with a model, the tensors of `request_spec`."""

    @abstractmethod
    def measure(self, request: Tensors, data: Dataset) -> dict[str, Array]:
        """Returns a board's sums over its examples, the tensors of `sums_spec`.

        Raises:
            DataError: the examples are not those of the task.
        """

    @abstractmethod
    def find_fault(self, sums: Tensors) -> str | None:
        """Returns why no board can have such sums; None where one can. Shapes and types are those of `sums_spec`."""

    @abstractmethod
    def solve(self, model: Tensors, boards: Iterable[BoardSums]) -> dict[str, Array]:
        """Returns the next model, of the boards' sums in the order in which the boards were asked."""


def pack_result(result: Json) -> dict[str, Array]:
    """Returns a result as a model: its text in JSON, in one tensor of bytes; none of an empty one."""
    text = json.dumps(result, allow_nan=False, separators=(",", ":")).encode() if result else b""
    return {RESULT: np.frombuffer(text, np.uint8).copy()}


def read_result(model: Tensors) -> Json:
    """Returns the result that a model is; empty before the first round."""
    text = np.asarray(model[RESULT]).tobytes()
    found: Json = json.loads(text) if text else {}
    return found


def make_exact_spec(name: str, *shape: int, dtype: str = "int64") -> TensorSpec:
    """Returns a tensor that every codec leaves as it is."""
    return TensorSpec(name=name, shape=shape, dtype=dtype, kind=TensorKind.BUFFER)
