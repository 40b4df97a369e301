"""Durable records of a site's rounds: journal and answer of each, and which updates of boards upstream has used."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgefl.compression.error_feedback import MAX_PENDING
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Json
from edgefl.system.atomic_files import make_private_directory, write_atomic

log = logging.getLogger(__name__)

REPLY_FILE, JOURNAL_FOLDER, INDEX_FILE = "reply", "journal", "index.json"
MAX_KEPT_RUNS, MAX_KEPT_NAMES = 16, 64
"""Runs of which something is known, and assignments of which is known that they were used, or end early."""
_USED = "used"
"""Of an answer on disk: board -> its assignment whose update is in it."""


def compute_identity(header: Json) -> str:
    """Returns what tells an instruction from every other one of its coordinator: 24 hexadecimal digits.

    A coordinator whose store was rolled back uses assignments' names again, in another lineage or for another model.
    """
    parts = [header.get(name) for name in ("lineage", "assignment", "version", "model_sha256")]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """What is kept of a round: a folder with the journal, and with the answer once that is complete.

    Attributes:
        path: of the folder.
        identity: of the instruction; see `compute_identity`.
    """

    path: Path
    identity: str

    @classmethod
    def open(cls, folder: Path, header: Json) -> RoundRecord:
        """Returns the record of an instruction; of other work under its name nothing stays."""
        identity = compute_identity(header)
        name = _hash_name(str(header.get("assignment")))
        for path in folder.glob(f"{name}-*"):
            is_same_work = path.name == f"{name}-{identity}" or header.get("model_sha256") is None
            if is_same_work:
                return cls(path=path, identity=path.name.partition("-")[2])
            shutil.rmtree(path)
        path = folder / f"{name}-{identity}"
        make_private_directory(path)
        return cls(path=path, identity=identity)

    def load_reply(self) -> tuple[Json, bytes] | None:
        """Returns the answer, None where the round is not complete."""
        loaded = load_content(self.path / REPLY_FILE)
        return None if loaded is None else (loaded[0]["reply"], loaded[1])

    def save_reply(self, reply: tuple[Json, bytes], used: Mapping[str, str]) -> None:
        """Writes the answer, durably, and removes the journal: `used` are the boards' assignments that are in it."""
        content, body = reply
        save_content(self.path / REPLY_FILE, {"reply": content, _USED: dict(used)}, body)
        shutil.rmtree(self.path / JOURNAL_FOLDER, ignore_errors=True)


@dataclass(slots=True, kw_only=True)
class RoundIndex:
    """Durable index of a site's rounds: their order, and by run the boards' newest updates that upstream has used.

    A board that was away for long has to be told of its own newest two; the answers that they are in are gone then.

    Attributes:
        folder: of the rounds.
        rounds: names of their folders, the newest last.
        runs: by run, the newest last: `seen`, folders of used answers, and `boards`, the assignments by board.
        unsaved: by folder, what would be in an answer that could not be written.
    """

    folder: Path
    rounds: list[str] = field(default_factory=list)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    unsaved: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> RoundIndex:
        path = folder / INDEX_FILE
        try:
            content = parse_json(path.read_text())
            runs = {
                str(run): {
                    "seen": [str(name) for name in row["seen"]],
                    "boards": {str(board): [str(own) for own in names] for board, names in row["boards"].items()},
                }
                for run, row in content["runs"].items()
            }
            return cls(folder=folder, rounds=[str(name) for name in content["rounds"]], runs=runs)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s is damaged and begins anew: %s", path, error)
        return cls(folder=folder)

    def add_round(self, record: RoundRecord, header: Json) -> dict[str, list[str]]:
        """Adds a round, durably; returns by board its newest assignments whose updates upstream has used.

        Raises:
            StoreError: the index cannot be written.
        """
        run_id = str(header["run"])
        row = self.runs[run_id] = self.runs.pop(run_id, {"seen": [], "boards": {}})
        for assignment in header.get("used_assignments", ()):
            for path in self.folder.glob(f"{_hash_name(str(assignment))}-*"):
                self._add_used(row, path)
        self.rounds = [*(name for name in self.rounds if name != record.path.name), record.path.name]
        self.rounds, row["seen"] = self.rounds[-MAX_KEPT_NAMES:], row["seen"][-MAX_KEPT_NAMES:]
        self.runs = dict([*self.runs.items()][-MAX_KEPT_RUNS:])
        content = {"v": 1, "rounds": self.rounds, "runs": self.runs}
        write_atomic(self.folder / INDEX_FILE, json.dumps(content).encode())
        return self.get_used(run_id)

    def get_used(self, run_id: str) -> dict[str, list[str]]:
        """Returns by board its newest assignments whose updates upstream has used."""
        boards = self.runs.get(run_id, {}).get("boards", {})
        return {board: list(names) for board, names in boards.items()}

    def _add_used(self, row: dict[str, Any], path: Path) -> None:
        loaded = None if path.name in row["seen"] else load_content(path / REPLY_FILE)
        shares = self.unsaved.get(path.name) if loaded is None else loaded[0][_USED]
        if path.name in row["seen"] or shares is None:
            return
        row["seen"].append(path.name)
        for board, own in shares.items():
            row["boards"][board] = [*row["boards"].get(board, ()), own][-MAX_PENDING:]


def _hash_name(assignment: str) -> str:
    return hashlib.sha256(assignment.encode()).hexdigest()[:24]


def save_content(path: Path, line: Json, body: bytes) -> None:
    """Writes a line of JSON, which gets the digest of the body, and the body, durably.

    Raises:
        StoreError: the disk is full.
    """
    content = {"v": 1, **line, "sha256": hashlib.sha256(body).hexdigest()}
    write_atomic(path, json.dumps(content).encode() + b"\n" + body)


def load_content(path: Path) -> tuple[Json, bytes] | None:
    """Returns the line and the body that `save_content` wrote; None where there is none that is whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    line, _, body = content.partition(b"\n")
    try:
        header = parse_json(line.decode())
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("sha256") != hashlib.sha256(body).hexdigest():
        log.warning("%s is damaged; the round goes on without it", path)
        return None
    return header, body
