"""The base of a run: a safetensors file of all tensors that a device gets once, named by its SHA-256."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from edgefl.core.errors import DataError
from edgefl.core.safe_parsing import SHA256
from edgefl.core.settings import from_mapping
from edgefl.core.types import Array, Json

if TYPE_CHECKING:
    from edgefl.core.config import AdaptSection

KNOWN_TYPES = ("F64", "F32", "F16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")
"""Types of a file's tensors that NumPy knows, by the names of safetensors."""
MAX_BASE_BYTES = 4 * 1024**3
"""Most bytes of a base that a device fetches."""


@dataclass(frozen=True, slots=True)
class AdaptPlan:
    """What an instruction trains, and the base for it: SHA-256 and size of a file that the coordinator offers."""

    section: AdaptSection
    sha256: str
    num_bytes: int

    @classmethod
    def parse(cls, header: object) -> Self | None:
        """Returns the plan in an instruction's header; None where there is none.

        Raises:
            ConfigError, DataError: it makes no sense.
        """
        if header is None:
            return None
        from edgefl.core.config import AdaptSection  # noqa: PLC0415 a device without it saves its memory

        if not isinstance(header, Mapping):
            raise DataError("the instruction's adapt must be a table")
        values = dict(header)
        sha256, num_bytes = values.pop("base", None), values.pop("base_bytes", None)
        if not isinstance(sha256, str) or not SHA256.match(sha256):
            raise DataError(f"the instruction's base must be named by its SHA-256, got {sha256!r:.80}")
        if isinstance(num_bytes, bool) or not isinstance(num_bytes, int) or not 0 < num_bytes <= MAX_BASE_BYTES:
            raise DataError(f"the instruction's base must have 1 to {MAX_BASE_BYTES} bytes, got {num_bytes!r:.40}")
        return cls(from_mapping(AdaptSection, values, "adapt"), sha256, num_bytes)

    def to_json(self) -> Json:
        """Returns the header that `parse` reads."""
        from edgefl.core.config import adapt_to_json  # noqa: PLC0415 a device without it saves its memory

        section = {name: value for name, value in adapt_to_json(self.section).items() if value is not None}
        return {**section, "base": self.sha256, "base_bytes": self.num_bytes}


def encode_base(tensors: Mapping[str, Array]) -> bytes:
    """Returns the file of these tensors; equal tensors give equal bytes."""
    # order="C" and not ascontiguousarray, which would give a scalar an axis.
    return save({name: np.asarray(tensors[name], order="C") for name in sorted(tensors)})


def read_base_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a file's tensors by name, without their values.

    Raises:
        DataError: it cannot be read, is no safetensors file, or has tensors of a type that NumPy does not know.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 it is no mapping
            types = {name: str(found.get_dtype()) for name, found in slices.items()}
            shapes = {name: tuple(found.get_shape()) for name, found in slices.items()}
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} is no safetensors file: {error!r:.200}") from None
    for name, dtype in types.items():
        if dtype not in KNOWN_TYPES:
            raise DataError(
                f"{path}: tensor {name[:100]!r} is of type {dtype[:20]}, save it as one of {', '.join(KNOWN_TYPES)}"
            )
    return shapes


def load_base(path: Path, names: Collection[str] | None = None) -> dict[str, Array]:
    """Returns tensors of a file by name: all, or those of `names` that it has.

    Raises:
        DataError: it cannot be read, is no safetensors file, or has tensors of a type that NumPy does not know.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            found = [name for name in file.keys() if names is None or name in names]  # noqa: SIM118 it is no mapping
            return {name: np.array(file.get_tensor(name)) for name in found}
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is no safetensors file of numbers: {error!r:.200}") from None
