"""Process that guesses the labels of examples by a model: `python -m edgefl.device.collect.guess_process`."""

from __future__ import annotations

import bisect
import csv
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from edgefl.core.errors import DataError, EdgeflError, TaskError
from edgefl.core.types import Array, Json
from edgefl.device.collect.forgetting import iterate_rows
from edgefl.device.collect.label_guesses import Source
from edgefl.device.collect.shard_contents import require_state
from edgefl.device.inference.onnx_model import OnnxModel, prepare_features, read_task_input, softmax
from edgefl.system.processes import serve_call
from edgefl.system.row_labels import LABEL_COLUMN
from edgefl.tasks.configured.options import ConfiguredTask
from edgefl.tasks.registry import CONFIGURED, make_task

MAX_ROWS = 2000
"""Of a time that are guessed from, its first ones."""


def guess_labels(model: str, folder: str, sources: Sequence[Source], seconds: float) -> Json:
    """Returns `guesses`, what a model says of sources in a folder by their places, until `seconds` are over.

    It is None where a source cannot be read: `num_unread` of them, the first for a `reason`.

    Raises:
        EdgeflError: the model cannot be used, or guesses no classes.
    """
    network = OnnxModel(Path(model))
    if not network.has_classes:
        raise DataError(f"{model} gives values, not classes, and cannot guess labels")
    if network.task not in CONFIGURED:
        names = ", ".join(sorted(CONFIGURED))
        raise TaskError(f"{model} is of task {network.task or 'unknown'!r}; labels are guessed by models of {names}")
    task = cast("ConfiguredTask", make_task(network.task, network.options))
    guesses = dict[str, Json | None]()
    reasons, end_s = list[str](), time.monotonic() + seconds
    for place, path in _iterate_files(Path(folder), sources, task, network.options.get("target")):
        try:
            guesses[str(place)] = _guess(network, task, path)
        except (EdgeflError, OSError) as error:
            guesses[str(place)] = None
            reasons.append(str(error))
        if time.monotonic() > end_s:
            break
    return {"guesses": guesses, "num_unread": len(reasons), "reason": next(iter(reasons), "")}


def _iterate_files(
    folder: Path, sources: Sequence[Source], task: ConfiguredTask, target: object
) -> Iterator[tuple[int, Path]]:
    """Yields place and file of each source; rows of a time are in a file of their own while it is this one's turn.

    They have a class in the column `target`, as the task reads only such rows.
    """
    column = target if isinstance(target, str) and target else LABEL_COLUMN
    times = dict[tuple[float, float], int]()
    for place, (first, second) in enumerate(sources):
        if isinstance(first, str):
            yield place, folder / first / str(second)
        else:
            times[float(first), float(second)] = place
    if not times:
        return
    with tempfile.TemporaryDirectory() as place_:
        path = Path(place_) / "rows.csv"
        for span, rows in _iterate_times(folder, times):
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(dict.fromkeys([*rows[0], column])))
                writer.writeheader()
                writer.writerows({**row, column: task.labels[0]} for row in rows)
            yield times[span], path


def _iterate_times(
    folder: Path, times: Collection[tuple[float, float]]
) -> Iterator[tuple[tuple[float, float], list[dict[str, str]]]]:
    """Yields each time in which there are rows, with the first `MAX_ROWS` of them."""
    ordered = sorted(times)
    starts = [since_s for since_s, _ in ordered]
    span, rows = ordered[0], list[dict[str, str]]()
    for time_s, row in iterate_rows(folder, require_state(folder)):
        found = ordered[max(0, bisect.bisect_right(starts, time_s) - 1)]
        if not found[0] <= time_s <= found[1]:
            continue
        if found != span and rows:
            yield span, rows
        if found != span:
            span, rows = found, []
        if len(rows) < MAX_ROWS:
            rows.append(row)
    if rows:
        yield span, rows


def _guess(network: OnnxModel, task: ConfiguredTask, path: Path) -> Json | None:
    """Returns the guess for a file; None where its rows are too few for a window of the task."""
    inputs = read_task_input(task, path)
    if inputs is None:
        inputs = task.read(str(path)).inputs
    if not len(inputs):
        return None
    return _make_guess(network, softmax(network.logits(prepare_features(network, inputs))).mean(axis=0))


def _make_guess(network: OnnxModel, probabilities: Array) -> Json:
    """Returns the guess for an example whose rows have these mean probabilities."""
    best, *others = np.argsort(-probabilities)
    second = float(probabilities[others[0]]) if others else 0.0
    top = float(probabilities[best])
    return {"label": network.get_class_name(int(best)), "probability": top, "margin": top - second}


if __name__ == "__main__":
    serve_call(lambda question: guess_labels(**question))
