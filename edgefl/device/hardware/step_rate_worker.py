"""Step rate worker: measures steps per second of a task at its own batch size.

Runs in a separate process with the lowest priority, which isolates crashes and memory use:
`python -m edgefl.device.hardware.step_rate_worker` reads one request and writes one reply.
"""

from __future__ import annotations

import os
import statistics

from edgefl.core.errors import DataError, TaskError
from edgefl.core.types import Dataset, Json, Task
from edgefl.device.hardware.profile import create_random_examples, measure_iterations_s
from edgefl.system.subprocesses import serve_call
from edgefl.tasks.backends import is_torch_task
from edgefl.tasks.registry import make_task

LOWEST_PRIORITY = 19
DEFAULT_BATCH_SIZE = 32
SLOW_AFTER_S = 15.0
"""Time after which a slow board is measured by fewer steps."""


def measure_step_rate(name: str, shard: str | None, *, accelerator: str = "cpu", threads: int | None = None) -> Json:
    """Returns `steps_per_s` of TASK or TASK/MODEL on this machine, at `batch_size`, with `backend`.

    Raises:
        EdgeflError: it cannot be trained here.
    """
    task_name, _, model = name.partition("/")
    task = make_task(task_name, {"model": model} if model else {})
    batch_size = int(getattr(task, "defaults", {}).get("batch_size", DEFAULT_BATCH_SIZE))
    data = _load_examples(task, shard, 4 * batch_size)
    learner = task.learner(accelerator=accelerator, threads=threads)
    learner.load(task.init(0))
    seconds = statistics.median(measure_iterations_s(learner, data, batch_size, slow_after_s=SLOW_AFTER_S))
    backend = "torch" if is_torch_task(task) else "numpy"
    return {"steps_per_s": float(f"{1 / max(seconds, 1e-9):.4g}"), "batch_size": batch_size, "backend": backend}


def _load_examples(task: Task, shard: str | None, count: int) -> Dataset:
    """Returns random examples where the task declares their shape: avoids loading a large shard twice."""
    try:
        return create_random_examples(task, count)
    except TaskError:
        if shard is None:
            raise
    data = task.read(shard)
    if not len(data):
        raise DataError(f"the shard {shard} of task {task.name} holds no examples to measure with")
    return data


def _run_request(request: Json) -> Json:
    os.nice(LOWEST_PRIORITY)
    return measure_step_rate(
        str(request["task"]),
        request.get("shard"),
        accelerator=str(request.get("accelerator", "cpu")),
        threads=request.get("threads"),
    )


if __name__ == "__main__":
    serve_call(_run_request)
