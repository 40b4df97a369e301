"""Codecs by their line, such as `topk:0.01|int8`, built and checked; and decoding of any body by its header.

Tensors whose names match a pattern may have a codec of their own. Large matrices dominate the size; a bias or a
normalisation's scale is small, and rounding it costs accuracy. So `topk:0.01|int8; *.bias = dense; 0.* = fp16`
separates them: the first pattern that matches a tensor's name counts, with the wildcards of file names, and tensors
without a match go through the first codec. Source: Parallel-SGD's codecs for each variable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.entropy.indices import read_indices, write_indices
from edgefl.compression.quantisation.rounding import Float32
from edgefl.compression.registry import (
    DELTA_PREFIX,
    FEEDBACK_PREFIX,
    LAYERS,
    LAYERS_ID,
    RICE,
    STAGES,
    CodecSpec,
    StageClass,
    find_stage_by_id,
    find_stage_by_name,
    parse_spec,
    sort_stages,
)
from edgefl.compression.stages import (
    LosslessStage,
    StageKind,
    TensorStage,
    ValueStage,
    is_stateful_stage,
    select_shared_tensors,
)
from edgefl.compression.wire import (
    MAX_PAYLOAD_BYTES,
    CodecFrame,
    PayloadReader,
    StageId,
    encode_varint,
    read_frame,
    write_frame,
)
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, Tensor, Tensors, TensorSpec

_MAX_LISTED_NAMES = 24


def decode_body(body: bytes | memoryview, shapes: ModelSpec, *, epoch: int = 0) -> dict[str, Tensor]:
    """Returns the shared tensors of `shapes`; the header determines the codec.

    Arrays are read-only views of `body` where possible: copy before writing.

    Raises:
        CodecError: the body is damaged, of an unknown codec, of another epoch or of another task; or it is a delta,
            which `delta.apply_delta` reads.
    """
    frame = read_frame(body)
    if is_delta_frame(frame):
        raise CodecError("body is a delta of a model, expected whole tensors")
    return decode_frame(frame, shapes, epoch=epoch)


def decode_frame(frame: CodecFrame, shapes: ModelSpec, *, epoch: int = 0) -> dict[str, Tensor]:
    """Returns the shared tensors, as `decode_body`, of a body whose header was read."""
    shared = select_shared_tensors(shapes)
    if frame.num_tensors != len(shared):
        raise CodecError(f"body holds {frame.num_tensors} tensors, the task shares {len(shared)}")
    if frame.epoch != epoch:
        raise CodecError(f"body is of epoch {frame.epoch}, expected {epoch}")
    tensor_stage, value_stage, lossless_stage = sort_stages(
        [PerLayerStage if stage == LAYERS_ID else find_stage_by_id(stage) for stage in frame.stages], "body"
    )
    payload = frame.payload
    if lossless_stage is not None:
        payload = lossless_stage.decode(payload, compute_max_payload_bytes(shared))
    reader = PayloadReader(payload)
    decoded = tensor_stage.decode(reader, shared, value_stage)
    reader.require_end()
    return decoded


def is_delta_frame(frame: CodecFrame) -> bool:
    """Returns whether a body contains only a model's changed entries."""
    return frame.stages[0] == STAGES[DELTA_PREFIX][0]


def compute_max_payload_bytes(shared: ModelSpec) -> int:
    """Returns the maximum length of an unpacked payload: edgefl's stages need less than a third of it."""
    return min(MAX_PAYLOAD_BYTES, 4 * sum(spec.nbytes for spec in shared) + 256 * len(shared) + 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """A task's codec: encodes its shared tensors and decodes any body for them, of any codec."""

    spec: str
    shapes: ModelSpec
    stage_ids: tuple[StageId, ...]
    tensor_stage: TensorStage
    value_stage: ValueStage
    lossless_stage: LosslessStage | None = None

    @property
    def is_unbiased(self) -> bool:
        """Whether the mean of many decodings is the tensors themselves."""
        return self.tensor_stage.is_unbiased and self.value_stage.is_unbiased

    @property
    def is_contraction(self) -> bool:
        """Whether the codec works behind `ef`: the (expected) squared error is below the squared norm."""
        return self.tensor_stage.is_contraction and self.value_stage.is_contraction

    def encode(
        self, tensors: Tensors, rng: Generator, *, epoch: int = 0, memory: MutableMapping[str, Array] | None = None
    ) -> bytes:
        """Returns header and payload; `rng` is used by codecs that round or choose at random.

        Args:
            tensors: at least the task's shared ones.
            rng: as above.
            epoch: generation of a wrapper's state, checked by the decoder.
            memory: state of a stage that `remembers`, kept between updates; owned by `ErrorFeedback`.

        Raises:
            CodecError: a shared tensor is missing, unknown, of the wrong shape or kind, or beyond the codec's range.
        """
        shared = select_shared_tensors(self.shapes)
        _check_tensor_names(tensors, self.shapes, shared)
        parts = list(self._encode_tensors(tensors, shared, rng, memory))
        if self.lossless_stage is None:
            return write_frame(self.stage_ids, len(shared), parts, epoch=epoch)
        packed = self._compress_payload(self.lossless_stage, parts, shared)
        ids = self.stage_ids if packed is not None else self.stage_ids[:-1]
        return write_frame(ids, len(shared), parts if packed is None else packed, epoch=epoch)

    def decode(self, body: bytes | memoryview, shapes: ModelSpec | None = None) -> dict[str, Tensor]:
        """Returns the shared tensors in `body`; see `decode_body`."""
        return decode_body(body, self.shapes if shapes is None else shapes)

    def _encode_tensors(
        self, tensors: Tensors, shared: ModelSpec, rng: Generator, memory: MutableMapping[str, Array] | None
    ) -> Iterable[Array]:
        extra: dict[str, Any] = {"memory": memory} if is_stateful_stage(self.tensor_stage) else {}
        return self.tensor_stage.encode(tensors, shared, self.value_stage, rng, **extra)

    @staticmethod
    def _compress_payload(stage: LosslessStage, parts: Sequence[Array], shared: ModelSpec) -> Sequence[Array] | None:
        """Returns the packed payload; None where packing saves nothing and its stage is omitted."""
        packed = stage.encode(parts)
        length = sum(part.nbytes for part in parts)
        smaller = sum(part.nbytes for part in packed) < length
        return packed if smaller and length <= compute_max_payload_bytes(shared) else None


@dataclass(frozen=True, slots=True)
class PerLayerStage:
    """Codecs of groups of tensors, which contain every shared tensor exactly once.

    Written are the number of groups, then of each its tensors as a set of indices in the task's order, the length of
    a body, and that body, written by any codec without layers.
    """

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
        decoded: dict[str, Tensor] = {}
        for _ in range(reader.read_varint(len(shapes))):
            group = tuple(shapes[position] for position in read_indices(reader, len(shapes)))
            repeated = [spec.name for spec in group if spec.name in decoded]
            if repeated or not group:
                raise CodecError(
                    f"payload holds {_format_names(repeated)} twice" if group else "payload holds an empty group"
                )
            frame = read_frame(reader.read_bytes(reader.read_varint(MAX_PAYLOAD_BYTES)))
            if is_delta_frame(frame) or LAYERS_ID in frame.stages:
                raise CodecError("payload holds layers or a delta within a layer, expected whole tensors")
            decoded |= decode_frame(frame, group)
        missing = [spec.name for spec in shapes if spec.name not in decoded]
        if missing:
            raise CodecError(f"payload holds no group with {_format_names(missing)}")
        return {spec.name: decoded[spec.name] for spec in shapes}


def make_codec(spec: str, shapes: ModelSpec) -> Codec:
    """Returns the codec for one line such as `topk:0.01|int8`; without a tensor stage it is `dense`.

    The prefix `ef` belongs to the encoding device (`error_feedback.py`), not to the codec.

    Raises:
        CodecError: an unknown stage, an invalid argument, stages in an invalid order, or stages that do not work with
            error feedback.
    """
    split = parse_spec(spec)
    if split.prefix == DELTA_PREFIX:
        raise CodecError(f"codec {spec!r}: delta is for [compression] down, where the device holds a model already")
    codec = build_codec(split, shapes)
    check_stateful_stages(split, codec)
    for part in list_layer_codecs(codec) if split.prefix == FEEDBACK_PREFIX else ():
        if not part.is_contraction:
            raise CodecError(
                f"codec {part.spec!r}: the error of a draw can be larger than the update, and ef would pile it up"
                " without end: leave ef out, or use topk, threshold, sign, int8, or qsgd with more bits or a smaller"
                " bucket"
            )
    return codec


def build_codec(codec_spec: CodecSpec, shapes: ModelSpec) -> Codec:
    """Returns the codec of a line's stages; its prefix is ignored.

    Raises:
        CodecError: as `make_codec`.
    """
    if codec_spec.layers:
        return _build_per_layer_codec(codec_spec, shapes)
    _check_prefixes(codec_spec)
    typed_stages = codec_spec.stages or (("dense", ""),)
    found = [(*_find_typed_stage(name, codec_spec.text), argument) for name, argument in typed_stages if name != RICE]
    stages = [stage for _, stage, _ in found]
    _check_rice(codec_spec, stages)
    if stages and stages[0].kind != StageKind.TENSORS:
        found.insert(0, (*STAGES["dense"], ""))
        stages.insert(0, STAGES["dense"][1])
    tensor_stage, value_stage, lossless_stage = sort_stages(stages, f"codec {codec_spec.text!r}")
    arguments = {stage.kind: argument for _, stage, argument in found}
    return Codec(
        spec=codec_spec.text,
        shapes=shapes,
        stage_ids=tuple(stage_id for stage_id, _, _ in found),
        tensor_stage=tensor_stage.parse(arguments[StageKind.TENSORS]),
        value_stage=value_stage.parse(arguments.get(StageKind.VALUES, "")),
        lossless_stage=lossless_stage.parse(arguments[StageKind.LOSSLESS]) if lossless_stage else None,
    )


def check_stateful_stages(codec_spec: CodecSpec, codec: Codec) -> None:
    """Rejects a stage with memory in a codec without error feedback to keep it.

    Raises:
        CodecError: there is one, and no error feedback.
    """
    for part in list_layer_codecs(codec):
        if codec_spec.prefix != FEEDBACK_PREFIX and is_stateful_stage(part.tensor_stage):
            raise CodecError(
                f"codec {part.spec!r}: it is biased and goes on from the update before, so it needs error feedback"
                f" to keep what it leaves out: write {FEEDBACK_PREFIX}|{codec_spec.text}, for [compression] up"
            )


def _build_per_layer_codec(codec_spec: CodecSpec, shapes: ModelSpec) -> Codec:
    """Returns the codec of a line with layers; lines without any tensor are checked, too."""
    lines = {codec_spec.default_line: parse_spec(codec_spec.default_line)} | {
        line: parse_spec(line) for _, line in codec_spec.layers
    }
    for line, layer_spec in lines.items():
        if layer_spec.prefix:
            raise CodecError(
                f"codec {codec_spec.text!r}: {layer_spec.prefix} stands once, before the whole line, got {line!r}"
            )
        build_codec(layer_spec, ())
    try:
        groups = assign_codecs(select_shared_tensors(shapes), codec_spec.default_line, codec_spec.layers)
    except CodecError as error:
        raise CodecError(f"codec {codec_spec.text!r}: {error}") from None
    return Codec(
        spec=codec_spec.text,
        shapes=shapes,
        stage_ids=(LAYERS_ID,),
        tensor_stage=PerLayerStage(tuple(build_codec(lines[line], specs) for line, specs in groups.items())),
        value_stage=Float32(),
    )


def list_layer_codecs(codec: Codec) -> Sequence[Codec]:
    """Returns the codecs that encode numbers: the codec itself, or those of its groups."""
    return codec.tensor_stage.groups if isinstance(codec.tensor_stage, PerLayerStage) else (codec,)


def _find_typed_stage(name: str, line: str) -> tuple[StageId, StageClass]:
    return (LAYERS_ID, PerLayerStage) if name == LAYERS else find_stage_by_name(name, line)


def _check_prefixes(codec_spec: CodecSpec) -> None:
    """Rejects a prefix that is not first, or that has an argument."""
    for name, _ in codec_spec.stages:
        if name in (FEEDBACK_PREFIX, DELTA_PREFIX):
            raise CodecError(
                f"codec {codec_spec.text!r}: {name} stands before the stages, once and without an argument"
            )


def _check_rice(codec_spec: CodecSpec, stages: Sequence[StageClass]) -> None:
    """Rejects `rice` without any indices to code, twice, or with an argument."""
    rice_arguments = [argument for name, argument in codec_spec.stages if name == RICE]
    if rice_arguments and not any(getattr(stage, "codes_indices", False) for stage in stages):
        raise CodecError(
            f"codec {codec_spec.text!r}: rice codes places, so a stage such as topk or qsgd must stand before it"
        )
    if rice_arguments and rice_arguments != [""]:
        raise CodecError(f"codec {codec_spec.text!r}: rice stands at most once and takes no argument")


def _check_tensor_names(tensors: Tensors, shapes: ModelSpec, shared: ModelSpec) -> None:
    missing = [spec.name for spec in shared if spec.name not in tensors]
    if missing:
        raise CodecError(f"tensors to encode lack {', '.join(map(repr, missing))}")
    unknown = set(tensors) - {spec.name for spec in shapes}
    if unknown:
        raise CodecError(f"tensors to encode hold {', '.join(map(repr, sorted(unknown)))}, unknown to the task")


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
    nearest = get_close_matches(pattern.strip("*"), names, n=3, cutoff=0.3)
    hint = f"; nearest: {_format_names(nearest)}" if nearest and len(names) > len(nearest) else ""
    return f"no tensor of the task matches the pattern {pattern!r}; known: {_format_names(names)}{hint}"


def _format_names(names: Sequence[str]) -> str:
    """Returns names for a message, shortened for models with hundreds."""
    more = f" and {len(names) - _MAX_LISTED_NAMES} more" if len(names) > _MAX_LISTED_NAMES else ""
    return ", ".join(map(repr, names[:_MAX_LISTED_NAMES])) + more
