import hashlib
import json
import subprocess
import tarfile
from pathlib import Path

import pytest
from requirements import require

from edgefl.provision.payload import MANIFEST_NAME, make_payload, write_overlay
from edgefl.provision.wheels import WHEEL_PLATFORMS, parse_lock


def test_the_manifest_names_every_file_but_the_secret_one_with_its_sum() -> None:
    files = make_payload("{}", {"wheels/a.whl": b"wheel"})
    told = json.loads(bytes(files.pop(MANIFEST_NAME)))["files"]  # type: ignore[arg-type]
    assert set(told) == set(files) - {"join.json"}
    assert told["wheels/a.whl"] == {"sha256": hashlib.sha256(b"wheel").hexdigest(), "bytes": 5}
    assert {"install.sh", "firstboot.sh", "units/edgefl-device.service"} <= set(files)
    install = files["install.sh"]
    assert isinstance(install, Path)
    assert told["install.sh"]["sha256"] == hashlib.sha256(install.read_bytes()).hexdigest()


def test_a_payload_has_the_lock_of_every_kind_of_board_unless_one_was_chosen(tmp_path: Path) -> None:
    files = make_payload("{}")
    names = {f"locks/{family.machine}-{family.abi}.txt" for family in WHEEL_PLATFORMS.values()}
    assert {name for name in files if name.startswith("locks/")} == names
    for name in names:
        lock = files[name]
        assert isinstance(lock, Path)
        assert any(wheel.name == "flwr" for wheel in parse_lock(lock.read_text())), name
    assert len(names) == len(WHEEL_PLATFORMS), "two families cannot be told apart on the board"
    chosen = make_payload(
        "{}", {"requirements.txt": tmp_path / "lock"} if (tmp_path / "lock").write_text("x") else {}
    )
    assert not [name for name in chosen if name.startswith("locks/")]


PAYLOAD = make_payload('{"token": "secret"}', {"wheels/a.whl": b"wheel"})


@pytest.fixture
def overlay(tmp_path):
    write_overlay(tmp_path / "overlay.tar.gz", PAYLOAD)
    return tmp_path / "overlay.tar.gz"


def test_everything_belongs_to_root_and_the_token_to_root_alone(overlay, tmp_path):
    assert overlay.stat().st_mode & 0o777 == 0o600
    with tarfile.open(overlay) as tar:
        entries = {entry.name: entry for entry in tar}
    assert all((entry.uid, entry.gid) == (0, 0) for entry in entries.values())
    for name in ("var/lib/edgefl-card", "var/lib/edgefl-card/edgefl", "var/lib/edgefl-firstboot"):
        assert entries[name].mode == 0o700
    assert entries["var/lib/edgefl-card/edgefl/join.json"].mode == 0o600
    assert entries["etc/systemd/system/edgefl-firstboot.service"].mode == 0o644
    folders = [name for name, entry in entries.items() if entry.isdir()]
    assert all(name.startswith("var/lib/edgefl-") for name in folders), "a folder of the system is in it"
    write_overlay(tmp_path / "second.tar.gz", PAYLOAD)
    with tarfile.open(tmp_path / "second.tar.gz") as again:
        assert [entry.get_info() for entry in again] == [entry.get_info() for entry in entries.values()]


def test_unpacked_it_is_a_board_whose_first_boot_works(overlay, tmp_path):
    require("systemd")
    root = tmp_path / "rootfs"
    (root / "etc/systemd/system").mkdir(parents=True)
    subprocess.run(["tar", "-xpzf", overlay, "-C", root, "--numeric-owner"], check=True)
    enabled = subprocess.run(
        ["systemctl", "--root", root, "is-enabled", "edgefl-firstboot.service"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert enabled.stdout.strip() == "enabled"
    assert (root / "var/lib/edgefl-firstboot/source").read_text() == "/var/lib/edgefl-card/edgefl\n"
    card = root / "var/lib/edgefl-card/edgefl"
    assert {str(path.relative_to(card)) for path in card.rglob("*") if path.is_file()} == set(PAYLOAD)
    gpu = (root / "etc/systemd/system/edgefl-device.service.d/10-gpu.conf").read_text()
    assert "PrivateDevices=no" in gpu
    assert "SupplementaryGroups=video render" in gpu
