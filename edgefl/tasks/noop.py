"""A task that costs nothing: what remains of a round is the machinery, which benchmarks measure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgefl.errors import ConfigError
from edgefl.tasks.accelerators import checked_accelerator
from edgefl.tasks.numpy_learner import Prepare, copy_checked
from edgefl.tasks.onnx_steps import Graph
from edgefl.types import Array, Dataset, Learner, Scalar, Shapes, Tensors, TensorSpec, derived_rng

DEFAULT_SIZE_BYTES = 1_000_000
NUM_EXAMPLES = 64
FLOAT_BYTES = 4


class NoopTask:
    """One float32 tensor of `size_bytes`, a gradient that is always zero, and a shard that needs no file."""

    name = "noop"
    labels = ("nothing",)
    num_classes = 1
    input_shape = (1,)
    defaults: Mapping[str, Scalar] = {"learning_rate": 0.1, "batch_size": NUM_EXAMPLES, "epochs": 1.0}

    def __init__(self, *, size_bytes: int = DEFAULT_SIZE_BYTES) -> None:
        if isinstance(size_bytes, bool) or not isinstance(size_bytes, int) or size_bytes < FLOAT_BYTES:
            raise ConfigError(f"size_bytes of task noop must be a whole number of 4 or more, got {size_bytes!r}")
        self._shapes: Shapes = (TensorSpec(name="weights", shape=(size_bytes // FLOAT_BYTES,)),)

    def shapes(self) -> Shapes:
        return self._shapes

    def init(self, seed: int) -> dict[str, Array]:
        rng = derived_rng(seed, "initial-weights")
        return {spec.name: rng.standard_normal(spec.shape).astype(np.float32) for spec in self._shapes}

    def read(self, path: str) -> Dataset:  # noqa: ARG002 whatever lies there, there is nothing to learn from it
        return noop_data()

    def learner(self, *, accelerator: str = "cpu", threads: int | None = None) -> Learner:  # noqa: ARG002 nothing to compute
        checked_accelerator(accelerator)
        return NoopLearner(self._shapes)


class NoopLearner:
    """Holds the model and leaves it as it is."""

    def __init__(self, shapes: Shapes) -> None:
        self._parameters = {spec.name: np.zeros(spec.shape, np.float32) for spec in shapes}
        self._gradients = {name: np.zeros_like(value) for name, value in self._parameters.items()}

    @property
    def parameters(self) -> Mapping[str, Array]:
        return self._parameters

    @property
    def gradients(self) -> Mapping[str, Array]:
        return self._gradients

    def load(self, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            copy_checked(name, tensor if isinstance(tensor, np.ndarray) else tensor.dense(), self._parameters)

    def read(self) -> dict[str, Array]:
        return {name: value.copy() for name, value in self._parameters.items()}

    @property
    def prepare(self) -> Prepare:
        """What leaves raw inputs as they are."""
        return lambda inputs: inputs.astype(np.float32)

    def logits(self, inputs: Array) -> Array:
        """Returns zeros, [n, 1]."""
        return np.zeros((len(inputs), 1), np.float32)

    def draw(self, graph: Graph, features: str, example: Array) -> str:  # noqa: ARG002 the shapes are known
        """Adds the model to an ONNX graph and returns the name of its logits."""
        return graph.add("Mul", features, graph.constant(np.float32(0.0)))

    def gradient(self, batch: Dataset) -> float:  # noqa: ARG002 the gradients are zero and stay so
        return 0.0

    def evaluate(self, data: Dataset) -> tuple[float, float]:  # noqa: ARG002 nothing is predicted, nothing is right
        return 0.0, 0.0


def noop_data() -> Dataset:
    """Returns a few different examples, enough that a split leaves some on either side."""
    return Dataset(
        inputs=np.arange(NUM_EXAMPLES, dtype=np.uint8).reshape(-1, 1), labels=np.zeros(NUM_EXAMPLES, np.int64)
    )
