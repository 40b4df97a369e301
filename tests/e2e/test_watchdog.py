"""What systemd would hear of real processes: that they are ready, that their loops live, and when one is stuck."""

from __future__ import annotations

import os
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet

WATCHDOG_S = 2.0

# The main thread of a real agent or coordinator is held up by a signal handler that waits: its other threads live on.
STUCK = """
import signal, sys, threading
def hold(_number, _frame):
    threading.Event().wait(600)
signal.signal(signal.SIGUSR1, hold)
from edgefl.cli.main import main
if "device" in sys.argv:
    # So that an agent at leisure comes round within this test's WatchdogSec, as it does within the unit's.
    from edgefl.device.agent import Agent
    Agent.__init__.__kwdefaults__["poll_s"] = 0.2
main(sys.argv[1:])
"""


class Manager:
    """Stands for systemd: a datagram socket, and the variables that it gives a unit."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self._path))

    @property
    def environment(self) -> dict[str, str]:
        return {"NOTIFY_SOCKET": str(self._path), "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6))}

    def hears(self, word: str, *, within_s: float) -> bool:
        deadline_s = time.monotonic() + within_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            try:
                if self._socket.recv(4096).decode() == word:
                    return True
            except TimeoutError:
                break
        return False

    def goes_on(self) -> bool:
        """Whether beats come for three times WatchdogSec."""
        until_s = time.monotonic() + 3 * WATCHDOG_S
        while time.monotonic() < until_s:
            if not self.hears("WATCHDOG=1", within_s=WATCHDOG_S):
                return False
        return True

    def falls_silent(self) -> bool:
        """Whether the process that is heard now is not heard for a whole WatchdogSec: systemd would kill it."""
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            if not self.hears("WATCHDOG=1", within_s=1.5 * WATCHDOG_S):
                return True
        return False

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path)
    yield manager
    manager.close()


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    (tmp_path / "stuck.py").write_text(STUCK)
    return [sys.executable, str(tmp_path / "stuck.py")]


@pytest.mark.slow
def test_a_device_beats_while_it_works_and_not_when_its_main_loop_is_stuck(
    tools: Any, manager: Manager, program: list[str], tmp_path: Path
) -> None:
    gate = tools.gate(tmp_path / "gate")
    with tools.fleet(tmp_path / "fleet", []) as fleet:
        fleet.environment = {**fleet.environment, **manager.environment}
        device = LocalDeviceSpec(name="device-01", shards={tools.gated: str(tools.shards[0])}, program=program)
        fleet.add_device(device)
        assert manager.hears("READY=1", within_s=30)
        fleet.wait_for_devices(1)
        assert manager.goes_on(), "an agent at leisure passed for a stuck one"

        # An iteration that takes many times WatchdogSec / 2, without a word: that is work.
        run = fleet.submit(tools.gated_run(gate, rounds=1))
        tools.eventually(gate.entered)
        assert manager.goes_on(), "work of a few seconds passed for a stuck loop"
        gate.open()
        fleet.wait_for_run(run)

        fleet.processes["device-01"].send_signal(signal.SIGUSR1)
        assert manager.falls_silent()
        assert fleet.get_presence()["device-01"] == "online", "only the main loop is stuck: heartbeats go on"
        fleet.kill("device-01")


@pytest.mark.slow
def test_a_device_that_is_stopped_says_so(tools: Any, manager: Manager, tmp_path: Path) -> None:
    with tools.fleet(tmp_path / "fleet", []) as fleet:
        fleet.environment = {**fleet.environment, **manager.environment}
        fleet.add_device(LocalDeviceSpec(name="device-01", shards={"digits": str(tools.shards[0])}))
        fleet.wait_for_devices(1)
        assert fleet.terminate("device-01") == 0
        assert manager.hears("STOPPING=1", within_s=10)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["main", "https"])
def test_a_coordinator_beats_until_its_main_loop_or_its_web_server_is_stuck(
    manager: Manager, what: str, tmp_path: Path
) -> None:
    program = tmp_path / "coordinator.py"
    program.write_text(STUCK if what == "main" else STUCK_WEB)
    fleet = LocalFleet(
        root=tmp_path / "fleet", devices=[], program=[sys.executable, str(program)], environment=manager.environment
    )
    with fleet:
        assert manager.hears("READY=1", within_s=5)
        assert manager.goes_on()
        os.kill(fleet.processes["coordinator"].pid, signal.SIGUSR1)
        assert manager.falls_silent()
        fleet.kill("coordinator")


STUCK_WEB = textwrap.dedent(
    """
    import asyncio, signal, sys, threading
    from edgefl.coordinator.api import server as web
    servers = []
    def hold(_number, _frame):
        servers[0].call_soon_threadsafe(threading.Event().wait, 600)
    turn = web._HttpsServer.on_tick
    async def on_tick(self, counter):
        servers.append(asyncio.get_running_loop())
        return await turn(self, counter)
    web._HttpsServer.on_tick = on_tick
    signal.signal(signal.SIGUSR1, hold)
    from edgefl.cli.main import main
    main(sys.argv[1:])
    """
)
