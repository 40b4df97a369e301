"""Advice on a run file: candidates ranked by arithmetic, the best of them simulated with real training, and compared.

The simulation trains on a proxy: the coordinator's data, or the task's built-in data set, cut as the boards' counts
say. Time is bounded: what has not ended by then is named. For the rest the result follows from the run file, the
boards, the data and the seed.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgefl.compression.codec_benchmark import compute_expected_bytes
from edgefl.compression.registry import AUTO
from edgefl.coordinator.runs.planning import compute_bytes_per_device, count_needed_memory
from edgefl.core.config import AdviceSection, Quantity, RunConfig
from edgefl.core.errors import ConfigError, EdgeflError, RunFailedError
from edgefl.engine.assembly.build import build_run
from edgefl.engine.assembly.components import RunComponents
from edgefl.engine.progress import MetricGoal, is_goal_reason
from edgefl.simulation.advice.boards import MeasuredBoard, format_profiles, select_boards
from edgefl.simulation.advice.candidates import ASYNCHRONOUS, Candidate, list_candidates, make_written
from edgefl.simulation.advice.costs import AUTO_AS, CODECS_MEASURED, Board, RoundCost, Sizes, compute_round_cost
from edgefl.simulation.advice.proxy import limit_counts, write_proxy_shards
from edgefl.simulation.profiles import load_catalogue
from edgefl.simulation.simulated_run import (
    Workload,
    check_simulation,
    compute_reference_cost,
    load_fleet_data,
    make_cost_function,
    make_device_names,
)
from edgefl.simulation.sweep import (
    OUT_OF_TIME,
    RunTotals,
    SweepOutcome,
    SweepRun,
    SweepWorkers,
    make_sweep_run,
    read_totals,
    run_sweep,
)
from edgefl.strategies.registry import get_settings
from edgefl.system.atomic_files import write_atomic

QUANTITIES: tuple[Quantity, ...] = ("time", "bytes", "energy")
DEFAULT_SECONDS = 60.0
MAX_SIMULATED = 12
NUM_PURSUED, MAX_OF_STRATEGY = 3, 3
"""Strategies of which further codecs and amounts of work are simulated, and how many of each."""
SAFE_CODEC = "ef|int8"
"""Codec that is tried with each of them."""
RESERVE, WRITTEN_SHARE, LEADING_SHARE = 0.1, 0.4, 0.6
"""Of the time: for what comes before and after; for the run file as it is; of the rest for one of each strategy."""
PATIENCE, TIGHT_PATIENCE = 3.0, 1.5
"""A candidate is given up after so many times what the run file as it is took, and later so many times the best."""
NUM_REPEATS, NUM_REPEATED = 2, 3
"""Further seeds, and options that are simulated with them: of many simulated once the first is a lucky one."""
REPEAT_SHARE = 0.35
"""Of the time that is left after one candidate of each strategy, kept for them."""
MIN_SECONDS = 1.0
"""For simulations, where the time is over."""
_Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What an advice is asked for.

    Attributes:
        goal: of a metric, such as `accuracy >= 0.9`; None for the run file's own, or else what it comes to.
        minimise: what the ranking goes by.
        budgets: most seconds, bytes or joules of the run, by quantity; the run file's own seconds and bytes are too.
        seconds: of real time that the advice may take.
        num_jobs: simulations side by side.
        num_simulated: candidates that are simulated at most.
        num_repeats: further seeds with which the best are simulated, in what time is left.
    """

    goal: str | None = None
    minimise: Quantity = "time"
    budgets: Mapping[Quantity, float] = field(default_factory=dict)
    seconds: float = DEFAULT_SECONDS
    num_jobs: int = 1
    num_simulated: int = MAX_SIMULATED
    num_repeats: int = NUM_REPEATS


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvisedFleet:
    """The boards for which an advice is: shards and profiles of a simulation, in order.

    Attributes:
        names: of the boards, for sentences.
        boards: as the arithmetic sees them.
        config: the run file with the simulation's settings.
        shards: files of the proxy; none where the data set is cut in memory.
        measured: by their history; none of described ones.
        limits: what differs from the boards, a sentence each.
    """

    names: Sequence[str]
    boards: Sequence[Board]
    config: RunConfig
    shards: Sequence[str] = ()
    measured: Sequence[MeasuredBoard] = ()
    limits: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A candidate with its costs, by arithmetic and, where it was simulated, to its end.

    Attributes:
        candidate: strategy, work and codec.
        cost: of a round, by arithmetic.
        memory_bytes: that a board needs; `state_bytes` is what the coordinator keeps for all boards.
        seconds, rounds, bytes_up, bytes_down, joules: of the whole run, simulated; None where it was not.
        waiting: share of the boards' time in which they waited for others.
        lost: share of the assignments that were lost.
        quality: of the goal's metric at the end.
        is_reached: the goal was.
        is_within: all budgets hold.
        is_front: no other that reached the goal is as good in seconds, bytes and joules, and better in one.
        reason: why it ended.
        num_simulations: of which seconds, rounds, bytes and joules are medians, each with a seed of its own.
    """

    candidate: Candidate
    cost: RoundCost
    memory_bytes: int = 0
    state_bytes: int = 0
    seconds: float | None = None
    rounds: int | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    joules: float | None = None
    waiting: float | None = None
    lost: float | None = None
    quality: float | None = None
    is_reached: bool = False
    is_within: bool = True
    is_front: bool = False
    reason: str = ""
    num_simulations: int = 1

    def get_cost(self, quantity: Quantity) -> float:
        """Returns what the run costs; infinite where that is not known."""
        value: float | None = self.joules
        if quantity == "time":
            value = self.seconds
        elif quantity == "bytes":
            value = None if self.bytes_up is None else self.bytes_up + (self.bytes_down or 0)
        return math.inf if value is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The options of an advice, best first.

    Attributes:
        options: those that were simulated to their end, ranked.
        written: the run file as it is; None where it did not end in time.
        goal: that was to be reached.
        is_own_goal: it is what the run file as it is came to.
        request: what was asked.
        left_out: what was not tried or did not end, a sentence each.
        fleet: the boards.
        corrections: factors that errors of earlier advice gave, by quantity; they are in the figures.
        failure: why a simulation came to nothing, other than for want of time; empty where none did.
    """

    options: Sequence[Option]
    written: Option | None
    goal: MetricGoal
    is_own_goal: bool
    request: Request
    left_out: Sequence[str]
    fleet: AdvisedFleet
    corrections: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""

    @property
    def best(self) -> Option | None:
        """The recommended option: the best that reached the goal within all budgets; None where none did."""
        first = self.options[0] if self.options else None
        return first if first is not None and first.is_reached and first.is_within else None

    def make_run(self, config: RunConfig) -> RunConfig:
        """Returns a run file's settings with those of the recommended option, and what it is predicted to cost.

        Raises:
            RunFailedError: none is recommended.
        """
        best = self.best
        if best is None:
            raise RunFailedError(
                f"no candidate reached {self.goal} within the budgets: there is no run file to write"
            )
        run = config.run
        if not self.is_own_goal and self.goal.name == "accuracy":
            run = replace(run, accuracy=self.goal.limit, until=None)
        elif not self.is_own_goal or _keeps_rounds(config):
            run = _set_goal(run, self.goal)
        if not _keeps_rounds(config):
            run = replace(run, rounds=best.rounds if self.is_own_goal else _double(best.rounds))
            if self.is_own_goal or not best.candidate.is_written:
                # These amounts are of the run file's own strategy and work; others need other ones.
                run = replace(run, epochs=None, updates=None)
        prediction = AdviceSection(
            seconds=best.seconds,
            rounds=best.rounds,
            bytes_up=best.bytes_up,
            bytes_down=best.bytes_down,
            joules=best.joules,
            **{f"{name}_factor": factor for name, factor in self.corrections.items()},
        )
        return replace(best.candidate.apply(config), run=run, advice=prediction)


def describe_fleet(  # noqa: PLR0913 those of `simulate`
    config: RunConfig,
    folder: Path,
    *,
    measured: Sequence[MeasuredBoard] = (),
    devices: int | Sequence[Path] | None = None,
    profiles: Sequence[str] = (),
    data: Path | None = None,
    scheme: str | None = None,
) -> AdvisedFleet:
    """Returns the boards of an advice: those measured, else those that a simulation would have.

    Args:
        config: the run file.
        folder: for proxy shards and profiles of measured boards.
        measured: boards by their history, of which those of the run file's `[devices]` take part; they exclude
            `devices` and `profiles`.
        devices: as of `simulate`, where none is measured.
        profiles: likewise.
        data: as of `simulate`.
        scheme: likewise.

    Raises:
        EdgeflError: something in it makes no sense, or data is missing.
    """
    measured = select_boards(measured, config.devices)
    names, limits = [board.name for board in measured], list[str]()
    if measured:
        folder.mkdir(parents=True, exist_ok=True)
        model = config.task.get("model")
        cost_key = config.run.task if model is None else f"{config.run.task}/{model}"
        counts, limit = limit_counts([board.num_examples for board in measured])
        limits += [limit] if limit else []
        devices, test = write_proxy_shards(config, counts, folder, data=data, scheme=scheme)
        text = format_profiles(measured, cost_key).encode()
        path = folder / f"boards-{hashlib.sha256(text).hexdigest()[:16]}.toml"
        write_atomic(path, text)
        simulation = replace(config.simulation, test=str(test), profile_file=str(path), profiles=tuple(names))
        # The boards' own conditions of work are in what was measured of them.
        config, profiles, data, scheme = replace(config, simulation=simulation), (), None, None
        config = replace(config, devices=replace(config.devices, names=(), groups=()))
    config, _ = check_simulation(config, devices=devices, profiles=profiles, data=data, scheme=scheme)
    shards = () if devices is None or isinstance(devices, int) else tuple(str(path.absolute()) for path in devices)
    boards = _list_boards(config, names or make_device_names(config.simulation.devices), shards)
    return AdvisedFleet(
        names=[board.name for board in boards],
        boards=boards,
        config=config,
        shards=shards,
        measured=measured,
        limits=limits,
    )


def _list_boards(config: RunConfig, names: Sequence[str], shards: Sequence[str]) -> list[Board]:
    section, components = config.simulation, build_run(config, "simulated")
    catalogue = load_catalogue([] if section.profile_file is None else [section.profile_file])
    workload = Workload(
        task=config.run.task, options=config.task, model_spec=components.shapes, iteration_s=section.iteration_s
    )
    reference = compute_reference_cost(workload, catalogue)
    return [
        Board(
            name=name,
            profile=profile,
            num_examples=count,
            iteration_s=make_cost_function(profile, workload, reference),
        )
        for name, profile, count in zip(
            names,
            catalogue.assign_profiles(section.profiles, len(names)),
            [len(shard.train) for shard in load_fleet_data(config, shards or None).shards],
            strict=True,
        )
    ]


def advise(
    fleet: AdvisedFleet,
    request: Request,
    root: Path,
    *,
    clock: Callable[[], float],
    corrections: Mapping[str, float] | None = None,
    on_end: Callable[[SweepOutcome], None] = lambda _: None,
) -> Advice:
    """Returns the advice for a fleet; simulated runs are kept in a folder, and not simulated again.

    Args:
        fleet: the boards, and the run file.
        request: what is asked.
        root: folder of the simulated runs.
        clock: seconds of real time, monotone.
        corrections: factors of seconds, bytes and joules by which earlier advice was wrong, as `history advice` has.
        on_end: called as simulated runs end.

    Raises:
        ConfigError: the goal or what is to be minimised makes no sense for this run.
        RunFailedError: the run file as it is ended in an error, or not in time where it is the goal.
    """
    with SweepWorkers(request.num_jobs) as workers:
        return _advise(fleet, request, root, clock, corrections or {}, on_end, workers)


def _advise(  # noqa: PLR0913, PLR0917 those of `advise`
    fleet: AdvisedFleet,
    request: Request,
    root: Path,
    clock: Callable[[], float],
    corrections: Mapping[str, float],
    on_end: Callable[[SweepOutcome], None],
    workers: SweepWorkers,
) -> Advice:
    deadline_s = clock() + (1 - RESERVE) * request.seconds
    config, goal = _apply_goal(fleet.config, request)
    search = _Search(
        fleet=fleet, request=request, config=config, goal=goal, root=root, on_end=on_end, workers=workers
    )
    costs = search.compute_costs()
    written = make_written(fleet.config)
    is_own_goal = goal is None
    outcome = search.simulate([written], config, WRITTEN_SHARE * request.seconds)[0]
    first = search.make_option(written, costs[written.key], outcome)
    if goal is None:
        search.goal = goal = _make_own_goal(outcome, first)
        search.config = config = replace(config, run=_set_goal(config.run, goal))
        first = search.make_option(written, costs[written.key], outcome)
    limited = _limit(config, first, costs[written.key], fleet, request)
    leading = search.choose_leading(costs)
    options = [first, *search.try_options(leading, costs, limited, LEADING_SHARE * (deadline_s - clock()))]
    ranked = rank_options([option for option in options if option.seconds is not None], request, is_max=goal.is_max)
    more = search.choose_more(costs, ranked, [*leading, written])
    share = 1.0 - (REPEAT_SHARE if request.num_repeats else 0.0)
    options += search.try_options(more, costs, _tighten(limited, ranked, request), share * (deadline_s - clock()))
    search.note_others(costs, options)
    repeated: dict[_Key, Option] = {}
    while deadline_s - clock() > MIN_SECONDS:
        ranked = rank_options([one for one in options if one.seconds is not None], request, is_max=goal.is_max)
        best = [one for one in ranked if one.is_reached and not (is_own_goal and one.candidate.is_written)]
        once = [one for one in best[:NUM_REPEATED] if one.candidate.key not in repeated]
        if not once:
            break
        repeated |= search.repeat(once, costs, limited, deadline_s - clock())
        options = [repeated.get(option.candidate.key, option) for option in options]
    found = [_correct(option, corrections) for option in options if option.seconds is not None]
    request = _add_own_budgets(request, fleet.config, _correct(first, corrections) if is_own_goal else None)
    ranked = rank_options(found, request, is_max=goal.is_max)
    return Advice(
        options=ranked,
        written=next((option for option in ranked if option.candidate.key == written.key), None),
        goal=goal,
        is_own_goal=is_own_goal,
        request=request,
        left_out=search.left_out,
        fleet=fleet,
        corrections=dict(corrections),
        failure=next(
            (one.reason for one in options if one.seconds is None and one.reason not in {"", OUT_OF_TIME}), ""
        ),
    )


def _add_own_budgets(request: Request, config: RunConfig, written: Option | None) -> Request:
    """Returns a request with the run file's own seconds and bytes as budgets, where it has no tighter ones.

    The run that stops at such a limit passes it a little; where its end is the goal, `written`, that is within.
    """
    budgets = dict(request.budgets)
    limits: list[tuple[Quantity, float | None]] = [("time", config.run.seconds), ("bytes", config.run.bytes)]
    for name, limit in limits:
        if limit is not None:
            passed = 0.0 if written is None or written.seconds is None else written.get_cost(name)
            budgets[name] = min(budgets.get(name, math.inf), max(limit, passed))
    return replace(request, budgets=budgets)


def rank_options(options: Sequence[Option], request: Request, *, is_max: bool = True) -> list[Option]:
    """Returns options best first, those of the Pareto front marked.

    Before all others stand those that reach the goal within the budgets, then those that reach it; among them the
    cheapest in what is minimised, then in the rest. Of those that do not reach it the nearest comes first; `is_max`
    says whether more of the goal's metric is better.
    """
    order = [request.minimise, *(name for name in QUANTITIES if name != request.minimise)]
    reached = [option for option in options if option.is_reached]
    marked = [
        replace(
            option,
            is_within=all(option.get_cost(name) <= limit for name, limit in request.budgets.items()),
            is_front=option.is_reached and not any(_dominates(other, option) for other in reached),
        )
        for option in options
    ]

    def rank(option: Option) -> tuple[Any, ...]:
        worst = -math.inf if is_max else math.inf
        quality = worst if option.quality is None else option.quality
        return (
            not (option.is_reached and option.is_within),
            not option.is_reached,
            0.0 if option.is_reached else (-quality if is_max else quality),
            *(option.get_cost(name) for name in order),
            str(option.candidate),
        )

    return sorted(marked, key=rank)


def _dominates(one: Option, other: Option) -> bool:
    costs = [(one.get_cost(name), other.get_cost(name)) for name in QUANTITIES]
    return all(mine <= theirs for mine, theirs in costs) and any(mine < theirs for mine, theirs in costs)


@dataclass(slots=True, kw_only=True)
class _Search:
    """One advice under way: what it simulates, and what it leaves out."""

    fleet: AdvisedFleet
    request: Request
    config: RunConfig
    goal: MetricGoal | None
    root: Path
    on_end: Callable[[SweepOutcome], None]
    workers: SweepWorkers
    left_out: list[str] = field(default_factory=list)

    def compute_costs(self) -> dict[_Key, RoundCost]:
        """Returns the costs of a round of every candidate, by its key.

        Raises:
            ConfigError: energy is to be minimised, and a board's power is not known.
        """
        components = build_run(self.fleet.config, "simulated")
        specs = {*CODECS_MEASURED, AUTO_AS}
        if not self.fleet.config.compression.up.startswith(AUTO):
            specs.add(self.fleet.config.compression.up)
        section = self.fleet.config.simulation
        sizes = Sizes(
            model_bytes=len(components.encode(components.model, 0)),
            update_bytes={spec: compute_expected_bytes(spec, components.update_shapes) for spec in sorted(specs)},
            server_up_bytes_per_s=section.server_up_bytes_per_s,
            server_down_bytes_per_s=section.server_down_bytes_per_s,
        )
        if "energy" in {self.request.minimise, *self.request.budgets} and (
            unknown := [board.name for board in self.fleet.boards if board.profile.power_w is None]
        ):
            raise ConfigError(
                f"energy is not known of {len(unknown)} boards, such as {unknown[0]}: give its profile power_w, or "
                "let boards with a power sensor train first"
            )
        return {
            candidate.key: compute_round_cost(candidate, self.fleet.boards, sizes, get_settings(candidate.strategy))
            for candidate in list_candidates(self.fleet.config)
        }

    def choose_leading(self, costs: Mapping[_Key, RoundCost]) -> list[Candidate]:
        """Returns the most promising candidate of each strategy beside the run file as it is, the best first.

        Strategies that cannot train this run are left out.
        """
        written, chosen = make_written(self.fleet.config), dict[str, Candidate]()
        refused: dict[str, str] = {}
        for candidate in self._sort(costs):
            name = candidate.strategy
            if candidate.key == written.key or name in chosen or name in refused:
                continue
            if error := self._find_error(candidate):
                refused[name] = error
            else:
                chosen[name] = candidate
        self.left_out += [f"{name} cannot train it: {error}" for name, error in sorted(refused.items())]
        return [*chosen.values()][: self.request.num_simulated - 1]

    def choose_more(
        self, costs: Mapping[_Key, RoundCost], ranked: Sequence[Option], tried: Sequence[Candidate]
    ) -> list[Candidate]:
        """Returns other codecs and amounts of work for the best strategies, the most promising first."""
        best = [*dict.fromkeys(option.candidate.strategy for option in ranked)][:NUM_PURSUED]
        keys, num_left = {one.key for one in tried}, self.request.num_simulated - len(tried)
        chosen, counts = list[Candidate](), Counter[str]()
        others = [one for one in self._sort(costs) if one.strategy in best and one.key not in keys]
        # One that hardly loses anything, first: what lighter ones cost in progress is only assumed.
        safe = {one.strategy: one for one in reversed(others) if one.codec == SAFE_CODEC}
        for key in dict.fromkeys([*(one.key for one in safe.values()), *(one.key for one in others)]):
            name = key[0]
            if counts[name] < MAX_OF_STRATEGY:
                chosen.append(next(one for one in others if one.key == key))
                counts[name] += 1
        chosen.sort(key=lambda one: best.index(one.strategy))  # stable: within a strategy by arithmetic
        return [one for one in chosen[: max(0, num_left)] if not self._find_error(one)]

    def try_options(
        self, candidates: Sequence[Candidate], costs: Mapping[_Key, RoundCost], config: RunConfig, timeout_s: float
    ) -> list[Option]:
        """Returns candidates with what their simulated runs came to."""
        outcomes = self.simulate(candidates, config, timeout_s)
        pairs = zip(candidates, outcomes, strict=True)
        return [self.make_option(candidate, costs[candidate.key], outcome) for candidate, outcome in pairs]

    def _sort(self, costs: Mapping[_Key, RoundCost]) -> list[Candidate]:
        def rank(one: Candidate) -> tuple[float, str]:
            return costs[one.key].score(self.request.minimise), str(one)

        return sorted(list_candidates(self.fleet.config), key=rank)

    def _find_error(self, candidate: Candidate) -> str:
        try:
            self._build(candidate)
        except EdgeflError as error:
            return str(error).partition("\n")[0]
        return ""

    def _build(self, candidate: Candidate) -> RunComponents:
        return build_run(candidate.apply(self.config), "simulated")

    def simulate(self, candidates: Sequence[Candidate], config: RunConfig, timeout_s: float) -> list[SweepOutcome]:
        """Returns how runs ended, in order; those that did not end in time are not finished."""
        runs = [self._make_run(candidate, config) for candidate in candidates]
        return run_sweep(
            runs, self.root, on_end=self.on_end, timeout_s=max(MIN_SECONDS, timeout_s), workers=self.workers
        )

    def repeat(
        self, options: Sequence[Option], costs: Mapping[_Key, RoundCost], config: RunConfig, timeout_s: float
    ) -> dict[_Key, Option]:
        """Returns options with the medians over further seeds, by key; those whose repeats ended in time."""
        run, seeds = config.run, range(1, self.request.num_repeats + 1)
        pairs = [
            (option, replace(config, run=replace(run, seed=run.seed + more))) for more in seeds for option in options
        ]
        outcomes = run_sweep(
            [self._make_run(option.candidate, other) for option, other in pairs],
            self.root, on_end=self.on_end, timeout_s=timeout_s, workers=self.workers,
        )  # fmt: skip
        found: dict[_Key, list[Option]] = {option.candidate.key: [option] for option in options}
        for (option, _), outcome in zip(pairs, outcomes, strict=True):
            if outcome.is_finished:
                key = option.candidate.key
                found[key].append(self.make_option(option.candidate, costs[key], outcome))
        return {key: merge_simulations(group) for key, group in found.items()}

    def _make_run(self, candidate: Candidate, config: RunConfig) -> SweepRun:
        named = candidate.apply(config)
        named = replace(named, run=replace(named.run, name=f"advice-{config.run.task}-{candidate.strategy}"))
        return make_sweep_run(named, None, values={}, shards=self.fleet.shards)

    def make_option(self, candidate: Candidate, cost: RoundCost, outcome: SweepOutcome) -> Option:
        """Returns a candidate with what its simulated run came to; only the arithmetic where it did not end."""
        components = self._build(candidate)
        per_device = compute_bytes_per_device(components.strategy, components.model)
        option = Option(
            candidate=candidate,
            cost=cost,
            memory_bytes=count_needed_memory(components),
            state_bytes=len(self.fleet.boards) * per_device,
            reason=outcome.reason,
        )
        if not outcome.is_finished:
            return option
        totals = read_totals(self.root, [outcome])[0]
        return _add_totals(option, outcome, totals, self.fleet, self.goal)

    def note_others(self, costs: Mapping[_Key, RoundCost], options: Sequence[Option]) -> None:
        """Names what was not simulated to its end."""
        unfinished = [option for option in options if option.seconds is None]
        self.left_out += [f"{option.candidate}: {option.reason}" for option in unfinished]
        if (num_others := len(costs) - len(options)) > 0:
            self.left_out.append(f"{num_others} of {len(costs)} combinations, by arithmetic or as those like them")


def merge_simulations(options: Sequence[Option]) -> Option:
    """Returns an option by its simulations with several seeds: medians, and whether most reached the goal.

    One that did not reach it counts with what it had cost by then, which is too little.
    """
    merged: dict[str, Any] = {}
    for name in ("seconds", "rounds", "bytes_up", "bytes_down", "joules"):
        known = [value for option in options if (value := getattr(option, name)) is not None]
        if known:
            value = statistics.median(known)
            merged[name] = value if name in {"seconds", "joules"} else round(value)
    is_reached = 2 * sum(option.is_reached for option in options) > len(options)
    return replace(options[0], **merged, is_reached=is_reached, num_simulations=len(options))


def _add_totals(
    option: Option, outcome: SweepOutcome, totals: RunTotals, fleet: AdvisedFleet, goal: MetricGoal | None
) -> Option:
    names = make_device_names(len(fleet.boards))
    powers = {name: board.profile.power_w for name, board in zip(names, fleet.boards, strict=True)}
    waited, worked = totals.run["wait_s"] or 0.0, (totals.run["compute_s"] or 0.0) + (totals.run["send_s"] or 0.0)
    name = "accuracy" if goal is None else goal.name
    rounds = _cut_at_goal(totals.rounds, goal) if fleet.config.run.accuracy_window == 1 else totals.rounds
    last = rounds[-1]["round"] if rounds else 0
    spent = [row for row in totals.updates if row["round"] <= last]
    joules = math.fsum((powers[row["device_id"]] or 0.0) * (row["compute_s"] or 0.0) for row in spent)
    headers = dict(zip(names, fleet.measured, strict=False))
    header_up = sum(headers[row["device_id"]].header_bytes_up for row in spent) if headers else 0
    header_down = sum(headers[row["device_id"]].header_bytes_down for row in spent) if headers else 0
    return replace(
        option,
        seconds=rounds[-1]["closed_at"] - rounds[0]["started_at"] if rounds else None,
        rounds=len(rounds),
        bytes_up=header_up + sum(row["bytes_up"] for row in rounds),
        bytes_down=header_down + sum(row["bytes_down"] for row in rounds),
        joules=None if None in powers.values() else joules,
        waiting=0.0 if option.candidate.strategy in ASYNCHRONOUS else waited / max(1e-9, waited + worked),
        lost=(totals.run["num_lost"] or 0) / max(1, totals.run["num_assignments"] or 0),
        quality=_get_quality(rounds[-1], name) if rounds else None,
        is_reached=is_goal_reason(outcome.reason) or len(rounds) < len(totals.rounds) or _is_met(rounds, goal),
    )


def _cut_at_goal(rounds: Sequence[Mapping[str, Any]], goal: MetricGoal | None) -> Sequence[Mapping[str, Any]]:
    """Returns the rounds up to the first that is as good as the goal; all where none is."""
    for number, row in enumerate(rounds, 1):
        if _is_met([row], goal):
            return rounds[:number]
    return rounds


def _is_met(rounds: Sequence[Mapping[str, Any]], goal: MetricGoal | None) -> bool:
    quality = _get_quality(rounds[-1], goal.name) if rounds and goal is not None else None
    return goal is not None and quality is not None and goal.is_met(quality)


def _get_quality(row: Mapping[str, Any], name: str) -> float | None:
    value: float | None = row.get(name) if name in {"accuracy", "loss"} else (row.get("metrics") or {}).get(name)
    return value


def _correct(option: Option, corrections: Mapping[str, float]) -> Option:
    """Returns an option with the factors by which earlier advice was wrong."""
    seconds, size, joules = (corrections.get(name, 1.0) for name in ("seconds", "bytes", "joules"))
    if option.seconds is None:
        return option
    return replace(
        option,
        seconds=option.seconds * seconds,
        bytes_up=round((option.bytes_up or 0) * size),
        bytes_down=round((option.bytes_down or 0) * size),
        joules=None if option.joules is None else option.joules * joules,
    )


def _apply_goal(config: RunConfig, request: Request) -> tuple[RunConfig, MetricGoal | None]:
    """Returns the run file with the goal asked for, and the goal; None where neither says one."""
    if request.goal is not None:
        config = replace(config, run=replace(config.run, accuracy=None, until=request.goal))
    try:
        criteria = build_run(config, "simulated").goal
    except ConfigError as error:
        if request.goal is None:
            raise
        raise ConfigError(str(error).replace("run.until", "--goal")) from None
    if criteria.until is not None:
        return replace(config, run=replace(config.run, accuracy=None)), criteria.until
    if criteria.accuracy is not None:
        return config, MetricGoal(name="accuracy", limit=criteria.accuracy, is_max=True)
    return config, None


def _make_own_goal(outcome: SweepOutcome, option: Option) -> MetricGoal:
    """Returns what the run file as it is came to.

    Raises:
        RunFailedError: it did not end in time, or has no accuracy.
    """
    if not outcome.is_finished:
        raise RunFailedError(
            f"the run file as it is did not end ({outcome.reason}), so nothing says what is to be reached: give "
            "--goal, or run.accuracy or run.until, more --seconds or fewer run.rounds"
        )
    if option.quality is None:
        raise RunFailedError(
            "the run file as it is has no accuracy at its end: give --goal, or run.until, with a metric of the task"
        )
    return MetricGoal(name="accuracy", limit=option.quality, is_max=True)


def _keeps_rounds(config: RunConfig) -> bool:
    """Returns whether noise or learning rate follow the rounds, so that another number is another training."""
    return config.privacy.unit is not None or config.strategy.options.get("schedule", "constant") != "constant"


def _set_goal(run: Any, goal: MetricGoal) -> Any:
    return replace(run, accuracy=None, until=f"{goal.name} {'>=' if goal.is_max else '<='} {goal.limit!r}")


def _limit(config: RunConfig, written: Option, cost: RoundCost, fleet: AdvisedFleet, request: Request) -> RunConfig:
    """Returns settings under which a candidate is given up long after the run file as it is would have ended.

    An amount of work is of the run file's own strategy, so that others need another number of rounds; its seconds
    and bytes hold for all. A private run keeps its rounds, and so does one whose learning rate follows them.
    """
    run = config.run
    if _keeps_rounds(config):
        return config
    if written.seconds is None or not written.rounds:
        return replace(config, run=replace(run, rounds=None, updates=None)) if run.epochs else config
    examples = max(1, sum(board.num_examples for board in fleet.boards))
    epochs = written.rounds * cost.examples / examples
    patience = TIGHT_PATIENCE if request.minimise == "time" else PATIENCE
    return replace(
        config,
        run=replace(
            run, rounds=None, updates=None, epochs=max(1.0, PATIENCE * epochs),
            seconds=max(1e-6, min(patience * written.seconds, run.seconds or math.inf)),
        ),
    )  # fmt: skip


def _tighten(config: RunConfig, ranked: Sequence[Option], request: Request) -> RunConfig:
    """Returns settings under which a candidate is given up when it has cost clearly more than the best so far."""
    best = ranked[0] if ranked and ranked[0].is_reached else None
    if best is None or request.minimise == "energy" or config.privacy.unit is not None:
        return config
    run = config.run
    limit = TIGHT_PATIENCE * best.get_cost(request.minimise)
    if request.minimise == "time":
        return replace(config, run=replace(run, seconds=min(limit, run.seconds or limit)))
    return replace(config, run=replace(run, bytes=max(1, round(min(limit, run.bytes or limit)))))


def _double(rounds: int | None) -> int | None:
    """Returns a limit of rounds that leaves room for a run that learns more slowly than predicted."""
    return None if rounds is None else max(1, 2 * rounds)
