import os
import subprocess
import sys
from pathlib import Path

import pytest

AWAKE = Path(__file__).parents[2] / "benchmarks" / "harness" / "awake"
SLEEPS = """
import sys
asked = []
sys.modules["sitecustomize"]._sleep = asked.append
for word in sys.argv[1:]:
    module, _, seconds = word.partition("=")
    exec("import time; time.sleep(seconds)", {"__name__": module, "seconds": float(seconds)})
print(asked)
"""


def test_flowers_polls_of_three_seconds_take_ten_milliseconds_and_no_other_sleep_is_shortened():
    sleeps = {
        "flwr.supernode.start_client_internal=3": 0.01, "flwr.superlink.grid.http_grid=3": 0.01,
        "flwr.supernode.start_client_internal=0.5": 0.5, "noop_app.client=3": 3.0,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SLEEPS, *sleeps], env={**os.environ, "PYTHONPATH": str(AWAKE)}, capture_output=True,
        text=True, timeout=30, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(list(sleeps.values()))


def test_the_polls_are_where_the_installed_flower_has_them_and_one_that_is_not_is_told(harness, monkeypatch):
    stock = harness("stock_flower")
    stock._check_polls()
    monkeypatch.setattr(stock, "POLLS", {"flwr.superlink.grid.http_grid": 7})
    with pytest.raises(stock.StockFlowerError, match="does not sleep for 7 s"):
        stock._check_polls()
