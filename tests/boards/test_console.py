from __future__ import annotations

import os
import pty
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from boards.console import Console


@pytest.fixture
def board(tmp_path: Path) -> Iterator[tuple[Console, int]]:
    ours, its = pty.openpty()
    console = Console(tmp_path / "console")
    console.follow(ours)
    yield console, its
    os.close(its)


def test_a_line_is_found_without_its_colours_and_with_its_moment(board: tuple[Console, int]) -> None:
    console, terminal = board
    before_s = time.time()
    os.write(terminal, b"[\x1b[0;32m  OK  \x1b[0m] Started \x1b[0;1;39mits unit\x1b[0m.\nnext\n")
    assert before_s <= console.wait_for(r"\] Started its unit\.", timeout_s=5) <= time.time()
    assert console.first("no such") is None
    assert console.first("Started", since=1) is None


def test_what_never_comes_fails_with_the_last_lines(board: tuple[Console, int]) -> None:
    console, terminal = board
    os.write(terminal, b"the last word\n")
    with pytest.raises(AssertionError, match=r"did not say 'no such' within 0 s:\n(.|\n)*the last word"):
        console.wait_for("no such", timeout_s=0.2)


def test_a_board_that_ended_is_not_waited_for(tmp_path: Path) -> None:
    ours, its = pty.openpty()
    console = Console(tmp_path / "console")
    console.follow(ours)
    os.close(its)
    with pytest.raises(AssertionError, match="the board ended before it said 'anything'"):
        console.wait_for("anything", timeout_s=30)
