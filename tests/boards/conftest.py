"""Emulated boards: their time lines are printed at the end, since they are what one looks for."""

from __future__ import annotations

from pathlib import Path

import pytest
from boards.time_line import TimeLine

from edgefl.tasks.datasets.central import create_shards

TIME_LINES = pytest.StashKey[list[TimeLine]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TIME_LINES] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash[TIME_LINES]:
        terminalreporter.write_line("")
        terminalreporter.write_line(line.text())


@pytest.fixture(scope="session")
def time_lines(request: pytest.FixtureRequest) -> list[TimeLine]:
    """What is printed when all tests are done."""
    return request.config.stash[TIME_LINES]


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The data of two boards, cut as `edgefl data shard` cuts it."""
    return list(create_shards("digits", "iid", 2, tmp_path_factory.mktemp("shards")))
