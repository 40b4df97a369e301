"""What `import edgefl` offers, and that none of it is loaded before it is used."""

import subprocess
import sys

import pytest

import edgefl
from edgefl.compression.codec import Codec
from edgefl.core.types import Strategy, Task
from edgefl.simulation.local_run import run
from edgefl.simulation.simulated_run import simulate
from edgefl.system.api_client import CoordinatorClient


def test_every_public_name_is_the_one_of_its_module():
    offered = {"Codec": Codec, "Strategy": Strategy, "Task": Task, "run": run, "simulate": simulate}
    assert {name: getattr(edgefl, name) for name in offered} == offered
    assert edgefl.connect == CoordinatorClient.from_options
    assert {*offered, "connect", "__version__"} == set(edgefl.__all__) <= set(dir(edgefl))


def test_another_name_is_none():
    with pytest.raises(AttributeError, match="module 'edgefl' has no attribute 'stimulate'"):
        edgefl.stimulate  # noqa: B018 the access is what is tested


def test_importing_edgefl_loads_nothing_else_of_it_and_nothing_heavy():
    program = (
        "import sys; import edgefl; print(*(name for name in sys.modules if name.startswith(('edgefl', 'numpy'))))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["edgefl"]
