"""Model store of a device: files by SHA-256, and a state file that names the current one.

The state file is replaced atomically, so a power cut leaves the former or the new model, never a mix. The former
model is kept, for a rollback.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgefl.core.safe_parsing import SHA256, parse_json, parse_record
from edgefl.core.types import Json
from edgefl.device.rollouts.client import RolloutReport
from edgefl.system.atomic_files import make_private_directory, write_atomic

log = logging.getLogger(__name__)

STATE_FILE = "current.json"
STATE_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedModel:
    """Deployed model: `sha256` names its file, `model` the tensors that it was made from."""

    deployment: str
    sha256: str
    model: str
    task: str
    accuracy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentState:
    """Persistent state of deployments."""

    current: DeployedModel | None = None
    former: DeployedModel | None = None
    report: RolloutReport | None = None


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

    def activate(self, state: DeploymentState, new: DeployedModel, report: RolloutReport) -> DeploymentState:
        """Makes `new` the current model and returns the new state."""
        # A model deployed twice must not replace the former one, which is needed for a rollback.
        former = state.former if state.current and state.current.sha256 == new.sha256 else state.current
        new_state = DeploymentState(current=new, former=former, report=report)
        self.save(new_state)
        return new_state

    def roll_back(self, state: DeploymentState, report: RolloutReport) -> DeploymentState:
        """Reactivates the former model; without one, the board has none."""
        new_state = DeploymentState(current=state.former, report=report)
        self.save(new_state)
        return new_state


def report_to_json(state: DeploymentState) -> Json | None:
    """Returns the heartbeat's report of the last deployment; `runs` is the deployment of the current model."""
    if state.report is None:
        return None
    return {**state.report.to_json(), "runs": state.current.deployment if state.current else None}


def _parse_state(value: Mapping[str, Any]) -> DeploymentState:
    if value.get("v") != STATE_FORMAT:
        raise ValueError(f"format {value.get('v')!r}, this program reads {STATE_FORMAT}")
    current, former = (parse_record(DeployedModel, value.get(name)) for name in ("current", "former"))
    report = parse_record(RolloutReport, value.get("report"))
    for model in (current, former):
        if model is not None and not SHA256.match(model.sha256):
            raise ValueError(f"no SHA-256: {model.sha256[:80]!r}")
    return DeploymentState(current=current, former=former, report=report)
