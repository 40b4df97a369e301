"""The updater is killed between any two steps: the board never uses half a slot, and the next start finishes."""

from __future__ import annotations

import shutil
import threading
from typing import Any

import pytest

from edgefl.device.updates import updater
from edgefl.device.updates.protocol import read_status
from edgefl.device.updates.updater import TrialTimeouts

pytestmark = pytest.mark.slow

BEFORE_THE_FLIP = ("taken", "copied", "unpacked", "built", "tested", "marked")
AFTER_THE_FLIP = ("flipped", "in trial", "restarted", "proven", "ended")
ON_THE_WAY_BACK = ("leaving", "flipped back", "restarted the old one")


def version_in_use(board: Any) -> str:
    return str(board.python("import edgefl; print(edgefl.__version__)"))


@pytest.mark.parametrize("step", [*BEFORE_THE_FLIP, *AFTER_THE_FLIP])
def test_an_update_that_was_cut_off_is_finished_at_the_next_start(board: Any, step: str) -> None:
    board.ask(board.release("1.1"))
    board.killed_at(step)
    assert version_in_use(board) == ("1.0" if step in BEFORE_THE_FLIP else "1.1")
    board.restart()  # the machine starts again, its agent first
    outcome = board.updater().run()
    assert outcome is None if step == "ended" else outcome.state == "running"
    assert board.runs() == ("b", "1.1")
    assert board.updater().run() is None


@pytest.mark.parametrize("step", [*ON_THE_WAY_BACK, "ended"])
def test_a_way_back_that_was_cut_off_is_finished_at_the_next_start(board: Any, step: str) -> None:
    board.ask(board.release("1.1", "crashes"))
    board.killed_at(step)
    board.restart()
    outcome = board.updater().run()
    assert outcome is None if step == "ended" else outcome.state == "rolled-back"
    assert version_in_use(board) == "1.0"
    board.restart()
    assert board.runs() == ("a", "1.0")
    assert board.updater().run() is None


@pytest.mark.parametrize(("step", "state"), [("built", "rejected"), ("in trial", "rolled-back")])
def test_an_update_that_takes_the_machine_down_each_time_is_given_up(board: Any, step: str, state: str) -> None:
    board.ask(board.release("1.1"))
    for _ in range(3):
        board.killed_at(step)
        board.restart()
    outcome = board.updater().run()
    assert outcome.state == state
    assert "cut off 3 times" in outcome.reason
    assert version_in_use(board) == "1.0"
    assert board.slots.get_active_slot() == "a"


def test_an_update_whose_slot_somebody_else_installed_meanwhile_is_answered_and_the_next_one_taken(
    board: Any,
) -> None:
    board.ask(board.release("1.1"))
    board.killed_at("taken")
    shutil.copytree(board.slots.path("a"), board.slots.path("b"), symlinks=True)
    board.slots.activate("b")
    board.restart()
    outcome = board.updater().run()
    assert (outcome.state, outcome.reason) == ("failed", "slot b was installed anew meanwhile, and is in use")
    assert board.slots.get_active_slot() == "b"
    assert board.install(board.release("1.2")).state == "running"


def test_a_status_that_is_damaged_costs_the_trial_and_not_the_board(board: Any) -> None:
    board.ask(board.release("1.1"))
    board.killed_at("tested")
    (board.slots.work_dir / "status.json").write_text('{"v": 1, "tri')
    outcome = board.updater().run()
    assert outcome.state == "running"
    assert board.runs() == ("b", "1.1")


def test_a_broken_release_is_left_again_after_a_power_cut_when_nothing_can_be_written(
    board: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = board.ask(board.release("1.1", "crashes"))
    board.killed_at("in trial")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(updater, "write_status", full)
        for _ in range(2):  # the second boot finds the note of before, and does not try the release again
            board.restart()
            assert board.updater().run().state == "rolled-back"
            assert board.runs() == ("a", "1.0")
    assert board.updater().run().state == "rolled-back"
    assert read_status(board.slots).outcome.id == asked
    assert board.updater().run() is None


def test_what_an_agent_said_before_a_power_cut_does_not_count_after_it(board: Any) -> None:
    """As `systemctl restart --no-block`: the updater goes on before the new agent has overwritten what was said."""
    board.ask(board.release("1.1"))
    board.killed_at("proven")
    late = threading.Timer(0.5, board.restart)
    outcome = board.updater(restart=late.start, pace=TrialTimeouts(health_s=10.0, settle_s=2.0, away_s=20.0)).run()
    late.join()
    assert (outcome.state, outcome.reason) == ("running", None)
    assert board.runs() == ("b", "1.1")
