"""No training at all: for studies of schedules, where only times and bytes matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edgefl.compression.codec import make_codec
from edgefl.simulation.boards import Board
from edgefl.simulation.training import FailedJobError, Job, Scores, Sent, Trained
from edgefl.types import Array, Shapes, Tensors, derived_rng

NOTHING = {"nothing": np.zeros(1, np.float32)}
"""What strategies work on in place of a model, and what boards send in place of an update."""


class Bookkeeping:
    """Implements `Training` with one update that is the same for all, and is not copied.

    Its bytes are those of a random displacement of the task's shapes in the codec that is asked for, encoded once.

    Args:
        boards: who trains.
        shapes: of the task.
        seed: of the random displacement.
    """

    def __init__(self, boards: Sequence[Board], shapes: Shapes, seed: int) -> None:
        self._examples = {board.device_id: board.num_examples for board in boards}
        self._shapes, self._seed = shapes, seed
        self._nothing: Tensors = {name: _frozen(array) for name, array in NOTHING.items()}
        self._num_bytes: dict[str, int] = {}

    def begin(self, job: Job) -> None: ...

    def finish(self, job: Job) -> Trained:
        return Trained(
            tensors=self._nothing,
            num_bytes=self._bytes_of(job.order.codec or "dense"),
            num_examples=self._examples[job.order.device_id],
        )

    def cancel(self, job: Job) -> None: ...

    def evaluate(self, device_id: str | None, sent: Sent) -> Scores:  # noqa: ARG002 the seam of all trainings
        raise FailedJobError("nothing was trained, so there is nothing to evaluate")

    def close(self) -> None: ...

    def _bytes_of(self, spec: str) -> int:
        if spec not in self._num_bytes:
            rng = derived_rng(self._seed, "any-displacement")
            displacement = _random(self._shapes, rng)
            self._num_bytes[spec] = len(make_codec(spec, self._shapes).encode(displacement, rng))
        return self._num_bytes[spec]


def _random(shapes: Shapes, rng: np.random.Generator) -> Mapping[str, Array]:
    shared = (spec for spec in shapes if spec.shared)
    return {spec.name: (1e-3 * rng.standard_normal(spec.shape)).astype(spec.dtype) for spec in shared}


def _frozen(array: Array) -> Array:
    alone = array.copy()
    alone.setflags(write=False)
    return alone
