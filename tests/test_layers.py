"""Who may import whom, third parties included; and what must stay out of a light process.

Every import counts, those inside functions and under TYPE_CHECKING too. A package that the tables below do
not know is a violation, so that a new dependency is a decision.
"""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "edgefl"

ROOMS = {
    "core": set(),
    "system": {"core"},
    "system/bundles": {"core", "system"},
    "strategies": {"core", "strategies/peer_algorithms"},
    "strategies/peer_algorithms": {"core"},
    "compression": {"core"},
    "storage": {"core", "system"},
    "history": {"core", "storage"},
    "tasks": {"core", "strategies/peer_algorithms", "system"},
    "engine": {"core"},
    "flower": {"core", "strategies", "tasks"},
    "simulation": {"core", "compression", "engine", "strategies/peer_algorithms", "tasks"},
    "device": {"compression", "core", "strategies/peer_algorithms", "system", "system/bundles", "tasks"},
    "coordinator": {
        "compression", "core", "engine", "history", "storage", "strategies", "strategies/peer_algorithms", "system",
        "system/bundles",
    },
    "provision": {"core", "device", "system"},
}  # fmt: skip
WITHOUT_CLI = set(ROOMS)
# Folders with rules of their own inside a room: importing the room is not importing them, nor the other way round.
INNER = {name for name in ROOMS if "/" in name}
# Single modules that put together what their room only defines.
ROOMS |= {
    "engine/build": {"compression", "core", "flower", "storage", "strategies", "tasks"},
    "simulation/local_fleet": {"core", "system"},
    "simulation/local_run": {"core", "engine", "tasks"},
    "simulation/history_recorder": {"coordinator", "core", "engine", "storage", "strategies"},
    "simulation/simulated_run": {
        "compression", "coordinator", "core", "engine", "storage", "strategies", "system", "tasks",
    },
}  # fmt: skip
ROOMS |= {"edgefl": {"compression", "core", "simulation", "system"}, "cli": {*WITHOUT_CLI, "cli"}}

EVERYWHERE = set(ROOMS)
# What only the named rooms may import. A dotted name is fenced more narrowly than the package it lies in.
FENCES = {
    "numpy": EVERYWHERE,
    "scipy": {"tasks"},
    "sklearn": {"tasks"},
    "torch": {"tasks", "device"},
    # A device answers with it; an export is checked with it before anybody relies on the file.
    "onnxruntime": {"device", "tasks"},
    "onnx": {"tasks"},
    "safetensors": {"storage", "tasks"},
    "sqlalchemy": {"storage"},
    "alembic": {"storage"},
    "matplotlib": {"history"},
    "paho": {"device", "coordinator"},
    "prometheus_client": {"coordinator"},
    "segno": {"coordinator", "provision"},
    "yaml": {"provision"},
    "fastapi": {"coordinator"},
    "starlette": {"coordinator"},
    "anyio": {"coordinator"},
    "pydantic": {"coordinator"},
    "uvicorn": {"coordinator"},
    # Both ends compute the fingerprint of a certificate in the same way, so core does it, and look at its dates.
    "cryptography": {"coordinator", "core", "device", "provision", "system", "system/bundles"},
    "packaging": {"device", "system/bundles"},
    "httpx": {"coordinator", "device", "cli"},
    "click": {"cli"},
    "rich": {"cli"},
    "zstandard": {"compression"},
    "flwr": set(),
    "flwr.app": {"flower"},
    "flwr.serverapp": {"flower"},
    "flwr.clientapp": {"flower"},
    "google.protobuf": set(),
    "grpc": set(),
    "pickle": set(),
    "cloudpickle": set(),
    "dill": set(),
    "marshal": set(),
    "shelve": set(),
    "random": set(),
    "time": {"coordinator", "device", "cli", "simulation/local_fleet", "simulation/simulated_run", "system"},
}
FLOWER = {"flwr", "flwr.app", "flwr.serverapp", "flwr.clientapp", "google.protobuf", "grpc"}
FLOWER_FILES = {"coordinator/flower/superlink.py", "device/flower/supernode.py"}
# Strategies written for Flower draw from the global generators and read a process-wide identity: one file hides both.
GLOBALS_FILE = "flower/isolation.py"
GLOBALS = {"random", "flwr.supercore.task_identity.TaskIdentity"}
CLOCKS = {"now", "utcnow", "today"}


def room_of(file):
    """The room of a path inside the package, such as coordinator/service.py; some modules are rooms of their own."""
    if (module := file.removesuffix(".py")) in ROOMS:
        return module
    if (folder := "/".join(file.split("/")[:2])) in INNER:
        return folder
    first = file.partition("/")[0].removesuffix(".py")
    return {"__init__": "edgefl", "__main__": "cli"}.get(first, first)


def called(node):
    """The last part of what is called."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def imported(tree, file):
    """Line and full dotted name of everything that is imported, `from a import b` as a.b."""
    here = ["edgefl", *file.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) in {"import_module", "__import__"}:
            names = (argument.value for argument in node.args if isinstance(argument, ast.Constant))
            yield from ((node.lineno, name) for name in names if isinstance(name, str))


def fault(name, file):
    """What is wrong with importing `name` in `file`, or None."""
    room, parts = room_of(file), name.split(".")
    if parts[0] == "edgefl":
        target = parts[1] if len(parts) > 1 else "edgefl"
        target = inner if (inner := "/".join(parts[1:3])) in INNER else target
        own = room if room in INNER else room.partition("/")[0]
        if target in {"__version__", "DISTRIBUTION"} or target in ROOMS[room] | {own}:
            return None
        return f"{room} may not import edgefl.{target}"
    fenced = [fence for fence in FENCES if f"{name}.".startswith(f"{fence}.")]
    if not fenced:
        return None if parts[0] in sys.stdlib_module_names else f"{parts[0]} stands in no fence of this test"
    fence = max(fenced, key=len)
    if (fence in FLOWER and file in FLOWER_FILES) or (file == GLOBALS_FILE and name in GLOBALS):
        return None
    return None if room in FENCES[fence] else f"{room} may not import {fence}"


def clock_reads(tree, file):
    if room_of(file) in FENCES["time"]:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CLOCKS:
            owner = ast.unparse(node.func.value)
            if owner.split(".")[-1] in {"datetime", "date"}:
                yield node.lineno, f"{room_of(file)} may not read the clock with {owner}.{node.func.attr}()"


@functools.cache
def parsed(source):
    return ast.parse(source)


def faults(source, file):
    """Every violation in one source text, as file:line: what."""
    tree = parsed(source)
    if room_of(file) not in ROOMS:
        return [f"edgefl/{file}: {room_of(file)} is no room of the table"]
    wrong = [(line, text) for line, name in imported(tree, file) if (text := fault(name, file))]
    return [f"edgefl/{file}:{line}: {text}" for line, text in sorted({*wrong, *clock_reads(tree, file)})]


def test_every_file_imports_only_what_its_room_may():
    files = sorted(PACKAGE.rglob("*.py"))
    found = [text for file in files for text in faults(file.read_text(), file.relative_to(PACKAGE).as_posix())]
    assert not found, "\n" + "\n".join(found)


STRATEGY, DEVICE, SERVICE = "strategies/synchronous/fedavg.py", "device/agent.py", "coordinator/service.py"


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("core/types.py", "import edgefl.system"),
        ("core/types.py", "import click"),
        ("engine/round_loop.py", "from edgefl.compression import codec"),
        (STRATEGY, "from edgefl.compression import wire"),
        ("strategies/peer_algorithms/isvr.py", "from edgefl.strategies import registry"),
        ("tasks/images.py", "from edgefl.strategies import registry"),
        ("storage/store.py", "from edgefl.system.bundles import archive"),
        (STRATEGY, "from edgefl import compression"),
        (STRATEGY, "from ...compression import wire"),
        (STRATEGY, "def f():\n    import edgefl.storage.store"),
        (STRATEGY, "if TYPE_CHECKING:\n    from edgefl.coordinator import service"),
        (STRATEGY, "import importlib\nimportlib.import_module('edgefl.storage')"),
        (STRATEGY, "import torch"),
        (STRATEGY, "from time import monotonic"),
        (STRATEGY, "import datetime\ndatetime.datetime.now()"),
        (STRATEGY, "from random import choice"),
        ("storage/store.py", "import pickle"),
        ("storage/store.py", "import time"),
        (DEVICE, "import sqlalchemy.orm"),
        (DEVICE, "from flwr.clientapp import ClientApp"),
        ("device/flower/supernode.py", "import rich.table"),
        (SERVICE, "import torch.nn as nn"),
        (SERVICE, "from flwr.server.superlink import linkstate"),
        (SERVICE, "from google.protobuf import message"),
        (SERVICE, "from edgefl.cli import main"),
        ("flower/flower.py", "from flwr.common import logger"),
        ("flower/isolation.py", "from flwr.supercore.run import Run"),
        ("cli/run.py", "import requests"),
        ("helpers/text.py", "import json"),
    ],
)
def test_a_forbidden_import_is_found(file, source):
    assert len(faults(source, file)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (STRATEGY, "import numpy as np\nfrom edgefl.core.types import Update\nfrom . import fold"),
        (STRATEGY, "from edgefl.strategies.aggregation import Fold\nfrom edgefl import core"),
        (STRATEGY, "from datetime import timedelta\nstate.now()"),
        ("coordinator/flower/superlink.py", "from flwr.server.superlink import linkstate\nimport grpc\nimport time"),
        ("device/flower/supernode.py", "from flwr.clientapp import ClientApp"),
        ("flower/flower.py", "from flwr.serverapp.strategy import FedAvg"),
        ("flower/isolation.py", "import random\nfrom flwr.supercore.task_identity import TaskIdentity"),
        (DEVICE, "from edgefl import __version__\nimport time\nimport paho.mqtt.client"),
        (DEVICE, "from edgefl.strategies.peer_algorithms import gossip_node\nimport edgefl.system.bundles.keys"),
        ("cli/run.py", "import rich.table\nfrom edgefl.storage import store\nfrom edgefl.cli import main"),
        ("__init__.py", "def run():\n    from edgefl import simulation"),
    ],
)
def test_an_allowed_import_passes(file, source):
    assert faults(source, file) == []


def within(room):
    """What each folder and each file beside them imports of the others inside one room."""
    base, uses = PACKAGE / room, {}
    for file in sorted(base.rglob("*.py")):
        place = file.relative_to(base).parts[0]
        names = {name for _, name in imported(parsed(file.read_text()), file.relative_to(PACKAGE).as_posix())}
        inside = {name.split(".")[2] for name in names if name.startswith(f"edgefl.{room}.")}
        known = {part if (base / part).is_dir() else f"{part}.py" for part in inside}
        uses.setdefault(place, set()).update(part for part in known - {place} if (base / part).exists())
    return uses


@pytest.mark.parametrize("room", ["coordinator", "device"])
def test_the_folders_of_a_room_import_each_other_one_way(room):
    left = within(room)
    while free := {place for place, uses in left.items() if not uses & left.keys()}:
        left = {place: uses for place, uses in left.items() if place not in free}
    assert not left, f"these import each other in a circle: {left}"


def modules_after(imports):
    """The top-level modules that a fresh process holds after `imports`."""
    program = f"{imports}\nimport sys\nprint(*(name for name in sys.modules if '.' not in name))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_what_a_device_imports_stays_light():
    # Flower brings some of these itself; supernode.py, which embeds it, with its transport and starters is left out.
    flower = {"device.agent", "device.flower.http_pool", "device.flower.supernode", "device.flower.work_loop"}
    rooms = {"core", "compression", "tasks", "device"}
    places = [file.relative_to(PACKAGE).with_suffix("") for file in sorted(PACKAGE.rglob("*.py"))]
    names = [".".join(place.parts).removesuffix(".__init__") for place in places if place.parts[0] in rooms]
    loaded = modules_after("\n".join(f"import edgefl.{name}" for name in names if name not in flower))
    assert not loaded & {"sqlalchemy", "alembic", "fastapi", "rich", "pydantic", "torch", "sklearn", "onnxruntime"}


def test_the_command_line_starts_without_anything_heavy():
    files = [file.relative_to(PACKAGE).with_suffix("") for file in sorted((PACKAGE / "cli").rglob("[!_]*.py"))]
    loaded = modules_after("\n".join(f"import edgefl.{'.'.join(file.parts)}" for file in files))
    heavy = "torch sqlalchemy alembic sklearn scipy flwr onnxruntime fastapi matplotlib"
    assert not loaded & set(heavy.split())
    assert not modules_after("import edgefl.cli.run") & {"rich", "sqlalchemy", "numpy", "flwr"}
