"""Checkpoints: a state in a file named by its SHA-256, and a small note that names it.

The note is written after the file is durable, so a crash leaves the checkpoint before. Model files (the product of
a run, without its strategy's state) lie beside them under their own SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from edgefl.errors import JournalError, NotFoundError, NotKeptError, StoreTooNewError
from edgefl.files import TEMPORARY_SUFFIX, make_private_directory, sha256_of_file, sync_directory, write_whole
from edgefl.storage.formats import check_format
from edgefl.storage.state_files import pack_model, pack_state, unpack_model, unpack_state
from edgefl.types import Array, Tensors
from edgefl.untrusted import parse_json

log = logging.getLogger(__name__)

T = TypeVar("T")

FORMAT = 1
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_STATE_SUFFIX = ".safetensors"
_NOTE_SUFFIX = ".checkpoint.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A saved state; it contains the journal up to `last_record`.

    `standing` names a second file beside it, with what else a run needs to go on exactly there; empty for none.
    """

    sha256: str
    last_record: int
    bytes_file: int
    standing: str = ""


def save_state(directory: Path, state: Any, last_record: int, standing: Any = None) -> Checkpoint:
    """Returns the new checkpoint once it is durable; `standing` is another dataclass, saved beside the state.

    A standing that would not come back the same is left out: the run goes on from its state alone.

    Raises:
        NotKeptError: the state holds something that would not come back the same.
        StoreFullError: no room; the checkpoints before are untouched.
    """
    content, beside = pack_state(state), _packed_standing(standing)
    saved = Checkpoint(
        sha256=_write_named(directory, content),
        last_record=last_record,
        bytes_file=len(content),
        standing="" if beside is None else _write_named(directory, beside),
    )
    note = json.dumps({"v": FORMAT, **asdict(saved)}).encode()
    write_whole(directory / f"{last_record:020d}{_NOTE_SUFFIX}", note)
    return saved


def _packed_standing(standing: Any) -> bytes | None:
    try:
        return None if standing is None else pack_state(standing)
    except NotKeptError as error:
        log.error("a checkpoint has its state alone: %s", error)  # noqa: TRY400 a line for the operator
        return None


def load_state(directory: Path, cls: type[T], checkpoint: Checkpoint | None = None) -> T:
    """Returns the state of a checkpoint, by default the newest.

    Raises:
        NotFoundError: there is no checkpoint.
        JournalError: its file is missing or damaged, or holds another class; `checkpoints` names the one before.
        StoreTooNewError: a newer edgefl wrote it.
    """
    if checkpoint is None:
        saved = checkpoints(directory)
        if not saved:
            raise NotFoundError(f"no checkpoint in {directory}")
        checkpoint = saved[0]
    path = _named(directory, checkpoint.sha256)
    content = _read_named(path, f"checkpoint of record {checkpoint.last_record}")
    with _named_in_errors(f"checkpoint {path}"):
        return unpack_state(content, cls)


def load_standing(directory: Path, cls: type[T], checkpoint: Checkpoint) -> T:
    """Returns what was saved beside a state.

    Raises:
        JournalError: its file is missing or damaged, or holds another class.
    """
    path = _named(directory, checkpoint.standing)
    content = _read_named(path, f"standing of record {checkpoint.last_record}")
    with _named_in_errors(f"checkpoint {path}"):
        return unpack_state(content, cls)


def checkpoints(directory: Path) -> list[Checkpoint]:
    """Returns the checkpoints of a run, newest first; a damaged one is left out, with a warning.

    Raises:
        StoreTooNewError: a newer edgefl wrote one of them.
    """
    notes = sorted(directory.glob(f"*{_NOTE_SUFFIX}"), reverse=True) if directory.is_dir() else []
    return [checkpoint for path in notes if (checkpoint := _read_note(path)) is not None]


def checkpoint_files(directory: Path, checkpoint: Checkpoint) -> list[Path]:
    """Returns the files of a checkpoint, whether they are there or not."""
    return [_named(directory, name) for name in (checkpoint.sha256, checkpoint.standing) if name]


def is_whole(path: Path) -> bool:
    """Returns whether a file that is named by its SHA-256 is there and holds that."""
    return path.is_file() and sha256_of_file(path) == path.stem


def prune_checkpoints(directory: Path, *, keep: int = 2) -> list[Checkpoint]:
    """Returns the checkpoints that stay: the newest `keep`.

    Files that no note names go; models that shall stay belong into a directory of their own.
    """
    saved = checkpoints(directory)
    kept, old = saved[:keep], saved[keep:]
    for checkpoint in old:
        (directory / f"{checkpoint.last_record:020d}{_NOTE_SUFFIX}").unlink()
    sync_directory(directory)
    named = {name for checkpoint in kept for name in (checkpoint.sha256, checkpoint.standing)}
    for path in directory.iterdir():
        if path.suffix == TEMPORARY_SUFFIX or (path.suffix == _STATE_SUFFIX and path.stem not in named):
            path.unlink()
    return kept


def save_model(directory: Path, model: Tensors) -> tuple[str, Path]:
    """Returns SHA-256 and path of the model's file, once it is durable: plain safetensors, for any program."""
    sha256 = _write_named(directory, pack_model(model))
    return sha256, _named(directory, sha256)


def load_model_file(path: str | Path) -> dict[str, Array]:
    """Returns the tensors of a safetensors file by name; a file of ours has them in the task's order.

    Raises:
        NotFoundError: there is no such file.
        JournalError: it is damaged; a file that is named by its SHA-256 is checked against it.
    """
    path = Path(path)
    if not path.is_file():
        raise NotFoundError(f"no model file {path}")
    content = _read_named(path, "model") if _SHA256.match(path.stem) else path.read_bytes()
    with _named_in_errors(f"model {path}"):
        return unpack_model(content)


@contextlib.contextmanager
def _named_in_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (JournalError, StoreTooNewError) as error:
        raise type(error)(f"{what}: {error}") from error


def _named(directory: Path, sha256: str) -> Path:
    return directory / f"{sha256}{_STATE_SUFFIX}"


def _write_named(directory: Path, content: bytes) -> str:
    make_private_directory(directory)
    sha256 = hashlib.sha256(content).hexdigest()
    path = _named(directory, sha256)
    if not (path.is_file() and sha256_of_file(path) == sha256):
        write_whole(path, content)
    return sha256


def _read_named(path: Path, what: str) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise JournalError(f"the file of the {what} is missing: {path}") from None
    found = hashlib.sha256(content).hexdigest()
    if found != path.stem:
        raise JournalError(f"the file of the {what} is damaged: {path} has SHA-256 {found[:12]}…, not its name")
    return content


def _read_note(path: Path) -> Checkpoint | None:
    try:
        note = parse_json(path.read_bytes())
        version = note.pop("v")
        check_format(f"checkpoint note {path}", version, FORMAT)
        checkpoint = Checkpoint(**note)
        names = (checkpoint.sha256, *(() if checkpoint.standing == "" else (checkpoint.standing,)))
        if all(_SHA256.match(name) for name in names) and f"{checkpoint.last_record:020d}{_NOTE_SUFFIX}" == path.name:
            return checkpoint
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("checkpoint note %s is damaged and left out: %r", path, error)
        return None
    log.warning("checkpoint note %s names another record, or no file, and is left out", path)
    return None
