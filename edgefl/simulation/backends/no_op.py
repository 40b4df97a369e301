"""A backend without training: for studies of schedules, where only times and bytes matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edgefl.compression.codec import make_codec
from edgefl.core.types import Array, ModelSpec, Tensors, derive_rng
from edgefl.simulation.backends.backend import (
    EncodedModel,
    EvaluationMetrics,
    TrainingFailedError,
    TrainingJob,
    TrainingResult,
)
from edgefl.simulation.device import SimulatedDevice

PLACEHOLDER_TENSORS = {"nothing": np.zeros(1, np.float32)}
"""Stand-in for the model in strategies, and for the update of a device."""


class NoOpBackend:
    """Implements `TrainingBackend` with one update, shared by all devices and not copied.

    Its size is that of a random displacement of the task's shapes in the requested codec, encoded once.

    Args:
        devices: the devices that train.
        model_spec: of the task.
        seed: of the random displacement.
    """

    def __init__(self, devices: Sequence[SimulatedDevice], model_spec: ModelSpec, seed: int) -> None:
        self._num_examples = {board.device_id: board.num_examples for board in devices}
        self._model_spec, self._seed = model_spec, seed
        self._placeholder: Tensors = {name: _freeze(array) for name, array in PLACEHOLDER_TENSORS.items()}
        self._num_bytes: dict[str, int] = {}

    def start(self, job: TrainingJob) -> None: ...

    def get_result(self, job: TrainingJob) -> TrainingResult:
        return TrainingResult(
            tensors=self._placeholder,
            num_bytes=self._compute_num_bytes(job.instruction.codec or "dense"),
            num_examples=self._num_examples[job.instruction.device_id],
        )

    def cancel(self, job: TrainingJob) -> None: ...

    def evaluate(self, device_id: str | None, model: EncodedModel) -> EvaluationMetrics:  # noqa: ARG002 interface of training backends
        raise TrainingFailedError("nothing was trained, so there is nothing to evaluate")

    def close(self) -> None: ...

    def _compute_num_bytes(self, spec: str) -> int:
        if spec not in self._num_bytes:
            rng = derive_rng(self._seed, "any-displacement")
            displacement = _draw_displacement(self._model_spec, rng)
            self._num_bytes[spec] = len(make_codec(spec, self._model_spec).encode(displacement, rng))
        return self._num_bytes[spec]


def _draw_displacement(model_spec: ModelSpec, rng: np.random.Generator) -> Mapping[str, Array]:
    shared = (spec for spec in model_spec if spec.shared)
    return {spec.name: (1e-3 * rng.standard_normal(spec.shape)).astype(spec.dtype) for spec in shared}


def _freeze(array: Array) -> Array:
    copied = array.copy()
    copied.setflags(write=False)
    return copied
