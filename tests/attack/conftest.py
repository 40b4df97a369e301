"""Table of attacks: what was tried, its bar and what came of it; printed at the end of `make attack`.

The rows travel with the reports of the tests, so that these may run in several processes (`-n 15`). With
`EDGEFL_ATTACK_TABLE` each one is also appended to that file, tab-separated, as soon as its test ends.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

TABLE = os.environ.get("EDGEFL_ATTACK_TABLE")
ROWS = []


@dataclass
class AttackTable:
    """Rows of one test."""

    properties: list[tuple[str, object]]

    def add(self, attack: str, bar: str, result: str) -> None:
        self.properties.append(("attack", (attack, bar, result)))


@pytest.fixture
def attack_table(request):
    return AttackTable(request.node.user_properties)


def pytest_runtest_logreport(report):
    if report.when != "call" or "PYTEST_XDIST_WORKER" in os.environ:
        return
    rows = [row for name, row in report.user_properties if name == "attack"]
    ROWS.extend(rows)
    if TABLE and rows:
        with Path(TABLE).open("a") as file:
            file.writelines("\t".join((*row, report.outcome)) + "\n" for row in rows)


def pytest_terminal_summary(terminalreporter):
    if not ROWS:
        return
    widths = [max(len(row[column]) for row in ROWS) for column in range(3)]
    terminalreporter.section("attacks")
    for row in ROWS:
        terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
