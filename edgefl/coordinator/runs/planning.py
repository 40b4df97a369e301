"""What a run would do, without doing it: who takes part and why others do not, and what a round costs each device.

The strategy itself is asked whom it would give work first. Bodies are really encoded and counted: the first model as
it is, an update as one that is drawn, since nobody knows the real one. Seconds are those of earlier runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from edgefl.compression.edges import edge_shapes
from edgefl.compression.measuring import expected_bytes
from edgefl.config import RunConfig
from edgefl.coordinator.dispatch.participants import why_untrained
from edgefl.coordinator.fleet.roster import Roster
from edgefl.coordinator.runs.admission import MODELS_IN_MEMORY, model_size
from edgefl.storage.speeds import seconds_per_iteration
from edgefl.storage.store import Store
from edgefl.strategies.gate import StrategyGate
from edgefl.tally import Goal
from edgefl.types import (
    Assignment,
    DeviceInfo,
    Json,
    LocalPlan,
    Progress,
    Role,
    Shapes,
    Speed,
    Strategy,
    Tensors,
    Vitals,
)

FIRST_VERSION = 0
BYTES_ASSUMED = (
    "bytes are those of bodies in the first round: the model is the real one, an update is drawn with tails as heavy "
    "as gradients have them; headers and TLS come on top"
)
BENCHMARK = "benchmark"
"""In the place of a run: what a board measured by itself."""
SECONDS_ASSUMED = (
    "seconds are computing alone, at the speed of each device's newest update of this task in an earlier run, "
    "whatever its batch was; where there is none, at the speed of its own benchmark, or they are not known"
)


class Plannable(Protocol):
    """The part of an assembled run that a plan looks at."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def model(self) -> Tensors: ...
    @property
    def shapes(self) -> Shapes: ...
    @property
    def strategy(self) -> Strategy[Any]: ...
    @property
    def gate(self) -> StrategyGate: ...
    @property
    def goal(self) -> Goal: ...
    @property
    def encode(self) -> Any: ...
    @property
    def needs_torch(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Now:
    """The fleet as a strategy would see it when the run began."""

    devices: Mapping[str, DeviceInfo]
    vitals: Mapping[str, Vitals]
    now_s: float = 0.0
    busy: Mapping[str, Sequence[str]] = field(default_factory=dict)
    speeds: Mapping[str, Speed] = field(default_factory=dict)
    progress: Mapping[str, Progress] = field(default_factory=dict)

    @property
    def idle(self) -> Sequence[str]:
        return sorted(name for name, info in self.devices.items() if info.role == Role.TRAINER)


def plan_run(run: Plannable, roster: Roster, store: Store) -> Json:
    """Returns the plan as JSON values: what holds for all, and a row for every device in `rows`.

    Raises:
        EdgeflError: the strategy refuses this fleet.
    """
    reasons = {info.device_id: _why_not(info, run, roster) for info in _looked_at(run.config, roster)}
    reasons |= {
        name: "there is no such device in the fleet" for name in run.config.devices.names if name not in reasons
    }
    able = {name: info for name, reason in reasons.items() if not reason and (info := roster.info(name))}
    evaluators = [i for i in roster.workers() if i.role == Role.EVALUATOR and run.config.run.task in i.tasks]
    view = _Now(devices={**able, **{info.device_id: info for info in evaluators}}, vitals=roster.vitals)
    orders = _first_orders(run, view)
    sizes = _Sizes(run)
    speeds = {**_measured(roster, run.config), **seconds_per_iteration(store, run.config.run.task)}
    rows = [
        _row(name, reasons[name], roster.info(name), orders.get(name), run=run, sizes=sizes, speed=speeds.get(name))
        for name in sorted(reasons)
    ]
    for row in rows:
        if row["takes_part"] and row["device_id"] not in orders:
            row["reason"] = _waiting(run.config, len(able), has_orders=bool(orders))
    return {**_totals(run, rows, [info.device_id for info in evaluators]), "rows": rows}


def _measured(roster: Roster, config: RunConfig) -> dict[str, tuple[float, str]]:
    """Returns the seconds of an iteration as boards measured them for the model of a run, or its task's usual one."""
    model = config.task.get("model")
    name = f"{config.run.task}/{model}" if model is not None else config.run.task
    found = {}
    for info in roster.known():
        speeds = info.capabilities.get("steps_per_s")
        steps = speeds.get(name) if isinstance(speeds, Mapping) else None
        if isinstance(steps, int | float) and math.isfinite(steps) and steps > 0:
            found[info.device_id] = (1 / steps, BENCHMARK)
    return found


def _looked_at(config: RunConfig, roster: Roster) -> list[DeviceInfo]:
    """Returns the trainers of the fleet, and whoever is named."""
    names = config.devices.names
    return [info for info in roster.known() if info.role == Role.TRAINER or info.device_id in names]


def _why_not(info: DeviceInfo, run: Plannable, roster: Roster) -> str:
    """Returns why a device takes no part; empty where it does."""
    devices, task, selection = run.config.devices, run.config.run.task, run.gate.selection
    memory, needed = info.capabilities.get("memory_bytes"), MODELS_IN_MEMORY * model_size(run.model)
    untrained = why_untrained(info, needs_torch=run.needs_torch)
    checks = (
        (info.role != Role.TRAINER, f"it is an {info.role}, and trains nothing"),
        (bool(devices.names) and info.device_id not in devices.names, "the run file names others"),
        (bool(devices.groups) and set(devices.groups).isdisjoint(info.groups), "it is in none of the groups"),
        (task not in info.tasks, f"it has no shard for task {task!r}"),
        (bool(untrained), untrained),
        (roster.worker(info.device_id) is None, f"it is {roster.standing(info.device_id) or 'away'}"),
        (not selection.fits(info), "it has too little memory or no accelerator, see [devices]"),
        (isinstance(memory, int) and memory < needed, f"it has too little memory: the run needs {needed} bytes"),
    )
    return next((reason for is_so, reason in checks if is_so), "")


def _first_orders(run: Plannable, view: _Now) -> dict[str, list[Assignment]]:
    """Returns what the strategy would give out first, by device."""
    strategy, found = run.strategy, dict[str, list[Assignment]]()
    _, decision = strategy.assign(strategy.init(run.model), run.gate.view(view))
    for order in decision.orders:
        if isinstance(order, Assignment):
            found.setdefault(order.device_id, []).append(run.gate.adjust(order, view))
    return found


def _waiting(config: RunConfig, num_able: int, *, has_orders: bool) -> str:
    if has_orders:
        return "it is not asked in the first round"
    return f"the run would wait: it begins with {config.devices.min} devices, {num_able} are there"


class _Sizes:
    """Bytes of bodies, each encoded once."""

    def __init__(self, run: Plannable) -> None:
        self._run = run
        self.down_bytes = len(run.encode(run.model, FIRST_VERSION))
        self._up: dict[str, int] = {}

    def up_bytes(self, order: Assignment) -> int:
        node, spec = order.plan.node, order.codec or "dense"
        if node is not None:
            return len(node.edges) * self._encoded(node.codec or "dense", edge_shapes(self._run.shapes))
        return self._encoded(spec, self._run.shapes)

    def _encoded(self, spec: str, shapes: Shapes) -> int:
        if spec not in self._up:
            self._up[spec] = expected_bytes(spec, shapes)
        return self._up[spec]


def _row(  # noqa: PLR0913 all that is known of a device
    device_id: str,
    reason: str,
    info: DeviceInfo | None,
    orders: Sequence[Assignment] | None,
    *,
    run: Plannable,
    sizes: _Sizes,
    speed: tuple[float, str] | None,
) -> Json:
    examples = info.examples.get(run.config.run.task) if info is not None else None
    row: Json = {"device_id": device_id, "takes_part": not reason, "reason": reason, "examples": examples}
    for order in orders or ():
        iterations = _iterations(order.plan, examples, run.config.run.local_test_fraction)
        up, down = sizes.up_bytes(order), sizes.down_bytes if order.sends_model else 0
        row["iterations"] = (row.get("iterations") or 0) + iterations if iterations is not None else None
        row["bytes_up"], row["bytes_down"] = row.get("bytes_up", 0) + up, row.get("bytes_down", 0) + down
        row["codec"] = order.plan.node.codec if order.plan.node is not None else order.codec
        row["seconds"] = order.plan.seconds
    if speed is not None and row.get("iterations") is not None:
        row["seconds"], row["measured_in"] = row["iterations"] * speed[0], speed[1]
    return row


def _iterations(plan: LocalPlan, examples: int | None, test_fraction: float) -> int | None:
    """Returns how many iterations a plan is, give or take how a shard is split; None where nobody can know."""
    if plan.iterations is not None:
        return plan.iterations
    if plan.epochs is None or examples is None:
        return None
    return max(1, round(plan.epochs * math.ceil((1 - test_fraction) * examples / plan.batch_size)))


def _totals(run: Plannable, rows: Sequence[Json], evaluators: Sequence[str]) -> Json:
    asked = [row for row in rows if "bytes_up" in row]
    seconds = [row.get("seconds") for row in asked]
    known = [value for value in seconds if value is not None]
    goal = {name: value for name, value in _goals(run.goal).items() if value is not None}
    return {
        "task": run.config.run.task,
        "strategy": run.config.strategy.name,
        "goal": goal,
        "model_bytes": model_size(run.model),
        "num_devices": len(asked),
        "require": run.config.devices.require,
        "evaluators": list(evaluators),
        "bytes_up": sum(row["bytes_up"] for row in asked),
        "bytes_down": sum(row["bytes_down"] for row in asked),
        "seconds": max(known) if known and len(known) == len(seconds) else None,
        "assumed": _assumed(run),
    }


def _goals(goal: Goal) -> Json:
    return {name: getattr(goal, name) for name in ("rounds", "updates", "seconds", "bytes", "accuracy")}


def _assumed(run: Plannable) -> list[str]:
    said = [BYTES_ASSUMED, SECONDS_ASSUMED]
    if bool(getattr(run.strategy, "has_nodes", False)):
        said.append("bytes up are one set of tensors to every neighbour, the model comes once")
    if run.config.devices.fraction is not None or run.config.devices.count is not None:
        said.append("other devices are drawn in later rounds")
    return said
