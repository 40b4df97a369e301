import hashlib
import json
from pathlib import Path

from edgefl.provision.payload import MANIFEST, payload


def test_the_manifest_names_every_file_but_the_secret_one_with_its_sum() -> None:
    files = payload("{}", {"wheels/a.whl": b"wheel"})
    told = json.loads(bytes(files.pop(MANIFEST)))["files"]  # type: ignore[arg-type]
    assert set(told) == set(files) - {"join.json"}
    assert told["wheels/a.whl"] == {"sha256": hashlib.sha256(b"wheel").hexdigest(), "bytes": 5}
    assert {"install.sh", "firstboot.sh", "units/edgefl-device.service"} <= set(files)
    install = files["install.sh"]
    assert isinstance(install, Path)
    assert told["install.sh"]["sha256"] == hashlib.sha256(install.read_bytes()).hexdigest()
