"""How good a model is on this board's own data; in a process of its own, which a bad file cannot take the agent with.

The child also gives its memory back: an agent that only trains holds no onnxruntime.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgefl.child_process import answer_once, ask_child
from edgefl.device.inference.onnx_model import OnnxModel, features
from edgefl.errors import DataError, EdgeflError
from edgefl.tasks.registry import make_task
from edgefl.tasks.splits import local_split
from edgefl.types import Dataset, Role

log = logging.getLogger(__name__)

CHECK_WITHIN_S = 600.0
MODULE = "edgefl.device.inference.model_check"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Which files to judge and on what: a trainer's test split, all of an evaluator's shard."""

    path: str
    former_path: str | None
    task: str
    options: Mapping[str, Any]
    shard: str
    role: str
    test_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Accuracy of the new model and of the one before, on so many examples; None where that cannot be told."""

    accuracy: float
    former_accuracy: float | None
    num_examples: int


def check_apart(question: Question, *, within_s: float = CHECK_WITHIN_S) -> Scores:
    """Returns the scores, found in a child process.

    Raises:
        DataError: the model cannot be used; the text says why.
    """
    try:
        return Scores(**ask_child(MODULE, asdict(question), what="checking the model", within_s=within_s))
    except EdgeflError as error:
        raise DataError(str(error)) from None


def check(question: Question) -> Scores:
    """Returns the scores; a former model that cannot be judged any more has none.

    Raises:
        EdgeflError: the new model or the data cannot be used.
    """
    data = judged_data(make_task(question.task, question.options).read(question.shard), question)
    model = OnnxModel(Path(question.path))
    if model.task not in {"", question.task}:
        raise DataError(f"the model is of task {model.task}, not of {question.task}")
    accuracy = _accuracy(model, data)
    del model
    return Scores(accuracy=accuracy, former_accuracy=_former(question, data), num_examples=len(data))


def judged_data(data: Dataset, question: Question) -> Dataset:
    """Returns what a model is judged on: as in a run's evaluations, but all rows where none is for tests."""
    if question.role == Role.EVALUATOR:
        return data
    return next(part for part in (local_split(data, question.test_fraction)[1], data) if len(part))


def _former(question: Question, data: Dataset) -> float | None:
    if question.former_path is None:
        return None
    try:
        return _accuracy(OnnxModel(Path(question.former_path)), data)
    except EdgeflError as error:
        log.warning("the model before cannot be judged: %s", error)
        return None


def _accuracy(model: OnnxModel, data: Dataset) -> float:
    return model.accuracy(Dataset(inputs=features(model, data.inputs), labels=data.labels))


if __name__ == "__main__":
    answer_once(lambda question: asdict(check(Question(**question))))
