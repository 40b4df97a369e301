"""Who may import whom, and what must stay out of a light process.

The contracts in pyproject.toml say who may import whom, third parties included. Here stands what they cannot say.
"""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from grimp import build_graph

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "edgefl"
LINTER = Path(sys.executable).with_name("lint-imports")
CONTRACTS = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}
EVERYWHERE = {"edgefl", "numpy"}
CONSTANT_IMPORTS = {
    ("history/__init__.py", "matplotlib"),
    ("history/traces.py", "opentelemetry.proto.trace.v1.trace_pb2"),
    ("history/tracking.py", "tensorboard"),
}
"""What is imported by a constant name, which no contract sees: only to ask whether it is there."""


def lint(folder):
    command = [LINTER, "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)


def test_every_import_keeps_the_contracts():
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


FORBIDDEN = {
    "layers": ("core/types.py", "import edgefl.system.processes"),
    "circles": ("device/mqtt/session.py", "import edgefl.device.agent"),
    "system": ("strategies/registry.py", "def f():\n    import edgefl.system.processes"),
    "bundles": ("storage/store.py", "from edgefl.system.bundles import archive"),
    "compression": ("strategies/registry.py", "from ..compression import wire"),
    "storage": ("device/agent.py", "if TYPE_CHECKING:\n    from edgefl.storage import store"),
    "tasks": ("strategies/registry.py", "from edgefl.tasks import noop"),
    "strategies": ("device/agent.py", "from edgefl.strategies import registry"),
    "peer-algorithms": ("engine/round_loop.py", "from edgefl.strategies.peer_algorithms import isvr"),
    "peer-algorithms-alone": ("strategies/peer_algorithms/isvr.py", "from edgefl.strategies import registry"),
    "flower": ("coordinator/service.py", "from edgefl.flower import strategy"),
    "engine": ("device/agent.py", "import edgefl.engine.round_loop"),
    "history": ("device/agent.py", "import edgefl.history.figures"),
    "coordinator": ("device/agent.py", "import edgefl.coordinator.auth"),
    "device": ("coordinator/service.py", "import edgefl.device.agent"),
    "client": ("simulation/fleet.py", "import edgefl.client.fleet"),
    "programs": ("coordinator/service.py", "import edgefl.simulation.fleet"),
    "no-pickle": ("storage/store.py", "import pickle"),
    "time": ("strategies/registry.py", "from time import monotonic"),
    "sql": ("device/agent.py", "import sqlalchemy.orm"),
    "torch": ("coordinator/service.py", "import torch.nn as nn"),
    "make-fx": ("tasks/onnx_graph.py", "from edgefl.tasks.compiler.tracing import trace"),
    "onnx": ("coordinator/service.py", "import onnx"),
    "compiler": ("device/agent.py", "from edgefl.tasks.compiler import compilation"),
    "onnxruntime": ("coordinator/service.py", "import onnxruntime"),
    "scikit-learn": ("device/agent.py", "import sklearn.datasets"),
    "safetensors": ("device/agent.py", "import safetensors"),
    "web": ("device/agent.py", "import fastapi"),
    "openid": ("coordinator/service.py", "import authlib"),
    "metrics": ("device/agent.py", "import prometheus_client"),
    "notifications": ("coordinator/service.py", "import apprise"),
    "mqtt": ("engine/round_loop.py", "import paho.mqtt.client"),
    "keys": ("storage/store.py", "import cryptography.x509"),
    "packaging": ("coordinator/service.py", "import packaging.version"),
    "packing": ("coordinator/service.py", "import pathspec"),
    "httpx": ("system/https_client.py", "import httpx"),
    "terminal": ("device/flower/supernode.py", "import rich.table"),
    "matplotlib": ("coordinator/service.py", "import matplotlib"),
    "object-storage": ("coordinator/backup.py", "import fsspec"),
    "privacy": ("coordinator/service.py", "import dp_accounting"),
    "segno": ("device/agent.py", "import segno"),
    "yaml": ("core/config.py", "import yaml"),
    "zstandard": ("device/agent.py", "import zstandard"),
    "flower-public": ("coordinator/service.py", "from flwr.server.superlink import linkstate"),
    "ray": ("device/agent.py", "import ray"),
    "optuna": ("coordinator/service.py", "import optuna"),
    "flower-transport": ("coordinator/service.py", "from google.protobuf import message"),
}


@pytest.mark.extended
def test_every_contract_is_broken_by_an_import_that_it_forbids(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "edgefl", ignore=shutil.ignore_patterns("[!_]*.[!p]*", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, line in FORBIDDEN.values():
        with (tmp_path / "edgefl" / file).open("a") as text:
            text.write(f"\nfrom typing import TYPE_CHECKING\n{line}\n")
    (tmp_path / "edgefl" / "helpers.py").write_text("import json\n")
    shown = " ".join(lint(tmp_path).stdout.split())
    kept = [name for name, contract in CONTRACTS.items() if f"{contract['name']} BROKEN" not in shown]
    assert CONTRACTS.keys() == FORBIDDEN.keys()
    assert not kept, shown
    assert "helpers" in shown


def test_every_third_party_stands_in_a_contract():
    keys = ("protected_modules", "forbidden_modules")
    fenced = {
        name.partition(".")[0] for contract in CONTRACTS.values() for key in keys for name in contract.get(key, ())
    }
    imported = {
        name.partition(".")[0]
        for name in build_graph("edgefl", include_external_packages=True, cache_dir=None).modules
    }
    unknown = imported - fenced - EVERYWHERE - sys.stdlib_module_names
    assert not unknown, "a new dependency is a decision: name it in a contract of pyproject.toml"


def find_calls(source, names):
    """The calls of functions and methods of these names."""
    if any(f"{name}(" in source for name in names):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in names:
                yield node


def list_files():
    return [(file.relative_to(PACKAGE).as_posix(), file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))]


def test_nothing_is_imported_by_a_constant_name():
    calls = [
        (file, call) for file, text in list_files() for call in find_calls(text, {"import_module", "__import__"})
    ]
    found = {(file, call.args[0].value) for file, call in calls if isinstance(call.args[0], ast.Constant)}
    assert found == CONSTANT_IMPORTS


def read_clocks(source):
    for call in find_calls(source, {"now", "utcnow", "today"}):
        if isinstance(call.func, ast.Attribute):
            owner = ast.unparse(call.func.value)
            if owner.split(".")[-1] in {"datetime", "date"}:
                yield f"{owner}.{call.func.attr}() in line {call.lineno}"


def test_dates_are_read_from_the_clock_at_the_edges_only():
    edges = tuple(f"{name}." for name in CONTRACTS["time"]["allowed_importers"])
    inner = [(file, text) for file, text in list_files() if not f"edgefl.{file.replace('/', '.')}".startswith(edges)]
    assert len(inner) > 100
    found = [(file, read) for file, text in inner for read in read_clocks(text)]
    assert not found, "time is an argument"


def test_a_read_of_the_clock_is_found():
    assert [*read_clocks("import datetime\ndatetime.datetime.now()")]
    assert not [*read_clocks("from datetime import timedelta\nstate.now()")]


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
    # A contract keeps the compiler from all but its command, which imports it when a task is compiled.
    names = [name for name in names if name not in flower and not name.startswith("tasks.compiler.")]
    loaded = modules_after("\n".join(f"import edgefl.{name}" for name in names))
    assert not loaded & {"sqlalchemy", "alembic", "fastapi", "rich", "pydantic", "torch", "sklearn", "onnxruntime"}


def test_the_command_line_starts_without_anything_heavy():
    files = [file.relative_to(PACKAGE).with_suffix("") for file in sorted((PACKAGE / "cli").rglob("[!_]*.py"))]
    loaded = modules_after("\n".join(f"import edgefl.{'.'.join(file.parts)}" for file in files))
    heavy = "torch sqlalchemy alembic sklearn scipy flwr onnxruntime fastapi matplotlib"
    assert not loaded & set(heavy.split())
    assert not modules_after("import edgefl.cli.run") & {"rich", "sqlalchemy", "numpy", "flwr"}


def test_the_page_of_the_architecture_names_files_that_are_there():
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    named = re.findall(r"`((?:\w+/)+\w+\.(?:py|md))`", page)
    assert len(named) > 60
    assert not [name for name in named if not (ROOT / name).exists() and not (PACKAGE / name).exists()]
    way = page.partition("## The way of one update")[2].partition("That is")[0]
    files = re.findall(r"`([\w/]+\.py)`", way)
    assert len(files) == len(set(files))
    assert f"That is {len(files)} files" in page
