from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FACTS = {"size_bytes": 1_000_000, "num_turns": 2, "num_rounds": 4, "num_stock_rounds": 4}


@pytest.fixture(scope="module")
def report(harness):
    return harness("round_report")


def _turn(report, round_s, peak_mib):
    extra = dict.fromkeys(
        ("update_compute_s", "update_there_and_back_s", "update_bytes_up", "update_bytes_down"), 0.001
    )
    return report.Turn(
        round_s=round_s,
        first_round_s=1.0,
        mean_round_s=0.5,
        device_peak_bytes=peak_mib * 2**20,
        device_median_bytes=1.0,
        coordinator_peak_bytes=1.0,
        device_cpu_s=0.1,
        coordinator_cpu_s=0.1,
        other_cores=0.0,
        num_devices=2,
        requests={"/v1/fleet/pull-messages": 1.5, "/v1/runtime/push-messages": 0.5},
        extra={"broker": "Mosquitto", **extra},
    )


def _sides(report):
    return {
        "edgefl": [_turn(report, (0.03, 0.01, 0.02), 60.0), _turn(report, (0.04, 0.04, 0.04), 80.0)],
        "stock Flower": [_turn(report, (6.0, 6.0), 210.0), _turn(report, (3.0, 3.0), 210.0)],
    }


def test_the_ratio_is_that_of_the_medians_over_turns(report):
    shown = report.as_json(_sides(report), FACTS)

    assert shown["sides"]["edgefl"]["round_s"] == pytest.approx({"median": 0.03, "min": 0.02, "max": 0.04})
    assert shown["ratios"]["stock Flower"]["round_s"] == pytest.approx(4.5 / 0.03)
    assert json.loads(json.dumps(shown)) == shown


def test_what_the_coordinator_computes_in_a_round_is_shared_out_over_the_messages(report):
    found = report.as_json(_sides(report), FACTS)["sides"]["edgefl"]

    assert found["coordinator_cpu_s"]["median"] == pytest.approx(0.05)
    assert found["device_cpu_s"]["median"] == pytest.approx(0.1)


def test_requests_of_flowers_own_processes_are_not_those_of_a_device(report):
    found = report.as_json(_sides(report), FACTS)["sides"]["edgefl"]

    assert found["device_requests"]["median"] == pytest.approx(1.5)
    assert found["requests"]["median"] == pytest.approx(2.0)


def test_the_table_says_which_aims_are_missed(report):
    table = report.as_table(_sides(report), 2)

    assert "memory of a device: 3 (aim 4: missed) times less at peak" in table
    assert all(row.title in table for row in report.ROWS)


def test_the_summary_holds_each_number_of_devices_against_its_own_aim(report):
    sides = _sides(report)
    awake = {**sides, report.AWAKE: [_turn(report, (1.5, 1.5), 210.0)]}

    lines = report.as_summary({1: sides, 2: awake, 5: sides}).splitlines()[2:]

    assert [line for line in lines if "met" in line or "missed" in line] == [lines[1], lines[3]]
    assert "150 (aim 300: missed)" in lines[1]
    assert "150 (aim 150: met)" in lines[3]
    assert lines[4].split()[:8] == ["2", "the", "same,", "polls", "at", "10", "ms", "1,500"]
    assert " 50 " in lines[4]


def test_the_heading_says_on_what_it_was_measured(report):
    shown = report.heading({**report.machine(), **FACTS})

    assert "float32 model of 1,000,000 bytes; 2 turns of 4 rounds (stock Flower: 4)" in shown
    assert "flwr 1.41" in shown


def test_too_few_rounds_are_refused_in_one_line():
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "round_overhead.py"), "--rounds", "2"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert done.returncode == 2
    assert "must be a whole number of 3 or more, got '2'" in done.stderr.splitlines()[-1]


def test_seconds_of_training_that_are_none_are_refused_in_one_line():
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "round_overhead.py"), "--train-s", "nan"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert done.returncode == 2
    assert "must be a number of seconds above 0, got 'nan'" in done.stderr.splitlines()[-1]
