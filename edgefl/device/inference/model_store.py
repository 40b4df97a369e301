"""Model store of a device: files by SHA-256, and a state file that names the current one.

The state file is replaced atomically, so a power cut leaves the former or the new model, never a mix. The former
model is kept, for a rollback.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Json
from edgefl.device.file_download import PART_SUFFIX
from edgefl.system.atomic_files import make_private_directory, sync_directory, write_atomic

log = logging.getLogger(__name__)

STATE_FILE = "current.json"
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
STATE_FORMAT = 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedModel:
    """Deployed model: `sha256` names its file, `model` the tensors that it was made from."""

    deployment: str
    sha256: str
    model: str
    task: str
    accuracy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentReport:
    """Result of the last deployment; `state` is fetching, checking, running, refused, failed or reverted."""

    id: str
    state: str
    reason: str | None = None
    accuracy: float | None = None
    former_accuracy: float | None = None
    num_examples: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentState:
    """Persistent state of deployments; `pending` is the one in progress, or interrupted."""

    current: DeployedModel | None = None
    former: DeployedModel | None = None
    report: DeploymentReport | None = None
    pending: str | None = None


class ModelStore:
    """Model folder of a state directory; written by one agent, read by others."""

    def __init__(self, state_dir: Path) -> None:
        self.folder = state_dir / "models"

    @property
    def state_path(self) -> Path:
        return self.folder / STATE_FILE

    def load(self) -> DeploymentState:
        """Returns the stored state; a damaged file counts as none, with a warning."""
        try:
            value = parse_json(self.state_path.read_bytes())
            return _parse_state(value)
        except FileNotFoundError:
            return DeploymentState()
        except (OSError, ValueError, TypeError, AttributeError) as error:
            log.warning("%s is damaged and left aside: %s", self.state_path, error)
            return DeploymentState()

    def save(self, state: DeploymentState) -> None:
        """Replaces the state file, durably.

        Raises:
            StoreError: it cannot be written; the former one stays.
        """
        make_private_directory(self.folder)
        write_atomic(self.state_path, json.dumps({"v": STATE_FORMAT, **asdict(state)}).encode())

    def path(self, model: DeployedModel) -> Path:
        return self.folder / f"{model.sha256}.onnx"

    def activate(self, state: DeploymentState, new: DeployedModel, report: DeploymentReport) -> DeploymentState:
        """Makes `new` the current model and returns the new state; deletes unused files."""
        # A model deployed twice must not replace the former one, which is needed for a rollback.
        former = state.former if state.current and state.current.sha256 == new.sha256 else state.current
        new_state = replace(state, current=new, former=former, report=report, pending=None)
        self.save(new_state)
        self.delete_unused(new_state)
        return new_state

    def roll_back(self, state: DeploymentState, report: DeploymentReport) -> DeploymentState:
        """Reactivates the former model; without one, the board has none."""
        new_state = replace(state, current=state.former, former=None, report=report, pending=None)
        self.save(new_state)
        self.delete_unused(new_state)
        return new_state

    def delete_unused(self, state: DeploymentState, kept_sha256: str | None = None) -> None:
        """Removes model files that the state does not name, except the one being downloaded."""
        if not self.folder.is_dir():
            return
        used_names = {f"{model.sha256}.onnx" for model in (state.current, state.former) if model is not None}
        if kept_sha256 is not None:
            used_names |= {f"{kept_sha256}{PART_SUFFIX}", f"{kept_sha256}.onnx"}
        try:
            for path in self.folder.iterdir():
                if path.suffix in {".onnx", PART_SUFFIX} and path.name not in used_names:
                    path.unlink(missing_ok=True)
            sync_directory(self.folder)
        except OSError as error:
            log.warning("model files that nobody needs stay in %s: %s", self.folder, error)


def report_to_json(state: DeploymentState) -> Json | None:
    """Returns the heartbeat's report of the last deployment; `runs` is the deployment of the current model."""
    if state.report is None:
        return None
    fields = {name: value for name, value in asdict(state.report).items() if value is not None}
    return {**fields, "runs": state.current.deployment if state.current else None}


def _parse_state(value: Mapping[str, Any]) -> DeploymentState:
    if value.get("v") != STATE_FORMAT:
        raise ValueError(f"format {value.get('v')!r}, this program reads {STATE_FORMAT}")
    current, former = (_parse_record(DeployedModel, value.get(name)) for name in ("current", "former"))
    report, pending = _parse_record(DeploymentReport, value.get("report")), value.get("pending")
    for model in (current, former):
        if model is not None and not _SHA256.match(model.sha256):
            raise ValueError(f"no SHA-256: {model.sha256[:80]!r}")
    if pending is not None and not isinstance(pending, str):
        raise TypeError(f"pending must be a text, got {pending!r:.40}")
    return DeploymentState(current=current, former=former, report=report, pending=pending)


def _parse_record(cls: type[T], value: Mapping[str, Any] | None) -> T | None:
    if value is None:
        return None
    field_names = {item.name for item in fields(cls)}  # type: ignore[arg-type]  # both are dataclasses
    if nested := [name for name in field_names if isinstance(value.get(name), dict | list)]:
        raise TypeError(f"{nested[0]} must be a plain value")
    return cls(**{name: item for name, item in value.items() if name in field_names})
