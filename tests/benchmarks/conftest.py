"""The modules of the benchmarks, which are no package."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def harness():
    """Returns what finds a module of the harness by its name."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(BENCHMARKS))
        yield lambda name: import_module(f"harness.{name}")
        for name in [name for name in sys.modules if name.partition(".")[0] == "harness"]:
            del sys.modules[name]
