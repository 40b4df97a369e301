"""Contents of a collected shard: how much there is of which class and when, and its newest examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from edgefl.core.errors import NotFoundError
from edgefl.device.collect.file_store import UNLABELLED, list_class_files, list_files, read_file_time
from edgefl.device.collect.forgetting import LABEL, ForgetRequest, iterate_rows
from edgefl.device.collect.store_state import StoreState, read_store_state
from edgefl.system.row_labels import LabelKind, read_row_labels

MAX_VALUES = 50
"""Different texts of a column that counts as one of classes."""
WEAK = "weak label"
NUM_SPANS, NUM_EXAMPLES = 10, 3
_HIDDEN = frozenset({"span", "check"})


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
