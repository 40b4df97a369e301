"""Messages to and from devices through Flower, independent of its types."""

from __future__ import annotations

from dataclasses import dataclass

from edgefl.core.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One complete reply of a device. `header` is its JSON, `body` one codec body (may be empty)."""

    node_id: int
    instruction_id: str
    header: Json
    body: bytes
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBody:
    """A body ready for many devices: inline, or split into content-addressed chunks hashed once."""

    inline: bytes | None
    chunk_ids: tuple[str, ...] = ()
    chunks: tuple[bytes, ...] = ()
