"""Table of attacks: what was tried, its bar and what came of it; printed at the end of `make attack`."""

from dataclasses import dataclass, field

import pytest


@dataclass
class AttackTable:
    """Rows of the table, in the order in which the attacks ended."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, attack: str, bar: str, result: str) -> None:
        self.rows.append((attack, bar, result))


TABLE = AttackTable()


@pytest.fixture(scope="session")
def attack_table():
    return TABLE


def pytest_terminal_summary(terminalreporter):
    if not TABLE.rows:
        return
    widths = [max(len(row[column]) for row in TABLE.rows) for column in range(3)]
    terminalreporter.section("attacks")
    for row in TABLE.rows:
        terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
