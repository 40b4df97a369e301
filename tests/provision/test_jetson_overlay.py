import subprocess
import tarfile

import pytest
from requirements import require

from edgefl.provision.jetson_overlay import write_overlay
from edgefl.provision.payload import make_payload

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
