"""What a board says of training, with and without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgefl.device.board.training_facts import training_facts

BLOCKED = Path(__file__).parents[2] / "e2e" / "without_torch"


def test_a_trainer_with_torch_trains_everything() -> None:
    assert training_facts("trainer", ["mnist", "digits"]) == {
        "backends": ["numpy", "torch"], "trains": True, "paths": {"digits": "numpy", "mnist": "torch"},
    }  # fmt: skip


def test_an_evaluator_does_not_train_and_says_why() -> None:
    told = training_facts("evaluator", ["digits"])
    assert (told["trains"], told["trains_reason"]) == (False, "its role is evaluator")


@pytest.mark.parametrize(
    ("tasks", "trains"), [(["mnist"], False), (["mnist", "digits"], True), (["digits"], True), ([], True)]
)
def test_without_torch_a_board_trains_if_one_of_its_tasks_needs_none(tasks: list[str], trains: bool) -> None:
    program = f"from edgefl.device.board.training_facts import *; print(training_facts('trainer', {tasks}))"
    path = os.pathsep.join([str(BLOCKED), *sys.path[1:], str(Path(__file__).parents[3])])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert f"'backends': ['numpy'], 'trains': {trains}" in done.stdout
    assert ("mnist needs it" in done.stdout) == (not trains)


def test_a_task_that_is_unknown_here_does_not_make_a_board_useless() -> None:
    assert training_facts("trainer", ["nowhere:Nothing"])["trains"] is True
