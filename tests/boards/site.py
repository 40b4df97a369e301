"""The site that emulated boards join: a real coordinator on this machine, asked as an operator would ask it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.core.config import parse_run
from edgefl.core.errors import NetworkError
from edgefl.simulation.local_fleet import LocalFleet

ROOT = Path(__file__).parents[2]


@dataclass(slots=True)
class Site:
    """A fleet without devices of its own; its boards join by themselves."""

    fleet: LocalFleet

    @classmethod
    def on(cls, root: Path, hosts: Sequence[str]) -> Site:
        """Returns a site whose coordinator is reached at `hosts`; start it with `with site.fleet`."""
        path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        return cls(LocalFleet(root=root, devices=[], hosts=hosts, environment={"PYTHONPATH": path}))

    def token(self) -> str:
        """Returns a token that one board may use once."""
        return str(self.fleet.make_client().post("/edgefl/v1/tokens", {"uses": 1})["token"])

    def device(self, name: str) -> dict[str, Any]:
        """Returns what `edgefl devices show` says, capabilities included."""
        [row] = self._rows("devices", "show", name)
        return row

    def updates(self, run: str) -> list[dict[str, Any]]:
        """Returns what `edgefl history updates` says of a run."""
        return self._rows("history", "updates", "--run", run)

    def heartbeats(self, name: str) -> list[dict[str, Any]]:
        """Returns what `edgefl history heartbeats` says of a device."""
        return self._rows("history", "heartbeats", "--device", name)

    def train(self, rounds: int = 1) -> str:
        """Runs the digits task on one board and returns the run's id once it is finished."""
        # A board under emulation takes long to load its libraries.
        devices = {"min": 1, "ready_s": 600.0}
        config = {"run": {"task": "digits", "rounds": rounds, "evaluate_on": "none"}, "devices": devices}
        run = self.fleet.submit(parse_run(config))
        assert self.fleet.wait_for_run(run)["status"] == "finished"
        return run

    def wait_online(self, name: str, *, timeout_s: float) -> float:
        """Returns when a heartbeat made the device online (Unix seconds)."""
        eventually(lambda: self._presence(name) == "online", timeout_s, f"{name} to come online")
        return time.time()

    def wait_away(self, name: str, *, timeout_s: float) -> None:
        """Waits until the device is no longer online."""
        eventually(lambda: self._presence(name) != "online", timeout_s, f"{name} to be missed")

    def _presence(self, name: str) -> str | None:
        """Returns what the coordinator thinks of a device; asked without a process of its own for each time."""
        try:
            return self.fleet.get_presence().get(name)
        except NetworkError:
            return None

    def _rows(self, *words: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self.fleet.run_command(*words, "--format", "json"))["rows"]
        return rows


def eventually(condition: Callable[[], Any], timeout_s: float, what: str) -> None:
    """Waits until the condition holds; fails when it never does."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.5)
