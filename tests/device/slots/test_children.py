"""Children of the updater: whose rights they have, and what they see of its environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from requirements import needs

from edgefl.device.slots.children import Children

OTHER = 12345


@needs("root")
def test_checks_run_with_the_rights_of_the_devices_user_and_the_rest_as_root(tmp_path: Path) -> None:
    os.chown(tmp_path, OTHER, OTHER)
    children = Children(tmp_path)
    program = ["/usr/bin/id"]
    assert children.as_device([*program, "-u"], within_s=10).stdout.strip() == str(OTHER)
    assert children.as_device([*program, "-G"], within_s=10).stdout.split() == [str(OTHER)]
    assert children.as_root([*program, "-u"], within_s=10).stdout.strip() == "0"


def test_nothing_of_the_updaters_environment_reaches_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/evil")
    monkeypatch.setenv("PIP_INDEX_URL", "https://evil")
    done = Children(tmp_path).as_root([sys.executable, "-c", "import os; print(sorted(os.environ))"], within_s=20)
    assert "PYTHONPATH" not in done.stdout
    assert "PIP_INDEX_URL" not in done.stdout


def test_one_that_takes_too_long_or_cannot_start_is_said_to_have_failed(tmp_path: Path) -> None:
    children = Children(tmp_path)
    assert "took longer than 0.2 s" in children.as_root(["/bin/sleep", "9"], within_s=0.2).last_line()
    assert "cannot be started" in children.as_root(["/no/such"], within_s=1).last_line()
    told = children.as_root(["/bin/sh", "-c", "echo ERROR: pip says why >&2; echo bye >&2; exit 3"], within_s=5)
    assert (told.returncode, told.last_line()) == (3, "ERROR: pip says why")
