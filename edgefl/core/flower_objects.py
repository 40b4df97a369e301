"""Flower's objects on the wire: a head, a zero byte, the body; the id of one is the SHA-256 of all of it.

A head is the object's kind, the ids of those that it refers to, with commas between, and the length of its body.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

CHUNK = "ArrayChunk"
"""The kind of objects that are bytes alone."""
_ID = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class FlowerObject:
    """A parsed object: its kind, the ids of those that it refers to, in order, and its body."""

    kind: str
    children: tuple[str, ...]
    body: bytes


def compute_object_id(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def parse_object(content: bytes) -> FlowerObject:
    """Returns the parts of an object.

    Raises:
        ValueError: the bytes are none.
    """
    head, divider, body = content.partition(b"\0")
    kind, children, length = head.decode().split(" ")
    ids = tuple(children.split(",")) if children else ()
    if not divider or not all(map(_ID.fullmatch, ids)) or int(length) != len(body):
        raise ValueError(f"an object of {len(content)} bytes whose head makes no sense: {head[:80]!r}")
    return FlowerObject(kind, ids, body)


def encode_object(kind: str, body: bytes, children: Iterable[str] = ()) -> bytes:
    """Returns an object: its kind, its body, and the ids of those that it refers to, each once."""
    return b"".join((_encode_head(kind, children, len(body)), body))


def encode_chunk(*parts: bytes | memoryview) -> bytes:
    """Returns an object of the kind `CHUNK` with these bytes, one after the other."""
    return b"".join((_encode_head(CHUNK, (), sum(map(len, parts))), *parts))


def _encode_head(kind: str, children: Iterable[str], length: int) -> bytes:
    return f"{kind} {','.join(children)} {length}".encode() + b"\0"


def parse_chunk(content: bytes) -> bytes:
    """Returns the bytes in an object of the kind `CHUNK`.

    Raises:
        ValueError: it is another, or none.
    """
    found = parse_object(content)
    if found.kind != CHUNK:
        raise ValueError(f"a {found.kind[:40]!r} is where {CHUNK} should be")
    return found.body
