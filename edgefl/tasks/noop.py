"""A task without cost, for benchmarks of the machinery of a round."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, Dataset, Learner, ModelSpec, Scalar, Task, TensorSpec, derive_rng
from edgefl.tasks.learners.numpy_learner import NumpyLearner
from edgefl.tasks.onnx_graph import OnnxGraph
from edgefl.tasks.registry import validate_accelerator

DEFAULT_MODEL_BYTES = 1_000_000
NUM_EXAMPLES = 64
FLOAT_BYTES = 4


class NoopTask(Task):
    """One float32 tensor of `size_bytes`, a gradient that is always zero, and a shard that needs no file."""

    name = "noop"
    labels = ("nothing",)
    num_classes = 1
    input_shape = (1,)
    defaults: Mapping[str, Scalar] = {"learning_rate": 0.1, "batch_size": NUM_EXAMPLES, "epochs": 1.0}

    def __init__(self, *, size_bytes: int = DEFAULT_MODEL_BYTES) -> None:
        if isinstance(size_bytes, bool) or not isinstance(size_bytes, int) or size_bytes < FLOAT_BYTES:
            raise ConfigError(f"size_bytes of task noop must be a whole number of 4 or more, got {size_bytes!r}")
        self._shapes: ModelSpec = (TensorSpec(name="weights", shape=(size_bytes // FLOAT_BYTES,)),)

    def shapes(self) -> ModelSpec:
        return self._shapes

    def init(self, seed: int) -> dict[str, Array]:
        rng = derive_rng(seed, "initial-weights")
        return {spec.name: rng.standard_normal(spec.shape).astype(np.float32) for spec in self._shapes}

    def read(self, path: str) -> Dataset:  # noqa: ARG002 the shard is not used
        return make_noop_data()

    def learner(self, *, accelerator: str = "cpu", threads: int | None = None) -> Learner:  # noqa: ARG002 nothing to compute
        validate_accelerator(accelerator)
        return NoopLearner(self._shapes)


class NoopLearner(NumpyLearner):
    """Holds the model and leaves it unchanged."""

    def __init__(self, shapes: ModelSpec) -> None:
        super().__init__((), lambda inputs: inputs.astype(np.float32))
        self._tensors = self._parameters = {spec.name: np.zeros(spec.shape, np.float32) for spec in shapes}
        self._gradients = {name: np.zeros_like(value) for name, value in self._parameters.items()}

    def logits(self, inputs: Array) -> Array:
        """Returns zeros, [n, 1]."""
        return np.zeros((len(inputs), 1), np.float32)

    def draw(self, graph: OnnxGraph, features: str, example: Array) -> str:  # noqa: ARG002 the shapes are known
        """Adds the model to an ONNX graph and returns the name of its logits."""
        return graph.add("Mul", features, graph.add_constant(np.float32(0.0)))

    def sum_clipped_gradients(self, batch: Dataset, clip: float) -> float:  # noqa: ARG002 of no length, all of them
        for gradient in self.gradients.values():
            gradient[...] = 0.0
        return 0.0

    def gradient(self, batch: Dataset) -> float:  # noqa: ARG002 the gradients are zero and stay so
        return 0.0

    def evaluate(self, data: Dataset) -> tuple[float, float]:  # noqa: ARG002 there are no predictions
        return 0.0, 0.0


def make_noop_data() -> Dataset:
    """Returns a few different examples, enough for both parts of a split."""
    return Dataset(
        inputs=np.arange(NUM_EXAMPLES, dtype=np.uint8).reshape(-1, 1), targets=np.zeros(NUM_EXAMPLES, np.int64)
    )
