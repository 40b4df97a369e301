"""A codec for each layer: tensors whose names match a pattern have a codec of their own.

Large matrices dominate the size; a bias or a normalisation's scale is small, and rounding it costs accuracy. So
`topk:0.01|int8; *.bias = dense; 0.* = fp16` separates them: the first pattern that matches a tensor's name counts,
with the wildcards of file names, and tensors without a match go through the first codec.

The payload is the number of groups, then of each its tensors as a set of indices in the task's order, the length of a
body, and that body, written by any codec without layers.

Source: Parallel-SGD's codecs for each variable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.entropy.indices import read_indices, write_indices
from edgefl.compression.stages import StageKind, ValueStage
from edgefl.compression.wire import MAX_PAYLOAD_BYTES, PayloadReader, encode_varint
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, Tensor, Tensors, TensorSpec

if TYPE_CHECKING:
    from edgefl.compression.codec import Codec

_MAX_LISTED_NAMES = 24


@dataclass(frozen=True, slots=True)
class PerLayerStage:
    """Codecs of groups of tensors, which contain every shared tensor exactly once."""

    kind: ClassVar[StageKind] = StageKind.TENSORS
    remembers: ClassVar[bool] = True

    groups: tuple[Codec, ...]

    @classmethod
    def parse(cls, argument: str) -> Self:
        raise CodecError(
            f"codec stage 'layers' is not typed, got layers:{argument}: write CODEC; PATTERN = CODEC, or use"
            " [compression.layers]"
        )

    @property
    def is_unbiased(self) -> bool:
        return all(codec.is_unbiased for codec in self.groups)

    @property
    def is_contraction(self) -> bool:
        return all(codec.is_contraction for codec in self.groups)

    def encode(
        self,
        tensors: Tensors,
        shapes: ModelSpec,
        values: ValueStage,  # noqa: ARG002 each group has its own
        rng: Generator,
        *,
        memory: MutableMapping[str, Array] | None = None,
    ) -> Iterator[Array]:
        positions = {spec.name: position for position, spec in enumerate(shapes)}
        yield encode_varint(len(self.groups))
        for codec in self.groups:
            body = codec.encode({spec.name: tensors[spec.name] for spec in codec.shapes}, rng, memory=memory)
            yield from write_indices(np.array([positions[spec.name] for spec in codec.shapes]), len(shapes))
            yield encode_varint(len(body))
            yield np.frombuffer(body, dtype=np.uint8)

    @staticmethod
    def decode(reader: PayloadReader, shapes: ModelSpec, values: type[ValueStage]) -> dict[str, Tensor]:  # noqa: ARG004 likewise
        from edgefl.compression.codec import decode_layer_group  # noqa: PLC0415 circular: the decoder imports this stage

        decoded: dict[str, Tensor] = {}
        for _ in range(reader.read_varint(len(shapes))):
            group = tuple(shapes[position] for position in read_indices(reader, len(shapes)))
            repeated = [spec.name for spec in group if spec.name in decoded]
            if repeated or not group:
                raise CodecError(
                    f"payload holds {_format_names(repeated)} twice" if group else "payload holds an empty group"
                )
            decoded |= decode_layer_group(reader.read_bytes(reader.read_varint(MAX_PAYLOAD_BYTES)), group)
        missing = [spec.name for spec in shapes if spec.name not in decoded]
        if missing:
            raise CodecError(f"payload holds no group with {_format_names(missing)}")
        return {spec.name: decoded[spec.name] for spec in shapes}


def assign_codecs(
    shared: ModelSpec, default_line: str, layers: Sequence[tuple[str, str]]
) -> Mapping[str, tuple[TensorSpec, ...]]:
    """Returns the tensors of each codec, by its line; tensors with the same line are one group.

    Args:
        shared: the shared tensors.
        default_line: the line for tensors without a match.
        layers: patterns and lines, the first match counts.

    Raises:
        CodecError: a pattern without any tensor left; not raised for a task without tensors.
    """
    specs_by_pattern: dict[str, list[TensorSpec]] = {pattern: [] for pattern, _ in layers}
    unmatched: list[TensorSpec] = []
    for spec in shared:
        matching = (pattern for pattern in specs_by_pattern if fnmatchcase(spec.name, pattern))
        specs_by_pattern.get(next(matching, ""), unmatched).append(spec)
    for pattern in [pattern for pattern in specs_by_pattern if shared and not specs_by_pattern[pattern]]:
        raise CodecError(_describe_unmatched(pattern, shared))
    by_line: dict[str, set[str]] = {}
    for line, specs in [(default_line, unmatched), *((line, specs_by_pattern[pattern]) for pattern, line in layers)]:
        by_line.setdefault(line, set()).update(spec.name for spec in specs)
    return {line: tuple(spec for spec in shared if spec.name in names) for line, names in by_line.items() if names}


def _describe_unmatched(pattern: str, shared: ModelSpec) -> str:
    names = [spec.name for spec in shared]
    if any(fnmatchcase(name, pattern) for name in names):
        return f"all tensors that the pattern {pattern!r} matches have a codec by one before it: put it first"
    return f"no tensor of the task matches the pattern {pattern!r}; known: {_format_names(names)}"


def _format_names(names: Sequence[str]) -> str:
    """Returns names for a message, shortened for models with hundreds."""
    more = f" and {len(names) - _MAX_LISTED_NAMES} more" if len(names) > _MAX_LISTED_NAMES else ""
    return ", ".join(map(repr, names[:_MAX_LISTED_NAMES])) + more
