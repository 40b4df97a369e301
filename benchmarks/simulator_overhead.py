"""What the simulator costs: our own time per event for 10,000 boards, and beside real training.

    python benchmarks/simulator_overhead.py [--devices 10000] [--updates 50000]

Seconds are CPU seconds of one process, so that other work on the machine does not count. An event is whatever the
fleet's heap does (a model has arrived, an iteration budget is over, an update has arrived); an update is one whole
assignment there and back, with everything that the loop, the strategy, the recorder and the store do for it.
Fashion-MNIST is trained as well where EDGEFL_DATA names a folder that has it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import options

from edgefl.coordinator.runs.history_writer import HistoryWriter
from edgefl.simulation import simulated_run
from edgefl.simulation.backends.in_process import InProcessBackend
from edgefl.simulation.network import SimulationEventQueue

Run = dict[str, Any]

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")

SCHEDULES: dict[str, Run] = {
    "fedavg, a tenth a round": {"strategy": {"name": "fedavg"}, "devices": {"fraction": 0.1}},
    "fedbuff": {"strategy": {"name": "fedbuff"}},
    "asgd": {"strategy": {"name": "asgd"}},
}
TRAINING: dict[str, tuple[Run, int]] = {
    "digits mlp, fedavg": ({"run": {"task": "digits", "rounds": 200}, "strategy": {"epochs": 5.0}}, 10),
    "digits mlp, asgd of 20 iterations": (
        {"run": {"task": "digits", "updates": 6000}, "strategy": {"name": "asgd", "iterations": 20}},
        10,
    ),
    "mnist cnn, asgd, batches of 10": (
        {"run": {"task": "mnist", "updates": 1000}, "strategy": {"name": "asgd", "iterations": 1, "batch_size": 10}},
        100,
    ),
    "mnist cnn, adacomp, batches of 10": (
        {"run": {"task": "mnist", "updates": 1000}, "strategy": {"name": "adacomp", "batch_size": 10}},
        100,
    ),
    "fashion-mnist cnn-small, fedavg": (
        {"run": {"task": "fashion-mnist", "rounds": 8}, "devices": {"fraction": 0.1}, "strategy": {"batch_size": 32}},
        100,
    ),
}


class Stopwatch:
    """Adds up the CPU seconds that are spent inside some methods."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            begun = time.process_time()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds += time.process_time() - begun

        return timed


def schedule(name: str, run: Run, num_devices: int, num_updates: int) -> None:
    """Prints what one bookkeeping-only run costs."""
    events: list[SimulationEventQueue] = []
    original, flush, drive = SimulationEventQueue.__init__, HistoryWriter.flush, simulated_run.run_rounds
    writing, driving = Stopwatch(), Stopwatch()

    def remembered(agenda: SimulationEventQueue) -> None:
        original(agenda)
        events.append(agenda)

    SimulationEventQueue.__init__ = remembered  # type: ignore[method-assign]
    HistoryWriter.flush = writing.around(flush)  # type: ignore[method-assign]
    simulated_run.run_rounds = driving.around(drive)
    try:
        with tempfile.TemporaryDirectory() as root:
            config = {"run": {"task": "digits", "updates": num_updates}, "simulation": {"jitter": 0.1}, **run}
            result = simulated_run.simulate(config, devices=num_devices, root=Path(root), bookkeeping_only=True)
    finally:
        SimulationEventQueue.__init__, HistoryWriter.flush, simulated_run.run_rounds = original, flush, drive  # type: ignore[method-assign]
    num_events, done = events[0]._num_scheduled, len(result.updates)  # noqa: SLF001 a count for this report alone
    pure = driving.seconds - writing.seconds
    print(
        f"{name:32} {num_devices:7} {done:8} {num_events:8} {1e6 * pure / num_events:10.1f} {1e6 * pure / done:10.1f}"
        f" {1e6 * driving.seconds / num_events:10.1f} {1e6 * driving.seconds / done:10.1f}"
    )


def training(name: str, run: Run, num_devices: int) -> None:
    """Prints which part of a run that trains is not training."""
    finish, evaluate, drive = InProcessBackend.get_result, InProcessBackend.evaluate, simulated_run.run_rounds
    inside, driving = Stopwatch(), Stopwatch()
    simulated_run.run_rounds = driving.around(drive)
    InProcessBackend.get_result, InProcessBackend.evaluate = inside.around(finish), inside.around(evaluate)  # type: ignore[method-assign]
    begun = time.process_time()
    try:
        with tempfile.TemporaryDirectory() as root:
            config = {**run, "simulation": {"workers": 0}}
            result = simulated_run.simulate(config, devices=num_devices, scheme="iid", root=Path(root))
    finally:
        InProcessBackend.get_result, InProcessBackend.evaluate = finish, evaluate  # type: ignore[method-assign]
        simulated_run.run_rounds = drive
    total = time.process_time() - begun
    setup = total - driving.seconds
    print(
        f"{name:34} {len(result.updates):8} {setup:8.1f} {driving.seconds:8.1f} {inside.seconds:8.1f}"
        f" {1 - inside.seconds / driving.seconds:9.1%} {1 - inside.seconds / total:9.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--updates", type=int, default=50_000)
    parser.add_argument("--training", nargs="+", choices=list(TRAINING), default=list(TRAINING))
    wanted = options.parse(parser, devices=100, updates=500, training=["digits mlp, fedavg"])
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":  # read when NumPy is loaded, so we begin again
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **dict.fromkeys(ONE_THREAD, "1")})
    print("Own time, nothing trained (aim: under 100 us an event)")
    print(f"{'':32} {'':7} {'':8} {'':8} {'without the store':^21} {'with the store':^21}")
    heads = ("us/event", "us/update", "us/event", "us/update")
    print(f"{'strategy':32} {'boards':>7} {'updates':>8} {'events':>8} " + " ".join(f"{head:>10}" for head in heads))
    for name, run in SCHEDULES.items():
        schedule(name, run, wanted.devices, wanted.updates)
    print("\nBeside training (aim: under 10 %)")
    print(f"{'run':34} {'updates':>8} {'setup s':>8} {'loop s':>8} {'train s':>8} {'of loop':>9} {'of all':>9}")
    for name, (run, num_devices) in TRAINING.items():
        if name not in wanted.training:
            continue
        if run["run"]["task"] == "digits" or "EDGEFL_DATA" in os.environ:
            training(name, run, num_devices)


if __name__ == "__main__":
    main()
