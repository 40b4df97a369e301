"""A fleet as an object: its boards, runs, history and models; for notebooks, and for the commands about runs."""

from __future__ import annotations

import contextlib
import html
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from edgefl.client.sources import ApiSource, DirectorySource, Source, resolve_source
from edgefl.core.errors import NetworkError, RunFailedError, TaskError, UsageError
from edgefl.system.api_client import CoordinatorClient, format_resource_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from edgefl.core.config import RunConfig
    from edgefl.core.types import Array, Inputs, Json, Task
    from edgefl.history.tables import Table
    from edgefl.simulation.advice.advice import Advice
    from edgefl.storage.queries.columns import HistoryFilters
    from edgefl.tasks.export.model_export import OnnxExportable

log = logging.getLogger(__name__)

TERMINAL_STATUSES = frozenset({"finished", "stopped", "failed", "interrupted"})
POLL_S = 0.5
MAX_UNREACHABLE_S = 60.0
"""How long a run is followed without an answer of its coordinator."""
RUN_COLUMNS = ("run_id", "name", "task", "strategy", "status", "rounds", "accuracy", "submitted_at", "reason")
DEVICE_COLUMNS = ("device_id", "role", "groups", "state", "version", "last_seen_at")
MODEL_COLUMNS = ("sha256", "run_id", "task", "round", "version", "accuracy", "bytes_file", "latest", "best")
CURVE_COLUMNS = ("round", "seconds", "bytes_up", "bytes_down", "accuracy", "loss", "train_loss")


def connect(url: str | None = None, *, directory: str | Path | None = None) -> Fleet:
    """Returns the fleet of a coordinator, or of the directory of one that does not run.

    Args:
        url: `https://HOST:PORT`; `EDGEFL_URL`, else the one of this user's `operator.toml`, when None. `EDGEFL_FLEET`
            names another fleet's file, and `EDGEFL_TOKEN` replaces its token.
        directory: of a coordinator that does not run, or of simulations; it can only be read.

    Raises:
        NotAllowedError: there is no operator file.
        NotFoundError: there is no fleet of that name.
        UsageError: the URL is malformed, or both are given.
    """
    source = resolve_source(None if directory is None else Path(directory), url)
    if isinstance(source, ApiSource):
        CoordinatorClient.from_options(url)  # what is wrong with the file is said here, not at the first question
    return Fleet(source)


def follow_run(
    client: CoordinatorClient,
    run: str,
    *,
    is_known: bool = False,
    timeout_s: float | None = None,
    stopping: threading.Event | None = None,
    poll_s: float = POLL_S,
) -> Iterator[Json]:
    """Yields the row of a run until it is over, that one included; tolerates short absences of the coordinator.

    Args:
        client: of the coordinator.
        run: as in `edgefl run show RUN`.
        is_known: whether the coordinator has answered about it; else its first answer must come at once.
        timeout_s: seconds after which nothing is yielded any more; no limit when None.
        stopping: ends it from another thread.
        poll_s: seconds between questions.

    Raises:
        NetworkError: the coordinator did not answer for `MAX_UNREACHABLE_S`, or for all of `timeout_s`.
        NotFoundError: there is no such run.
    """
    stopping = stopping or threading.Event()
    started_s = last_reply_s = time.monotonic()
    path, has_answered = format_resource_path("runs", run), is_known
    while True:
        error: NetworkError | None = None
        try:
            row, last_reply_s = client.get(path), time.monotonic()
        except NetworkError as caught:
            error = caught
            if not has_answered or time.monotonic() - last_reply_s > MAX_UNREACHABLE_S:
                raise
        else:
            has_answered, path = True, format_resource_path("runs", row["run_id"])
            yield row
            if row["status"] in TERMINAL_STATUSES:
                return
        left_s = poll_s if timeout_s is None else min(poll_s, started_s + timeout_s - time.monotonic())
        if left_s < 0 or stopping.wait(left_s):
            if error is not None:
                raise error
            return


def check_finished(row: Json) -> None:
    """Raises `RunFailedError` unless the run with this row has finished."""
    if row["status"] != "finished":
        raise RunFailedError(f"run {row['run_id']} {row['status']}: {row['reason']}")


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet: its boards, runs, history and models. `connect` makes one.

    Attributes:
        source: where it is read: a running coordinator, or a directory.
    """

    source: Source

    @property
    def client(self) -> CoordinatorClient:
        """Client of the coordinator's JSON API, for what has no method here.

        Raises:
            UsageError: this fleet is a directory, which can only be read.
        """
        if isinstance(self.source, DirectorySource):
            raise UsageError(
                f"{self.source.directory} is the directory of a coordinator that does not run; it can only be read"
            )
        return CoordinatorClient.from_options(self.source.url)

    @property
    def devices(self) -> Table:
        """The boards, with state and groups; of a directory with what each did in all runs."""
        from edgefl.history.tables import Table  # noqa: PLC0415 fast start

        if isinstance(self.source, DirectorySource):
            return self.history("devices")
        rows = self.client.get("/edgefl/v1/devices")["rows"]
        return Table(rows, DEVICE_COLUMNS, "devices")

    @property
    def runs(self) -> Table:
        """The runs, oldest first."""
        from edgefl.history.tables import Table  # noqa: PLC0415 fast start

        if isinstance(self.source, DirectorySource):
            return self.history("runs")
        return Table(self.client.get("/edgefl/v1/runs")["rows"], RUN_COLUMNS, "runs")

    @property
    def models(self) -> Table:
        """The models that runs keep, oldest run first."""
        from edgefl.history.tables import Table  # noqa: PLC0415 fast start

        return Table(self.source.list_models(None), MODEL_COLUMNS)

    def history(self, kind: str, **filters: Unpack[HistoryFilters]) -> Table:
        """Returns history rows of a kind, oldest first.

        Args:
            kind: as of `edgefl history KIND`: runs, rounds, accuracy, slow, updates, stale, dropouts, traffic,
                energy, devices, heartbeats, events, audit, evaluations.
            **filters: `run`, `device`, `since` and `until` (Unix seconds), `limit`, `where` such as
                `["staleness>3"]`, `by` (device, day or run).

        Raises:
            UsageError: there is no such kind, or a filter that it does not have.
        """
        from edgefl.core.settings import suggest_name  # noqa: PLC0415 fast start
        from edgefl.history.tables import Table  # noqa: PLC0415 likewise
        from edgefl.storage.queries.columns import (  # noqa: PLC0415 likewise
            COLUMNS,
            GROUPINGS,
            HistoryFilters,
            get_columns,
        )

        if kind not in COLUMNS:
            raise UsageError(f"there is no history of {kind!r}: {suggest_name(kind, COLUMNS)}")
        if unknown := filters.keys() - (known := HistoryFilters.__annotations__.keys()):
            raise UsageError(f"there is no filter {(name := min(unknown))!r}: {suggest_name(name, known)}")
        rows = self.source.read_rows(kind, **filters)
        return Table(rows, get_columns(kind, filters.get("by") or GROUPINGS[0]), kind)

    def run(self, name: str = "latest") -> Run:
        """Returns a run by its id, the beginning of it, its name, or `latest`; raises `NotFoundError` without one."""
        return Run(self, self.source.find_run(name).run_id)

    def advise(self, config: RunConfig | Mapping[str, Any] | str | Path, **options: Any) -> Advice:
        """Returns which strategy, codec and local work suit a run on these boards, as their history measured them.

        Args:
            config: a run file, its tables, or the result of `config.load_run`.
            **options: `goal`, `minimise`, `budgets`, `seconds`, `num_jobs`, `data`, `scheme` and `root`, as of
                `edgefl.client.advice.advise`.

        Raises:
            DataError: no board has trained the task yet.
        """
        from edgefl.client.advice import advise  # noqa: PLC0415 fast start

        return advise(config, self.source, **options)

    def submit(self, config: RunConfig | Mapping[str, Any] | str | Path, *, priority: int = 0) -> Run:
        """Queues a run and returns it.

        With `[strategy] name = "auto"` it first chooses strategy, codec and local work, as `advise` does; that takes
        up to a minute, and the log says why.

        Args:
            config: a run file, its tables, or the result of `config.load_run`.
            priority: of the runs that wait the highest begins first.

        Raises:
            ConfigError: the run file is wrong, or the coordinator refuses it.
            NotAllowedError: the token may only read.
            DataError: with `auto`, no board has trained the task yet.
            RunFailedError: with `auto`, no candidate reached the goal.
        """
        from edgefl.client.advice import settle_strategy  # noqa: PLC0415 fast start
        from edgefl.core.config import make_run_config  # noqa: PLC0415 likewise

        client = self.client  # a directory is refused before anything is computed
        choice = settle_strategy(make_run_config(config), self.source)
        for reason in choice.reasons:
            log.info("%s", reason)
        body = {"config": choice.config.to_json(), "priority": priority}
        return Run(self, client.post("/edgefl/v1/runs", body)["run_id"])

    def simulate(self, config: RunConfig | Mapping[str, Any] | str | Path, **options: Any) -> Run:
        """Trains on a simulated fleet on this machine, and returns that run.

        Args:
            config: as of `submit`.
            **options: those of `edgefl.simulate`; a fleet that is a directory keeps the run there.

        Raises:
            EdgeflError: as `edgefl.simulate`.
        """
        from edgefl.core.config import make_run_config  # noqa: PLC0415 fast start
        from edgefl.core.extensions import allow_modules  # noqa: PLC0415 likewise
        from edgefl.simulation.advice.automatic import settle_simulation  # noqa: PLC0415 likewise
        from edgefl.simulation.simulated_run import simulate  # noqa: PLC0415 likewise

        described = {name: options[name] for name in ("devices", "profiles", "data", "scheme") if name in options}
        trains = not options.get("bookkeeping_only", False)
        with allow_modules(options.get("allow_modules", ())):
            choice = settle_simulation(make_run_config(config), clock=time.monotonic, trains=trains, **described)
        for reason in choice.reasons:
            log.info("%s", reason)
        config = choice.config
        if isinstance(self.source, DirectorySource):
            options = {"root": self.source.directory, **options}
        result = simulate(config, **options)
        return Run(Fleet(DirectorySource(result.root)), result.run_id)

    def __repr__(self) -> str:
        return f"Fleet({_format_source(self.source)})"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(_format_source(self.source))}</p>{self.devices._repr_html_()}"


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a fleet, live or simulated.

    Attributes:
        fleet: whose run it is.
        run_id: its id.
    """

    fleet: Fleet
    run_id: str

    @property
    def row(self) -> Json:
        """What is known of it now: `status`, `rounds`, `accuracy`, `reason` and more."""
        source = self.fleet.source
        if isinstance(source, ApiSource):
            return self.fleet.client.get(self._path)
        return source.read_rows("runs", run=self.run_id)[0]

    @property
    def status(self) -> str:
        """queued, running, stopping, finished, stopped, failed, interrupted; or what it waits for."""
        return str(self.row["status"])

    @property
    def config(self) -> Mapping[str, Any]:
        """The tables of its run file."""
        return self.fleet.source.find_run(self.run_id).config

    @property
    def rounds(self) -> Table:
        """Its rounds, oldest first; the rows of `edgefl history rounds`."""
        return self.fleet.history("rounds", run=self.run_id)

    @property
    def metrics(self) -> Any:
        """A `pandas.DataFrame` of its rounds: accuracy, losses, metrics of the task, seconds and bytes so far.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        from edgefl.history.tables import Table  # noqa: PLC0415 fast start

        rounds = {row["round"]: row for row in self.rounds}
        rows = [
            {**(rounds.get(row["round"], {}).get("metrics") or {}), **row, "seconds": row["at_s"]}
            for row in self.fleet.history("accuracy", run=self.run_id)
        ]
        declared = [name for row in rows for name in (rounds.get(row["round"], {}).get("metrics") or {})]
        return Table(rows, tuple(dict.fromkeys([*CURVE_COLUMNS, *declared]))).to_pandas().set_index("round")

    def wait(self, *, timeout_s: float | None = None, on_change: Callable[[Json], None] | None = None) -> Run:
        """Waits until it is over and returns it; a notebook shows its progress meanwhile.

        Args:
            timeout_s: seconds to wait at most; no limit when None.
            on_change: called with its row when that changed.

        Raises:
            RunFailedError: it failed, was stopped or interrupted, or is not over in time.
            NetworkError: its coordinator is away for a minute, or until the time is over.
        """
        return self._wait(timeout_s, on_change, threading.Event())

    async def wait_async(
        self, *, timeout_s: float | None = None, on_change: Callable[[Json], None] | None = None
    ) -> Run:
        """Waits as `wait`, in a thread that ends with this call: `on_change` is called there."""
        import asyncio  # noqa: PLC0415 fast start

        stopping = threading.Event()
        try:
            return await asyncio.to_thread(self._wait, timeout_s, on_change, stopping)
        finally:
            stopping.set()

    def _wait(
        self, timeout_s: float | None, on_change: Callable[[Json], None] | None, stopping: threading.Event
    ) -> Run:
        if isinstance(self.fleet.source, DirectorySource):
            check_finished(self.row)
            return self
        row: Json = {}
        with _NotebookProgress() as progress:
            client, previous = self.fleet.client, row
            for row in follow_run(client, self.run_id, is_known=True, timeout_s=timeout_s, stopping=stopping):
                if row != previous:
                    progress.update(row)
                    if on_change is not None:
                        on_change(row)
                previous = row
        if (status := row.get("status")) not in TERMINAL_STATUSES:
            raise RunFailedError(f"run {self.run_id} is {status} after {timeout_s} s")
        check_finished(row)
        return self

    def stop(self) -> None:
        """Ends it after what is in flight; model and history stay."""
        self.fleet.client.post(f"{self._path}/stop")

    def resume(self) -> None:
        """Lets it, interrupted or stopped, go on from its newest checkpoint."""
        self.fleet.client.post(f"{self._path}/resume")

    def plot(self, kind: str | None = None, *, axis: str | None = None, title: str = "") -> Figure:
        """Returns a figure of matplotlib; a notebook shows it.

        Args:
            kind: as of `edgefl history plot KIND`; accuracy and loss when None.
            axis: rounds, time or bytes; all beside each other when None.
            title: above the sheet.

        Raises:
            MissingPackageError: matplotlib is not installed.
            NotFoundError: the run has not the data.
            UsageError: there is no such kind, or no such axis for it.
        """
        from edgefl.history import check_matplotlib  # noqa: PLC0415 fast start

        check_matplotlib()
        from edgefl.history.figures import render_figure  # noqa: PLC0415 matplotlib is slow to load

        _enable_inline_figures()
        return render_figure(self.fleet.source, kind, [self.run_id], axis=axis, title=title)

    def model(self, name: str | int = "best") -> SavedModel:
        """Returns a model that this run keeps: `best`, `latest`, a round's number, or the beginning of its SHA-256.

        Raises:
            NotFoundError: it keeps no such model.
        """
        return SavedModel(self.fleet, self.fleet.source.find_model(str(name), self.run_id))

    def __repr__(self) -> str:
        row = self.row
        return f"Run({self.run_id}, {row['status']}, {row['rounds']} rounds)"

    def _repr_html_(self) -> str:
        return _format_progress(self.row)

    @property
    def _path(self) -> str:
        return format_resource_path("runs", self.run_id)


@dataclass(frozen=True, slots=True)
class SavedModel:
    """A model that a run keeps.

    Attributes:
        fleet: whose model it is.
        row: what is known of it: `sha256`, `run_id`, `task`, `round`, `accuracy` and more.
    """

    fleet: Fleet = field(repr=False)
    row: Json

    @property
    def sha256(self) -> str:
        """SHA-256 of its safetensors file."""
        return str(self.row["sha256"])

    @property
    def task(self) -> Task:
        """Its task, made with the options of its run.

        Raises:
            TaskError: there is no such task here; see `allow_modules` of `edgefl.core.extensions`.
        """
        from edgefl.tasks.registry import make_task  # noqa: PLC0415 fast start

        return make_task(self.row["task"], self.row["task_options"])

    def load(self, *, cluster: int | None = None) -> dict[str, Array]:
        """Returns its tensors, checked against its SHA-256.

        Args:
            cluster: which one, of a model that has one for each cluster.

        Raises:
            DataError: it is of several clusters and none is named.
            NotFoundError: its file is gone.
        """
        from edgefl.core.clusters import select_cluster  # noqa: PLC0415 fast start
        from edgefl.storage.checkpoints import load_model_file  # noqa: PLC0415 likewise

        with self.fleet.source.open_model_file(self.sha256) as path:
            return dict(select_cluster(load_model_file(path), cluster))

    def predict(self, inputs: Inputs, *, cluster: int | None = None) -> Array:
        """Returns the outputs for inputs as a shard of its task has them, any numbers: [n, outputs] logits or values.

        Raises:
            TaskError: its task computes none, or tensors of the model stay on the boards.
            DataError, NotFoundError: as `load`.
        """
        return self._load_learner(cluster).logits(inputs)

    def to_torch(self, *, cluster: int | None = None) -> Any:
        """Returns its `torch.nn.Module`, in evaluation mode.

        Raises:
            TaskError: its task has none, or tensors of the model stay on the boards.
            DataError, NotFoundError: as `load`.
        """
        module = getattr(self._load_learner(cluster), "module", None)
        if module is None:
            raise TaskError(f"a model of task {self.row['task']} is no torch module; use predict, load or to_onnx")
        return module.eval()

    def to_onnx(self, path: str | Path, *, cluster: int | None = None) -> Path:
        """Writes an ONNX file that takes what a shard of its task holds, as float32, and returns its path.

        Raises:
            TaskError: it cannot be exported, or tensors of the model stay on the boards.
            MissingPackageError: an extra is not installed.
            DataError, NotFoundError: as `load`.
        """
        from edgefl.tasks.export.model_export import export_onnx  # noqa: PLC0415 onnx is slow to load

        out, tensors = Path(path), self.load(cluster=cluster)
        export_onnx(self.task, tensors, out, options=self.row["task_options"], model_sha256=self.sha256)
        return out

    def _load_learner(self, cluster: int | None) -> OnnxExportable:
        from edgefl.tasks.export.model_export import load_learner  # noqa: PLC0415 onnx is slow to load

        return load_learner(self.task, self.load(cluster=cluster))


def _enable_inline_figures() -> None:
    """Lets a notebook show figures as pictures, which it does once pyplot has loaded the notebook's backend."""
    if "ipykernel" in sys.modules:
        import matplotlib as mpl  # noqa: PLC0415 matplotlib is slow to load
        from matplotlib import pyplot as plt  # noqa: PLC0415 likewise

        plt.switch_backend(mpl.get_backend())


class _NotebookProgress(contextlib.AbstractContextManager["_NotebookProgress"]):
    """Shows a run's progress where a notebook runs this code; elsewhere nothing."""

    def __init__(self) -> None:
        self._handle: Any = None

    def __exit__(self, *_: object) -> None:
        self._handle = None

    def update(self, row: Json) -> None:
        if "ipykernel" not in sys.modules:
            return
        ipython: Any = sys.modules["IPython.display"]
        content = ipython.HTML(_format_progress(row))
        if self._handle is None:
            self._handle = ipython.display(content, display_id=True)
        else:
            self._handle.update(content)


def _format_progress(row: Json) -> str:
    goal = ((row.get("config") or {}).get("run") or {}).get("rounds")
    bar = "" if not goal else f'<progress value="{int(row["rounds"])}" max="{int(goal)}"></progress> '
    accuracy = "" if row.get("accuracy") is None else f", accuracy {row['accuracy']:.4f}"
    reason = f": {row['reason']}" if row.get("reason") else ""
    of_goal = f" of {goal}" if goal else ""
    text = f"{row.get('name') or row['run_id']} {row['status']}: round {row['rounds']}{of_goal}{accuracy}{reason}"
    return f"<p>{bar}{html.escape(text)}</p>"


def _format_source(source: Source) -> str:
    if isinstance(source, DirectorySource):
        return str(source.directory)
    return CoordinatorClient.from_options(source.url).url
