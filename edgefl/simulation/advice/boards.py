"""Boards as their history measured them, as profiles of the simulator: step times, links, losses, power.

No example of a board is asked for; all of it stands in the rows of devices and updates that the coordinator has.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from edgefl.compression.codec_benchmark import compute_expected_bytes
from edgefl.compression.registry import AUTO
from edgefl.core.config import DevicesSection, parse_run
from edgefl.core.errors import DataError, EdgeflError
from edgefl.core.safe_parsing import format_toml
from edgefl.core.types import Json
from edgefl.engine.assembly.build import build_run
from edgefl.simulation.advice.candidates import ADAPTIVE, ASYNCHRONOUS, SYNCHRONOUS
from edgefl.simulation.advice.costs import DOUBLE_TRAFFIC

ASSUMED_LATENCY_S = 0.05
"""Of an exchange, both ways together, where a board's updates had one size: nothing tells latency and rate apart."""
MIN_SIZE_SPREAD = 0.2
"""Relative spread of sizes from which on they do."""
ASSUMED_RECOVERY_S = 60.0
"""How long a board that was lost stays away: the history says when it was lost, not for how long."""
UNLIMITED_BYTES_PER_S = 1e12
MAX_POWER_W = 1000.0
"""Of a board while it trains: a reading above it is no measurement."""
MIN_SECONDS = 1e-6
BITS_PER_BYTE = 8
_USED = frozenset({"used", "late"})
_ONE_MODEL = frozenset({*SYNCHRONOUS, *ADAPTIVE, *ASYNCHRONOUS} - DOUBLE_TRAFFIC)
"""Strategies whose exchange is one model down and one update up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBoard:
    """One board by its history.

    Attributes:
        name: of the board.
        num_examples: of the task, as it reported them.
        iteration_s: seconds of an iteration, by batch size.
        latency_s: of an exchange, both ways together, with what the coordinator takes for it; `bytes_per_s` is the
            rate of its link.
        header_bytes_up: of an update beside its body, and `header_bytes_down` of an instruction beside its model; 0
            where that is not known.
        mtbf_s: mean seconds at work until it is lost; None where it never was.
        power_w: mean power while it trains; None where it reports no energy.
        max_temperature_c: the highest that an update came with; None where it reports none.
        throttled_fraction: of its updates.
        has_sizes: whether its updates differed in size, so that latency and rate are measured and not assumed.
        groups: to which it belongs.
        memory_bytes: that it can use; None where it does not report it.
        accelerators: kinds that it reports, such as cuda.
    """

    name: str
    num_examples: int
    iteration_s: Mapping[int, float]
    latency_s: float
    bytes_per_s: float
    header_bytes_up: int = 0
    header_bytes_down: int = 0
    mtbf_s: float | None = None
    power_w: float | None = None
    max_temperature_c: float | None = None
    throttled_fraction: float = 0.0
    has_sizes: bool = False
    groups: tuple[str, ...] = ()
    memory_bytes: int | None = None
    accelerators: tuple[str, ...] = ()

    def to_profile(self, cost_key: str) -> Json:
        """Returns its table in a profile file; `cost_key` is the task or `task/model` whose steps were measured."""
        recovery = {} if self.mtbf_s is None else {"mtbf_s": self.mtbf_s, "mttr_s": ASSUMED_RECOVERY_S}
        return {
            "iterations": {cost_key: _fit_cost(self.iteration_s)},
            "up_bytes_per_s": self.bytes_per_s,
            "down_bytes_per_s": self.bytes_per_s,
            "latency_s": self.latency_s / 2,
            "groups": [*self.groups],
            "accelerators": [*self.accelerators],
            **recovery,
            **({} if self.memory_bytes is None else {"memory_bytes": self.memory_bytes}),
            **({} if self.power_w is None else {"power_w": self.power_w}),
            "source": {"iterations": "measured: updates of the fleet's history"},
        }


def measure_boards(
    devices: Sequence[Mapping[str, Any]],
    updates: Sequence[Mapping[str, Any]],
    task: str,
    batch_sizes: Mapping[str, int | None],
    *,
    capabilities: Mapping[str, Mapping[str, Any]] | None = None,
    bodies: Mapping[str, tuple[int, int]] | None = None,
) -> list[MeasuredBoard]:
    """Returns the boards that have trained a task, in the order of their names.

    Args:
        devices: rows of `edgefl history devices`.
        updates: rows of `edgefl history updates`, of runs of the task.
        task: of which the examples count.
        batch_sizes: by run; updates of a run without one count as of batches of 32.
        capabilities: as boards reported them, by board; of those that are absent memory and accelerators are unknown.
        bodies: bytes of an update and of a model alone, by run, as `compute_bodies` gives them; what rows of these
            runs have more is headers.

    Raises:
        DataError: no board has trained the task.
    """
    by_board: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in updates:
        by_board[row["device_id"]].append(row)
    facts = capabilities or {}
    found = [
        replace(board, **_read_capabilities(facts.get(board.name, {})))
        for row in sorted(devices, key=lambda row: str(row["device_id"]))
        if row["role"] == "trainer"
        and not row.get("removed_at")
        and (board := _measure(row, by_board.get(row["device_id"], ()), task, batch_sizes, bodies or {})) is not None
    ]
    if not found:
        raise DataError(
            f"no board of this fleet has trained {task} yet, so nothing says how fast they are: let a run of a few "
            "rounds finish first, or describe them with --profile"
        )
    return found


def select_boards(boards: Sequence[MeasuredBoard], devices: DevicesSection) -> list[MeasuredBoard]:
    """Returns the boards that a run file's `[devices]` lets take part; all where it names none.

    Raises:
        DataError: none of them is left.
    """
    names, groups, excluded = devices.names, devices.groups, devices.exclude
    found = [
        board
        for board in boards
        if (not names or board.name in names)
        and (not groups or not set(groups).isdisjoint(board.groups))
        and board.name not in excluded
    ]
    if boards and not found:
        raise DataError(
            f"none of the {len(boards)} boards that have trained the task is among devices.names and devices.groups "
            f"of the run file, such as {(*names, *groups, *excluded)[0]}, without those in devices.exclude"
        )
    return found


def format_profiles(boards: Sequence[MeasuredBoard], cost_key: str) -> str:
    """Returns a profile file with one profile for each board, by its name."""
    return format_toml({"profile": {board.name: board.to_profile(cost_key) for board in boards}})


def _measure(
    device: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    task: str,
    batch_sizes: Mapping[str, int | None],
    bodies: Mapping[str, tuple[int, int]],
) -> MeasuredBoard | None:
    used = [row for row in rows if row["outcome"] in _USED and (row["iterations"] or 0) > 0 and row["compute_s"]]
    warm = [row for row in used if row["round"] > 1] or used  # the first round of a run warms caches
    if not warm:
        return None
    examples = device.get("examples")
    reported = examples.get(task) if isinstance(examples, Mapping) else None
    header_up, header_down = (_measure_headers(warm, bodies, place) for place in (0, 1))
    latency_s, bytes_per_s, has_sizes = _measure_link(warm, header_up + header_down)
    temperatures = [row["max_temperature_c"] for row in warm if row.get("max_temperature_c") is not None]
    num_lost = sum(row["outcome"] == "lost" for row in rows)
    at_work_s = math.fsum((row["compute_s"] or 0.0) + (row["send_s"] or 0.0) for row in used)
    return MeasuredBoard(
        name=str(device["device_id"]),
        num_examples=int(reported or max(row["num_examples"] or 1 for row in warm)),
        iteration_s=_measure_iterations(warm, batch_sizes),
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        header_bytes_up=header_up,
        header_bytes_down=header_down,
        mtbf_s=max(MIN_SECONDS, at_work_s) / num_lost if num_lost else None,
        power_w=_measure_power(warm),
        max_temperature_c=max(temperatures, default=None),
        throttled_fraction=sum(bool(row.get("throttled")) for row in warm) / len(warm),
        has_sizes=has_sizes,
        groups=tuple(map(str, device.get("groups") or ())),
    )


def _read_capabilities(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns memory and kinds of accelerators of a report; what is none of either counts as not reported."""
    memory, listed = facts.get("memory_bytes"), facts.get("accelerators")
    kinds = [one.get("kind") for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    return {
        "memory_bytes": memory if isinstance(memory, int) and memory > 0 else None,
        "accelerators": tuple(dict.fromkeys(kind for kind in kinds if isinstance(kind, str) and kind)),
    }


def _measure_power(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the mean power over the time of computing, without what no board draws; None where nothing is known."""
    known = [(row["energy_j"], row["compute_s"]) for row in rows if row.get("energy_j") is not None]
    plausible = [(joules, seconds) for joules, seconds in known if 0 < joules / seconds <= MAX_POWER_W]
    if not plausible:
        return None
    return math.fsum(joules for joules, _ in plausible) / math.fsum(seconds for _, seconds in plausible)


def _measure_iterations(rows: Sequence[Mapping[str, Any]], batch_sizes: Mapping[str, int | None]) -> dict[int, float]:
    by_size: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        by_size[batch_sizes.get(row["run_id"]) or 32].append(row["compute_s"] / row["iterations"])
    return {size: max(MIN_SECONDS, statistics.median(found)) for size, found in sorted(by_size.items())}


def compute_bodies(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns the bytes of an update and of a model of a run by its stored settings; None where they vary.

    They do with a codec that is chosen for each device, with a lossy downlink, and with strategies that send more
    than one model. None too where the run cannot be built here.
    """
    try:
        run = parse_run(config)
        up, down = run.compression.up, run.compression.down
        if run.strategy.name not in _ONE_MODEL or up.startswith(AUTO) or run.compression.layers or down != "dense":
            return None
        components = build_run(run, "simulated")
        return compute_expected_bytes(up, components.update_shapes), len(components.encode(components.model, 0))
    except EdgeflError:
        return None


def _measure_headers(
    rows: Sequence[Mapping[str, Any]], bodies: Mapping[str, tuple[int, int]], place: Literal[0, 1]
) -> int:
    """Returns the bytes of an exchange beside its body, up or down; 0 where no run's body is known."""
    name = ("bytes_up", "bytes_down")[place]
    found = [(row[name] or 0) - bodies[row["run_id"]][place] for row in rows if row["run_id"] in bodies]
    return max(0, round(statistics.median(found))) if found else 0


def _get_exchange_s(row: Mapping[str, Any]) -> float:
    """Returns the seconds of an exchange: from the dispatch to the update's arrival, without work and pauses.

    That holds what the coordinator takes before it sends and after it receives, which `send_s` does not.
    """
    sent_s = row["send_s"] or 0.0
    started, ended = row.get("dispatched_at"), row.get("received_at")
    if started is None or ended is None:
        return float(sent_s)
    passed_s = ended - started - row["compute_s"] - (row.get("paced_s") or 0.0)
    return float(max(sent_s, passed_s))


def _measure_link(rows: Sequence[Mapping[str, Any]], header_bytes: int) -> tuple[float, float, bool]:
    """Returns latency of an exchange in seconds, bytes per second, and whether sizes tell the two apart.

    The rate is the slope between the medians of the lightest and the heaviest updates. The latency holds the time of
    the headers, since simulated exchanges have none.
    """
    by_size: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        size = (row["bytes_up"] or 0) + (row["bytes_down"] or 0) - header_bytes
        by_size[max(0, size)].append(_get_exchange_s(row))
    sizes = sorted(by_size)
    middle = (sizes[0] + sizes[-1]) / 2
    light = [(size, s) for size in sizes for s in by_size[size] if size <= middle]
    heavy = [(size, s) for size in sizes for s in by_size[size] if size > middle]
    if heavy and sizes[-1] - sizes[0] >= MIN_SIZE_SPREAD * sizes[-1]:
        light_bytes, light_s = (statistics.median(part) for part in zip(*light, strict=True))
        heavy_bytes, heavy_s = (statistics.median(part) for part in zip(*heavy, strict=True))
        if heavy_s > light_s:
            rate = (heavy_bytes - light_bytes) / (heavy_s - light_s)
            return max(0.0, light_s - light_bytes / rate), rate, True
        return min(light_s, heavy_s), UNLIMITED_BYTES_PER_S, True
    exchange_s, num_bytes = (
        statistics.median(s for found in by_size.values() for s in found),
        statistics.median(sizes),
    )
    links = [row["link_bits_per_s"] for row in rows if row.get("link_bits_per_s")]
    if links and num_bytes:
        rate = statistics.median(links) / BITS_PER_BYTE
        return max(0.0, exchange_s - num_bytes / rate), rate, True
    latency_s = min(exchange_s, ASSUMED_LATENCY_S)
    if num_bytes == 0 or exchange_s <= latency_s:
        return exchange_s, UNLIMITED_BYTES_PER_S, False
    return latency_s, num_bytes / (exchange_s - latency_s), False


def _fit_cost(iteration_s: Mapping[int, float]) -> Json:
    """Returns the cost of an iteration as a profile has it; from two batch sizes on, by example too."""
    smallest, largest = min(iteration_s), max(iteration_s)
    slope = (iteration_s[largest] - iteration_s[smallest]) / (largest - smallest) if largest > smallest else 0.0
    fixed_s = iteration_s[smallest] - slope * smallest
    if slope <= 0 or fixed_s < 0:
        return {"fixed_s": statistics.fmean(iteration_s.values())}
    return {"fixed_s": fixed_s, "example_s": slope}
