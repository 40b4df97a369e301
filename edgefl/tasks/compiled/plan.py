"""The plan of a run whose task was compiled: what an instruction says of the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from edgefl.core.errors import DataError
from edgefl.core.protocol import FOR_ALL_KEY
from edgefl.core.safe_parsing import SHA256
from edgefl.core.types import Json
from edgefl.tasks.compiled.artefact import MAX_ARTEFACT_BYTES


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """SHA-256 and size of a compiled task that the coordinator offers.

    Attributes:
        sha256: of the file.
        num_bytes: of the file.
        is_for_all: boards with torch train by it as well.
    """

    sha256: str
    num_bytes: int
    is_for_all: bool = False

    @classmethod
    def parse(cls, header: object) -> Self | None:
        """Returns the plan in an instruction's header; None where there is none.

        Raises:
            DataError: it makes no sense.
        """
        if header is None:
            return None
        if not isinstance(header, Mapping):
            raise DataError("the instruction's compiled task must be a table")
        sha256, num_bytes, is_for_all = header.get("sha256"), header.get("bytes"), header.get(FOR_ALL_KEY, False)
        if not isinstance(sha256, str) or not SHA256.match(sha256):
            raise DataError(f"the instruction's compiled task must be named by its SHA-256, got {sha256!r:.80}")
        if isinstance(num_bytes, bool) or not isinstance(num_bytes, int) or not 0 < num_bytes <= MAX_ARTEFACT_BYTES:
            raise DataError(
                f"the instruction's compiled task must have 1 to {MAX_ARTEFACT_BYTES} bytes, got {num_bytes!r:.40}"
            )
        if not isinstance(is_for_all, bool):
            raise DataError(
                f"whether all boards train by a compiled task must be true or false, got {is_for_all!r:.40}"
            )
        return cls(sha256, num_bytes, is_for_all)

    def to_json(self) -> Json:
        """Returns the header that `parse` reads."""
        return {"sha256": self.sha256, "bytes": self.num_bytes, FOR_ALL_KEY: self.is_for_all}
