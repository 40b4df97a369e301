"""Tasks that are ready to train: model, learner and shard stay in memory from one instruction to the next.

A shard is read again when its files changed, so that a folder the board collects into counts from the next
assignment on.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from edgefl.errors import DataError, EdgeflError, TaskError
from edgefl.tasks.cards import card_path, read_card
from edgefl.tasks.registry import make_task
from edgefl.tasks.splits import local_split
from edgefl.types import Dataset, Json, Learner, Shapes, Task

log = logging.getLogger(__name__)

KEPT_TASKS = 2
NAMED_BLOCKS = 10

T = TypeVar("T")
Blocks = Mapping[int, tuple[int, int]]


@dataclass(slots=True)
class WarmTask:
    """A task ready to train; `stamp` says which state of the shard's files `data` and `blocks` hold."""

    name: str
    task: Task
    shapes: Shapes
    learner: Learner
    stamp: object = None
    data: Dataset | None = None
    blocks: Blocks = field(default_factory=dict)
    splits: dict[float, tuple[Dataset, Dataset]] = field(default_factory=dict)


class WarmTasks:
    """The tasks of one board, made once per task and options.

    Args:
        shards: task -> path, asked again at every instruction.
        accelerator: cpu or cuda.
        threads: how many cores to use, None for all.
    """

    def __init__(self, shards: Callable[[], Mapping[str, str]], *, accelerator: str, threads: int | None) -> None:
        self._shards, self._accelerator, self._threads = shards, accelerator, threads
        self._warm: OrderedDict[str, WarmTask] = OrderedDict()
        self._faults: dict[str, str] = {}

    def of(self, header: Json) -> WarmTask:
        """Returns the task that an instruction names.

        Raises:
            EdgeflError: the board has no shard for it, or it cannot be made.
        """
        name, options = str(header["task"]), dict(header.get("options", {}))
        # Before anything is imported or called: only its owner says, by a shard, which tasks this board runs.
        self._path(name)
        key = f"{name} {sorted(options.items())}"
        if key not in self._warm:
            task = make_task(name, options)
            learner = task.learner(accelerator=self._accelerator, threads=self._threads)
            self._warm[key] = WarmTask(name=name, task=task, shapes=task.shapes(), learner=learner)
        self._warm.move_to_end(key)
        while len(self._warm) > KEPT_TASKS:
            self._warm.popitem(last=False)
        return self._warm[key]

    def check_held(self, name: str) -> None:
        """Checks that this board has a shard for a task, before anything is done with that name.

        Raises:
            TaskError: it has none.
        """
        self._path(name)

    def data(self, warm: WarmTask) -> Dataset:
        """Returns everything in the task's shard, as it is now."""
        path = self._path(warm.name)
        stamp = (path, _stamp(Path(path)))
        if warm.data is None or warm.stamp != stamp:
            warm.data, warm.blocks = warm.task.read(path), _blocks(path)
            warm.stamp, warm.splits = stamp, {}
        return warm.data

    def split(self, warm: WarmTask, test_fraction: float) -> tuple[Dataset, Dataset]:
        """Returns what a trainer trains on and what it tests on."""
        data = self.data(warm)
        if test_fraction not in warm.splits:
            warm.splits[test_fraction] = local_split(data, test_fraction)
        return warm.splits[test_fraction]

    def block(self, warm: WarmTask, block: int) -> Dataset:
        """Returns the rows of one block of a redundant shard, the same on every device that holds it.

        Raises:
            TaskError: this board does not hold it.
            DataError: the shard is shorter than its card says.
        """
        data = self.data(warm)
        if block not in warm.blocks:
            some = ", ".join(map(str, sorted(warm.blocks)[:NAMED_BLOCKS])) or "none"
            more = ", …" if len(warm.blocks) > NAMED_BLOCKS else ""
            raise TaskError(f"this device holds no block {block} of task {warm.name}; it holds {some}{more}")
        start, stop = warm.blocks[block]
        if not 0 <= start < stop <= len(data):
            raise DataError(
                f"block {block} of task {warm.name} is rows {start} to {stop} of a shard of {len(data)}; "
                "cut the shards again"
            )
        return Dataset(inputs=data.inputs[start:stop], labels=data.labels[start:stop])

    def stamps(self) -> object:
        """Returns a value that changes when any shard does."""
        return tuple((name, path, _stamp(Path(path))) for name, path in sorted(self._shards().items()))

    def examples(self) -> dict[str, int]:
        """Returns how many examples each shard holds now; a shard that cannot be read counts as absent."""
        self._faults = {}
        return {
            name: count for name, path in self._shards().items() for count in _read(name, path, _count, self._faults)
        }

    def faults(self) -> dict[str, str]:
        """Returns why shards could not be read when they were last counted, by task."""
        return dict(self._faults)

    def blocks(self) -> dict[str, list[int]]:
        """Returns the blocks of each redundant shard; other shards are left out."""
        found = {name: blocks for name, path in self._shards().items() for blocks in _read(name, path, _numbers)}
        return {name: blocks for name, blocks in found.items() if blocks}

    def _path(self, task: str) -> str:
        path = self._shards().get(task)
        if path is None:
            raise TaskError(f"this device has no shard for task {task!r}; edgefl device shard add")
        return path


def _read(name: str, path: str, what: Callable[[str, str], T], faults: dict[str, str] | None = None) -> Iterator[T]:
    """Gives what is asked of a shard, or nothing when the shard cannot be used."""
    try:
        yield what(name, path)
    except Exception as error:  # a loader of the user's own may raise anything, and the board must stay
        ours = isinstance(error, EdgeflError)
        log.warning("shard %s of task %s cannot be used: %s", path, name, error, exc_info=not ours)
        if faults is not None:
            faults[name] = str(error) if ours else f"{type(error).__name__}: {error}"


def _count(name: str, path: str) -> int:
    return len(make_task(name).read(path))


def _numbers(name: str, path: str) -> list[int]:  # noqa: ARG001 the card says all
    return sorted(_blocks(path))


def _blocks(path: str) -> Blocks:
    """Returns where the blocks of a redundant shard lie; a folder that grows has none."""
    place = Path(path)
    if not place.name or place.is_dir() or not card_path(place).is_file():
        return {}
    return read_card(place).blocks


def _stamp(path: Path) -> object:
    """Returns what changes when the data does, or who may read it: times and sizes of the file, or of a folder's."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return tuple((file.name, seen.st_ctime_ns, seen.st_size) for file in files if (seen := file.stat()))
    except OSError:
        return None
