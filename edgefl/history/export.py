"""The history as files: a folder per run with a JSON summary, its rounds, and one CSV file per device."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgefl.errors import DataError, StoreError, UsageError
from edgefl.storage.columns import COLUMNS, columns_of
from edgefl.types import Json

FORMAT = 1
MARKER = "export.json"
BUFFERED_ROWS = 2_000
PARTIAL_SUFFIX = ".partial"
OF_DEVICE = tuple(name for name in COLUMNS["updates"] if name not in {"run_id", "device_id"})
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_FIGURES = ("traffic", "dropouts", "stale", "energy")

Pages = Callable[[str, Mapping[str, Any]], Iterator[list[Json]]]
"""Gives the rows of a kind of history for filters, page by page, oldest first."""


def export_history(pages: Pages, directory: Path, *, run: str | None = None, replace: bool = False) -> list[str]:
    """Returns the ids of the runs that were written; nothing is left behind when that fails.

    Args:
        pages: where the history comes from.
        directory: the new folder.
        run: one run, as `find_run` has it; all when None.
        replace: an earlier export in `directory` goes.

    Raises:
        UsageError: there is something in `directory` already.
        StoreError: it cannot be written.
    """
    _check_free(directory, replace=replace)
    partial = directory.with_name(directory.name + PARTIAL_SUFFIX)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        run_ids = _write(pages, partial, run)
        if directory.exists():
            shutil.rmtree(directory)
        partial.rename(directory)
    except OSError as error:
        raise StoreError(f"cannot write {directory}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return run_ids


def _check_free(directory: Path, *, replace: bool) -> None:
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not (directory / MARKER).is_file():
        raise UsageError(f"{directory} is no export of the history; name a new folder")
    if not replace:
        raise UsageError(f"{directory} holds an export already; --force replaces it")


def _write(pages: Pages, directory: Path, run: str | None) -> list[str]:
    chosen = {"run": run}
    runs = [row for page in pages("runs", chosen) for row in page]
    for row in runs:
        _write_run(pages, directory / _file_name(row["run_id"]), row)
    if run is None:
        for kind in ("heartbeats", "events"):
            _write_csv(directory / f"{kind}.csv", COLUMNS[kind], pages(kind, {}))
    run_ids = [str(row["run_id"]) for row in runs]
    _write_json(directory / MARKER, {"v": FORMAT, "runs": run_ids})
    return run_ids


def _write_run(pages: Pages, directory: Path, run: Json) -> None:
    (directory / "devices").mkdir(parents=True)
    chosen = {"run": run["run_id"]}
    devices: dict[str, Json] = defaultdict(dict)
    for kind in _FIGURES:
        for row in (row for page in pages(kind, chosen) for row in page):
            devices[row["device_id"]] |= {name: row[name] for name in columns_of(kind, "device")}
    _write_json(
        directory / "summary.json",
        {"v": FORMAT, **run, "devices": list(devices.values())},
    )
    for kind in ("rounds", "accuracy", "evaluations", "heartbeats", "events"):
        _write_csv(directory / f"{kind}.csv", COLUMNS[kind], pages(kind, chosen))
    _write_devices(directory / "devices", pages("updates", chosen))


def _write_devices(directory: Path, pages: Iterator[list[Json]]) -> None:
    """Writes one file per device; rows are gathered, since a thousand files cannot be open at once."""
    waiting: dict[str, list[Json]] = defaultdict(list)
    for page in pages:
        for row in page:
            waiting[row["device_id"]].append(row)
        if sum(map(len, waiting.values())) >= BUFFERED_ROWS:
            _append(directory, waiting)
    _append(directory, waiting)


def _append(directory: Path, waiting: dict[str, list[Json]]) -> None:
    for device_id, rows in waiting.items():
        path = directory / f"{_file_name(device_id)}.csv"
        is_new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            if is_new:
                writer.writerow(OF_DEVICE)
            writer.writerows([_cell(row[name]) for name in OF_DEVICE] for row in rows)
    waiting.clear()


def _write_csv(path: Path, columns: Sequence[str], pages: Iterator[list[Json]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for page in pages:
            writer.writerows([_cell(row[name]) for name in columns] for row in page)


def _write_json(path: Path, value: Json) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping | list) else value


def _file_name(name: str) -> str:
    """Returns a run's or a device's id, which a coordinator that cannot be trusted might have made a path."""
    if not _SAFE_NAME.match(name):
        raise DataError(f"{name!r:.80} is no name of a run or device, so no file can be called so")
    return name
