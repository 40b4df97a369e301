"""Training backends of this process: one job after another, none at all, and the choice of more processes.

The number of processes is measured on a run's first jobs unless the run file sets it. Without training, for studies
of schedules, only times and bytes matter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from edgefl.compression.codec import decode_body, make_codec
from edgefl.core.types import Array, LazyTensors, ModelSpec, Tensors, derive_rng
from edgefl.simulation.backends.trainer import (
    EncodedModel,
    EncodedUpdate,
    EvaluationMetrics,
    SimulatedTrainer,
    TrainingBackend,
    TrainingFailedError,
    TrainingJob,
    TrainingResult,
)
from edgefl.simulation.device import SimulatedDevice

log = logging.getLogger(__name__)

PLACEHOLDER_TENSORS = {"nothing": np.zeros(1, np.float32)}
"""Stand-in for the model in strategies, and for the update of a device."""

PROBE_DURATION_S = 0.5
"""Duration of the probe of the first job."""
MIN_POOL_TRAINING_S = 15.0
"""Processes take seconds to start, so a run that trains for less than this stays in one."""


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
        num_bytes=(len(body) if update.num_bytes is None else update.num_bytes)
        + sum(len(message.body) for message in update.messages),
        num_examples=update.num_examples,
        loss=update.loss,
        messages=update.messages,
        exchanged_bytes=update.exchanged_bytes,
        cluster=update.cluster,
        epsilon=update.epsilon,
    )


def format_error(error: Exception) -> str:
    """Returns the error reply of a device."""
    return f"{type(error).__name__}: {error}"


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


class AutoBackend:
    """Implements `TrainingBackend` by one of two backends, chosen at the first result. Both give equal results.

    Args:
        in_process: trains in this process.
        trainer: the trainer of `in_process`; probes the first job.
        start_pool: number of processes -> a backend with that many.
        num_cores: maximum number of useful processes.
        expected_rounds: expected multiples of the first batch of jobs.
        clock: seconds, monotone.
    """

    def __init__(
        self,
        in_process: TrainingBackend,
        trainer: SimulatedTrainer,
        start_pool: Callable[[int], TrainingBackend],
        *,
        num_cores: int,
        expected_rounds: int,
        clock: Callable[[], float],
    ) -> None:
        self._in_process, self._trainer, self._start_pool = in_process, trainer, start_pool
        self._num_cores, self._expected_rounds, self._clock = num_cores, expected_rounds, clock
        self._backend: TrainingBackend | None = None
        self._pending_jobs: list[TrainingJob] = []

    def start(self, job: TrainingJob) -> None:
        if self._backend is not None:
            self._backend.start(job)
        else:
            self._pending_jobs.append(job)

    def get_result(self, job: TrainingJob) -> TrainingResult:
        return self._select_backend().get_result(job)

    def cancel(self, job: TrainingJob) -> None:
        if self._backend is not None:
            self._backend.cancel(job)
        elif job in self._pending_jobs:
            self._pending_jobs.remove(job)

    def evaluate(self, device_id: str | None, model: EncodedModel) -> EvaluationMetrics:
        return (self._backend or self._in_process).evaluate(device_id, model)

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()

    def _select_backend(self) -> TrainingBackend:
        if self._backend is None:
            workers = self._compute_num_workers()
            self._backend = self._start_pool(workers) if workers else self._in_process
            for job in self._pending_jobs:
                self._backend.start(job)
            self._pending_jobs.clear()
        return self._backend

    def _compute_num_workers(self) -> int:
        workers = min(self._num_cores, len(self._pending_jobs))
        if workers < 2:
            return 0
        expected_s = (
            self._measure_iteration_s(self._pending_jobs[0])
            * sum(job.iterations for job in self._pending_jobs)
            * self._expected_rounds
        )
        log.info(
            "training takes about %.0f s of one core in all: %s",
            expected_s,
            f"{workers} processes" if expected_s >= MIN_POOL_TRAINING_S else "it stays in this process",
        )
        return workers if expected_s >= MIN_POOL_TRAINING_S else 0

    def _measure_iteration_s(self, job: TrainingJob) -> float:
        started_s, num_done = self._clock(), 0

        def is_enough() -> bool:
            nonlocal num_done
            num_done += 1
            return self._clock() - started_s >= PROBE_DURATION_S

        try:
            self._trainer.train(job.instruction, job.model, job.iterations, is_cancelled=is_enough)
        except Exception:  # noqa: BLE001 the device reports it when the job is run
            log.debug("the first job fails, so nothing was measured")
        finally:
            self._trainer.rollback(job.instruction)
        return (self._clock() - started_s) / max(1, num_done)
