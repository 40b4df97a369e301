"""Number of training processes: measured on a run's first jobs unless the run file sets it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from edgefl.simulation.backends.backend import (
    EncodedModel,
    EvaluationMetrics,
    TrainingBackend,
    TrainingJob,
    TrainingResult,
)
from edgefl.simulation.backends.trainer import SimulatedTrainer

log = logging.getLogger(__name__)

PROBE_DURATION_S = 0.5
"""Duration of the probe of the first job."""
MIN_POOL_TRAINING_S = 15.0
"""Processes take seconds to start, so a run that trains for less than this stays in one."""


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
