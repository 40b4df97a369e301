import hashlib
import json
from pathlib import Path

from edgefl.provision.payload import MANIFEST_NAME, make_payload
from edgefl.provision.wheel_locks import WHEEL_PLATFORMS, parse_lock


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
