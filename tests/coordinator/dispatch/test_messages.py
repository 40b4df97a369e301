"""What a device says of its board is taken where it makes sense, and never costs the update."""

from __future__ import annotations

from typing import Any

import pytest

from edgefl.coordinator.dispatch.messages import update_metrics
from edgefl.types import UpdateMetrics

SOUND = {"iterations": 3, "num_examples": 9, "loss": 0.5, "compute_s": 1.0}


def metrics(**told: Any) -> UpdateMetrics:
    return update_metrics({**SOUND, **told}, turnaround_s=3.0, bytes_up=1, bytes_down=2)


def test_vitals_become_metrics() -> None:
    told = {"max_temperature_c": 83.2, "throttled": "under-voltage,throttled", "signal_dbm": -81, "energy_j": 7.5}
    made = metrics(vitals={**told, "link_bits_per_s": 6.5e6, "paced_s": 0.4})
    assert made.paced_s == 0.4
    assert made.max_temperature_c == 83.2
    assert made.throttled == "under-voltage,throttled"
    assert (made.signal_dbm, made.link_bits_per_s, made.energy_j) == (-81.0, 6.5e6, 7.5)


@pytest.mark.parametrize(
    "vitals",
    [
        None, 7, "hot", [], {},
        {"max_temperature_c": "hot", "throttled": 4, "signal_dbm": None, "energy_j": [1]},
        {"max_temperature_c": 9e9, "signal_dbm": 40.0, "link_bits_per_s": -1.0, "energy_j": -5.0, "paced_s": -1},
        {"max_temperature_c": float("nan"), "energy_j": float("inf")},
        {"throttled": "x" * 200}, {"throttled": "<b>bold</b>"}, {"throttled": "ok\n"},
    ],
)  # fmt: skip
def test_vitals_that_make_no_sense_are_not_known_and_cost_nothing(vitals: object) -> None:
    made = metrics(vitals=vitals)
    assert made == metrics()
    assert (made.iterations, made.throttled, made.max_temperature_c) == (3, None, None)
