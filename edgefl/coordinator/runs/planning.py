"""What a run needs of the fleet: checks at submission and admission, and a dry run with the cost of a round.

The strategy itself schedules the first round. Bodies are really encoded and counted: the first model as it is, an
update as a random one, since the real one is unknown. Seconds are those of earlier runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edgefl import DISTRIBUTION
from edgefl.compression.codec_benchmark import compute_expected_bytes
from edgefl.compression.peer_codec import select_peer_tensors
from edgefl.compression.split_bodies import ExchangeSizes
from edgefl.coordinator.execution.admission import AdmissionRequirements
from edgefl.coordinator.execution.fleet_view import (
    NO_TORCH,
    explain_missing_features,
    explain_missing_shard,
    find_training_blocker,
    is_selected,
    is_selected_evaluator,
)
from edgefl.coordinator.fleet.registry import DeviceRegistry, format_unfit
from edgefl.coordinator.runs.availability import Availability, CallDevice, ask_availability
from edgefl.coordinator.runs.compilation import expect_compiled
from edgefl.coordinator.runs.history_recorder import format_shortage
from edgefl.core.allowance import Allowance
from edgefl.core.config import RunConfig
from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.protocol import (
    COMPILED_KEY,
    CONDITIONS_KEY,
    EVALUATOR_NAME,
    MAX_PEER_BYTES,
    METERED_KEY,
    get_speed_name,
    select_backend,
)
from edgefl.core.types import (
    DeviceInfo,
    HealthMetrics,
    Json,
    ModelSpec,
    Role,
    Tensors,
    TrainConfig,
    TrainInstruction,
)
from edgefl.engine.assembly.privacy import explain_privacy, get_private_mean
from edgefl.engine.evaluations import MIN_EVALUATORS
from edgefl.engine.fleet_state import FleetState
from edgefl.engine.progress import StoppingCriteria
from edgefl.storage.queries.history import get_seconds_per_iteration
from edgefl.storage.store import Store
from edgefl.strategies.synchronous.collective_rounds import find_address
from edgefl.strategies.synchronous.redundant_shards import RedundantShards

if TYPE_CHECKING:
    from edgefl.engine.assembly.components import RunComponents

MODEL_COPIES_IN_MEMORY = 4
"""Weights, gradients, the encoded update, and the state of a local algorithm."""
PERSONAL_COPIES_IN_MEMORY = 3
"""A personal copy as it is kept, the model that it is held to, and the model at the start."""
MIXED_COPIES_IN_MEMORY = 6
"""The copy as it is kept and as it is trained, the mixture, and the model at the start and at both ends of a step."""
BASE_COPIES_IN_MEMORY = 3
"""A frozen tensor as it came, as the network has it, and with an adapter added or, until frozen, its gradient."""
MODEL_COPIES_ON_DISK = 2
"""The codec's residual, and moments or local tensors of the device."""
LITTLE_WORK = 0.5
"""Of the local iterations of `fedavg` in as many rounds: a run with fewer is told."""
MAX_NAMES = 5
FIRST_VERSION = 0
BYTES_ASSUMPTION = (
    "bytes are those of bodies in the first round: the model is the real one, an update is drawn with tails as heavy "
    "as gradients have them; headers and TLS come on top"
)
JOB_ASSUMPTION = (
    "bytes down are those of the first parts' inputs, bytes up the most that their results may have; seconds are "
    "those of each device's newest part of the same job, or not known"
)
BENCHMARK = "benchmark"
"""In place of a run id: the device's own benchmark."""
SECONDS_ASSUMPTION = (
    "seconds are computing alone, at the speed of each device's newest update of this task in an earlier run, "
    "whatever its batch was; where there is none, at the speed of its own benchmark, or they are not known"
)


BuildRun = Callable[[RunConfig, str], "RunComponents"]


class RunValidator:
    """Validates run files; `build_run` builds the run of one, `call` asks a device."""

    def __init__(
        self, build_run: BuildRun, registry: DeviceRegistry, store: Store, call: CallDevice | None = None
    ) -> None:
        self._build_run, self._registry, self._store, self._call = build_run, registry, store, call

    def check(self, config: RunConfig) -> Json:
        """Returns notes on a valid run file.

        Raises:
            EdgeflError: the run cannot work with this fleet.
        """
        return self._check_run(self._build(config, "check"))

    def plan(self, config: RunConfig) -> Json:
        """Returns the plan of a valid run.

        Raises:
            EdgeflError: as `check`.
        """
        run = self._build(config, "plan")
        return {**self._check_run(run), **plan_run(run, self._registry, self._store, self._call)}

    def _build(self, config: RunConfig, run_id: str) -> RunComponents:
        return expect_compiled(self._build_run(config, run_id), self._registry)

    def _check_run(self, run: RunComponents) -> Json:
        check_message_size(run.strategy, run.model)
        check_members(run, self._registry)
        check_trainers(run.config, self._registry, needs_torch=run.needs_torch, compiled=run.header.get(COMPILED_KEY))
        check_root_shard(run.config, run.strategy, self._registry)
        trainers = [info for info in self._registry.list_devices() if is_selected_trainer(info, run.config)]
        task = run.config.run.task
        examples = [info.examples.get(task) or 0 for info in trainers]
        return {
            **check_strategy_memory(run.config, run.strategy, run.model, self._registry),
            "notes": list_notes(run, examples, [info.blocks.get(task, ()) for info in trainers]),
        }


def plan_run(run: RunComponents, registry: DeviceRegistry, store: Store, call: CallDevice | None = None) -> Json:
    """Returns the plan as JSON values: totals, and a row for every device in `rows`.

    Where the run has conditions, `conditions` has how many devices would be `free` now, `blocked`, and `unknown`.

    Raises:
        EdgeflError: the strategy refuses this fleet.
    """
    reasons = {
        info.device_id: _find_exclusion_reason(info, run, registry) for info in _list_considered(run.config, registry)
    }
    reasons |= {
        name: "there is no such device in the fleet" for name in run.config.devices.names if name not in reasons
    }
    candidates = [registry.get_device(name) for name, reason in reasons.items() if not reason]
    availability = _ask_availability(run, [info for info in candidates if info is not None], call)
    reasons |= availability.blocked if availability is not None else {}
    benchmarks = _get_benchmark_speeds(registry, run.config) if run.encode_input is None else {}
    speeds = {**benchmarks, **get_seconds_per_iteration(store, run.config.run.task)}
    available = {
        name: replace(info, allowance=_find_allowance(name, registry, availability))
        for name, reason in reasons.items()
        if not reason and (info := registry.get_device(name))
    }
    shortages = _find_shortages(run, available)
    reasons, available = reasons | shortages, {n: info for n, info in available.items() if n not in shortages}
    task, excluded = run.config.run.task, run.config.devices.exclude
    evaluators = [
        info for info in registry.list_schedulable() if is_selected_evaluator(info, task=task, excluded=excluded)
    ]
    metered = () if availability is None else availability.metered
    health = {name: replace(registry.health.get(name) or HealthMetrics(), is_metered=True) for name in metered}
    view = FleetState({**registry.health, **health})
    for info in [*available.values(), *evaluators]:
        view.update_device(info.device_id, info)
    instructions = _schedule_first(run, view)
    sizes = _PayloadSizes(run)
    rows = [
        _create_row(
            name,
            reasons[name],
            registry.get_device(name),
            instructions.get(name),
            run=run,
            sizes=sizes,
            speed=speeds.get(name),
        )
        for name in sorted(reasons)
    ]
    for row in rows:
        if row["takes_part"] and row["device_id"] not in instructions:
            row["reason"] = _format_wait_reason(run.config, len(available), has_instructions=bool(instructions))
    blocks = {name: info.blocks.get(run.config.run.task, ()) for name, info in available.items()}
    totals = _compute_totals(run, rows, [info.device_id for info in evaluators], blocks)
    if availability is not None and CONDITIONS_KEY in run.header:
        totals["warnings"] += availability.list_warnings()
        totals["conditions"] = availability.to_json()
    elif availability is not None:
        totals["warnings"] += availability.list_warnings("their connection is metered")
    return {
        **totals,
        "obstacle": _find_obstacle(run.config, rows, has_instructions=bool(instructions)),
        "rows": rows,
    }


def _find_allowance(device_id: str, registry: DeviceRegistry, availability: Availability | None) -> Allowance | None:
    """Returns what the hours and budgets of a device allow the planned run; times count from now."""
    owners = registry.get_allowance(device_id, "", 0.0)
    planned = availability.allowances.get(device_id) if availability is not None else None
    if planned is None:
        return owners
    merged = replace(owners or Allowance(), run=planned.run, run_window=planned.run_window)
    return merged.select_run(planned.run)


def _find_shortages(run: RunComponents, devices: Mapping[str, DeviceInfo]) -> dict[str, str]:
    """Returns why no work of a run fits into the hours and budgets of some devices now.

    As in the run's first round, a device's speed is its own benchmark: another run's model may take another time.
    """
    planner, view = run.policy.planner, FleetState()
    if planner is None:
        return {}
    for info in devices.values():
        view.update_device(info.device_id, info)
    found = {name: planner.find_shortage(view, name) for name in view.limited}
    return {name: format_unfit(blocker) for name, blocker in found.items() if blocker is not None}


def _ask_availability(
    run: RunComponents, infos: Sequence[DeviceInfo], call: CallDevice | None
) -> Availability | None:
    """Returns which devices would be free now by the run's conditions, and which are metered where it goes by that.

    None where it has neither.
    """
    asks_metered = METERED_KEY in run.header
    if CONDITIONS_KEY not in run.header and not asks_metered:
        return None
    # Older agents know no such question.
    names = [info.device_id for info in infos if info.capabilities.get(CONDITIONS_KEY) is True]
    if call is None:
        return Availability(blocked={}, unknown=tuple(names))
    return ask_availability(names, run.header.get(CONDITIONS_KEY, {}), call, asks_metered=asks_metered)


def _get_benchmark_speeds(registry: DeviceRegistry, config: RunConfig) -> dict[str, tuple[float, str]]:
    """Returns devices' benchmarked seconds per iteration for the run's model, or its task's default one."""
    name = get_speed_name(config.run.task, config.task.get("model"))
    seconds_by_device = {}
    for info in registry.list_devices():
        speeds = info.capabilities.get("steps_per_s")
        steps_per_s = speeds.get(name) if isinstance(speeds, Mapping) else None
        if isinstance(steps_per_s, int | float) and math.isfinite(steps_per_s) and steps_per_s > 0:
            seconds_by_device[info.device_id] = (1 / steps_per_s, BENCHMARK)
    return seconds_by_device


def _list_considered(config: RunConfig, registry: DeviceRegistry) -> list[DeviceInfo]:
    """Returns the trainers of the fleet, and the devices named in the run file."""
    names = config.devices.names
    return [info for info in registry.list_devices() if info.role == Role.TRAINER or info.device_id in names]


def _find_exclusion_reason(info: DeviceInfo, run: RunComponents, registry: DeviceRegistry) -> str:
    """Returns why a device takes no part; empty if it does."""
    devices, task, selection = run.config.devices, run.config.run.task, run.policy.selection
    memory = info.capabilities.get("memory_bytes")
    needed = count_needed_memory(run)
    compiled = run.header.get(COMPILED_KEY)
    blocker = find_training_blocker(info, needs_torch=run.needs_torch, compiled=compiled)
    checks = (
        (info.role != Role.TRAINER, f"it is an {info.role}, and trains nothing"),
        (info.device_id in devices.exclude, "the run file excludes it"),
        (bool(devices.names) and info.device_id not in devices.names, "the run file names others"),
        (bool(devices.groups) and set(devices.groups).isdisjoint(info.groups), "it is in none of the groups"),
        (task not in info.tasks, explain_missing_shard(info, task)),
        (bool(blocker), blocker),
        (bool(missing := explain_missing_features(info, run.header)), missing),
        (
            registry.get_schedulable(info.device_id) is None,
            registry.explain_absence(info.device_id),
        ),
        (not selection.is_satisfied_by(info), "it has too little memory or no accelerator, see [devices]"),
        (isinstance(memory, int) and memory < needed, f"it has too little memory: the run needs {needed} bytes"),
    )
    return next((reason for is_excluded, reason in checks if is_excluded), "")


def _schedule_first(run: RunComponents, view: FleetState) -> dict[str, list[TrainInstruction]]:
    """Returns the strategy's first instructions, by device."""
    strategy, instructions = run.strategy, dict[str, list[TrainInstruction]]()
    decision = strategy.preview(strategy.init(run.model), run.policy.eligible_view(view))
    for instruction in decision.instructions:
        if isinstance(instruction, TrainInstruction):
            instructions.setdefault(instruction.device_id, []).append(run.policy.adapt_instruction(instruction, view))
    return instructions


def _format_wait_reason(config: RunConfig, num_able: int, *, has_instructions: bool) -> str:
    if has_instructions:
        return "it is not asked in the first round"
    return f"the run would wait: it begins with {config.devices.min} devices, {num_able} are there"


def _find_obstacle(config: RunConfig, rows: Sequence[Json], *, has_instructions: bool) -> str:
    """Returns why the run would not start now; empty if it would."""
    devices, num_able = config.devices, sum(row["takes_part"] for row in rows)
    absent = [f"{row['device_id']}: {row['reason']}" for row in rows if not row["takes_part"]]
    more = [f"and {len(absent) - MAX_NAMES} more"] if len(absent) > MAX_NAMES else []
    listed = "; ".join([*absent[:MAX_NAMES], *more]) or "the fleet has no other"
    required = devices.require if isinstance(devices.require, int) else 1
    if num_able < max(devices.min, required):
        able = "1 device can" if num_able == 1 else f"{num_able or 'no'} devices can"
        return f"it needs {max(devices.min, required)}, and {able} take part: {listed}"
    if devices.require == "all" and any(row["device_id"] in devices.names for row in rows if not row["takes_part"]):
        return f"all are required, and some cannot take part: {listed}"
    return "" if has_instructions else "the strategy gives no device work in the first round"


class _PayloadSizes:
    """Sizes of bodies, each encoded once, in bytes."""

    def __init__(self, run: RunComponents) -> None:
        self._run = run
        encode = run.encode if run.split is None else run.split.encode_front
        self._model_bytes = len(encode(run.model, FIRST_VERSION))
        self._up_bytes: dict[str, int] = {}
        self._exchange: ExchangeSizes | None = None
        if (split := run.split) is not None:
            self._exchange = ExchangeSizes(split.section, split.cut.activation_shape, split.cut.num_outputs)

    def compute_batch_bytes(self, plan: TrainConfig, iterations: int | None) -> tuple[int, int]:
        """Returns the bytes up and down of the batches of a split network; none where iterations are unknown."""
        if self._exchange is None or iterations is None:
            return 0, 0
        bytes_up, bytes_down = self._exchange.count_bytes(plan.batch_size)
        return iterations * bytes_up, iterations * bytes_down

    def compute_down_bytes(self, instruction: TrainInstruction) -> int:
        if self._run.encode_input is not None:
            return len(self._run.encode_input(instruction.block or 0))
        return self._model_bytes if instruction.sends_model else 0

    def compute_up_bytes(self, instruction: TrainInstruction) -> int:
        if self._run.encode_input is not None:
            return self._run.config.job.max_part_bytes
        node, spec = instruction.plan.node, instruction.codec or "dense"
        if node is not None:
            return len(node.edges) * self._compute_encoded_bytes(
                node.codec or "dense", select_peer_tensors(self._run.shapes)
            )
        # How far sums are compressed depends on the data.
        return self._compute_encoded_bytes("dense" if self._run.analysis else spec, self._run.update_shapes)

    def _compute_encoded_bytes(self, spec: str, shapes: ModelSpec) -> int:
        if spec not in self._up_bytes:
            self._up_bytes[spec] = compute_expected_bytes(spec, shapes)
        return self._up_bytes[spec]


def _create_row(  # noqa: PLR0913 the columns of a row
    device_id: str,
    reason: str,
    info: DeviceInfo | None,
    instructions: Sequence[TrainInstruction] | None,
    *,
    run: RunComponents,
    sizes: _PayloadSizes,
    speed: tuple[float, str] | None,
) -> Json:
    examples = info.examples.get(run.config.run.task) if info is not None else None
    row: Json = {"device_id": device_id, "takes_part": not reason, "reason": reason, "examples": examples}
    backends = info.capabilities.get("backends") if info is not None else None
    if isinstance(backends, list) and not reason and run.encode_input is None:
        row["backend"] = select_backend(backends, run.header.get(COMPILED_KEY), needs_torch=run.needs_torch)
    for instruction in instructions or ():
        iterations = _compute_iterations(instruction.plan, examples, run.config.run.local_test_fraction)
        bytes_up, bytes_down = sizes.compute_up_bytes(instruction), sizes.compute_down_bytes(instruction)
        batches_up, batches_down = sizes.compute_batch_bytes(instruction.plan, iterations)
        bytes_up, bytes_down = bytes_up + batches_up, bytes_down + batches_down
        row["iterations"] = (row.get("iterations") or 0) + iterations if iterations is not None else None
        row["bytes_up"], row["bytes_down"] = row.get("bytes_up", 0) + bytes_up, row.get("bytes_down", 0) + bytes_down
        row["codec"] = instruction.plan.node.codec if instruction.plan.node is not None else instruction.codec
        row["seconds"] = instruction.plan.seconds
    if speed is not None and row.get("iterations") is not None:
        row["seconds"], row["measured_in"] = row["iterations"] * speed[0], speed[1]
    return row


def _compute_iterations(plan: TrainConfig, examples: int | None, test_fraction: float) -> int | None:
    """Returns the iterations of a plan, up to the split of the shard; None if unknown."""
    if plan.iterations is not None:
        return plan.iterations
    if plan.epochs is None or examples is None:
        return None
    return max(1, round(plan.epochs * math.ceil((1 - test_fraction) * examples / plan.batch_size)))


def _compute_totals(
    run: RunComponents, rows: Sequence[Json], evaluators: Sequence[str], blocks: Mapping[str, Sequence[int]]
) -> Json:
    participants = [row for row in rows if "bytes_up" in row]
    seconds = [row.get("seconds") for row in participants]
    known = [value for value in seconds if value is not None]
    goal = {name: value for name, value in _get_goal_values(run.goal).items() if value is not None}
    return {
        "task": run.config.run.task,
        "strategy": run.config.strategy.name,
        "goal": goal,
        "model_bytes": count_model_bytes(run.model),
        "base_bytes": count_base_bytes(run),
        "num_devices": len(participants),
        "require": run.config.devices.require,
        "evaluators": list(evaluators),
        "bytes_up": sum(row["bytes_up"] for row in participants),
        "bytes_down": sum(row["bytes_down"] for row in participants),
        "seconds": max(known) if known and len(known) == len(seconds) else None,
        "assumed": _list_assumptions(run),
        "warnings": [
            *_list_shortages(run.strategy.needed_updates, run.config.run.min_updates, len(participants)),
            *_list_warnings(run, evaluators, len(participants)),
            *list_notes(
                run,
                [row["examples"] or 0 for row in participants],
                [blocks.get(row["device_id"], ()) for row in participants],
            ),
        ],
    }


def list_notes(run: RunComponents, examples: Sequence[int], blocks: Sequence[Iterable[int]]) -> list[str]:
    """Returns lines on what a user hardly meant, though the run can start.

    Args:
        run: of any strategy.
        examples: of each device that takes part.
        blocks: of each of them; none where its shard is not redundant.
    """
    notes = (
        explain_work(run, examples, blocks),
        explain_base(run),
        explain_privacy(run.config, get_private_mean(run.strategy)),
    )
    return list(filter(None, notes))


def explain_base(run: RunComponents) -> str:
    """Returns one line on a run that keeps tensors as they were drawn at random; empty where they were trained."""
    config = run.config
    if run.adapted is None or config.adapt.base is not None or config.run.init is not None:
        return ""
    if not (frozen := run.adapted.task.parts.frozen_names):
        return ""
    return (
        f"{len(frozen)} frozen tensors, such as {min(frozen)}, stay untrained, as the task draws them: name a "
        "pretrained base in adapt.base, or a model that a run has kept in run.init"
    )


def explain_work(run: RunComponents, examples: Sequence[int], blocks: Sequence[Iterable[int]]) -> str:
    """Returns one line on a run whose rounds train far less than those of `fedavg`; empty where they do not.

    Someone who set the local work, or did not give the run by rounds, is told nothing.

    Args:
        run: of any strategy.
        examples: of each device that takes part.
        blocks: of each of them; none where its shard is not redundant.
    """
    config, rounds = run.config, run.goal.rounds
    options, name = config.strategy.options, config.strategy.name
    plan: TrainConfig | None = getattr(run.strategy, "plan", None)
    per_round = count_round_iterations(run.strategy, blocks, config.run.updates_per_round)
    if (
        rounds is None
        or plan is None
        or per_round is None
        or run.analysis is not None
        or not sum(examples)
        or not {"iterations", "seconds"}.isdisjoint(options)
    ):
        return ""
    usual = replace(plan, iterations=None, seconds=None, epochs=run.usual_epochs)
    counts = [_compute_iterations(usual, number, config.run.local_test_fraction) or 0 for number in examples]
    if per_round > LITTLE_WORK * sum(counts):
        return ""
    return (
        f"{rounds} rounds of {name} are about {rounds * per_round} iterations on all devices together, one "
        f"mini-batch each; fedavg would take {rounds * sum(counts)}: "
        f"run.rounds = {math.ceil(rounds * sum(counts) / per_round)} is as much work"
    )


def count_round_iterations(
    strategy: Any, blocks: Sequence[Iterable[int]], updates_per_round: int | None = None
) -> int | None:
    """Returns the local iterations of all devices in a round; None where they follow from epochs or seconds.

    With `redundant` each of the devices' blocks counts once, and each device without any.
    """
    plan = getattr(strategy, "plan", None)
    if not isinstance(plan, TrainConfig) or plan.iterations is None:
        return None
    exchanges = getattr(getattr(strategy, "config", None), "exchanges_per_round", 1)
    collective = getattr(getattr(strategy, "rules", None), "collective", None)
    exchanges *= 1 if collective is None else collective.reductions
    num_updates = updates_per_round or len(blocks)
    if isinstance(strategy, RedundantShards):
        held = [set(numbers) for numbers in blocks]
        num_updates = len(set[int]().union(*held)) + held.count(set())
    return plan.iterations * exchanges * num_updates


def _get_goal_values(goal: StoppingCriteria) -> Json:
    values = {name: getattr(goal, name) for name in ("rounds", "epochs", "updates", "seconds", "bytes", "accuracy")}
    return {**values, "until": None if goal.until is None else str(goal.until)}


def _list_shortages(needed: int, min_updates: int | None, num_devices: int) -> list[str]:
    """Returns whether a robust rule would get too few updates; a run that would wait says that instead."""
    count = num_devices if min_updates is None else min(min_updates, num_devices)
    return [format_shortage(needed, count)] if 0 < count < needed else []


def _list_warnings(run: RunComponents, evaluators: Sequence[str], num_devices: int) -> list[str]:
    """Returns what may keep the run from its end."""
    goal, section = run.goal, run.config.run
    rules = {name for name, value in _get_goal_values(goal).items() if value is not None}
    is_only_rule = bool(rules) and rules <= {"accuracy", "until"}
    if not is_only_rule or section.trust_single_evaluation:
        return []
    names = set(evaluators)
    has_coordinator = EVALUATOR_NAME in names and section.evaluate_on in {"auto", "coordinator"}
    num_others = len(names - {EVALUATOR_NAME})
    if section.evaluate_on == "devices" or (section.evaluate_on == "auto" and not names):
        num_others = num_devices
    if has_coordinator or (num_others >= MIN_EVALUATORS and section.evaluate_on in {"auto", "evaluator", "devices"}):
        return []
    return [
        (
            f"{' or '.join(sorted(rules))} is the only stop rule, and nobody evaluates whose word ends a run: start "
            f"the coordinator with --test-shard, have {MIN_EVALUATORS} evaluators, add run.rounds, or set "
            "run.trust_single_evaluation"
        )
    ]


def _list_assumptions(run: RunComponents) -> list[str]:
    if run.encode_input is not None:
        return [JOB_ASSUMPTION]
    assumptions = [BYTES_ASSUMPTION, SECONDS_ASSUMPTION]
    if run.strategy.has_nodes:
        assumptions.append("bytes up are one set of tensors to every neighbour, the model comes once")
    if run.config.devices.fraction is not None or run.config.devices.count is not None:
        assumptions.append("other devices are drawn in later rounds")
    return assumptions


def create_admission_requirements(
    run: RunComponents, previous_devices: tuple[str, ...] = (), *, is_resumed: bool = False
) -> AdmissionRequirements:
    """Returns the admission requirements of a run.

    `previous_devices` took part before it was resumed; with `is_resumed` it goes on where it was.

    The first model is prefetched only where every device will use it: nodes of a graph may have their own, and
    where a sample is drawn for each round the other devices would fetch it for nothing. Room on the disk for a
    base is looked for where it is downloaded, since a device may have it.
    """
    devices, model_bytes = run.config.devices, count_device_bytes(run)
    has_nodes = run.strategy.has_nodes
    return AdmissionRequirements(
        require=devices.require,
        ready_s=devices.ready_s,
        model_fingerprint=run.layout,
        memory_bytes=count_needed_memory(run),
        disk_bytes=MODEL_COPIES_ON_DISK * model_bytes,
        previous_devices=previous_devices,
        is_resumed=is_resumed,
        should_prefetch_model=not has_nodes and devices.count is None and devices.fraction is None,
    )


def count_needed_memory(run: RunComponents) -> int:
    """Returns the bytes that a device needs in memory to train a run."""
    copies = MODEL_COPIES_IN_MEMORY
    if run.has_personal:
        is_mixed = run.config.strategy.options.get("personal_mixture") is not None
        copies += MIXED_COPIES_IN_MEMORY if is_mixed else PERSONAL_COPIES_IN_MEMORY
    return copies * count_device_bytes(run) + BASE_COPIES_IN_MEMORY * count_base_bytes(run)


def count_device_bytes(run: RunComponents) -> int:
    """Returns the bytes of what a device has of the model in memory: all, or the first layers."""
    names = {spec.name for spec in (run.shapes if run.split is None else run.split.front)}
    return count_model_bytes({name: tensor for name, tensor in run.model.items() if name in names})


def count_base_bytes(run: RunComponents) -> int:
    """Returns the bytes of what a device gets once; 0 where all of the model travels."""
    return 0 if run.adapted is None else run.adapted.base_bytes


def count_model_bytes(model: Tensors) -> int:
    """Returns the bytes of a model in memory."""
    return sum(getattr(tensor, "nbytes", 0) for tensor in model.values())


def check_strategy_memory(config: RunConfig, strategy: Any, model: Tensors, registry: DeviceRegistry) -> Json:
    """Returns `state_bytes` and the number of devices that it is for, `state_devices`.

    Counts the trainers that the run file selects, present or not, and at least the minimum of the run.

    Raises:
        ConfigError: the state exceeds the run's limit.
    """
    return check_memory_for(
        max(config.devices.min, sum(is_selected_trainer(info, config) for info in registry.list_devices())),
        config,
        strategy,
        model,
    )


def check_memory_for(num_devices: int, config: RunConfig, strategy: Any, model: Tensors) -> Json:
    """Returns the same as `check_strategy_memory`, for `num_devices`.

    Raises:
        ConfigError: the state exceeds the run's limit.
    """
    needed = num_devices * compute_bytes_per_device(strategy, model)
    limit = config.run.max_state_bytes
    if needed > limit:
        raise ConfigError(
            f"{config.strategy.name} keeps {_format_bytes(needed)} for {num_devices} devices, the run may have "
            f"{_format_bytes(limit)}: raise run.max_state_bytes, or name fewer devices"
        )
    return {"state_bytes": needed, "state_devices": num_devices}


def check_message_size(strategy: Any, model: Tensors) -> None:
    """Checks that devices can send each other a full model.

    Raises:
        ConfigError: it exceeds the maximum message size.
    """
    needed = int(strategy.bytes_per_message(count_model_bytes(model)))
    if needed > MAX_PEER_BYTES:
        raise ConfigError(
            f"devices send each other messages of at most {_format_bytes(MAX_PEER_BYTES)}, this run's have "
            f"{_format_bytes(needed)}: use strategy.carrier = 'relay', or a smaller model"
        )


def check_members(run: RunComponents, registry: DeviceRegistry) -> None:
    """Checks that the members of a collective can send each other chunks, and know where the others listen.

    Raises:
        ConfigError: the task trains confined on one, nothing says where one listens, or two say the same.
    """
    collective = getattr(getattr(run.strategy, "rules", None), "collective", None)
    if collective is None:
        return
    by_address: dict[str, str] = {}
    for info in registry.list_devices():
        if not is_selected_trainer(info, run.config):
            continue
        if _is_confined(info, is_built_in=run.is_built_in):
            raise ConfigError(
                f"aggregation.collective must be 'coordinator' for task {run.config.run.task}, got "
                f"{collective.collective!r}: {info.device_id} trains it confined, and so sends no chunks; where its "
                "code is trusted, edgefl device start --confine never"
            )
        address = find_address(collective, info)
        if not address:
            raise ConfigError(
                f"aggregation.hosts must name a file that says where {info.device_id} listens: it does not report it "
                "itself"
            )
        if (other := by_address.setdefault(address, info.device_id)) != info.device_id:
            raise ConfigError(
                f"aggregation.collective = {collective.collective!r}: {other} and {info.device_id} both listen at "
                f"{address}; let one join with another port: edgefl device join --peer-port PORT"
            )


def compute_bytes_per_device(strategy: Any, model: Tensors) -> int:
    """Returns the bytes of state per device that the strategy declares."""
    return int(strategy.bytes_per_device(count_model_bytes(model)))


def is_selected_trainer(info: DeviceInfo, config: RunConfig) -> bool:
    """Returns whether a device trains, and a run file selects it."""
    devices = config.devices
    chosen = is_selected(
        info, task=config.run.task, groups=devices.groups, names=devices.names, excluded=devices.exclude
    )
    return info.role == Role.TRAINER and chosen


def _is_confined(info: DeviceInfo, *, is_built_in: bool) -> bool:
    """Returns whether a device trains a task in a process without its connections, by the policy that it reports."""
    reported = info.capabilities.get("confinement")
    policy = reported.get("policy") if isinstance(reported, Mapping) else "auto"
    return policy == "always" or (policy != "never" and not is_built_in)


def _format_bytes(num_bytes: int) -> str:
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2)):
        if num_bytes >= size:
            return f"{num_bytes} bytes ({num_bytes / size:.1f} {unit})"
    return f"{num_bytes} bytes"


def check_root_shard(config: RunConfig, strategy: Any, registry: DeviceRegistry) -> None:
    """Checks that the coordinator's evaluator has data for a strategy that trains there, too.

    Raises:
        ConfigError: it has none of the task.
    """
    info = registry.get_device(EVALUATOR_NAME)
    if strategy.root_examples and (info is None or config.run.task not in info.tasks):
        raise ConfigError(
            f"{config.strategy.name} trains on examples of the coordinator, which has none of {config.run.task}: "
            f"start it with edgefl coordinator start --test-shard {config.run.task}=FILE"
        )


def check_trainers(
    config: RunConfig, registry: DeviceRegistry, *, needs_torch: bool, compiled: Json | None = None
) -> None:
    """Checks that at least one trainer that the run file selects can train its task.

    A run that selects no device yet passes: devices may join later.

    Raises:
        TaskError: none of them can.
    """
    selected = [info for info in registry.list_devices() if is_selected_trainer(info, config)]
    reasons = {
        info.device_id: find_training_blocker(info, needs_torch=needs_torch, compiled=compiled) for info in selected
    }
    if not all(reasons.values()) or not selected:
        return
    names = sorted(reasons)
    listed = ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")
    if any(reason != NO_TORCH for reason in reasons.values()):
        details = "; ".join(f"{name}: {reasons[name]}" for name in names[:MAX_NAMES])
        raise TaskError(f"no device can train task {config.run.task}: {details}")
    raise TaskError(
        f"no device can train task {config.run.task}: {listed} have no torch and can only use finished models; "
        f"install {DISTRIBUTION}[train] on them, or let a board join that has it"
    )
