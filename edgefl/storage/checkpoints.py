"""Checkpoints: a state in a file named by its SHA-256, and a small manifest that names it.

The manifest is written after the file is durable, so a crash leaves the checkpoint before. Model files (the product
of a run, without its strategy's state) lie beside them under their own SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, TypeVar

from edgefl.core.errors import JournalError, NotFoundError, NotKeptError, StoreTooNewError
from edgefl.core.safe_parsing import SHA256, is_int64, parse_json
from edgefl.core.types import Array, Tensors
from edgefl.storage.state_serialisation import (
    check_format_version,
    decode_model,
    decode_state,
    encode_model,
    encode_state,
)
from edgefl.system.atomic_files import (
    TEMPORARY_SUFFIX,
    compute_sha256,
    make_private_directory,
    sync_directory,
    write_atomic,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_HEADER_BYTES = 1024 * 1024
"""Of a file of one tensor."""

FORMAT_VERSION = 2
_STATE_SUFFIX = ".safetensors"
_MANIFEST_SUFFIX = ".checkpoint.json"
_NO_IDS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A saved state; it contains the journal up to `last_record`.

    `snapshot_sha256` names a second file beside it, the run snapshot needed to resume exactly there; empty for none.
    `newest_update_id`, `newest_evaluation_id` and `newest_event_id` are the run's newest rows in the store by then.
    """

    sha256: str
    last_record: int
    bytes_file: int
    snapshot_sha256: str = ""
    newest_update_id: int = 0
    newest_evaluation_id: int = 0
    newest_event_id: int = 0


def save_state(
    directory: Path, state: Any, last_record: int, run_snapshot: Any = None, newest_ids: Mapping[str, int] = _NO_IDS
) -> Checkpoint:
    """Returns the new checkpoint once it is durable; `run_snapshot` is a dataclass saved beside the state.

    `newest_ids` are the fields of `Checkpoint` of these names.

    A snapshot that does not round-trip is left out: the run resumes from its state alone.

    Raises:
        NotKeptError: the state does not round-trip.
        StoreFullError: no room; the checkpoints before are untouched.
    """
    content, snapshot_content = encode_state(state), _encode_run_snapshot(run_snapshot)
    checkpoint = Checkpoint(
        sha256=_write_content_file(directory, content),
        last_record=last_record,
        bytes_file=len(content),
        snapshot_sha256="" if snapshot_content is None else _write_content_file(directory, snapshot_content),
        **newest_ids,
    )
    manifest = json.dumps({"v": FORMAT_VERSION, **asdict(checkpoint)}).encode()
    write_atomic(directory / f"{last_record:020d}{_MANIFEST_SUFFIX}", manifest)
    return checkpoint


def _encode_run_snapshot(run_snapshot: Any) -> bytes | None:
    try:
        return None if run_snapshot is None else encode_state(run_snapshot)
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
        checkpoints = list_checkpoints(directory)
        if not checkpoints:
            raise NotFoundError(f"no checkpoint in {directory}")
        checkpoint = checkpoints[0]
    return _load_dataclass(directory, checkpoint.sha256, f"checkpoint of record {checkpoint.last_record}", cls)


def load_run_snapshot(directory: Path, cls: type[T], checkpoint: Checkpoint) -> T:
    """Returns the run snapshot of a checkpoint.

    Raises:
        JournalError: its file is missing or damaged, or holds another class.
    """
    return _load_dataclass(
        directory, checkpoint.snapshot_sha256, f"run snapshot of record {checkpoint.last_record}", cls
    )


def _load_dataclass(directory: Path, sha256: str, description: str, cls: type[T]) -> T:
    path = _content_path(directory, sha256)
    content = _read_content_file(path, description)
    with _prefix_errors(f"checkpoint {path}"):
        return decode_state(content, cls)


def list_checkpoints(directory: Path) -> list[Checkpoint]:
    """Returns the checkpoints of a run, newest first; a damaged one is skipped, with a warning.

    Raises:
        StoreTooNewError: a newer edgefl wrote one of them.
    """
    notes = sorted(directory.glob(f"*{_MANIFEST_SUFFIX}"), reverse=True) if directory.is_dir() else []
    return [checkpoint for path in notes if (checkpoint := _read_manifest(path)) is not None]


def list_checkpoint_files(directory: Path, checkpoint: Checkpoint) -> list[Path]:
    """Returns the paths of a checkpoint's files, whether they exist or not."""
    return [_content_path(directory, name) for name in (checkpoint.sha256, checkpoint.snapshot_sha256) if name]


def is_intact(path: Path) -> bool:
    """Returns whether a file named by its SHA-256 exists and matches it."""
    return path.is_file() and compute_sha256(path) == path.stem


def prune_checkpoints(directory: Path, *, keep: int = 2) -> list[Checkpoint]:
    """Prunes all but the newest `keep` checkpoints, and returns these.

    Files that no manifest names are deleted; models to retain belong in a directory of their own.
    """
    checkpoints = list_checkpoints(directory)
    retained, old = checkpoints[:keep], checkpoints[keep:]
    for checkpoint in old:
        (directory / f"{checkpoint.last_record:020d}{_MANIFEST_SUFFIX}").unlink()
    sync_directory(directory)
    retained_hashes = {name for checkpoint in retained for name in (checkpoint.sha256, checkpoint.snapshot_sha256)}
    for path in directory.iterdir():
        if path.suffix == TEMPORARY_SUFFIX or (path.suffix == _STATE_SUFFIX and path.stem not in retained_hashes):
            path.unlink()
    return retained


def save_model(directory: Path, model: Tensors) -> tuple[str, Path]:
    """Returns SHA-256 and path of the model's file, once it is durable: plain safetensors."""
    sha256 = _write_content_file(directory, encode_model(model))
    return sha256, _content_path(directory, sha256)


def load_model_file(path: str | Path) -> dict[str, Array]:
    """Returns the tensors of a safetensors file by name; a file by edgefl has them in the task's order.

    Raises:
        NotFoundError: there is no such file.
        JournalError: it is damaged; a file that is named by its SHA-256 is checked against it.
    """
    path = Path(path)
    if not path.is_file():
        raise NotFoundError(f"no model file {path}")
    content = _read_content_file(path, "model") if SHA256.match(path.stem) else path.read_bytes()
    with _prefix_errors(f"model {path}"):
        return decode_model(content)


def open_tensor_bytes(path: Path, name: str) -> tuple[IO[bytes], int]:
    """Returns a safetensors file, open where the bytes of its only tensor begin, and the number of them.

    Raises:
        NotFoundError: there is no such file.
        JournalError: it has another tensor, or is damaged.
    """
    try:
        file = path.open("rb")
    except OSError:
        raise NotFoundError(f"no file {path}") from None
    try:
        length = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(min(length, MAX_HEADER_BYTES)))
        start, end = header[name]["data_offsets"]
        is_whole = start == 0 and 8 + length + end == path.stat().st_size
    except (LookupError, TypeError, ValueError):
        is_whole = False
    if not is_whole:
        file.close()
        raise JournalError(f"{path} is damaged, or has more than a tensor {name!r}")
    file.seek(8 + length)
    return file, int(end)


@contextlib.contextmanager
def _prefix_errors(description: str) -> Iterator[None]:
    try:
        yield
    except (JournalError, StoreTooNewError) as error:
        raise type(error)(f"{description}: {error}") from error


def _content_path(directory: Path, sha256: str) -> Path:
    return directory / f"{sha256}{_STATE_SUFFIX}"


def _write_content_file(directory: Path, content: bytes) -> str:
    make_private_directory(directory)
    sha256 = hashlib.sha256(content).hexdigest()
    path = _content_path(directory, sha256)
    if not (path.is_file() and compute_sha256(path) == sha256):
        write_atomic(path, content)
    return sha256


def _read_content_file(path: Path, description: str) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise JournalError(f"the file of the {description} is missing: {path}") from None
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != path.stem:
        raise JournalError(
            f"the file of the {description} is damaged: {path} has SHA-256 {sha256[:12]}…, not its name"
        )
    return content


def _read_manifest(path: Path) -> Checkpoint | None:
    try:
        manifest = parse_json(path.read_bytes())
        version = manifest.pop("v")
        check_format_version(f"checkpoint note {path}", version, FORMAT_VERSION)
        checkpoint = Checkpoint(**manifest)
        names = (checkpoint.sha256, *(() if checkpoint.snapshot_sha256 == "" else (checkpoint.snapshot_sha256,)))
        row_ids = checkpoint.newest_update_id, checkpoint.newest_evaluation_id, checkpoint.newest_event_id
        if (
            all(SHA256.match(name) for name in names)
            and all(is_int64(row_id) for row_id in row_ids)
            and f"{checkpoint.last_record:020d}{_MANIFEST_SUFFIX}" == path.name
        ):
            return checkpoint
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("checkpoint note %s is damaged and left out: %r", path, error)
        return None
    log.warning("checkpoint note %s names another record, or no file, and is left out", path)
    return None
