"""A codec for each layer: tensors whose names match a pattern go through a codec of their own.

Large matrices are what costs; a bias or a normalisation's scale is small, and rounding it costs accuracy. So
`topk:0.01|int8; *.bias = dense; 0.* = fp16` takes them apart: the first pattern that matches a tensor's name counts,
with the wildcards of file names, and what matches none goes through the first codec.

The payload is the number of groups, then of each its tensors as a set of places in the task's order, the length of a
body, and that body, which any codec but this one has written.

Source: Parallel-SGD's codecs for each variable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, Protocol, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.coding.indices import read_indices, write_indices
from edgefl.compression.stages import StageKind, TensorStage, ValueStage
from edgefl.compression.wire import MAX_PAYLOAD_BYTES, Reader, varint
from edgefl.errors import CodecError
from edgefl.types import Array, Shapes, Tensor, Tensors, TensorSpec

_NAMED = 24


class GroupCodec(Protocol):
    """What a group is written by: `codec.Codec` of some of the task's tensors."""

    @property
    def spec(self) -> str: ...
    @property
    def tensors(self) -> TensorStage: ...
    @property
    def values(self) -> ValueStage: ...
    def encode(
        self, tensors: Tensors, rng: Generator, *, epoch: int = 0, memory: MutableMapping[str, Array] | None = None
    ) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tensors with one codec; `names` are in the task's order."""

    names: tuple[str, ...]
    codec: GroupCodec

    @classmethod
    def of(cls, specs: Shapes, codec: GroupCodec) -> Self:
        return cls(names=tuple(spec.name for spec in specs), codec=codec)


@dataclass(frozen=True, slots=True)
class Layers:
    """Groups that have every shared tensor once."""

    kind: ClassVar[StageKind] = StageKind.TENSORS
    remembers: ClassVar[bool] = True

    groups: tuple[Group, ...]

    @classmethod
    def parse(cls, argument: str) -> Self:
        raise CodecError(
            f"codec stage 'layers' is not typed, got layers:{argument}: write CODEC; PATTERN = CODEC, or use"
            " [compression.layers]"
        )

    @property
    def is_unbiased(self) -> bool:
        return all(group.codec.tensors.is_unbiased and group.codec.values.is_unbiased for group in self.groups)

    @property
    def is_contraction(self) -> bool:
        return all(group.codec.tensors.is_contraction and group.codec.values.is_contraction for group in self.groups)

    def encode(
        self,
        tensors: Tensors,
        shapes: Shapes,
        values: ValueStage,  # noqa: ARG002 each group has its own
        rng: Generator,
        *,
        memory: MutableMapping[str, Array] | None = None,
    ) -> Iterator[Array]:
        places = {spec.name: place for place, spec in enumerate(shapes)}
        yield varint(len(self.groups))
        for group in self.groups:
            body = group.codec.encode({name: tensors[name] for name in group.names}, rng, memory=memory)
            yield from write_indices(np.array([places[name] for name in group.names]), len(shapes))
            yield varint(len(body))
            yield np.frombuffer(body, dtype=np.uint8)

    @staticmethod
    def decode(reader: Reader, shapes: Shapes, values: type[ValueStage]) -> dict[str, Tensor]:  # noqa: ARG004 likewise
        from edgefl.compression.decoding import decode_group  # noqa: PLC0415 the decoder knows this stage

        decoded: dict[str, Tensor] = {}
        for _ in range(reader.varint(len(shapes))):
            group = tuple(shapes[place] for place in read_indices(reader, len(shapes)))
            again = [spec.name for spec in group if spec.name in decoded]
            if again or not group:
                raise CodecError(f"payload holds {_some(again)} twice" if group else "payload holds an empty group")
            decoded |= decode_group(reader.take(reader.varint(MAX_PAYLOAD_BYTES)), group)
        missing = [spec.name for spec in shapes if spec.name not in decoded]
        if missing:
            raise CodecError(f"payload holds no group with {_some(missing)}")
        return {spec.name: decoded[spec.name] for spec in shapes}


def grouped(shared: Shapes, own: str, layers: Sequence[tuple[str, str]]) -> Mapping[str, tuple[TensorSpec, ...]]:
    """Returns the tensors of each codec, by its line; tensors with the same line are one group.

    Args:
        shared: the tensors that travel.
        own: the line for what matches no pattern.
        layers: patterns and lines, the first match counts.

    Raises:
        CodecError: a pattern that nothing is left for; of a task without tensors nothing is known, and nothing said.
    """
    matched: dict[str, list[TensorSpec]] = {pattern: [] for pattern, _ in layers}
    rest: list[TensorSpec] = []
    for spec in shared:
        found = (pattern for pattern in matched if fnmatchcase(spec.name, pattern))
        matched.get(next(found, ""), rest).append(spec)
    for pattern in [pattern for pattern in matched if shared and not matched[pattern]]:
        raise CodecError(_unmatched(pattern, shared))
    by_line: dict[str, set[str]] = {}
    for line, specs in [(own, rest), *((line, matched[pattern]) for pattern, line in layers)]:
        by_line.setdefault(line, set()).update(spec.name for spec in specs)
    return {line: tuple(spec for spec in shared if spec.name in names) for line, names in by_line.items() if names}


def _unmatched(pattern: str, shared: Shapes) -> str:
    names = [spec.name for spec in shared]
    if any(fnmatchcase(name, pattern) for name in names):
        return f"all tensors that the pattern {pattern!r} matches have a codec by one before it: put it first"
    return f"no tensor of the task matches the pattern {pattern!r}; known: {_some(names)}"


def _some(names: Sequence[str]) -> str:
    """Returns names for a message, which ends somewhere when a model has hundreds."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more
