import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

SPEC = importlib.util.spec_from_file_location("audit_packages", Path(__file__).with_name("audit_packages.py"))
assert SPEC is not None
assert SPEC.loader is not None
AUDIT: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(AUDIT)

SOUND = {"name": "click", "version": "8.1.8", "vulns": []}
FAULTY = {"name": "left", "version": "1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1"]}]}
UNKNOWN = {"name": "flwr", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("packages", "code", "told"),
    [
        ([SOUND, UNKNOWN], 0, "1 of 2 audited, 0 known vulnerabilities"),
        ([SOUND, FAULTY], 1, "left 1.0: PYSEC-1, mended in 1.1"),
        ([UNKNOWN], 0, "not audited"),
    ],
)
def test_only_a_known_vulnerability_fails_the_check(
    packages: list[Any], code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert AUDIT.verdict(json.dumps({"dependencies": packages}), "") == code
    assert told in capsys.readouterr().out


def test_advisories_that_cannot_be_reached_are_told_and_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert AUDIT.verdict("", "first\nConnectionError: no route") == 0
    assert "ConnectionError: no route" in capsys.readouterr().out
