"""Measures what the simulator has to know of this board, and writes it as a profile.

Seconds of an iteration are measured at two batch sizes, so that those of any other follow. What cannot be measured
here (a link that nothing can be sent over) is left at a default that the file names as such.
"""

from __future__ import annotations

import itertools
import json
import math
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.errors import DataError, TaskError
from edgefl.tasks.local_training import train
from edgefl.tasks.registry import make_task
from edgefl.types import Dataset, Json, LocalPlan, Task, derived_rng

BATCH_SIZES = (8, 64)
MEASURE_S = 1.0
MIN_ITERATIONS = 5
"""Each batch size is measured for so long, and for so many iterations at least."""
DEFAULT_BYTES_PER_S = 2.5e6
DEFAULT_LATENCY_S = 0.005
USABLE_LINK = 0.9
"""Of a wired link's speed, what is left for contents."""
CONNECTS = 5
NO_LIMIT = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What an iteration costs: seconds whatever the batch, and for each example; `jitter` of the logarithm."""

    fixed_s: float
    example_s: float
    jitter: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardProfile:
    """A board as the simulator sees it; `sources` says for each number where it is from."""

    name: str
    model: str
    iterations: Mapping[str, Measured]
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
        name: what the profile is called.
        facts: what `capabilities.probe` found.
        tasks: `TASK` or `TASK/MODEL` -> its shard; None trains on random examples, which takes as long.
        accelerator: cpu or cuda.
        threads: how many cores to use, None for all.
        addresses: of the coordinator, HOST:PORT; none when there is none.

    Raises:
        EdgeflError: a task cannot be trained here.
    """
    iterations = {task: measure_task(task, shard, accelerator, threads) for task, shard in tasks.items()}
    bytes_per_s, link_source = _link(facts)
    latency_s, latency_source = _latency(addresses)
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


def measure_task(name: str, shard: str | None, accelerator: str = "cpu", threads: int | None = None) -> Measured:
    """Returns what an iteration of a task takes on this machine.

    Raises:
        EdgeflError: the task is unknown, its shard cannot be read, or it cannot be trained here.
    """
    task_name, _, model = name.partition("/")
    task = make_task(task_name, {"model": model} if model else {})
    data = random_examples(task, 2 * max(BATCH_SIZES)) if shard is None else task.read(shard)
    if not len(data):
        raise DataError(f"the shard {shard} of task {name} holds no examples to measure with")
    learner = task.learner(accelerator=accelerator, threads=threads)
    learner.load(task.init(0))
    samples = {size: iteration_seconds(learner, data, size) for size in BATCH_SIZES}
    few, many = (statistics.median(samples[size]) for size in BATCH_SIZES)
    example_s = max(0.0, (many - few) / (BATCH_SIZES[1] - BATCH_SIZES[0]))
    logarithms = [math.log(seconds / few) for seconds in samples[BATCH_SIZES[0]]]
    return Measured(
        fixed_s=max(0.0, few - BATCH_SIZES[0] * example_s),
        example_s=example_s,
        # From the quartiles: one pause of the machine must not pass for what it does all the time.
        jitter=float(np.subtract(*np.percentile(logarithms, [75, 25]))) / 1.349,
    )


def write_profile(path: Path, profile: BoardProfile) -> None:
    """Writes a profile file for `edgefl simulate --profile`.

    Raises:
        DataError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_toml(profile), encoding="utf-8")
    except OSError as error:
        raise DataError(f"profile {path} cannot be written: {error.strerror}") from None


def iteration_seconds(learner: Any, data: Dataset, batch_size: int, *, slow_after_s: float = math.inf) -> list[float]:
    """Returns the seconds of each iteration but the first, which warms things up.

    Args:
        learner: with a model in it.
        data: what to train on; repeated where it is less than a batch.
        batch_size: examples of an iteration.
        slow_after_s: a machine that is not done by then is measured by the iterations that it has done, one or more.
    """
    ends: list[float] = []
    begun_s = time.perf_counter()

    def is_enough(done: int, _: float) -> bool:
        ends.append(time.perf_counter())
        spent_s = ends[-1] - begun_s
        return (done > MIN_ITERATIONS and spent_s >= MEASURE_S) or (done > 1 and spent_s >= slow_after_s)

    if len(data) < batch_size:  # short batches would pass for long ones
        data = data.take(np.arange(batch_size) % max(1, len(data)))
    plan = LocalPlan(iterations=NO_LIMIT, batch_size=batch_size, learning_rate=0.0)
    whole = data.take(np.arange(len(data) // batch_size * batch_size))
    train(learner, whole, plan, derived_rng(0, "profile"), clock=time.perf_counter, on_iteration=is_enough)
    return [end - begin for begin, end in itertools.pairwise(ends)]


def random_examples(task: Task, count: int) -> Dataset:
    """Returns drawn examples, with which an iteration takes as long as with real ones.

    Raises:
        TaskError: the task does not say what its examples look like.
    """
    shape, num_classes = getattr(task, "input_shape", None), getattr(task, "num_classes", None)
    if shape is None or not num_classes:
        raise TaskError(f"task {task.name} does not say what its examples look like; name a shard of it")
    rng = derived_rng(0, "random-examples")
    inputs = rng.integers(0, 17, (count, *shape)).astype(np.uint8)
    return Dataset(inputs=inputs, labels=rng.integers(0, num_classes, count))


def _link(facts: Json) -> tuple[float, str]:
    """Returns bytes a second: what the kernel says of a wired link that is up, else a default."""
    wired = [
        link["speed_mbit"]
        for link in facts.get("network", [])
        if not link.get("wireless") and link.get("state") == "up" and link.get("speed_mbit")
    ]
    if not wired:
        return DEFAULT_BYTES_PER_S, "estimated: not measured, 20 Mbit/s taken"
    return USABLE_LINK * max(wired) * 1e6 / 8, f"estimated: {USABLE_LINK:.0%} of the wired link's {max(wired)} Mbit/s"


def _latency(addresses: Sequence[str]) -> tuple[float, str]:
    """Returns half the time of a TCP connection to the coordinator, which takes one round trip."""
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            times = [_connect_s(host.strip("[]"), int(port)) for _ in range(CONNECTS)]
        except (OSError, ValueError, OverflowError):  # nobody there, or no address at all
            continue
        return statistics.median(times) / 2, f"measured: {CONNECTS} connections to the coordinator"
    return DEFAULT_LATENCY_S, "estimated: no coordinator to measure against"


def _connect_s(host: str, port: int) -> float:
    begun_s = time.perf_counter()
    with socket.create_connection((host, port), timeout=5.0):
        return time.perf_counter() - begun_s


def _toml(profile: BoardProfile) -> str:
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
        values["jitter"] = round(statistics.median(cost.jitter for cost in profile.iterations.values()), 4)
    table = f"profile.{_value(profile.name)}"
    lines = ["# made by edgefl device probe --profile", f"[{table}]", *_lines(values), "", f"[{table}.source]"]
    lines += _lines(profile.sources)
    for task, cost in profile.iterations.items():
        lines += ["", f"[{table}.iterations.{_value(task)}]"]
        lines += [f"fixed_s = {cost.fixed_s:.4g}", f"example_s = {cost.example_s:.4g}"]
    return "\n".join(lines) + "\n"


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in values.items()]


def _value(value: Any) -> str:
    """Returns a text, a number or a list of texts as JSON that is TOML too: without surrogates and bare deletes."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
