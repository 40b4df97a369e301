"""`edgefl task new`: what it writes works as it is, and what it must not write it refuses."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
FILES = ["make_data.py", "run.toml", "test_wind.py", "wind.py"]
KINDS = ["tabular", "series", "image", "text"]


@pytest.fixture
def new(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda name, *options: run("task", "new", name, *(options or ("--kind", "tabular")))


def checked(command, folder, **environment):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment or None)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compute_constant_loss(kind, folder):
    """The loss of one answer for all: their mean with Huber's, a third each with cross-entropy."""
    if kind == "image":
        assert {file.parent.name for file in folder.rglob("*.png")} == {"cross", "disc", "square"}
        return np.log(3)
    if kind == "text":
        rows = [line for file in folder.rglob("*.csv") for line in file.read_text().splitlines()]
        assert {row.rpartition(",")[2] for row in rows} == {"heating", "network", "power"}
        return np.log(3)
    values = np.concatenate([np.loadtxt(file, delimiter=",")[:, -1] for file in folder.rglob("*.csv")])
    if kind == "series":
        assert set(values) == {0.0, 1.0, 2.0}
        return np.log(3)
    away = np.abs(values - values.mean())
    return np.where(away < 1.0, away**2 / 2, away - 0.5).mean()


@pytest.mark.extended
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_printed_next_trains_a_task_that_beats_a_constant(new, tmp_path, kind, backend):
    done = new("wind", "--kind", kind, "--backend", backend)
    lines = done.out.partition("Next:\n")[2].splitlines()
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {"PATH": paths, "HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    *before, simulate, _demo = lines
    script = [*before, f"{simulate.replace('=.', f'=.:{ROOT}')} --format json >simulated.json"]
    assert "1 passed" in checked(["sh", "-euc", "\n".join(script)], tmp_path, **own)
    last = json.loads((tmp_path / "wind" / "simulated.json").read_text())["rows"][-1]
    assert last["round"] == 15
    assert last["loss"] < 0.5 * compute_constant_loss(kind, tmp_path / "wind" / "data")


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_task_is_short_and_well_formed(new, tmp_path, kind, backend):
    done = new("wind", "--kind", kind, "--backend", backend, "--out", tmp_path / "mine")
    assert done.code == 0, done.err
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == FILES
    text = (tmp_path / "mine" / "wind.py").read_text()
    assert text.count("\n") < 40
    assert ("torch" in text) == (backend == "torch")
    checked([sys.executable, "-m", "ruff", "format", "--check", "--isolated", "."], tmp_path / "mine")
    checked([sys.executable, "-m", "ruff", "check", "--isolated", "."], tmp_path / "mine")


def test_an_empty_folder_is_filled_and_one_with_files_is_left_alone(new, tmp_path):
    (tmp_path / "wind").mkdir()
    assert new("wind").code == 0
    again = new("wind")
    assert (again.code, again.is_one_line, "wind is not empty" in again.err) == (2, True, True)
    (tmp_path / "other").write_text("precious")
    assert new("rain", "--kind", "series", "--out", tmp_path / "other").code == 2
    assert (tmp_path / "other").read_text() == "precious"


@pytest.mark.parametrize("name", ["Wind", "my-wind", "2nd", "a/b", "..", "", "class", "wind_", "ü"])
def test_a_name_that_is_no_modules_is_refused(new, tmp_path, name):
    done = new(name)
    assert (done.code, done.is_one_line, [path.name for path in tmp_path.iterdir()]) == (2, True, [])
    assert f"got {name!r}" in done.err


@pytest.mark.parametrize(
    "name", ["random", "sys", "numpy", "click", "edgefl", "flwr", "make_data", "task", "dataset"]
)
def test_a_name_that_would_hide_another_is_refused(new, tmp_path, name):
    done = new(name)
    assert (done.code, done.is_one_line, [path.name for path in tmp_path.iterdir()]) == (2, True, [])
    assert f"choose another name, such as my_{name}" in done.err


def test_a_folder_on_the_search_path_hides_nothing_if_it_is_the_one_to_fill(new, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("wind", "rain"):
        (tmp_path / name).mkdir()
    assert new("wind").code == 0
    assert "there is a module 'rain'" in new("rain", "--kind", "series", "--out", tmp_path / "elsewhere").err


@pytest.mark.parametrize("kind", ["audio", "tables"])
def test_a_kind_that_has_no_template_is_refused_with_those_that_have(new, tmp_path, kind):
    done = new("wind", "--kind", kind)
    assert (done.code, list(tmp_path.iterdir())) == (2, [])
    assert "'tabular', 'series', 'image', 'text'" in done.err


@pytest.mark.extended
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_demonstrated_by_real_processes(new, tmp_path, kind):
    demo = new("wind", "--kind", kind).out.splitlines()[-1]
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {"PATH": paths, "HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = ["python make_data.py", f"{demo.replace('=.', f'=.:{ROOT}')} --rounds 2"]  # its 20 take minutes
    told = checked(["sh", "-euc", "\n".join(script)], tmp_path / "wind", **own)
    assert re.findall(r"^ +([0-9]) +([0-9]) ", told, re.MULTILINE) == [("1", "3"), ("2", "3")]


def test_what_is_absent_here_is_named_with_the_command_that_installs_it(new, monkeypatch):
    found = importlib.util.find_spec
    hidden = {"PIL", "torch"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else found(name))
    done = new("wind", "--kind", "image", "--backend", "torch")
    assert "Pillow is not installed here; this installs it: pip install 'edgefl-fleet[pictures]'" in done.out
    assert "torch is not installed here" in done.out
    assert "is not installed" not in new("rain").out
