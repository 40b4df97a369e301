"""Deployment files: exported from a run's model, named by their SHA-256, pruned when unused."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from edgefl.core.errors import UsageError
from edgefl.core.protocol import MAX_MODEL_BYTES
from edgefl.core.types import Scalar
from edgefl.storage.repositories.deployment_records import DeploymentRecord
from edgefl.system.atomic_files import compute_sha256, make_private_directory, sync_directory

SUFFIX = ".onnx"

ExportModel = Callable[[str, Mapping[str, Scalar], Path, Path], None]
"""(task, its options, safetensors file, ONNX file to write)."""


def make_deployment_file(
    record: DeploymentRecord, export: ExportModel, *, models: Path, folder: Path, max_bytes: int = MAX_MODEL_BYTES
) -> tuple[str, int]:
    """Exports the file for devices, durably, and returns its SHA-256 and size.

    Raises:
        UsageError: it is too large for devices.
        EdgeflError: the export failed.
    """
    make_private_directory(folder)
    temporary_file = folder / f".{record.deployment_id}{SUFFIX}"
    temporary_file.unlink(missing_ok=True)  # left over from a killed coordinator
    try:
        export(record.task, dict(record.options), models / f"{record.model}.safetensors", temporary_file)
        sha256, num_bytes = compute_sha256(temporary_file), temporary_file.stat().st_size
        if num_bytes > max_bytes:
            raise UsageError(f"its file has {num_bytes} bytes, devices take {max_bytes} at most")
        with temporary_file.open("rb+") as file:
            os.fsync(file.fileno())
        temporary_file.replace(folder / f"{sha256}{SUFFIX}")
    finally:
        temporary_file.unlink(missing_ok=True)
    sync_directory(folder)
    return sha256, num_bytes


def prune_deployment_files(folder: Path, keep: Collection[str]) -> None:
    """Removes all complete files but those whose SHA-256 is in `keep`."""
    for path in folder.glob(f"[!.]*{SUFFIX}"):
        if path.stem not in keep:
            path.unlink(missing_ok=True)
