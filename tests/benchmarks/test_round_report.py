from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FACTS = {
    "size_bytes": 1_000_000, "num_devices": 2, "num_turns": 2, "num_rounds": 4, "num_stock_rounds": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def report(harness: Callable[[str], ModuleType]) -> ModuleType:
    return harness("round_report")


def _turn(report: ModuleType, round_s: tuple[float, ...], peak_mib: float) -> Any:
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
        extra={"broker": "Mosquitto", **extra},
    )


def _sides(report: ModuleType) -> dict[str, list[Any]]:
    return {
        "edgefl": [_turn(report, (0.03, 0.01, 0.02), 60.0), _turn(report, (0.04, 0.04, 0.04), 80.0)],
        "stock Flower": [_turn(report, (6.0, 6.0), 210.0), _turn(report, (3.0, 3.0), 210.0)],
    }


def test_the_ratio_is_that_of_the_medians_over_turns(report: ModuleType) -> None:
    shown = report.as_json(_sides(report), FACTS)

    assert shown["sides"]["edgefl"]["round_s"] == pytest.approx({"median": 0.03, "min": 0.02, "max": 0.04})
    assert shown["ratios"]["round_s"] == pytest.approx(4.5 / 0.03)
    assert json.loads(json.dumps(shown)) == shown


def test_the_table_says_which_aims_are_missed(report: ModuleType) -> None:
    table = report.as_table(_sides(report), {**report.machine(), **FACTS})

    assert "time: 150 (aim 150: met) times less" in table
    assert "memory of a device: 3 (aim 4: missed) times less at peak" in table
    assert all(row.title in table for row in report.ROWS)


def test_too_few_rounds_are_refused_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "round_overhead.py"), "--rounds", "2"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert done.returncode == 2
    assert "must be a whole number of 3 or more, got '2'" in done.stderr.splitlines()[-1]
