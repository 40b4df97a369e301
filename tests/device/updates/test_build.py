"""Children of the updater: whose rights they have, and what they see of its environment."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest
from requirements import needs
from wheel_files import make_wheel

import edgefl
from edgefl.core.errors import BundleError
from edgefl.device.updates.build import SubprocessRunner, run_smoke_test
from edgefl.device.updates.slots import Slots

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


PACK = """
import subprocess
from edgefl import Task
class Gulls(Task):
    pass
Alias = subprocess.Popen
def count():
    pass
class Plain:
    pass
"""


@pytest.mark.extended
@pytest.mark.parametrize(
    ("group", "target", "line"),
    [
        ("tasks", "Gulls", None),
        ("tasks", "Plain", "must be a class of gulls that inherits from edgefl.Task"),
        ("tasks", "Alias", "is the class Popen of subprocess"),
        ("codecs", "Plain", "must be a class of gulls that has a StageKind"),
        ("local_steps", "Gulls", "must be a class of gulls that inherits from"),
        ("strategies", "Plain", "must be a class of gulls that inherits from"),
    ],
)
def test_what_a_pack_offers_must_be_a_class_of_its_kind(
    tmp_path: Path, group: str, target: str, line: str | None
) -> None:
    points = f"[edgefl.{group}]\ngulls = gulls:{target}\n"
    wheel = make_wheel(tmp_path / "w", "gulls", "1.0", {"gulls.py": PACK}, points=points)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "packages")
    slot = tmp_path / "a" / "bin"
    slot.mkdir(parents=True)
    (tmp_path / "current").symlink_to("a")
    # Stands in for a slot's own Python: this environment, with the pack beside it.
    (slot / "python").write_text(f'#!/bin/sh\nshift\nPYTHONPATH={tmp_path / "packages"} exec {sys.executable} "$@"\n')
    (slot / "python").chmod(0o755)

    def run() -> None:
        version, runner = edgefl.__version__, SubprocessRunner(tmp_path)
        run_smoke_test(Slots(tmp_path), "a", version=version, projects=["gulls"], runner=runner)

    if line is None:
        run()
        return
    with pytest.raises(
        BundleError, match=f"what it brings cannot be used: edgefl.{group} gulls = gulls:{target}.*{line}"
    ):
        run()
