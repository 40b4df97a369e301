"""Training in this process: one job after another, each when its result is requested."""

from __future__ import annotations

from edgefl.compression.decoding import decode_body
from edgefl.core.types import LazyTensors, ModelSpec
from edgefl.simulation.backends.backend import (
    EncodedModel,
    EvaluationMetrics,
    TrainingFailedError,
    TrainingJob,
    TrainingResult,
)
from edgefl.simulation.backends.trainer import EncodedUpdate, SimulatedTrainer


class InProcessBackend:
    """Implements `TrainingBackend` with a `SimulatedTrainer`; a cancelled job was never run."""

    def __init__(self, trainer: SimulatedTrainer, model_spec: ModelSpec) -> None:
        self._trainer, self._model_spec = trainer, model_spec

    def start(self, job: TrainingJob) -> None: ...

    def get_result(self, job: TrainingJob) -> TrainingResult:
        try:
            return make_result(self._trainer.train(job.instruction, job.model, job.iterations), self._model_spec)
        except Exception as error:  # the boundary of one instruction, as on a device
            raise TrainingFailedError(format_error(error)) from error

    def cancel(self, job: TrainingJob) -> None: ...

    def evaluate(self, device_id: str | None, model: EncodedModel) -> EvaluationMetrics:
        try:
            return self._trainer.evaluate(device_id, model)
        except Exception as error:  # likewise
            raise TrainingFailedError(format_error(error)) from error

    def close(self) -> None: ...


def make_result(update: EncodedUpdate, model_spec: ModelSpec) -> TrainingResult:
    """Returns an update as the coordinator receives it: encoded until it is read."""
    body = update.body
    return TrainingResult(
        tensors=LazyTensors(lambda: decode_body(body, model_spec)) if body else {},
        num_bytes=len(body) + sum(len(message.body) for message in update.outbox),
        num_examples=update.num_examples,
        loss=update.loss,
        outbox=update.outbox,
    )


def format_error(error: Exception) -> str:
    """Returns the error reply of a device."""
    return f"{type(error).__name__}: {error}"
