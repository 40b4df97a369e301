"""One training run on a simulated fleet, as a function: same loop and strategies, in virtual time.

Everything follows from the run file, the data and the seed, so the same run gives the same history, byte for byte.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgefl.compression.split_bodies import ExchangeSizes
from edgefl.coordinator.directory import default_directory
from edgefl.coordinator.runs.history_recorder import compute_no_metrics
from edgefl.coordinator.runs.planning import check_memory_for, list_notes
from edgefl.core import extensions
from edgefl.core.analyses import ANALYSES, has_result
from edgefl.core.claims import CLAIM_BOUNDED, ClaimLimits
from edgefl.core.clusters import parse_num_clusters
from edgefl.core.conditions import NO_CONDITIONS
from edgefl.core.config import (
    CompressionSection,
    DevicesSection,
    RunConfig,
    ServerSection,
    SplitSection,
    StrategySection,
    make_run_config,
)
from edgefl.core.errors import ConfigError
from edgefl.core.protocol import EVALUATOR_NAME
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import DeviceInfo, Json, ModelSpec, Role, Scalar
from edgefl.device.conditions.run_conditions import NO_RUN_CONDITIONS
from edgefl.engine.assembly.build import build_run, make_run_task
from edgefl.engine.assembly.components import RunComponents
from edgefl.engine.assembly.normalisation import apply_scales, find_named_run, make_scales_run, should_find_scales
from edgefl.engine.assembly.privacy import check_fleet_size
from edgefl.engine.progress import StoppingCriteria
from edgefl.engine.round_loop import run_rounds
from edgefl.engine.run_summary import RunResult, compute_run_metrics
from edgefl.simulation.backends.in_process import PLACEHOLDER_TENSORS, AutoBackend, InProcessBackend, NoOpBackend
from edgefl.simulation.backends.partitioned_data import (
    FleetData,
    ShardRows,
    partition_in_memory,
    read_shards,
    reserve_root,
)
from edgefl.simulation.backends.process_pool import ProcessPoolBackend
from edgefl.simulation.backends.ray_cluster import RayBackend, RayOptions
from edgefl.simulation.backends.trainer import SimulatedTrainer, TaskSpec, TrainingBackend
from edgefl.simulation.conditions import ConditionSettings
from edgefl.simulation.device import SimulatedDevice
from edgefl.simulation.faults import Fault, apply_faults, check_targets, load_faults
from edgefl.simulation.fleet import SimulatedFleet, SimulationSettings
from edgefl.simulation.history_recorder import EarlyStop, OnChange, SimulationHistory, StoppedEarlyError
from edgefl.simulation.local_fleet import count_devices, default_scheme
from edgefl.simulation.network import SimulatedDownlink
from edgefl.simulation.profiles import (
    DeviceProfile,
    IterationCost,
    ProfileCatalogue,
    list_profile_names,
    load_catalogue,
)
from edgefl.storage.checkpoints import open_tensor_bytes
from edgefl.storage.queries.history import read_history
from edgefl.storage.repositories.records import RunRecord
from edgefl.storage.store import Store
from edgefl.strategies.job_strategy import RESULT
from edgefl.strategies.participation import EvaluationSchedule, RunParticipationPolicy
from edgefl.strategies.registry import get_settings
from edgefl.strategies.update_guard import UpdateGuard
from edgefl.strategies.validated_strategy import ValidatedStrategy
from edgefl.system.atomic_files import DATABASE_NAME, make_private_directory, write_atomic
from edgefl.tasks.analyses.registry import parse_analysis
from edgefl.tasks.datasets.partitioning import parse_scheme
from edgefl.tasks.registry import import_torch

log = logging.getLogger(__name__)

TrainerFactory = Callable[[TaskSpec, FleetData, Mapping[str, int]], SimulatedTrainer]
"""Task, data, device id -> the shard's place in the data -> what trains the devices."""

_FOLDER_PREFIX = "edgefl-conditions-"

ADVICE_FOLDER = "advice"
"""Below `default_root`: proxy shards and simulated runs of advice."""
REFERENCE_STRATEGY = "local"
DEFAULT_EXPECTED_ROUNDS = 20
MAX_SHOWN = 12
"""Expected rounds of work in a run without a number of rounds."""

REFERENCE_FLOPS = 10e9
"""Speed of the reference machine on small networks, for tasks without a measured cost."""
FLOPS_PER_WEIGHT = 6
"""Forward, backward and gradient of one weight and one example; a convolution uses its weights far more often."""
ITERATION_OVERHEAD_S = 3e-4


def simulate(  # noqa: PLR0913 the options of the command line, all by name
    config: RunConfig | Mapping[str, Any] | str | Path,
    *,
    devices: int | Sequence[str | Path] | None = None,
    profiles: Sequence[str] = (),
    data: str | Path | None = None,
    scheme: str | None = None,
    root: str | Path | None = None,
    bookkeeping_only: bool = False,
    on_change: OnChange | None = None,
    allow_modules: Sequence[str] = (),
    run_id: str | None = None,
    early_stop: EarlyStop | None = None,
) -> RunResult:
    """Trains on a simulated fleet and returns the history; arguments override the run file's `[simulation]`.

    Args:
        config: a run file, its tables, or the result of `config.load_run`.
        devices: their number, or existing shards, one per device.
        profiles: device profiles, `NAME` or `NAME:COUNT` each, or a profile file, for all profiles in it.
        data: the folder of the data set; digits needs none.
        scheme: the partition scheme [digits: dirichlet:0.5; motionsense: natural; others: iid].
        root: folder of the history; `~/.local/share/edgefl/simulations` when None.
        bookkeeping_only: no training: times, bytes and schedules only.
        on_change: called with the run's progress, as in `edgefl run show`.
        allow_modules: modules whose classes the run file may name, as `--allow-module`.
        run_id: of the run in the history, with a number appended where it is taken; None for one that follows from
            the settings and the devices.
        early_stop: called with each round that is evaluated, and with what returns the rows of the rounds so far as
            in `edgefl history rounds`; a text that is not empty ends the run at once, as stopped, for that reason.

    Raises:
        EdgeflError: the run file is invalid, data is missing, or the run failed.
    """
    run_config = _load_config(config, devices, profiles, data, scheme)
    if bookkeeping_only and all(
        rule is None
        for rule in (getattr(run_config.run, name) for name in ("rounds", "epochs", "updates", "seconds", "bytes"))
    ):
        raise ConfigError(
            "without training no accuracy is ever reached; give run.rounds, epochs, updates, seconds or bytes"
        )
    folder = Path(default_root() if root is None else root).expanduser().resolve()
    with extensions.allow_modules(allow_modules):
        fleet_data = None if bookkeeping_only else load_fleet_data(run_config, devices)
        if fleet_data is not None and should_find_scales(run_config):
            run_config = _find_scales(run_config, fleet_data, folder, run_id)
        return simulate_with_data(
            run_config, fleet_data, folder, on_change=on_change, run_id=run_id, early_stop=early_stop
        )


def simulate_with_data(  # noqa: PLR0913 the last four by name
    config: RunConfig,
    data: FleetData | None,
    folder: Path,
    *,
    on_change: OnChange | None = None,
    run_id: str | None = None,
    make_trainer: TrainerFactory = SimulatedTrainer,
    early_stop: EarlyStop | None = None,
) -> RunResult:
    """Trains on a simulated fleet whose data is in memory.

    Args:
        config: a run file, with as many devices as `data` has shards.
        data: the fleet's; None where nothing is trained.
        folder: of the history.
        on_change: as in `simulate`.
        run_id: as in `simulate`.
        make_trainer: of what trains the devices, in this process unless it is the usual one.
        early_stop: as in `simulate`.

    Raises:
        EdgeflError: the run file is invalid, or the run failed.
    """
    with closing(_Simulation(config, data, make_trainer)) as simulation:
        make_private_directory(folder)
        with Store.open(folder / DATABASE_NAME) as store:
            started_id = simulation.run(store, folder, on_change, run_id, early_stop)
            return _build_result(store, started_id, folder)


def prepare_simulation(
    config: RunConfig,
    *,
    devices: int | Sequence[str | Path] | None = None,
    profiles: Sequence[str] = (),
    data: str | Path | None = None,
    scheme: str | None = None,
) -> tuple[RunConfig, FleetData]:
    """Returns the run file with the arguments of `simulate` applied, and the fleet's data.

    Raises:
        EdgeflError: something in it makes no sense, or data is missing.
    """
    config = _load_config(config, devices, profiles, data, scheme)
    return config, load_fleet_data(config, devices)


def check_simulation(
    config: RunConfig,
    *,
    devices: int | Sequence[str | Path] | None = None,
    profiles: Sequence[str] = (),
    data: str | Path | None = None,
    scheme: str | None = None,
) -> tuple[RunConfig, StoppingCriteria]:
    """Returns the run file with the arguments of `simulate` applied, and when the run ends; reads no data.

    Raises:
        EdgeflError: something in it makes no sense.
    """
    config = _load_config(config, devices, profiles, data, scheme)
    goal = build_run(config, "simulated").goal
    section = config.simulation
    parse_scheme(section.scheme or default_scheme(config.run.task))
    catalogue = load_catalogue([] if section.profile_file is None else [section.profile_file])
    catalogue.assign_profiles(section.profiles, section.devices)
    load_run_faults(config, make_device_names(section.devices))
    return config, goal


def _find_scales(config: RunConfig, data: FleetData, folder: Path, run_id: str | None) -> RunConfig:
    """Returns the settings with means and scales of the fleet's data, found by a simulated run of their own.

    Its id is that of the run for which it is, where that has one, with `-scales` appended.
    """
    if find_named_run(config) is not None:
        raise ConfigError('task.normalise of a simulation must be "fleet": it knows no run of a fleet')
    build_run(config, "simulated")  # what is wrong with the run is said before any other begins
    scales_id = None if run_id is None else f"{run_id}-scales"
    result = simulate_with_data(make_scales_run(config), data, folder, run_id=scales_id).result
    assert result is not None
    found = parse_json(result.read_bytes())
    for column in found["columns"]:
        if column["left_out"]:
            log.warning("left out of the scales of %s: %s", column["name"], ", ".join(column["left_out"][:MAX_SHOWN]))
    return apply_scales(config, found)


def read_scales(config: RunConfig, result: RunResult) -> RunConfig:
    """Returns the settings with the means and scales that a simulated run of them has found."""
    if not should_find_scales(config):
        return config
    with Store.open(result.root / DATABASE_NAME, read_only=True) as store:
        return replace(config, task=dict(store.get_run(result.run_id).config["task"]))


def make_reference(config: RunConfig) -> RunConfig:
    """Returns the run of one device on all of the data: the training and the budget of a run, and nothing else of it.

    It makes as many local iterations in a round as each device does on average; an epoch is one of all the data. An
    analysis is the same one, of all the data.
    """
    if config.strategy.name in ANALYSES:
        return _make_run_of_one(config, config.strategy)
    settings, known = get_settings(config.strategy.name), get_settings(REFERENCE_STRATEGY)
    options = {name: value for name, value in config.strategy.options.items() if name in known and name != "device"}
    options.pop("iterations", None)
    if iterations := config.strategy.options.get("iterations", settings.get("iterations")):
        per_round = config.strategy.options.get("exchanges_per_round", settings.get("exchanges_per_round", 1))
        options["iterations"] = int(iterations) * int(per_round)
    return _make_run_of_one(config, StrategySection(name=REFERENCE_STRATEGY, options=options))


def _make_run_of_one(config: RunConfig, strategy: StrategySection) -> RunConfig:
    """Returns a run of one device, of nothing that is for a fleet."""
    return replace(
        config,
        run=replace(
            config.run,
            name=f"{config.run.name or config.run.task}-reference",
            min_updates=None,
            updates_per_round=None,
            deadline_s=None,
        ),
        strategy=strategy,
        compression=CompressionSection(),
        server=ServerSection(),
        devices=DevicesSection(),
        split=SplitSection(),
        simulation=replace(config.simulation, devices=1, scheme="iid", faults=None),
    )


def default_root() -> Path:
    """Returns the default folder of simulations, beside the coordinator's."""
    return default_directory().parent / "simulations"


def _load_config(
    config: RunConfig | Mapping[str, Any] | str | Path,
    devices: int | Sequence[str | Path] | None,
    profiles: Sequence[str],
    data: str | Path | None,
    scheme: str | None,
) -> RunConfig:
    """Returns the run file with the caller's arguments applied, so that the store records the actual run."""
    run_config = make_run_config(config)
    if run_config.job.name:
        raise ConfigError(
            "job: a simulation trains models, and how long a job takes on a board is not known to it; try a job with "
            "real processes on this machine: edgefl.run(FILE, devices=4)"
        )
    section = run_config.simulation
    files = [entry for entry in profiles if entry.endswith(".toml")]
    if len(files) > 1:
        raise ConfigError(f"one profile file at a time, got {' and '.join(files)}")
    profile_names = [
        name for entry in profiles for name in (list_profile_names(entry) if entry in files else [entry])
    ]
    count = section.devices if devices is None else count_devices(devices)
    if count < max(1, run_config.devices.min):
        raise ConfigError(f"the run needs at least {max(1, run_config.devices.min)} devices, got {count}")
    simulation = replace(
        section,
        devices=count,
        profiles=tuple(profile_names) or section.profiles,
        profile_file=files[0] if files else section.profile_file,
        data=section.data if data is None else str(data),
        scheme=scheme or section.scheme or default_scheme(run_config.run.task),
    )
    return replace(
        run_config,
        simulation=simulation,
        strategy=_use_relay_transport(run_config.strategy),
        aggregation=replace(run_config.aggregation, hosts=None),  # of real devices, in a file that may not be here
    )


def _use_relay_transport(section: StrategySection) -> StrategySection:
    """Returns a strategy with relayed peer messages: no node runs on alone, and the result is one model."""
    options = {name: value for name, value in section.options.items() if name != "hosts"}
    if options.get("carrier") not in {"peer", "direct"}:
        return section
    return replace(section, options={**options, "carrier": "relay"})


def load_fleet_data(config: RunConfig, devices: int | Sequence[str | Path] | None = None) -> FleetData:
    """Returns the data of a run's devices: that of shards, or a cut data set for their number or None.

    Raises:
        EdgeflError: data is missing, or does not fit the task.
    """
    section, run = config.simulation, config.run
    task = make_run_task(config)  # first: a class that is not there is worth more than absent data
    test = None if section.test is None else Path(section.test)
    if devices is not None and not isinstance(devices, int):
        return read_shards(task, devices, test_fraction=run.local_test_fraction, test=test)
    return partition_in_memory(
        run.task,
        section.scheme or default_scheme(run.task),
        section.devices,
        data=None if section.data is None else Path(section.data),
        seed=run.seed,
        test_fraction=run.local_test_fraction,
        options=config.task,
        test=test,
    )


class _Simulation:
    """A validated run, ready to start.

    Args:
        config: the run file.
        data: the devices' data; None where nothing is trained.
        make_trainer: of what trains the devices.
    """

    def __init__(self, config: RunConfig, data: FleetData | None, make_trainer: TrainerFactory) -> None:
        self._config, self._data, self._resources = config, data, contextlib.ExitStack()
        if config.split.after is not None:
            import_torch()  # here it trains; so the cut is found without a process of its own
        self._components = build_run(config, "simulated")
        split = self._components.split
        if self._components.analysis is not None and data is None:
            raise ConfigError(
                f"strategy.name = {config.strategy.name!r} trains nothing, and has no bookkeeping alone"
            )
        if split is not None and data is None:
            raise ConfigError("split.after needs training: without it nothing says how large activations become")
        num_root = self._components.strategy.root_examples
        if data is not None and num_root:
            self._data = data = reserve_root(data, num_root)
        names = make_device_names(config.simulation.devices)
        shapes = self._components.shapes
        faults = load_run_faults(config, names)
        self._devices = make_devices(
            config,
            names,
            faults,
            None if data is None else data.shards,
            shapes,
            exchange=None
            if split is None
            else ExchangeSizes(split.section, split.cut.activation_shape, split.cut.num_outputs),
        )
        if num_root:
            self._devices.append(make_root_device(config, num_root, shapes))
            names = [*names, EVALUATOR_NAME]
        if data is not None:  # without training there is no model to retain
            check_memory_for(len(self._devices), config, self._components.strategy, self._components.model)
            examples = [len(shard.rows) for shard in data.shards]
            for note in list_notes(self._components, examples, [shard.blocks for shard in data.shards]):
                log.warning("%s", note)
        if data is None:
            self._backend: TrainingBackend = NoOpBackend(self._devices, shapes, config.run.seed)
        else:
            self._backend = make_backend(
                config, data, names, self._components, time.perf_counter, make_trainer=make_trainer
            )

    def run(
        self,
        store: Store,
        folder: Path,
        on_change: OnChange | None,
        run_id: str | None,
        early_stop: EarlyStop | None = None,
    ) -> str:
        """Runs to the end; returns the run id, which begins with `run_id` if there is one."""
        assembled = self._components
        limits = ClaimLimits(
            task=self._config.run.task,
            max_weight_ratio=self._config.guard.max_weight_ratio,
            test_fraction=self._config.run.local_test_fraction,
        )
        fleet = SimulatedFleet(
            self._devices,
            backend=self._backend,
            downlink=self._make_downlink(),
            settings=make_settings(self._config),
            evaluators=self._make_evaluators(),
            limits=limits,
            conditions=self._make_conditions(),
        )
        devices = [board.info for board in self._devices]
        history = SimulationHistory(
            store, self._config, devices, clock=lambda: fleet.now_s, on_change=on_change, run_id=run_id
        )
        limits.on_bounded = lambda claim: history.record_event(CLAIM_BOUNDED, claim.device_id, str(claim))
        strategy, policy = assembled.strategy, self._make_policy()
        try:
            compute_metrics = compute_no_metrics if self._data is None else strategy.facts
            run_log = history.create_log(
                assembled.rounds, policy, compute_metrics, strategy.needed_updates, assembled.metrics
            )
            state, reason = run_rounds(
                strategy,
                strategy.init(PLACEHOLDER_TENSORS if self._data is None else assembled.model),
                fleet=fleet,
                journal=run_log,
                goal=assembled.goal,
                evaluate=EvaluationSchedule(evaluate_on="none") if self._data is None else assembled.evaluate,
                rounds=assembled.rounds,
                policy=policy,
                on_score=history.watch_scores(run_log, assembled.rounds, early_stop),
                on_clipped=run_log.record_clipped,
                divergence=assembled.divergence,
                on_divergence=run_log.record_divergence,
            )
            if isinstance(strategy, ValidatedStrategy):
                strategy.check_final_state(state)
        except StoppedEarlyError as stop:
            history.stop(str(stop))
            return history.run_id
        except BaseException as error:  # an interrupt too: the history says how the run ended
            history.fail(error)
            raise
        model = None if self._data is None else assembled.make_whole(strategy.model(state))
        version = strategy.version(state)
        history.finish(reason, folder / "models", model, version, assembled.rounds.get_round(version))
        return history.run_id

    def close(self) -> None:
        """Ends the worker processes, if there are any, and removes the boards' files."""
        self._backend.close()
        for device in self._devices:
            if device.conditions is not None:
                device.conditions.end_work()
        self._resources.close()

    def _make_conditions(self) -> ConditionSettings | None:
        """Returns the conditions of the run, and where the boards keep theirs; None where all are always free."""
        run = self._config.conditions
        owners = (board.profile.conditions for board in self._devices)
        if run == NO_RUN_CONDITIONS and all(conditions == NO_CONDITIONS for conditions in owners):
            return None
        return ConditionSettings(
            folder=Path(self._resources.enter_context(_make_memory_folder())),
            starts_at_s=self._config.simulation.start.timestamp(),
            run=run,
        )

    def _make_downlink(self) -> SimulatedDownlink:
        assembled = self._components
        if self._data is not None:
            split = assembled.split
            front = None if split is None else len(split.encode_front(assembled.model, 0))
            return SimulatedDownlink(
                assembled.encode,
                assembled.encode_changes,
                assembled.decode,
                front_bytes=front,
                base_bytes=0 if assembled.adapted is None else assembled.adapted.base_bytes,
            )
        body = assembled.encode(assembled.model, 0)
        keeps_model = self._config.aggregation.is_collective
        return SimulatedDownlink(lambda _model, _version: body, (lambda *_: b"") if keeps_model else None)

    def _make_policy(self) -> RunParticipationPolicy:
        policy = self._components.policy
        # Without training there is no update for the guard to check.
        return policy if self._data is not None else replace(policy, guard=UpdateGuard())

    def _make_evaluators(self) -> list[DeviceInfo]:
        if self._data is None or self._data.test is None:
            return []
        task = self._config.run.task
        return [DeviceInfo(device_id=EVALUATOR_NAME, role=Role.EVALUATOR, tasks=(task,), source="coordinator")]


def _build_result(store: Store, run_id: str, root: Path) -> RunResult:
    record = store.get_run(run_id)
    rounds = read_history(store, "rounds", run=run_id)
    saved = store.list_saved_models(run_id)
    return RunResult(
        run_id=run_id,
        status=str(record.status),
        reason=record.reason or "",
        metrics=compute_run_metrics(rounds, (record.finished_at or 0.0) - (record.started_at or 0.0)),
        rounds=rounds,
        updates=read_history(store, "updates", run=run_id),
        evaluations=read_history(store, "evaluations", run=run_id),
        model=root / "models" / f"{saved[0].sha256}.safetensors" if saved else None,
        root=root,
        result=_write_result(record, saved[0].sha256, root) if saved else None,
    )


def _write_result(record: RunRecord, sha256: str, root: Path) -> Path | None:
    """Writes the result of an analysis that trains nothing; returns its file, None for a training."""
    if not has_result(record.config):
        return None
    opened, size = open_tensor_bytes(root / "models" / f"{sha256}.safetensors", RESULT)
    with opened:
        write_atomic(path := root / f"{record.run_id}.json", opened.read(size))
    return path


def _make_memory_folder() -> tempfile.TemporaryDirectory[str]:
    """Returns a folder in memory, where this system has one: budgets are synced at each step of each board."""
    try:
        return tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX, dir="/dev/shm")
    except OSError:
        return tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX)


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
    *,
    exchange: ExchangeSizes | None = None,
) -> list[SimulatedDevice]:
    """Returns the devices that take part.

    Args:
        config: profiles and selection of devices.
        names: of all devices.
        faults: faults of the run.
        shards: their data in the same order; None where nothing is trained.
        model_spec: of the task.
        exchange: of a network that is cut; an iteration takes as long as one of the whole, and the exchange.

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
            iteration_s=add_exchange(make_cost_function(profile, workload, reference), exchange, profile),
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
            f"devices.names, devices.groups and devices.exclude leave {selected} of the simulation, the run needs at "
            f"least {required}"
        )
    check_fleet_size(config, len(boards))
    return boards


def add_exchange(
    iteration_s: Callable[[int], float], exchange: ExchangeSizes | None, profile: DeviceProfile
) -> Callable[[int], float]:
    """Adds the time in which an iteration's batches travel on the device's own link; shared links are not counted."""
    if exchange is None:
        return iteration_s

    def compute_seconds(batch_size: int) -> float:
        bytes_up, bytes_down = exchange.count_bytes(batch_size)
        latency_s = 2 * exchange.num_round_trips * profile.latency_s
        transfer_s = latency_s + bytes_up / profile.up_bytes_per_s + bytes_down / profile.down_bytes_per_s
        return iteration_s(batch_size) + transfer_s

    return compute_seconds


def make_root_device(config: RunConfig, num_examples: int, model_spec: ModelSpec) -> SimulatedDevice:
    """Returns the coordinator's evaluator where it trains: as fast as the reference machine, on no network."""
    task, profile = config.run.task, DeviceProfile(name=EVALUATOR_NAME, up_bytes_per_s=1e12, down_bytes_per_s=1e12)
    workload = Workload(
        task=task, options=config.task, model_spec=model_spec, iteration_s=config.simulation.iteration_s
    )
    return SimulatedDevice(
        info=DeviceInfo(device_id=EVALUATOR_NAME, role=Role.EVALUATOR, tasks=(task,), source="coordinator"),
        profile=profile,
        iteration_s=make_cost_function(profile, workload, compute_reference_cost(workload, load_catalogue([]))),
        num_examples=num_examples,
        seed=config.run.seed,
    )


def make_settings(config: RunConfig) -> SimulationSettings:
    section = config.simulation
    return SimulationSettings(
        up_bytes_per_s=section.server_up_bytes_per_s,
        down_bytes_per_s=section.server_down_bytes_per_s,
        failure_detection_s=section.detect_s,
        evaluation_duration_s=section.evaluation_s,
        join_at_start=config.devices.join == "start",
    )


def make_task_spec(config: RunConfig, components: RunComponents) -> TaskSpec:
    """Returns what trainers need to know of a run."""
    return TaskSpec(
        task=config.run.task,
        options=config.task,
        seed=config.run.seed,
        split=config.split,
        analysis=parse_analysis(components.header),
        adapt=config.adapt,
        base={} if components.adapted is None else components.adapted.base,
        has_personal=components.has_personal,
        num_clusters=parse_num_clusters(components.header),
        accelerator=config.simulation.accelerator,
    )


def make_backend(
    config: RunConfig,
    data: FleetData,
    names: Sequence[str],
    components: RunComponents,
    clock: Callable[[], float],
    *,
    make_trainer: TrainerFactory = SimulatedTrainer,
) -> TrainingBackend:
    """Returns the training backend: one process or several, as configured or measured, or a Ray cluster.

    Of another trainer it is this process.
    """
    # Of a network that is cut a simulated update has both sides.
    model_spec = components.update_shapes if components.split is None else components.shapes
    task_spec = make_task_spec(config, components)
    indices = {name: index for index, name in enumerate(names)}
    trainer = make_trainer(task_spec, data, indices)
    in_process = InProcessBackend(trainer, model_spec)
    if make_trainer is not SimulatedTrainer:
        return in_process

    def start_pool(num_workers: int) -> TrainingBackend:
        return ProcessPoolBackend(
            task_spec,
            data,
            shard_indices=indices,
            model_spec=model_spec,
            num_workers=num_workers,
            in_process=in_process,
        )

    section = config.simulation
    if section.engine == "ray":
        return RayBackend(
            task_spec,
            data,
            shard_indices=indices,
            model_spec=model_spec,
            options=RayOptions(address=section.address, num_workers=section.workers, worker_gpus=section.worker_gpus),
            in_process=in_process,
        )
    workers = section.workers
    if workers is None:
        waves = config.run.rounds or DEFAULT_EXPECTED_ROUNDS
        return AutoBackend(
            in_process, trainer, start_pool, num_cores=count_cores(), expected_rounds=waves, clock=clock
        )
    return start_pool(workers) if workers else in_process


def count_cores() -> int:
    """Returns the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


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
    return in_group and (not selection.names or name in selection.names) and name not in selection.exclude


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
