"""Model check: accuracy on this board's own data, in a separate process that isolates bad files.

The child also returns its memory: an agent that only trains holds no onnxruntime.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgefl.core.errors import DataError, EdgeflError
from edgefl.core.types import Dataset, Role
from edgefl.device.hardware.requirements import make_confinement
from edgefl.device.inference.onnx_model import OnnxModel, prepare_features
from edgefl.system.processes import call_in_subprocess, serve_call
from edgefl.tasks.datasets.shards import split_train_test
from edgefl.tasks.registry import make_task

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
    serve_call(lambda question: asdict(check_model(ModelCheckRequest(**question))))
