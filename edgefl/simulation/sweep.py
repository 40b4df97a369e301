"""Sweeps: every combination of settings with every seed, simulated into one store; a sweep that was stopped goes on.

A run's id follows from its settings, so a run that the store has to its end is not simulated again. Several run side
by side in processes of their own: `python -m edgefl.simulation.sweep` simulates one after another, and ends with the
process that started it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import math
import os
import queue
import re
import statistics
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Self

from edgefl import __version__
from edgefl.core.config import INDIFFERENT_SETTINGS, MAX_NAME_CHARS, RunConfig, load_run
from edgefl.core.errors import ConfigError, EdgeflError, RunFailedError, StoreError, UsageError
from edgefl.core.safe_parsing import parse_toml
from edgefl.core.settings import Faults
from edgefl.core.types import Json
from edgefl.engine.progress import MetricGoal
from edgefl.engine.run_summary import compute_run_metrics
from edgefl.simulation.backends.process_pool import read_message, write_message
from edgefl.simulation.backends.training_requests import SINGLE_THREAD_ENVIRONMENT
from edgefl.simulation.history_recorder import make_run_name
from edgefl.simulation.search.early_stopping import (
    Asha,
    AshaSettings,
    Metrics,
    RungReporter,
    find_rung_metrics,
    parse_early_stop,
)
from edgefl.simulation.search.searchers import Choices, Range, parse_range
from edgefl.simulation.simulated_run import check_simulation, simulate
from edgefl.storage.queries.history import read_history
from edgefl.storage.repositories.records import RunRecord, RunStatus
from edgefl.storage.store import Store
from edgefl.system.atomic_files import DATABASE_NAME, lock_file, make_private_directory

log = logging.getLogger(__name__)

MAX_RUNS = 10_000
LOCK_NAME = "sweep.lock"
_RESERVED_SETTINGS = {"run.seed": "--seeds varies it", "run.name": "each run's name has its settings"}
_DECIDING_SETTINGS = frozenset({"run.task", "strategy.name", "strategy.preset"})
"""Settings on which it depends what others there are."""
OUT_OF_TIME = "the time was over before it ended"
_BRACKETS = frozenset("[]{}")
_OTHER_CHARACTERS = re.compile(r"[^\w .,:+#=@()~-]")
"""Characters that a run's name cannot have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """One run: the values of the settings that vary, by setting, and all that it follows from.

    Attributes:
        run_id: the id in the store: of all settings, this release, and the content of `files`.
        files: SHA-256 of each file that the settings name, of the modules of a task or strategy of one's own, and of
            the shards.
        values: by setting, in the order of the command line.
        seed: of the run.
        config: all settings, the fleet's too.
        shards: paths of the devices' data where no data set is cut.
        bookkeeping_only: nothing is trained.
        goal: what a metric must reach, where the run file says so.
    """

    run_id: str
    files: Mapping[str, str]
    values: Mapping[str, Any]
    seed: int
    config: RunConfig
    shards: tuple[str, ...] = ()
    bookkeeping_only: bool = False
    goal: MetricGoal | None = None

    def to_request(self, root: Path, early_stop: AshaSettings | None = None) -> Json:
        """Returns what `_simulate_one` needs, in this process or another."""
        return {
            "early_stop": "" if early_stop is None else str(early_stop),
            "run_id": self.run_id,
            "config": self.config.to_json(),
            "shards": list(self.shards),
            "bookkeeping_only": self.bookkeeping_only,
            "root": str(root),
            "files": dict(self.files),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOutcome:
    """How a run ended; its metrics by name, with `rounds`, `bytes_up`, `bytes_down` and virtual `seconds`.

    One that was `is_stopped` early has the metrics that it had then.
    """

    run: SweepRun
    is_finished: bool
    reason: str
    is_stopped: bool = False
    metrics: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """What a run came to: its row of `edgefl history runs`, those of its updates, and of its closed rounds."""

    run: Mapping[str, Any] = field(default_factory=dict)
    updates: Sequence[Mapping[str, Any]] = ()
    rounds: Sequence[Mapping[str, Any]] = ()


def parse_values(texts: Sequence[str], *, allow_ranges: bool = False) -> dict[str, Choices | Range]:
    """Returns the values of each setting in `SETTING=VALUE,VALUE`; a value is TOML's, or else a text.

    Args:
        texts: of the command line.
        allow_ranges: for a search; `SETTING=LOW..HIGH` and `LOW..HIGH:log` too.

    Raises:
        ConfigError: texts without a value, or settings that come twice or are not to be varied: all of them.
    """
    faults, found = Faults(), dict[str, Choices | Range]()
    for text in texts:
        setting, separator, values = text.partition("=")
        setting = setting.strip()
        with faults:
            if not separator or not setting or not values.strip():
                raise ConfigError(f"--set must be SETTING=VALUE,VALUE such as strategy.epochs=1,2, got {text!r:.100}")
            if setting in _RESERVED_SETTINGS:
                raise ConfigError(f"{setting} cannot be set: {_RESERVED_SETTINGS[setting]}")
            if setting in found:
                raise ConfigError(f"{setting} is set twice; give all its values in one --set")
            span = parse_range(setting, values)
            if span is not None and not allow_ranges:
                raise ConfigError(
                    f"--set {setting}={values.strip()} is a range, which needs --search random or optuna"
                )
            found[setting] = span or _parse_list(setting, values)
    faults.check()
    return found


def _parse_list(setting: str, text: str) -> tuple[Any, ...]:
    """Returns the values between commas, each once; those in brackets or quotation marks stay together."""
    try:
        values = parse_toml(f"values = [{text}]")["values"]
    except ValueError as error:
        if not _BRACKETS.isdisjoint(text):
            message = f"--set {setting}: a list of values with brackets must be TOML, with texts in quotation marks"
            raise ConfigError(f"{message}, got {text!r:.100}: {error}") from None
        values = [_parse_value(part.strip()) for part in text.split(",")]
    found: dict[str, Any] = {}
    for value in map(_to_setting, values):
        found.setdefault(_make_key(value), value)
    return tuple(found.values())


def _to_setting(value: object) -> Any:
    """Returns a value of TOML; dates and times, which no setting has, as texts."""
    if isinstance(value, list):
        return [_to_setting(one) for one in value]
    if isinstance(value, dict):
        return {name: _to_setting(one) for name, one in value.items()}
    return value if isinstance(value, str | int | float) else str(value)


def _make_key(value: object) -> str:
    """Returns a text that is the same for equal values: 1 and 1.0 too, but not true."""
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def _parse_value(text: str) -> Any:
    try:
        value = parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text
    return _to_setting(value)


class SweepPlan:
    """Makes the runs of a run file, by the values of the settings that vary.

    Args:
        file: the run file; its seed is the first of `num_seeds`.
        num_seeds: runs of each combination of values.
        apply_options: applies what the command line says to a run file.
        devices: their number, or existing shards.
        profiles: device profiles.
        data: the folder of the data set.
        scheme: the partition scheme.
        bookkeeping_only: no training.

    Raises:
        ConfigError: what is wrong with the run file.
    """

    def __init__(
        self,
        file: Path,
        num_seeds: int,
        *,
        apply_options: Callable[[RunConfig], RunConfig] = lambda config: config,
        devices: int | Sequence[Path] | None = None,
        bookkeeping_only: bool = False,
        **fleet: Any,
    ) -> None:
        self.num_seeds, self.bookkeeping_only = num_seeds, bookkeeping_only
        self._file, self._apply_options = file, apply_options
        self._fleet = {"devices": devices, **fleet}
        self._shards = (
            () if devices is None or isinstance(devices, int) else tuple(str(one.absolute()) for one in devices)
        )
        self._checked: dict[str, tuple[RunConfig, MetricGoal | None]] = {}
        self._hash_once = cache(_hash_file)  # a run is what its files were now
        self._base = self._check({})
        self._name = make_run_name(self._base[0])

    @property
    def base(self) -> SweepRun:
        """The run file's own run."""
        return self._make_run({}, *self._base, self._base[0].run.seed)

    def check(self, combinations: Iterable[Mapping[str, Any]]) -> None:
        """Checks combinations of values.

        Raises:
            ConfigError: what is wrong with the settings in any of them: all of it.
        """
        faults = Faults()
        for combination in combinations:
            try:
                self._check(combination)
            except EdgeflError:
                found = _find_faults(self._check, combination)
                faults.messages += [message for message in dict.fromkeys(found) if message not in faults.messages]
        faults.check()

    def make_runs(self, values: Mapping[str, Any]) -> list[SweepRun]:
        """Returns the runs of one combination, by seed.

        Raises:
            ConfigError: something is wrong with its settings.
        """
        config, goal = self._check(values)
        seeds = range(config.run.seed, config.run.seed + self.num_seeds)
        return [self._make_run(values, config, goal, seed) for seed in seeds]

    def _check(self, overrides: Mapping[str, Any]) -> tuple[RunConfig, MetricGoal | None]:
        key = json.dumps(dict(overrides))
        if key not in self._checked:
            config = self._apply_options(load_run(self._file, overrides))
            config, criteria = check_simulation(config, **self._fleet)
            self._checked[key] = config, criteria.until
        return self._checked[key]

    def _make_run(self, values: Mapping[str, Any], config: RunConfig, goal: MetricGoal | None, seed: int) -> SweepRun:
        return make_sweep_run(
            _make_config(config, self._name, values, seed),
            goal,
            values=values,
            shards=self._shards,
            bookkeeping_only=self.bookkeeping_only,
            hash_file=self._hash_once,
        )


def hash_texts(texts: Iterable[str]) -> str:
    """Returns 16 hexadecimal digits that are others for other texts."""
    return hashlib.sha256(json.dumps([*texts]).encode()).hexdigest()[:16]


def list_combinations(values: Mapping[str, Sequence[Any]], num_seeds: int) -> list[dict[str, Any]]:
    """Returns every combination of the settings' values.

    Raises:
        UsageError: there are more than `MAX_RUNS` runs.
    """
    num_runs = math.prod(map(len, values.values())) * num_seeds
    if num_runs > MAX_RUNS:
        raise UsageError(f"a sweep has at most {MAX_RUNS} runs, got {num_runs}; leave values or seeds out")
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def plan_sweep(file: Path, values: Mapping[str, Choices | Range], num_seeds: int, **options: Any) -> list[SweepRun]:
    """Returns the runs of each combination of values, by seed; the options are those of `SweepPlan`.

    Raises:
        ConfigError: what is wrong with the run file, or else with the settings in any combination: all of it.
        UsageError: there are more than `MAX_RUNS` runs.
    """
    choices = {setting: domain for setting, domain in values.items() if not isinstance(domain, Range)}
    combinations = list_combinations(choices, num_seeds)  # a range needs a search
    plan = SweepPlan(file, num_seeds, **options)
    plan.check(combinations)
    return [run for combination in combinations for run in plan.make_runs(combination)]


def make_sweep_run(
    config: RunConfig,
    goal: MetricGoal | None,
    *,
    values: Mapping[str, Any],
    shards: Sequence[str] = (),
    bookkeeping_only: bool = False,
    hash_file: Callable[[str], str] | None = None,
) -> SweepRun:
    """Returns one run of checked settings, with the id that follows from them; the arguments are its attributes.

    Raises:
        ConfigError: a file that the settings name cannot be read.
    """
    paths = [*_list_files(config), *_list_shard_files(shards)]
    files = {path: (hash_file or _hash_file)(path) for path in paths}
    settings = config.to_json()
    for setting in INDIFFERENT_SETTINGS:
        settings["simulation"].pop(setting, None)
    text = json.dumps([__version__, settings, shards, bookkeeping_only, [*files.values()]], sort_keys=True)
    return SweepRun(
        run_id=f"sweep-{hashlib.sha256(text.encode()).hexdigest()[:16]}",
        files=files,
        values=values,
        seed=config.run.seed,
        config=config,
        shards=tuple(shards),
        bookkeeping_only=bookkeeping_only,
        goal=goal,
    )


def _find_faults(check: Callable[[Mapping[str, Any]], object], combination: Mapping[str, Any]) -> list[str]:
    """Returns all that is wrong with a combination: a later check sees what an earlier one had stopped."""
    remaining, messages = dict(combination), list[str]()
    while remaining:
        try:
            check(remaining)
        except ConfigError as error:
            found: Sequence[str] = error.faults
        except EdgeflError as error:
            is_named = any(_is_about(str(error), setting) for setting in remaining)
            found = (str(error) if is_named else f"{format_values(remaining)}: {error}",)
        else:
            break
        messages += found
        wrong = [setting for setting in remaining if any(_is_about(message, setting) for message in found)]
        if not wrong or not _DECIDING_SETTINGS.isdisjoint(wrong):
            break
        for setting in wrong:
            del remaining[setting]
    return messages


def _is_about(message: str, setting: str) -> bool:
    """Returns whether a message is about a setting, or its whole section; what it suggests comes after a colon."""
    names = "|".join(map(re.escape, (setting, setting.partition(".")[0])))
    return re.search(rf"(?<![\w.])({names})(?![\w.])", message.partition(":")[0]) is not None


def shorten_settings(settings: Sequence[str], taken: Sequence[str] = ()) -> dict[str, str]:
    """Returns settings without their sections, where that says which it is and is not `taken`."""
    counts = Counter([*(setting.rpartition(".")[2] for setting in settings), *taken])
    return {one: one if counts[one.rpartition(".")[2]] > 1 else one.rpartition(".")[2] for one in settings}


def format_values(values: Mapping[str, Any]) -> str:
    """Returns `learning_rate=0.1 epochs=2`."""
    names = shorten_settings([*values])
    return " ".join(f"{names[setting]}={format_setting_value(value)}" for setting, value in values.items())


def format_setting_value(value: object) -> str:
    """Returns a value of a setting as a name or a table has it."""
    if isinstance(value, list):
        return "+".join(map(format_setting_value, value))
    if isinstance(value, dict):
        return "+".join(f"{name}:{format_setting_value(one)}" for name, one in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)


def _make_config(config: RunConfig, name: str, values: Mapping[str, Any], seed: int) -> RunConfig:
    """Returns the settings with a seed, and a name that begins with `name` and says what varies."""
    words = " ".join(filter(None, (name, format_values(values))))
    ending = f" seed={seed}"
    name = _OTHER_CHARACTERS.sub("~", words.replace("|", "+"))
    if len(name) + len(ending) > MAX_NAME_CHARS:
        digest = f"#{hashlib.sha256(words.encode()).hexdigest()[:8]}"
        name = name[: MAX_NAME_CHARS - len(ending) - len(digest)] + digest
    return replace(config, run=replace(config.run, name=name + ending, seed=seed))


def _list_files(config: RunConfig) -> list[str]:
    """Returns the absolute paths of the files that settings name, and of the modules of a run's own classes."""
    names = [name.partition(":")[0] for name in (config.run.task, config.strategy.name) if ":" in name]
    sources = [getattr(sys.modules.get(name), "__file__", None) for name in names]
    named = [text for text in _list_texts(config.to_json()) if os.path.isfile(text)]  # noqa: PTH113 of any length
    return [str(Path(path).absolute()) for path in (*sources, *named) if path is not None]


def _list_shard_files(shards: Sequence[str]) -> Iterator[str]:
    """Yields the files of shards, each of which is a file or a folder."""
    for shard in map(Path, shards):
        found = sorted(shard.rglob("*")) if shard.is_dir() else [shard]
        yield from (str(path) for path in found if not path.is_dir())


def _list_texts(value: object) -> Iterator[str]:
    """Yields all texts among the values of settings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _list_texts(one)


def _check_files(files: Mapping[str, str]) -> None:
    for path, digest in files.items():
        if _hash_file(path) != digest:
            raise ConfigError(f"{path} was changed after the sweep began; start the sweep again")


def _hash_file(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def run_sweep(  # noqa: PLR0913 the last six by name
    runs: Sequence[SweepRun],
    root: Path,
    *,
    num_jobs: int = 1,
    retry_failed: bool = False,
    on_end: Callable[[SweepOutcome], None] = lambda _: None,
    timeout_s: float | None = None,
    workers: SweepWorkers | None = None,
    early_stop: AshaSettings | None = None,
) -> list[SweepOutcome]:
    """Simulates those runs that the store does not have to their end, and returns how all of them ended, in order.

    Args:
        runs: in the order in which they start.
        root: folder of the history.
        num_jobs: how many run side by side.
        retry_failed: runs that failed, once more.
        on_end: called as runs end, first with those of an earlier start.
        timeout_s: seconds after which those that have not ended are stopped, and count as not finished; they run in
            processes of their own then. No limit when None.
        workers: processes that are there already, in place of `num_jobs` that start for this sweep.
        early_stop: ends runs that are behind.

    Raises:
        StoreError: the history cannot be written, or another sweep works in the folder.
    """
    company = hash_texts(sorted(run.run_id for run in runs))
    with open_sweep(root, on_end, retry_failed=retry_failed, early_stop=early_stop, company=company) as sweep:
        sweep.restore(runs)
        if sweep.outcomes:
            log.info("%d of %d runs are of an earlier start", len(sweep.outcomes), len(runs))
        pending = [run for run_id, run in sweep.runs.items() if run_id not in sweep.outcomes]
        sweep.simulate(pending, min(num_jobs, len(pending)), timeout_s, workers)
        outcomes = sweep.outcomes
    return [outcomes.get(run.run_id) or SweepOutcome(run=run, is_finished=False, reason=OUT_OF_TIME) for run in runs]


@contextlib.contextmanager
def open_sweep(
    root: Path,
    on_end: Callable[[SweepOutcome], None],
    *,
    retry_failed: bool,
    early_stop: AshaSettings | None,
    company: str,
) -> Iterator[Sweep]:
    """Yields a sweep that has its folder to itself; runs that have not ended in the block are interrupted.

    `company` is another for every set of runs that are compared.
    """
    make_private_directory(root)
    error_message = (
        f"another sweep works in {root}: wait for its end, or give this one a folder of its own with --dir"
    )
    with lock_file(root / LOCK_NAME, error_message), Store.open(root / DATABASE_NAME) as store:
        asha = None if early_stop is None else Asha(early_stop, company)
        sweep = Sweep(store=store, root=root, on_end=on_end, retry_failed=retry_failed, asha=asha)
        try:
            yield sweep
        except BaseException:
            _mark_interrupted(store, sweep.runs, "the sweep was stopped")
            raise
        _mark_interrupted(store, sweep.runs, OUT_OF_TIME)


@dataclass(slots=True, kw_only=True)
class Sweep:
    """A sweep at work: its runs so far, and the outcomes of those that have ended, by id."""

    store: Store
    root: Path
    on_end: Callable[[SweepOutcome], None]
    retry_failed: bool
    asha: Asha | None
    runs: dict[str, SweepRun] = field(default_factory=dict)
    outcomes: dict[str, SweepOutcome] = field(default_factory=dict)

    def restore(self, runs: Sequence[SweepRun]) -> None:
        """Adds runs, with the outcomes of those that the store has to their end."""
        added = {run.run_id: run for run in runs}
        self.runs |= added
        _mark_interrupted(self.store, added, "the sweep was stopped")
        records = _find_records(self.store, added)
        found = {run_id: _read_outcome(self.store, added[run_id], records[run_id]) for run_id in records}
        found = {run_id: one for run_id, one in found.items() if self._is_final(records[run_id])}
        for run_id, outcome in found.items():
            self._restore_rungs(outcome.run, records[run_id])
            self._record(outcome)

    def _is_final(self, record: RunRecord) -> bool:
        """Returns whether a run need not be simulated again; one that other settings have stopped early must be."""
        if record.status == RunStatus.STOPPED:
            return self.asha is not None and self.asha.find_last_rung(record.reason) is not None
        return record.status == RunStatus.FINISHED or (record.status == RunStatus.FAILED and not self.retry_failed)

    def simulate(
        self,
        runs: Iterable[SweepRun],
        num_jobs: int,
        timeout_s: float | None,
        workers: SweepWorkers | None,
    ) -> None:
        """Simulates runs; the next one is asked for when there is room for it."""
        judge = None if self.asha is None else self._judge
        early_stop = None if self.asha is None else self.asha.settings
        job = _Job(root=self.root, early_stop=early_stop, judge=judge)
        for run, error, status in _simulate_all(runs, job, num_jobs, timeout_s, workers):
            _mark_interrupted(self.store, [run.run_id], error, status)
            record = _find_records(self.store, [run.run_id]).get(run.run_id)
            outcome = SweepOutcome(run=run, is_finished=False, reason=error)
            if record is not None and not error:
                outcome = _read_outcome(self.store, run, record)
            self._record(outcome)

    def _record(self, outcome: SweepOutcome) -> None:
        self.outcomes[outcome.run.run_id] = outcome
        self.on_end(outcome)

    def _restore_rungs(self, run: SweepRun, record: RunRecord) -> None:
        """Adds what a run of an earlier start has reached at its rungs."""
        if self.asha is None:
            return
        rounds, num_rounds = read_history(self.store, "rounds", run=record.run_id), run.config.run.rounds
        last = self.asha.find_last_rung(record.reason)
        for rung in self.asha.settings.list_rungs(num_rounds):
            metrics = find_rung_metrics(rounds, rung, num_rounds)
            if metrics is None or (last is not None and rung > last):
                break
            if (score := _compute_score(run, metrics)) is not None:
                self.asha.record(run.run_id, run.seed, rung, score)

    def _judge(self, run: SweepRun, rung: int, metrics: Metrics) -> str:
        """Returns why a run ends at a rung, or an empty text; called in the threads that wait for workers."""
        assert self.asha is not None
        score = _compute_score(run, metrics)
        if score is None:
            return ""
        reason = self.asha.judge(run.run_id, run.seed, rung, score)  # recorded in any case, as after a restart
        return "" if _is_goal_reached(run, metrics) else reason


def _compute_score(run: SweepRun, metrics: Metrics) -> float | None:
    """Returns the value by which the run is compared, more is better; None where it is unknown."""
    metric = _select_metric(run, has_accuracy=metrics.get("accuracy") is not None)
    value = metrics.get(metric.name)
    return None if value is None else value if metric.is_max else -value


def _is_goal_reached(run: SweepRun, metrics: Metrics) -> bool:
    """Returns whether the run ends by itself, since its model is as good as the run file asks."""
    accuracy, limit = metrics.get("accuracy"), run.config.run.accuracy
    if accuracy is not None and limit is not None and accuracy >= limit:
        return True
    value = None if run.goal is None else metrics.get(run.goal.name)
    return run.goal is not None and value is not None and run.goal.is_met(value)


def read_totals(root: Path, outcomes: Sequence[SweepOutcome]) -> list[RunTotals]:
    """Returns the totals of runs; empty ones of a run that is not in the store."""
    with Store.open(root / DATABASE_NAME, read_only=True) as store:
        records = _find_records(store, [outcome.run.run_id for outcome in outcomes])
        found = [records.get(outcome.run.run_id) for outcome in outcomes]
        return [RunTotals() if record is None else _read_totals(store, record.run_id) for record in found]


def _read_totals(store: Store, run_id: str) -> RunTotals:
    return RunTotals(
        run=read_history(store, "runs", run=run_id)[0],
        updates=read_history(store, "updates", run=run_id),
        rounds=[row for row in read_history(store, "rounds", run=run_id) if row["closed_at"] is not None],
    )


def _list_records(store: Store, run_ids: Collection[str]) -> list[RunRecord]:
    """Returns all records of runs, oldest first, those of runs that find their scales too."""
    prefix = os.path.commonprefix([*run_ids])  # noqa: RUF071 ids, which are no paths
    records = reversed(store.list_runs(prefix=prefix))
    return [record for record in records if "-".join(record.run_id.split("-")[:2]) in run_ids]


def _find_records(store: Store, run_ids: Collection[str]) -> dict[str, RunRecord]:
    """Returns the newest record of each run that the store has; a run that was begun again has a number appended."""
    parts = [(record.run_id.split("-"), record) for record in _list_records(store, run_ids)]
    return {"-".join(names[:2]): record for names, record in parts if "".join(names[2:]).isdecimal() or not names[2:]}


def _mark_interrupted(
    store: Store, run_ids: Collection[str], reason: str, status: RunStatus = RunStatus.INTERRUPTED
) -> None:
    """Ends runs in the history whose process is gone."""
    for record in _list_records(store, run_ids):
        if record.status in {RunStatus.QUEUED, RunStatus.RUNNING}:
            at = record.started_at or record.submitted_at
            store.set_run_status(record.run_id, status, at=at, reason=reason)


def _read_outcome(store: Store, run: SweepRun, record: RunRecord) -> SweepOutcome:
    rounds = read_history(store, "rounds", run=record.run_id)
    metrics = compute_run_metrics(rounds, (record.finished_at or 0.0) - (record.started_at or 0.0))
    num_rounds = sum(row["closed_at"] is not None for row in rounds)
    return SweepOutcome(
        run=run,
        is_finished=record.status == RunStatus.FINISHED,
        is_stopped=record.status == RunStatus.STOPPED,
        reason=record.reason or "",
        metrics={**metrics, "rounds": num_rounds},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What all runs of a sweep have in common: their folder, and who ends them early."""

    root: Path
    early_stop: AshaSettings | None = None
    judge: Callable[[SweepRun, int, Metrics], str] | None = None


def _simulate_all(
    runs: Iterable[SweepRun], job: _Job, num_jobs: int, timeout_s: float | None, shared: SweepWorkers | None
) -> Iterator[tuple[SweepRun, str, RunStatus]]:
    """Yields runs as they end, each with its error, empty for one that did not fail, and what that makes of it.

    A run is asked for when a process is idle. With a timeout those that have not ended by then are left out.
    """
    if shared is None and num_jobs <= 1 and timeout_s is None:
        for run in runs:
            report = None if job.judge is None else partial(job.judge, run)
            yield run, _simulate_one(run.to_request(job.root, job.early_stop), report), RunStatus.FAILED
        return
    is_over = Future[None]()
    with contextlib.ExitStack() as stack:
        workers = shared or stack.enter_context(SweepWorkers(num_jobs))
        workers.resume()
        pool = stack.enter_context(ThreadPoolExecutor(len(workers)))
        if timeout_s is not None:
            timer = threading.Timer(timeout_s, is_over.set_result, [None])
            stack.callback(timer.cancel)
            timer.start()
        source, running = iter(runs), set[Future[tuple[SweepRun, str, RunStatus]]]()
        try:
            while True:
                for run in itertools.islice(source, len(workers) - len(running)):
                    running.add(pool.submit(workers.simulate, run, job))
                if not running:
                    return
                waited: list[Future[Any]] = [*running, is_over]
                done = running & wait(waited, return_when=FIRST_COMPLETED).done
                running -= done
                for future in done:
                    yield future.result()
                if is_over.done():
                    log.info("%d runs have not ended in time", len(running))
                    return
        finally:
            workers.stop_runs()


def _simulate_one(request: Json, report: Callable[[int, Metrics], str] | None = None) -> str:
    """Simulates a run; returns why it failed, or an empty text.

    Args:
        request: from `SweepRun.to_request`.
        report: says at each rung whether the run is to end there.

    Raises:
        StoreError: the history cannot be written, so no other run could be.
    """
    early_stop = None
    if report is not None and request["early_stop"]:
        num_rounds = request["config"]["run"].get("rounds")
        early_stop = RungReporter(parse_early_stop(request["early_stop"]), num_rounds, report)
    try:
        _check_files(request["files"])
        simulate(
            request["config"],
            devices=request["shards"] or None,
            root=request["root"],
            bookkeeping_only=request["bookkeeping_only"],
            run_id=request["run_id"],
            early_stop=early_stop,
        )
    except StoreError:
        raise
    except EdgeflError as error:
        return str(error) or type(error).__name__
    except Exception as error:  # the boundary of one run: the others can still be simulated
        log.exception("run %s failed", request["run_id"])
        return f"{type(error).__name__}: {error}"
    return ""


class SweepWorkers:
    """Processes that simulate runs, for one sweep or several; each starts with its first run."""

    def __init__(self, num_jobs: int) -> None:
        self._is_stopped = threading.Event()
        self._workers = [_Worker(self._is_stopped) for _ in range(max(1, num_jobs))]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def __len__(self) -> int:
        return len(self._workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.close()

    def simulate(self, run: SweepRun, job: _Job) -> tuple[SweepRun, str, RunStatus]:
        """Simulates a run in an idle process, of which there is one for each thread that calls this."""
        worker = self._idle.get()
        try:
            return run, *worker.simulate(run, job)
        finally:
            self._idle.put(worker)

    def resume(self) -> None:
        """Lets runs start again after `stop_runs`, once its threads have ended."""
        self._is_stopped.clear()

    def stop_runs(self) -> None:
        """Ends processes in the middle of a run, and lets no other start."""
        self._is_stopped.set()
        for worker in self._workers:
            if worker.is_busy:
                worker.kill()


class _Worker:
    """A process that simulates runs; it is started with the first, and again after it has died.

    Args:
        is_stopped: no run is to start or to go on; whoever sets it kills busy processes afterwards.
    """

    def __init__(self, is_stopped: threading.Event) -> None:
        self.is_busy = False
        self._is_stopped = is_stopped
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = threading.Event()

    def simulate(self, run: SweepRun, job: _Job) -> tuple[str, RunStatus]:
        """Returns as `_simulate_one`, and the status of a run with an error: a signal ends none for good."""
        self.is_busy = True  # first: who stops runs kills what is busy, or is seen below
        process = self._start()
        if self._is_stopped.is_set():
            self.is_busy = False
            return "the sweep was stopped", RunStatus.INTERRUPTED
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):  # a process that has died gives no reply either
            write_message(process.stdin, run.to_request(job.root, job.early_stop))  # type: ignore[arg-type]  # a pipe writes like any binary file
        reply = read_message(process.stdout)  # type: ignore[arg-type]  # likewise
        while reply is not None and "rung" in reply[0]:
            reason = "" if job.judge is None else job.judge(run, reply[0]["rung"], reply[0]["metrics"])
            with contextlib.suppress(OSError):
                write_message(process.stdin, {"reason": reason})  # type: ignore[arg-type]  # likewise
            reply = read_message(process.stdout)  # type: ignore[arg-type]  # likewise
        self.is_busy = False
        if reply is None:
            code = process.wait()
            self._end_process()
            if code < 0:  # someone ended it, or the machine was short of memory
                return f"its process was ended by signal {-code}", RunStatus.INTERRUPTED
            return f"its process ended with code {code}", RunStatus.FAILED
        if "store" in reply[0]:
            raise StoreError(reply[0]["store"])
        return str(reply[0]["error"]), RunStatus.FAILED

    def kill(self) -> None:
        """Kills the process; the thread that waits for its reply gets none, and starts another with the next run."""
        if (process := self._process) is not None:
            process.kill()
            process.wait()  # the next run finds it dead, and starts another

    def close(self) -> None:
        """Ends the process, in the middle of a run too."""
        self._is_closed.set()
        self._end_process()

    def _end_process(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # of what the process did not read
                    pipe.close()
        self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        if self._is_closed.is_set():
            raise RunFailedError("the sweep is over")
        if self._process is not None and self._process.poll() is not None:
            self._end_process()
        if self._process is None:
            path = os.pathsep.join(entry for entry in sys.path if entry)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "edgefl.simulation.sweep"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **SINGLE_THREAD_ENVIRONMENT, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the sweep, which ends its processes
            )
        return self._process


def main() -> None:
    """Simulates the runs that stdin names, until it ends; in the middle of a run too."""
    # A task's output must not get between our messages.
    sink = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    pending: queue.SimpleQueue[Json] = queue.SimpleQueue()

    def read_requests() -> None:
        while (message := read_message(sys.stdin.buffer)) is not None:
            pending.put(message[0])
        os._exit(1)

    def report(rung: int, metrics: Metrics) -> str:
        write_message(sink, {"rung": rung, "metrics": dict(metrics)})
        return str(pending.get()["reason"])

    threading.Thread(target=read_requests, name="runs", daemon=True).start()
    logging.disable(logging.WARNING)  # what is to be said of a run is said of hundreds
    while True:
        request = pending.get()
        # The processes that train would share the cores with those of the other runs.
        section = request["config"]["simulation"]
        section.setdefault("workers", 1 if section.get("engine") == "ray" else 0)
        try:
            reply = {"error": _simulate_one(request, report)}
        except StoreError as error:
            reply = {"store": str(error)}
        write_message(sink, reply)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepMetric:
    """What a sweep's runs are compared by."""

    name: str
    is_max: bool


def select_metric(outcomes: Sequence[SweepOutcome]) -> SweepMetric:
    """Returns the metric of the run's goal, else the accuracy, else the loss; the time where nothing is trained."""
    has_accuracy = any(outcome.metrics.get("accuracy") is not None for outcome in outcomes)
    return _select_metric(outcomes[0].run, has_accuracy=has_accuracy)


def _select_metric(run: SweepRun, *, has_accuracy: bool) -> SweepMetric:
    if run.bookkeeping_only:
        return SweepMetric(name="seconds", is_max=False)
    if run.goal is not None:
        return SweepMetric(name=run.goal.name, is_max=run.goal.is_max)
    return SweepMetric(name="accuracy" if has_accuracy else "loss", is_max=has_accuracy)


SUM_COLUMNS = ("rounds", "bytes_up", "bytes_down", "seconds")


def summarise(outcomes: Sequence[SweepOutcome], metric: SweepMetric) -> list[Json]:
    """Returns a row for each combination, best first; behind those of which every seed has a value, the others.

    A row has `values`; `mean` and `spread` of the metric (the standard deviation of the seeds as a sample; None of
    one), and the means of `SUM_COLUMNS`; `num_runs`, over which all of them are; `num_failed`; `num_stopped`, those
    that were stopped early; and `num_unknown`, those that finished without a value. Without any value, the
    means are over these. Where all that did not fail were stopped early, everything is over these.
    """
    groups: dict[str, list[SweepOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(json.dumps(dict(outcome.run.values)), []).append(outcome)
    rows = [_summarise_group(group, metric) for group in groups.values()]
    sign = -1.0 if metric.is_max else 1.0

    def rank(row: Json) -> tuple[bool, bool, float, float]:
        is_partial = bool(row["num_failed"] or row["num_unknown"] or row["num_stopped"])
        return row["mean"] is None, is_partial, sign * (row["mean"] or 0.0), row["seconds"] or 0.0

    return sorted(rows, key=rank)


def _summarise_group(group: Sequence[SweepOutcome], metric: SweepMetric) -> Json:
    stopped = [outcome for outcome in group if outcome.is_stopped]
    finished = [outcome for outcome in group if outcome.is_finished] or stopped
    values = [outcome.metrics.get(metric.name) for outcome in finished]
    known = [value for value in values if value is not None and math.isfinite(value)]
    counted = [
        outcome
        for outcome, value in zip(finished, values, strict=True)
        if not known or (value is not None and math.isfinite(value))
    ]
    return {
        "values": dict(group[0].run.values),
        "mean": statistics.fmean(known) if known else None,
        "spread": statistics.stdev(known) if len(known) > 1 else None,
        "num_runs": len(counted),
        "num_failed": sum(not (outcome.is_finished or outcome.is_stopped) for outcome in group),
        "num_stopped": len(stopped),
        "num_unknown": len(finished) - len(known),
        **{
            name: statistics.fmean(outcome.metrics[name] or 0.0 for outcome in counted) if counted else None
            for name in SUM_COLUMNS
        },
    }


if __name__ == "__main__":
    main()
