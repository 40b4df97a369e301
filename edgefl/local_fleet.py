"""A whole fleet on this machine: one coordinator and several devices, each a process of its own, in one folder.

The demo, `edgefl.run` and the end-to-end tests use it. Nothing in it is special: it types the commands that a user
would type, and asks for what the page asks for, with a configuration folder of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from edgefl.client import Operator, load_operator_file
from edgefl.config import RunConfig
from edgefl.errors import NetworkError, RunFailedError
from edgefl.processes import end_with_parent
from edgefl.types import Json

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.1
FINAL = frozenset({"finished", "stopped", "failed", "interrupted"})
COORDINATOR = "coordinator"
LOOPBACK = "127.0.0.1"
PROGRAM = (sys.executable, "-m", "edgefl.cli.main")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDevice:
    """One device to start: its name, its shards by task, its role, and the program that is its `edgefl`.

    `host` is at which of the fleet's hosts it joins; the first when empty.
    """

    name: str
    shards: Mapping[str, str]
    role: str = "trainer"
    program: Sequence[str] = PROGRAM
    host: str = ""


@dataclass(slots=True, kw_only=True)
class LocalFleet:
    """Use it as a context manager: it starts everything and stops what it started.

    Attributes:
        root: the folder that holds all state and logs; made when it is missing.
        devices: what to start. Each process uses one thread, since they share this machine.
        test_shards: what the coordinator evaluates on.
        hosts: how boards elsewhere reach the coordinator; it then listens on all addresses of this machine.
        broker: as `edgefl coordinator start --broker`.
        environment: variables for every process, over those of this one.
        program: the coordinator's `edgefl`.
    """

    root: Path
    devices: Sequence[LocalDevice]
    test_shards: Mapping[str, str] = field(default_factory=dict)
    hosts: Sequence[str] = ()
    broker: str = "auto"
    environment: Mapping[str, str] = field(default_factory=dict)
    program: Sequence[str] = PROGRAM
    port: int = field(default_factory=lambda: free_port())  # noqa: PLW0108 defined below
    broker_port: int = field(default_factory=lambda: free_port())  # noqa: PLW0108 likewise
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        return self.root / "coordinator"

    @property
    def database(self) -> Path:
        return self.directory / "edgefl.db"

    def __enter__(self) -> Self:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            hosts = [word for host in self.hosts or (LOOPBACK,) for word in ("--host", host)]
            self.command("coordinator", "init", "--dir", str(self.directory), "--port", str(self.port), *hosts)
            self.start_coordinator()
            self._join(self.devices)
            for device in self.devices:
                self.start_device(device.name)
            self.wait_present(len(self.devices) + bool(self.test_shards))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def operator(self) -> Operator:
        """Returns the coordinator's JSON API."""
        known = load_operator_file(self.root / "config" / "edgefl" / "operator.toml")
        return Operator(url=f"https://127.0.0.1:{self.port}", ca_pem=known.ca_pem, token=known.operator_token)

    def start_coordinator(self) -> None:
        """Starts the coordinator and waits until it answers."""
        shards = [word for task, path in self.test_shards.items() for word in ("--test-shard", f"{task}={path}")]
        self._start(
            COORDINATOR,
            self.program,
            "coordinator", "start", "--dir", str(self.directory),
            "--host", "0.0.0.0" if self.hosts else LOOPBACK,  # noqa: S104 boards elsewhere are to reach it
            "--broker", self.broker, "--broker-port", str(self.broker_port), *shards,
        )  # fmt: skip
        self._wait(self._answers, "the coordinator to answer")

    def start_device(self, name: str) -> None:
        """Starts the agent of a device that has joined."""
        program = next((device.program for device in self.devices if device.name == name), PROGRAM)
        self._start(name, program, "device", "start", "--state", str(self.root / name))

    def add_device(self, device: LocalDevice) -> None:
        """Lets one more device join, and starts it."""
        self._join([device])
        self.devices = (*self.devices, device)
        self.start_device(device.name)

    def wait_present(self, num_devices: int, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits until so many devices are online and have said what data they hold."""

        def are_present() -> bool:
            return list(self.presence().values()).count("online") >= num_devices

        self._wait(are_present, f"{num_devices} devices to come online", timeout_s)

    def presence(self) -> dict[str, str]:
        """Returns what the coordinator thinks of each device: online, late, gone, offline."""
        rows = self.operator().get("/edgefl/v1/devices")["rows"]
        return {row["device_id"]: row["presence"] for row in rows}

    def submit(self, config: RunConfig) -> str:
        """Queues a run and returns its id."""
        run_id: str = self.operator().post("/edgefl/v1/runs", {"config": config.to_json()})["run_id"]
        return run_id

    def wait_run(self, run_id: str, *, on_change: Callable[[Json], None] | None = None) -> Json:
        """Waits for the end of a run; `on_change` is told whenever it has come further.

        Raises:
            RunFailedError: it failed or was interrupted.
            NetworkError: the coordinator is gone.
        """
        shown = None
        while True:
            self._check_alive()
            run = self.operator().get(f"/edgefl/v1/runs/{run_id}")
            state = (run["status"], run["rounds"], run["accuracy"])
            if on_change is not None and state != shown:
                on_change(run)
            shown = state
            if run["status"] in FINAL:
                break
            time.sleep(POLL_S)
        if run["status"] in {"failed", "interrupted"}:
            raise RunFailedError(f"run {run_id} {run['status']}: {run['reason']}; logs are in {self.root}")
        return run

    def history(self, kind: str, **filters: object) -> list[Json]:
        """Returns rows as `edgefl history KIND --format json` gives them."""
        path, operator = f"/edgefl/v1/history/{kind}", self.operator()
        if filters.get("limit"):
            return list(operator.get(path, filters)["rows"])
        rows: list[Json] = []
        after: str | None = ""
        while after is not None:
            page = operator.get(path, {**filters, "after": after})
            rows, after = [*rows, *page["rows"]], page["next"]
        return rows

    def model_file(self, sha256: str) -> Path:
        """Returns where the coordinator keeps a model, by the `model` that its run names."""
        return self.directory / "models" / f"{sha256}.safetensors"

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Sends a signal to one process; SIGKILL also waits for its end."""
        self.processes[name].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[name].wait()

    def end(self, name: str, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Ends one process by SIGTERM and returns its exit code."""
        process = self.processes[name]
        process.terminate()
        return process.wait(timeout_s)

    def stop(self) -> None:
        """Stops the devices, then the coordinator; what does not listen is killed."""
        for names in ([name for name in self.processes if name != COORDINATOR], [COORDINATOR]):
            running = [self.processes[name] for name in names if name in self.processes]
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGCONT)
                    process.terminate()
            for process in running:
                try:
                    process.wait(STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def log_tail(self, name: str, num_lines: int = 5) -> str:
        """Returns the end of a process's log."""
        path = self.root / f"{name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:]) if path.exists() else ""

    def command(self, *arguments: str) -> str:
        """Returns what `edgefl` printed; raises `RunFailedError` when it failed."""
        process = self.popen(arguments)
        output, _ = process.communicate(timeout=START_TIMEOUT_S)
        text = output.decode(errors="replace")
        if process.returncode != 0:
            raise RunFailedError(f"edgefl {arguments[0]} {arguments[1]} failed: {text.strip()}")
        return text

    def _join(self, devices: Sequence[LocalDevice]) -> None:
        if not devices:
            return
        token = self.operator().post("/edgefl/v1/tokens", {"uses": len(devices)})["token"]
        joins = [(device, self._start_join(device, token)) for device in devices]
        failures = []
        for device, process in joins:
            output, _ = process.communicate(timeout=START_TIMEOUT_S)
            if process.returncode != 0:
                failures.append(f"{device.name} could not join: {output.decode(errors='replace').strip()}")
        if failures:
            raise RunFailedError(failures[0])

    def _start_join(self, device: LocalDevice, token: str) -> subprocess.Popen[bytes]:
        return self.popen(self._join_words(device, token), device.program)

    def _join_words(self, device: LocalDevice, token: str) -> list[str]:
        shards = [word for task, path in device.shards.items() for word in ("--shard", f"{task}={path}")]
        return [
            "device", "join", f"{device.host or [*self.hosts, LOOPBACK][0]}:{self.port}", "--token", token,
            "--name", device.name, "--role", device.role, "--state", str(self.root / device.name),
            "--threads", "1", *shards,
        ]  # fmt: skip

    def _start(self, name: str, program: Sequence[str], *arguments: str) -> None:
        with (self.root / f"{name}.log").open("ab") as output:
            self.processes[name] = self.popen(arguments, program, stdout=output.fileno())

    def popen(
        self,
        arguments: Sequence[str],
        program: Sequence[str] = PROGRAM,
        *,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.STDOUT,
    ) -> subprocess.Popen[bytes]:
        """Starts an `edgefl` command as this fleet's operator."""
        own = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "XDG_CONFIG_HOME": str(self.root / "config")}
        return subprocess.Popen(
            [*program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, **own, **self.environment},
            preexec_fn=end_with_parent,  # noqa: PLW1509 one system call, no locks
        )

    def _answers(self) -> bool:
        return bool(self.operator().get("/healthz").get("status") == "ok")

    def _wait(self, is_true: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
        until, pause = time.monotonic() + timeout_s, threading.Event()
        while not self._holds(is_true):
            if time.monotonic() > until:
                raise RunFailedError(f"waited {timeout_s:.0f} s for {what}; logs are in {self.root}")
            pause.wait(POLL_S)

    def _holds(self, is_true: Callable[[], bool]) -> bool:
        """Returns whether it is true; it is not while the coordinator does not answer, unless that has ended."""
        try:
            return is_true()
        except NetworkError:
            return False
        finally:
            self._check_alive()

    def _check_alive(self) -> None:
        coordinator = self.processes.get(COORDINATOR)
        if coordinator is not None and coordinator.poll() is not None:
            raise RunFailedError(
                f"the coordinator ended with code {coordinator.returncode}: {self.log_tail(COORDINATOR, 3)}"
            )


def free_port() -> int:
    """Returns a port of loopback that nobody has, and that the system gives to nobody unasked for the next minute.

    A connection that its server has closed is remembered that long (TIME_WAIT), and keeps the port from outgoing
    connections and from those that ask for any port. Who asks for this one gets it, with SO_REUSEADDR.
    """
    with socket.create_server((LOOPBACK, 0)) as server:
        port: int = server.getsockname()[1]
        with socket.create_connection((LOOPBACK, port)) as client:
            server.accept()[0].close()
            client.recv(1)  # the end of the other side: who closes first is remembered
    return port
