"""The card of a shard: a JSON file beside the `.npz` that says what it should be."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO

from edgefl.errors import DataError
from edgefl.files import open_whole, sha256_of_file
from edgefl.untrusted import parse_json

# A service of its own user must be able to read what its operator put there.
SHARD_MODE = 0o644
CARD_VERSION = 1
MAX_CARD_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCard:
    """What a shard is: its task, where it was cut from and how, and the checksum of the `.npz`.

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


def card_path(shard: Path) -> Path:
    return shard.with_suffix(".json")


def read_card(shard: Path) -> ShardCard:
    """Returns the card of a shard file; fields that a newer edgefl added are ignored.

    Raises:
        DataError: it is not a card.
    """
    path = card_path(shard)
    try:
        if path.stat().st_size > MAX_CARD_BYTES:
            raise DataError(f"shard card {path} has {path.stat().st_size} bytes, at most {MAX_CARD_BYTES} are read")
        value = parse_json(path.read_bytes())
        return ShardCard(
            task=_text(value["task"]),
            scheme=_text(value.get("scheme", "")),
            source=_text(value.get("source", "")),
            num_examples=int(value.get("num_examples", 0)),
            counts={int(label): int(count) for label, count in value.get("counts", {}).items()},
            labels=tuple(_text(label) for label in value.get("labels", [])),
            groups=tuple(_text(group) for group in value.get("groups", [])),
            blocks={int(block): (int(start), int(stop)) for block, (start, stop) in value.get("blocks", {}).items()},
            sha256=_text(value["sha256"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(
            f"shard card {path} cannot be read ({type(error).__name__}: {error}); cut the shard again"
        ) from None


def write_card(shard: Path, card: ShardCard, *, counts: Mapping[int, int], sha256: str) -> ShardCard:
    """Writes the card beside its shard and returns it as written."""
    written = replace(card, counts=counts, num_examples=sum(counts.values()), sha256=sha256)
    with write_atomically(card_path(shard)) as file:
        file.write(json.dumps({"v": CARD_VERSION, **asdict(written)}, indent=1).encode() + b"\n")
    return written


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file as hexadecimal digits.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        return sha256_of_file(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


@contextmanager
def write_atomically(path: Path) -> Iterator[IO[bytes]]:
    """Gives a file to write into; it appears under its name only when the block ends well, and then durably.

    Makes the folder if need be.

    Raises:
        DataError: the directory cannot be written, or the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_whole(path, mode=SHARD_MODE) as file:
            yield file
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {value!r}")
    return value
