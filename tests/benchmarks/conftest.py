"""The modules of the benchmarks, which are no package, and their command lines in this process."""

import runpy
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


@pytest.fixture
def refused(harness, monkeypatch, capsys):
    """Sees a benchmark refuse its command line with exit code 2, and returns the last line that it said."""

    def run(name, *words):
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # or it would begin again in this process's place
        monkeypatch.setattr(sys, "argv", [name, *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
        assert ended.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    return run
