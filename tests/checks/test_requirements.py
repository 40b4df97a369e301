from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import requirements
from requirements import PARTS, TESTS, Part, missing, table


def test_what_is_missing_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARTS, "no-such", Part(("sh", "no-such-program"), ("no-such-package",)))
    assert missing("no-such") == "no-such is not installed: sudo apt-get install no-such-package"
    assert "sudo apt-get install" in table()
    assert re.search(r"^no-such +ABSENT", table(), re.MULTILINE)
    monkeypatch.setattr(requirements.os, "geteuid", lambda: 1000)
    assert missing("root") == "needs root: sudo make test-all"
    assert missing("user") is None


def test_every_part_is_needed_by_some_test() -> None:
    used = {line.split()[0] for line in table().splitlines() if re.search(r"\(\d+\)", line)}
    assert set(PARTS) <= used


def test_every_reason_for_which_a_test_is_skipped_says_what_would_run_it() -> None:
    """Each reason has a colon, and behind it what to do."""
    found = {f"{path.relative_to(TESTS)}: {reason}" for path in TESTS.rglob("*.py") for reason in _reasons(path)}
    assert len(found) > 20
    assert [reason for reason in sorted(found) if ": " not in reason.partition(": ")[2]] == []


def _reasons(path: Path) -> Iterator[str]:
    """The literal parts of every reason that stands in a call of pytest."""
    for node in ast.walk(ast.parse(path.read_text())):
        name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        if name in {"skip", "skipif", "importorskip"}:
            given = [word.value for word in node.keywords if word.arg == "reason"] or node.args[:1]
            literal = [part.value for part in ast.walk(given[0]) if isinstance(part, ast.Constant)]
            if isinstance(given[0], ast.Constant | ast.JoinedStr):
                yield "".join(str(part) for part in literal)
