"""A whole fleet on this machine: coordinator and devices, each a process, in one folder.

The demo, the end-to-end tests and `run`, which is for notebooks and scripts, use it. It runs a user's commands and
the dashboard's requests, with a configuration folder of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from edgefl.core import extensions
from edgefl.core.analyses import has_result
from edgefl.core.config import RunConfig, make_run_config
from edgefl.core.errors import ConfigError, NetworkError, RunFailedError
from edgefl.core.protocol import JOIN_TOKEN_VARIABLE
from edgefl.core.types import Json, Scalar
from edgefl.engine.assembly.build import build_run
from edgefl.engine.assembly.privacy import check_fleet_size
from edgefl.engine.run_summary import RunResult, compute_run_metrics
from edgefl.system.api_client import CoordinatorClient, load_operator_file
from edgefl.system.atomic_files import open_atomic
from edgefl.system.processes import exit_with_parent
from edgefl.tasks.datasets.central import TEST_NAME, create_shards
from edgefl.tasks.registry import make_task

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
JOIN_TIMEOUT_S = 600.0
"""For `edgefl device join`, which reads all of a shard."""
STOP_TIMEOUT_S = 15.0
POLL_S = 0.1
TERMINAL_STATUSES = frozenset({"finished", "stopped", "failed", "interrupted"})
COORDINATOR = "coordinator"
LOOPBACK = "127.0.0.1"
EDGEFL_COMMAND = (sys.executable, "-m", "edgefl.cli.main")

DEFAULT_SCHEMES = {"digits": "dirichlet:0.5", "motionsense": "natural"}
FALLBACK_SCHEME = "iid"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDeviceSpec:
    """One device to start: its name, its shards by task, its role, and its `edgefl` program.

    `host` is the fleet's host at which it joins; the first when empty.
    """

    name: str
    shards: Mapping[str, str]
    role: str = "trainer"
    program: Sequence[str] = EDGEFL_COMMAND
    host: str = ""


@dataclass(slots=True, kw_only=True)
class LocalFleet:
    """Context manager that starts a whole fleet and stops it at the end.

    Attributes:
        root: the folder that holds all state and logs; made when it is missing.
        devices: the devices to start. Each process uses one thread, since they share this machine.
        test_shards: the coordinator's test shards.
        hosts: addresses of the coordinator for devices elsewhere; it then listens on all addresses of this machine.
        broker: as `edgefl coordinator start --broker`.
        environment: variables for every process, over those of this one.
        program: the coordinator's `edgefl`.
        parallel_runs: as `edgefl coordinator start --parallel-runs`.
    """

    root: Path
    devices: Sequence[LocalDeviceSpec]
    test_shards: Mapping[str, str] = field(default_factory=dict)
    hosts: Sequence[str] = ()
    broker: str = "auto"
    environment: Mapping[str, str] = field(default_factory=dict)
    program: Sequence[str] = EDGEFL_COMMAND
    parallel_runs: int = 1
    port: int = field(default_factory=lambda: find_free_port())  # noqa: PLW0108 defined below
    broker_port: int = field(default_factory=lambda: find_free_port())  # noqa: PLW0108 likewise
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
            self.run_command("coordinator", "init", "--dir", str(self.directory), "--port", str(self.port), *hosts)
            self.start_coordinator()
            self._join_devices(self.devices)
            for device in self.devices:
                self.start_device(device.name)
            self.wait_for_devices(len(self.devices) + bool(self.test_shards))
        except BaseException:  # an interrupt too: no process stays behind
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def make_client(self) -> CoordinatorClient:
        """Returns a client of the coordinator's API."""
        operator_file = load_operator_file(self.root / "config" / "edgefl" / "operator.toml")
        return CoordinatorClient(
            url=f"https://127.0.0.1:{self.port}", ca_pem=operator_file.ca_pem, token=operator_file.operator_token
        )

    def start_coordinator(self) -> None:
        """Starts the coordinator and waits until it answers."""
        shards = [word for task, path in self.test_shards.items() for word in ("--test-shard", f"{task}={path}")]
        self._start_process(
            COORDINATOR,
            self.program,
            "coordinator", "start", "--dir", str(self.directory),
            "--host", "0.0.0.0" if self.hosts else LOOPBACK,  # noqa: S104 reachable for devices elsewhere
            "--broker", self.broker, "--broker-port", str(self.broker_port),
            "--parallel-runs", str(self.parallel_runs), *shards,
        )  # fmt: skip
        self._wait_until(self._is_answering, "the coordinator to answer")

    def start_device(self, name: str) -> None:
        """Starts the agent of a device that has joined."""
        program = next((device.program for device in self.devices if device.name == name), EDGEFL_COMMAND)
        self._start_process(name, program, "device", "start", "--state", str(self.root / name))

    def add_device(self, device: LocalDeviceSpec) -> None:
        """Joins one more device and starts it."""
        self._join_devices([device])
        self.devices = (*self.devices, device)
        self.start_device(device.name)

    def wait_for_devices(self, num_devices: int, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits until `count` devices are online and have reported their data."""

        def are_present() -> bool:
            return list(self.get_presence().values()).count("online") >= num_devices

        self._wait_until(are_present, f"{num_devices} devices to come online", timeout_s)

    def get_presence(self) -> dict[str, str]:
        """Returns the presence of each device: online, late, gone, offline."""
        rows = self.make_client().get("/edgefl/v1/devices")["rows"]
        return {row["device_id"]: row["presence"] for row in rows}

    def submit(self, config: RunConfig) -> str:
        """Queues a run and returns its id."""
        run_id: str = self.make_client().post("/edgefl/v1/runs", {"config": config.to_json()})["run_id"]
        return run_id

    def wait_for_run(self, run_id: str, *, on_change: Callable[[Json], None] | None = None) -> Json:
        """Waits for the end of a run; `on_change` is called on progress.

        Raises:
            RunFailedError: it failed or was interrupted.
            NetworkError: the coordinator is gone.
        """
        previous = None
        while True:
            self._check_coordinator()
            run = self.make_client().get(f"/edgefl/v1/runs/{run_id}")
            state = (run["status"], run["rounds"], run["accuracy"])
            if on_change is not None and state != previous:
                on_change(run)
            previous = state
            if run["status"] in TERMINAL_STATUSES:
                break
            time.sleep(POLL_S)
        if run["status"] in {"failed", "interrupted"}:
            raise RunFailedError(f"run {run_id} {run['status']}: {run['reason']}; logs are in {self.root}")
        return run

    def list_history(self, kind: str, **filters: object) -> list[Json]:
        """Returns rows as `edgefl history KIND --format json` gives them."""
        path, operator = f"/edgefl/v1/history/{kind}", self.make_client()
        if filters.get("limit"):
            return list(operator.get(path, filters)["rows"])
        rows: list[Json] = []
        cursor: str | None = ""
        while cursor is not None:
            page = operator.get(path, {**filters, "after": cursor})
            rows, cursor = [*rows, *page["rows"]], page["next"]
        return rows

    def get_model_path(self, sha256: str) -> Path:
        """Returns the coordinator's path of a model, by the `model` of its run."""
        return self.directory / "models" / f"{sha256}.safetensors"

    def kill(self, name: str, signal_number: int = signal.SIGKILL) -> None:
        """Sends a signal to one process; SIGKILL also waits for its end."""
        self.processes[name].send_signal(signal_number)
        if signal_number == signal.SIGKILL:
            self.processes[name].wait()

    def terminate(self, name: str, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Ends one process by SIGTERM and returns its exit code."""
        process = self.processes[name]
        process.terminate()
        return process.wait(timeout_s)

    def stop(self) -> None:
        """Stops the devices, then the coordinator; kills those that do not stop."""
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

    def read_log_tail(self, name: str, num_lines: int = 5) -> str:
        """Returns the end of a process's log."""
        path = self.root / f"{name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:]) if path.exists() else ""

    def run_command(self, *arguments: str) -> str:
        """Returns the output of an `edgefl` command; raises `RunFailedError` when it failed."""
        process, name = self.start_command(arguments), " ".join(("edgefl", *arguments[:2]))
        text = _read_output(process, name, START_TIMEOUT_S)
        if process.returncode != 0:
            raise RunFailedError(f"{name} failed: {text.strip()}")
        return text

    def _join_devices(self, devices: Sequence[LocalDeviceSpec]) -> None:
        client, tokens = self.make_client(), dict[str, str]()
        for role in {device.role for device in devices}:
            uses = sum(device.role == role for device in devices)
            tokens[role] = client.post("/edgefl/v1/tokens", {"uses": uses, "role": role})["token"]
        processes = [(device, self._start_join(device, tokens[device.role])) for device in devices]
        failures = []
        for device, process in processes:
            text = _read_output(process, f"the join of {device.name}", JOIN_TIMEOUT_S)
            if process.returncode != 0:
                failures.append(f"{device.name} could not join: {text.strip()}")
        if failures:
            raise RunFailedError(failures[0])

    def _start_join(self, device: LocalDeviceSpec, token: str) -> subprocess.Popen[bytes]:
        arguments = self._make_join_arguments(device)
        return self.start_command(arguments, device.program, variables={JOIN_TOKEN_VARIABLE: token})

    def _make_join_arguments(self, device: LocalDeviceSpec) -> list[str]:
        shards = [word for task, path in device.shards.items() for word in ("--shard", f"{task}={path}")]
        return [
            "device", "join", f"{device.host or [*self.hosts, LOOPBACK][0]}:{self.port}",
            "--name", device.name, "--role", device.role, "--state", str(self.root / device.name),
            "--threads", "1", *shards,
        ]  # fmt: skip

    def _start_process(self, name: str, program: Sequence[str], *arguments: str) -> None:
        with (self.root / f"{name}.log").open("ab") as output:
            self.processes[name] = self.start_command(arguments, program, stdout=output.fileno())

    def start_command(
        self,
        arguments: Sequence[str],
        program: Sequence[str] = EDGEFL_COMMAND,
        *,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.STDOUT,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts an `edgefl` command as this fleet's operator."""
        overrides = {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "XDG_CONFIG_HOME": str(self.root / "config"),
            "EDGEFL_CONFINE": "never",  # all of it is this machine's own, the user's code included
        }
        return subprocess.Popen(
            [*program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, **overrides, **self.environment, **(variables or {})},
            preexec_fn=exit_with_parent,  # noqa: PLW1509 one system call, no locks
        )

    def _is_answering(self) -> bool:
        return bool(self.make_client().get("/healthz").get("status") == "ok")

    def _wait_until(
        self, condition: Callable[[], bool], description: str, timeout_s: float = START_TIMEOUT_S
    ) -> None:
        end_s, timer = time.monotonic() + timeout_s, threading.Event()
        while not self._is_satisfied(condition):
            if time.monotonic() > end_s:
                raise RunFailedError(f"waited {timeout_s:.0f} s for {description}; logs are in {self.root}")
            timer.wait(POLL_S)

    def _is_satisfied(self, condition: Callable[[], bool]) -> bool:
        """Returns whether a condition holds; false while a running coordinator does not answer."""
        try:
            return condition()
        except NetworkError:
            return False
        finally:
            self._check_coordinator()

    def _check_coordinator(self) -> None:
        coordinator = self.processes.get(COORDINATOR)
        if coordinator is not None and coordinator.poll() is not None:
            raise RunFailedError(
                f"the coordinator ended with code {coordinator.returncode}: {self.read_log_tail(COORDINATOR, 3)}"
            )


def find_free_port() -> int:
    """Returns a free loopback port, reserved by the system for the next minute.

    A connection closed by its server stays in TIME_WAIT that long, and keeps the port from outgoing connections and
    from binds to any port. A bind to this very port succeeds, with SO_REUSEADDR.
    """
    with socket.create_server((LOOPBACK, 0)) as server:
        port: int = server.getsockname()[1]
        with socket.create_connection((LOOPBACK, port)) as client:
            server.accept()[0].close()
            client.recv(1)  # the other side closes first: the side that does stays in TIME_WAIT
    return port


def run(
    config: RunConfig | Mapping[str, Any] | str | Path,
    *,
    devices: int | Sequence[str | Path] = 4,
    data: str | Path | None = None,
    scheme: str | None = None,
    root: str | Path | None = None,
    allow_modules: Sequence[str] = (),
) -> RunResult:
    """Trains on a coordinator and devices that are processes of this machine, and returns the history.

    Args:
        config: a run file, its tables, or the result of `config.load_run`.
        devices: number of shards to cut the task's data set into, or existing shards, one per device. A job has an
            empty folder on each where a number is given.
        data: the folder of the data set; digits needs none.
        scheme: the partition scheme [digits: dirichlet:0.5; motionsense: natural; others: iid].
        root: folder of all files; a new folder under the system's temporary one when None.
        allow_modules: modules whose classes the run file may name, as `--allow-module`.

    Raises:
        EdgeflError: the run file is invalid, data is missing, or the run failed.
    """
    with extensions.allow_modules(allow_modules):
        run_config = make_run_config(config)
        _check_devices(run_config, count_devices(devices))
        check_run(run_config)
        folder = Path(tempfile.mkdtemp(prefix="edgefl-") if root is None else root).resolve()
        specs, test_shards = _partition_data(run_config, devices, data, scheme, folder / "shards")
        log.info("run of %s on this machine; all of it is kept in %s", run_config.run.task, folder)
        with LocalFleet(root=folder, devices=specs, test_shards=test_shards) as fleet:
            run_id = fleet.submit(run_config)
            return _build_result(fleet, fleet.wait_for_run(run_id))


def partition_devices(  # noqa: PLR0913 those of `create_shards`
    task: str,
    scheme: str,
    num_devices: int,
    out: Path,
    data: Path | None,
    seed: int,
    *,
    options: Mapping[str, Scalar] | None = None,
    test: Path | None = None,
) -> tuple[tuple[LocalDeviceSpec, ...], dict[str, str]]:
    """Cuts a central data set; returns a device for each shard, and the test shards; raises as `create_shards`."""
    paths = create_shards(task, scheme, num_devices, out, data, seed, options=options, test=test)
    devices = tuple(LocalDeviceSpec(name=path.stem, shards={task: str(path.resolve())}) for path in paths)
    return devices, {task: str((out / TEST_NAME).resolve())}


def check_run(config: RunConfig) -> None:
    """Raises errors of a run before it starts; its task must be able to train on this machine."""
    build_run(config, "check")
    if not config.job.name:
        make_task(config.run.task, config.task).learner()


def default_scheme(task: str) -> str:
    """Returns the default partition scheme of a task."""
    return DEFAULT_SCHEMES.get(task, FALLBACK_SCHEME)


def count_devices(devices: int | Sequence[str | Path]) -> int:
    """Returns the number of devices, from a number or shards.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(devices, int) and not isinstance(devices, bool):
        return devices
    if isinstance(devices, Sequence) and not isinstance(devices, str | bytes):
        return len(devices)
    raise ConfigError(f"devices must be how many there are, or a list with the shard of each, got {devices!r}")


def _check_devices(config: RunConfig, num_devices: int) -> None:
    if num_devices < max(1, config.devices.min):
        raise ConfigError(f"the run needs at least {max(1, config.devices.min)} devices, got {num_devices}")
    check_fleet_size(config, num_devices)


def _partition_data(
    config: RunConfig, devices: int | Sequence[str | Path], data: str | Path | None, scheme: str | None, out: Path
) -> tuple[tuple[LocalDeviceSpec, ...], dict[str, str]]:
    task = config.run.task
    if config.job.name and isinstance(devices, int):
        folders = [out / f"board-{number:02}" for number in range(1, devices + 1)]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        devices = folders
    if isinstance(devices, int):
        source = None if data is None else Path(data)
        scheme = scheme or default_scheme(task)
        return partition_devices(task, scheme, devices, out, source, config.run.seed, options=config.task)
    shards = [str(Path(path).resolve()) for path in devices]
    specs = (LocalDeviceSpec(name=f"device-{n:02}", shards={task: shard}) for n, shard in enumerate(shards, 1))
    return tuple(specs), {}


def _read_output(process: subprocess.Popen[bytes], what: str, timeout_s: float) -> str:
    """Returns what a command printed; ends it and raises `RunFailedError` where it takes longer."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise RunFailedError(f"{what} must end within {timeout_s:.0f} s, and did not") from None
    return output.decode(errors="replace")


def _build_result(fleet: LocalFleet, run: Json) -> RunResult:
    run_id = run["run_id"]
    rounds = fleet.list_history("rounds", run=run_id)
    return RunResult(
        run_id=run_id,
        status=run["status"],
        reason=run["reason"],
        metrics=compute_run_metrics(rounds, run["finished_at"] - run["started_at"]),
        rounds=rounds,
        updates=fleet.list_history("updates", run=run_id),
        evaluations=fleet.list_history("evaluations", run=run_id),
        model=fleet.get_model_path(run["model"]),
        root=fleet.root,
        result=_download_result(fleet, run_id) if "job" in run["config"] or has_result(run["config"]) else None,
    )


def _download_result(fleet: LocalFleet, run_id: str) -> Path:
    path = fleet.root / "result"
    with open_atomic(path) as file:
        fleet.make_client().download(f"/edgefl/v1/runs/{run_id}/result", file)
    return path
