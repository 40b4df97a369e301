"""Does the work of an instruction: decodes the model, trains or evaluates on this board's shard, encodes the result.

Learner and shard stay warm between instructions. A shard is read again when its files changed, so that a folder the
board collects into counts from the next assignment on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.compression.registry import decode_body, make_codec
from edgefl.device.residents import load_resident, save_resident
from edgefl.errors import DataError, EdgeflError, NetworkError, TaskError
from edgefl.protocol import finite
from edgefl.tasks.local_training import train
from edgefl.tasks.registry import make_task
from edgefl.tasks.splits import local_split
from edgefl.types import Dataset, Json, Learner, LocalPlan, Role, Shapes, Task, derived_rng

log = logging.getLogger(__name__)


KEPT_RECALLS = 64


class AbandonedError(Exception):
    """The agent stops: the assignment under way ends without an answer."""


ProgressSink = Callable[[str, int, float], None]
"""(assignment id, finished iterations, seconds per iteration)"""


@dataclass(slots=True)
class _Warm:
    """A task ready to train; `stamp` says which state of the shard's files `data` holds."""

    name: str
    task: Task
    shapes: Shapes
    learner: Learner
    stamp: object = None
    data: Dataset | None = None
    splits: dict[float, tuple[Dataset, Dataset]] | None = None


class Trainer:
    """The working half of a device; used by one thread, watched and recalled from others.

    Args:
        device_id: names this device's random streams.
        role: an evaluator evaluates on its whole shard, a trainer on its local test split.
        shards: task -> path, asked again at every instruction.
        accelerator: cpu or cuda.
        threads: how many cores to use, None for all.
        state_dir: where tensors that stay on the board are kept.
        on_progress: told after every iteration of a plan that asks for it.
    """

    def __init__(  # noqa: PLR0913 a composition root hands over its parts by name
        self,
        *,
        device_id: str,
        role: str,
        shards: Callable[[], Mapping[str, str]],
        accelerator: str,
        threads: int | None,
        state_dir: Path,
        on_progress: ProgressSink,
    ) -> None:
        self._device_id, self._role, self._shards = device_id, role, shards
        self._accelerator, self._threads, self._state_dir = accelerator, threads, state_dir
        self._on_progress = on_progress
        self._warm: OrderedDict[str, _Warm] = OrderedDict()
        self._recalled: OrderedDict[str, None] = OrderedDict()
        self._abandoned = False
        self._lock = threading.Lock()
        self._now: tuple[str, str, int] | None = None

    @property
    def now(self) -> tuple[str, str, int] | None:
        """Returns run, assignment and iteration that are being worked on."""
        return self._now

    def recall(self, assignment_id: str) -> None:
        """Ends an assignment after its current iteration; what has been learnt is sent."""
        with self._lock:
            self._recalled[assignment_id] = None
            # Recalls of work that never comes, or came before, must not gather over months.
            while len(self._recalled) > KEPT_RECALLS:
                self._recalled.popitem(last=False)

    def abandon(self) -> None:
        """Ends whatever is under way without an answer, after the current iteration."""
        self._abandoned = True

    def shard_stamps(self) -> object:
        """Returns a value that changes when any shard does."""
        return tuple((name, path, _stamp(Path(path))) for name, path in sorted(self._shards().items()))

    def train(self, header: Json, body: bytes) -> tuple[Json, bytes]:
        """Returns metrics and the encoded displacement for one assignment."""
        return self._answer(header, body, self._train)

    def evaluate(self, header: Json, body: bytes) -> tuple[Json, bytes]:
        """Returns loss and accuracy of the model in `body`."""
        return self._answer(header, body, self._evaluate)

    def examples(self) -> dict[str, int]:
        """Returns how many examples each shard holds now; a shard that cannot be read counts as absent."""
        counts = {}
        for name, path in self._shards().items():
            try:
                counts[name] = len(make_task(name).read(path))
            except Exception as error:  # a loader of the user's own may raise anything, and the board must stay
                log.warning("shard %s of task %s cannot be used: %s", path, name, error, exc_info=not _is_ours(error))
        return counts

    def _answer(
        self, header: Json, body: bytes, work: Callable[[Json, _Warm, bytes], tuple[Json, bytes]]
    ) -> tuple[Json, bytes]:
        reply = {"v": 1, "run": header.get("run"), "assignment": header.get("assignment")}
        try:
            metrics, result = work(header, self._warmed(header), body)
        except AbandonedError:
            raise
        except Exception as error:  # the boundary of one assignment: the board must be there for the next
            log.warning("assignment %s failed: %s", header.get("assignment"), error, exc_info=not _is_ours(error))
            return {**reply, "error": f"{type(error).__name__}: {error}"}, b""
        finally:
            self._now = None
            with self._lock:
                self._recalled.pop(str(header.get("assignment")), None)
        return {**reply, "metrics": metrics}, result

    def _train(self, header: Json, warm: _Warm, body: bytes) -> tuple[Json, bytes]:
        plan, assignment_id, run = _plan(header), str(header["assignment"]), str(header["run"])
        self._now = run, assignment_id, 0
        data, _ = self._splits(warm, float(header["test_fraction"]))
        learner = self._loaded(warm, run, body, int(header["seed"]))
        # Without the run's id, which is new for every submission: the same seed gives the same run.
        origin = int(header["seed"]), int(header["version"]), self._device_id
        reported_s = 0.0

        def on_iteration(iteration: int, seconds_per_iteration: float) -> bool:
            nonlocal reported_s
            self._now = run, assignment_id, iteration
            if self._abandoned:
                raise AbandonedError
            if plan.report_progress and time.monotonic() - reported_s >= 0.1:
                reported_s = time.monotonic()
                self._on_progress(assignment_id, iteration, seconds_per_iteration)
            return assignment_id in self._recalled

        result = train(learner, data, plan, derived_rng(*origin), clock=time.monotonic, on_iteration=on_iteration)
        save_resident(self._state_dir, run, warm.shapes, learner)
        codec = make_codec(str(header.get("codec", "dense")), warm.shapes)
        encoded = codec.encode(result.displacement, derived_rng(*origin, "uplink"))
        metrics = {
            "iterations": result.iterations,
            "num_examples": result.num_examples,
            "loss": finite(result.loss),
            "compute_s": result.compute_s,
        }
        return metrics, encoded

    def _evaluate(self, header: Json, warm: _Warm, body: bytes) -> tuple[Json, bytes]:
        run = str(header["run"])
        self._now = run, str(header["assignment"]), 0
        data = self._data(warm)
        if self._role != Role.EVALUATOR:
            data = self._splits(warm, float(header["test_fraction"]))[1]
        if not len(data):
            raise DataError("the local test split holds no examples")
        loss, accuracy = self._loaded(warm, run, body, int(header["seed"])).evaluate(data)
        if not (np.isfinite(loss) and np.isfinite(accuracy)):
            raise DataError(f"the model's loss on the test data is {loss}: it has diverged")
        return {"num_examples": len(data), "loss": float(loss), "accuracy": float(accuracy)}, b""

    def _loaded(self, warm: _Warm, run: str, body: bytes, seed: int) -> Learner:
        """Puts the global model into the learner, and what this board keeps for itself beside it."""
        if any(not spec.shared for spec in warm.shapes):
            warm.learner.load(load_resident(self._state_dir, run, warm.shapes) or warm.task.init(seed))
        warm.learner.load(decode_body(body, warm.shapes))
        return warm.learner

    def _warmed(self, header: Json) -> _Warm:
        """Returns the task of a header, made once per task and options; two are kept."""
        if header.get("v") != 1:
            raise NetworkError(f"instruction of version {header.get('v')!r}, this agent reads 1: update it")
        name, options = str(header["task"]), dict(header.get("options", {}))
        # Before anything is imported or called: only its owner says, by a shard, which tasks this board runs.
        self._shard_path(name)
        key = f"{name} {sorted(options.items())}"
        if key not in self._warm:
            task = make_task(name, options)
            learner = task.learner(accelerator=self._accelerator, threads=self._threads)
            self._warm[key] = _Warm(name=name, task=task, shapes=task.shapes(), learner=learner)
        self._warm.move_to_end(key)
        while len(self._warm) > 2:
            self._warm.popitem(last=False)
        return self._warm[key]

    def _shard_path(self, task: str) -> str:
        path = self._shards().get(task)
        if path is None:
            raise TaskError(f"this device has no shard for task {task!r}; edgefl device shard add")
        return path

    def _data(self, warm: _Warm) -> Dataset:
        path = self._shard_path(warm.name)
        stamp = (path, _stamp(Path(path)))
        if warm.data is None or warm.stamp != stamp:
            warm.data, warm.stamp, warm.splits = warm.task.read(path), stamp, {}
        return warm.data

    def _splits(self, warm: _Warm, test_fraction: float) -> tuple[Dataset, Dataset]:
        data = self._data(warm)
        splits = warm.splits if warm.splits is not None else {}
        if test_fraction not in splits:
            splits[test_fraction] = local_split(data, test_fraction)
        warm.splits = splits
        return splits[test_fraction]


def _is_ours(error: Exception) -> bool:
    return isinstance(error, EdgeflError)


def _plan(header: Json) -> LocalPlan:
    known = {field.name for field in fields(LocalPlan)}
    values: dict[str, Any] = {name: value for name, value in dict(header["plan"]).items() if name in known}
    return replace(LocalPlan(), **values)


def _stamp(path: Path) -> object:
    """Returns what changes when the data does: times and sizes of the file, or of a folder's files."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    except OSError:
        return None
