"""Task cache: model, learner and shard stay in memory between instructions.

A shard is read again when its files changed, so that newly collected data counts from the next assignment on.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edgefl.core.analyses import DEFAULT_MIN_GROUP
from edgefl.core.errors import DataError, EdgeflError, TaskError
from edgefl.core.metrics import NO_METRICS, MetricSet
from edgefl.core.types import Dataset, Json, Learner, ModelSpec, Scalar, Task
from edgefl.device.drift_watch import DriftWatch, TaskModel
from edgefl.device.hardware.health import read_available_memory_bytes
from edgefl.device.hardware.requirements import should_run_graphs
from edgefl.device.rollouts.bases import BaseFiles
from edgefl.system.row_labels import LABELS_NAME
from edgefl.tasks.adaptation.adapted_learner import AdaptedLearner, FeatureDataset
from edgefl.tasks.adaptation.adapted_task import AdaptedTask
from edgefl.tasks.adaptation.base_file import AdaptPlan, load_base
from edgefl.tasks.analyses.analysis import Analysis
from edgefl.tasks.analyses.registry import check_min_group, make_analysis
from edgefl.tasks.augmentation import find_augment
from edgefl.tasks.compiled.plan import CompiledPlan
from edgefl.tasks.datasets.shards import (
    compute_root_fraction,
    drop_weak,
    get_metadata_path,
    inspect_shard,
    load_task_data,
    read_metadata,
    split_train_test,
)
from edgefl.tasks.learners.torch_split import cut_front
from edgefl.tasks.metrics.evaluation import make_task_metrics
from edgefl.tasks.noop import NoopLearner
from edgefl.tasks.preparation import check_inputs
from edgefl.tasks.registry import find_split_period_s, make_task
from edgefl.tasks.stored_arrays import select_rows

log = logging.getLogger(__name__)

MAX_TASKS = 2
MAX_VERSION_FILES = 200_000
MAX_LISTED_BLOCKS = 10
PROVIDERS_FILE = "providers.json"
"""In the device's state directory."""
MAX_ARENA_BYTES = 2 * 1024**3
"""Of a compiled task's tensors, where the machine does not say what is free."""

BlockRanges = Mapping[int, tuple[int, int]]
AnalysisRequest = tuple[str, Mapping[str, Scalar]]
"""Name and options of an analysis."""


@dataclass(slots=True)
class CachedTask:
    """Task ready to train or to analyse.

    Attributes:
        shard_fingerprint: of the shard's files that `data`, `splits` and `blocks` come from.
        data: all of the shard; None once its rows are in a split, where they would lie twice.
        splits: training and test data, by the test fraction and whether it is of examples whatever the task says.
        num_examples: of the shard; None before it was read.
        num_certain: those whose targets are no guesses.
        has_model: whether the learner has held a model of a run, and not only its first zeros.
    """

    name: str
    task: Task
    model_spec: ModelSpec
    learner: Learner
    metrics: MetricSet
    shard_fingerprint: object = None
    shard_version: int | None = None
    data: Dataset | None = None
    num_examples: int | None = None
    num_certain: int = 0
    blocks: BlockRanges = field(default_factory=dict)
    splits: dict[tuple[float, bool], tuple[Dataset, Dataset]] = field(default_factory=dict)
    analysis: Analysis | None = None
    options: Mapping[str, Scalar] = field(default_factory=dict)
    has_model: bool = False


class TaskCache:
    """Cache of a board's tasks, by task and options.

    Args:
        shards: task -> path, read at every instruction.
        accelerator: cpu or cuda.
        threads: how many cores to use, None for all.
        bases: files of what is trained on; None where there are none.
        get_min_group: returns the least number of examples that an analysis may be about.
        drift: watches the data; None where nothing does.
        providers_file: remembers by which provider of onnxruntime a compiled task trains; None: by the CPU's.
        should_stop: ends a trial of such a provider.
    """

    def __init__(  # noqa: PLR0913 all but one by name
        self,
        shards: Callable[[], Mapping[str, str]],
        *,
        accelerator: str,
        threads: int | None,
        bases: BaseFiles | None = None,
        get_min_group: Callable[[], int] = lambda: DEFAULT_MIN_GROUP,
        drift: DriftWatch | None = None,
        providers_file: Path | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._bases, self._providers_file, self._should_stop = bases, providers_file, should_stop
        self._shards, self._accelerator, self._threads = shards, accelerator, threads
        self._get_min_group, self._drift = get_min_group, drift
        self._cached: OrderedDict[str, CachedTask] = OrderedDict()
        self._shard_errors: dict[str, str] = {}

    def get(
        self,
        name: str,
        options: Mapping[str, Scalar],
        *,
        after: str | None = None,
        analysis: AnalysisRequest | None = None,
        adapt: AdaptPlan | None = None,
        compiled: CompiledPlan | None = None,
    ) -> CachedTask:
        """Returns a task with these options.

        Args:
            name: of the task.
            options: of the task.
            after: a module: only the layers up to it, and their tensors.
            analysis: what is to be summed over its examples; the tensors are then those of the request.
            adapt: what is trained; its base is fetched unless it is here.
            compiled: the file by which it trains without torch; likewise, unless this board trains with torch.

        Raises:
            EdgeflError: the board has no shard for it, or it cannot be created.
        """
        # Before anything is imported or called: only tasks with a shard, set by the owner, may run on this board.
        self.get_shard_path(name)
        key = f"{name} {sorted(options.items())} {after or ''} {adapt or ''} {compiled or ''}"
        if analysis is not None:
            check_min_group(analysis[1], self._get_min_group())
            key += f" {analysis[0]} {sorted(analysis[1].items())}"
        if key not in self._cached:
            task = make_task(name, options)
            if compiled is not None and should_run_graphs(compiled):
                task = self._make_graph_task(task, compiled, name, options)
            if adapt is not None:
                task = self._adapt_task(task, adapt)
            self._cached[key] = (
                self._create_trainable(name, task, after)
                if analysis is None
                else _create_analysed(name, task, analysis)
            )
            self._cached[key].options = dict(options)
        self._cached.move_to_end(key)
        while len(self._cached) > MAX_TASKS:
            self._cached.popitem(last=False)
        return self._cached[key]

    def _create_trainable(self, name: str, task: Task, after: str | None) -> CachedTask:
        learner = task.learner(accelerator=self._accelerator, threads=self._threads)
        model_spec = task.shapes()
        if after is not None:
            learner = cut_front(learner, after, threads=self._threads)
            names = learner.read()
            model_spec = tuple(spec for spec in model_spec if spec.name in names)
        return CachedTask(
            name=name, task=task, model_spec=model_spec, learner=learner, metrics=make_task_metrics(task)
        )

    def _make_graph_task(self, task: Task, plan: CompiledPlan, name: str, options: Mapping[str, Scalar]) -> Task:
        from edgefl.device.hardware.providers import ProviderChoice  # noqa: PLC0415 only for compiled tasks
        from edgefl.tasks.compiled.board.graph_task import load_graph_task  # noqa: PLC0415 likewise
        from edgefl.tasks.compiled.board.onnx_learner import open_cpu  # noqa: PLC0415 likewise

        if self._bases is None:
            raise TaskError(f"task {task.name} trains by a compiled file, and this process has no folder for it")
        path = self._bases.fetch(plan)
        limit = read_available_memory_bytes() or MAX_ARENA_BYTES
        choice = self._providers_file and ProviderChoice(
            path,
            self._providers_file,
            accelerator=self._accelerator,
            threads=self._threads,
            should_stop=self._should_stop,
        )
        open_provider = choice.open if choice else open_cpu
        return load_graph_task(
            task, path, name=name, options=options, max_arena_bytes=limit, open_provider=open_provider
        )

    def _adapt_task(self, task: Task, plan: AdaptPlan) -> Task:
        if self._bases is None:
            raise TaskError(f"task {task.name} trains a part of its model, and this process has no bases")
        names = AdaptedTask(task, plan.section).parts.base_names  # before anything is fetched
        if find_augment(task) is not None:
            log.info(
                "task %s augments its examples: each batch goes through the base, no features are kept", task.name
            )
        return AdaptedTask(task, plan.section, load_base(self._bases.fetch(plan), names))

    def load_data(self, cached_task: CachedTask) -> Dataset:
        """Returns all data in the task's shard, up to date."""
        self._forget_outdated(cached_task)
        if cached_task.data is None:
            path = self.get_shard_path(cached_task.name)
            cached_task.shard_version = compute_shard_version(Path(path))  # before the files are read
            data = load_task_data(cached_task.task, path)
            check_inputs(cached_task.learner, data.inputs)
            cached_task.data, cached_task.blocks = data, _read_block_ranges(path)
            cached_task.num_examples = len(data)
            cached_task.num_certain = len(data) - (0 if data.weak is None else int(data.weak.sum()))
        self._record_reference(cached_task)
        return cached_task.data

    def load_split(
        self, cached_task: CachedTask, test_fraction: float, *, is_by_example: bool = False
    ) -> tuple[Dataset, Dataset]:
        """Returns a trainer's training and test data, up to date, split as the task says or by example."""
        self._forget_outdated(cached_task)
        key = test_fraction, is_by_example
        if key in cached_task.splits:
            self._record_reference(cached_task)
        else:
            period_s = None if is_by_example else find_split_period_s(cached_task.task)
            cached_task.splits[key] = split_train_test(self.load_data(cached_task), test_fraction, period_s=period_s)
        if not cached_task.blocks:
            cached_task.data = None
        return cached_task.splits[key]

    def check_data(self, cached_task: CachedTask) -> None:
        """Raises the errors of `load_data`; reads nothing that is in memory already."""
        self._forget_outdated(cached_task)
        if not cached_task.splits:
            self.load_data(cached_task)

    def get_examples(self, cached_task: CachedTask) -> Dataset:
        """Returns examples that are in memory, to see their form; call it after `check_data`."""
        if cached_task.data is not None:
            return cached_task.data
        return next(iter(cached_task.splits.values()))[0]

    def load_root_split(self, cached_task: CachedTask, num_root: int) -> tuple[Dataset, Dataset]:
        """Returns an evaluator's data to test on, and about `num_root` examples to train on, up to date.

        They are drawn by example, whatever the task: so few may have no whole period.
        """
        self.check_data(cached_task)  # it counts the examples
        fraction = compute_root_fraction(cached_task.num_certain, num_root)
        rest, root = self.load_split(cached_task, fraction, is_by_example=True)
        return drop_weak(rest), root

    def _forget_outdated(self, cached_task: CachedTask) -> None:
        path = self.get_shard_path(cached_task.name)
        fingerprint = (path, _compute_fingerprint(Path(path)))
        if cached_task.shard_fingerprint != fingerprint:
            cached_task.data, cached_task.splits, cached_task.shard_fingerprint = None, {}, fingerprint

    def _record_reference(self, cached_task: CachedTask) -> None:
        def load() -> Dataset:
            if cached_task.data is not None:
                return cached_task.data
            return load_task_data(cached_task.task, self.get_shard_path(cached_task.name))

        if self._drift is not None:
            self._drift.record_reference(
                cached_task.task, cached_task.name, cached_task.options, cached_task.num_examples or 0, load
            )

    def load_training(
        self, cached_task: CachedTask, test_fraction: float, on_batch: Callable[[], None] = lambda: None
    ) -> Dataset:
        """Returns a trainer's training data, as features of a frozen base where there is one.

        They stay in memory as long as the base and the shard are the same, so that an epoch of a head does not go
        through the base; a task that augments its examples has others in every epoch. `on_batch` is called while
        they are computed.
        """
        training, test = self.load_split(cached_task, test_fraction)
        if not isinstance(cached_task.learner, AdaptedLearner) or isinstance(training, FeatureDataset):
            return training
        if find_augment(cached_task.task) is not None:
            return training
        features = cached_task.learner.make_features(training, on_batch)
        cached_task.splits[test_fraction, False] = features, test
        return features

    def load_block(self, cached_task: CachedTask, block: int) -> Dataset:
        """Returns the rows of one block of a redundant shard, the same on every device that holds it.

        Raises:
            TaskError: this board does not have it.
            DataError: the shard is shorter than its metadata declares.
        """
        data = self.load_data(cached_task)
        if block not in cached_task.blocks:
            listed = ", ".join(map(str, sorted(cached_task.blocks)[:MAX_LISTED_BLOCKS])) or "none"
            suffix = ", …" if len(cached_task.blocks) > MAX_LISTED_BLOCKS else ""
            raise TaskError(
                f"this device holds no block {block} of task {cached_task.name}; it holds {listed}{suffix}"
            )
        start, stop = cached_task.blocks[block]
        if not 0 <= start < stop <= len(data):
            raise DataError(
                f"block {block} of task {cached_task.name} is rows {start} to {stop} of a shard of {len(data)}; "
                "cut the shards again"
            )
        return select_rows(data, slice(start, stop))

    def compute_fingerprint(self, task: str | None = None) -> object:
        """Returns a value that changes when any shard does, or that of one task."""
        shards = sorted((name, path) for name, path in self._shards().items() if task in {None, name})
        return tuple((name, path, _compute_fingerprint(Path(path))) for name, path in shards)

    def count_examples(self, *, without: Collection[str] = ()) -> dict[str, int]:
        """Returns the example count of each readable shard, but for the tasks in `without`."""
        counts: dict[str, int] = {}
        self._shard_errors = {}
        for name, path in self._shards().items():
            if name in without:
                continue
            with _tolerate_errors(name, path, self._shard_errors):
                counts[name] = inspect_shard(name, path).num_examples
        return counts

    def measure_drift(
        self,
        *,
        without: Collection[str] = (),
        training_lock: threading.Lock | None = None,
        has_features: bool = True,
    ) -> Json:
        """Returns how far the data has moved, by task, as `DriftWatch.measure`.

        Features are those of the model that a task's learner holds, unless that is at work.

        Args:
            without: tasks to leave out.
            training_lock: held by who works with a learner; taken while a model is read, and at no other time.
            has_features: whether features are compared.
        """
        if self._drift is None:
            return {}

        def find_model(name: str, options: Mapping[str, Scalar]) -> TaskModel | None:
            if training_lock is None:
                return self._find_model(name, options)
            if not training_lock.acquire(blocking=False):
                return None
            try:
                return self._find_model(name, options)
            finally:
                training_lock.release()

        return self._drift.measure(self._shards(), without=without, find_model=find_model if has_features else None)

    def _find_model(self, name: str, options: Mapping[str, Scalar]) -> TaskModel | None:
        """Returns the task and the whole model with which this board worked last; None where it did not."""
        for cached_task in reversed(self._cached.values()):
            if cached_task.name == name and cached_task.options == options and cached_task.has_model:
                task, model = cached_task.task, cached_task.learner.read()
                return (task.inner, task.merge(model)) if isinstance(task, AdaptedTask) else (task, model)
        return None

    def get_shard_errors(self) -> dict[str, str]:
        """Returns the read errors of the last count, by task."""
        return dict(self._shard_errors)

    def list_blocks(self) -> dict[str, list[int]]:
        """Returns the blocks of each redundant shard; others are omitted."""
        blocks: dict[str, list[int]] = {}
        for name, path in self._shards().items():
            with _tolerate_errors(name, path, {}):
                blocks[name] = sorted(_read_block_ranges(path))
        return {name: numbers for name, numbers in blocks.items() if numbers}

    def get_shard_path(self, task: str) -> str:
        """Returns the path of a task's shard; call before any use of that name.

        Raises:
            TaskError: this board has none.
        """
        path = self._shards().get(task)
        if path is None:
            raise TaskError(f"this device has no shard for task {task!r}; edgefl device shard add")
        return path


def _create_analysed(name: str, task: Task, request: AnalysisRequest) -> CachedTask:
    analysis = make_analysis(task, *request)
    return CachedTask(
        name=name,
        task=task,
        model_spec=analysis.request_spec,
        learner=NoopLearner(()),  # an analysis needs no network, nor torch
        metrics=NO_METRICS,
        analysis=analysis,
    )


@contextlib.contextmanager
def _tolerate_errors(name: str, path: str, errors: dict[str, str]) -> Iterator[None]:
    """Logs why a shard is unusable, and adds it to `errors`, by task."""
    try:
        yield
    except Exception as error:  # a custom loader may raise anything, and the board must survive
        is_known = isinstance(error, EdgeflError)
        log.warning("shard %s of task %s cannot be used: %s", path, name, error, exc_info=not is_known)
        errors[name] = str(error) if is_known else f"{type(error).__name__}: {error}"


def _read_block_ranges(path: str) -> BlockRanges:
    """Returns the row ranges of a redundant shard's blocks; none for a folder."""
    location = Path(path)
    if not location.name or location.is_dir() or not get_metadata_path(location).is_file():
        return {}
    return read_metadata(location).blocks


def compute_shard_version(path: Path) -> int | None:
    """Returns 48 bits of a hash of the names, sizes and times of a shard's files; None where they cannot be read.

    It is not of their content, which it would let others guess at. What a collector notes beside rows does not count,
    nor does what is deeper than class folders, or behind `MAX_VERSION_FILES`.
    """
    if not path.exists():
        return None
    digest = hashlib.sha256()
    try:
        for name, file in itertools.islice(_iterate_files(path), MAX_VERSION_FILES):
            with contextlib.suppress(FileNotFoundError):  # a collector removes its oldest
                status = file.stat()
                digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="replace"))
    except OSError:
        return None
    return int.from_bytes(digest.digest()[:6], "big")


def _iterate_files(path: Path) -> Iterator[tuple[str, Path]]:
    """Yields names and paths of a shard's files, and of those in its class folders."""
    if not path.is_dir():
        yield path.name, path
        return
    for file in sorted(path.iterdir()):
        if file.name.startswith(".") and file.name != LABELS_NAME:
            continue
        yield file.name, file
        if file.is_dir():
            yield from ((f"{file.name}/{one.name}", one) for one in sorted(file.iterdir()) if one.name[0] != ".")


def _compute_fingerprint(path: Path) -> object:
    """Returns a fingerprint of data and permissions: times and sizes of the file, or of a folder's files."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return tuple((file.name, status.st_ctime_ns, status.st_size) for file in files if (status := file.stat()))
    except OSError:
        return None
