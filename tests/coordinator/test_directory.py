from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from requirements import needs

from edgefl.coordinator import pki
from edgefl.coordinator.directory import (
    add_access_tokens,
    change_addresses,
    hash_token,
    init_directory,
    load_directory,
)
from edgefl.core.errors import ConfigError, NotJoinedError, StoreError, UsageError
from edgefl.system.atomic_files import write_atomic


def test_a_directory_that_was_made_can_be_loaded_again(tmp_path: Path) -> None:
    made = init_directory(tmp_path / "c", hosts=["pi.local", "fd00::2"], fleet="lab", port=9000)
    assert load_directory(tmp_path / "c") == made
    assert made.addresses == ("pi.local:9000", "[fd00::2]:9000")


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    root = init_directory(tmp_path / "c").root
    assert root.stat().st_mode & 0o777 == 0o700
    for path in root.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_the_server_certificate_names_this_machine_and_the_given_hosts(tmp_path: Path) -> None:
    directory = init_directory(tmp_path / "c", hosts=["board.lan"])
    names = pki.get_server_hosts(directory.server_cert.read_bytes())
    assert names[0] == "board.lan"
    assert {"localhost", "127.0.0.1", "::1"} <= set(names)
    assert any(name.endswith(".local") for name in names)


def test_the_coordinator_s_mqtt_certificate_is_called_coordinator(tmp_path: Path) -> None:
    directory = init_directory(tmp_path / "c")
    assert b"BEGIN CERTIFICATE" in directory.client_cert.read_bytes()
    assert "coordinator" in pki.get_server_hosts(directory.client_cert.read_bytes())


def test_init_again_keeps_the_ca_and_adds_hosts(tmp_path: Path) -> None:
    first = init_directory(tmp_path / "c", hosts=["a.lan"], fleet="lab")
    granted, operator, _ = add_access_tokens(first)
    again = init_directory(tmp_path / "c", hosts=["b.lan"])
    assert again.compute_ca_fingerprint() == first.compute_ca_fingerprint()
    assert again.hosts == ("b.lan", "a.lan")
    assert hash_token(operator) in again.operator_sha256 == granted.operator_sha256


@pytest.mark.parametrize(
    ("changes", "message"), [({"fleet": "other"}, "belongs to fleet"), ({"port": 1}, "port 8000")]
)
def test_init_again_as_something_else_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    init_directory(tmp_path / "c", fleet="lab")
    with pytest.raises(ConfigError, match=message):
        init_directory(tmp_path / "c", **changes)  # type: ignore[arg-type]


def test_a_database_without_settings_is_not_overwritten(tmp_path: Path) -> None:
    directory = init_directory(tmp_path / "c")
    directory.database.touch()
    directory.settings.unlink()
    with pytest.raises(ConfigError, match="holds a database"):
        init_directory(tmp_path / "c")


def test_a_setup_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    directory = init_directory(tmp_path / "c")
    directory.settings.unlink()
    assert load_directory(init_directory(tmp_path / "c").root)


def test_readdress_keeps_the_ca_and_changes_the_server_certificate(tmp_path: Path) -> None:
    before = init_directory(tmp_path / "c", hosts=["a.lan"])
    after = change_addresses(tmp_path / "c", ["10.1.2.3"], port=9443)
    assert after.addresses == ("10.1.2.3:9443",)
    names = pki.get_server_hosts(after.server_cert.read_bytes())
    assert "10.1.2.3" in names
    assert "a.lan" not in names
    assert after.compute_ca_fingerprint() == before.compute_ca_fingerprint()
    assert load_directory(tmp_path / "c") == after


def test_a_directory_that_is_none_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(NotJoinedError, match="edgefl coordinator init"):
        load_directory(tmp_path)


@pytest.mark.parametrize("text", ["fleet = ", "fleet = 3", 'fleet = "x"\nhosts = []', "\x00"])
def test_damaged_settings_are_named(tmp_path: Path, text: str) -> None:
    directory = init_directory(tmp_path / "c")
    directory.settings.write_text(text)
    with pytest.raises(ConfigError, match=r"settings\.toml"):
        load_directory(directory.root)


def test_an_unknown_setting_is_refused(tmp_path: Path) -> None:
    directory = init_directory(tmp_path / "c")
    directory.settings.write_text(directory.settings.read_text() + "prot = 1\n")
    with pytest.raises(ConfigError, match="unknown key 'prot'"):
        load_directory(directory.root)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    directory = init_directory(tmp_path / "c")
    directory.ca_key.unlink()
    with pytest.raises(ConfigError, match=r"ca\.key is missing"):
        load_directory(directory.root)


def test_a_fleet_name_that_cannot_be_a_topic_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fleet name"):
        init_directory(tmp_path / "c", fleet="my fleet")
    assert not (tmp_path / "c").exists()


def test_access_tokens_are_kept_as_hashes_only(tmp_path: Path) -> None:
    directory, operator, viewer = add_access_tokens(init_directory(tmp_path / "c"))
    text = directory.settings.read_text()
    assert operator not in text
    assert viewer not in text
    assert hash_token(viewer) in text


def test_a_full_disk_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    write_atomic(path, b"old")
    # A limit on file sizes is the nearest thing to a full disk that needs no mount; only a child may have it.
    code = (
        "import resource, signal, sys, pathlib\n"
        "from edgefl.system.atomic_files import write_atomic\n"
        "from edgefl.core.errors import StoreError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        "try:\n    write_atomic(pathlib.Path(sys.argv[1]), b'x' * 100)\n"
        "except StoreError as error:\n    print(error)\n"
    )
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )
    assert "settings.toml cannot be written" in done.stdout, done.stderr
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@needs("user")
def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="cannot be made"):
        init_directory(tmp_path / "c")


def test_a_coordinator_begins_without_what_a_power_cut_left_half_written(tmp_path: Path) -> None:
    directory = init_directory(tmp_path / "c")
    left = directory.root / "runs" / ".r.npz.abcd_123.tmp"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"PK")
    with directory.lock():
        assert not left.exists()
