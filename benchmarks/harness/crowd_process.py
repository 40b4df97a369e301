"""A coordinator without devices of its own, and processes full of stand-ins (`stand_ins`) that join it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from edgefl.core.types import Json
from edgefl.simulation.local_fleet import COORDINATOR, EDGEFL_COMMAND, LocalFleet
from harness.process_trees import children_by_parent, command, die_with_parent, tree

PATH = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
"""Where `harness` is found, besides what this process was told."""
PROFILE = "profile.json"


def on_cores(cores: str) -> tuple[str, ...]:
    """Returns words to put before a program that is to have these cores alone, `0,2-3`; any where there are none."""
    return ("taskset", "--cpu-list", cores) if cores else ()


@contextmanager
def coordinator(root: Path, *, broker: str, is_profiled: bool, cores: str = "") -> Iterator[LocalFleet]:
    """Yields a coordinator that is up; its broker has the same cores."""
    program = (sys.executable, "-m", "harness.profiled_coordinator", str(root / PROFILE))
    with LocalFleet(
        root=root,
        devices=(),
        broker=broker,
        program=(*on_cores(cores), *(program if is_profiled else EDGEFL_COMMAND)),
        environment={"PYTHONPATH": PATH},
    ) as fleet:
        yield fleet


def server_pids(fleet: LocalFleet) -> dict[str, int]:
    """Returns the coordinator's process id, and that of its Mosquitto if it has one."""
    own = fleet.processes[COORDINATOR].pid
    brokers = [pid for pid in tree(own, children_by_parent()) if command(pid) == "mosquitto"]
    return {"coordinator": own, **({"broker": brokers[0]} if brokers else {})}


@contextmanager
def profiled(fleet: LocalFleet, *, is_wanted: bool) -> Iterator[Json]:
    """Yields a dict that afterwards holds where a profiled coordinator's CPU time went in the block."""
    found: Json = {}
    process, path = fleet.processes[COORDINATOR], fleet.root / PROFILE
    if is_wanted:
        path.unlink(missing_ok=True)
        process.send_signal(signal.SIGUSR1)
    yield found
    if is_wanted:
        process.send_signal(signal.SIGUSR2)
        until_s = time.monotonic() + 10
        while not path.exists() and time.monotonic() < until_s:
            time.sleep(0.05)
        found |= json.loads(path.read_text())


class Crowd:
    """Stand-ins in some processes; a context manager."""

    def __init__(
        self, root: Path, *, num_processes: int, num_workers: int, model_bytes: int, cores: str = ""
    ) -> None:
        self.root, self.num_devices = root / "stand-ins", 0
        self._model_bytes, self._num_workers = model_bytes, max(1, num_workers // num_processes)
        self._log, self._cores, self._num_processes = root / "stand-ins.log", cores, num_processes
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        self.root.mkdir(parents=True)
        self._processes = [self._start(number) for number in range(1, self._num_processes + 1)]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def pids(self) -> dict[str, int]:
        return {f"stand-ins {number}": process.pid for number, process in enumerate(self._processes, 1)}

    def ask(self, order: str) -> list[Json]:
        """Has all processes do something at the same time; returns what each says afterwards."""
        return self._ask([order] * len(self._processes))

    def grow(self, token: str, num_devices: int) -> list[Json]:
        """Lets devices join until there are so many."""
        share, rest = divmod(num_devices - self.num_devices, len(self._processes))
        self.num_devices = num_devices
        # The rest goes to the first of them: they all know their own numbers alone.
        return self._ask([f"join {token} {share + (at < rest)}" for at in range(len(self._processes))])

    def _ask(self, orders: list[str]) -> list[Json]:
        for process, order in zip(self._processes, orders, strict=True):
            assert process.stdin is not None
            process.stdin.write(f"{order}\n")
            process.stdin.flush()
        return [self._answer(process) for process in self._processes]

    def _start(self, number: int) -> subprocess.Popen[str]:
        words = [
            *on_cores(self._cores), sys.executable, "-m", "harness.stand_ins", "--root", str(self.root),
            "--process", str(number), "--model-bytes", str(self._model_bytes), "--workers", str(self._num_workers),
        ]  # fmt: skip
        environment: dict[str, Any] = {**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as log:
            return subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                preexec_fn=die_with_parent,  # noqa: PLW1509 one system call, no locks
            )

    def _answer(self, process: subprocess.Popen[str]) -> Json:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"the stand-ins ended: {self._log.read_text(errors='replace')[-2000:]}")
        told: Json = json.loads(line)
        return told
