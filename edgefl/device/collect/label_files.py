"""Files of labels that were made elsewhere: JSON, JSON_MIN and CSV of Label Studio, and folders of YOLO's txt.

An example is found by its name, which stands in some text of an entry: in the address of its file, whatever is before
or behind it. The name of a file is its time and hash, that of rows their two times. Of boxes and other regions of a
picture only the class counts.

Source: Label Studio documentation, "Label Studio task format" and "Export annotations"; Ultralytics documentation,
"Object detection datasets".
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from edgefl.core.errors import DataError
from edgefl.core.safe_parsing import parse_message
from edgefl.core.safe_text import format_csv_cell
from edgefl.device.collect.file_store import MAX_CLASSES, MAX_FILES

MAX_FILE_BYTES = 32 * 1024**2
MAX_TXT_BYTES = 64 * 1024
MAX_REGIONS = 2 * MAX_FILES
"""In all files together."""
CLASSES_NAME, TXT_FOLDER = "classes.txt", "labels"
EXAMPLE = "example"
"""Column and key of an example's name in what we write; it may stand in any other as well."""
_EXAMPLE_NAME = re.compile(r"\d{8}T\d{6}\.\d{3}-[0-9a-f]{16}|rows-\d{1,12}\.\d{3}-\d{1,12}\.\d{3}")
_DELIMITERS = (",", ";", "\t")
NUM_BOX_CELLS = 5
"""Class, centre and size; more are of polygons, points and scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelRegion:
    """Label of an example, or of the part of its rows between two times, in seconds since 1970."""

    example: str
    label: str
    since_s: float = -math.inf
    until_s: float = math.inf


def format_rows_name(since_s: float, until_s: float) -> str:
    """Returns the name of an example of rows."""
    return f"rows-{since_s:.3f}-{until_s:.3f}"


def parse_rows_name(name: str) -> tuple[float, float] | None:
    """Returns the times in the name of an example of rows; None for that of a file."""
    if not name.startswith("rows-"):
        return None
    _, since, until = name.split("-")
    return float(since), float(until)


def read_label_file(path: Path, column: str) -> list[LabelRegion]:
    """Returns the labels in a `.json`, `.csv` or `.tsv` file, or in a folder of YOLO's.

    Args:
        path: of the file or folder.
        column: of labels in CSV and JSON_MIN.

    Raises:
        DataError: it cannot be read, is too large, or is none of these.
    """
    try:
        found = list(islice(_read_yolo(path) if path.is_dir() else _read_file(path, column), MAX_REGIONS + 1))
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read: {error.strerror}") from None
    except (ValueError, csv.Error) as error:
        raise DataError(f"{path}: {error}") from None
    if len(found) > MAX_REGIONS:
        raise DataError(f"{path} has more than {MAX_REGIONS:,} labels; give it in parts")
    return found


def _read_file(path: Path, column: str) -> Iterator[LabelRegion]:
    if path.suffix not in {".json", ".csv", ".tsv"}:
        raise ValueError("labels come in a .json, .csv or .tsv file, or in a folder with classes.txt")
    content = _read_bounded(path, MAX_FILE_BYTES)
    return _read_tasks(content, column) if path.suffix == ".json" else _read_cells(content, column)


def _read_tasks(content: bytes, column: str) -> Iterator[LabelRegion]:
    tasks = parse_message(content)
    if not isinstance(tasks, list):
        raise ValueError("it is no list of tasks; export JSON or JSON-MIN")  # noqa: TRY004 of a stranger's file
    for number, task in enumerate(tasks, 1):
        if not isinstance(task, dict):
            raise ValueError(f"entry {number} is no task")  # noqa: TRY004 likewise
        annotations = task.get("annotations")
        if isinstance(annotations, list):
            data, values = task.get("data"), [one.get("result") for one in _select_annotations(annotations)]
        else:
            data, values = task, [None if task.get("was_cancelled") else task.get(column)]
        if example := _find_example(data.values() if isinstance(data, dict) else ()):
            for value in values:
                yield from _list_regions(value, example)


def _read_cells(content: bytes, column: str) -> Iterator[LabelRegion]:
    text = content.decode("utf-8-sig")
    delimiter = max(_DELIMITERS, key=text.partition("\n")[0].count)
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names = rows.fieldnames or []
    if column not in names:
        raise ValueError(f"it has no column {column!r:.80}, but {', '.join(names)[:200]}; --column says which one")
    for cells in rows:
        example = _find_example(cells.values())
        if example and (cells.get("was_cancelled") or "").lower() != "true":
            label = cells[column] or ""
            is_escaped = label.startswith("'") and format_csv_cell(label[1:]) == label
            yield from _list_regions(label[is_escaped:], example)


def _read_yolo(folder: Path) -> Iterator[LabelRegion]:
    classes = _read_classes(folder / CLASSES_NAME)
    texts = folder / TXT_FOLDER if (folder / TXT_FOLDER).is_dir() else folder
    num_files = 0
    for path in texts.iterdir():
        example = _find_example([path.name])
        if path.suffix != ".txt" or not example:
            continue
        num_files += 1
        if num_files > MAX_FILES:
            raise ValueError(f"it has more than {MAX_FILES:,} .txt files of examples; give it in parts")
        for label in _read_boxes(path, classes):
            yield LabelRegion(example=example, label=label)


def _read_classes(path: Path) -> list[str]:
    """Returns the names of classes, whose numbers are those of their lines."""
    names = [name.strip() for name in _read_bounded(path, MAX_TXT_BYTES).decode("utf-8-sig").rstrip().split("\n")]
    if "" in names:
        line = names.index("") + 1
        raise ValueError(f"{path.name} has a blank line {line}; it must have one for each class, whose number it is")
    if len(names) > MAX_CLASSES:
        raise ValueError(f"{path.name} has {len(names)} classes, at most are {MAX_CLASSES}")
    return names


def _read_boxes(path: Path, classes: Sequence[str]) -> list[str]:
    """Returns the classes of a file's boxes, each once."""
    found = set[str]()
    for line in filter(str.strip, _read_bounded(path, MAX_TXT_BYTES).decode().split("\n")):
        try:
            found.add(classes[_parse_box(line)])
        except (ValueError, IndexError):
            raise ValueError(
                f"{path.name} must have lines of a class from 0 to {len(classes) - 1} and at least "
                f"{NUM_BOX_CELLS - 1} numbers, got {line!r:.80}"
            ) from None
    return sorted(found)


def _parse_box(line: str) -> int:
    """Returns the number of a box's class.

    Raises:
        ValueError: the line has other cells than YOLO's.
    """
    number, *cells = line.split()
    if len(cells) < NUM_BOX_CELLS - 1 or not all(math.isfinite(float(cell)) for cell in cells):
        raise ValueError("it is no box")
    if not number.isascii() or not number.isdecimal() or len(number) > len(str(MAX_CLASSES)):
        raise ValueError("it is no class")
    return int(number)


def _select_annotations(annotations: Iterable[object]) -> list[dict[str, Any]]:
    """Returns what counts of several people's: the ground truth where there is one, and nothing cancelled."""
    found = [one for one in annotations if isinstance(one, dict) and not one.get("was_cancelled")]
    return [one for one in found if one.get("ground_truth")] or found


def _find_example(values: Iterable[object]) -> str:
    """Returns the name of an example in one of these texts; empty where there is none."""
    found = (_EXAMPLE_NAME.search(value) for value in values if isinstance(value, str))
    return next((one[0] for one in found if one), "")


def _list_regions(value: object, example: str) -> Iterator[LabelRegion]:
    """Yields the labels in a result, or in a cell of one, which may be JSON."""
    if isinstance(value, str) and (parsed := _parse_nested(value)) is not None:
        value = parsed
    if isinstance(value, str) and value.strip():
        yield LabelRegion(example=example, label=value.strip())
    elif isinstance(value, list):
        for item in value:
            yield from _list_regions(item, example)
    elif isinstance(value, dict):
        yield from _list_region(inner if isinstance(inner := value.get("value"), dict) else value, example)


def _list_region(value: Mapping[str, object], example: str) -> Iterator[LabelRegion]:
    since_s, until_s = _read_span(value) if parse_rows_name(example) else (-math.inf, math.inf)
    for key, labels in value.items():
        if (key == "choices" or key.endswith("labels")) and isinstance(labels, list):
            if not all(isinstance(label, str) for label in labels):
                raise ValueError(f"the labels of {example} are no texts")
            for label in labels:
                yield LabelRegion(example=example, label=label, since_s=since_s, until_s=until_s)


def _parse_nested(text: str) -> dict[str, Any] | list[Any] | None:
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        value = parse_message(text.encode())
    except ValueError:
        return None
    return value if isinstance(value, dict | list) else None


def _read_span(value: Mapping[str, object]) -> tuple[float, float]:
    """Returns a region's beginning and end in seconds since 1970; of one without them all times."""
    if "start" not in value and "end" not in value:
        return -math.inf, math.inf
    try:
        return float(value["start"]), float(value["end"])  # type: ignore[arg-type]  # checked by trying
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError("a region of rows must have start and end in seconds since 1970") from None


def _read_bounded(path: Path, max_bytes: int) -> bytes:
    with path.open("rb") as file:
        # As much memory as is asked for is taken at once.
        content = file.read(min(os.fstat(file.fileno()).st_size, max_bytes) + 1)
    if len(content) > max_bytes:
        raise ValueError(f"{path.name} has more than {max_bytes // 1024:,} KiB; give it in parts")
    return content
