"""The coordinator's own certificates: when they end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from edgefl.coordinator import pki
from edgefl.coordinator.directory import init_directory
from edgefl.coordinator.joining.own_certificates import DAY_S, own_expiries


def test_the_ends_of_all_three_certificates_are_told_in_unix_seconds(tmp_path: Path) -> None:
    directory = init_directory(tmp_path / "c", hosts=["127.0.0.1"], fleet="lab", port=8000)
    ends = own_expiries(directory)
    assert ends["ca"] == pki.expires_at(directory.ca_cert.read_bytes())
    life_s = directory.certificates.server_days * DAY_S
    assert {name: end - time.time() for name, end in ends.items() if name != "ca"} == {
        "server": pytest.approx(life_s, abs=2 * DAY_S),
        "coordinator": pytest.approx(life_s, abs=2 * DAY_S),
    }
