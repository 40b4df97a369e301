"""How fast this board trains each of its tasks: steps a second at the task's own batch size.

Measured by a process of its own with the lowest priority, so that a library that crashes or fills the memory takes
nobody along: `python -m edgefl.device.board.speed` reads one question and answers it.
"""

from __future__ import annotations

import os
import statistics

from edgefl.child_process import answer_once
from edgefl.device.profile import iteration_seconds, random_examples
from edgefl.errors import DataError, TaskError
from edgefl.tasks.backends import needs_torch
from edgefl.tasks.registry import make_task
from edgefl.types import Dataset, Json, Task

LOWEST_PRIORITY = 19
USUAL_BATCH = 32
SLOW_AFTER_S = 15.0
"""A board that is so slow is measured by fewer steps."""


def speed_of(name: str, shard: str | None, *, accelerator: str = "cpu", threads: int | None = None) -> Json:
    """Returns `steps_per_s` of TASK or TASK/MODEL on this machine, at `batch_size`, with `backend`.

    Raises:
        EdgeflError: it cannot be trained here.
    """
    task_name, _, model = name.partition("/")
    task = make_task(task_name, {"model": model} if model else {})
    batch_size = int(getattr(task, "defaults", {}).get("batch_size", USUAL_BATCH))
    data = _examples(task, shard, 4 * batch_size)
    learner = task.learner(accelerator=accelerator, threads=threads)
    learner.load(task.init(0))
    seconds = statistics.median(iteration_seconds(learner, data, batch_size, slow_after_s=SLOW_AFTER_S))
    backend = "torch" if needs_torch(task) else "numpy"
    return {"steps_per_s": float(f"{1 / max(seconds, 1e-9):.4g}"), "batch_size": batch_size, "backend": backend}


def _examples(task: Task, shard: str | None, count: int) -> Dataset:
    """Returns drawn examples where the task says what they look like: a large shard need not be in memory twice."""
    try:
        return random_examples(task, count)
    except TaskError:
        if shard is None:
            raise
    data = task.read(shard)
    if not len(data):
        raise DataError(f"the shard {shard} of task {task.name} holds no examples to measure with")
    return data


def _answer(question: Json) -> Json:
    os.nice(LOWEST_PRIORITY)
    return speed_of(
        str(question["task"]),
        question.get("shard"),
        accelerator=str(question.get("accelerator", "cpu")),
        threads=question.get("threads"),
    )


if __name__ == "__main__":
    answer_once(_answer)
