"""Files for devices: whole under their name or not there, and not kept for ever."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from edgefl.coordinator.rollouts.deployment_files import make_deployment_file, prune_deployment_files
from edgefl.core.errors import TaskError, UsageError
from edgefl.storage.repositories.deployment_records import DeploymentRecord, RolloutStatus

RECORD = DeploymentRecord(
    deployment_id="d1", run_id="r", model="ab" * 32, task="digits", options={"model": "mlp"}, devices=None, canary=0,
    canary_s=60.0, tolerance=0.02, min_accuracy=0.0, test_fraction=0.1, status=RolloutStatus.PREPARING,
    created_at=1.0,
)  # fmt: skip


def export(task: str, options: Mapping[str, Any], model: Path, out: Path) -> None:
    out.write_text(f"{task} {dict(options)} {model.name}")


def broken(_task: str, _options: Mapping[str, Any], _model: Path, out: Path) -> None:
    out.write_text("half")
    raise TaskError("torch is not installed")


def test_the_file_is_named_by_its_content(tmp_path: Path) -> None:
    (tmp_path / ".d1.onnx").write_text("left behind")
    sha256, size = make_deployment_file(RECORD, export, models=tmp_path / "models", folder=tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.read_text() == f"digits {{'model': 'mlp'}} {'ab' * 32}.safetensors"
    assert (path.name, size) == (f"{sha256}.onnx", path.stat().st_size)
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_cannot_be_made_or_is_too_large_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="torch is not installed"):
        make_deployment_file(RECORD, broken, models=tmp_path, folder=tmp_path)
    with pytest.raises(UsageError, match="devices take 10 at most"):
        make_deployment_file(RECORD, export, models=tmp_path, folder=tmp_path, max_bytes=10)
    assert list(tmp_path.iterdir()) == []


def test_files_that_nobody_needs_go_and_those_being_made_stay(tmp_path: Path) -> None:
    for name in ("aa", "bb", ".d2"):
        (tmp_path / f"{name}.onnx").write_text("x")
    prune_deployment_files(tmp_path, {"aa"})
    assert {path.name for path in tmp_path.iterdir()} == {"aa.onnx", ".d2.onnx"}
