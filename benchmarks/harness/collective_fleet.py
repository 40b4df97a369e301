"""A fleet for collectives: each device and the coordinator in a network of its own, on a wire of a rate.

The wires are those of network namespaces (`tests/boards/namespaces.py`), which the kernel holds to the rate in either
direction: all that a device sends and gets passes its own wire, to other devices and to the coordinator. Where this
machine has no namespaces the processes share loopback, and nothing is held to a rate.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.core.config import RunConfig, parse_run
from edgefl.core.errors import ConfigError, EdgeflError
from edgefl.core.types import Array
from edgefl.simulation.local_fleet import (
    COORDINATOR,
    EDGEFL_COMMAND,
    LOOPBACK,
    TERMINAL_STATUSES,
    LocalDeviceSpec,
    LocalFleet,
    find_free_port,
)
from edgefl.storage.checkpoints import load_model_file
from harness.tallied_task import NAME

HARNESS = Path(__file__).parent
sys.path.insert(0, str(HARNESS.parents[1] / "tests"))

from boards.namespaces import BoardNetwork, why_not  # noqa: E402 both lie with tests
from chaos.wire import Proxy  # noqa: E402

__all__ = ["CollectiveFleet", "collective_fleet", "why_not"]

POLL_S, REPORTS_WITHIN_S = 0.05, 60.0


@dataclass(slots=True, kw_only=True)
class CollectiveFleet:
    """A running fleet, the network that it is on, if any, and its devices' names by number."""

    fleet: LocalFleet
    network: BoardNetwork | None
    names: Sequence[str]
    hosts: Path | None

    def limit(self, mbit_per_s: float) -> None:
        """Holds each wire to a rate, in either direction."""
        if self.network is not None:
            for name in (COORDINATOR, *self.names):
                self.network.limit(name, megabits_per_s=mbit_per_s)

    def release(self) -> None:
        """Lets the wires be as fast as the machine."""
        if self.network is not None:
            for name in (COORDINATOR, *self.names):
                self.network.calm(name)

    def make_run(
        self, collective: str, *, reductions: int, rounds: int, task: Mapping[str, Any], **tables: Any
    ) -> RunConfig:
        """Returns a run of the task `TalliedTask` in which all devices take part."""
        hosts = {} if self.hosts is None else {"hosts": str(self.hosts)}
        aggregation = {"collective": collective, "reductions": reductions, **hosts}
        return parse_run(
            {
                "run": {"task": NAME, "rounds": rounds, "evaluate_on": "none", "local_test_fraction": 0.0},
                "task": {"devices": len(self.names), **task},
                "strategy": {"iterations": 1, "learning_rate": 1.0},
                "devices": {"require": len(self.names), "ready_s": 120},
                "guard": {"enabled": False, "max_weight_ratio": 0},
                "aggregation": {} if collective == COORDINATOR else aggregation,
                **tables,
            }
        )

    def submit(self, config: RunConfig) -> str:
        """Queues a run and returns its id, as soon as the coordinator knows what all devices say of themselves.

        Raises:
            ConfigError: it is refused all the same.
        """
        until_s = time.monotonic() + REPORTS_WITHIN_S
        while True:
            try:
                return self.fleet.submit(config)
            except ConfigError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(POLL_S)

    def list_closed(self, run_id: str) -> list[dict[str, Any]]:
        """Returns the rows of closed rounds, from the store's file: asking the coordinator would use its wire."""
        with closing(sqlite3.connect(f"file:{self.fleet.database}?mode=ro", uri=True, timeout=30)) as store:
            store.row_factory = sqlite3.Row
            query = "SELECT * FROM rounds WHERE run_id = ? AND closed_at IS NOT NULL ORDER BY round"
            return [dict(row) for row in store.execute(query, (run_id,))]

    def find_status(self, run_id: str) -> str:
        """Returns the status of a run, from the store's file."""
        with closing(sqlite3.connect(f"file:{self.fleet.database}?mode=ro", uri=True, timeout=30)) as store:
            found = store.execute("SELECT status FROM runs WHERE run_id = ?", (run_id,)).fetchone()
        return "queued" if found is None else str(found[0])

    def wait(self, run_id: str, is_true: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Waits until something holds, or the run is over.

        Raises:
            EdgeflError: it took too long.
        """
        until_s = time.monotonic() + timeout_s
        while not is_true() and self.find_status(run_id) not in TERMINAL_STATUSES:
            if time.monotonic() > until_s:
                raise EdgeflError(f"waited {timeout_s:.0f} s for {what}; logs are in {self.fleet.root}")
            time.sleep(POLL_S)

    def finish(self, run_id: str, timeout_s: float) -> dict[str, Array]:
        """Returns the last model of a run.

        Raises:
            EdgeflError: it failed, or took too long.
        """
        self.wait(run_id, lambda: False, timeout_s, "the run to end")
        return load_model_file(self.fleet.get_model_path(self.fleet.wait_for_run(run_id)["model"]))

    def count_through_coordinator(self) -> int:
        """Returns the bytes that have passed the coordinator's wire, both ways; 0 where it has none."""
        if self.network is None:
            return 0
        return self.network.num_bytes_sent(COORDINATOR) + self.network.num_bytes_received(COORDINATOR)

    def count_sent(self) -> int:
        """Returns the bytes that the device which sent most has sent over its wire; 0 where it has none."""
        return 0 if self.network is None else max(map(self.network.num_bytes_sent, self.names))


@contextmanager
def collective_fleet(root: Path, num_devices: int) -> Iterator[CollectiveFleet]:
    """Yields a fleet with the task `TalliedTask`, on wires of its own where this machine has namespaces."""
    names = [f"device-{number:02}" for number in range(1, num_devices + 1)]
    shards = [root / "shards" / f"{number}.npz" for number in range(num_devices)]
    shards[0].parent.mkdir(parents=True)
    for shard in shards:
        shard.touch()
    with ExitStack() as stack:
        network = None if why_not() else stack.enter_context(BoardNetwork([COORDINATOR, *names]))
        programs = {
            name: EDGEFL_COMMAND if network is None else network.program(name) for name in (COORDINATOR, *names)
        }
        paths = [str(HARNESS), str(HARNESS.parents[1]), os.environ.get("PYTHONPATH", "")]
        fleet = LocalFleet(
            root=root / "fleet",
            devices=[
                LocalDeviceSpec(name=name, shards={NAME: str(shard)}, program=programs[name])
                for name, shard in zip(names, shards, strict=True)
            ],
            hosts=[] if network is None else [network.address_of(COORDINATOR)],
            environment={
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "EDGEFL_ALLOW_MODULES": NAME.partition(":")[0],
            },
            program=programs[COORDINATOR],
        )
        hosts = None
        if network is None:
            hosts = _write_hosts(root / "hosts.json", names)
        else:
            near, far = (LOOPBACK, fleet.port), (network.address_of(COORDINATOR), fleet.port)
            stack.enter_context(Proxy(near, far, {}))  # of this process alone
        yield CollectiveFleet(fleet=stack.enter_context(fleet), network=network, names=names, hosts=hosts)


def _write_hosts(path: Path, names: Sequence[str]) -> Path:
    """Writes where each device listens on loopback, where they cannot have the same port."""
    hosts = [{"name": name, "addr": LOOPBACK, "port": find_free_port()} for name in names]
    path.write_text(json.dumps({"hosts": hosts}))
    return path
