"""The models that a device has deployed: files by SHA-256, and one note that says which of them is the current one.

The note is replaced as a whole, so a power cut leaves the model before or the new one, never half of each. The model
before is kept, for the way back.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from edgefl.device.file_fetch import PART_SUFFIX
from edgefl.files import make_private_directory, sync_directory, write_whole
from edgefl.types import Json
from edgefl.untrusted import parse_json

log = logging.getLogger(__name__)

NOTE = "current.json"
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
FORMAT = 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedModel:
    """One model on the board: `sha256` names its file, `model` the tensors that it was made from."""

    deployment: str
    sha256: str
    model: str
    task: str
    accuracy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of the last deployment; `state` is fetching, checking, running, refused, failed or reverted."""

    id: str
    state: str
    reason: str | None = None
    accuracy: float | None = None
    former_accuracy: float | None = None
    num_examples: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """All that the board remembers. `pending` is the deployment that it is at, or was when the power went."""

    current: DeployedModel | None = None
    former: DeployedModel | None = None
    report: Report | None = None
    pending: str | None = None


class ModelStore:
    """The folder `models` of a state directory; one agent writes it, others read it."""

    def __init__(self, state_dir: Path) -> None:
        self.folder = state_dir / "models"

    @property
    def note_path(self) -> Path:
        return self.folder / NOTE

    def read(self) -> Note:
        """Returns what the board remembers; a damaged note counts as none, with a warning."""
        try:
            value = parse_json(self.note_path.read_bytes())
            return _note(value)
        except FileNotFoundError:
            return Note()
        except (OSError, ValueError, TypeError, AttributeError) as error:
            log.warning("%s is damaged and left aside: %s", self.note_path, error)
            return Note()

    def write(self, note: Note) -> None:
        """Replaces the note, durably.

        Raises:
            StoreError: it cannot be written; the one before stays.
        """
        make_private_directory(self.folder)
        write_whole(self.note_path, json.dumps({"v": FORMAT, **asdict(note)}).encode())

    def path(self, model: DeployedModel) -> Path:
        return self.folder / f"{model.sha256}.onnx"

    def switch(self, note: Note, new: DeployedModel, report: Report) -> Note:
        """Makes `new` the current model and returns the note that says so; files that nobody needs any more go."""
        # Deployed twice over, a model must not push the one before out: that is the way back.
        former = note.former if note.current and note.current.sha256 == new.sha256 else note.current
        switched = replace(note, current=new, former=former, report=report, pending=None)
        self.write(switched)
        self.prune(switched)
        return switched

    def go_back(self, note: Note, report: Report) -> Note:
        """Makes the model before the current one again; without one, the board has none."""
        reverted = replace(note, current=note.former, former=None, report=report, pending=None)
        self.write(reverted)
        self.prune(reverted)
        return reverted

    def prune(self, note: Note, keep: str | None = None) -> None:
        """Removes files of models that the note does not name, but for parts of the one that is being fetched."""
        if not self.folder.is_dir():
            return
        named = {f"{model.sha256}.onnx" for model in (note.current, note.former) if model is not None}
        if keep is not None:
            named |= {f"{keep}{PART_SUFFIX}", f"{keep}.onnx"}
        try:
            for path in self.folder.iterdir():
                if path.suffix in {".onnx", PART_SUFFIX} and path.name not in named:
                    path.unlink(missing_ok=True)
            sync_directory(self.folder)
        except OSError as error:
            log.warning("model files that nobody needs stay in %s: %s", self.folder, error)


def report_json(note: Note) -> Json | None:
    """Returns what heartbeats say of the last deployment; `runs` is the one whose model is the current one."""
    if note.report is None:
        return None
    told = {name: value for name, value in asdict(note.report).items() if value is not None}
    return {**told, "runs": note.current.deployment if note.current else None}


def _note(value: Mapping[str, Any]) -> Note:
    if value.get("v") != FORMAT:
        raise ValueError(f"format {value.get('v')!r}, this program reads {FORMAT}")
    current, former = (_made(DeployedModel, value.get(name)) for name in ("current", "former"))
    report, pending = _made(Report, value.get("report")), value.get("pending")
    for model in (current, former):
        if model is not None and not _SHA256.match(model.sha256):
            raise ValueError(f"no SHA-256: {model.sha256[:80]!r}")
    if pending is not None and not isinstance(pending, str):
        raise TypeError(f"pending must be a text, got {pending!r:.40}")
    return Note(current=current, former=former, report=report, pending=pending)


def _made(cls: type[T], value: Mapping[str, Any] | None) -> T | None:
    if value is None:
        return None
    known = {item.name for item in fields(cls)}  # type: ignore[arg-type]  # both are dataclasses
    if nested := [name for name in known if isinstance(value.get(name), dict | list)]:
        raise TypeError(f"{nested[0]} must be a plain value")
    return cls(**{name: item for name, item in value.items() if name in known})
