"""Model check, and predictions of a shard, in a process that isolates bad files and the code of others' tasks.

The child also returns its memory: an agent that only trains holds no onnxruntime.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgefl.core.errors import DataError, EdgeflError
from edgefl.core.types import Dataset, Json, Role
from edgefl.device.hardware.requirements import make_confinement
from edgefl.device.inference.onnx_model import OnnxModel, is_shard, prepare_features, read_inputs
from edgefl.system.processes import call_in_subprocess, serve_call
from edgefl.tasks.datasets.shards import split_train_test
from edgefl.tasks.registry import BUILT_IN, make_task

log = logging.getLogger(__name__)

CHECK_TIMEOUT_S = 600.0
MODULE = "edgefl.device.inference.model_check"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheckRequest:
    """Models to check, and their data: a trainer's test split, all of an evaluator's shard.

    `state_dir` is kept from the process that checks; with None it is not confined.
    """

    path: str
    former_path: str | None
    task: str
    options: Mapping[str, Any]
    shard: str
    role: str
    test_fraction: float
    state_dir: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheckResult:
    """Accuracy of the new and the former model (None if unknown), and the number of examples."""

    accuracy: float
    former_accuracy: float | None
    num_examples: int


def check_in_subprocess(request: ModelCheckRequest, *, timeout_s: float = CHECK_TIMEOUT_S) -> ModelCheckResult:
    """Returns the scores, computed in a child process, confined where the request has a `state_dir`.

    Raises:
        DataError: the model cannot be used.
    """
    paths = [path for path in (request.shard, request.path, request.former_path) if path is not None]
    state_dir = request.state_dir
    confinement = None if state_dir is None else make_confinement(Path(state_dir), "model-check", paths, "cpu")
    try:
        reply = call_in_subprocess(
            MODULE,
            asdict(request),
            description="checking the model",
            timeout_s=timeout_s,
            confinement=confinement,
        )
        return ModelCheckResult(**reply)
    except EdgeflError as error:
        raise DataError(str(error)) from None


def check_model(request: ModelCheckRequest) -> ModelCheckResult:
    """Returns the scores; None for a former model that cannot be run any more.

    Raises:
        EdgeflError: the new model or the data cannot be used.
    """
    data = select_check_data(make_task(request.task, request.options).read(request.shard), request)
    model = OnnxModel(Path(request.path))
    if model.task not in {"", request.task}:
        raise DataError(f"the model is of task {model.task}, not of {request.task}")
    accuracy = _compute_accuracy(model, data)
    del model
    return ModelCheckResult(
        accuracy=accuracy, former_accuracy=_compute_previous_accuracy(request, data), num_examples=len(data)
    )


def predict_file(
    path: Path, source: Path, *, state_dir: Path, policy: str = "auto", threads: int = 1
) -> tuple[list[Json], list[int] | None]:
    """Returns the predictions of a model for the rows of a file, and their labels where it has them.

    A shard is read and prepared by its task's code. What is not built in runs in a confined process, as in training.

    Args:
        path: of the model.
        source: see `read_inputs`.
        state_dir: of the device, which is kept from the process.
        policy: `auto` confines the code of tasks that are not built in, `always` all, `never` nothing.
        threads: of the model.

    Raises:
        EdgeflError: the model or the file cannot be used, or the process ended badly.
    """
    if policy == "never" or (policy == "auto" and not _is_read_by_foreign_code(path, source)):
        reply = _predict(str(path), str(source), threads)
    else:
        question: Json = {"path": str(path.absolute()), "source": str(source.absolute()), "threads": threads}
        with contextlib.ExitStack() as stack:
            if not state_dir.is_dir():
                state_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            confinement = make_confinement(state_dir, "infer", [question["source"], question["path"]], "cpu")
            reply = call_in_subprocess(
                MODULE,
                question,
                description="reading the shard",
                timeout_s=CHECK_TIMEOUT_S,
                confinement=confinement,
            )
    return reply["rows"], reply["labels"]


def _is_read_by_foreign_code(path: Path, source: Path) -> bool:
    return is_shard(source) and OnnxModel(path).task not in {"", *BUILT_IN}


def _predict(path: str, source: str, threads: int) -> Json:
    model = OnnxModel(Path(path), threads=threads)
    inputs, labels = read_inputs(Path(source), model)
    return {"rows": model.predict(inputs), "labels": None if labels is None else [int(label) for label in labels]}


def select_check_data(data: Dataset, request: ModelCheckRequest) -> Dataset:
    """Returns the check data: as in a run's evaluations, but all rows without a test split."""
    if request.role == Role.EVALUATOR:
        return data
    return next(part for part in (split_train_test(data, request.test_fraction)[1], data) if len(part))


def _compute_previous_accuracy(request: ModelCheckRequest, data: Dataset) -> float | None:
    if request.former_path is None:
        return None
    try:
        return _compute_accuracy(OnnxModel(Path(request.former_path)), data)
    except EdgeflError as error:
        log.warning("the model before cannot be judged: %s", error)
        return None


def _compute_accuracy(model: OnnxModel, data: Dataset) -> float:
    return model.accuracy(Dataset(inputs=prepare_features(model, data.inputs), labels=data.labels))


if __name__ == "__main__":
    serve_call(
        lambda question: (
            _predict(**question) if "source" in question else asdict(check_model(ModelCheckRequest(**question)))
        )
    )
