"""Children of the updater: whose rights they have, and what they see of its environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from requirements import needs

from edgefl.device.updates.build import SubprocessRunner

OTHER = 12345


@needs("root")
def test_checks_run_with_the_rights_of_the_devices_user_and_the_rest_as_root(tmp_path: Path) -> None:
    os.chown(tmp_path, OTHER, OTHER)
    children = SubprocessRunner(tmp_path)
    program = ["/usr/bin/id"]
    assert children.run_as_device([*program, "-u"], timeout_s=10).stdout.strip() == str(OTHER)
    assert children.run_as_device([*program, "-G"], timeout_s=10).stdout.split() == [str(OTHER)]
    assert children.run_as_root([*program, "-u"], timeout_s=10).stdout.strip() == "0"


def test_nothing_of_the_updaters_environment_reaches_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/evil")
    monkeypatch.setenv("PIP_INDEX_URL", "https://evil")
    done = SubprocessRunner(tmp_path).run_as_root(
        [sys.executable, "-c", "import os; print(sorted(os.environ))"], timeout_s=20
    )
    assert "PYTHONPATH" not in done.stdout
    assert "PIP_INDEX_URL" not in done.stdout


def test_one_that_takes_too_long_or_cannot_start_is_said_to_have_failed(tmp_path: Path) -> None:
    children = SubprocessRunner(tmp_path)
    assert "took longer than 0.2 s" in children.run_as_root(["/bin/sleep", "9"], timeout_s=0.2).get_error_line()
    assert "cannot be started" in children.run_as_root(["/no/such"], timeout_s=1).get_error_line()
    told = children.run_as_root(["/bin/sh", "-c", "echo ERROR: pip says why >&2; echo bye >&2; exit 3"], timeout_s=5)
    assert (told.returncode, told.get_error_line()) == (3, "ERROR: pip says why")
