"""A fleet of two hosts: two coordinators on one PostgreSQL and one place for models, of which one stands by.

The hosts are loopback addresses of this machine, each with a directory of its own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from edgefl.core.config import RunConfig
from edgefl.core.errors import EdgeflError, NetworkError
from edgefl.core.types import Json
from edgefl.simulation.local_fleet import LocalFleet
from edgefl.system.api_client import CoordinatorClient, load_operator_file

ADDRESSES = ("127.0.0.1", "127.0.0.2")


@dataclass
class TwoHostFleet(LocalFleet):
    """Context manager that starts both hosts and the devices; `active` is the index of the host that serves.

    `store` and `models` are what both share; `take_over_s` has how long each take-over lasted.
    """

    store: str = ""
    models: str = ""
    active: int = 0
    take_over_s: list[float] = field(default_factory=list)

    def __enter__(self) -> Self:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            hosts = [word for host in ADDRESSES for word in ("--host", host)]
            shared = {"EDGEFL_STORE": self.store, "EDGEFL_MODELS": self.models}
            first, second = (str(self.host_directory(host)) for host in range(2))
            init = ("coordinator", "init", "--dir", first, "--port", str(self.port), *hosts)
            self._run_with(shared, *init)
            backup = str(self.root / "first.tar.gz")
            self.run_command("coordinator", "backup", "--dir", first, backup)
            self.run_command("coordinator", "restore", "--dir", second, backup)
            self.start_host(0)
            self.wait_until(lambda: self.find_active() == 0, 60, "the first host to serve")
            self.start_host(1)
            self._join_devices(self.devices)
            for device in self.devices:
                self.start_device(device.name)
            self.wait_for_devices(len(self.devices))
        except BaseException:  # an interrupt too: no process stays behind
            self.stop()
            raise
        return self

    def host_directory(self, host: int) -> Path:
        return self.root / f"host-{host}"

    def start_host(self, host: int) -> None:
        """Starts the coordinator of a host, which may stand by."""
        self._start_process(
            f"host-{host}", self.program, "coordinator", "start", "--dir", str(self.host_directory(host)),
            "--host", ADDRESSES[host], "--broker", self.broker, "--broker-port", str(self.broker_port),
        )  # fmt: skip

    def signal_host(self, host: int, number: int) -> None:
        os.kill(self.processes[f"host-{host}"].pid, number)
        if number == signal.SIGKILL:
            self.processes[f"host-{host}"].wait()

    def find_active(self) -> int | None:
        """Returns the host that answers, None for neither."""
        for host in (self.active, 1 - self.active):
            try:
                if self._make_client(host).get("/healthz").get("status") == "ok":
                    self.active = host
                    return host
            except EdgeflError:
                continue
        return None

    def fail_over(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to the active host, and waits until the other goes on with the newest run."""
        former, before = self.active, self.get_run("latest")
        started_s = time.monotonic()
        self.signal_host(former, number)
        self.active = 1 - former

        def goes_on() -> bool:
            return bool(self.get_run("latest")["rounds"] > before["rounds"] + 1)

        self.wait_until(goes_on, 60, f"host {self.active} to go on with the run")
        self.take_over_s.append(time.monotonic() - started_s)

    def make_client(self) -> CoordinatorClient:
        return self._make_client(self.active)

    def get_run(self, run_id: str) -> Json:
        if run_id == "latest":
            return dict(self.make_client().get("/edgefl/v1/runs")["rows"][0])
        return dict(self.make_client().get(f"/edgefl/v1/runs/{run_id}"))

    def run_to_end(self, config: RunConfig, within_s: float = 120) -> Json:
        """Returns the record of a run that nothing disturbs."""
        return self.wait_for_end(self.submit(config), within_s)

    def wait_for_end(self, run_id: str, within_s: float = 120) -> Json:
        over = {"finished", "failed", "stopped", "interrupted"}
        self.wait_until(lambda: self.get_run(run_id)["status"] in over, within_s, f"{run_id} to end")
        return self.get_run(run_id)

    def list_used(self, run_id: str) -> list[tuple[int, str]]:
        """Returns round and device of each used update, sorted."""
        rows = self.list_history("updates", run=run_id, limit=50_000)
        return sorted((row["round"], row["device_id"]) for row in rows if row["outcome"] == "used")

    def wait_until(self, condition: Callable[[], Any], within_s: float, what: str) -> None:
        end_s = time.monotonic() + within_s
        while True:
            try:
                if condition():
                    return
            except NetworkError:
                pass
            assert time.monotonic() < end_s, f"waited {within_s:.0f} s for {what}; logs are in {self.root}"
            time.sleep(0.1)

    def _make_client(self, host: int) -> CoordinatorClient:
        operator = load_operator_file(self.root / "config" / "edgefl" / "operator.toml")
        url = f"https://{ADDRESSES[host]}:{self.port}"
        return CoordinatorClient(url=url, ca_pem=operator.ca_pem, token=operator.operator_token)

    def _run_with(self, variables: dict[str, str], *arguments: str) -> None:
        kept, self.environment = self.environment, {**self.environment, **variables}
        try:
            self.run_command(*arguments)
        finally:
            self.environment = kept

    def _check_coordinator(self) -> None:
        pass  # one of the two may be dead at any time
