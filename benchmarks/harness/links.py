"""Fleets whose devices are each behind a link with a delay and a rate, and the least that a round takes over it.

The link is a proxy for TCP on this machine, one for each device (`tests/chaos/wire.py`): what passes is delayed and
held to the rate, in both directions, over all connections of the device together.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgefl.simulation.local_fleet import COORDINATOR, LOOPBACK, LocalFleet

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from chaos.wire import EVERYBODY, Proxy, Weather  # it lies with the tests that do bad things to wires

Address = tuple[str, int]
BITS_PER_BYTE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One device's link; the delay is one way, the rate is that of either direction."""

    delay_s: float
    bits_per_s: float

    @property
    def title(self) -> str:
        return f"{1e3 * self.delay_s:g} ms, {self.bits_per_s / 1e6:g} Mbit/s"

    def least_round_s(self, bytes_down: float, bytes_up: float) -> float:
        """Returns what no protocol can be under: the model goes down, and then its update up."""
        return 2 * self.delay_s + (bytes_down + bytes_up) * BITS_PER_BYTE / self.bits_per_s


def device_host(number: int) -> str:
    """Returns the address of this machine at which the link of a device begins; number 1 or more."""
    return f"127.0.1.{number}"


@contextmanager
def linked(link: Link, ends: Sequence[tuple[Address, Address]]) -> Iterator[None]:
    """Lays one device's link between pairs of addresses: where the device connects to, and where that leads."""
    weather = {EVERYBODY: Weather(delay_s=link.delay_s, bytes_per_s=link.bits_per_s / BITS_PER_BYTE)}
    with ExitStack() as stack:
        for near, far in ends:
            stack.enter_context(Proxy(near, far, weather))
        yield


@dataclass(slots=True, kw_only=True)
class LinkedFleet(LocalFleet):
    """A fleet whose coordinator listens on loopback alone: devices reach it through their links."""

    def start_coordinator(self) -> None:
        shards = [word for task, path in self.test_shards.items() for word in ("--test-shard", f"{task}={path}")]
        self._start_process(
            COORDINATOR, self.program, "coordinator", "start", "--dir", str(self.directory), "--host", LOOPBACK,
            "--broker", self.broker, "--broker-port", str(self.broker_port), *shards,
        )  # fmt: skip
        self._wait_until(self._is_answering, "the coordinator to answer")


@contextmanager
def linked_fleet(fleet: LinkedFleet, link: Link) -> Iterator[LinkedFleet]:
    """Yields the fleet, started; each of its devices joins at its own `host`, through a link of its own."""
    with ExitStack() as stack:
        for device in fleet.devices:
            ends = [((device.host, port), (LOOPBACK, port)) for port in (fleet.port, fleet.broker_port)]
            stack.enter_context(linked(link, ends))
        yield stack.enter_context(fleet)
