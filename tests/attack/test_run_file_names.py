"""Names of foreign code in run files, by every way in: nothing is imported or constructed, each is a clear error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest

from edgefl.core.safe_parsing import format_toml
from edgefl.simulation.local_fleet import COORDINATOR, LocalFleet
from edgefl.system.https_client import create_pinned_context

pytestmark = [pytest.mark.attack, pytest.mark.timeout(1800)]
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
MARK = "canary-7f3a"
NUM_NAMES = 500
BAR = "0 constructed, always a clear error"

COLLECT = """
import importlib, sys, warnings
warnings.simplefilter("ignore")
skipped = {"antigravity", "this", "idlelib", "turtle", "turtledemo", "lib2to3", "test", "__main__"}
packages = ["numpy", "click", "httpx", "sqlalchemy", "cryptography.x509", "safetensors.numpy", "paho.mqtt.client",
            "rich.console", "fastapi", "uvicorn", "pytest", "flwr.serverapp", "flwr.serverapp.strategy", "yaml"]
for module in [*sorted(sys.stdlib_module_names - skipped), *packages]:
    if module.startswith("_") or module.startswith("nt"):
        continue
    try:
        found = importlib.import_module(module)
    except Exception:
        continue
    names = [name for name in dir(found) if name[0] != "_" and callable(getattr(found, name, None))]
    for name in names[:: max(1, len(names) // 3)][:3]:
        print(f"{module}:{name}")
for name in ("subprocess:Popen", "imaplib:IMAP4_stream", "os:system", "builtins:eval", "builtins:exec",
             "runpy:run_path", "code:interact", "shutil:rmtree", "pathlib:Path", "pickle:loads"):
    print(name)
"""

HOSTILE = """
import functools, os, subprocess
from subprocess import Popen
from pathlib import Path
from edgefl import Strategy, Task
from edgefl.strategies.round_strategy import RoundStrategy
from edgefl.strategies.synchronous.fedavg import FedAvgConfig

def note(*args, **kwargs):
    open({log!r}, "a").write("call hostile\\n")

class Plain:
    def __new__(cls, **kwargs):
        note()

class Duck:
    \"\"\"Has every method that a task or a strategy needs, and says of itself that it is neither.\"\"\"
    def __init__(self, **kwargs):
        note()
    init = assign = receive = ready = aggregate = model = version = used = changed = build = combine = note
    shapes = read = learner = parse = encode = decode = start = step = finish = note
    __module__ = "edgefl.core.types"

class Meta(type):
    def __call__(cls, *args, **kwargs):
        note()

class Called(metaclass=Meta):
    pass

instance, partial, method = Duck.__new__(Duck), functools.partial(note, 1), "".join
Alias, wrapped, system = Popen, functools.wraps(note)(note), os.system
"""
HOSTILE_NAMES = (
    "note", "Plain", "Duck", "Called", "Popen", "Path", "Alias", "instance", "partial", "method", "wrapped", "system",
    "subprocess", "os", "Strategy", "Task", "RoundStrategy", "FedAvgConfig", "__builtins__", "__loader__", "missing",
    "Duck.build", "os.system", "",
)  # fmt: skip
ENTRY_POINTS = {
    "popen": "subprocess:Popen", "system": "os:system", "note": "hostile_module:note", "duck": "hostile_module:Duck",
    "array": "numpy:array", "reexported": "hostile_module:Popen",
}  # fmt: skip


def run_files(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields run files with a name in each place that takes one."""
    values = {"args": f"touch {MARK}", "command": MARK, "path": MARK, "file": MARK}
    yield "strategy", {"run": {"task": "digits"}, "strategy": {"name": name, **values}}
    yield "strategy alone", {"run": {"task": "digits"}, "strategy": {"name": name}}
    yield "task", {"run": {"task": name}, "task": values}
    yield "task alone", {"run": {"task": name}}
    yield "model", {"run": {"task": "mnist"}, "task": {"model": name}}
    yield "local algorithm", {"run": {"task": "digits"}, "strategy": {"optimizer": name}}
    yield "codec", {"run": {"task": "digits"}, "compression": {"up": name}}
    yield "codec of the model", {"run": {"task": "digits"}, "compression": {"down": f"dense|{name}"}}
    yield "codec of a layer", {"run": {"task": "digits"}, "compression": {"layers": {"*.bias": name}}}
    yield "job", {"job": {"name": name, **values}}
    yield "job alone", {"job": {"name": name}}
    yield "Flower", {"run": {"task": "digits"}, "strategy": {"name": f"flwr:{name}", **values}}


@dataclass
class Site:
    """A coordinator with a canary, and the names that are planted in run files."""

    fleet: LocalFleet
    folder: Path
    names: tuple[str, ...]

    def marks(self) -> str:
        log = self.folder / "canary.log"
        return (log.read_text() if log.exists() else "") + "".join(
            f"file {path}\n" for path in (*self.folder.rglob(f"*{MARK}*"), *ROOT.glob(f"*{MARK}*"))
        )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("names")
    collected = subprocess.run(
        [sys.executable, "-c", COLLECT], cwd=folder, capture_output=True, text=True, check=True, timeout=120
    )
    names = tuple(dict.fromkeys(line for line in collected.stdout.splitlines() if line.count(":") == 1))
    names = (*names[-60:], *names[: NUM_NAMES - 40])  # the worst of them stand at the end
    (folder / "names.txt").write_text("\n".join(names))
    planted, info = folder / "planted", folder / "planted" / "hostile-1.0.dist-info"
    info.mkdir(parents=True)
    shutil.copyfile(HERE / "name_canary.py", planted / "sitecustomize.py")
    log = str(folder / "canary.log")
    (planted / "hostile_module.py").write_text(HOSTILE.format(log=log))
    (planted / "unlisted_module.py").write_text(f"open({log!r}, 'a').write('import unlisted_module\\n')\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile\nVersion: 1.0\n")
    lines = "".join(f"{name} = {target}\n" for name, target in ENTRY_POINTS.items())
    groups = ("edgefl.strategies", "edgefl.tasks", "edgefl.codecs", "edgefl.local_steps")
    (info / "entry_points.txt").write_text("".join(f"[{group}]\n{lines}" for group in groups))
    environment = {
        "PYTHONPATH": os.pathsep.join([str(planted), str(ROOT)]),
        "CANARY_NAMES": str(folder / "names.txt"), "CANARY_LOG": log,
    }  # fmt: skip
    with LocalFleet(root=folder / "fleet", devices=[], environment=environment, broker="embedded") as fleet:
        # Allowed once on the command line, and remembered: its hostile names are refused for what they are.
        fleet.run_command("coordinator", "init", "--dir", str(fleet.directory), "--allow-module", "hostile_module")
        fleet.terminate(COORDINATOR)
        fleet.start_coordinator()
        yield Site(fleet, folder, names)


class Operator:
    """Sends requests with an operator's token over one connection."""

    def __init__(self, fleet: LocalFleet) -> None:
        self._token = fleet.make_client().token
        trust = create_pinned_context((fleet.directory / "ca.pem").read_bytes())
        self._connection = HTTPSConnection("127.0.0.1", fleet.port, context=trust, timeout=60)

    def close(self) -> None:
        self._connection.close()

    def post(self, route: str, body: Mapping[str, Any]) -> tuple[int, str]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        self._connection.request("POST", f"/edgefl/v1/{route}", json.dumps({"v": 1, **body}), headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read().decode()


def send(operator: Operator, name: str, faults: list[str], turn: int) -> int:
    """Plants a name in every place, as strategy and task by every route; returns the number of requests."""
    sent = 0
    for place, config in run_files(name):
        # Only boards know which local algorithms they have installed.
        if place == "local algorithm" and ":" not in name:
            continue
        bodies = {
            "runs": {"config": config},
            "runs/plan": {"config": config},
            "run-files": {"toml": format_toml(config)},
        }
        routes = list(bodies) if place in {"strategy", "task"} else [list(bodies)[turn % len(bodies)]]
        for route in routes:
            body = bodies[route]
            status, text = operator.post(route, body)
            sent += 1
            # A clear error is the kind's own, in one line, of a request that is at fault.
            if not 400 <= status < 500 or "Traceback" in text or not json.loads(text).get("error"):
                faults.append(f"{route}, {place} {name!r}: {status} {text[:200]}")
    return sent


def test_no_name_of_foreign_code_is_imported_or_constructed_over_https(site: Site, attack_table: Any) -> None:
    assert len(site.names) >= NUM_NAMES
    faults = list[str]()
    hostile = (f"hostile_module:{name}" for name in HOSTILE_NAMES)
    names = (*site.names, "unlisted_module:Mine", *ENTRY_POINTS, *hostile)
    with closing(Operator(site.fleet)) as operator:
        sent = sum(send(operator, name, faults, turn) for turn, name in enumerate(names))
    assert not faults, f"{len(faults)} of {sent}: {faults[:5]}"
    assert site.marks() == ""
    assert site.fleet.make_client().get("/edgefl/v1/runs")["rows"] == []
    log = (site.fleet.root / f"{COORDINATOR}.log").read_text()
    assert "Traceback" not in log
    attack_table.add(
        f"{len(site.names)} names in run files over HTTPS, {sent} requests",
        BAR,
        "0 imported, no hostile class called, all 4xx",
    )


SIMULATE = """
import contextlib, functools, importlib.metadata, io, json, sys, traceback
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)  # the same in all files, and slow
from edgefl.cli.main import main
from edgefl.tasks.datasets import central
central._load_images, central._load_digits = map(functools.cache, (central._load_images, central._load_digits))
for path in sys.stdin.read().split():
    code, said = None, io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            main(["-q", "simulate", path, "--dir", sys.argv[1], "--workers", "0"])
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            traceback.print_exc()
    print(json.dumps([path, code, said.getvalue()[-400:]]), flush=True)
"""


def test_no_name_of_foreign_code_is_imported_or_constructed_by_a_simulation(site: Site, attack_table: Any) -> None:
    files = {}
    for number, name in enumerate((*site.names, "unlisted_module:Mine", *ENTRY_POINTS)):
        for place, config in run_files(name):
            path = site.folder / "files" / f"{number}-{place.replace(' ', '-')}.toml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(format_toml(config))
            files[str(path)] = name
    environment = {**os.environ, **site.fleet.environment, "OMP_NUM_THREADS": "1", "CANARY_CALLS": "1"}
    num_processes = os.cpu_count() or 1
    parts = [list(files)[first::num_processes] for first in range(num_processes)]

    def simulate(number: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", SIMULATE, str(site.folder / f"history-{number}")],
            input="\n".join(parts[number]), cwd=site.folder, env=environment, capture_output=True, text=True,
            check=False, timeout=1700,
        )  # fmt: skip

    with ThreadPoolExecutor(num_processes) as pool:
        done = list(pool.map(simulate, range(num_processes)))
    ended = [json.loads(line) for each in done for line in each.stdout.splitlines()]
    assert len(ended) == len(files), "".join(each.stderr[-2000:] for each in done)
    # A local algorithm that is installed is looked at by the simulated boards: their run fails (41).
    codes = (
        {3, 5, 6, 7, 41} if "EDGEFL_DATA" in os.environ else {3, 4, 5, 6, 7, 41}
    )  # without MNIST no model is looked at
    wrong = [row for row in ended if row[1] not in codes or "Traceback" in row[2]]
    assert not wrong, f"{len(wrong)}: {wrong[:3]}"
    words = [sys.executable, "-m", "edgefl.cli.main", "simulate"]
    for path in list(files)[:3]:
        alone = subprocess.run(
            [*words, path], cwd=site.folder, env=environment, capture_output=True, text=True, check=False
        )
        assert (alone.returncode in {3, 5, 6, 7}, alone.stderr.count("\n")) == (True, 1), alone.stderr
    assert site.marks() == ""
    attack_table.add(f"{len(site.names)} names in {len(files)} files by edgefl simulate", BAR, "0 imported or called")
