"""Messages of a ServerApp on their way: a model that goes to all boards is in memory once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from edgefl.core.types import Json
from edgefl.flower.app_messages import encode_envelope


@dataclass(slots=True)
class MessageInputs:
    """Envelopes of messages by number, over bodies of which equal ones are kept once.

    Attributes:
        num_bytes: of all that is kept.
    """

    num_bytes: int = 0
    _envelopes: dict[int, tuple[bytes, str]] = field(default_factory=dict)
    _bodies: dict[str, tuple[bytes, set[int]]] = field(default_factory=dict)

    def add(self, part: int, envelope: Json, body: bytes) -> int:
        """Keeps a message, and returns how many bytes its board is sent."""
        start, digest = encode_envelope(envelope), hashlib.sha256(body).hexdigest()
        if digest not in self._bodies:
            self._bodies[digest] = body, set()
            self.num_bytes += len(body)
        self._bodies[digest][1].add(part)
        self._envelopes[part] = start, digest
        self.num_bytes += len(start)
        return len(start) + len(body)

    def make_body(self, part: int) -> bytes:
        """Returns what the board of a message is sent; nothing for a message that is not kept."""
        if part not in self._envelopes:
            return b""
        start, digest = self._envelopes[part]
        return start + self._bodies[digest][0]

    def remove(self, part: int) -> None:
        """Forgets a message, if it is kept."""
        if part not in self._envelopes:
            return
        start, digest = self._envelopes.pop(part)
        body, parts = self._bodies[digest]
        parts.discard(part)
        self.num_bytes -= len(start)
        if not parts:
            del self._bodies[digest]
            self.num_bytes -= len(body)
