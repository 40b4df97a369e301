"""Labels of a collector's shard made elsewhere: examples written out as tasks, and labels that come back.

Nothing is sent anywhere: a person carries the folder away. What comes back counts as a person's word, as on the page.
"""

from __future__ import annotations

import csv
import html
import io
import json
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import numpy as np

from edgefl.core.errors import DataError, NotFoundError
from edgefl.core.safe_text import format_csv_cell
from edgefl.device.collect.file_store import UNLABELLED, KeptFile, list_files, read_file_time
from edgefl.device.collect.forgetting import iterate_rows
from edgefl.device.collect.label_files import (
    CLASSES_NAME,
    EXAMPLE,
    TXT_FOLDER,
    LabelRegion,
    format_rows_name,
    parse_rows_name,
    read_label_file,
)
from edgefl.device.collect.label_queue import Example, FileTarget, RowTarget
from edgefl.device.collect.settings import is_label
from edgefl.device.collect.shard_contents import require_state
from edgefl.device.collect.store_state import StoreState
from edgefl.system.atomic_files import TEMPORARY_SUFFIX, make_store_error
from edgefl.system.row_labels import LABEL_COLUMN, LabelKind, LabelLine, append_row_labels, read_row_labels

MAX_WINDOWS = 2000
Style = Literal["label-studio", "csv", "yolo"]
NAMES = {"label-studio": ("tasks.json", "files"), "csv": ("labels.csv", "files"), "yolo": (CLASSES_NAME, "images")}
_WHOLE_PICTURE = "0.5 0.5 1 1"
_PICTURE, _SOUND, _ROWS = "image", "audio", "rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleTask:
    """An example as it is written out: `kind` is that of its file, which `example` says where to find."""

    name: str
    file_name: str
    kind: str
    label: str
    example: Example


def export_examples(
    target: FileTarget | RowTarget, folder: Path, style: Style, *, labels: Sequence[str], url: str, is_all: bool
) -> int:
    """Writes examples into a new folder, with the labels that they have, whole or not at all, and returns how many.

    Args:
        target: of the shard.
        folder: that is made.
        style: of the list.
        labels: to choose from, before those that there are.
        url: that stands before the names of files in tasks.
        is_all: whether files that have a class are among them. Rows are those that no person has labelled.

    Raises:
        DataError: the folder is there, nothing is to be labelled, or the style has no such examples.
        StoreError: it cannot be written.
    """
    tasks = _list_tasks(target, is_all=is_all)
    if not tasks:
        raise DataError(f"{target.folder} has nothing to label")
    if style == "yolo" and any(task.kind != _PICTURE for task in tasks):
        raise DataError(f"yolo is for pictures, and {target.folder} has others; take label-studio or csv")
    if folder.exists():
        raise DataError(f"{folder} is there already; take another folder")
    known = list(dict.fromkeys([*labels, *target.list_labels()]))
    list_name, files_name = NAMES[style]
    columns = list(dict.fromkeys(name for task in tasks for name, _ in task.example.curves))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{folder.name[:40]}.", suffix=TEMPORARY_SUFFIX, dir=folder.parent
        ) as temporary:
            partial = Path(temporary) / folder.name
            partial.mkdir(mode=0o700)
            (partial / files_name).mkdir()
            tasks = [task for task in tasks if _write_file(target.folder, task, partial / files_name, columns)]
            if style == "yolo":
                (partial / TXT_FOLDER).mkdir()
                for task in tasks:
                    line = f"{known.index(task.label)} {_WHOLE_PICTURE}\n" if task.label else ""
                    if line:
                        (partial / TXT_FOLDER / f"{task.name}.txt").write_text(line)
            elif style == "label-studio":
                (partial / "config.xml").write_text(_format_config(tasks, columns, known), encoding="utf-8")
            (partial / list_name).write_text(_format_list(style, tasks, known, url), encoding="utf-8")
            partial.rename(folder)
    except OSError as error:
        raise make_store_error(folder, error) from None
    return len(tasks)


@dataclass(slots=True, kw_only=True)
class ImportCounts:
    """What became of the labels of a file: `unclear` are examples with several, `gone` those that are not there."""

    labelled: int = 0
    unclear: int = 0
    gone: int = 0


def import_labels(folder: Path, path: Path, labels: Sequence[str], column: str) -> ImportCounts:
    """Gives examples of a shard the labels in a file, durably.

    Args:
        folder: of the shard.
        path: of the file, as of `read_label_file`.
        labels: that may be new to the shard.
        column: as of `read_label_file`.

    Raises:
        DataError: the file has no label of an example, or one that the shard does not know; nothing is changed.
        NotFoundError: none of the examples is there.
        StoreError: a label cannot be written.
    """
    state, regions = require_state(folder), read_label_file(path, column)
    if not regions:
        raise DataError(
            f"{path} has no label of an example that edgefl device shard export wrote, or not under {column!r:.80}"
        )
    _check_labels(folder, path, regions, {*labels, *_list_labels(folder, state)})
    counts = ImportCounts()
    ordered = sorted(regions, key=lambda region: region.example)
    by_example = {name: list(found) for name, found in groupby(ordered, key=lambda region: region.example)}
    (_import_rows if state.columns else _import_files)(folder, state, by_example, counts)
    if counts.gone == len(by_example):
        raise NotFoundError(f"none of the {counts.gone} examples in {path} is in {folder}: is it of another shard?")
    return counts


def _list_tasks(target: FileTarget | RowTarget, *, is_all: bool) -> list[ExampleTask]:
    if isinstance(target, RowTarget):
        examples = target.list_examples()
        names = [format_rows_name(one.since_s, one.until_s) for one in examples]
        return [
            ExampleTask(name=name, file_name=f"{name}.csv", kind=_ROWS, label=one.label, example=one)
            for name, one in zip(names, examples, strict=True)
        ]
    return [
        ExampleTask(
            name=_get_stem(file),
            file_name=file.name,
            kind=_SOUND if file.name.endswith(".wav") else _PICTURE,
            label=file.label if file.label != UNLABELLED else "",
            example=_make_example(file),
        )
        for file in sorted(list_files(target.folder))
        if file.label == UNLABELLED or (is_all and is_label(file.label))
    ]


def _write_file(shard: Path, task: ExampleTask, folder: Path, columns: Sequence[str]) -> bool:
    """Writes an example's file, of rows one with all columns; returns whether it was still there."""
    file = task.example.file
    if file is not None:
        try:
            shutil.copyfile(shard / file.label / file.name, folder / task.file_name)
        except FileNotFoundError:
            return False
        return True
    times = task.example.times
    curves = {name: ["" if math.isnan(value) else value for value in values] for name, values in task.example.curves}
    empty = [""] * len(times)
    with (folder / task.file_name).open("w", encoding="utf-8", newline="") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(["time", *columns])
        writer.writerows(zip(times, *(curves.get(name, empty) for name in columns), strict=True))
    return True


def _format_list(style: Style, tasks: Sequence[ExampleTask], labels: Sequence[str], url: str) -> str:
    if style == "yolo":
        return "".join(f"{label}\n" for label in labels)
    if style == "csv":
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([EXAMPLE, "file", LABEL_COLUMN])
        writer.writerows((task.name, task.file_name, format_csv_cell(task.label)) for task in tasks)
        return text.getvalue()
    return "[\n" + ",\n".join(_format_task(task, url) for task in tasks) + "\n]\n"


def _format_task(task: ExampleTask, url: str) -> str:
    """Returns a task of Label Studio; the class of a file is an annotation, an event's label a prediction."""
    value = {"from_name": LABEL_COLUMN, "to_name": task.kind, "type": "choices", "value": {"choices": [task.label]}}
    key = "predictions" if task.kind == _ROWS else "annotations"
    labelled = {key: [{"result": [value]}]} if task.label else {}
    data = {EXAMPLE: task.name, task.kind: url + quote(task.file_name)}
    return json.dumps({"data": data, **labelled}, ensure_ascii=False)


def _format_config(tasks: Sequence[ExampleTask], columns: Sequence[str], labels: Sequence[str]) -> str:
    """Returns the labelling interface of a project of Label Studio."""
    kind = tasks[0].kind if tasks else _PICTURE
    tag = {
        _PICTURE: f'<Image name="{kind}" value="${kind}"/>',
        _SOUND: f'<Audio name="{kind}" value="${kind}"/>',
        _ROWS: f'<TimeSeries name="{kind}" value="${kind}" valueType="url" timeColumn="time">',
    }[kind]
    if kind == _ROWS:
        tag += "".join(f'<Channel column="{html.escape(name)}"/>' for name in columns) + "</TimeSeries>"
    choices = "".join(f'<Choice value="{html.escape(label)}"/>' for label in labels)
    return f'<View>{tag}<Choices name="{LABEL_COLUMN}" toName="{kind}">{choices}</Choices></View>\n'


def _list_labels(folder: Path, state: StoreState) -> Iterable[str]:
    if not state.columns:
        return FileTarget(folder).list_labels()
    return {line.label for line in read_row_labels(folder).lines}


def _check_labels(folder: Path, path: Path, regions: Sequence[LabelRegion], known: set[str]) -> None:
    known = set(filter(is_label, known))
    if unknown := Counter(region.label for region in regions if region.label not in known):
        label, count = unknown.most_common(1)[0]
        if not is_label(label):
            raise DataError(f"{path}: a label is up to 80 visible characters without a slash, got {label!r:.100}")
        raise DataError(
            f"{path} has {label!r} {count} times, and {folder} has {', '.join(sorted(known))[:200] or 'no label'}; "
            f"is it a new one, say --label {label!r}; nothing was changed"
        )


def _import_files(
    folder: Path, _state: StoreState, by_example: dict[str, list[LabelRegion]], counts: ImportCounts
) -> None:
    target, files = FileTarget(folder), {_get_stem(file): file for file in list_files(folder)}
    for name, regions in by_example.items():
        if len({region.label for region in regions}) > 1:
            counts.unclear += 1
        elif name in files and target.label(_make_example(files[name]), regions[0].label):
            counts.labelled += 1
        else:
            counts.gone += 1


def _import_rows(
    folder: Path, state: StoreState, by_example: dict[str, list[LabelRegion]], counts: ImportCounts
) -> None:
    spans = {name: span for name in by_example if (span := parse_rows_name(name))}
    present, lines = _find_present(folder, state, spans), list[LabelLine]()
    for name, regions in by_example.items():
        if name not in present:
            counts.gone += 1
            continue
        clipped = [_clip(region, *spans[name]) for region in regions]
        found = list(dict.fromkeys(line for line in clipped if line.since_s <= line.until_s))
        if _has_conflict(found):
            counts.unclear += 1
        elif found:
            lines += found
            counts.labelled += 1
        else:
            counts.gone += 1
    try:
        append_row_labels(folder, lines)
    except OSError as error:
        raise make_store_error(folder, error) from None


def _find_present(folder: Path, state: StoreState, spans: dict[str, tuple[float, float]]) -> set[str]:
    """Returns the names of examples of which the shard has a row at least."""
    names, present = list(spans), np.zeros(len(spans), bool)
    since_s, until_s = (np.array([span[place] for span in spans.values()]) for place in (0, 1))
    for segment in state.segments:
        if not ((since_s <= segment.last_s) & (until_s >= segment.first_s)).any():
            continue
        rows = iterate_rows(folder, replace(state, segments=(segment,)))
        times = np.sort(np.array([time_s for time_s, _ in rows]))
        present |= np.searchsorted(times, since_s, "left") < np.searchsorted(times, until_s, "right")
    return {names[place] for place in np.flatnonzero(present)}


def _clip(region: LabelRegion, since_s: float, until_s: float) -> LabelLine:
    """Returns a region's label, within the rows of its example."""
    return LabelLine(
        since_s=max(region.since_s, since_s),
        until_s=min(region.until_s, until_s),
        label=region.label,
        kind=LabelKind.PERSON,
    )


def _has_conflict(lines: Sequence[LabelLine]) -> bool:
    """Returns whether two labels are of one time."""
    ends = dict[str, float]()
    for line in sorted(lines, key=lambda line: line.since_s):
        others = [end_s for label, end_s in ends.items() if label != line.label]
        if any(end_s > line.since_s or end_s == line.since_s == line.until_s for end_s in others):
            return True
        ends[line.label] = max(line.until_s, ends.get(line.label, line.until_s))
    return False


def _make_example(file: KeptFile) -> Example:
    time_s = read_file_time(file)
    return Example(since_s=time_s, until_s=time_s, file=file)


def _get_stem(file: KeptFile) -> str:
    """Returns a file's name without its suffix, which some formats replace."""
    return file.name.rpartition(".")[0]
