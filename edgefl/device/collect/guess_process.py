"""Process that guesses the labels of examples by a model: `python -m edgefl.device.collect.guess_process`."""

from __future__ import annotations

import bisect
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from edgefl.core.errors import DataError, EdgeflError, TaskError
from edgefl.core.types import Array, Json
from edgefl.device.collect.forgetting import iterate_rows
from edgefl.device.collect.label_guesses import Source
from edgefl.device.collect.shard_contents import require_state
from edgefl.device.inference.onnx_model import OnnxModel, compute_margin, prepare_features
from edgefl.device.inference.table_rows import read_unlabelled, write_rows
from edgefl.system.processes import serve_call
from edgefl.tasks.configured.options import ConfiguredTask
from edgefl.tasks.losses.class_losses import softmax
from edgefl.tasks.registry import CONFIGURED

MAX_ROWS = 2000
"""Of a time that are guessed from, its first ones."""


def guess_labels(model: str, folder: str, sources: Sequence[Source], seconds: float) -> Json:
    """Returns `guesses`, what a model says of sources in a folder by their places, until `seconds` are over.

    It is None where a source cannot be read: `num_unread` of them, the first for a `reason`.

    Raises:
        EdgeflError: the model cannot be used, or guesses no classes.
    """
    network = OnnxModel(Path(model))
    if not network.has_classes or not network.has_targets:
        raise DataError(f"{model} gives clusters or values, not the task's classes, and cannot guess labels")
    task = network.configured_task
    if task is None:
        names = ", ".join(sorted(CONFIGURED))
        raise TaskError(f"{model} is of task {network.task or 'unknown'!r}; labels are guessed by models of {names}")
    guesses = dict[str, Json | None]()
    reasons, end_s = list[str](), time.monotonic() + seconds
    for place, path in _iterate_files(Path(folder), sources, task):
        try:
            guesses[str(place)] = _guess(network, task, path)
        except (EdgeflError, OSError) as error:
            guesses[str(place)] = None
            reasons.append(str(error))
        if time.monotonic() > end_s:
            break
    return {"guesses": guesses, "num_unread": len(reasons), "reason": next(iter(reasons), "")}


def _iterate_files(folder: Path, sources: Sequence[Source], task: ConfiguredTask) -> Iterator[tuple[int, Path]]:
    """Yields place and file of each source; rows of a time are in a file of their own while it is this one's turn."""
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
            write_rows(path, [list(rows[0]), *(list(row.values()) for row in rows)], task)
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
    inputs = read_unlabelled(task, path)
    if not len(inputs):
        return None
    return _make_guess(network, softmax(network.logits(prepare_features(network, inputs))).mean(axis=0))


def _make_guess(network: OnnxModel, probabilities: Array) -> Json:
    """Returns the guess for an example whose rows have these mean probabilities."""
    best = int(probabilities.argmax())
    probability, margin = float(probabilities[best]), compute_margin(probabilities)
    return {"label": network.get_class_name(best), "probability": probability, "margin": margin}


if __name__ == "__main__":
    serve_call(lambda question: guess_labels(**question))
