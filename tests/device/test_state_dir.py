import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from requirements import needs

from edgefl.core.errors import ClonedError, ConfigError, NotJoinedError, StoreError
from edgefl.device.state_dir import (
    DeviceSettings,
    DeviceStateDir,
    PendingEnrolment,
    check_not_locked_out,
    get_default_state_dir,
    load_pending_enrolment,
    save_enrolment,
    save_lockout,
    save_pending_enrolment,
)
from edgefl.system.atomic_files import make_private_directory, write_atomic

DEVICE = DeviceSettings(
    device_id="pi-1",
    fleet="lab",
    role="trainer",
    ca_fingerprint="ab" * 32,
    addresses=("pi.local:8000", "10.0.0.5:8000"),
    broker_port=8883,
    shards={"digits": "/data/a.npz"},
    threads=2,
)


@pytest.fixture
def state(tmp_path):
    save_pending_enrolment(tmp_path / "d", PendingEnrolment(key_pem=b"k", name="pi-1", ca_fingerprint="ab" * 32))
    return save_enrolment(tmp_path / "d", DEVICE, key_pem=b"k", cert_pem=b"c", ca_pem=b"a")


IS_ROOT = os.geteuid() == 0
NOBODY, NOGROUP = 65534, 65533


def _owners(root):
    found = [root, *root.rglob("*")]
    return {(path.lstat().st_uid, path.lstat().st_gid) for path in found}


@needs("root")
def test_what_root_writes_into_the_folder_of_the_agent_s_user_is_that_user_s(state):
    for path in (state.root, *state.root.iterdir()):
        os.chown(path, NOBODY, NOGROUP)
    state.set_shard("digits", "/data/b.npz")
    save_pending_enrolment(state.root, PendingEnrolment(key_pem=b"k", name="pi-2", ca_fingerprint="ab" * 32))
    save_enrolment(state.root, DEVICE, key_pem=b"k2", cert_pem=b"c2", ca_pem=b"a2")
    make_private_directory(state.root / "updates")
    assert _owners(state.root) == {(NOBODY, NOGROUP)}
    assert (state.root / "device.json").stat().st_mode & 0o777 == 0o600
    state.root.chmod(0o755)  # others may enter: what is written stays root's
    write_atomic(state.root / "secret", b"s")
    assert (state.root / "secret").stat().st_uid == 0


def test_what_was_saved_is_loaded(state):
    again = DeviceStateDir.load(state.root)
    assert again.settings == DEVICE
    assert (again.key.read_bytes(), again.cert.read_bytes(), again.ca.read_bytes()) == (b"k", b"c", b"a")
    assert load_pending_enrolment(state.root) is None


def test_a_relative_directory_is_made_absolute_since_confined_processes_work_elsewhere(state, monkeypatch):
    monkeypatch.chdir(state.root.parent)
    assert DeviceStateDir.load(Path(state.root.name)).root == state.root


def test_session_numbers_grow_over_restarts(state):
    assert [state.next_session_no(), state.next_session_no()] == [1, 2]
    assert DeviceStateDir.load(state.root).next_session_no() == 3


def test_a_damaged_counter_goes_on_above_all_before(state):
    state.next_session_no()
    (state.root / "session").write_text("garbage")
    assert state.next_session_no() > 1 << 31
    assert state.next_session_no() > (1 << 31) + 1


def test_changes_are_on_disk_at_once_and_keep_what_other_processes_or_a_newer_edgefl_have_added(state):
    path = state.root / "device.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "moon": 1}))
    DeviceStateDir.load(state.root).set_shard("mnist", "/m")
    state.update(addresses=("new.lan:8000",))
    again = DeviceStateDir.load(state.root).settings
    assert again.shards == state.settings.shards == {"digits": "/data/a.npz", "mnist": "/m"}
    assert again.addresses == ("new.lan:8000",)
    state.next_session_no()
    names = {path.name for path in state.root.iterdir()}
    assert names == {"device.json", "key.pem", "cert.pem", "ca.pem", "session"}, "a temporary file stays"


def test_a_directory_without_a_join_or_with_one_that_was_cut_off_says_what_to_run(tmp_path):
    pending = PendingEnrolment(key_pem=b"k", name="pi-1", ca_fingerprint="cd" * 32)
    save_pending_enrolment(tmp_path, pending)
    (tmp_path / "key.pem").write_bytes(b"k")
    with pytest.raises(NotJoinedError, match="edgefl device join"):
        DeviceStateDir.load(tmp_path)
    assert load_pending_enrolment(tmp_path) == pending
    for text in ("", "{}", "[]", '{"key": 1, "name": "a", "ca": "b"}'):
        (tmp_path / ".pending").write_text(text)
        assert load_pending_enrolment(tmp_path) is None


def test_a_damaged_file_is_named(state):
    for text in ("", "[]", "{}", '{"v": 2}', '{"v": 1}', '{"v": 1, "device_id": 3}', "\x00"):
        (state.root / "device.json").write_text(text)
        with pytest.raises(ConfigError, match=r"device\.json"):
            DeviceStateDir.load(state.root)


@contextlib.contextmanager
def other_process(state, call):
    """A process within a block of a state directory's, such as `lock()`, until it is killed."""
    code = (
        "import sys, pathlib\nfrom edgefl.device.state_dir import DeviceStateDir\n"
        f"with DeviceStateDir.load(pathlib.Path(sys.argv[1])).{call}:\n    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(state.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        assert child.stdout.readline() == "held\n"
        yield
        child.kill()


def test_only_one_agent_runs_on_a_directory(state):
    with other_process(state, "lock()"), pytest.raises(StoreError, match="another agent"), state.lock():
        pass  # the lock goes with the process, however it ends
    left = state.root / "runs" / ".r.npz.abcd_123.tmp"
    left.parent.mkdir()
    left.write_bytes(b"PK")
    with state.lock():
        assert not left.exists(), "an agent begins without what a power cut left half written"


def test_a_label_page_is_reported_while_its_process_lasts_and_no_second_one_beside_it(state):
    with other_process(state, "share_label_page('https://192.0.2.7:8443/')"):
        assert state.read_label_page() == "https://192.0.2.7:8443/"
        with pytest.raises(StoreError, match="another label page"), state.share_label_page("https://192.0.2.7:1/"):
            pass
    assert (state.root / "label-page").exists(), "it was killed"
    assert state.read_label_page() is None
    with state.share_label_page("https://192.0.2.7:2/"):
        assert state.read_label_page() == "https://192.0.2.7:2/"
    assert state.read_label_page() is None


def test_the_default_place_follows_the_user_s_data_directory(monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert get_default_state_dir() == Path("/data/edgefl/device")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "/home/pi")
    assert get_default_state_dir() == Path("/home/pi/.local/share/edgefl/device")


def test_the_device_process_stays_light():
    code = (
        "import sys\nfrom edgefl.device import state_dir\nfrom edgefl.system import https_client\n"
        "from edgefl.device.hardware import capabilities\nfrom edgefl.device.enrolment import enroll\n"
        "heavy = {'sqlalchemy', 'fastapi', 'rich', 'pydantic', 'torch', 'click', 'uvicorn'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def kernel_boot(tmp_path):
    path = tmp_path / "boot_id"
    path.write_text("first\n")
    return path


def test_an_agent_that_was_refused_stays_away_until_its_board_is_switched_off_and_on(tmp_path, kernel_boot):
    check_not_locked_out(tmp_path, kernel_boot_id=kernel_boot)
    save_lockout(tmp_path, "another one was there before", kernel_boot_id=kernel_boot)
    for _ in range(2):
        with pytest.raises(ClonedError, match="another one was there before; on the copy run `edgefl device join`"):
            check_not_locked_out(tmp_path, kernel_boot_id=kernel_boot)
    kernel_boot.write_text("second\n")
    check_not_locked_out(tmp_path, kernel_boot_id=kernel_boot)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"reason": 1}', b"\xff"])
def test_a_damaged_note_holds_until_it_is_deleted(tmp_path, kernel_boot, content):
    (tmp_path / "lockout.json").write_bytes(content)
    with pytest.raises(ClonedError, match=r"delete .*lockout\.json"):
        check_not_locked_out(tmp_path, kernel_boot_id=kernel_boot)
    (tmp_path / "lockout.json").unlink()
    check_not_locked_out(tmp_path, kernel_boot_id=kernel_boot)


def test_a_full_card_does_not_hide_the_refusal_behind_another_error(tmp_path, kernel_boot, full_card, caplog):
    with full_card():
        save_lockout(tmp_path, "another one was there before", kernel_boot_id=kernel_boot)
    assert "cannot keep that this agent was refused" in caplog.text
