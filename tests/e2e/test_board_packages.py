"""A device that has what a board's lock installs, and nothing else, does all that a device does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgefl.core.config import parse_run
from edgefl.simulation.local_fleet import EDGEFL_COMMAND, LocalFleet

pytestmark = pytest.mark.extended

HERE = Path(__file__).parent / "board_packages"
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)])}


def test_it_joins_trains_and_is_looked_at(tools: Any, tmp_path: Path) -> None:
    (device,) = tools.devices(1)
    path = os.pathsep.join([str(HERE), tools.environment["PYTHONPATH"]])
    board = type(device)(
        name=device.name, shards=device.shards, program=("env", f"PYTHONPATH={path}", *EDGEFL_COMMAND)
    )
    with LocalFleet(root=tmp_path / "fleet", devices=[board]) as fleet:
        run = fleet.wait_for_run(fleet.submit(parse_run({"run": {"task": "digits", "rounds": 3}})))
        assert (run["status"], run["rounds"]) == ("finished", 3)
        state = ["--state", str(tmp_path / "fleet" / board.name)]
        for words in (["doctor", *state], ["device", "status", *state], ["device", "probe"]):
            done = subprocess.run(
                [*EDGEFL_COMMAND, *words], env=ENVIRONMENT, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["coordinator", "init", "--store", "postgresql://u@h/d"], "coordinator"),
        (["coordinator", "start"], "coordinator"),
        (["simulate", "RUN"], "coordinator"),
        (["demo"], "demo"),
    ],
)
def test_a_command_of_an_extra_names_it_in_one_line(words: list[str], extra: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[run]\ntask = "digits"\n')
    own = {**ENVIRONMENT, "XDG_DATA_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path)}
    if words[1:] == ["start"]:
        whole = {**own, "PYTHONPATH": str(ROOT)}
        subprocess.run([*EDGEFL_COMMAND, "coordinator", "init"], env=whole, check=True, capture_output=True)
    words = [str(tmp_path / "run.toml") if word == "RUN" else word for word in words]
    done = subprocess.run(
        [*EDGEFL_COMMAND, *words], env=own, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 8, done.stderr
    assert done.stderr.count("\n") == 1
    assert f"pip install 'edgefl-fleet[{extra}]' -c constraints.txt" in done.stderr


def test_what_is_hidden_here_is_hidden() -> None:
    words = [sys.executable, "-c", "import fastapi"]
    assert (
        "ModuleNotFoundError"
        in subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False).stderr
    )
