"""A small fleet that is never left alone: runs follow each other, devices come and go, pages and programs read."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from edgefl.core.config import RunConfig, parse_run
from edgefl.core.errors import EdgeflError
from edgefl.simulation.local_fleet import LOOPBACK, LocalDeviceSpec, LocalFleet
from edgefl.system.https_client import create_pinned_context, request
from edgefl.tasks.datasets.central import TEST_NAME, create_shards
from harness.feed_readers import reading
from harness.throttled_task import NAME

HARNESS = Path(__file__).parent
BROKER = "broker"
ITERATION_S = 0.6
ITERATIONS = 3
RUN_S = 150.0
STRATEGIES = ("ssgd", "asgd")
SCRAPE_EVERY_S = 15.0
READ_EVERY_S = 20.0
PAGE_EVERY_S = 120.0
HAPPENS_EVERY_S = 60.0
AWAY_S = 35.0
FROZEN_S = 25.0
"""Longer than what makes a device `gone`: its connection is given up, and it has to make a new one."""
BROKER_FROZEN_S = 12.0
BEAT_S = 5.0
PATIENCE_S = 300.0
"""Other programs may keep the machine busy while the fleet starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Who is in the fleet: devices that stay the whole time, and visitors whose agents end and are started again."""

    staying: tuple[str, ...]
    visitors: tuple[str, ...]


class SoakFleet(LocalFleet):
    """A fleet whose broker is a unit of its own."""

    def start_coordinator(self) -> None:
        self.broker = f"mqtts://{LOOPBACK}:{self.broker_port}"
        words = ("--dir", str(self.directory), "--host", LOOPBACK, "--port", str(self.broker_port))
        self._start_process(BROKER, self.program, "coordinator", "broker", *words)
        super().start_coordinator()

    def _wait_until(self, is_true: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
        super()._wait_until(is_true, what, max(PATIENCE_S, timeout_s))


def make_fleet(root: Path, num_staying: int) -> tuple[SoakFleet, Names]:
    """Returns a fleet with two visitors that is yet to be entered; its coordinator evaluates."""
    num_devices = num_staying + 2
    shards = create_shards("digits", "dirichlet:0.5", num_devices, root / "shards")
    for shard in shards:
        shard.with_suffix(".delay").write_text(str(ITERATION_S))
    names = [f"device-{number:02}" for number in range(1, num_devices + 1)]
    path = os.pathsep.join([str(HARNESS), *filter(None, [os.environ.get("PYTHONPATH")])])
    fleet = SoakFleet(
        root=root / "fleet",
        devices=[
            LocalDeviceSpec(name=name, shards={NAME: str(shard.resolve())})
            for name, shard in zip(names, shards, strict=True)
        ],
        test_shards={NAME: str((root / "shards" / TEST_NAME).resolve())},
        environment={"PYTHONPATH": path, "EDGEFL_ALLOW_MODULES": NAME.partition(":")[0]},
    )
    return fleet, Names(staying=tuple(names[:num_staying]), visitors=tuple(names[num_staying:]))


def config_of(number: int) -> RunConfig:
    """Returns the run file of the n-th run: synchronous and asynchronous in turn."""
    strategy = STRATEGIES[number % len(STRATEGIES)]
    return parse_run(
        {
            "run": {"task": NAME, "name": f"soak-{number}", "seconds": RUN_S, "seed": number},
            "strategy": {"name": strategy, "iterations": ITERATIONS, "learning_rate": 0.1},
            "devices": {"min": 2},
        }
    )


class Life:
    """Everything that goes on in a fleet while it is entered, in threads; what went wrong is in `problems`."""

    def __init__(self, fleet: SoakFleet, names: Names, say: Callable[[str], None]) -> None:
        self.problems: list[str] = []
        self.runs: list[str] = []
        self.num_away = self.num_frozen = self.num_reads = 0
        self.silences: list[tuple[float, float]] = []
        """From when to when a device said nothing, on the monotonic clock."""
        self._fleet, self._names, self._say = fleet, names, say
        self._over = threading.Event()
        self._rng = random.Random(7)
        self._ca = fleet.root / "ca.pem"
        self._threads = [
            threading.Thread(target=self._guarded, args=(what,), name=what.__name__, daemon=True)
            for what in (self._train, self._come_and_go, self._scrape, self._read, self._open_pages)
        ]

    def __enter__(self) -> Self:
        self._ca.write_text(self._fleet.make_client().ca_pem)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def silent_s(self, from_s: float, until_s: float) -> float:
        """Returns for how many seconds in all devices said nothing in a span of the monotonic clock."""
        return sum(max(0.0, min(end_s, until_s) - max(begin_s, from_s)) for begin_s, end_s in self.silences)

    def _guarded(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception as error:  # noqa: BLE001 the boundary of a thread; it is told and fails the soak
            self.problems.append(f"{what.__name__.strip('_')}: {type(error).__name__}: {error}")

    def _train(self) -> None:
        for number in itertools.count():
            run_id = self._fleet.submit(config_of(number))
            self.runs.append(run_id)
            while (run := self._fleet.make_client().get(f"/edgefl/v1/runs/{run_id}"))["status"] != "finished":
                if run["status"] in {"failed", "interrupted", "stopped"}:
                    self.problems.append(f"run {run_id} {run['status']}: {run['reason']}")
                    return
                if self._over.wait(2.0):
                    return
            self._say(
                f"run {number} ({run['strategy']}): {run['rounds']} rounds, accuracy {run['accuracy'] or 0:.3f}"
            )

    def _come_and_go(self) -> None:
        first, second = self._names.visitors
        happenings: list[Callable[[], None]] = [
            lambda: self._leave(first, signal.SIGTERM),
            lambda: self._freeze(self._names.staying[-1], FROZEN_S),
            lambda: self._leave(second, signal.SIGKILL),
            lambda: self._freeze(BROKER, BROKER_FROZEN_S),
        ]
        for happens in itertools.cycle(happenings):
            if self._over.wait(HAPPENS_EVERY_S):
                return
            happens()

    def _leave(self, name: str, number: int) -> None:
        self.num_away += 1
        began_s = time.monotonic()
        self._fleet.kill(name, number)
        self._fleet.processes[name].wait()
        self._over.wait(AWAY_S)
        self._fleet.start_device(name)
        while not self._over.wait(0.2) and self._fleet.get_presence()[name] != "online":
            continue
        self.silences.append((began_s, time.monotonic()))

    def _freeze(self, name: str, for_s: float) -> None:
        self.num_frozen += 1
        process = psutil.Process(self._fleet.processes[name].pid)
        everybody = [process, *process.children(recursive=True)]
        began_s = time.monotonic()
        for each in everybody:
            each.suspend()
        try:
            self._over.wait(for_s)
            if name != BROKER:
                self.silences.append((began_s, time.monotonic()))
        finally:
            for each in everybody:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.resume()

    def _scrape(self) -> None:
        operator = self._fleet.make_client()
        address, trust = f"{LOOPBACK}:{self._fleet.port}", create_pinned_context(operator.ca_pem.encode())
        headers = {"Authorization": f"Bearer {operator.token}"}
        while not self._over.wait(SCRAPE_EVERY_S):
            status, body = request(address, trust, "GET", "/metrics", headers=headers)
            if status != 200 or b"edgefl_rounds_closed_total" not in body:
                raise EdgeflError(f"/metrics answered {status} with {len(body)} bytes")

    def _read(self) -> None:
        operator = self._fleet.make_client()
        while not self._over.wait(READ_EVERY_S):
            path, filters = self._rng.choice(self._questions())
            operator.get(path, filters)
            self.num_reads += 1

    def _questions(self) -> list[tuple[str, dict[str, object]]]:
        history, run = "/edgefl/v1/history", self._rng.choice(self.runs)
        return [
            (f"{history}/rounds", {"run": run, "limit": 100}),
            (f"{history}/updates", {"device": self._names.staying[0], "limit": 100, "where": "staleness>0"}),
            (f"{history}/heartbeats", {"limit": 100}),
            (f"{history}/traffic", {"by": "device"}),
            (f"{history}/accuracy", {"run": run}),
            (f"{history}/why", {"run": run}),
            ("/edgefl/v1/devices", {}),
            ("/edgefl/v1/runs", {}),
        ]

    def _open_pages(self) -> None:
        """Keeps a page open all the time, and opens another now and then for a while."""
        with reading(self._fleet.port, self._ca, 1):
            while not self._over.wait(PAGE_EVERY_S / 2):
                with reading(self._fleet.port, self._ca, 2):
                    self._over.wait(PAGE_EVERY_S / 2)
