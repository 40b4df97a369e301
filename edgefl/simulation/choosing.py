"""How many processes train: measured on the first work of a run, unless the run file says it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from edgefl.simulation.training import Job, Scores, Sent, Trained, Training
from edgefl.simulation.workbench import Workbench

log = logging.getLogger(__name__)

PROBE_S = 0.5
"""The first job is tried out for so long."""
WORTH_S = 15.0
"""Processes take seconds to start, so a run that trains for less than this stays in one."""


class Choosing:
    """Implements `Training` by one of two, chosen when the first result is wanted. The results are the same.

    Args:
        here: trains in this process.
        bench: what `here` trains on; tries the first job out.
        start_pool: number of processes -> a training with so many.
        cores: how many processes can be of use.
        waves: how often as much work as the first time is expected.
        clock: seconds, monotone.
    """

    def __init__(
        self,
        here: Training,
        bench: Workbench,
        start_pool: Callable[[int], Training],
        *,
        cores: int,
        waves: int,
        clock: Callable[[], float],
    ) -> None:
        self._here, self._bench, self._start_pool = here, bench, start_pool
        self._cores, self._waves, self._clock = cores, waves, clock
        self._chosen: Training | None = None
        self._waiting: list[Job] = []

    def begin(self, job: Job) -> None:
        if self._chosen is not None:
            self._chosen.begin(job)
        else:
            self._waiting.append(job)

    def finish(self, job: Job) -> Trained:
        return self._decided().finish(job)

    def cancel(self, job: Job) -> None:
        if self._chosen is not None:
            self._chosen.cancel(job)
        elif job in self._waiting:
            self._waiting.remove(job)

    def evaluate(self, device_id: str | None, sent: Sent) -> Scores:
        return (self._chosen or self._here).evaluate(device_id, sent)

    def close(self) -> None:
        if self._chosen is not None:
            self._chosen.close()

    def _decided(self) -> Training:
        if self._chosen is None:
            workers = self._num_workers()
            self._chosen = self._start_pool(workers) if workers else self._here
            for job in self._waiting:
                self._chosen.begin(job)
            self._waiting.clear()
        return self._chosen

    def _num_workers(self) -> int:
        workers = min(self._cores, len(self._waiting))
        if workers < 2:
            return 0
        expected_s = self._iteration_s(self._waiting[0]) * sum(job.iterations for job in self._waiting) * self._waves
        log.info(
            "training takes about %.0f s of one core in all: %s",
            expected_s,
            f"{workers} processes" if expected_s >= WORTH_S else "it stays in this process",
        )
        return workers if expected_s >= WORTH_S else 0

    def _iteration_s(self, job: Job) -> float:
        begun_s, done = self._clock(), 0

        def is_enough() -> bool:
            nonlocal done
            done += 1
            return self._clock() - begun_s >= PROBE_S

        try:
            self._bench.train(job.order, job.sent, job.iterations, is_unwanted=is_enough)
        except Exception:  # noqa: BLE001 the board will say it when it is asked in earnest
            log.debug("the first job fails, so nothing was measured")
        finally:
            self._bench.undo(job.order)
        return (self._clock() - begun_s) / max(1, done)
