"""Central data sets, for experiments that cut shards from one place, and the cutting of them into shard files."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.random import Generator

from edgefl.core.errors import (
    ConfigError,
    DataError,
    EdgeflError,
    MissingPackageError,
    TaskError,
    format_install_command,
)
from edgefl.core.named_arrays import format_rows
from edgefl.core.types import Array, Dataset, Scalar, Task, derive_rng
from edgefl.tasks.datasets.array_files import read_image_set
from edgefl.tasks.datasets.cifar import TRAIN_BATCHES, read_test_batch, read_train_batches
from edgefl.tasks.datasets.partitioning import (
    Partitioning,
    PartitionScheme,
    compute_strata,
    parse_scheme,
    partition_rows,
)
from edgefl.tasks.datasets.shards import (
    ShardMetadata,
    drop_weak,
    is_of_classes,
    load_task_data,
    split_train_test,
    write_shard,
)
from edgefl.tasks.losses.class_losses import CrossEntropy
from edgefl.tasks.losses.multi_task import MultiTask
from edgefl.tasks.losses.registry import find_loss
from edgefl.tasks.motionsense import FILE_NAME, read_motion_windows
from edgefl.tasks.noop import make_noop_data
from edgefl.tasks.registry import BUILT_IN, CONFIGURED, find_split_period_s, make_task

log = logging.getLogger(__name__)

DATA_ENV_VARIABLE = "EDGEFL_DATA"
DIGITS_TEST_FRACTION = OWN_TEST_FRACTION = 0.2

TEST_NAME = "test.npz"


@dataclass(frozen=True, slots=True, kw_only=True)
class CentralData:
    """A central data set: training data, the coordinator's test data, and the origin of each row.

    Schemes go by `strata` where targets are no classes.
    """

    train: Dataset
    test: Dataset
    source: str
    groups: Array | None = None
    strata: Array | None = None

    @property
    def classes(self) -> Array:
        """[n] whole numbers that schemes go by."""
        return self.train.targets if self.strata is None else self.strata

    def cut(self, scheme: PartitionScheme, num_devices: int, rng: Generator) -> Partitioning:
        """Returns the rows of each device's shard.

        Raises:
            ConfigError: the scheme cannot serve that many devices, or goes by labels that examples do not have.
            DataError: the scheme is natural, and the data does not name the people of its rows.
        """
        unlabelled = self.train.find_unlabelled()
        if unlabelled is not None and scheme.uses_labels:
            raise ConfigError(
                f"scheme {scheme.name} goes by labels, which {unlabelled.sum()} of {len(self.train)} examples do not "
                "have; cut by iid or contiguous, or leave out task.unlabelled"
            )
        return partition_rows(scheme, labels=self.classes, num_devices=num_devices, rng=rng, groups=self.groups)


def load_central_data(
    task: str,
    folder: Path | None = None,
    options: Mapping[str, Scalar] | None = None,
    test: Path | None = None,
) -> CentralData:
    """Returns the data set of a built-in task, or what a task of one's own reads.

    Args:
        task: its name.
        folder: of the files; None means the folder of the task's name in `$EDGEFL_DATA`. A task of one's own needs
            it: the path that its `read` takes.
        options: of the task.
        test: path of the test data of a task of one's own, or of a configured one; None for a part of the data.

    Raises:
        ConfigError: there is test data for a task that has its own.
        DataError: the files are not there or not the right ones.
        TaskError: there is no such task, or it has no central data set and no folder is given.
    """
    readers: dict[str, Callable[[], CentralData]] = {
        "digits": _load_digits,
        "mnist": lambda: _load_images(task, find_data_folder(task, folder)),
        "fashion-mnist": lambda: _load_images(task, find_data_folder(task, folder)),
        "cifar-10": lambda: _load_cifar(find_data_folder(task, folder)),
        "motionsense": lambda: _load_motionsense(find_data_folder(task, folder)),
        "noop": _make_noop,
    }
    if task in readers and test is not None:
        raise ConfigError(f"task {task!r} has test data of its own, got {test}; leave it out")
    if task in readers:
        return readers[task]()
    if folder is None:
        raise TaskError(
            f"task {task!r} has no data set to cut; cut one of {', '.join(readers)}, name the path that your task "
            "reads (--data PATH), or bring shards: edgefl simulate FILE --shards DIR, with one file or folder per "
            "device in DIR"
        )
    return _read_own_data(make_task(task, options), folder, test)


def read_own_data(task: Task, path: Path) -> Dataset:
    """Returns a task's data at a path, whatever its own reader raises.

    Raises:
        DataError: it cannot be read, or is none for the task's loss.
    """
    try:
        return load_task_data(task, path)
    except EdgeflError:
        raise
    except Exception as error:  # what a task of one's own raises at data that it does not know
        log.debug("task %s cannot read %s", task.name, path, exc_info=True)
        raise DataError(
            f"task {task.name} cannot read shard {path}: {type(error).__name__}: {error} (-vv shows where); each "
            "path is one device's data"
        ) from error


def read_test_data(task: Task, path: Path, train: Dataset) -> Dataset:
    """Returns test data for a model of training data.

    Raises:
        DataError: it cannot be read, has no example, or others than those that are trained on.
    """
    test = drop_weak(read_own_data(task, path))
    if not len(test):
        raise DataError(f"test data {path} of task {task.name} holds no examples")
    for what, ours, theirs in (("inputs", train.inputs, test.inputs), ("targets", train.targets, test.targets)):
        if format_rows(ours) != format_rows(theirs):
            raise DataError(
                f"{what} of test data {path} are {format_rows(theirs)} each, those that are trained on are "
                f"{format_rows(ours)}"
            )
    return test


def _read_own_data(task: Task, path: Path, test_path: Path | None) -> CentralData:
    data = read_own_data(task, path)
    if test_path is None:
        period_s = find_split_period_s(task)
        train, test = split_train_test(data, OWN_TEST_FRACTION, salt="central", period_s=period_s)
    else:
        train, test = data, read_test_data(task, test_path, data)
    strata = None if is_of_classes(task, train) else _find_strata(task, train.targets)
    return CentralData(train=train, test=test, source=path.name, groups=train.groups, strata=strata)


def _find_strata(task: Task, targets: Array) -> Array:
    """Returns [n] numbers that schemes go by, of several targets those of the first loss."""
    loss = find_loss(task)
    if not isinstance(loss, MultiTask):
        return compute_strata(targets)
    first, own = loss.heads[0], targets[loss.heads[0].name]
    return own if isinstance(first.loss, CrossEntropy) else compute_strata(own)


def find_data_folder(task: str, folder: Path | None) -> Path:
    """Returns the data folder, the given one or the task's in `$EDGEFL_DATA`.

    Raises:
        DataError: it does not exist, or none is set.
    """
    root = os.environ.get(DATA_ENV_VARIABLE)
    if folder is None and not root:
        raise DataError(
            f"task {task} needs data: name the folder with --data DIR, or its parent with {DATA_ENV_VARIABLE}"
        )
    data_folder = folder if folder is not None else Path(root or "") / task
    if not data_folder.is_dir():
        raise DataError(f"data folder {data_folder} of task {task} does not exist")
    return data_folder


def _load_digits() -> CentralData:
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415 only experiments need scikit-learn, devices do not
    except ImportError:
        raise MissingPackageError(
            f"the digits come with scikit-learn; install it with: {format_install_command('sklearn')}"
        ) from None
    raw = load_digits()
    dataset = Dataset(inputs=raw.images.astype(np.uint8), targets=raw.target.astype(np.int64))
    train, test = split_train_test(dataset, DIGITS_TEST_FRACTION, salt="digits")
    return CentralData(train=train, test=test, source="scikit-learn load_digits")


def _load_images(task: str, folder: Path) -> CentralData:
    return CentralData(
        train=read_image_set(folder, task, "train"),
        test=read_image_set(folder, task, "t10k"),
        source=f"{task} IDX files",
    )


def _load_cifar(folder: Path) -> CentralData:
    train, num_batches = read_train_batches(folder)
    source = f"CIFAR-10, {num_batches} of {len(TRAIN_BATCHES)} training batches"
    return CentralData(train=train, test=read_test_batch(folder), source=source)


def _load_motionsense(folder: Path) -> CentralData:
    train, test, subjects = read_motion_windows(folder / FILE_NAME)
    return CentralData(train=train, test=test, source="MotionSense, test = trials 11-16", groups=subjects)


def _make_noop() -> CentralData:
    return CentralData(train=make_noop_data(), test=make_noop_data(), source="nothing")


def create_shards(  # noqa: PLR0913 the last three have defaults
    task_name: str,
    scheme: str,
    num_devices: int,
    out: Path,
    data: Path | None = None,
    seed: int = 7,
    *,
    options: Mapping[str, Scalar] | None = None,
    test: Path | None = None,
) -> list[Path]:
    """Writes `device-01.npz` and so on and `test.npz`, each with its card, and returns the devices' paths.

    Args:
        task_name: a built-in task, or one of one's own.
        scheme: one of `partitioning.SCHEMES`, as typed.
        num_devices: number of shards.
        out: folder to write into, created if missing.
        data: as `folder` of `load_central_data`.
        seed: equal seeds give equal shards.
        options: of the task.
        test: as of `load_central_data`.

    Raises:
        ConfigError: the scheme is unknown or cannot serve that many devices.
        DataError: the data set is missing or damaged, or `out` cannot be written.
        TaskError: the task has no central data set.
    """
    central, sharding = plan_shards(task_name, scheme, num_devices, data, seed, options=options, test=test)
    task = make_task(task_name, options)
    card = ShardMetadata(
        task=task_name,
        scheme=scheme,
        source=central.source,
        labels=tuple(getattr(task, "labels", ())),
        is_dataset=task_name not in BUILT_IN or task_name in CONFIGURED,
        options=getattr(task, "shard_options", {}),
    )
    write_shard(out / TEST_NAME, central.test, replace(card, scheme="test"))
    return [_write_device_shard(out, device, sharding, central, card) for device in range(num_devices)]


def plan_shards(  # noqa: PLR0913 those of `create_shards`
    task_name: str,
    scheme: str,
    num_devices: int,
    data: Path | None = None,
    seed: int = 7,
    *,
    options: Mapping[str, Scalar] | None = None,
    test: Path | None = None,
) -> tuple[CentralData, Partitioning]:
    """Returns the shards of `create_shards`, and raises its errors of scheme and data; writes nothing."""
    parsed = parse_scheme(scheme)
    central = load_central_data(task_name, data, options, test)
    rng = derive_rng(seed, "shards", task_name, scheme)
    return central, central.cut(parsed, num_devices, rng)


def _write_device_shard(
    out: Path, device: int, partitioning: Partitioning, central: CentralData, metadata: ShardMetadata
) -> Path:
    rows = partitioning.rows[device]
    groups = () if central.groups is None else tuple(map(str, np.unique(central.groups[rows])))
    blocks = partitioning.blocks[device] if partitioning.blocks else {}
    width = max(2, len(str(len(partitioning.rows))))
    path = out / f"device-{device + 1:0{width}}.npz"
    write_shard(path, central.train.take(rows), replace(metadata, groups=groups, blocks=blocks))
    return path
