"""The simulator beside Flower's simulation engine on the same work, and beside torch alone.

    python benchmarks/simulator_peer.py --flower-python VENV/bin/python [--devices 100] [--rounds 20] [--turns 3]

One-step rounds: a tenth of the devices does one iteration of SGD each, Fashion-MNIST, `cnn-small`, batches of 32.
`--flower-python` is a Python that has `flwr[simulation]`, torch and edgefl (in an environment of its own: `pip
install 'edgefl-fleet[train]' 'flwr[simulation]'`); without it that part is left out. Both use all cores, as Flower's
engine does by itself and ours in runs that take longer than its processes to start. They start once a turn and are
timed from one round's close to the next by the clock, and from the first to the last by the CPU seconds of all their
processes, without evaluation; starting up and the first round are left out, and told.
Full rounds: every chosen device passes once over its shard; steps a CPU second beside those of a loop in torch alone,
one thread each. EDGEFL_DATA names the folder of the data. The exit code is 2 when an aim is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness import options
from harness.cost_rows import Row
from harness.process_trees import tree_cpu_s

from edgefl.coordinator.runs.history_recorder import HistoryRecorder
from edgefl.simulation import simulated_run
from edgefl.tasks.registry import make_task

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
TASK, FRACTION, BATCH_SIZE, TEST_FRACTION = "fashion-mnist", 0.1, 32, 0.0
FULL_ROUNDS, SHARD = 3, 600
TIMES_FASTER, OF_TORCH = 3.0, 0.9
FLOWER_TIMEOUT_S = 900.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flower-python", type=Path)
    parser.add_argument("--devices", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    asked = options.parse(parser, devices=4, rounds=3, turns=1)
    if asked.rounds < 3:
        parser.error("the first round does not count, so give --rounds 3 or more")
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":  # read when NumPy is loaded, so we begin again
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **dict.fromkeys(ONE_THREAD, "1")})
    rows = full_rounds(asked.devices, asked.turns)
    if asked.flower_python is not None:
        rows += one_step_rounds(asked.flower_python, asked.devices, asked.rounds, asked.turns)
    print(json.dumps({"v": 1, "rows": [row.as_json() for row in rows]}) if asked.json else "\n".join(map(str, rows)))
    return 0 if asked.quick or all(row.is_met for row in rows) else 2


def full_rounds(num_devices: int, turns: int) -> list[Row]:
    """Returns our steps per CPU second beside those of torch alone."""
    ours, torchs = [], []
    torch_steps = _torch_loop()
    for _ in range(turns):
        with _timed_drive() as driving:
            result = _simulated({"epochs": 1.0}, num_devices, FULL_ROUNDS, workers=0)
        ours.append(sum(row["iterations"] for row in result.updates) / driving[0])
        torchs.append(torch_steps(sum(row["iterations"] for row in result.updates)))
    part = "full rounds"
    return [
        Row(part=part, what="steps of full FedAvg rounds, to those of torch alone",
            value=statistics.median(own / raw for own, raw in zip(ours, torchs, strict=True)), unit="times",
            aim=OF_TORCH, more_is_better=True),
        Row(part=part, what="torch alone", value=statistics.median(torchs), unit="steps per CPU second"),
    ]  # fmt: skip


def one_step_rounds(python: Path, num_devices: int, num_rounds: int, turns: int) -> list[Row]:
    """Returns the seconds of a round of one step each, beside those of Flower's engine."""
    sides = {"ours": _our_closings, "Flower's engine": partial(_flower_closings, python)}
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    starts: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(turns):
        for name, side in sides.items():
            began_s = time.perf_counter()
            closed = side(num_devices, num_rounds)
            starts[name].append(time.perf_counter() - began_s - (closed.at_s[-1] - closed.at_s[0]))
            rounds[name].append(closed.a_round())
    ours, flowers = rounds.values()
    clock, cpu = (
        statistics.median(other[which] / own[which] for own, other in zip(ours, flowers, strict=True))
        for which in (0, 1)
    )
    own_s, own_cpu_s = (1000 * statistics.median(found[which] for found in ours) for which in (0, 1))
    part, size = "one-step rounds", f"a round of {FRACTION * num_devices:g} one-step devices"
    return [
        Row(part=part, what=f"{size} in Flower's engine, to ours, by the clock", value=clock, unit="times",
            aim=TIMES_FASTER, more_is_better=True),
        Row(part=part, what="by the CPU seconds of all processes", value=cpu, unit="times"),
        *(Row(part=part, what=f"Flower's engine, by the clock, turn {turn}", value=1000 * found[0], unit="ms")
          for turn, found in enumerate(flowers, 1)),
        Row(part=part, what="ours, by the clock", value=own_s, unit="ms"),
        Row(part=part, what="ours, CPU", value=own_cpu_s, unit="ms"),
        *(Row(part=part, what=f"start-up, first round and end of {name}", value=statistics.median(found), unit="s")
          for name, found in starts.items()),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Closings:
    """When rounds closed, by the clock, and the CPU seconds of all processes at the first and at the last of them."""

    at_s: Sequence[float]
    cpu_s: Sequence[float]

    def a_round(self) -> tuple[float, float]:
        """Returns what a round takes by the clock, the median, and of CPU, the mean: it is counted in hundredths."""
        clock_s = statistics.median(later - earlier for earlier, later in itertools.pairwise(self.at_s))
        return clock_s, (self.cpu_s[-1] - self.cpu_s[0]) / (len(self.at_s) - 1)


def _our_closings(num_devices: int, num_rounds: int) -> Closings:
    at_s, cpu_s = list[float](), list[float]()
    aggregated = HistoryRecorder.on_aggregation

    def timed(recorder: HistoryRecorder, *arguments: Any) -> None:
        aggregated(recorder, *arguments)
        at_s.append(time.perf_counter())
        if len(at_s) in {1, num_rounds}:
            cpu_s.append(tree_cpu_s())

    HistoryRecorder.on_aggregation = timed  # type: ignore[method-assign]
    try:
        _simulated({"iterations": 1}, num_devices, num_rounds, workers=len(os.sched_getaffinity(0)))
    finally:
        HistoryRecorder.on_aggregation = aggregated  # type: ignore[method-assign]
    return Closings(at_s, cpu_s)


def _flower_closings(python: Path, num_devices: int, num_rounds: int) -> Closings:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        plan = {
            "task": TASK, "devices": num_devices, "fraction": FRACTION, "rounds": num_rounds, "iterations": 1,
            "batch_size": BATCH_SIZE, "test_fraction": TEST_FRACTION, "result": str(result),
        }  # fmt: skip
        here = Path(__file__).parent
        paths = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            [str(python), "-m", "harness.stock_simulation", json.dumps(plan)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "FLWR_HOME": folder},
            capture_output=True, text=True, timeout=FLOWER_TIMEOUT_S, check=False,
        )  # fmt: skip
        if not result.exists():
            sys.exit(f"Flower's engine did not come to its end ({done.returncode}):\n{done.stderr[-2000:]}")
        found = json.loads(result.read_text())
    chosen = round(FRACTION * num_devices)
    if found["num_updates"] != [chosen] * num_rounds:
        sys.exit(f"not every device answered in Flower's engine: {found['num_updates']} updates")
    return Closings(found["closed_s"], found["cpu_s"])


def _simulated(strategy: Mapping[str, Any], num_devices: int, num_rounds: int, *, workers: int) -> Any:
    config = {
        "run": {"task": TASK, "rounds": num_rounds, "evaluate_on": "none", "local_test_fraction": TEST_FRACTION},
        "devices": {"fraction": FRACTION},
        "strategy": {"batch_size": BATCH_SIZE, "learning_rate": 0.05, **strategy},
        "simulation": {"workers": workers},
    }
    with tempfile.TemporaryDirectory() as root:
        return simulated_run.simulate(config, devices=num_devices, scheme="iid", root=Path(root))


@contextmanager
def _timed_drive() -> Iterator[list[float]]:
    """Gives the CPU seconds of the loop, without what comes before and after it."""
    drive, taken = simulated_run.run_rounds, [0.0]

    def timed(*arguments: Any, **named: Any) -> Any:
        begun_s = time.process_time()
        try:
            return drive(*arguments, **named)
        finally:
            taken[0] = time.process_time() - begun_s

    simulated_run.run_rounds = timed
    try:
        yield taken
    finally:
        simulated_run.run_rounds = drive


def _torch_loop() -> Any:
    """Returns a loop that takes a number of steps of SGD as a script would, and gives steps per CPU second."""
    import torch  # noqa: PLC0415 slow to import, after the arguments are known to be right

    torch.set_num_threads(1)
    module = make_task(TASK, {}).learner(accelerator="cpu", threads=1)._module  # noqa: SLF001 the same network
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    inputs, labels = torch.rand(SHARD, 1, 28, 28), torch.randint(0, 10, (SHARD,))

    def steps(number: int) -> float:
        module.train()
        begun_s, left = time.process_time(), number
        while left > 0:
            for rows in torch.randperm(SHARD).split(BATCH_SIZE):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(module(inputs[rows]), labels[rows]).backward()
                optimizer.step()
                left -= 1
        return (number - left) / (time.process_time() - begun_s)

    return steps


if __name__ == "__main__":
    sys.exit(main())
