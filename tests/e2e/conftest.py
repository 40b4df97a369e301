"""Whole fleets of real processes, and what the tests of all of them need."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from edgefl.config import RunConfig, parse_run
from edgefl.device.trust import pinned_context, request
from edgefl.local_fleet import LocalDevice, LocalFleet
from edgefl.tasks.cutting import cut_shards

HERE = Path(__file__).parent
PACKAGE_ROOT = HERE.parents[1]
GATED = "gated_task:GatedDigits"


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
        for path in self.folder.iterdir():
            path.unlink()


@dataclass
class Tools:
    """What tests take from here: pytest's importlib mode lets them import nothing from their neighbours."""

    shards: Sequence[Path]
    test_shard: Path
    gated: str = GATED
    eventually: Callable[..., Any] = eventually
    pause: Callable[[float], None] = time.sleep
    environment: Mapping[str, str] = field(
        default_factory=lambda: {**os.environ, "PYTHONPATH": f"{PACKAGE_ROOT}{os.pathsep}{HERE}"}
    )

    def devices(self, number: int, *tasks: str, start: int = 1) -> list[LocalDevice]:
        """The first devices of the fleet, each with its shard for every one of the tasks."""
        return [
            LocalDevice(
                name=f"device-{n:02}", shards=dict.fromkeys(tasks or ("digits",), str(self.shards[(n - 1) % 4]))
            )
            for n in range(start, start + number)
        ]

    def paced(self, root: Path, *paces_s: float) -> list[LocalDevice]:
        """One device for each pace: so many seconds longer for every iteration of the gated task."""
        root.mkdir()
        devices = []
        for number, pace_s in enumerate(paces_s, 1):
            name, source = f"device-{number:02}", self.shards[(number - 1) % 4]
            for suffix in (".npz", ".json"):
                shutil.copyfile(source.with_suffix(suffix), root / f"{name}{suffix}")
            (root / f"{name}.pace").write_text(str(pace_s))
            devices.append(LocalDevice(name=name, shards={self.gated: str(root / f"{name}.npz")}))
        return devices

    def fleet(
        self, root: Path, devices: Sequence[LocalDevice], *, also_importable: Sequence[Path] = (), **options: Any
    ) -> LocalFleet:
        path = os.pathsep.join([self.environment["PYTHONPATH"], *map(str, also_importable)])
        return LocalFleet(root=root, devices=devices, environment={"PYTHONPATH": path}, **options)

    @staticmethod
    def gate(folder: Path) -> Gate:
        folder.mkdir(exist_ok=True)
        gate = Gate(folder)
        gate.close()
        return gate

    def gated_run(self, gate: Gate | None = None, *, pace_s: float = 0.0, **run: Any) -> RunConfig:
        strategy = {"iterations": run.pop("iterations", 1)}
        devices = {name: run.pop(name) for name in ("min", "join") if name in run}
        task: dict[str, Any] = {"pace_s": pace_s} | ({"gate": str(gate.folder)} if gate else {})
        values = {"task": self.gated, "evaluate_on": "none", **run}
        return parse_run({"run": values, "task": task, "strategy": strategy, "devices": devices})

    @staticmethod
    def status(fleet: LocalFleet, run_id: str) -> Any:
        return fleet.operator().get(f"/edgefl/v1/runs/{run_id}")["status"]

    @staticmethod
    def used(fleet: LocalFleet, run_id: str, device: str | None = None) -> list[Any]:
        rows = fleet.history("updates", run=run_id, device=device)
        return [row for row in rows if row["outcome"] == "used"]

    @staticmethod
    def metrics(fleet: LocalFleet) -> dict[str, float]:
        """What a scrape gets, by name; labels without the device's are left out."""
        operator = fleet.operator()
        address, trust = f"127.0.0.1:{fleet.port}", pinned_context(operator.ca_pem.encode())
        status, text = request(address, trust, "GET", "/metrics", max_bytes=10**7)
        assert status == 200
        families = text_string_to_metric_families(text.decode())
        return {
            f"{s.name}{''.join(sorted(s.labels.values()))}": s.value for family in families for s in family.samples
        }

    @staticmethod
    def check_logs(root: Path) -> None:
        """Fails when a log below `root` holds a traceback, and shows it."""
        found = []
        for path in sorted(root.rglob("*.log")):
            lines = path.read_text(errors="replace").splitlines()
            starts = [number for number, line in enumerate(lines) if "Traceback" in line]
            found += ["\n".join([f"{path}:", *lines[max(0, at - 1) : at + 40]]) for at in starts]
        if found:
            pytest.fail("\n\n".join(found))


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Tools:
    out = tmp_path_factory.mktemp("digits")
    paths = cut_shards("digits", "dirichlet:0.5", 4, out)
    return Tools(shards=[path.resolve() for path in paths], test_shard=(out / "test.npz").resolve())
