"""The benchmark of large fleets, with a fleet that is not large."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUM_SENDING, SENT_BYTES = 120, 4_000_000


def _measured(folder, *words, timeout_s=110):
    """Returns what the benchmark found for each size of fleet."""
    program = [sys.executable, str(ROOT / "benchmarks" / "load_generator.py")]
    done = subprocess.run(
        [*program, *words, "--processes", "2", "--broker", "auto", "--dir", str(folder), "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=timeout_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    return json.loads(done.stdout)


@pytest.mark.slow
def test_stand_ins_are_heard_at_every_beat_and_make_the_model_together_however_many_they_become(tmp_path):
    words = [
        "--devices", "5", "8", "--rounds", "3", "--rounds-up-to", "5", "--beat-s", "6", "--ramp-s", "2",
        "--ramp-to", "4",
    ]  # fmt: skip
    found, grown = _measured(tmp_path, *words, "--profile")
    assert found["is_right"]
    assert grown["is_right"]
    assert found["heartbeats_stored"] == found["heartbeats_sent"] >= 5 * 2
    assert grown["heartbeats_sent"] >= found["heartbeats_sent"] + 8
    assert (found["updates_used"], found["other_outcomes"], len(found["round_s"])) == (15, {}, 3)
    assert 0 < found["model_error"] < 1e-5, "float32 sums are not exact; the stand-ins' own sum is of float64"
    assert found["versions"] == [0, 1, 2]
    assert (grown["num_joined"], grown["rounds"], "round_s" in grown) == (8, 0, False)
    assert found["costs"]["coordinator"]["heartbeats"]["num_files"] > 10
    assert sum(found["profile_of_heartbeats"]["threads"].values()) > 0
    assert (found["lag"]["num_lost"], grown["lag"]["num_lost"]) == (0, 0)
    assert 0 < grown["lag"]["median_s"] <= grown["lag"]["p99_s"] <= grown["lag"]["max_s"] < 30
    rates = [row["beats_per_s"] for row in grown["ramp"]]
    assert [row["as_devices"] for row in grown["ramp"]] == [16, 32][: len(rates)]
    assert rates == sorted(rates)
    assert all(row["num_sent"] > 0 for row in grown["ramp"])


@pytest.mark.slow
def test_a_run_of_some_devices_is_compared_with_the_same_run_in_a_smaller_fleet(tmp_path):
    words = ["--devices", "3", "9", "--round-devices", "3", "--rounds", "2", "--beat-s", "1", "--model-bytes", "1000"]
    small, large = _measured(tmp_path, *words)
    assert small["is_right"]
    assert large["is_right"]
    assert [found["updates_used"] for found in (small, large)] == [6, 6]
    assert large["num_joined"] == 9
    assert large["round_ratio"] == pytest.approx(large["round_s"][1] / small["round_s"][1])


@pytest.mark.slow
def test_a_round_takes_no_memory_for_every_update_that_comes_in(tmp_path):
    """All send at the same time; a coordinator that holds what waits, or what it is done with, would take it all."""
    words = ["--devices", str(NUM_SENDING), "--rounds", "1", "--beat-s", "1", "--model-bytes", str(SENT_BYTES)]
    (found,) = _measured(tmp_path, *words, timeout_s=600)
    assert found["is_right"]
    before = found["costs"]["coordinator"]["heartbeats"]["peak_pss_bytes"]
    assert found["peak_rss_bytes"]["coordinator"] - before < 0.85 * NUM_SENDING * SENT_BYTES
