"""What `import edgefl` offers, and that none of it is loaded before it is used."""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import edgefl
from edgefl.client.fleet import connect
from edgefl.compression.codec import Codec
from edgefl.core.metrics import Metric
from edgefl.core.types import Strategy, Task
from edgefl.simulation.local_fleet import run
from edgefl.simulation.simulated_run import simulate
from edgefl.tasks.job import Job, JobContext


def test_every_public_name_is_the_one_of_its_module():
    offered = {
        "Codec": Codec, "Job": Job, "JobContext": JobContext, "Metric": Metric, "Strategy": Strategy, "Task": Task,
        "connect": connect, "run": run, "simulate": simulate,
    }  # fmt: skip
    assert {name: getattr(edgefl, name) for name in offered} == offered
    assert {*offered, "__version__"} == set(edgefl.__all__) <= set(dir(edgefl))


def list_public_objects():
    """What `edgefl` exports, and what the reference of the Python API has besides."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "tools"))
    try:
        paths = [
            path.rpartition(".") for listed in importlib.import_module("api_pages").API.values() for path in listed
        ]
    finally:
        sys.path.pop(0)
    offered = [getattr(edgefl, name) for name in edgefl.__all__ if name != "__version__"]
    return [*offered, *(getattr(importlib.import_module(module), name) for module, _, name in paths)]


def list_members(public):
    kinds = (property, classmethod, staticmethod, type(list_public_objects))
    return [name for name, value in vars(public).items() if name[0] != "_" and isinstance(value, kinds)]


def test_every_public_name_has_a_docstring_and_so_has_every_member():
    public = list_public_objects()
    classes = [each for each in public if inspect.isclass(each)]
    # A member is documented where it stands, in the first lines of its class, or in the protocol that has it.
    documented = {name for each in classes for name in list_members(each) if inspect.getdoc(getattr(each, name))}
    documented |= {
        name for each in classes for name in list_members(each) if f"`{name}`" in (inspect.getdoc(each) or "")
    }
    bare = [each for each in public if not inspect.getdoc(each)]
    bare += [(each, name) for each in classes for name in list_members(each) if name not in documented]
    assert not bare


def test_another_name_is_none():
    with pytest.raises(AttributeError, match="module 'edgefl' has no attribute 'stimulate'"):
        edgefl.stimulate  # noqa: B018 the access is what is tested


def test_importing_edgefl_loads_nothing_else_of_it_and_nothing_heavy():
    program = (
        "import sys; import edgefl; print(*(name for name in sys.modules if name.startswith(('edgefl', 'numpy'))))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["edgefl"]
