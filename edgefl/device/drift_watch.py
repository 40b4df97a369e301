"""Drift of a board's data: its newest examples against those of its first training, or of a file of its owner's.

Off unless the owner names a task. A reference is a bounded sample of examples in the state directory, made when the
task's data is first loaded for work. It is compared with a sample of the same size whenever the shard has changed.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edgefl.core.analyses import DEFAULT_MIN_GROUP
from edgefl.core.errors import DataError, EdgeflError
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Dataset, Json, Scalar, Task, Tensors, derive_rng
from edgefl.system.atomic_files import write_atomic
from edgefl.tasks.datasets.array_files import read_npz
from edgefl.tasks.datasets.shards import compute_sample_hashes, load_task_data
from edgefl.tasks.registry import make_task

log = logging.getLogger(__name__)

FIRST = "first"
"""A reference: the data with which the board first worked."""
FOLDER = "drift"
MIN_EXAMPLES = 100
"""Of fewer examples chance alone makes a large index."""
MAX_SAMPLES = 2000
MAX_SAMPLE_BYTES = 8 * 1024**2
MAX_JOINT_EXAMPLES, MAX_JOINT_NUMBERS = 250, 250_000
"""Of each side that are compared at once: a quarter of the memory that `edgefl data drift` takes."""
FORMAT_VERSION = 1
TaskModel = tuple[Task, Tensors]
"""A task, and all tensors of a model of it."""
FindModel = Callable[[str, Mapping[str, Scalar]], TaskModel | None]
"""Returns the model of a task with these options by which features are computed; None while there is none."""
UNLABELLED = "unlabelled"
"""Name of the array that says which examples have no label; left out where all have one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftReference:
    """What newer data is compared with.

    Attributes:
        source: `FIRST` or a path, as the owner said.
        options: of the task, with which the data is read.
        num_examples: of the shard at that time.
        sample: some of its examples, or of those of the path.
    """

    source: str
    options: Mapping[str, Scalar]
    num_examples: int
    sample: Dataset


class DriftWatch:
    """References of a board's tasks, and the drift from them.

    Args:
        folder: of the references; made when there is one.
        get_references: returns by task `FIRST`, or the path of the owner's reference; without it a task is left out.
        get_min_group: returns the least number of examples that anything is said of.
    """

    def __init__(
        self,
        folder: Path,
        get_references: Callable[[], Mapping[str, str]],
        get_min_group: Callable[[], int] = lambda: DEFAULT_MIN_GROUP,
    ) -> None:
        self._folder, self._get_references, self._get_min_group = folder, get_references, get_min_group
        self._made: dict[str, str] = {}
        self._failed: dict[str, str] = {}

    def record_reference(
        self,
        task: Task,
        name: str,
        options: Mapping[str, Scalar],
        num_examples: int,
        load_data: Callable[[], Dataset],
    ) -> None:
        """Makes the reference of a task by its name, from its data, unless there is one or none is wanted.

        `num_examples` is that of the shard as it is now; `load_data` is called where the reference is made of it.
        """
        source = self._get_references().get(name)
        path = get_reference_path(self._folder, name)
        if source is None or self._failed.get(name) == source or (self._made.get(name) == source and path.exists()):
            return
        self._made[name] = source
        found = self._load(name)
        if found is not None and found.source == source:
            return
        try:
            of_reference = load_data() if source == FIRST else load_task_data(task, source)
            reference = DriftReference(
                source=source, options=options, num_examples=num_examples, sample=_draw_sample(of_reference, name)
            )
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # a confined process changes no modes
            write_atomic(path, encode_reference(reference))
        except (EdgeflError, OSError) as error:
            self._failed[name] = source  # a path that cannot be read must not be read at each assignment
            log.warning("no reference for the drift of task %s: %s", name, error)

    def measure(
        self,
        shards: Mapping[str, str],
        *,
        without: Collection[str] = (),
        find_model: FindModel | None = None,
    ) -> Json:
        """Returns by task the largest drift of a column, that of all at once, and that of a model's features.

        It leaves out tasks that have no reference or too few newer examples.

        Newer are the examples behind those that the shard had at first, or all where it has no more than then.

        Args:
            shards: task -> path.
            without: tasks to leave out.
            find_model: finds what features are computed by; None where none may be told. While it finds nothing,
                such as after a restart, the features of before are told again if the samples are the same.
        """
        drifts: Json = {}
        for name, source in self._get_references().items():
            reference = self._load(name) if name in shards and name not in without else None
            if reference is None or reference.source != source:
                continue
            try:
                task = make_task(name, reference.options)
                drift = self._compare(task, name, reference, load_task_data(task, shards[name]), find_model)
            except Exception as error:  # a custom loader may raise anything, and the board must survive
                is_known = isinstance(error, EdgeflError)
                log.warning("the drift of task %s is unknown: %s", name, error, exc_info=not is_known)
                continue
            drifts |= {} if drift is None else {name: drift}
        return drifts

    def _compare(
        self,
        task: Task,
        name: str,
        reference: DriftReference,
        data: Dataset,
        find_model: FindModel | None,
    ) -> Json | None:
        from edgefl.tasks.datasets import drift  # noqa: PLC0415 boards without it need not have it loaded

        first_row = reference.num_examples if len(data) > reference.num_examples else 0
        least = max(MIN_EXAMPLES, self._get_min_group())
        if len(data) - first_row < least:
            return None
        newer = _draw_sample(data, name, first_row)
        largest = drift.measure_drift(task, reference.sample, newer, min_labelled=least)[0]
        joint = drift.measure_joint_drift(
            task, reference.sample, newer, max_examples=MAX_JOINT_EXAMPLES, max_numbers=MAX_JOINT_NUMBERS
        )
        return {
            "column": largest.name,
            "psi": round(largest.psi, 4),
            "ks": _round(largest.ks),
            "mmd": _round(joint.mmd),
            "p_value": _round(joint.p_value),
            **({} if find_model is None else self._compare_features(name, reference, newer, find_model)),
            "num_reference": reference.num_examples,
            "num_newer": len(data) - first_row,
        }

    def _compare_features(self, name: str, reference: DriftReference, newer: Dataset, find_model: FindModel) -> Json:
        """Returns the drift of what the last layer of a model gets; nothing where that cannot be computed."""
        from edgefl.tasks.datasets.drift import measure_feature_drift  # noqa: PLC0415 as above

        path, samples = get_features_path(self._folder, name), _hash_samples(reference, newer)
        if (model := find_model(name, reference.options)) is None:
            return _read_features(path, samples)
        try:
            found = measure_feature_drift(
                *model, reference.sample, newer, max_examples=MAX_JOINT_EXAMPLES, max_numbers=MAX_JOINT_NUMBERS
            )
        except Exception as error:  # noqa: BLE001 a custom network may raise anything; the columns are compared all the same
            log.info("the features of task %s are not compared: %s", name, error)
            return {}
        if found.mmd is None:
            return {}
        features = {"feature_mmd": _round(found.mmd), "feature_p_value": _round(found.p_value)}
        try:
            write_atomic(path, json.dumps({"v": FORMAT_VERSION, "samples": samples, **features}).encode())
        except EdgeflError as error:
            log.warning("the drift of the features of task %s is lost at a restart: %s", name, error)
        return features

    def _load(self, name: str) -> DriftReference | None:
        """Returns a reference; None where there is none or it is damaged, so that the next work makes it anew."""
        path = get_reference_path(self._folder, name)
        try:
            return read_reference(path)
        except FileNotFoundError:
            return None
        except DataError as error:
            log.warning("%s is left out: %s", path, error)
            return None


def get_reference_path(folder: Path, name: str) -> Path:
    """Returns where the reference of a task lies; its name may hold any character."""
    return folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.npz"


def get_features_path(folder: Path, name: str) -> Path:
    """Returns where the drift of a task's features lies, so that it is told again after a restart."""
    return get_reference_path(folder, name).with_suffix(".json")


def _hash_samples(reference: DriftReference, newer: Dataset) -> str:
    """Returns a hash of what is compared: both samples, and the options with which they were read."""
    digest = hashlib.sha256(json.dumps(dict(reference.options), sort_keys=True).encode())
    for side in (reference.sample, newer):
        hashes = compute_sample_hashes(side.inputs)
        digest.update(b"%d:%s" % (len(hashes), hashes.tobytes()))
    return digest.hexdigest()


def _read_features(path: Path, samples: str) -> Json:
    """Returns the drift of features that was told of these samples before; nothing where there is none."""
    try:
        kept = parse_json(path.read_bytes())
        features = {name: kept[name] for name in ("feature_mmd", "feature_p_value")}
        is_right = kept["v"] == FORMAT_VERSION and all(isinstance(value, float) for value in features.values())
        return features if is_right and kept["samples"] == samples else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def list_reference_paths(root: Path, name: str) -> list[Path]:
    """Returns where references of a task lie in a state directory: the agent's, and that of a confined process."""
    path = get_reference_path(root / FOLDER, name)
    return [path, *root.glob(f"*/*/{FOLDER}/{path.name}")]


def read_reference(path: Path) -> DriftReference:
    """Returns a reference in a file.

    Raises:
        DataError: it is damaged, or cannot be read.
        FileNotFoundError: there is none.
    """
    try:
        with path.open("rb") as file:
            arrays = read_npz(file, ("about", "inputs", "targets"), optional=(UNLABELLED,))
        about = parse_json(arrays["about"].tobytes())
        source, options, num_examples = about["source"], about["options"], about["num_examples"]
        unlabelled = arrays.get(UNLABELLED, np.zeros(len(arrays["targets"]), bool))
        weights = np.where(unlabelled, np.float32(0), np.float32(1))
        sample = Dataset(inputs=arrays["inputs"], targets=arrays["targets"], weights=weights, weak=unlabelled)
        is_right = (
            about["v"] == FORMAT_VERSION
            and isinstance(source, str)
            and isinstance(options, dict)
            and isinstance(num_examples, int)
            and sample.inputs.ndim > 0
            and sample.targets.ndim > 0
            and 0 < len(sample.inputs) == len(sample)
            and unlabelled.dtype == bool
            and unlabelled.shape == (len(sample),)
        )
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"no reference of drift ({type(error).__name__}: {error})") from None
    if not is_right:
        raise DataError(f"no reference of drift of version {FORMAT_VERSION}")
    return DriftReference(source=source, options=options, num_examples=num_examples, sample=sample)


def encode_reference(reference: DriftReference) -> bytes:
    """Returns a reference as the bytes of its file."""
    about = {
        "v": FORMAT_VERSION,
        "source": reference.source,
        "options": dict(reference.options),
        "num_examples": reference.num_examples,
    }
    content, unlabelled = io.BytesIO(), reference.sample.find_unlabelled()
    arrays = {
        "about": np.array([*json.dumps(about).encode()], np.uint8),
        "inputs": reference.sample.inputs,
        "targets": reference.sample.targets,
        **({} if unlabelled is None else {UNLABELLED: unlabelled}),
    }
    np.savez(content, allow_pickle=False, **arrays)
    return content.getvalue()


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _draw_sample(data: Dataset, name: str, first_row: int = 0) -> Dataset:
    """Returns some of the examples from a row on, the same for as many."""
    count = len(data) - first_row
    if count < 1:
        raise DataError("the data has no examples")
    row_bytes = max(1, (data.inputs.nbytes + data.targets.nbytes) // len(data))
    size = min(count, MAX_SAMPLES, max(1, MAX_SAMPLE_BYTES // row_bytes))
    rows = np.sort(derive_rng("drift", name).choice(count, size, replace=False))
    return replace(data.take(first_row + rows), groups=None)
