from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from edgefl.device.joining.join_file import JoinFile
from edgefl.device.joining.shard_access import is_hidden, shown_folder, unreadable
from edgefl.protocol import JoinToken

USER = "nobody"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can look with another user's eyes")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder in a home that is closed to others; below /tmp, which the units hide."""
    assert is_hidden(f"{tmp_path}/")
    tmp_path.chmod(0o700)
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    for name in ("a.npz", "a.json"):
        (folder / name).write_text("x")
        (folder / name).chmod(0o644)
    return folder


def test_a_folder_in_a_closed_home_is_readable_since_the_units_see_it_alone(data: Path) -> None:
    assert unreadable(str(data), USER) is None
    assert unreadable(str(data / "a.npz"), USER) is None


@pytest.mark.parametrize("closed", ["a.npz", "."])
def test_what_the_user_may_not_read_is_named(data: Path, closed: str) -> None:
    (data / closed).chmod(0o600)
    assert "nobody may not read it" in str(unreadable(str(data), USER))


def test_a_file_deep_below_counts_as_well(data: Path) -> None:
    (data / "deep").mkdir()
    (data / "deep" / "b.npz").write_text("x")
    (data / "deep" / "b.npz").chmod(0o600)
    assert unreadable(str(data), USER) == "nobody may not read it (b.npz)"


def test_a_group_lets_in(data: Path) -> None:
    for path in (data, *data.iterdir()):
        path.chmod(0o750 if path.is_dir() else 0o640)
    assert unreadable(str(data), USER) is not None
    for path in (data, *data.iterdir()):
        os.chown(path, -1, pwd.getpwnam(USER).pw_gid)
    assert unreadable(str(data), USER) is None


def test_elsewhere_the_way_there_counts(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgefl.device.joining.shard_access.HIDDEN", ())
    assert "nobody may not read it" in str(unreadable(str(data), USER))


def test_what_is_missing_and_who_is_missing_are_told(data: Path) -> None:
    assert unreadable(str(data / "none.npz"), USER) == "there is nothing"
    assert unreadable(str(data), "no-such-user") == "there is no user no-such-user"


def test_a_pipe_among_the_data_holds_up_nobody(data: Path) -> None:
    os.mkfifo(data / "pipe", 0o644)
    assert unreadable(str(data), USER) is None


def test_the_command_tells_all_and_ends_with_1(data: Path) -> None:
    (data / "a.npz").chmod(0o600)
    command = [
        sys.executable,
        "-m",
        "edgefl.device.joining.shard_access",
        USER,
        str(data / "a.npz"),
        str(data / "a.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 1
    assert json.loads(done.stdout)["unreadable"].keys() == {str(data / "a.npz")}


def test_of_a_join_file_lines_say_what_would_help(data: Path) -> None:
    (data / "a.npz").chmod(0o600)
    token = JoinToken(ca_fingerprint="a" * 64, token_id="t1", secret="s3cret", fleet="lab", addresses=("pc:8000",))
    shards = {"digits": str(data / "a.npz"), "mnist": str(data / "none"), "noop": str(data / "a.json")}
    file = data / "join.json"
    file.write_text(JoinFile(token=token.text(), shards=shards).text())
    command = [sys.executable, "-m", "edgefl.device.joining.shard_access", "--join", str(file), USER]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    first, second = done.stdout.splitlines()
    assert done.returncode == 1
    assert first.startswith(f"the data of digits, {data}/a.npz, cannot be used yet: {USER} may not read it")
    assert first.endswith(f"sudo setfacl -R -m u:{USER}:rX {data}")
    assert second.endswith("there is nothing; put it there")


@pytest.mark.parametrize(
    ("path", "folder"),
    [("/home/pi/data/d.npz", "/home/pi/data"), ("/home/pi/data", "/home/pi/data"), ("/srv/x.tar/y", "/srv/x.tar/y")],
)
def test_of_a_file_the_folder_is_shown(path: str, folder: str) -> None:
    assert shown_folder(path) == folder
