"""Contents of a collected shard: how much of which class and when, its newest examples and pictures, its drift."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgefl.core.errors import DataError, NotFoundError
from edgefl.core.types import derive_rng
from edgefl.device.collect.file_store import UNLABELLED, list_class_files, list_files, read_file_time
from edgefl.device.collect.forgetting import LABEL, ForgetRequest, iterate_rows
from edgefl.device.collect.store_state import StoreState, read_store_state
from edgefl.system.atomic_files import open_atomic
from edgefl.system.row_labels import LabelKind, read_row_labels

if TYPE_CHECKING:
    from edgefl.tasks.datasets.drift import ColumnDrift

MAX_VALUES = 50
"""Different texts of a column that counts as one of classes."""
WEAK = "weak label"
NUM_SPANS, NUM_EXAMPLES = 10, 3
MAX_COMPARED = 20_000
"""Examples of each side of a drift: a random sample of more."""
DAY_S = 86_400.0
NUM_PICTURES, PICTURE_PIXELS, TEXT_PIXELS = 8, 96, 16
"""Of a class on a sheet of pictures, and heights of a picture and of a line of text."""
MAX_PICTURE_CLASSES = 100
"""On a sheet, the first by name: more would take a board's memory."""
_HIDDEN = frozenset({"span", "check"})
_EVERYTHING = ForgetRequest(since_s=0.0, until_s=math.inf)


@dataclass(slots=True, kw_only=True)
class Times:
    """Number of examples, and the times of the first and the last of them, in seconds since 1970."""

    num: int = 0
    first_s: float = 0.0
    last_s: float = 0.0

    def add(self, time_s: float) -> None:
        self.first_s = min(self.first_s, time_s) if self.num else time_s
        self.last_s = max(self.last_s, time_s) if self.num else time_s
        self.num += 1


@dataclass(slots=True, kw_only=True)
class ShardContents:
    """What lies in a shard.

    Attributes:
        kind: rows or files.
        total: of all examples.
        classes: of rows, by column of texts and text; of files, by `label` and class; of both by `WEAK` and label.
        spans: of rows, by number, the newest `NUM_SPANS`.
        num_spans: of all rows.
        examples: the newest, each as a line.
    """

    kind: str
    total: Times = field(default_factory=Times)
    classes: dict[str, dict[str, int]] = field(default_factory=dict)
    spans: dict[str, Times] = field(default_factory=dict)
    num_spans: int = 0
    examples: list[str] = field(default_factory=list)


def read_contents(folder: Path) -> ShardContents:
    """Returns what a collector keeps in a folder.

    Raises:
        NotFoundError: no collector has written into it.
        StoreError: its state, or a segment, cannot be read.
    """
    state = require_state(folder)
    found = _read_rows(folder, state) if state.columns else _read_files(folder)
    if weak := count_weak(folder, state):
        found.classes[WEAK] = weak
    return found


def write_picture_sheet(folder: Path, path: Path) -> int:
    """Writes the newest pictures of each class as one PNG, a row for each class, that only its owner may read.

    A file that is no picture, or damaged, is left out, and classes beyond `MAX_PICTURE_CLASSES`.

    Returns:
        the number of pictures.

    Raises:
        NotFoundError: no collector has written into the folder.
        StoreError: its state cannot be read.
        DataError: it has no picture.
        TaskError: Pillow is not installed.
        OSError: the sheet cannot be written.
    """
    from edgefl.tasks.datasets.class_folders import import_pillow, read_picture  # noqa: PLC0415 only for pictures
    from edgefl.tasks.registry import import_extra  # noqa: PLC0415 likewise

    require_state(folder)
    pillow, by_class = import_pillow(), dict[str, list[Path]]()
    for file in sorted(list_files(folder), reverse=True):
        by_class.setdefault(file.label, []).append(folder / file.label / file.name)
    rows = dict[str, list[Any]]()
    for label, files in sorted(by_class.items()):
        for file_path in files:
            with contextlib.suppress(DataError):  # such as a sound
                pixels = read_picture(file_path, size=PICTURE_PIXELS, channels=3).transpose(1, 2, 0)
                rows.setdefault(label, []).append(pillow.fromarray(pixels))
            if len(rows.get(label, ())) == NUM_PICTURES:
                break
        if len(rows) == MAX_PICTURE_CLASSES:
            break
    if not rows:
        raise DataError(f"{folder} has no picture")
    height = PICTURE_PIXELS + TEXT_PIXELS
    sheet = pillow.new("RGB", (PICTURE_PIXELS * NUM_PICTURES, height * len(rows)), "white")
    draw = import_extra("PIL.ImageDraw", "pictures are drawn with Pillow").Draw(sheet)
    for number, (label, pictures) in enumerate(rows.items()):
        draw.text((2, number * height + 2), f"{label} ({len(by_class[label])})", fill="black")
        for column, picture in enumerate(pictures):
            sheet.paste(picture, (column * PICTURE_PIXELS, number * height + TEXT_PIXELS))
    with open_atomic(path) as stream:
        sheet.save(stream, "PNG")
    return sum(map(len, rows.values()))


def count_weak(folder: Path, state: StoreState) -> dict[str, int]:
    """Returns how many examples have which weak label; reads no more than labels where none is there."""
    labels = read_row_labels(folder)
    if all(line.kind is not LabelKind.WEAK for line in labels.lines):
        return {}
    if state.columns:
        times = [time_s for time_s, _ in iterate_rows(folder, state)]
    else:
        times = [read_file_time(file) for file in list_class_files(folder, UNLABELLED)]
    return dict(sorted(Counter(filter(None, labels.find_weak(times))).items()))


def measure_recent_drift(folder: Path, days: float) -> list[ColumnDrift]:
    """Returns the drift of the newest days to all before, the column with the largest index first.

    Of rows each column is one, texts and labels by their share; of files their classes are the one column.

    Args:
        folder: of the shard.
        days: before its newest example, above 0.

    Raises:
        NotFoundError: no collector has written into it.
        StoreError: its state, or a segment, cannot be read.
        DataError: all of it is newer.
    """
    state = require_state(folder)
    last_s = max(_list_times(folder, state, _EVERYTHING), default=0.0)
    sides = _sample_sides(folder, state, last_s - days * DAY_S)
    if not all(sides):
        raise DataError(f"{folder} has nothing older than the newest {days:g} days, so there is nothing to compare")
    names = [name for name in sides[0][0] if name not in {"time", *_HIDDEN}]
    found = [_compare_cells(name, *([row.get(name, "") for row in side] for side in sides)) for name in names]
    return sorted(found, key=lambda column: -column.psi)


def _sample_sides(folder: Path, state: StoreState, cut_s: float) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Returns cells by column of examples up to a time, and of those after it; at most `MAX_COMPARED` of each."""
    sides: tuple[list[dict[str, str]], list[dict[str, str]]] = [], []
    counts, rng = [0, 0], derive_rng("drift", "sample")
    rows: Iterable[tuple[float, dict[str, str]]] = (
        iterate_rows(folder, state)
        if state.columns
        else ((read_file_time(file), {LABEL: file.label}) for file in list_files(folder))
    )
    for time_s, row in rows:
        place = int(time_s > cut_s)
        counts[place] += 1
        if len(sides[place]) < MAX_COMPARED:
            sides[place].append(row)
        elif (index := int(rng.integers(counts[place]))) < MAX_COMPARED:
            sides[place][index] = row
    return sides


def _compare_cells(name: str, reference: Sequence[str], newer: Sequence[str]) -> ColumnDrift:
    """Returns the drift of a column: of numbers, or of texts by their counts."""
    import numpy as np  # noqa: PLC0415 fast start

    from edgefl.tasks.datasets.drift import ColumnDrift, compute_index, compute_ks, compute_psi  # noqa: PLC0415

    sizes = {"num_reference": len(reference), "num_newer": len(newer)}
    if name != LABEL and all(_is_number(cell) for cell in {*reference, *newer} if cell):
        then, now = (np.array([float(cell or "nan") for cell in side]) for side in (reference, newer))
        return ColumnDrift(name=name, **sizes, psi=compute_psi(then, now), ks=compute_ks(then, now))
    texts = sorted({*reference, *newer})
    then, now = (np.array([count[text] for text in texts]) for count in (Counter(reference), Counter(newer)))
    return ColumnDrift(name=name, **sizes, psi=compute_index(then, now), ks=None)


def count_forgotten(folder: Path, request: ForgetRequest) -> Times:
    """Returns how many rows or files a request is about; raises as `read_contents`."""
    state, found = require_state(folder), Times()
    for time_s in _list_times(folder, state, request):
        found.add(time_s)
    return found


def require_state(folder: Path) -> StoreState:
    """Returns the state of a collector's folder; raises as `read_contents`."""
    state = read_store_state(folder)
    if state is None:
        raise NotFoundError(f"no collector has written into {folder}; edgefl device collect FILE")
    return state


def _list_times(folder: Path, state: StoreState, request: ForgetRequest) -> Iterable[float]:
    if not state.columns:
        return [read_file_time(file) for file in list_files(folder) if request.has_file(file)]
    return (time_s for time_s, row in iterate_rows(folder, state) if request.has_row(time_s, row))


def _read_rows(folder: Path, state: StoreState) -> ShardContents:
    found, values = ShardContents(kind="rows"), {name: Counter[str]() for name in (*state.columns, LABEL)}
    former = ""
    for time_s, row in iterate_rows(folder, state):
        found.total.add(time_s)
        if row["span"] != former:
            former = row["span"]
            found.num_spans += 1
            found.spans[former] = found.spans.pop(former, Times())
            if len(found.spans) > NUM_SPANS:
                del found.spans[next(iter(found.spans))]
        found.spans[former].add(time_s)
        for name in list(values):
            text = row.get(name, "")
            values[name][text] += 1
            if len(values[name]) > MAX_VALUES or (text and name != LABEL and _is_number(text)):
                del values[name]
        found.examples.append(", ".join(f"{name} {text}" for name, text in row.items() if name not in _HIDDEN))
        del found.examples[:-NUM_EXAMPLES]
    found.classes = {name: dict(sorted(counts.items())) for name, counts in values.items() if set(counts) - {""}}
    return found


def _read_files(folder: Path) -> ShardContents:
    found, labels = ShardContents(kind="files"), Counter[str]()
    files = sorted(list_files(folder))
    for file in files:
        labels[file.label] += 1
        found.total.add(read_file_time(file))
    found.classes = {"label": dict(sorted(labels.items()))}
    found.examples = [f"{file.label}/{file.name}, {file.num_bytes} bytes" for file in files[-NUM_EXAMPLES:]]
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
