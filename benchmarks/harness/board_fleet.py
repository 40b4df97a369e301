"""A fleet whose devices are processes in network namespaces of their own, each on a wire that can be pulled.

The namespaces are those of the emulated boards (`tests/boards/namespaces.py`).
"""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.core.errors import EdgeflError
from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet, partition_devices
from harness.throttled_task import NAME

HARNESS = Path(__file__).parent
TESTS = HARNESS.parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from boards.namespaces import BoardNetwork, why_not  # noqa: E402 it lies with the tests of boards

__all__ = ["NAME", "BoardFleet", "board_fleet", "why_not"]

POLL_S = 0.1


@dataclass(slots=True, kw_only=True)
class BoardFleet:
    """A running fleet, and the network that its devices are on."""

    fleet: LocalFleet
    network: BoardNetwork
    names: Sequence[str]

    def rows(self, query: str, *values: object) -> list[dict[str, Any]]:
        """Returns what the store says; it is only read."""
        with closing(sqlite3.connect(f"file:{self.fleet.database}?mode=ro", uri=True)) as store:
            store.row_factory = sqlite3.Row
            return [dict(row) for row in store.execute(query, values)]

    def events(self, device_id: str, kind: str, since: float) -> list[float]:
        """Returns when a device's events of a kind were, since a time, oldest first."""
        query = "SELECT at FROM events WHERE device_id = ? AND kind = ? AND at >= ? ORDER BY at"
        return [row["at"] for row in self.rows(query, device_id, kind, since)]

    def out(self, run_id: str, device_id: str) -> str | None:
        """Returns the assignment that a device works on."""
        query = "SELECT assignment_id FROM updates WHERE run_id = ? AND device_id = ? AND ended_at IS NULL"
        found = self.rows(query, run_id, device_id)
        return found[-1]["assignment_id"] if found else None

    def wait(self, what: str, is_true: Callable[[], Any], timeout_s: float = 120.0) -> Any:
        """Returns the value once there is one."""
        until_s = time.monotonic() + timeout_s
        while not (value := is_true()):
            if time.monotonic() > until_s:
                raise EdgeflError(f"waited {timeout_s:g} s for {what}")
            time.sleep(POLL_S)
        return value


@contextmanager
def board_fleet(root: Path, num_devices: int, *, delay_s: float, broker: str = "mosquitto") -> Iterator[BoardFleet]:
    """Yields a fleet whose devices take `delay_s` for an iteration of `throttled_task`."""
    partitions, _ = partition_devices("digits", "iid", num_devices, root / "shards", None, 7)
    with BoardNetwork([device.name for device in partitions]) as network:
        devices = []
        for device in partitions:
            shard = Path(device.shards["digits"])
            shard.with_suffix(".delay").write_text(str(delay_s))
            program = network.program(device.name)
            devices.append(LocalDeviceSpec(name=device.name, shards={NAME: str(shard)}, program=program))
        paths = [str(HARNESS), str(HARNESS.parents[1]), os.environ.get("PYTHONPATH", "")]
        with LocalFleet(
            root=root / "fleet",
            devices=devices,
            hosts=[network.address],
            broker=broker,
            environment={
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "EDGEFL_ALLOW_MODULES": NAME.partition(":")[0],
            },
        ) as fleet:
            yield BoardFleet(fleet=fleet, network=network, names=[device.name for device in devices])
