"""Codecs by their line, such as `topk:0.01|int8`: stages built and checked."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass

from numpy.random import Generator

from edgefl.compression.decoding import compute_max_payload_bytes, decode_body
from edgefl.compression.per_layer import LayerCodec, LayerGroup, PerLayerStage, assign_codecs
from edgefl.compression.quantisation.floats import Float32
from edgefl.compression.registry import LAYERS, RICE, STAGES, StageClass, find_stage_by_name, make_pipeline
from edgefl.compression.specs import DELTA_PREFIX, FEEDBACK_PREFIX, CodecSpec, parse_spec
from edgefl.compression.stages import (
    LosslessStage,
    StageKind,
    TensorStage,
    ValueStage,
    is_stateful_stage,
    select_shared_tensors,
)
from edgefl.compression.wire import StageId, write_frame
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, Tensor, Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """A task's codec: encodes its shared tensors and decodes any body for them, of any codec."""

    spec: str
    shapes: ModelSpec
    stage_ids: tuple[StageId, ...]
    tensor_stage: TensorStage
    value_stage: ValueStage
    lossless_stage: LosslessStage | None = None

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
        if is_stateful_stage(self.tensor_stage):
            return self.tensor_stage.encode(tensors, shared, self.value_stage, rng, memory=memory)
        return self.tensor_stage.encode(tensors, shared, self.value_stage, rng)

    @staticmethod
    def _compress_payload(stage: LosslessStage, parts: Sequence[Array], shared: ModelSpec) -> Sequence[Array] | None:
        """Returns the packed payload; None where packing saves nothing and its stage is omitted."""
        packed = stage.encode(parts)
        length = sum(part.nbytes for part in parts)
        smaller = sum(part.nbytes for part in packed) < length
        return packed if smaller and length <= compute_max_payload_bytes(shared) else None


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
        if not (part.tensor_stage.is_contraction and part.value_stage.is_contraction):
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
    typed_stages = list(codec_spec.stages or (("dense", ""),))
    _check_prefixes(codec_spec)
    stages = [find_stage_by_name(name, codec_spec.text) for name, _ in typed_stages if name != RICE]
    _check_rice(codec_spec, [stage for _, stage in stages])
    arguments = [argument for name, argument in typed_stages if name != RICE]
    if stages and stages[0][1].kind != StageKind.TENSORS:
        stages.insert(0, STAGES["dense"])
        arguments.insert(0, "")
    pipeline = make_pipeline([stage for _, stage in stages], f"codec {codec_spec.text!r}")
    argument_of_kind = {stage.kind: argument for (_, stage), argument in zip(stages, arguments, strict=True)}
    return Codec(
        spec=codec_spec.text,
        shapes=shapes,
        stage_ids=tuple(stage_id for stage_id, _ in stages),
        tensor_stage=pipeline.tensor_stage.parse(argument_of_kind[StageKind.TENSORS]),
        value_stage=pipeline.value_stage.parse(argument_of_kind.get(StageKind.VALUES, "")),
        lossless_stage=pipeline.lossless_stage.parse(argument_of_kind[StageKind.LOSSLESS])
        if pipeline.lossless_stage
        else None,
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
        stage_ids=(STAGES[LAYERS][0],),
        tensor_stage=PerLayerStage(
            tuple(LayerGroup.from_specs(specs, build_codec(lines[line], specs)) for line, specs in groups.items())
        ),
        value_stage=Float32(),
    )


def list_layer_codecs(codec: Codec) -> Sequence[LayerCodec]:
    """Returns the codecs that encode numbers: the codec itself, or those of its groups."""
    return (
        [group.codec for group in codec.tensor_stage.groups]
        if isinstance(codec.tensor_stage, PerLayerStage)
        else [codec]
    )


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
