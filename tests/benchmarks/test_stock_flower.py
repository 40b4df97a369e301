from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

AWAKE = Path(__file__).parents[2] / "benchmarks" / "harness" / "awake"
SLEEPS = """
import sys, time
module, seconds = sys.argv[1], float(sys.argv[2])
asked = []
stock = sys.modules["sitecustomize"]._sleep
sys.modules["sitecustomize"]._sleep = asked.append
exec("import time; time.sleep(seconds)", {"__name__": module, "seconds": seconds})
print(asked)
"""


def _slept(module, seconds):
    """Returns what a process that is kept awake asks of the clock when a module sleeps."""
    done = subprocess.run(
        [sys.executable, "-c", SLEEPS, module, str(seconds)],
        env={**os.environ, "PYTHONPATH": str(AWAKE)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["flwr.supernode.start_client_internal", "flwr.superlink.grid.http_grid"])
def test_a_poll_of_three_seconds_takes_ten_milliseconds(module):
    assert _slept(module, 3) == "[0.01]"


@pytest.mark.parametrize(
    ("module", "seconds"), [("flwr.supernode.start_client_internal", 0.5), ("noop_app.client", 3.0)]
)
def test_no_other_sleep_is_shortened(module, seconds):
    assert _slept(module, seconds) == f"[{seconds}]"


def test_the_polls_are_where_the_installed_flower_has_them(harness):
    harness("stock_flower")._check_polls()


def test_a_poll_that_is_no_longer_there_is_told(harness, monkeypatch):
    stock = harness("stock_flower")
    monkeypatch.setattr(stock, "POLLS", {"flwr.superlink.grid.http_grid": 7})
    with pytest.raises(stock.StockFlowerError, match="does not sleep for 7 s"):
        stock._check_polls()
