"""Export of the history: a folder per run with a JSON summary and its rows, as CSV or Parquet."""

from __future__ import annotations

import csv
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from edgefl.core.errors import DataError, StoreError, UsageError
from edgefl.core.safe_text import dump_readable_json, format_csv_cell
from edgefl.core.types import Json
from edgefl.history.tables import write_parquet
from edgefl.storage.queries.columns import COLUMNS, get_columns

FORMAT_VERSION = 1
MARKER_FILE = "export.json"
MAX_BUFFERED_ROWS = 2_000
PARTIAL_SUFFIX = ".partial"
DEVICE_FILE_COLUMNS = tuple(name for name in COLUMNS["updates"] if name not in {"run_id", "device_id"})
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
_AGGREGATE_KINDS = ("traffic", "dropouts", "stale", "energy")

PageReader = Callable[[str, Mapping[str, Any]], Iterator[list[Json]]]
"""(kind, filters) -> pages of history rows, oldest first."""


def export_history(
    read_pages: PageReader, directory: Path, *, run: str | None = None, replace: bool = False, suffix: str = ".csv"
) -> list[str]:
    """Exports runs and returns their ids; a failed export leaves nothing behind.

    Args:
        read_pages: source of the history.
        directory: the new folder.
        run: one run, as in `find_run_id`; all when None.
        replace: whether an earlier export in `directory` is replaced.
        suffix: of the files, `.csv` or `.parquet`. As CSV each device has a file of its updates, as Parquet each run.

    Raises:
        MissingPackageError: pyarrow is not installed, for Parquet.
        UsageError: `directory` is not empty.
        StoreError: it cannot be written.
    """
    _check_directory_free(directory, replace=replace)
    partial = directory.with_name(directory.name + PARTIAL_SUFFIX)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        run_ids = _write_export(read_pages, partial, run, suffix)
        if directory.exists():
            shutil.rmtree(directory)
        partial.rename(directory)
    except OSError as error:
        raise StoreError(f"cannot write {directory}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return run_ids


def _check_directory_free(directory: Path, *, replace: bool) -> None:
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not (directory / MARKER_FILE).is_file():
        raise UsageError(f"{directory} is no export of the history; name a new folder")
    if not replace:
        raise UsageError(f"{directory} holds an export already; --force replaces it")


def _write_export(read_pages: PageReader, directory: Path, run: str | None, suffix: str) -> list[str]:
    filters = {"run": run}
    runs = [row for page in read_pages("runs", filters) for row in page]
    for row in runs:
        _write_run(read_pages, directory / check_file_name(row["run_id"]), row, suffix)
    if run is None:
        for kind in ("heartbeats", "events"):
            _write_rows(directory, kind, read_pages(kind, {}), suffix)
    run_ids = [str(row["run_id"]) for row in runs]
    _write_json(directory / MARKER_FILE, {"v": FORMAT_VERSION, "runs": run_ids})
    return run_ids


def _write_run(read_pages: PageReader, directory: Path, run: Json, suffix: str) -> None:
    directory.mkdir()
    filters = {"run": run["run_id"]}
    devices: dict[str, Json] = defaultdict(dict)
    for kind in _AGGREGATE_KINDS:
        for row in (row for page in read_pages(kind, filters) for row in page):
            devices[row["device_id"]] |= {name: row[name] for name in get_columns(kind, "device")}
    _write_json(
        directory / "summary.json",
        {"v": FORMAT_VERSION, **run, "devices": list(devices.values())},
    )
    for kind in ("rounds", "accuracy", "evaluations", "heartbeats", "events"):
        _write_rows(directory, kind, read_pages(kind, filters), suffix)
    if suffix == ".csv":
        (directory / "devices").mkdir()
        _write_devices(directory / "devices", read_pages("updates", filters))
    else:
        _write_rows(directory, "updates", read_pages("updates", filters), suffix)


def _write_devices(directory: Path, pages: Iterator[list[Json]]) -> None:
    """Writes one file per device; rows are buffered, since a thousand files cannot be open at once."""
    buffered: dict[str, list[Json]] = defaultdict(list)
    for page in pages:
        for row in page:
            buffered[row["device_id"]].append(row)
        if sum(map(len, buffered.values())) >= MAX_BUFFERED_ROWS:
            _append_device_rows(directory, buffered)
    _append_device_rows(directory, buffered)


def _append_device_rows(directory: Path, buffered: dict[str, list[Json]]) -> None:
    for device_id, rows in buffered.items():
        path = directory / f"{check_file_name(device_id)}.csv"
        is_new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            if is_new:
                writer.writerow(DEVICE_FILE_COLUMNS)
            writer.writerows([format_csv_cell(row[name]) for name in DEVICE_FILE_COLUMNS] for row in rows)
    buffered.clear()


def _write_rows(directory: Path, kind: str, pages: Iterator[list[Json]], suffix: str) -> None:
    path, columns = directory / f"{kind}{suffix}", COLUMNS[kind]
    if suffix == ".parquet":
        write_parquet(path, columns, kind, pages)
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for page in pages:
            writer.writerows([format_csv_cell(row[name]) for name in columns] for row in page)


def _write_json(path: Path, value: Json) -> None:
    path.write_text(dump_readable_json(value, indent=2) + "\n", encoding="utf-8")


def check_file_name(name: str) -> str:
    """Returns a run or device id as a safe file name: an untrusted coordinator might send a path."""
    if not _SAFE_NAME.match(name):
        raise DataError(f"{name!r:.80} is no name of a run or device, so no file can be called so")
    return name
