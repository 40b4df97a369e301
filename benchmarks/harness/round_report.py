"""Turns of the round benchmark as tables for people and as JSON for programs."""

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
from types import MappingProxyType
from typing import Any

from edgefl import DISTRIBUTION

MIB = 1024 * 1024
SERVER_SIDE = "/v1/runtime/"
"""What stock Flower's ServerApp and SuperExec ask the SuperLink for."""
TITLE = 40
SIDE = 30
EDGEFL, STOCK, AWAKE = "edgefl", "stock Flower", "the same, polls at 10 ms"
AIM_TIME_RATIOS = MappingProxyType({1: 300.0, 2: 150.0, 10: 60.0})
"""By how many times less a round takes than stock Flower's, by the number of devices."""
AIM_MEMORY_RATIO = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One side in one turn; device figures are means over the devices, CPU seconds are for one round.

    `requests` is how often the coordinator is asked over HTTP for one update, by path.
    """

    round_s: tuple[float, ...]
    first_round_s: float
    mean_round_s: float
    device_peak_bytes: float
    device_median_bytes: float
    coordinator_peak_bytes: float
    device_cpu_s: float
    coordinator_cpu_s: float
    other_cores: float
    num_devices: int
    requests: Mapping[str, float]
    extra: Mapping[str, str | float]

    @property
    def median_round_s(self) -> float:
        return statistics.median(self.round_s)

    @property
    def quick_round_s(self) -> float:
        """The time that a tenth of the rounds do not exceed: what is left when nobody else wants the cores."""
        return sorted(self.round_s)[len(self.round_s) // 10]

    @property
    def num_requests(self) -> float:
        """HTTP requests for one update, Flower's own between its ServerApp and its SuperLink included."""
        return sum(self.requests.values())

    @property
    def num_device_requests(self) -> float:
        return sum(number for path, number in self.requests.items() if not path.startswith(SERVER_SIDE))


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
        key="device_cpu_s",
        title="CPU of a device per message",
        of=lambda turn: turn.device_cpu_s,
        unit="ms",
        scale=1e3,
    ),
    Row(
        key="coordinator_cpu_s",
        title="CPU of the coordinator per message",
        of=lambda turn: turn.coordinator_cpu_s / turn.num_devices,
        unit="ms",
        scale=1e3,
    ),
    Row(
        key="device_requests",
        title="HTTP requests of a device per update",
        of=lambda turn: turn.num_device_requests,
        unit="",
        scale=1,
    ),
    Row(
        key="requests",
        title="HTTP requests per update, all",
        of=lambda turn: turn.num_requests,
        unit="",
        scale=1,
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
NOTES = """memory: PSS of the whole process tree, children and the broker included, every 0.2 s (less often where
  there are many processes); they share pages of libraries here, so on a board of its own each side takes more
round: from one closing to the next, the first left out; medians over turns, (min - max) over turns
message: one assignment and its answer; a device has one a round, the coordinator one for each device
HTTP requests: as they came in at the coordinator; all = with those of Flower's ServerApp and SuperExec
edgefl: TLS, node authentication, MQTT over TLS, journal with fsync, SQLite: all on; FedAvg, no evaluation
stock Flower: its defaults with --insecure: no TLS, no node authentication, state in memory; FedAvg, no evaluation
both: one thread for arithmetic, torch not loaded
not in it: training, starting and joining, networks slower than loopback, unless a table says so"""
AWAKE_NOTE = f"""
{AWAKE}: stock Flower, whose SuperNode and ServerApp ask again after 10 ms instead of 3 s, so that
  what remains is its work and not its sleep; its other sleeps (SuperExec 1 s, SuperNode 0.5 s until there is an
  answer to send) are as ever"""


def as_json(turns: Mapping[str, Sequence[Turn]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns medians, extremes, ratios (each other side over edgefl), every round's time, and the machine."""
    sides = {side: {row.key: _spread(row, of) for row in ROWS} for side, of in turns.items()}
    return {
        "facts": dict(facts),
        "sides": sides,
        "ratios": {
            side: {row.key: _ratio(row, found, sides[EDGEFL]) for row in ROWS if row.is_compared}
            for side, found in sides.items()
            if side != EDGEFL
        },
        "rounds_s": {side: [list(turn.round_s) for turn in of] for side, of in turns.items()},
        "requests": {side: [dict(turn.requests) for turn in of] for side, of in turns.items()},
        "extra": {side: [dict(turn.extra) for turn in of] for side, of in turns.items()},
    }


def as_summary(compared: Mapping[int, Mapping[str, Sequence[Turn]]]) -> str:
    """Returns one line for each side and number of devices."""
    titles = ("round", "times less than", "CPU/message, ms", "CPU/message, ms", "HTTP requests")
    unders = ("median, ms", "", "of coordinator", "of device", "per update (all)")
    lines = [_columns("", titles), _columns("devices", unders)]
    for num_devices, turns in compared.items():
        shown = as_json(turns, {})
        for side, found in shown["sides"].items():
            cells = (
                _cell(ROWS[0], found["round_s"]),
                "" if side == EDGEFL else _verdict_for(num_devices, side, shown["ratios"][side]["round_s"]),
                f"{1e3 * found['coordinator_cpu_s']['median']:.3g}",
                f"{1e3 * found['device_cpu_s']['median']:.3g}",
                f"{found['device_requests']['median']:.3g} ({found['requests']['median']:.3g})",
            )
            lines.append(_columns(f"{num_devices:>3}  {side}", cells))
    return "\n".join(lines)


def as_table(turns: Mapping[str, Sequence[Turn]], num_devices: int) -> str:
    """Returns all that is known of one number of devices, edgefl and stock Flower side by side."""
    shown = as_json({side: turns[side] for side in (EDGEFL, STOCK)}, {})
    ratios = shown["ratios"][STOCK]
    lines = [f"{f'{num_devices} device processes':{TITLE}}{EDGEFL:>28}{STOCK:>28}{'ratio':>9}"]
    for row in ROWS:
        cells = "".join(f"{_cell(row, shown['sides'][side][row.key]):>28}" for side in (EDGEFL, STOCK))
        ratio = f"{ratios[row.key]:>9.3g}" if row.is_compared else ""
        title = f"{row.title}, {row.unit}" if row.unit else row.title
        lines.append(f"{title:{TITLE}}{cells}{ratio}")
    return "\n".join(
        [
            *lines,
            f"memory of a device: {_verdict(ratios['device_peak_bytes'], AIM_MEMORY_RATIO)} times less at peak",
            _update_line(turns[EDGEFL]),
        ]
    )


def notes(*, is_awake: bool) -> str:
    """Returns what the figures mean."""
    return NOTES + (AWAKE_NOTE if is_awake else "")


def machine() -> dict[str, Any]:
    """Returns where and with what this was measured, before it begins."""
    versions = {name: importlib.metadata.version(name) for name in (DISTRIBUTION, "flwr", "numpy", "uvicorn")}
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


def heading(facts: Mapping[str, Any]) -> str:
    """Returns what was measured, where and with what."""
    loads = ", ".join(str(load) for load in facts["load_before"])
    versions = ", ".join(f"{name} {facts[name]}" for name in (DISTRIBUTION, "flwr", "numpy", "uvicorn"))
    what = f"Round overhead: float32 model of {facts['size_bytes']:,} bytes"
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


def _ratio(row: Row, other: Mapping[str, Any], edgefl: Mapping[str, Any]) -> float:
    return float(other[row.key]["median"] / edgefl[row.key]["median"])


def _cell(row: Row, spread: Mapping[str, float]) -> str:
    middle, least, most = (_number(spread[key] * row.scale) for key in ("median", "min", "max"))
    return f"{middle} ({least} - {most})"


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _columns(title: str, cells: Sequence[str]) -> str:
    return f"{title:{SIDE}}" + "".join(
        f"{cell:>{width}}" for cell, width in zip(cells, (26, 27, 17, 17, 18), strict=True)
    )


def _verdict_for(num_devices: int, side: str, ratio: float) -> str:
    aim = AIM_TIME_RATIOS.get(num_devices) if side == STOCK else None
    return f"{ratio:.3g}" if aim is None else _verdict(ratio, aim)


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
