import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest
from requirements import needs

from edgefl.core.errors import ConfigError, EdgeflError
from edgefl.core.protocol import JoinToken
from edgefl.device.enrolment.join_file import JoinFile, find_read_error, get_visible_folder, is_hidden

TOKEN = JoinToken(ca_fingerprint="a" * 64, token_id="t1", secret="s3cret", fleet="lab", addresses=("pc:8000",)).text()


def test_what_is_written_is_read_back():
    file = JoinFile(token=TOKEN, name="pi-01", shards={"digits": "/srv/digits.npz"}, addresses=("10.0.0.1:8000",))
    assert JoinFile.parse(file.to_text()) == file


def test_the_token_stays_out_of_the_repr():
    assert TOKEN not in repr(JoinFile(token=TOKEN))


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"token": None},
        {"token": "efl1.broken"},
        {"name": "Two Words"},
        {"role": "boss"},
        {"shards": ["a"]},
        {"addresses": ["no-port"]},
        {"surprise": 1},
    ],
)
def test_a_wrong_entry_is_refused_without_showing_the_token(change):
    value = {**json.loads(JoinFile(token=TOKEN).to_text()), **change}
    with pytest.raises(EdgeflError) as told:
        JoinFile.parse(json.dumps(value))
    assert TOKEN not in str(told.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_what_is_no_join_file_is_refused(text):
    with pytest.raises(ConfigError):
        JoinFile.parse(text)


USER = "nobody"


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


@needs("root")
def test_a_folder_in_a_closed_home_is_readable_since_the_units_see_it_alone(data):
    os.mkfifo(data / "pipe", 0o644)  # holds up nobody
    for path in (data, data / "a.npz"):
        assert find_read_error(str(path), USER) is None
    assert find_read_error(str(data / "none.npz"), USER) == "there is nothing"
    assert find_read_error(str(data), "no-such-user") == "there is no user no-such-user"


@needs("root")
@pytest.mark.parametrize("closed", ["a.npz", "deep/b.npz", "."])
def test_what_the_user_may_not_read_is_named(data, closed):
    (data / "deep").mkdir(mode=0o755)
    (data / "deep" / "b.npz").write_text("x")
    (data / closed).chmod(0o600)
    name = Path(closed).name or "."
    assert find_read_error(str(data), USER) == f"nobody may not read it ({name})"


@needs("root")
def test_a_group_lets_in(data):
    for path in (data, *data.iterdir()):
        path.chmod(0o750 if path.is_dir() else 0o640)
    assert find_read_error(str(data), USER) is not None
    for path in (data, *data.iterdir()):
        os.chown(path, -1, pwd.getpwnam(USER).pw_gid)
    assert find_read_error(str(data), USER) is None


@needs("root")
def test_elsewhere_the_way_there_counts(data, monkeypatch):
    monkeypatch.setattr("edgefl.device.enrolment.join_file.HIDDEN_PREFIXES", ())
    assert "nobody may not read it" in str(find_read_error(str(data), USER))


@needs("root")
def test_the_command_tells_all_and_of_a_join_file_what_would_help(data):
    (data / "a.npz").chmod(0o600)
    token = JoinToken(ca_fingerprint="a" * 64, token_id="t1", secret="s3cret", fleet="lab", addresses=("pc:8000",))
    shards = {"digits": str(data / "a.npz"), "mnist": str(data / "none"), "noop": str(data / "a.json")}
    file = data / "join.json"
    file.write_text(JoinFile(token=token.text(), shards=shards).to_text())
    told = []
    for words in ([USER, str(data / "a.npz"), str(data / "a.json")], ["--join", str(file), USER]):
        command = [sys.executable, "-m", "edgefl.device.enrolment.join_file", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        assert done.returncode == 1
        told.append(done.stdout)
    assert json.loads(told[0])["unreadable"].keys() == {str(data / "a.npz")}
    first, second = told[1].splitlines()
    assert first.startswith(f"the data of digits, {data}/a.npz, cannot be used yet: {USER} may not read it")
    assert first.endswith(f"sudo setfacl -R -m u:{USER}:rX {data}")
    assert second.endswith("there is nothing; put it there")


@needs("root")
@pytest.mark.parametrize(
    ("path", "folder"),
    [("/home/pi/data/d.npz", "/home/pi/data"), ("/home/pi/data", "/home/pi/data"), ("/srv/x.tar/y", "/srv/x.tar/y")],
)
def test_of_a_file_the_folder_is_shown(path, folder):
    assert get_visible_folder(path) == folder
