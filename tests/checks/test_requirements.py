from __future__ import annotations

import re

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
    silent = [
        f"{path.relative_to(TESTS)}: {reason}"
        for path in TESTS.rglob("*.py")
        for reason in re.findall(r"""(?:pytest\.skip\(|reason=)f?"([^"]+)\"""", path.read_text())
        if ": " not in reason
    ]
    assert silent == []
