"""Set-up of a simulation: devices, the cost of their iterations, and the training backend, from a run file."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgefl.core.config import RunConfig
from edgefl.core.errors import ConfigError
from edgefl.core.types import DeviceInfo, Json, ModelSpec, Scalar
from edgefl.simulation.backends.backend import TrainingBackend
from edgefl.simulation.backends.in_process import AutoBackend, InProcessBackend
from edgefl.simulation.backends.partitioned_data import FleetData, ShardRows
from edgefl.simulation.backends.process_pool import ProcessPoolBackend
from edgefl.simulation.backends.trainer import SimulatedTrainer, TaskSpec
from edgefl.simulation.device import SimulatedDevice
from edgefl.simulation.faults import Fault, apply_faults, check_targets, load_faults
from edgefl.simulation.fleet import SimulationSettings
from edgefl.simulation.profiles import DeviceProfile, IterationCost, ProfileCatalogue, load_catalogue

log = logging.getLogger(__name__)

DEFAULT_EXPECTED_ROUNDS = 20
"""Expected rounds of work in a run without a number of rounds."""


def make_device_names(num_devices: int) -> list[str]:
    """Returns the device names, the same as `create_shards` gives."""
    width = max(2, len(str(num_devices)))
    return [f"device-{number:0{width}}" for number in range(1, num_devices + 1)]


def load_run_faults(config: RunConfig, names: Sequence[str]) -> tuple[Fault, ...]:
    """Returns the faults of the run file's script; none without a script.

    Raises:
        ConfigError: the script is invalid, or a fault matches no device.
    """
    if config.simulation.faults is None:
        return ()
    faults = load_faults(config.simulation.faults)
    check_targets(faults, names)
    if unsupported := [fault for fault in faults if not fault.is_simulated]:
        listing = ", ".join(dict.fromkeys(f"{fault.kind} of {fault.device}" for fault in unsupported))
        log.warning(
            "%d of %d faults have nothing like them in virtual time: %s", len(unsupported), len(faults), listing
        )
    return faults


def make_devices(
    config: RunConfig,
    names: Sequence[str],
    faults: Sequence[Fault],
    shards: Sequence[ShardRows] | None,
    model_spec: ModelSpec,
) -> list[SimulatedDevice]:
    """Returns the devices that take part.

    Args:
        config: profiles and selection of devices.
        names: of all devices.
        faults: faults of the run.
        shards: their data in the same order; None where nothing is trained.
        model_spec: of the task.

    Raises:
        ConfigError: a profile is invalid, or fewer devices are left than the run needs.
    """
    section, task = config.simulation, config.run.task
    files = [] if section.profile_file is None else [section.profile_file]
    catalogue = load_catalogue(files)
    workload = Workload(task=task, options=config.task, model_spec=model_spec, iteration_s=section.iteration_s)
    reference = compute_reference_cost(workload, catalogue)
    boards: list[SimulatedDevice] = []
    for index, profile in enumerate(catalogue.assign_profiles(section.profiles, len(names))):
        if not _is_selected(config, names[index], profile):
            continue
        shard = None if shards is None else shards[index]
        blocks = {} if shard is None else shard.blocks
        board = SimulatedDevice(
            info=_make_device_info(
                names[index], profile, task, section.examples if shard is None else len(shard.rows), blocks
            ),
            profile=apply_faults(names[index], profile, faults),
            iteration_s=make_cost_function(profile, workload, reference),
            num_examples=section.examples if shard is None else len(shard.train),
            jitter=section.jitter if profile.jitter is None else profile.jitter,
            seed=config.run.seed,
            block_sizes={block: stop - start for block, (start, stop) in blocks.items()},
        )
        boards.append(board)
    required = max(1, config.devices.min)
    if len(boards) < required:
        selected = f"{len(boards)} of {len(names)} devices" if boards else "no device"
        raise ConfigError(
            f"devices.names and devices.groups leave {selected} of the simulation, the run needs at least {required}"
        )
    return boards


def make_settings(config: RunConfig) -> SimulationSettings:
    section = config.simulation
    return SimulationSettings(
        up_bytes_per_s=section.server_up_bytes_per_s,
        down_bytes_per_s=section.server_down_bytes_per_s,
        failure_detection_s=section.detect_s,
        evaluation_duration_s=section.evaluation_s,
        join_at_start=config.devices.join == "start",
    )


def make_backend(
    config: RunConfig, data: FleetData, names: Sequence[str], model_spec: ModelSpec, clock: Callable[[], float]
) -> TrainingBackend:
    """Returns the training backend: one process or several, as configured or measured."""
    task_spec = TaskSpec(task=config.run.task, options=config.task, seed=config.run.seed)
    indices = {name: index for index, name in enumerate(names)}
    trainer = SimulatedTrainer(task_spec, data, indices)
    in_process = InProcessBackend(trainer, model_spec)

    def start_pool(num_workers: int) -> TrainingBackend:
        return ProcessPoolBackend(
            task_spec,
            data,
            shard_indices=indices,
            model_spec=model_spec,
            num_workers=num_workers,
            in_process=in_process,
        )

    workers = config.simulation.workers
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
        waves = config.run.rounds or DEFAULT_EXPECTED_ROUNDS
        return AutoBackend(in_process, trainer, start_pool, num_cores=cores, expected_rounds=waves, clock=clock)
    return start_pool(workers) if workers else in_process


def make_capabilities(profile: DeviceProfile) -> Json:
    """Returns the capabilities that a device of this profile reports."""
    facts = {
        "profile": profile.name,
        "model": profile.model or None,
        "memory_bytes": profile.memory_bytes,
        "accelerators": [{"kind": kind} for kind in profile.accelerators],
    }
    return {name: value for name, value in facts.items() if value is not None}


def _is_selected(config: RunConfig, name: str, profile: DeviceProfile) -> bool:
    selection = config.devices
    in_group = not selection.groups or not set(selection.groups).isdisjoint(profile.groups)
    return in_group and (not selection.names or name in selection.names)


def _make_device_info(
    name: str, profile: DeviceProfile, task: str, num_examples: int, blocks: Mapping[int, tuple[int, int]]
) -> DeviceInfo:
    return DeviceInfo(
        device_id=name,
        groups=profile.groups,
        tasks=(task,),
        examples={task: num_examples},
        capabilities=make_capabilities(profile),
        blocks={task: tuple(sorted(blocks))} if blocks else {},
    )


REFERENCE_FLOPS = 10e9
"""Speed of the reference machine on small networks, for tasks without a measured cost."""
FLOPS_PER_WEIGHT = 6
"""Forward, backward and gradient of one weight and one example; a convolution uses its weights far more often."""
ITERATION_OVERHEAD_S = 3e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The trained task by name and options, its tensors, and the user's seconds per iteration."""

    task: str
    options: Mapping[str, Scalar]
    model_spec: ModelSpec
    iteration_s: float | None = None

    @property
    def cost_keys(self) -> tuple[str, ...]:
        """Returns the names under which costs are looked up, most specific first."""
        model = self.options.get("model")
        return (f"{self.task}/{model}",) if model is not None else (self.task,)


def compute_reference_cost(workload: Workload, catalogue: ProfileCatalogue) -> IterationCost:
    """Returns the cost of an iteration on the reference machine.

    The run file's value goes first, then the task's measured one; else it is estimated from the number of
    weights, with a warning.
    """
    if workload.iteration_s is not None:
        return IterationCost(fixed_s=workload.iteration_s)
    for key in workload.cost_keys:
        if key in catalogue.reference_costs:
            return catalogue.reference_costs[key]
    num_weights = sum(spec.size for spec in workload.model_spec)
    log.warning(
        "nobody knows how long an iteration of %s takes; estimated from its %d weights. "
        "Say it in the run file: [simulation] iteration_s, seconds on the reference machine",
        workload.cost_keys[0],
        num_weights,
    )
    return IterationCost(fixed_s=ITERATION_OVERHEAD_S, example_s=FLOPS_PER_WEIGHT * num_weights / REFERENCE_FLOPS)


def make_cost_function(
    profile: DeviceProfile, workload: Workload, reference: IterationCost
) -> Callable[[int], float]:
    """Returns batch size -> seconds of one iteration for a device profile."""
    for key in workload.cost_keys:
        if key in profile.iterations:
            return profile.iterations[key].compute_seconds
    return lambda batch_size: reference.compute_seconds(batch_size) / profile.speed
