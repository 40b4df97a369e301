"""From a run file to boards and their training."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence

from edgefl.config import RunConfig
from edgefl.errors import ConfigError
from edgefl.simulation.boards import Board
from edgefl.simulation.choosing import Choosing
from edgefl.simulation.costs import Workload, iteration_seconds, reference_cost
from edgefl.simulation.data import FleetData, Shard
from edgefl.simulation.faults import Fault, check_hits, load_faults, with_faults
from edgefl.simulation.fleet import World
from edgefl.simulation.in_process import InProcess
from edgefl.simulation.profiles import Profile, load_catalogue
from edgefl.simulation.training import Training
from edgefl.simulation.workbench import Trade, Workbench
from edgefl.simulation.workers import WorkerPool
from edgefl.types import DeviceInfo, Json, Shapes

log = logging.getLogger(__name__)

USUAL_WAVES = 20
"""How often a run that does not say its rounds is expected to give out as much work as at first."""


def device_names(num_devices: int) -> list[str]:
    """Returns the names that `cut_shards` gives the devices, too."""
    width = max(2, len(str(num_devices)))
    return [f"device-{number:0{width}}" for number in range(1, num_devices + 1)]


def read_faults(config: RunConfig, names: Sequence[str]) -> tuple[Fault, ...]:
    """Returns the faults of the run file's script; none when it names none.

    Raises:
        ConfigError: the script makes no sense, or a fault hits nobody.
    """
    if config.simulation.faults is None:
        return ()
    faults = load_faults(config.simulation.faults)
    check_hits(faults, names)
    if left_out := [fault for fault in faults if not fault.is_simulated]:
        what = ", ".join(dict.fromkeys(f"{fault.kind} of {fault.device}" for fault in left_out))
        log.warning("%d of %d faults have nothing like them in virtual time: %s", len(left_out), len(faults), what)
    return faults


def make_boards(
    config: RunConfig, names: Sequence[str], faults: Sequence[Fault], shards: Sequence[Shard] | None, shapes: Shapes
) -> list[Board]:
    """Returns the boards that take part.

    Args:
        config: says who they are and who of them takes part.
        names: of all devices.
        faults: that hit them.
        shards: their data in the same order; None where nothing is trained.
        shapes: of the task.

    Raises:
        ConfigError: a profile makes no sense, or fewer are left than the run needs.
    """
    section, task = config.simulation, config.run.task
    files = [] if section.profile_file is None else [section.profile_file]
    catalogue = load_catalogue(files)
    workload = Workload(task=task, options=config.task, shapes=shapes, iteration_s=section.iteration_s)
    reference = reference_cost(workload, catalogue)
    boards: list[Board] = []
    for place, profile in enumerate(catalogue.fleet(section.profiles, len(names))):
        if not _takes_part(config, names[place], profile):
            continue
        shard = None if shards is None else shards[place]
        blocks = {} if shard is None else shard.blocks
        board = Board(
            info=_info(names[place], profile, task, section.examples if shard is None else len(shard.rows), blocks),
            index=len(boards),
            profile=with_faults(names[place], profile, faults),
            iteration_s=iteration_seconds(profile, workload, reference),
            num_examples=section.examples if shard is None else len(shard.train),
            jitter=section.jitter if profile.jitter is None else profile.jitter,
            seed=config.run.seed,
            block_sizes={block: stop - start for block, (start, stop) in blocks.items()},
        )
        boards.append(board)
    needed = max(1, config.devices.min)
    if len(boards) < needed:
        left = f"{len(boards)} of {len(names)} devices" if boards else "no device"
        raise ConfigError(
            f"devices.names and devices.groups leave {left} of the simulation, the run needs at least {needed}"
        )
    return boards


def make_world(config: RunConfig) -> World:
    section = config.simulation
    return World(
        up_bytes_per_s=section.server_up_bytes_per_s,
        down_bytes_per_s=section.server_down_bytes_per_s,
        detect_s=section.detect_s,
        evaluation_s=section.evaluation_s,
        join_at_start=config.devices.join == "start",
    )


def make_training(
    config: RunConfig, data: FleetData, names: Sequence[str], shapes: Shapes, clock: Callable[[], float]
) -> Training:
    """Returns who trains: this process or several, whatever the run file says or a measurement finds."""
    trade = Trade(task=config.run.task, options=config.task, seed=config.run.seed)
    places = {name: place for place, name in enumerate(names)}
    bench = Workbench(trade, data, places)
    here = InProcess(bench, shapes)

    def start_pool(num_workers: int) -> Training:
        return WorkerPool(trade, data, places=places, shapes=shapes, num_workers=num_workers, here=here)

    workers = config.simulation.workers
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
        waves = config.run.rounds or USUAL_WAVES
        return Choosing(here, bench, start_pool, cores=cores, waves=waves, clock=clock)
    return start_pool(workers) if workers else here


def facts_of(profile: Profile) -> Json:
    """Returns the capabilities that a board of this kind would report."""
    facts = {
        "profile": profile.name,
        "model": profile.model or None,
        "memory_bytes": profile.memory_bytes,
        "accelerators": [{"kind": kind} for kind in profile.accelerators],
    }
    return {name: value for name, value in facts.items() if value is not None}


def _takes_part(config: RunConfig, name: str, profile: Profile) -> bool:
    chosen = config.devices
    in_group = not chosen.groups or not set(chosen.groups).isdisjoint(profile.groups)
    return in_group and (not chosen.names or name in chosen.names)


def _info(
    name: str, profile: Profile, task: str, num_examples: int, blocks: Mapping[int, tuple[int, int]]
) -> DeviceInfo:
    return DeviceInfo(
        device_id=name,
        groups=profile.groups,
        tasks=(task,),
        examples={task: num_examples},
        capabilities=facts_of(profile),
        blocks={task: tuple(sorted(blocks))} if blocks else {},
    )
