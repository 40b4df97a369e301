"""The units of the updater, judged by systemd itself."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from edgefl.errors import BundleError

UNITS = Path(__file__).parents[2] / "provisioning" / "units"
SERVICE, PATH = UNITS / "edgefl-update.service", UNITS / "edgefl-update.path"

pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def test_systemd_says_nothing_against_them(tmp_path: Path) -> None:
    """This machine has no slots: the command is replaced by one that it has, all else stays."""
    text = SERVICE.read_text().replace("/opt/edgefl/current/bin/python", "/bin/true")
    (tmp_path / SERVICE.name).write_text(text)
    shutil.copy(PATH, tmp_path)
    command = ["systemd-analyze", "verify", str(tmp_path / SERVICE.name), str(tmp_path / PATH.name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_updater_has_few_rights_for_one_who_is_root() -> None:
    command = ["systemd-analyze", "security", "--offline=true", str(SERVICE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found, done.stderr
    assert float(found[1]) <= 2.4


def test_an_updater_that_is_killed_is_started_again_and_one_that_refused_a_bundle_is_not() -> None:
    keys = dict(re.findall(r"^(\w+)=(.*)$", SERVICE.read_text(), re.MULTILINE))
    assert (keys.get("Restart"), keys.get("RestartSec")) == ("on-failure", "30s")
    assert keys["SuccessExitStatus"] == str(BundleError.exit_code)


def test_the_path_watches_where_the_agent_leaves_its_requests() -> None:
    from edgefl.device.slots.inbox import FOLDER, REQUEST  # noqa: PLC0415 only here

    assert f"PathChanged=/var/lib/edgefl/{FOLDER}/{REQUEST}\n" in PATH.read_text()
