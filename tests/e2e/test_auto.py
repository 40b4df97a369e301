"""`up = "auto"` over real processes: one device's way to the coordinator is slow, and its codec shows it."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from edgefl.compression.codec_selection import CANDIDATES


@pytest.mark.slow
def test_a_device_with_a_slow_uplink_gets_a_harder_codec_and_the_history_tells_which(
    tools: Any, tmp_path: Path
) -> None:
    with tools.fleet(tmp_path, tools.devices(2, tools.gated)) as fleet, tools.led_by(fleet, "device-02") as weather:
        weather.bytes_per_s = 10_000
        options = {"iterations": 4, "learning_rate": 0.2}
        run = tools.gated_run(pace_s=0.1, rounds=10, min=2, strategy=options, compression={"up": "auto"})
        run_id = fleet.submit(run)
        assert fleet.wait_for_run(run_id)["status"] == "finished"
        chosen = {
            name: [CANDIDATES.index(row["codec"]) for row in fleet.list_history("updates", run=run_id, device=name)]
            for name in ("device-01", "device-02")
        }
    assert [len(places) for places in chosen.values()] == [10, 10]
    assert chosen["device-01"][0] == chosen["device-02"][0]
    assert median(chosen["device-01"][-5:]) < median(chosen["device-02"][-5:]), chosen
