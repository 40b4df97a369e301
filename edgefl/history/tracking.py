"""Runs of a history in experiment trackers: TensorBoard's event files, an MLflow server.

A tracker gets a copy of what the history has, and is asked what it holds already. So a program that was killed goes
on where it was: no point is lost, and none is there twice.
"""

from __future__ import annotations

import fcntl
import io
import math
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from edgefl.core.errors import NetworkError, StoreError, UsageError
from edgefl.core.types import Json
from edgefl.history.export import check_file_name
from edgefl.history.series import RunInfo
from edgefl.system.atomic_files import write_atomic

MAX_VALUES, MAX_GROUPS, MAX_SETTINGS = 500, 50, 1_000
"""Of one round, of one fleet, of one run: what a task, a board or a run file may make of them."""
MAX_NAME_CHARS, MAX_SETTING_CHARS = 200, 500
BATCH_VALUES, BATCH_SETTINGS = 1_000, 100
"""What MLflow takes in one request."""
ROUND = "round"
"""Metric that every point has; MLflow is asked by it which rounds it holds."""
TAGS = "edgefl."
RUN_TAG, SUPERSEDED_TAG, SHA256_TAG = f"{TAGS}run", f"{TAGS}superseded", f"{TAGS}sha256"
FINAL_STATUSES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_QUALITIES = ("loss", "accuracy", "train_loss", "node_accuracy", "worst_node_accuracy")
_BOARD_MEANS, _BOARD_MAXIMA = ("compute_s", "send_s", "wait_s", "staleness"), ("max_temperature_c",)
_COSTS = ("seconds", "bytes_up", "bytes_down", "num_updates", "num_devices")
_UNUSABLE = re.compile(r"[^\w.-]|\A\.+\Z", re.ASCII)
_REGISTERED = re.compile(rf"[\w.-]{{1,{MAX_NAME_CHARS}}}", re.ASCII)


class RoundReader(Protocol):
    """Source of history rows: a store, or a remote coordinator."""

    def find_run(self, text: str) -> RunInfo: ...
    def read_pages(self, kind: str, filters: Mapping[str, Any]) -> Iterator[list[Json]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A run as a tracker shows it.

    Attributes:
        run_id, name, status: as the history has them.
        started_at: Unix seconds.
        finished_at: Unix seconds; None until its status is a final one.
        settings: of its run file, by names such as `strategy.learning_rate`.
    """

    run_id: str
    name: str
    status: str
    started_at: float
    finished_at: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A closed round: Unix seconds of its end, and finite values by name, one of them `ROUND`."""

    round: int
    closed_at: float
    values: Mapping[str, float]
    is_evaluated: bool = True


class Tracker(Protocol):
    """Where runs are shown."""

    def record(self, run: TrackedRun, points: Sequence[Point], *, is_whole: bool, num_ready: int) -> None:
        """Adds the points that the tracker does not hold, and the run's status.

        Args:
            run: what it is now.
            points: by round.
            is_whole: whether they are all of the run. Else they are those behind the ones of the last call.
            num_ready: how many of them are to be added; the model of a last one beyond may still be evaluated.

        Raises:
            NetworkError: the tracker cannot be reached, or refuses.
            StoreError: its files cannot be written.
        """


@dataclass(slots=True)
class HistoryTracking:
    """Trackers that follow the runs of a history; `run` is the id of one, None for all."""

    source: RoundReader
    trackers: Sequence[Tracker]
    run: str | None = None
    _seen: dict[str, tuple[Json, Point | None]] = field(default_factory=dict)
    """Of each run its row and its last point, as the trackers have them."""

    def update(self) -> int:
        """Gives the trackers what is new, and returns how many rounds that were.

        Raises:
            NotFoundError: there is no such run.
            NetworkError, StoreError: history or tracker cannot be used, at least for one run; the next call goes on.
        """
        rows = [row for page in self.source.read_pages("runs", {"run": self.run}) for row in page]
        started = [row for row in rows if row["status"] != "queued"]
        # An evaluation changes nothing of a run's row.
        changed = [
            row
            for row in started
            if row["status"] not in FINAL_STATUSES or self._seen.get(row["run_id"], ({},))[0] != row
        ]
        groups = self._read_groups() if changed else {}
        num_rounds, failure = 0, None
        for row in changed:
            try:
                num_rounds += self._update_run(row, groups)
            except (NetworkError, StoreError) as error:  # what refuses one run may take the others
                failure = error
        if failure is not None:
            raise failure
        return num_rounds

    @property
    def is_over(self) -> bool:
        """Whether every run has ended, as far as the last update saw."""
        return bool(self._seen) and all(row["status"] in FINAL_STATUSES for row, _ in self._seen.values())

    def _update_run(self, row: Json, groups: Mapping[str, Sequence[str]]) -> int:
        run_id = check_file_name(str(row["run_id"]))
        last = self._seen[run_id][1] if run_id in self._seen else None
        points = self._read_points(run_id, groups, 1 if last is None else last.round)
        is_final = row["status"] in FINAL_STATUSES
        # A run that resumed from a checkpoint may have closed its last rounds anew, and evaluations may come late.
        is_whole = last is None or points[:1] != [last] or is_final
        if last is not None and is_whole:
            points = self._read_points(run_id, groups, 1)
        # One that a tracker has already, from a stop of the run, waits for nothing.
        is_pending = bool(points) and not is_final and not points[-1].is_evaluated and points[-1] != last
        new = points if is_whole else points[1:]
        tracked = TrackedRun(
            run_id=run_id,
            name=str(row["name"] or run_id),
            status=str(row["status"]),
            started_at=float(row["started_at"] or row["submitted_at"]),
            finished_at=row["finished_at"],
            settings=flatten_settings(self.source.find_run(run_id).config) if is_whole else {},
        )
        self._seen.pop(run_id, None)  # what fails half-way is compared with what the tracker holds
        num_new = len(new) - is_pending
        for tracker in self.trackers:
            tracker.record(tracked, new, is_whole=is_whole, num_ready=num_new)
        held = points[: len(points) - is_pending]
        self._seen[run_id] = (row, held[-1] if held else None)
        return num_new

    def _read_groups(self) -> dict[str, Sequence[str]]:
        devices = (row for page in self.source.read_pages("devices", {}) for row in page)
        groups = {str(row["device_id"]): [str(name) for name in row["groups"] or ()] for row in devices}
        kept = sorted({name for names in groups.values() for name in names})[:MAX_GROUPS]
        return {device: [name for name in names if name in kept] for device, names in groups.items()}

    def _read_points(self, run_id: str, groups: Mapping[str, Sequence[str]], first: int) -> list[Point]:
        filters = {"run": run_id, "where": [f"round>={first}"]}
        rounds = [
            row for page in self.source.read_pages("rounds", filters) for row in page if row["closed_at"] is not None
        ]
        used = {**filters, "where": [*filters["where"], "outcome=used"]}
        figures: dict[int, dict[str, BoardFigures]] = defaultdict(lambda: defaultdict(BoardFigures))
        for row in (row for page in self.source.read_pages("updates", used) for row in page) if rounds else ():
            for group in ("all", *groups.get(str(row["device_id"]), ())):
                figures[row["round"]][group].add(row)
        return [make_point(row, figures.get(row["round"], {})) for row in rounds]


@dataclass(slots=True)
class BoardFigures:
    """Means and maxima over the updates of boards, a row at a time."""

    _sums: dict[str, tuple[float, int]] = field(default_factory=dict)
    _maxima: dict[str, float] = field(default_factory=dict)

    def add(self, row: Json) -> None:
        """Adds a row of the history's updates."""
        for name in _BOARD_MEANS:
            if row[name] is not None:
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = (total + row[name], count + 1)
        for name in _BOARD_MAXIMA:
            if row[name] is not None:
                self._maxima[name] = max(row[name], self._maxima.get(name, -math.inf))

    def compute(self) -> dict[str, float]:
        """Returns the figures that are known."""
        return {name: total / count for name, (total, count) in self._sums.items()} | self._maxima


def make_point(row: Json, boards: Mapping[str, BoardFigures]) -> Point:
    """Returns the point of a round: its qualities, its cost, the metrics of the task, and figures of the boards.

    Args:
        row: of the history's rounds.
        boards: figures of the updates that went into it, by group.
    """
    own: dict[str, Any] = {name: row[name] for name in (*_QUALITIES, *_COSTS)}
    own |= {"disagreement": (row["facts"] or {}).get("disagreement"), ROUND: row["round"]}
    others: dict[str, Any] = {clean_name(name): value for name, value in (row["metrics"] or {}).items() if name}
    for group, figures in boards.items():
        others |= {f"boards/{clean_name(group)}/{name}": value for name, value in figures.compute().items()}
    bounded = dict(sorted(others.items())[:MAX_VALUES])
    return Point(
        round=row["round"],
        closed_at=row["closed_at"],
        values={
            name: float(value)
            for name, value in (bounded | own).items()
            if isinstance(value, int | float) and math.isfinite(value)
        },
        is_evaluated=any(row[name] is not None for name in ("loss", "accuracy", "node_accuracy")),
    )


def clean_name(name: str) -> str:
    """Returns a part of a name as every tracker takes it: shortened, with underscores for other characters."""
    return _UNUSABLE.sub("_", name)[:MAX_NAME_CHARS]


def check_registered_name(option: str, text: str) -> None:
    """Checks the name of a registered model, or an alias; raises `UsageError` where a registry would not take it."""
    if not _REGISTERED.fullmatch(text):
        raise UsageError(
            f"{option} must have 1 to {MAX_NAME_CHARS} letters, digits, dots, dashes or underscores, got "
            f"{text!r:.100}"
        )


def flatten_settings(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the settings of nested tables that have a value, by names with dots; lists are texts."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Mapping):
            flat |= flatten_settings(value, path)
        elif value not in (None, "", [], ()):
            is_plain = isinstance(value, bool | int | float)
            flat[clean_name(path)] = value if is_plain else str(value)[:MAX_SETTING_CHARS]
    return dict(list(flat.items())[:MAX_SETTINGS])


@dataclass(slots=True)
class TensorBoardTracker:
    """A folder of TensorBoard with a folder for each run, named by its id.

    The bytes of a run's file follow from its rounds, so a file that was cut anywhere is the beginning of the whole
    one, and is completed. A file that is no such beginning is replaced by a new one.
    """

    folder: Path
    _sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of the files as they were written last."""

    def __post_init__(self) -> None:
        import_module("tensorboard")  # an extra: missed at once, not at the first round

    def record(self, run: TrackedRun, points: Sequence[Point], *, is_whole: bool, num_ready: int) -> None:
        """Completes the run's event file.

        Raises:
            StoreError: it cannot be written, or another program has written it since.
        """
        folder = self.folder / run.run_id
        path = folder / f"events.out.tfevents.{int(run.started_at)}.edgefl"
        ready = [_encode_point(point) for point in points[:num_ready]]
        content = b"".join(([*_encode_head(run)] if is_whole else []) + ready)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "lock").open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._write(path, content, is_whole=is_whole)
                self._sizes[run.run_id] = path.stat().st_size
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror or error}") from error

    def _write(self, path: Path, content: bytes, *, is_whole: bool) -> None:
        held = path.read_bytes() if is_whole and path.exists() else b""
        if not content.startswith(held):
            write_atomic(path, content)
            return
        with path.open("ab") as file:
            size = len(held) if is_whole else self._sizes.get(path.parent.name, 0)
            if file.tell() != size:
                raise StoreError(f"{path} has {file.tell()} bytes, not {size}: another program writes it")
            file.write(content[len(held) :])
            file.flush()
            os.fsync(file.fileno())


def _encode_head(run: TrackedRun) -> Iterator[bytes]:
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 an extra
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb  # noqa: PLC0415 likewise

    yield _encode_event(Event(wall_time=run.started_at, file_version="brain.Event:2"))
    settings = hparams_pb({"name": run.name, **run.settings}, trial_id=run.run_id, start_time_secs=run.started_at)
    yield _encode_event(Event(wall_time=run.started_at, summary=settings))


def _encode_point(point: Point) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 an extra
    from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415 likewise

    values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
    return _encode_event(Event(wall_time=point.closed_at, step=point.round, summary=Summary(value=values)))


def _encode_event(event: Any) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415 an extra

    out = io.BytesIO()
    RecordWriter(out).write(event.SerializeToString(deterministic=True))
    return out.getvalue()


@dataclass(slots=True)
class MlflowTracker:
    """An experiment of an MLflow server, with a run for each run.

    Which rounds it holds is asked of the server. Where it holds one that the history has not, since the run went back
    to a checkpoint, the server's run is marked as superseded, and a new one has all rounds.
    """

    url: str
    experiment: str = "edgefl"
    _client: Any = None
    _runs: dict[str, str] = field(default_factory=dict)
    """MLflow's ids of the runs."""

    def __post_init__(self) -> None:
        """Prepares the client.

        Raises:
            UsageError: the URL is none of a server, or has a password.
        """
        address = urlsplit(self.url)
        if address.scheme not in {"http", "https"} or not address.hostname:
            raise UsageError(
                f"--mlflow must be the URL of a server such as http://127.0.0.1:5000, got {self.url!r:.100}"
            )
        if "@" in address.netloc:
            raise UsageError(
                f"--mlflow must have no login in its URL: give https://{address.hostname} and the variables "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        from mlflow import MlflowClient  # noqa: PLC0415 an extra

        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        self._client = MlflowClient(tracking_uri=self.url)

    def record(self, run: TrackedRun, points: Sequence[Point], *, is_whole: bool, num_ready: int) -> None:
        """Logs the rounds that the server does not hold, then the status."""
        from mlflow.exceptions import MlflowException  # noqa: PLC0415 an extra

        try:
            held = self._open_run(run, points) if is_whole else {}
            found = self._runs[run.run_id]
            self._log_points(found, points[:num_ready], held)
            if status := FINAL_STATUSES.get(run.status):
                end_ms = None if run.finished_at is None else _to_ms(run.finished_at)
                self._client.set_terminated(found, status, end_ms)
            else:
                self._client.update_run(found, status="RUNNING")
        except MlflowException as error:
            raise self._make_error(error) from None

    def register_model(self, run_id: str, file: Path, name: str, facts: dict[str, str], alias: str | None) -> int:
        """Makes an ONNX file a version of a registered model, and returns the version's number.

        A version that has just these facts is taken, so that what was killed is done again without a second one.

        Args:
            run_id: of a run that was recorded; its run on the server keeps the file.
            file: the ONNX file.
            name: of the registered model, which is made where it is missing; `check_registered_name` has passed it.
            facts: tags of the version, which are no other version's; their names begin with `TAGS`.
            alias: name that the version takes over from another one, likewise; None for no alias.

        Raises:
            NetworkError: the server cannot be reached, or refuses.
        """
        from mlflow.exceptions import MlflowException  # noqa: PLC0415 an extra

        try:
            version = self._find_version(name, facts) or self._create_version(self._runs[run_id], file, name, facts)
            if alias:
                self._client.set_registered_model_alias(name, alias, str(version))
        except (MlflowException, OSError) as error:  # requests' errors are OSErrors
            raise self._make_error(error) from None
        return version

    def _find_version(self, name: str, facts: dict[str, str]) -> int | None:
        if not self._client.search_registered_models(f"name = '{name}'"):
            self._client.create_registered_model(name)
        versions = self._client.search_model_versions(f"name = '{name}'")
        own = {one.version: {tag: text for tag, text in one.tags.items() if tag.startswith(TAGS)} for one in versions}
        return next((int(version) for version, held in own.items() if held == facts), None)

    def _create_version(self, run: str, file: Path, name: str, facts: Mapping[str, str]) -> int:
        import onnx  # noqa: PLC0415 an extra
        from mlflow.onnx import save_model  # noqa: PLC0415 an extra; it needs pandas, another one

        model, place = onnx.load(file), f"models/{sha256(repr(sorted(facts.items())).encode()).hexdigest()}"
        with TemporaryDirectory() as folder:
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # MLflow's own, of its type hints
                save_model(
                    model, f"{folder}/model", signature=_make_signature(model), pip_requirements=["onnxruntime"],
                    onnx_execution_providers=["CPUExecutionProvider"], metadata=dict(facts),
                )  # fmt: skip
            self._client.log_artifacts(run, f"{folder}/model", place)
        created = self._client.create_model_version(name, f"runs:/{run}/{place}", run, tags=dict(facts))
        return int(created.version)

    def _make_error(self, error: Exception) -> NetworkError:
        lines = str(error).strip().splitlines() or ["it refuses"]
        return NetworkError(f"MLflow at {self.url}: {lines[0]:.300}")

    def _open_run(self, run: TrackedRun, points: Sequence[Point]) -> dict[str, set[int]]:
        """Finds or makes the server's run, and returns the rounds that it holds of each metric."""
        experiment = self._find_experiment()
        known = {(point.round, _to_ms(point.closed_at)) for point in points}
        runs = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run.run_id}'")
        current = [one for one in runs if SUPERSEDED_TAG not in one.data.tags]
        kept = None
        for one in sorted(current, key=lambda one: str(one.info.run_id)):
            # A second one is there where two programs made it at once, or an answer was lost.
            if kept is None and self._read_metric(one.info.run_id, ROUND) <= known:
                kept = one
            else:
                self._client.set_tag(one.info.run_id, SUPERSEDED_TAG, "true")
                self._client.set_terminated(one.info.run_id, "KILLED")
        held: dict[str, set[int]] = {}
        if kept is None:
            began_ms, tags = _to_ms(run.started_at), {RUN_TAG: run.run_id}
            kept = self._client.create_run(experiment, began_ms, tags, run.name[:MAX_NAME_CHARS])
        else:
            names = {name for point in points for name in point.values}
            held = {name: {number for number, _ in self._read_metric(kept.info.run_id, name)} for name in names}
        self._runs[run.run_id] = kept.info.run_id
        self._log_settings(kept, run)
        return held

    def _read_metric(self, found: str, name: str) -> set[tuple[int, int]]:
        """Returns round and milliseconds of each point."""
        return {(one.step, one.timestamp) for one in self._client.get_metric_history(found, name)}

    def _find_experiment(self) -> str:
        found = self._client.get_experiment_by_name(self.experiment)
        return cast("str", self._client.create_experiment(self.experiment) if found is None else found.experiment_id)

    def _log_settings(self, found: Any, run: TrackedRun) -> None:
        """Logs the settings that the server does not have; it takes no other value of one."""
        from mlflow.entities import Param  # noqa: PLC0415 an extra

        missing = [Param(name, str(value)) for name, value in run.settings.items() if name not in found.data.params]
        for start in range(0, len(missing), BATCH_SETTINGS):
            self._client.log_batch(found.info.run_id, params=missing[start : start + BATCH_SETTINGS])

    def _log_points(self, found: str, points: Sequence[Point], held: Mapping[str, set[int]]) -> None:
        from mlflow.entities import Metric  # noqa: PLC0415 an extra

        metrics = [
            Metric(name, value, _to_ms(point.closed_at), point.round)
            for point in points
            for name, value in point.values.items()
            if point.round not in held.get(name, ())
        ]
        for start in range(0, len(metrics), BATCH_VALUES):
            self._client.log_batch(found, metrics=metrics[start : start + BATCH_VALUES])


def _to_ms(seconds: float) -> int:
    return round(seconds * 1000)


def _make_signature(model: Any) -> Any:
    """Returns the types and shapes of an ONNX model's inputs and outputs; a size that varies is -1."""
    from mlflow.models import ModelSignature  # noqa: PLC0415 an extra
    from mlflow.types import Schema, TensorSpec  # noqa: PLC0415 likewise
    from onnx.helper import tensor_dtype_to_np_dtype  # noqa: PLC0415 likewise

    inputs, outputs = (
        Schema([
            TensorSpec(
                tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type),
                tuple(dim.dim_value if dim.dim_value > 0 else -1 for dim in value.type.tensor_type.shape.dim),
                value.name,
            )
            for value in values
        ])
        for values in (model.graph.input, model.graph.output)
    )  # fmt: skip
    return ModelSignature(inputs, outputs)
