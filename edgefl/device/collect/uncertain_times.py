"""Times of rows that the deployed model was least certain of when it answered: a person is asked about them first.

The rows themselves are the collector's. Beside them `.uncertain.json` names times, the model's class and its margin:
at most `max_uncertain`, the least certain ones, and of times that overlap the least certain. A crash loses what is
not written yet.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from edgefl.core.errors import StoreError
from edgefl.core.safe_parsing import parse_message
from edgefl.device.collect.settings import MAX_UNCERTAIN, is_label
from edgefl.system.atomic_files import write_atomic

UNCERTAIN_NAME, UNCERTAIN_FORMAT = ".uncertain.json", 1
MAX_BYTES = 1024 * MAX_UNCERTAIN
"""A label has up to 255 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UncertainTime:
    """Times of the first and last row of an example, and what the model said of it."""

    since_s: float
    until_s: float
    label: str
    probability: float
    margin: float


def add_uncertain(times: list[UncertainTime], new: UncertainTime, max_count: int) -> list[UncertainTime]:
    """Returns the least certain of times and a new one, at most so many; of overlapping ones the least certain."""
    near = [one for one in times if one.until_s >= new.since_s and one.since_s <= new.until_s]
    if any(one.margin <= new.margin for one in near):
        return times
    kept = [*(one for one in times if one not in near), new]
    if len(kept) > max_count:
        kept.remove(max(kept, key=lambda one: one.margin))
    return kept


def read_uncertain_times(folder: Path, max_count: int = MAX_UNCERTAIN) -> list[UncertainTime]:
    """Returns the times of a shard, of too many the least certain; none without a file, or of a damaged one.

    Raises:
        StoreError: it cannot be read.
    """
    try:
        with (folder / UNCERTAIN_NAME).open("rb") as file:
            value = parse_message(file.read(MAX_BYTES))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{folder / UNCERTAIN_NAME} cannot be read: {error.strerror}") from None
    except ValueError:
        return []
    entries = value.get("times") if isinstance(value, Mapping) and value.get("v") == UNCERTAIN_FORMAT else None
    times = list[UncertainTime]()
    for entry in entries[:MAX_UNCERTAIN] if isinstance(entries, list) else ():
        if (time := _parse_time(entry)) is not None:
            times = add_uncertain(times, time, max_count)
    return times


def save_uncertain_times(folder: Path, times: list[UncertainTime]) -> None:
    """Replaces the times of a shard; raises `StoreError` where that cannot be written."""
    value = {"v": UNCERTAIN_FORMAT, "times": [asdict(time) for time in times]}
    write_atomic(folder / UNCERTAIN_NAME, json.dumps(value, ensure_ascii=False).encode())


def forget_uncertain_times(folder: Path) -> None:
    """Removes the file, which names times of rows that may go; errors of the operating system propagate."""
    (folder / UNCERTAIN_NAME).unlink(missing_ok=True)


def _parse_time(entry: object) -> UncertainTime | None:
    if not isinstance(entry, Mapping):
        return None
    numbers = [entry.get(name) for name in ("since_s", "until_s", "probability", "margin")]
    label = entry.get("label")
    if not isinstance(label, str) or not is_label(label):
        return None
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        return None
    since_s, until_s, probability, margin = (float(number) for number in numbers if isinstance(number, int | float))
    return UncertainTime(since_s=since_s, until_s=until_s, label=label, probability=probability, margin=margin)
