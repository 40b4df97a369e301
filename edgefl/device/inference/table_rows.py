"""Rows of a table that have no targets yet, as inputs of a model: the task reads them as it reads its shards."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from edgefl.core.errors import DataError
from edgefl.core.heads import SEPARATOR
from edgefl.core.types import Array
from edgefl.device.inference.onnx_model import read_task_input
from edgefl.tasks.configured.options import ConfiguredTask

MAX_ROWS, MAX_CELLS = 4096, 250_000
"""Of a CSV text; the second with the header's."""


def write_rows(path: Path, lines: Sequence[Sequence[str]], task: ConfiguredTask) -> None:
    """Writes a CSV file of lines, the first with the columns' names, with any class or value in those of targets.

    The task reads only rows that have one; a target that is an input as well stays as it is.

    Raises:
        DataError: a line has another number of cells than the first.
    """
    for number, line in enumerate(lines, 1):
        if len(line) != len(lines[0]):
            raise DataError(f"line {number} of the rows has {len(line)} cells, the first has {len(lines[0])}")
    inputs = {*(task.columns or ()), *(task.channels or ())}
    targets = set(filter(None, task.shard_options.get("target", "").split(","))) - inputs
    kept = [place for place, name in enumerate(lines[0]) if name not in targets]
    filled = [_find_any_label(task, name) for name in targets]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        for number, line in enumerate(lines):
            writer.writerow([*(line[place] for place in kept), *(filled if number else targets)])


def _find_any_label(task: ConfiguredTask, target: str) -> str:
    """Returns what a target's column may hold: of classes the first."""
    of_several = (label.partition(SEPARATOR) for label in task.shard_options.get("labels", "").split(","))
    own = task.labels or tuple(label for name, _, label in of_several if name == target)
    return own[0] if own else "0"


def read_unlabelled(task: ConfiguredTask, path: Path) -> Array:
    """Returns the inputs of a file without targets, or of one of `write_rows`; raises as the task's reader."""
    inputs = read_task_input(task, path)
    return np.asarray(task.read(str(path)).inputs) if inputs is None else inputs


def parse_lines(content: bytes) -> list[list[str]]:
    """Returns the cells of a CSV text.

    Raises:
        DataError: it is none, too large, or has no row behind its first line.
    """
    try:
        lines = [line for line in csv.reader(_read_lines(content), strict=True) if line]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"the rows are no CSV: {error}") from None
    if len(lines) < 2:
        raise DataError("the rows must be a line of names and at least one row")
    return lines


def _read_lines(content: bytes) -> Iterator[str]:
    """Yields lines until they may have too many cells, each of which takes much more memory than its text."""
    num_cells = 0
    for number, line in enumerate(io.TextIOWrapper(io.BytesIO(content), "utf-8", newline="")):
        num_cells += 1 + line.count(",")
        if number > MAX_ROWS or num_cells > MAX_CELLS:
            raise DataError(
                f"the rows must be at most {MAX_ROWS:,} of {MAX_CELLS:,} cells in all, got {num_cells:,} cells up to "
                f"line {number + 1:,}; send fewer at a time"
            )
        yield line
