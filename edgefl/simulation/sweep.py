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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import cache
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

    def to_request(self, root: Path) -> Json:
        """Returns what `_simulate_one` needs, in this process or another."""
        return {
            "run_id": self.run_id,
            "config": self.config.to_json(),
            "shards": list(self.shards),
            "bookkeeping_only": self.bookkeeping_only,
            "root": str(root),
            "files": dict(self.files),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOutcome:
    """How a run ended; its metrics by name, with `rounds`, `bytes_up`, `bytes_down` and virtual `seconds`."""

    run: SweepRun
    is_finished: bool
    reason: str
    metrics: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """What a run came to: its row of `edgefl history runs`, those of its updates, and of its closed rounds."""

    run: Mapping[str, Any] = field(default_factory=dict)
    updates: Sequence[Mapping[str, Any]] = ()
    rounds: Sequence[Mapping[str, Any]] = ()


def parse_values(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Returns the values of each setting in `SETTING=VALUE,VALUE`; a value is TOML's, or else a text.

    Raises:
        ConfigError: texts without a value, or settings that come twice or are not to be varied: all of them.
    """
    faults, found = Faults(), dict[str, tuple[Any, ...]]()
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
            found[setting] = _parse_list(setting, values)
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


def plan_sweep(  # noqa: PLR0913 those of `simulate`
    file: Path,
    values: Mapping[str, Sequence[Any]],
    num_seeds: int,
    *,
    apply_options: Callable[[RunConfig], RunConfig] = lambda config: config,
    devices: int | Sequence[Path] | None = None,
    profiles: Sequence[str] = (),
    data: Path | None = None,
    scheme: str | None = None,
    bookkeeping_only: bool = False,
) -> list[SweepRun]:
    """Returns the runs of each combination of values, by seed.

    Args:
        file: the run file; its seed is the first of `num_seeds`.
        values: by setting.
        num_seeds: runs of each combination.
        apply_options: applies what the command line says to a run file.
        devices: their number, or existing shards.
        profiles: device profiles.
        data: the folder of the data set.
        scheme: the partition scheme.
        bookkeeping_only: no training.

    Raises:
        ConfigError: what is wrong with the run file, or else with the settings in any combination: all of it.
        UsageError: there are more than `MAX_RUNS` runs.
    """
    num_runs = math.prod(map(len, values.values())) * num_seeds
    if num_runs > MAX_RUNS:
        raise UsageError(f"a sweep has at most {MAX_RUNS} runs, got {num_runs}; leave values or seeds out")

    def check(overrides: Mapping[str, Any]) -> tuple[RunConfig, MetricGoal | None]:
        config, criteria = check_simulation(
            apply_options(load_run(file, overrides)), devices=devices, profiles=profiles, data=data, scheme=scheme
        )
        return config, criteria.until

    name = make_run_name(check({})[0])
    combinations = [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]
    faults, checked = Faults(), list[tuple[RunConfig, MetricGoal | None]]()
    for combination in combinations:
        try:
            checked.append(check(combination))
        except EdgeflError:
            found = _find_faults(check, combination)
            faults.messages += [message for message in dict.fromkeys(found) if message not in faults.messages]
    faults.check()
    shards = () if devices is None or isinstance(devices, int) else tuple(str(path.absolute()) for path in devices)
    hash_once = cache(_hash_file)  # a run is what its files were now
    return [
        make_sweep_run(
            _make_config(config, name, combination, seed),
            goal,
            values=combination,
            shards=shards,
            bookkeeping_only=bookkeeping_only,
            hash_file=hash_once,
        )
        for combination, (config, goal) in zip(combinations, checked, strict=True)
        for seed in range(config.run.seed, config.run.seed + num_seeds)
    ]


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


def run_sweep(  # noqa: PLR0913 the last five by name
    runs: Sequence[SweepRun],
    root: Path,
    *,
    num_jobs: int = 1,
    retry_failed: bool = False,
    on_end: Callable[[SweepOutcome], None] = lambda _: None,
    timeout_s: float | None = None,
    workers: SweepWorkers | None = None,
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

    Raises:
        StoreError: the history cannot be written, or another sweep works in the folder.
    """
    make_private_directory(root)
    error_message = (
        f"another sweep works in {root}: wait for its end, or give this one a folder of its own with --dir"
    )
    with lock_file(root / LOCK_NAME, error_message), Store.open(root / DATABASE_NAME) as store:
        run_ids = {run.run_id: run for run in runs}
        _mark_interrupted(store, run_ids, "the sweep was stopped")
        final = {RunStatus.FINISHED} if retry_failed else {RunStatus.FINISHED, RunStatus.FAILED}
        outcomes = {
            run_id: _read_outcome(store, run_ids[run_id], record)
            for run_id, record in _find_records(store, run_ids).items()
            if record.status in final
        }
        if outcomes:
            log.info("%d of %d runs are of an earlier start", len(outcomes), len(runs))
        for outcome in outcomes.values():
            on_end(outcome)
        pending = [run for run_id, run in run_ids.items() if run_id not in outcomes]
        try:
            num_jobs = min(num_jobs, len(pending))
            for run, error, status in _simulate_all(pending, root, num_jobs, timeout_s, workers):
                _mark_interrupted(store, [run.run_id], error, status)
                record = _find_records(store, [run.run_id]).get(run.run_id)
                outcome = SweepOutcome(run=run, is_finished=False, reason=error)
                if record is not None and not error:
                    outcome = _read_outcome(store, run, record)
                outcomes[run.run_id] = outcome
                on_end(outcome)
        except BaseException:
            _mark_interrupted(store, run_ids, "the sweep was stopped")
            raise
        _mark_interrupted(store, run_ids, OUT_OF_TIME)
    return [outcomes.get(run.run_id) or SweepOutcome(run=run, is_finished=False, reason=OUT_OF_TIME) for run in runs]


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
        reason=record.reason or "",
        metrics={**metrics, "rounds": num_rounds},
    )


def _simulate_all(
    runs: Sequence[SweepRun], root: Path, num_jobs: int, timeout_s: float | None, shared: SweepWorkers | None
) -> Iterator[tuple[SweepRun, str, RunStatus]]:
    """Yields runs as they end, each with its error, empty for one that did not fail, and what that makes of it.

    With a timeout those that have not ended by then are left out.
    """
    if not runs:
        return
    if shared is None and num_jobs <= 1 and timeout_s is None:
        for run in runs:
            yield run, _simulate_one(run.to_request(root)), RunStatus.FAILED
        return
    with contextlib.ExitStack() as stack:
        workers = shared or stack.enter_context(SweepWorkers(num_jobs))
        workers.resume()
        pool = stack.enter_context(ThreadPoolExecutor(len(workers)))
        futures = [pool.submit(workers.simulate, run, root) for run in runs]
        try:
            for future in as_completed(futures, timeout=timeout_s):
                yield future.result()
        except TimeoutError:
            log.info("%d of %d runs have ended", sum(future.done() for future in futures), len(runs))
        finally:
            for future in futures:
                future.cancel()
            workers.stop_runs()


def _simulate_one(request: Json) -> str:
    """Simulates a run; returns why it failed, or an empty text.

    Raises:
        StoreError: the history cannot be written, so no other run could be.
    """
    try:
        _check_files(request["files"])
        simulate(
            request["config"],
            devices=request["shards"] or None,
            root=request["root"],
            bookkeeping_only=request["bookkeeping_only"],
            run_id=request["run_id"],
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

    def simulate(self, run: SweepRun, root: Path) -> tuple[SweepRun, str, RunStatus]:
        """Simulates a run in an idle process, of which there is one for each thread that calls this."""
        worker = self._idle.get()
        try:
            return run, *worker.simulate(run.to_request(root))
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

    def simulate(self, request: Json) -> tuple[str, RunStatus]:
        """Returns as `_simulate_one`, and the status of a run with an error: a signal ends none for good."""
        self.is_busy = True  # first: who stops runs kills what is busy, or is seen below
        process = self._start()
        if self._is_stopped.is_set():
            self.is_busy = False
            return "the sweep was stopped", RunStatus.INTERRUPTED
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):  # a process that has died gives no reply either
            write_message(process.stdin, request)  # type: ignore[arg-type]  # a pipe writes like any binary file
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

    threading.Thread(target=read_requests, name="runs", daemon=True).start()
    logging.disable(logging.WARNING)  # what is to be said of a run is said of hundreds
    while True:
        request = pending.get()
        # The processes that train would share the cores with those of the other runs.
        section = request["config"]["simulation"]
        section.setdefault("workers", 1 if section.get("engine") == "ray" else 0)
        try:
            reply = {"error": _simulate_one(request)}
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
    first = outcomes[0].run
    if first.bookkeeping_only:
        return SweepMetric(name="seconds", is_max=False)
    if first.goal is not None:
        return SweepMetric(name=first.goal.name, is_max=first.goal.is_max)
    has_accuracy = any(outcome.metrics.get("accuracy") is not None for outcome in outcomes)
    return SweepMetric(name="accuracy" if has_accuracy else "loss", is_max=has_accuracy)


SUM_COLUMNS = ("rounds", "bytes_up", "bytes_down", "seconds")


def summarise(outcomes: Sequence[SweepOutcome], metric: SweepMetric) -> list[Json]:
    """Returns a row for each combination, best first; behind those of which every seed has a value, the others.

    A row has `values`; `mean` and `spread` of the metric (the standard deviation of the seeds as a sample; None of
    one), and the means of `SUM_COLUMNS`; `num_runs`, over which all of them are; `num_failed`; and `num_unknown`,
    those that finished without a value of the metric. Without any value, the means are over these.
    """
    groups: dict[str, list[SweepOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(json.dumps(dict(outcome.run.values)), []).append(outcome)
    rows = [_summarise_group(group, metric) for group in groups.values()]
    sign = -1.0 if metric.is_max else 1.0

    def rank(row: Json) -> tuple[bool, bool, float, float]:
        is_partial = bool(row["num_failed"] or row["num_unknown"])
        return row["mean"] is None, is_partial, sign * (row["mean"] or 0.0), row["seconds"] or 0.0

    return sorted(rows, key=rank)


def _summarise_group(group: Sequence[SweepOutcome], metric: SweepMetric) -> Json:
    finished = [outcome for outcome in group if outcome.is_finished]
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
        "num_failed": len(group) - len(finished),
        "num_unknown": len(finished) - len(known),
        **{
            name: statistics.fmean(outcome.metrics[name] or 0.0 for outcome in counted) if counted else None
            for name in SUM_COLUMNS
        },
    }


if __name__ == "__main__":
    main()
