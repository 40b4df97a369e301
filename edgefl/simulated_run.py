"""One training run on a virtual fleet, as a function: the same loop and strategies as live, in virtual time.

Everything follows from the run file, the data and the seed, so the same run gives the same history, byte for byte.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgefl.assembly import assemble
from edgefl.config import RunConfig, StrategySection, load_run, parse_run
from edgefl.coordinator.directory import default_directory
from edgefl.coordinator.runs.device_state import check_state_of
from edgefl.coordinator.runs.facts import facts_of, no_facts
from edgefl.coordinator.runs.simulated_book import OnChange, RunBook
from edgefl.errors import ConfigError
from edgefl.files import DATABASE_NAME, make_private_directory
from edgefl.local_run import count_devices, default_scheme
from edgefl.loop import drive
from edgefl.protocol import EVALUATOR_NAME
from edgefl.simulation.bookkeeping import NOTHING, Bookkeeping
from edgefl.simulation.building import device_names, make_boards, make_training, make_world, read_faults
from edgefl.simulation.data import FleetData, cut_in_memory, read_shards
from edgefl.simulation.downlink import Downlink
from edgefl.simulation.fleet import VirtualFleet
from edgefl.simulation.profiles import profile_names
from edgefl.simulation.training import Training
from edgefl.storage.queries import history
from edgefl.storage.store import Store
from edgefl.strategies.checked import Checked
from edgefl.strategies.evaluation import EvaluationSchedule
from edgefl.strategies.gate import Guard, StrategyGate
from edgefl.summary import node_figures, run_in_words
from edgefl.tasks.registry import make_task
from edgefl.types import DeviceInfo, Json, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """What became of a simulated run.

    Attributes:
        run_id, status, reason: as in the store.
        metrics: `accuracy` and `loss` of the last version (None when nobody evaluated it), `bytes_up`, `bytes_down`,
            virtual `seconds` from the start of the run to its end; where devices have models of their own,
            `node_accuracy`, `worst_node_accuracy` and `disagreement` as far as they are known.
        rounds, updates, evaluations: rows of the history, oldest first, in the columns of `edgefl history`.
        model: the last model, a safetensors file; None where nothing was trained.
        root: the folder with the database.
    """

    run_id: str
    status: str
    reason: str
    metrics: Mapping[str, float | None]
    rounds: list[Json]
    updates: list[Json]
    evaluations: list[Json]
    model: Path | None
    root: Path

    def __str__(self) -> str:
        return run_in_words(self.run_id, self.status, self.reason, self.metrics)


def simulate(  # noqa: PLR0913 what one may say on a command line, all by name
    config: RunConfig | Mapping[str, Any] | str | Path,
    *,
    devices: int | Sequence[str | Path] | None = None,
    profiles: Sequence[str] = (),
    data: str | Path | None = None,
    scheme: str | None = None,
    root: str | Path | None = None,
    bookkeeping_only: bool = False,
    on_change: OnChange | None = None,
) -> SimulatedRun:
    """Trains on a virtual fleet and returns the history; what is given goes before `[simulation]` of the run file.

    Args:
        config: a run file, its tables, or what `config.load_run` made of it.
        devices: how many there are, or the shards that there are, one per device.
        profiles: kinds of board, `NAME` or `NAME:COUNT` each, or one profile file, for all that are in it.
        data: the folder of the data set; digits needs none.
        scheme: how to cut [digits: dirichlet:0.5; motionsense: natural; others: iid].
        root: where the history is kept; `~/.local/share/edgefl/simulations` when None.
        bookkeeping_only: trains nothing: times, bytes and schedules alone.
        on_change: told now and then how far the run is, as `edgefl run show` says it.

    Raises:
        EdgeflError: the run file makes no sense, data is missing, or the run failed.
    """
    known = _config(config, devices, profiles, data, scheme)
    if bookkeeping_only and all(
        rule is None for rule in (known.run.rounds, known.run.updates, known.run.seconds, known.run.bytes)
    ):
        raise ConfigError("without training no accuracy is ever reached; give run.rounds, updates, seconds or bytes")
    folder = Path(default_root() if root is None else root).expanduser().resolve()
    with closing(_Simulation(known, None if bookkeeping_only else _data(known, devices))) as simulation:
        make_private_directory(folder)
        with Store.open(folder / DATABASE_NAME) as store:
            return _result(store, simulation.run(store, folder, on_change), folder)


def default_root() -> Path:
    """Returns the folder beside the coordinator's where simulations are kept."""
    return default_directory().parent / "simulations"


def _config(
    config: RunConfig | Mapping[str, Any] | str | Path,
    devices: int | Sequence[str | Path] | None,
    profiles: Sequence[str],
    data: str | Path | None,
    scheme: str | None,
) -> RunConfig:
    """Returns the run file with what the caller said in its place, so that the store shows what was run."""
    known = config if isinstance(config, RunConfig) else None
    if known is None:
        known = parse_run(config) if isinstance(config, Mapping) else load_run(config)  # type: ignore[arg-type]  # the rest is a path
    section = known.simulation
    files = [entry for entry in profiles if entry.endswith(".toml")]
    if len(files) > 1:
        raise ConfigError(f"one profile file at a time, got {' and '.join(files)}")
    named = [name for entry in profiles for name in (profile_names(entry) if entry in files else [entry])]
    count = section.devices if devices is None else count_devices(devices)
    if count < max(1, known.devices.min):
        raise ConfigError(f"the run needs at least {max(1, known.devices.min)} devices, got {count}")
    changed = replace(
        section,
        devices=count,
        profiles=tuple(named) or section.profiles,
        profile_file=files[0] if files else section.profile_file,
        data=section.data if data is None else str(data),
        scheme=scheme or section.scheme or default_scheme(known.run.task),
    )
    return replace(known, simulation=changed, strategy=_relayed(known.strategy))


def _relayed(section: StrategySection) -> StrategySection:
    """Returns a strategy whose messages the coordinator carries: here nobody goes on alone, and the result is one."""
    options = {name: value for name, value in section.options.items() if name != "hosts"}
    if options.get("carrier") not in {"peer", "direct"}:
        return section
    return replace(section, options={**options, "carrier": "relay"})


def _data(config: RunConfig, devices: int | Sequence[str | Path] | None) -> FleetData:
    section, run = config.simulation, config.run
    if devices is not None and not isinstance(devices, int):
        task = make_task(run.task, config.task)
        return read_shards(task, devices, test_fraction=run.local_test_fraction)
    return cut_in_memory(
        run.task,
        section.scheme or default_scheme(run.task),
        section.devices,
        data=None if section.data is None else Path(section.data),
        seed=run.seed,
        test_fraction=run.local_test_fraction,
    )


class _Simulation:
    """A run that could begin: everything that can be wrong with it has been looked at.

    Args:
        config: the run file.
        data: who has what; None where nothing is trained.
    """

    def __init__(self, config: RunConfig, data: FleetData | None) -> None:
        self._config, self._data = config, data
        self._assembled = assemble(config, "simulated")
        names = device_names(config.simulation.devices)
        shapes = tuple(spec for spec in make_task(config.run.task, config.task).shapes() if spec.shared)
        faults = read_faults(config, names)
        self._boards = make_boards(config, names, faults, None if data is None else data.shards, shapes)
        if data is not None:  # where nothing is trained, nothing is kept
            check_state_of(len(self._boards), config, self._assembled.strategy, self._assembled.model)
        if data is None:
            self._training: Training = Bookkeeping(self._boards, shapes, config.run.seed)
        else:
            self._training = make_training(config, data, names, shapes, time.perf_counter)

    def run(self, store: Store, folder: Path, on_change: OnChange | None) -> str:
        """Drives the run to its end; returns its id."""
        assembled = self._assembled
        fleet = VirtualFleet(
            self._boards,
            training=self._training,
            downlink=self._downlink(),
            world=make_world(self._config),
            evaluators=self._evaluators(),
        )
        devices = [board.info for board in self._boards]
        book = RunBook(store, self._config, devices, clock=lambda: fleet.now_s, on_change=on_change)
        strategy, gate = assembled.strategy, self._gate()
        try:
            state, reason = drive(
                strategy,
                strategy.init(NOTHING if self._data is None else assembled.model),
                fleet=fleet,
                journal=book.recorder(assembled.rounds, gate, no_facts if self._data is None else facts_of(strategy)),
                goal=assembled.goal,
                evaluate=EvaluationSchedule(who="none") if self._data is None else assembled.evaluate,
                rounds=assembled.rounds,
                gate=gate,
            )
            if isinstance(strategy, Checked):
                strategy.check_last(state)
        except BaseException as error:
            book.fail(error)
            raise
        model = None if self._data is None else strategy.model(state)
        version = strategy.version(state)
        book.finish(reason, folder / "models", model, version, assembled.rounds.of(version))
        return book.run_id

    def close(self) -> None:
        """Ends the processes that train, if there are any."""
        self._training.close()

    def _downlink(self) -> Downlink:
        assembled = self._assembled
        if self._data is not None:
            return Downlink(assembled.encode, assembled.encode_changes)
        body = assembled.encode(assembled.model, 0)
        return Downlink(lambda _model, _version: body)

    def _gate(self) -> StrategyGate:
        gate = self._assembled.gate
        return gate if self._data is not None else replace(gate, guard=Guard())  # there is no update to look at

    def _evaluators(self) -> list[DeviceInfo]:
        if self._data is None or self._data.test is None:
            return []
        task = self._config.run.task
        return [DeviceInfo(device_id=EVALUATOR_NAME, role=Role.EVALUATOR, tasks=(task,), source="coordinator")]


def _result(store: Store, run_id: str, root: Path) -> SimulatedRun:
    record = store.run(run_id)
    rounds = history(store, "rounds", run=run_id)
    # A round that was under way when the goal was reached stays open.
    last = next((row for row in reversed(rounds) if row["closed_at"] is not None), {})
    saved = store.checkpoints(run_id)
    return SimulatedRun(
        run_id=run_id,
        status=str(record.status),
        reason=record.reason or "",
        metrics={
            "accuracy": last.get("accuracy"),
            "loss": last.get("loss"),
            "bytes_up": sum(row["bytes_up"] for row in rounds),
            "bytes_down": sum(row["bytes_down"] for row in rounds),
            "seconds": (record.finished_at or 0.0) - (record.started_at or 0.0),
            **node_figures(last),
        },
        rounds=rounds,
        updates=history(store, "updates", run=run_id),
        evaluations=history(store, "evaluations", run=run_id),
        model=root / "models" / f"{saved[0].sha256}.safetensors" if saved else None,
        root=root,
    )
