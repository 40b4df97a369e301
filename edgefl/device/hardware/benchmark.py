"""Benchmark of a board: seconds of an iteration, its profile for the simulator, steps per second of a task.

Seconds are measured at two batch sizes, so that those of any other follow. Values that cannot be measured (a link
without a peer) keep a default that the profile marks as such. `python -m edgefl.device.hardware.benchmark` reads one
request for a step rate and writes one reply, with the process's peak of memory: a separate process isolates crashes.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.core.errors import DataError, TaskError
from edgefl.core.safe_parsing import format_toml
from edgefl.core.types import Dataset, Json, Learner, Task, TrainConfig, derive_rng
from edgefl.device.hardware.board_reader import read_kilobytes
from edgefl.device.hardware.requirements import make_measurable_task
from edgefl.system.processes import serve_call
from edgefl.tasks.datasets.shards import load_task_data
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.registry import is_torch_task
from edgefl.tasks.stored_arrays import select_rows

BATCH_SIZES = (8, 64)
MEASURE_S = 1.0
MIN_ITERATIONS = 5
"""Minimum duration and number of iterations of a measurement, per batch size."""
DEFAULT_BYTES_PER_S = 2.5e6
DEFAULT_LATENCY_S = 0.005
LINK_EFFICIENCY = 0.9
"""Usable fraction of a wired link's speed."""
NUM_CONNECTS = 5
UNLIMITED_ITERATIONS = 10**9

LOWEST_PRIORITY = 19
DEFAULT_BATCH_SIZE = 32
SLOW_AFTER_S = 15.0
"""Time after which a slow board is measured by fewer steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardProfile:
    """Simulator's model of a board; `sources` gives the origin of each number.

    `iterations` has for each task the cost of an iteration: fixed seconds `fixed_s`, seconds per example `example_s`,
    and `jitter` of the logarithm.
    """

    name: str
    model: str
    iterations: Mapping[str, Mapping[str, float]]
    memory_bytes: int | None
    accelerators: Sequence[str]
    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float
    sources: Mapping[str, str] = field(default_factory=dict)


def measure_board(
    *,
    name: str,
    facts: Json,
    tasks: Mapping[str, str | None],
    accelerator: str = "cpu",
    threads: int | None = None,
    addresses: Sequence[str] = (),
) -> BoardProfile:
    """Returns the profile of this board.

    Args:
        name: of the profile.
        facts: result of `capabilities.probe`.
        tasks: `TASK` or `TASK/MODEL` -> its shard; None trains on random examples, at the same speed.
        accelerator: cpu or cuda.
        threads: how many cores to use, None for all.
        addresses: of the coordinator, HOST:PORT; may be empty.

    Raises:
        EdgeflError: a task cannot be trained here.
    """
    iterations = {task: measure_task(task, shard, accelerator, threads) for task, shard in tasks.items()}
    bytes_per_s, link_source = _estimate_link(facts)
    latency_s, latency_source = _measure_latency(addresses)
    return BoardProfile(
        name=name,
        model=str(facts.get("model") or facts.get("cpu") or ""),
        iterations=iterations,
        memory_bytes=facts.get("memory_bytes"),
        accelerators=[str(entry["kind"]) for entry in facts.get("accelerators", [])],
        up_bytes_per_s=bytes_per_s,
        down_bytes_per_s=bytes_per_s,
        latency_s=latency_s,
        sources={
            **({"iterations": f"measured: batches of {' and '.join(map(str, BATCH_SIZES))}"} if iterations else {}),
            **({"memory_bytes": "measured: what the kernel says"} if facts.get("memory_bytes") else {}),
            "up_bytes_per_s": link_source,
            "down_bytes_per_s": link_source,
            "latency_s": latency_source,
        },
    )


def measure_task(
    name: str, shard: str | None, accelerator: str = "cpu", threads: int | None = None
) -> dict[str, float]:
    """Returns the cost of an iteration of a task on this machine, as in a profile.

    Raises:
        EdgeflError: the task is unknown, its shard cannot be read, or it cannot be trained here.
    """
    task, learner = _make_learner(name, accelerator, threads)
    data = create_random_examples(task, 2 * max(BATCH_SIZES)) if shard is None else _read_shard(task, shard)
    samples = {size: measure_iterations_s(learner, data, size) for size in BATCH_SIZES}
    small_batch_s, large_batch_s = (statistics.median(samples[size]) for size in BATCH_SIZES)
    example_s = max(0.0, (large_batch_s - small_batch_s) / (BATCH_SIZES[1] - BATCH_SIZES[0]))
    logarithms = [math.log(seconds / small_batch_s) for seconds in samples[BATCH_SIZES[0]]]
    return {
        "fixed_s": max(0.0, small_batch_s - BATCH_SIZES[0] * example_s),
        "example_s": example_s,
        # From the quartiles, so that a single pause of the machine does not dominate.
        "jitter": float(np.subtract(*np.percentile(logarithms, [75, 25]))) / 1.349,
    }


def write_profile(path: Path, profile: BoardProfile) -> None:
    """Writes a profile file for `edgefl simulate --profile`.

    Raises:
        DataError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_format_toml(profile), encoding="utf-8")
    except OSError as error:
        raise DataError(f"profile {path} cannot be written: {error.strerror}") from None


def measure_iterations_s(
    learner: Any, data: Dataset, batch_size: int, *, slow_after_s: float = math.inf
) -> list[float]:
    """Returns the seconds of each iteration except the first (warm-up).

    Args:
        learner: with a loaded model.
        data: to train on; repeated where it is less than a batch.
        batch_size: examples of an iteration.
        slow_after_s: time limit after which the finished iterations, one or more, are enough.
    """
    end_times: list[float] = []
    started_s = time.perf_counter()

    def is_enough(done: int, _: float) -> bool:
        end_times.append(time.perf_counter())
        elapsed_s = end_times[-1] - started_s
        return (done > MIN_ITERATIONS and elapsed_s >= MEASURE_S) or (done > 1 and elapsed_s >= slow_after_s)

    if len(data) < batch_size:  # short batches would count as full ones
        data = data.take(np.arange(batch_size) % max(1, len(data)))
    plan = TrainConfig(iterations=UNLIMITED_ITERATIONS, batch_size=batch_size, learning_rate=0.0)
    full_batches = select_rows(data, slice(len(data) // batch_size * batch_size))
    train(learner, full_batches, plan, derive_rng(0, "profile"), clock=time.perf_counter, on_iteration=is_enough)
    return [later - earlier for earlier, later in itertools.pairwise(end_times)]


def create_random_examples(task: Task, count: int) -> Dataset:
    """Returns random examples, with the iteration time of real ones.

    Raises:
        TaskError: the task does not declare the shape of its examples.
    """
    shape, num_classes = getattr(task, "input_shape", None), getattr(task, "num_classes", None)
    if shape is None or not num_classes:
        raise TaskError(f"task {task.name} does not say what its examples look like; name a shard of it")
    rng = derive_rng(0, "random-examples")
    inputs = rng.integers(0, 17, (count, *shape)).astype(np.uint8)
    return Dataset(inputs=inputs, targets=rng.integers(0, num_classes, count))


def _estimate_link(facts: Json) -> tuple[float, str]:
    """Returns bytes per second of an active wired link, else a default, with the source."""
    wired = [
        link["speed_mbit"]
        for link in facts.get("network", [])
        if not link.get("wireless") and link.get("state") == "up" and link.get("speed_mbit")
    ]
    if not wired:
        return DEFAULT_BYTES_PER_S, "estimated: not measured, 20 Mbit/s taken"
    return LINK_EFFICIENCY * max(
        wired
    ) * 1e6 / 8, f"estimated: {LINK_EFFICIENCY:.0%} of the wired link's {max(wired)} Mbit/s"


def _measure_latency(addresses: Sequence[str]) -> tuple[float, str]:
    """Returns half the time of a TCP connection to the coordinator, which takes one round trip."""
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            connect_times = [_measure_connect_s(host.strip("[]"), int(port)) for _ in range(NUM_CONNECTS)]
        except (OSError, ValueError, OverflowError):  # no answer, or no valid address
            continue
        return statistics.median(connect_times) / 2, f"measured: {NUM_CONNECTS} connections to the coordinator"
    return DEFAULT_LATENCY_S, "estimated: no coordinator to measure against"


def _measure_connect_s(host: str, port: int) -> float:
    started_s = time.perf_counter()
    with socket.create_connection((host, port), timeout=5.0):
        return time.perf_counter() - started_s


def _format_toml(profile: BoardProfile) -> str:
    """Returns the profile as TOML."""
    values: Json = {
        "model": profile.model,
        "up_bytes_per_s": round(profile.up_bytes_per_s),
        "down_bytes_per_s": round(profile.down_bytes_per_s),
        "latency_s": round(profile.latency_s, 6),
        "accelerators": list(profile.accelerators),
    }
    if profile.memory_bytes is not None:
        values["memory_bytes"] = profile.memory_bytes
    if profile.iterations:
        values["jitter"] = round(statistics.median(cost["jitter"] for cost in profile.iterations.values()), 4)
    values["source"] = profile.sources
    if profile.iterations:
        values["iterations"] = {
            task: {name: float(f"{cost[name]:.4g}") for name in ("fixed_s", "example_s")}
            for task, cost in profile.iterations.items()
        }
    return "# made by edgefl device probe --profile\n" + format_toml({"profile": {profile.name: values}}).lstrip()


def measure_step_rate(name: str, shard: str | None, *, accelerator: str = "cpu", threads: int | None = None) -> Json:
    """Returns `steps_per_s` of TASK or TASK/MODEL on this machine, at `batch_size`, with `backend`.

    Raises:
        EdgeflError: it cannot be trained here.
    """
    task, learner = _make_learner(name, accelerator, threads)
    batch_size = int(getattr(task, "defaults", {}).get("batch_size", DEFAULT_BATCH_SIZE))
    data = _load_examples(task, shard, 4 * batch_size)
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
    return _read_shard(task, shard)


def _make_learner(name: str, accelerator: str, threads: int | None) -> tuple[Task, Learner]:
    """Returns a task (TASK or TASK/MODEL) and its learner with a model."""
    task = make_measurable_task(name)
    learner = task.learner(accelerator=accelerator, threads=threads)
    learner.load(task.init(0))
    return task, learner


def _read_shard(task: Task, shard: str) -> Dataset:
    data = load_task_data(task, shard)
    if not len(data):
        raise DataError(f"the shard {shard} of task {task.name} holds no examples to measure with")
    return data


def _run_request(request: Json) -> Json:
    os.nice(LOWEST_PRIORITY)
    threads = request.get("threads")
    if "compiled" in request:
        from edgefl.device.hardware.providers import measure_compiled_task  # noqa: PLC0415 only for compiled tasks

        rate = measure_compiled_task(Path(request["compiled"]), threads)
    else:
        rate = measure_step_rate(
            str(request["task"]),
            request.get("shard"),
            accelerator=str(request.get("accelerator", "cpu")),
            threads=threads,
        )
    # Not `ru_maxrss`, which includes the process that started this one.
    peak_kb = read_kilobytes(Path("/proc/self/status")).get("VmHWM")
    return {**rate, **({"peak_bytes": peak_kb * 1024} if peak_kb else {})}


if __name__ == "__main__":
    serve_call(_run_request)
