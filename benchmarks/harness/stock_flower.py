"""The no-op app on stock Flower: `flower-superlink`, `flower-supernode` processes and `flwr run`, nothing patched.

Everything as its tutorial has it: the default isolation (an app process for every message), `--insecure`, no node
authentication, state in memory. The only departures keep it off the internet, and they favour it: no telemetry, no
check for updates, no installing of the app's dependencies.

The benchmark may also let its two polls of 3 s take 10 ms (`awake/sitecustomize.py`), and put links before devices.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from edgefl.simulation.local_fleet import LOOPBACK, find_free_port
from harness.awake.shortened_polls import POLLS
from harness.links import Link, linked
from harness.process_trees import die_with_parent

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.05
APP = Path(__file__).with_name("stock_app")
AWAKE = Path(__file__).with_name("awake")
BENCHMARKS = Path(__file__).parents[1]

CONNECTION = """[superlink]
default = "benchmark"

[superlink.benchmark]
address = "127.0.0.1:{port}"
insecure = true
"""


class StockFlowerError(Exception):
    """Stock Flower did not do what was asked; says where its logs are."""


@dataclass(slots=True, kw_only=True)
class StockFleet:
    """A SuperLink and some SuperNodes; use it as a context manager. `root` holds their logs and FLWR_HOMEs.

    `superlink` is the beginning of the SuperLink's command line; `link` is what each SuperNode is behind; `site` is a
    folder of modules for all of its processes.
    """

    root: Path
    num_devices: int
    superlink: Sequence[str]
    is_awake: bool = False
    link: Link | None = None
    site: Path | None = None
    port: int = field(default_factory=find_free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _links: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        if self.is_awake:
            _check_polls()
        try:
            self.root.mkdir(parents=True)
            self._start("coordinator", *self.superlink, "--insecure", "--port", str(self.port))
            self._wait(self._listens, "the SuperLink to listen", START_TIMEOUT_S)
            for number in range(1, self.num_devices + 1):
                self._start(
                    f"device-{number}",
                    str(scripts() / "flower-supernode"), "--insecure",
                    "--superlink", f"{LOOPBACK}:{self._near_port()}", "--port", str(find_free_port()),
                    "--node-config", f"partition-id={number - 1} num-partitions={self.num_devices}",
                )  # fmt: skip
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, *, num_rounds: int, size_bytes: int, train_s: float, timeout_s: float) -> dict[str, Any]:
        """Runs the app and returns what its ServerApp measured (`stock_app/noop_app/server.py`).

        Raises:
            StockFlowerError: it was not submitted, or is not through within `timeout_s`.
        """
        result = self.root / "result.json"
        settings = [
            f"num-rounds={num_rounds}",
            f"num-devices={self.num_devices}",
            f"size-bytes={size_bytes}",
            f"train-s={train_s:.3f}",
            f'result="{result}"',
        ]
        self.submit(APP, [word for setting in settings for word in ("--run-config", setting)])
        self._wait(result.exists, f"{num_rounds} rounds", timeout_s)
        measured: dict[str, Any] = json.loads(result.read_text())
        return measured

    def submit(self, source: Path, options: Sequence[str] = (), *, timeout_s: float = START_TIMEOUT_S) -> str:
        """Submits an app, and returns what `flwr run` says; with `--stream`, at the app's end.

        Raises:
            StockFlowerError: the app was not submitted, or is not through within `timeout_s`.
        """
        app, home = self.root / "app", self.root / "home-user"
        shutil.copytree(source, app, ignore=shutil.ignore_patterns("__pycache__"))
        home.mkdir()
        (home / "config.toml").write_text(CONNECTION.format(port=self.port))
        words = [str(scripts() / "flwr"), "run", str(app), "benchmark", *options]
        try:
            done = subprocess.run(
                words, env=self._environment(home), capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise StockFlowerError(f"`flwr run` took more than {timeout_s:.0f} s") from None
        if done.returncode != 0:
            raise StockFlowerError(f"`flwr run` failed: {done.stdout.strip()} {done.stderr.strip()}")
        return done.stdout + done.stderr

    def stop(self) -> None:
        """Asks SuperNodes and SuperLink to end; app processes that outlive them are `end_descendants`' business."""
        for process in reversed(self.processes.values()):
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._links.close()

    def _near_port(self) -> int:
        """Returns where the next SuperNode finds the SuperLink: at the near end of its link, if it has one."""
        if self.link is None:
            return self.port
        port = find_free_port()
        self._links.enter_context(linked(self.link, [((LOOPBACK, port), (LOOPBACK, self.port))]))
        return port

    def _start(self, name: str, *arguments: str) -> None:
        home = self.root / f"home-{name}"
        home.mkdir()
        with (self.root / f"{name}.log").open("ab") as output:
            self.processes[name] = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(home),
                preexec_fn=die_with_parent,  # noqa: PLW1509 one system call, no locks
            )

    def _environment(self, home: Path) -> dict[str, str]:
        """Returns the environment of one machine of the fleet; Flower finds its own programs on PATH."""
        first = [str(AWAKE)] if self.is_awake else [str(self.site)] if self.site else []
        paths = [*first, str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]
        return {
            **os.environ,
            "PATH": f"{scripts()}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _wait(self, is_true: Any, what: str, timeout_s: float) -> None:
        until_s, pause = time.monotonic() + timeout_s, threading.Event()
        while not is_true():
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise StockFlowerError(f"{name} ended with code {process.returncode}: {self._log_tail(name)}")
            if time.monotonic() > until_s:
                raise StockFlowerError(f"waited {timeout_s:.0f} s for {what}: {self._log_tail('coordinator')}")
            pause.wait(POLL_S)

    def _log_tail(self, name: str, num_lines: int = 5) -> str:
        return "\n".join((self.root / f"{name}.log").read_text(errors="replace").splitlines()[-num_lines:])


def scripts() -> Path:
    """Returns the folder of the console scripts of this environment."""
    return Path(sysconfig.get_path("scripts"))


def _check_polls() -> None:
    """Checks that the polls that are to be shortened are where they were; raises `StockFlowerError`."""
    flower = find_spec("flwr")
    assert flower is not None
    assert flower.origin is not None
    for module, seconds in POLLS.items():
        path = Path(flower.origin).parents[1] / f"{module.replace('.', '/')}.py"
        if not path.is_file() or f"time.sleep({seconds})" not in path.read_text():
            raise StockFlowerError(f"{module} does not sleep for {seconds} s as Flower 1.41 does; see {AWAKE}")
