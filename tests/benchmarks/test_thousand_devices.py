"""The benchmark of large fleets, with a fleet that is not large."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_five_stand_ins_are_heard_at_every_beat_and_make_the_model_together(tmp_path: Path) -> None:
    words = [
        "--devices", "5", "--rounds", "3", "--beat-s", "6", "--processes", "2", "--broker", "auto", "--profile",
        "--dir", str(tmp_path), "--json",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "thousand_devices.py"), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert found["is_right"]
    assert found["heartbeats_stored"] == found["heartbeats_sent"] >= 5 * 2
    assert (found["updates_used"], found["other_outcomes"], len(found["round_s"])) == (15, {}, 3)
    assert 0 < found["model_error"] < 1e-5, "float32 sums are not exact; the stand-ins' own sum is of float64"
    assert found["versions"] == [0, 1, 2]
    assert found["costs"]["coordinator"]["heartbeats"]["num_files"] > 10
    assert sum(found["profile_of_heartbeats"]["threads"].values()) > 0
    assert list(tmp_path.iterdir()) == []
