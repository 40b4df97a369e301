"""`up = "auto"` over real processes: one device's way to the coordinator is slow, and its codec shows it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from edgefl.compression.auto import CANDIDATES
from edgefl.config import parse_run
from edgefl.local_fleet import LocalFleet

BYTES_PER_S = 10_000
PIECE = 500


@dataclass
class SlowUplink:
    """A way to a port of this machine that carries so many bytes a second there, and any number back."""

    to_port: int
    is_slow: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [self._begin(self._accept)]

    def close(self) -> None:
        """Ends when the device and the coordinator have closed their ends."""
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                self._threads.append(self._begin(self._serve, here))

    def _serve(self, here: socket.socket) -> None:
        with here, socket.create_connection(("127.0.0.1", self.to_port)) as there:
            back = self._begin(self._carry, there, here, False)
            self._carry(here, there, True)
            back.join()

    def _carry(self, source: socket.socket, sink: socket.socket, is_up: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE if is_up else 65_536):
                if is_up and self.is_slow.is_set():
                    time.sleep(len(piece) / BYTES_PER_S)
                sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _begin(work: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        thread.start()
        return thread


class FleetWithSlowDevice(LocalFleet):
    """Its second device joins, and from then on talks, by way of a slow uplink; MQTT goes its own way."""

    uplink: SlowUplink

    def _start_join(self, device: Any, token: str) -> Any:
        if device.name != "device-02":
            return super()._start_join(device, token)
        self.uplink = SlowUplink(self.port)
        own, self.port = self.port, self.uplink.port
        try:
            return super()._start_join(device, token)
        finally:
            self.port = own


@pytest.fixture
def fleet(tools: Any, tmp_path: Path) -> Iterator[FleetWithSlowDevice]:
    environment = {"PYTHONPATH": tools.environment["PYTHONPATH"]}
    with FleetWithSlowDevice(
        root=tmp_path, devices=tools.devices(2, "digits", tools.gated), environment=environment
    ) as running:
        running.uplink.is_slow.set()
        yield running
    running.uplink.close()
    tools.check_logs(tmp_path)


@pytest.mark.slow
def test_a_device_with_a_slow_uplink_gets_a_harder_codec_and_the_history_tells_which(
    fleet: FleetWithSlowDevice, tools: Any
) -> None:
    config = {
        "run": {"task": tools.gated, "rounds": 10, "evaluate_on": "none"},
        "task": {"pace_s": 0.1},
        "strategy": {"name": "fedavg", "iterations": 4, "learning_rate": 0.2},
        "compression": {"up": "auto"},
        "devices": {"min": 2},
    }
    run_id = fleet.submit(parse_run(config))
    assert fleet.wait_run(run_id)["status"] == "finished"
    chosen = {
        name: [CANDIDATES.index(row["codec"]) for row in fleet.history("updates", run=run_id, device=name)]
        for name in ("device-01", "device-02")
    }
    assert [len(places) for places in chosen.values()] == [10, 10]
    assert chosen["device-01"][0] == chosen["device-02"][0]
    assert median(chosen["device-01"][-5:]) < median(chosen["device-02"][-5:]), chosen
