"""The files that devices fetch: made from a run's model, named by their SHA-256, let go when nobody needs them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from edgefl.errors import UsageError
from edgefl.files import make_private_directory, sha256_of_file, sync_directory
from edgefl.protocol import MAX_MODEL_BYTES
from edgefl.storage.deployment_records import DeploymentRecord
from edgefl.types import Scalar

SUFFIX = ".onnx"

Export = Callable[[str, Mapping[str, Scalar], Path, Path], None]
"""(task, its options, safetensors file, ONNX file to write)."""


def make_file(
    record: DeploymentRecord, export: Export, *, models: Path, folder: Path, max_bytes: int = MAX_MODEL_BYTES
) -> tuple[str, int]:
    """Returns SHA-256 and size of the file for devices, once it is durable under its name.

    Raises:
        UsageError: devices would not take it: it is too large.
        EdgeflError: it cannot be made; the exporter says why.
    """
    make_private_directory(folder)
    made = folder / f".{record.deployment_id}{SUFFIX}"
    made.unlink(missing_ok=True)  # what a coordinator that was killed left behind
    try:
        export(record.task, dict(record.options), models / f"{record.model}.safetensors", made)
        sha256, num_bytes = sha256_of_file(made), made.stat().st_size
        if num_bytes > max_bytes:
            raise UsageError(f"its file has {num_bytes} bytes, devices take {max_bytes} at most")
        with made.open("rb+") as file:
            os.fsync(file.fileno())
        made.replace(folder / f"{sha256}{SUFFIX}")
    finally:
        made.unlink(missing_ok=True)
    sync_directory(folder)
    return sha256, num_bytes


def prune_files(folder: Path, keep: Collection[str]) -> None:
    """Removes the files of all models but those whose SHA-256 is in `keep`, and those that are being made."""
    for path in folder.glob(f"[!.]*{SUFFIX}"):
        if path.stem not in keep:
            path.unlink(missing_ok=True)
