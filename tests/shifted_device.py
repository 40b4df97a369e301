"""`edgefl` whose gate of conditions reads a clock that is ahead by the seconds in the file SHIFT_FILE."""

from __future__ import annotations

import os
import time
from pathlib import Path

from edgefl.cli.main import edgefl
from edgefl.device.conditions.budgets import Clocks


def read_shifted_clock() -> float:
    return time.time() + float(Path(os.environ["SHIFT_FILE"]).read_text())


if __name__ == "__main__":
    Clocks.__init__.__kwdefaults__["wall"] = read_shifted_clock
    edgefl(prog_name="edgefl")
