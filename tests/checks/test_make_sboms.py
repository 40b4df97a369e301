import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from edgefl.coordinator.api.dashboard import PAGE_FOLDER

CHECKS = Path(__file__).parent
LOCKS = CHECKS.parents[1] / "provisioning/locks"
pytestmark = pytest.mark.extended


def test_each_lock_has_a_valid_bill_of_materials_with_the_hash_and_licence_of_each_wheel(tmp_path: Path) -> None:
    command = [sys.executable, str(CHECKS / "make_sboms.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    locks = {path.stem: path.read_text(encoding="utf-8") for path in LOCKS.glob("*-cp*.txt")}
    assert {path.name.removesuffix(".cdx.json") for path in tmp_path.iterdir()} == set(locks)
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    for name, lock in locks.items():
        text = (tmp_path / f"{name}.cdx.json").read_text(encoding="utf-8")
        assert validator.validate_str(text) is None
        components = json.loads(text)["components"]
        (charts,) = [component for component in components if component["purl"] == "pkg:npm/uplot@1.6.32"]
        assert charts["hashes"][0]["content"] == hashlib.sha256((PAGE_FOLDER / "uplot.js").read_bytes()).hexdigest()
        components.remove(charts)
        assert len(components) == lock.count("==")
        assert all(component["hashes"][0]["content"] in lock and component["licenses"] for component in components)


@pytest.mark.parametrize(
    ("licence", "permitted"),
    [
        ("MIT", True),
        ("Apache-2.0 WITH LLVM-exception AND MIT", True),
        ("GPL-3.0-only OR BSD-3-Clause", True),
        ("GPL-3.0-only", False),
        ("MIT AND AGPL-3.0-only", False),
        ("as you like", False),
        ("", False),
    ],
)
def test_a_licence_that_binds_what_it_is_shipped_with_is_not_permitted(licence: str, permitted: bool) -> None:
    code = "import make_sboms, sys; print(make_sboms.is_permitted(sys.argv[1]))"
    command = [sys.executable, "-c", code, licence]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=CHECKS)
    assert done.stdout.strip() == str(permitted)
