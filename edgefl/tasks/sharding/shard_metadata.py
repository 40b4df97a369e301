"""The card of a shard: a JSON file with its metadata, beside the `.npz`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO

from edgefl.core.errors import DataError
from edgefl.core.safe_parsing import parse_json
from edgefl.system.atomic_files import compute_sha256, open_atomic

# A service with a user of its own must be able to read its operator's files.
SHARD_FILE_MODE = 0o644
METADATA_VERSION = 1
MAX_METADATA_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMetadata:
    """Metadata of a shard: its task, its origin and scheme, and the checksum of the `.npz`.

    `groups` names the people in a natural shard. `blocks` maps a block of a redundant shard to its rows
    [start, stop); the same block has the same rows in the same order on every device that holds it.
    """

    task: str
    scheme: str = ""
    source: str = ""
    num_examples: int = 0
    counts: Mapping[int, int] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    blocks: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    sha256: str = ""


def get_metadata_path(shard: Path) -> Path:
    return shard.with_suffix(".json")


def read_metadata(shard: Path) -> ShardMetadata:
    """Returns the card of a shard file; unknown fields of a newer edgefl are ignored.

    Raises:
        DataError: it is not a card.
    """
    path = get_metadata_path(shard)
    try:
        if path.stat().st_size > MAX_METADATA_BYTES:
            raise DataError(
                f"shard card {path} has {path.stat().st_size} bytes, at most {MAX_METADATA_BYTES} are read"
            )
        value = parse_json(path.read_bytes())
        return ShardMetadata(
            task=_require_text(value["task"]),
            scheme=_require_text(value.get("scheme", "")),
            source=_require_text(value.get("source", "")),
            num_examples=int(value.get("num_examples", 0)),
            counts={int(label): int(count) for label, count in value.get("counts", {}).items()},
            labels=tuple(_require_text(label) for label in value.get("labels", [])),
            groups=tuple(_require_text(group) for group in value.get("groups", [])),
            blocks={int(block): (int(start), int(stop)) for block, (start, stop) in value.get("blocks", {}).items()},
            sha256=_require_text(value["sha256"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(
            f"shard card {path} cannot be read ({type(error).__name__}: {error}); cut the shard again"
        ) from None


def write_metadata(shard: Path, metadata: ShardMetadata, *, counts: Mapping[int, int], sha256: str) -> ShardMetadata:
    """Writes the card beside its shard and returns it as written."""
    written = replace(metadata, counts=counts, num_examples=sum(counts.values()), sha256=sha256)
    with write_atomically(get_metadata_path(shard)) as file:
        file.write(json.dumps({"v": METADATA_VERSION, **asdict(written)}, indent=1).encode() + b"\n")
    return written


def compute_file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file as hexadecimal digits.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        return compute_sha256(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


@contextmanager
def write_atomically(path: Path) -> Iterator[IO[bytes]]:
    """Yields a file to write; it appears under its name only on success, and then durably.

    Creates the folder if missing.

    Raises:
        DataError: the directory cannot be written, or the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(path, mode=SHARD_FILE_MODE) as file:
            yield file
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from None


def _require_text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {value!r}")
    return value
