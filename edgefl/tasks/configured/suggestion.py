"""A configured task that suits a file or folder of data: what `edgefl quickstart --data PATH` writes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from edgefl.core.errors import DataError
from edgefl.core.settings import suggest_name
from edgefl.tasks.datasets.class_folders import PICTURE_SUFFIXES, SOUND_SUFFIXES
from edgefl.tasks.datasets.table_files import iterate_shard, list_table_files, summarise_columns

MIN_CLASSES, MAX_CLASSES, MAX_LABELS = 2, 20, 100
"""More distinct numbers in a column are values to predict, not classes; more distinct texts are neither."""
Option = str | float | Sequence[str]


def suggest_task(path: Path, target: str | None) -> tuple[str, dict[str, Option]]:
    """Returns a configured task's name and its options, from the data alone.

    Of a table every column of numbers but `target` is an input; None means its last column. It holds classes where
    it has texts, or at most `MAX_CLASSES` whole numbers; else values, whose mean and deviation are taken from here.

    Raises:
        DataError: it is neither a table nor a folder of class folders, cannot be read, has no such column, no
            numbers, or one class or too many.
    """
    try:
        for task, suffixes in (("pictures", PICTURE_SUFFIXES), ("audio", SOUND_SUFFIXES)):
            labels = _list_class_folders(path, suffixes)
            if len(labels) > 1 and target is None:
                return task, {"labels": labels}
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from None
    return "table", _suggest_table(path, target)


def _list_class_folders(path: Path, suffixes: Sequence[str]) -> list[str]:
    folders = [folder for folder in path.iterdir() if folder.is_dir()] if path.is_dir() else []
    return sorted(
        folder.name
        for folder in folders
        if os.access(folder, os.R_OK | os.X_OK) and any(file.suffix.lower() in suffixes for file in folder.iterdir())
    )


def _suggest_table(path: Path, target: str | None) -> dict[str, Option]:
    list_table_files(path, "table")
    columns = summarise_columns(path, "table")
    target = list(columns)[-1] if target is None else target
    if target not in columns:
        raise DataError(f"{path} has no column {target!r}; {suggest_name(target, columns)}")
    inputs = [name for name, moments in columns.items() if moments.is_number and name != target]
    if not inputs:
        raise DataError(f"{path} has no column of numbers beside {target!r} to learn from")
    options: dict[str, Option] = {"columns": inputs, "target": target, "normalise": "fleet", "missing": "drop"}
    labels = _find_labels(path, target, is_number=columns[target].is_number)
    if labels:
        return {**options, "labels": labels}
    scale = columns[target].deviation
    values = {"target_mean": columns[target].mean, "target_scale": scale if scale > 0 else 1.0}
    return {**options, **{name: float(f"{value:.4g}") for name, value in values.items()}, "metrics": ["rmse", "r2"]}


def _find_labels(path: Path, target: str, *, is_number: bool) -> list[str]:
    """Returns the classes in a column, sorted; none where it holds values."""
    found: set[str] = set()
    for part in iterate_shard(path, "table", [], [target], drops_missing=True):
        found.update(part.texts[0])
        if is_number and (len(found) > MAX_CLASSES or not all(_is_whole(text) for text in found)):
            return []
        if len(found) > MAX_LABELS:  # a text of each row, which may be anybody's name
            raise DataError(
                f"{path}: column {target!r} has more than {MAX_LABELS} different texts, too many for classes; name "
                "another one with --target"
            )
    if len(found) < MIN_CLASSES:
        raise DataError(f"{path}: column {target!r} is the same in all rows; name another one with --target")
    return sorted(found, key=lambda text: (float(text) if is_number else 0.0, text))


def _is_whole(text: str) -> bool:
    try:
        return float(text).is_integer()
    except ValueError:
        return False
