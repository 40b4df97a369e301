"""Turns of the round benchmark as a table for people and as JSON for programs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MIB = 1024 * 1024
TITLE = 36
AIM_TIME_RATIO = 150.0
AIM_MEMORY_RATIO = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One side in one turn; device figures are means over the devices, CPU seconds are for one round."""

    round_s: tuple[float, ...]
    first_round_s: float
    mean_round_s: float
    device_peak_bytes: float
    device_median_bytes: float
    coordinator_peak_bytes: float
    device_cpu_s: float
    coordinator_cpu_s: float
    other_cores: float
    extra: Mapping[str, str | float]

    @property
    def median_round_s(self) -> float:
        return statistics.median(self.round_s)

    @property
    def quick_round_s(self) -> float:
        """The time that a tenth of the rounds do not exceed: what is left when nobody else wants the cores."""
        return sorted(self.round_s)[len(self.round_s) // 10]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: what it shows of a turn, and how."""

    key: str
    title: str
    of: Callable[[Turn], float]
    unit: str
    scale: float
    is_compared: bool = True


ROWS = (
    Row(key="round_s", title="round, median", of=lambda turn: turn.median_round_s, unit="ms", scale=1e3),
    Row(key="mean_round_s", title="round, mean", of=lambda turn: turn.mean_round_s, unit="ms", scale=1e3),
    Row(key="quick_round_s", title="round, quickest tenth", of=lambda turn: turn.quick_round_s, unit="ms", scale=1e3),
    Row(key="first_round_s", title="first round", of=lambda turn: turn.first_round_s, unit="ms", scale=1e3),
    Row(
        key="device_peak_bytes",
        title="memory of a device, peak",
        of=lambda turn: turn.device_peak_bytes,
        unit="MiB",
        scale=1 / MIB,
    ),
    Row(
        key="device_median_bytes",
        title="memory of a device, median",
        of=lambda turn: turn.device_median_bytes,
        unit="MiB",
        scale=1 / MIB,
    ),
    Row(
        key="coordinator_peak_bytes",
        title="memory of the coordinator, peak",
        of=lambda turn: turn.coordinator_peak_bytes,
        unit="MiB",
        scale=1 / MIB,
    ),
    Row(
        key="device_cpu_s", title="CPU of a device per round", of=lambda turn: turn.device_cpu_s, unit="ms", scale=1e3
    ),
    Row(
        key="coordinator_cpu_s",
        title="CPU of the coordinator per round",
        of=lambda turn: turn.coordinator_cpu_s,
        unit="ms",
        scale=1e3,
    ),
    Row(
        key="other_cores",
        title="meanwhile busy with others",
        of=lambda turn: turn.other_cores,
        unit="cores",
        scale=1,
        is_compared=False,
    ),
)
NOTES = """memory: PSS of the whole process tree, children and the broker included, every 0.2 s in the rounds;
  processes share pages of libraries here, so on a board of its own each side takes somewhat more
round: from one closing to the next, the first left out; medians over turns, (min - max) over turns
edgefl: TLS, node authentication, MQTT over TLS, journal with fsync, SQLite: all on; FedAvg, no evaluation
stock Flower: its defaults with --insecure: no TLS, no node authentication, state in memory; FedAvg, no evaluation
both: one thread for arithmetic, torch not loaded
not in it: training, starting and joining, networks slower than loopback"""


def as_json(turns: Mapping[str, Sequence[Turn]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns medians, extremes, ratios (stock Flower over edgefl), every round's time, and the machine."""
    sides = {side: {row.key: _spread(row, of) for row in ROWS} for side, of in turns.items()}
    edgefl, stock = (sides[side] for side in turns)
    return {
        "v": 1,
        "facts": dict(facts),
        "sides": sides,
        "ratios": {row.key: stock[row.key]["median"] / edgefl[row.key]["median"] for row in ROWS if row.is_compared},
        "rounds_s": {side: [list(turn.round_s) for turn in of] for side, of in turns.items()},
        "extra": {side: [dict(turn.extra) for turn in of] for side, of in turns.items()},
    }


def as_table(turns: Mapping[str, Sequence[Turn]], facts: Mapping[str, Any]) -> str:
    """Returns the same for reading."""
    shown = as_json(turns, facts)
    first, second = turns
    lines = [_heading(facts), "", f"{'':{TITLE}}{first:>26}{second:>26}{'ratio':>9}"]
    for row in ROWS:
        cells = "".join(f"{_cell(row, shown['sides'][side][row.key]):>26}" for side in turns)
        ratio = f"{shown['ratios'][row.key]:>9.3g}" if row.is_compared else ""
        lines.append(f"{f'{row.title}, {row.unit}':{TITLE}}{cells}{ratio}")
    ratios = shown["ratios"]
    lines += [
        "",
        f"time: {_verdict(ratios['round_s'], AIM_TIME_RATIO)} times less",
        f"memory of a device: {_verdict(ratios['device_peak_bytes'], AIM_MEMORY_RATIO)} times less at peak",
        _update_line(turns[first]),
        NOTES,
    ]
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Returns where and with what this was measured, before it begins."""
    versions = {name: importlib.metadata.version(name) for name in ("edgefl", "flwr", "numpy", "uvicorn")}
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "mosquitto": _mosquitto_version(),
        **versions,
    }


def _heading(facts: Mapping[str, Any]) -> str:
    loads = ", ".join(str(load) for load in facts["load_before"])
    versions = ", ".join(f"{name} {facts[name]}" for name in ("edgefl", "flwr", "numpy", "uvicorn"))
    what = f"Round overhead: float32 model of {facts['size_bytes']:,} bytes, {facts['num_devices']} device processes"
    turns = f"{facts['num_turns']} turns of {facts['num_rounds']} rounds (stock Flower: {facts['num_stock_rounds']})"
    where = f"{facts['cpu']}, {facts['cores']} cores, load before {loads}; {facts['system']}"
    with_what = f"Python {facts['python']}, {versions}, Mosquitto {facts['mosquitto']}"
    return f"{what}; {turns}\n{facts['date']}; {where}\n{with_what}"


def _update_line(turns: Sequence[Turn]) -> str:
    def median(key: str) -> float:
        return statistics.median(float(turn.extra[key]) for turn in turns)

    brokers = " and ".join(sorted({str(turn.extra["broker"]) for turn in turns}))
    away_ms, task_ms = 1e3 * median("update_there_and_back_s"), 1e3 * median("update_compute_s")
    sizes = f"{median('update_bytes_down'):,.0f} bytes down, {median('update_bytes_up'):,.0f} up"
    return f"edgefl with broker {brokers}; one update: {away_ms:.1f} ms there and back ({task_ms:.1f} task), {sizes}"


def _spread(row: Row, turns: Sequence[Turn]) -> dict[str, float]:
    values = [row.of(turn) for turn in turns]
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _cell(row: Row, spread: Mapping[str, float]) -> str:
    middle, least, most = (f"{spread[key] * row.scale:.4g}" for key in ("median", "min", "max"))
    return f"{middle} ({least} - {most})"


def _verdict(ratio: float, aim: float) -> str:
    return f"{ratio:.3g} (aim {aim:g}: {'met' if ratio >= aim else 'missed'})"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def _mosquitto_version() -> str:
    # Debian installs it where only root's PATH looks.
    program = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin")
    if program is None:
        return "none"
    shown = subprocess.run([program, "-h"], capture_output=True, text=True, timeout=10, check=False).stdout
    return shown.partition("version ")[2].partition("\n")[0].strip() or "of unknown version"
