"""Boards have no clock battery: two that are two days off, to either side, join and train."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from edgefl.config import parse_run
from edgefl.local_fleet import LocalFleet

DAYS_OFF_S = {"device-01": 2 * 86_400.0, "device-02": -2 * 86_400.0}
# What a wrong clock is to a Python program; nothing of ours is changed.
_PROGRAM = """
import datetime, sys, time
real_time, real_time_ns, off_s = time.time, time.time_ns, float(sys.argv.pop(1))
time.time = lambda: real_time() + off_s
time.time_ns = lambda: real_time_ns() + int(off_s * 1e9)
class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().fromtimestamp(time.time(), tz)
datetime.datetime = Shifted
from edgefl.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def fleet(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    root = tmp_path_factory.mktemp("clocks")
    devices = [
        replace(device, program=(sys.executable, "-c", _PROGRAM, str(DAYS_OFF_S[device.name])))
        for device in tools.devices(2)
    ]
    with tools.fleet(root, devices) as running:
        yield running
    tools.check_logs(root)


def test_devices_whose_clocks_are_days_off_train(fleet: LocalFleet) -> None:
    run_id = fleet.submit(parse_run({"run": {"task": "digits", "rounds": 3}, "devices": {"min": 2}}))
    assert fleet.wait_run(run_id)["status"] == "finished"
    assert [row["num_updates"] for row in fleet.history("rounds", run=run_id)] == [2, 2, 2]
    for row in fleet.history("updates", run=run_id):
        assert 0 < row["send_s"] < 60, "nothing was measured across two clocks"


def test_their_skew_is_reported(fleet: LocalFleet, tools: Any) -> None:
    for name, off_s in DAYS_OFF_S.items():
        told = tools.eventually(
            lambda name=name: [
                row["clock_skew_s"] for row in fleet.history("heartbeats", device=name) if row["clock_skew_s"]
            ]
        )
        assert told[-1] == pytest.approx(-off_s, abs=5)
