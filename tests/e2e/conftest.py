"""Whole fleets of real processes, and what the tests of all of them need."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from chaos.wire import EVERYBODY, Proxy, Weather
from prometheus_client.parser import text_string_to_metric_families

from edgefl.cli.main import main
from edgefl.core.config import RunConfig, parse_run
from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet, find_free_port
from edgefl.system.https_client import create_pinned_context, request
from edgefl.tasks.datasets.central import create_shards

HERE = Path(__file__).parent
PACKAGE_ROOT = HERE.parents[1]
GATED = "gated_task:GatedDigits"
UNDER_WAY = {"queued", "running", "stopping"}


def eventually(condition: Callable[[], Any], timeout_s: float = 60.0, what: str = "") -> Any:
    """Waits until the condition holds and returns its value; fails when it never does."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"did not happen within {timeout_s} s: {what or condition}"
        time.sleep(0.05)
    return value


@dataclass
class Gate:
    """Where the gated task waits; see `gated_task`."""

    folder: Path

    def entered(self) -> set[int]:
        """Process ids of the devices that are in the middle of an iteration, or were."""
        return {int(path.name) for path in self.folder.iterdir() if path.name.isdigit()}

    def open(self) -> None:
        (self.folder / "open").touch()

    def close(self) -> None:
        (self.folder / "open").unlink()


@dataclass
class Ended:
    """What a command left: its exit code, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """What it says beside the log: exactly one line."""
        lines = [line for line in self.err.splitlines() if line.startswith("edgefl: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[0]

    @property
    def rows(self) -> Any:
        """What `--format json` tells."""
        assert self.code == 0, self.err
        return json.loads(self.out)["rows"]


def typed(*words: object, **variables: str) -> Ended:
    """Types a command in this process: a process for each takes a second."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.syspath_prepend(HERE)  # where the gated task lies
        patch.setenv("EDGEFL_ALLOW_MODULES", "gated_task")
        for name, value in variables.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, words)))
    return Ended(int(ended.value.code or 0), out.getvalue(), err.getvalue())


class QuickFleet(LocalFleet):
    """A fleet that is set up in this process; its coordinator and devices are processes as ever."""

    def run_command(self, *arguments: str) -> str:
        ended = as_operator(self, *arguments)
        assert ended.code == 0, ended.err
        return ended.out

    def _join_devices(self, devices: Sequence[LocalDeviceSpec]) -> None:
        for device in devices:
            token = self.make_client().post("/edgefl/v1/tokens", {"role": device.role})["token"]
            ended = typed(*self._make_join_arguments(device), EDGEFL_JOIN_TOKEN=token)
            assert ended.code == 0, ended.err


def as_operator(fleet: LocalFleet, *words: object, **variables: str) -> Ended:
    """Types a command as the fleet's operator."""
    return typed(*words, **{"XDG_CONFIG_HOME": str(fleet.root / "config"), **variables})


@dataclass
class Tools:
    """What tests take from here: pytest's importlib mode lets them import nothing from their neighbours."""

    shards: Sequence[Path]
    test_shard: Path
    gated: str = GATED
    gates: list[Gate] = field(default_factory=list)
    eventually: Callable[..., Any] = eventually
    pause: Callable[[float], None] = time.sleep
    typed: Callable[..., Ended] = typed
    as_operator: Callable[..., Ended] = as_operator
    environment: Mapping[str, str] = field(
        default_factory=lambda: {
            **os.environ,
            "PYTHONPATH": f"{PACKAGE_ROOT}{os.pathsep}{HERE}",
            "EDGEFL_ALLOW_MODULES": "gated_task",
        }
    )

    def devices(self, number: int, *tasks: str, start: int = 1) -> list[LocalDeviceSpec]:
        """The first devices of the fleet, each with its shard for every one of the tasks."""
        return [
            LocalDeviceSpec(
                name=f"device-{n:02}",
                shards=dict.fromkeys(tasks or ("digits",), str(self.shards[(n - 1) % len(self.shards)])),
            )
            for n in range(start, start + number)
        ]

    def own_devices(self, root: Path, number: int, *tasks: str) -> list[LocalDeviceSpec]:
        """The same, each with a copy of its shard, which a test may damage and slow down: see `gated_task`."""
        root.mkdir(parents=True)
        devices = []
        for device in self.devices(number, *tasks):
            source = Path(next(iter(device.shards.values())))
            for suffix in (".npz", ".json"):
                shutil.copyfile(source.with_suffix(suffix), root / f"{device.name}{suffix}")
            devices.append(replace(device, shards=dict.fromkeys(device.shards, str(root / f"{device.name}.npz"))))
        return devices

    @contextlib.contextmanager
    def fleet(
        self,
        root: Path,
        devices: Sequence[LocalDeviceSpec],
        *,
        scored: bool = False,
        also_importable: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
        kind: type[LocalFleet] = QuickFleet,
        **options: Any,
    ) -> Iterator[LocalFleet]:
        """A fleet that runs, and in whose logs no traceback stands; a scored one has a test shard of the digits."""
        path = os.pathsep.join([self.environment["PYTHONPATH"], *map(str, also_importable)])
        shards = {"digits": str(self.test_shard)} if scored else {}
        own = {name: self.environment[name] for name in ("EDGEFL_ALLOW_MODULES",)} | {"PYTHONPATH": path}
        own |= environment or {}
        with kind(root=root, devices=devices, environment=own, test_shards=shards, **options) as running:
            yield running
        check_logs(root)

    @contextlib.contextmanager
    def fleet_beside_broker(
        self, root: Path, devices: Sequence[LocalDeviceSpec], *, broker: str = "auto", **options: Any
    ) -> Iterator[tuple[LocalFleet, subprocess.Popen[bytes]]]:
        """A fleet whose broker is a unit of its own, which outlives the coordinator."""
        bare, port = LocalFleet(root=root, devices=[]), find_free_port()
        root.mkdir()
        where = ("--dir", str(bare.directory), "--host", "127.0.0.1", "--port")
        assert as_operator(bare, "coordinator", "init", *where, bare.port).code == 0
        process = bare.start_command(["coordinator", "broker", *where, str(port), "--kind", broker])
        try:
            address = f"mqtts://127.0.0.1:{port}"
            with self.fleet(root, devices, broker=address, port=bare.port, **options) as fleet:
                yield fleet, process
            assert process.poll() is None
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.communicate()

    @contextlib.contextmanager
    def led_by(self, fleet: LocalFleet, device: str) -> Iterator[Weather]:
        """Leads one device to the coordinator by a wire of its own, which the test may make slow."""
        weather, port = Weather(), find_free_port()
        fleet.terminate(device)
        note = fleet.root / device / "device.json"
        before = json.loads(note.read_text())
        note.write_text(json.dumps({**before, "addresses": [f"127.0.0.1:{port}", *before["addresses"]]}))
        with Proxy(("127.0.0.1", port), ("127.0.0.1", fleet.port), {EVERYBODY: weather}):
            fleet.start_device(device)
            fleet.wait_for_devices(len(fleet.devices))
            yield weather

    def gate(self, folder: Path) -> Gate:
        """A closed gate, which opens at the end of a test with a module's fleet."""
        folder.mkdir()
        self.gates.append(Gate(folder))
        return self.gates[-1]

    def gated_run(self, gate: Gate | None = None, *, pace_s: float = 0.0, **run: Any) -> RunConfig:
        """A run of the gated task; `strategy` and `devices` are sections, other words go to the section `run`."""
        strategy = {"iterations": run.pop("iterations", 1), **run.pop("strategy", {})}
        devices = {**run.pop("devices", {}), **{name: run.pop(name) for name in ("min", "join") if name in run}}
        sections = {"compression": run.pop("compression", {})}
        task: dict[str, Any] = {"pace_s": pace_s} | ({"gate": str(gate.folder)} if gate else {})
        values = {"task": self.gated, "evaluate_on": "none", **run}
        return parse_run({"run": values, "task": task, "strategy": strategy, "devices": devices, **sections})

    def in_the_middle(self, fleet: LocalFleet, gate: Gate, *names: str) -> None:
        """Waits until all of these are in the middle of an iteration."""
        pids = {fleet.processes[name].pid for name in names}
        eventually(lambda: pids <= gate.entered(), what="all devices are in an iteration")

    @staticmethod
    def run(fleet: LocalFleet, run_id: str) -> Any:
        return fleet.make_client().get(f"/edgefl/v1/runs/{run_id}")

    def status(self, fleet: LocalFleet, run_id: str) -> Any:
        return self.run(fleet, run_id)["status"]

    def wait_rounds(self, fleet: LocalFleet, run_id: str, number: int) -> int:
        """Waits until a run has so many rounds, and returns how many it has."""
        return (
            int(eventually(lambda: max(0, self.run(fleet, run_id)["rounds"] - number + 1), what="rounds"))
            + number
            - 1
        )

    def stop(self, fleet: LocalFleet, run_id: str) -> Any:
        """Stops a run and returns its row."""
        fleet.make_client().post(f"/edgefl/v1/runs/{run_id}/stop")
        eventually(lambda: self.status(fleet, run_id) == "stopped", what="the run to be stopped")
        return self.run(fleet, run_id)

    @staticmethod
    def used(fleet: LocalFleet, run_id: str, device: str | None = None) -> list[Any]:
        rows = fleet.list_history("updates", run=run_id, device=device)
        return [row for row in rows if row["outcome"] == "used"]

    @staticmethod
    def events(fleet: LocalFleet, kind: str, **filters: Any) -> list[Any]:
        return [row for row in fleet.list_history("events", **filters) if row["kind"] == kind]

    @staticmethod
    def metrics(fleet: LocalFleet) -> dict[str, float]:
        """What a scrape gets, by name; labels without the device's are left out."""
        operator = fleet.make_client()
        address, trust = f"127.0.0.1:{fleet.port}", create_pinned_context(operator.ca_pem.encode())
        status, text = request(address, trust, "GET", "/metrics", max_bytes=10**7)
        assert status == 200
        families = text_string_to_metric_families(text.decode())
        return {
            f"{s.name}{''.join(sorted(s.labels.values()))}": s.value for family in families for s in family.samples
        }


def _is_meant(lines: Sequence[str]) -> bool:
    """Whether a traceback at the start of these lines ends with an error that a test's release raises on purpose."""
    indent = len(lines[0]) - len(lines[0].lstrip())
    error = next((line for line in lines[1:] if line[indent : indent + 1].strip()), "")
    return error.endswith(": broken on purpose")


def check_logs(root: Path) -> None:
    """Fails when a log below `root` holds a traceback, and shows it."""
    found = []
    for path in sorted(root.rglob("*.log")):
        lines = path.read_text(errors="replace").splitlines()
        starts = [number for number, line in enumerate(lines) if "Traceback" in line]
        starts = [number for number in starts if not _is_meant(lines[number:])]
        found += ["\n".join([f"{path}:", *lines[max(0, at - 1) : at + 40]]) for at in starts]
    if found:
        pytest.fail("\n\n".join(found))


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Tools:
    out = tmp_path_factory.mktemp("digits")
    paths = create_shards("digits", "dirichlet:0.5", 3, out)
    return Tools(shards=[path.resolve() for path in paths], test_shard=(out / "test.npz").resolve())


@pytest.fixture(scope="module")
def module_fleet(
    request: pytest.FixtureRequest, tools: Tools, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalFleet]:
    """The fleet of a module's tests: its function `make_fleet(tools, root)` says which."""
    with request.module.make_fleet(tools, tmp_path_factory.mktemp("fleet")) as running:
        yield running


@pytest.fixture
def fleet(module_fleet: LocalFleet, tools: Tools) -> Iterator[LocalFleet]:
    """The module's fleet with all of its devices up and none of its runs, whatever the test before left behind."""
    if module_fleet.processes["coordinator"].poll() is not None:
        module_fleet.start_coordinator()
    for device in module_fleet.devices:
        process = module_fleet.processes[device.name]
        if process.poll() is not None:
            module_fleet.start_device(device.name)
    module_fleet.wait_for_devices(len(module_fleet.devices) + bool(module_fleet.test_shards))
    yield module_fleet
    while tools.gates:
        tools.gates.pop().open()
    left = [
        row["run_id"]
        for row in module_fleet.make_client().get("/edgefl/v1/runs")["rows"]
        if row["status"] in UNDER_WAY
    ]
    for run_id in left:
        module_fleet.make_client().post(f"/edgefl/v1/runs/{run_id}/stop")
    eventually(lambda: not {tools.status(module_fleet, run_id) for run_id in left} & UNDER_WAY)
