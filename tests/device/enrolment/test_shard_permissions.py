import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest
from requirements import needs

from edgefl.core.protocol import JoinToken
from edgefl.device.enrolment.join_file import JoinFile
from edgefl.device.enrolment.shard_permissions import find_read_error, get_visible_folder, is_hidden

USER = "nobody"

pytestmark = needs("root")


@pytest.fixture
def data(tmp_path):
    """A folder in a home that is closed to others; below /tmp, which the units hide."""
    assert is_hidden(f"{tmp_path}/")
    tmp_path.chmod(0o700)
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    for name in ("a.npz", "a.json"):
        (folder / name).write_text("x")
        (folder / name).chmod(0o644)
    return folder


def test_a_folder_in_a_closed_home_is_readable_since_the_units_see_it_alone(data):
    os.mkfifo(data / "pipe", 0o644)  # holds up nobody
    for path in (data, data / "a.npz"):
        assert find_read_error(str(path), USER) is None
    assert find_read_error(str(data / "none.npz"), USER) == "there is nothing"
    assert find_read_error(str(data), "no-such-user") == "there is no user no-such-user"


@pytest.mark.parametrize("closed", ["a.npz", "deep/b.npz", "."])
def test_what_the_user_may_not_read_is_named(data, closed):
    (data / "deep").mkdir(mode=0o755)
    (data / "deep" / "b.npz").write_text("x")
    (data / closed).chmod(0o600)
    name = Path(closed).name or "."
    assert find_read_error(str(data), USER) == f"nobody may not read it ({name})"


def test_a_group_lets_in(data):
    for path in (data, *data.iterdir()):
        path.chmod(0o750 if path.is_dir() else 0o640)
    assert find_read_error(str(data), USER) is not None
    for path in (data, *data.iterdir()):
        os.chown(path, -1, pwd.getpwnam(USER).pw_gid)
    assert find_read_error(str(data), USER) is None


def test_elsewhere_the_way_there_counts(data, monkeypatch):
    monkeypatch.setattr("edgefl.device.enrolment.shard_permissions.HIDDEN_PREFIXES", ())
    assert "nobody may not read it" in str(find_read_error(str(data), USER))


def test_the_command_tells_all_and_of_a_join_file_what_would_help(data):
    (data / "a.npz").chmod(0o600)
    token = JoinToken(ca_fingerprint="a" * 64, token_id="t1", secret="s3cret", fleet="lab", addresses=("pc:8000",))
    shards = {"digits": str(data / "a.npz"), "mnist": str(data / "none"), "noop": str(data / "a.json")}
    file = data / "join.json"
    file.write_text(JoinFile(token=token.text(), shards=shards).to_text())
    told = []
    for words in ([USER, str(data / "a.npz"), str(data / "a.json")], ["--join", str(file), USER]):
        command = [sys.executable, "-m", "edgefl.device.enrolment.shard_permissions", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        assert done.returncode == 1
        told.append(done.stdout)
    assert json.loads(told[0])["unreadable"].keys() == {str(data / "a.npz")}
    first, second = told[1].splitlines()
    assert first.startswith(f"the data of digits, {data}/a.npz, cannot be used yet: {USER} may not read it")
    assert first.endswith(f"sudo setfacl -R -m u:{USER}:rX {data}")
    assert second.endswith("there is nothing; put it there")


@pytest.mark.parametrize(
    ("path", "folder"),
    [("/home/pi/data/d.npz", "/home/pi/data"), ("/home/pi/data", "/home/pi/data"), ("/srv/x.tar/y", "/srv/x.tar/y")],
)
def test_of_a_file_the_folder_is_shown(path, folder):
    assert get_visible_folder(path) == folder
