"""Codecs by the line that a person types, such as `topk:0.01|int8`: their stages, put together and checked."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass

from numpy.random import Generator

from edgefl.compression.decoding import decode_body, most_bytes
from edgefl.compression.layers import Group, GroupCodec, Layers, grouped
from edgefl.compression.registry import LAYERS, RICE, STAGES, StageClass, arrange, stage_by_name
from edgefl.compression.specs import DELTA, FEEDBACK, CodecSpec, split_spec
from edgefl.compression.stages import LosslessStage, StageKind, TensorStage, ValueStage, does_remember, shared_shapes
from edgefl.compression.values.floats import Float32
from edgefl.compression.wire import StageId, write_frame
from edgefl.errors import CodecError
from edgefl.types import Array, Shapes, Tensor, Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """A codec for one task: encodes its shared tensors and decodes any body for them, whoever chose its codec."""

    spec: str
    shapes: Shapes
    ids: tuple[StageId, ...]
    tensors: TensorStage
    values: ValueStage
    lossless: LosslessStage | None = None

    def encode(
        self, tensors: Tensors, rng: Generator, *, epoch: int = 0, memory: MutableMapping[str, Array] | None = None
    ) -> bytes:
        """Returns header and payload; `rng` is used by codecs that round or choose at random.

        Args:
            tensors: at least the task's shared ones.
            rng: as above.
            epoch: generation of a wrapper's state, checked by the decoder.
            memory: what a stage that `remembers` keeps from one update to the next; `ErrorFeedback` owns it.

        Raises:
            CodecError: a shared tensor is missing, unknown, of the wrong shape or kind, or beyond the codec's range.
        """
        shared = shared_shapes(self.shapes)
        _check_names(tensors, self.shapes, shared)
        parts = list(self._written(tensors, shared, rng, memory))
        if self.lossless is None:
            return write_frame(self.ids, len(shared), parts, epoch=epoch)
        packed = self._packed(self.lossless, parts, shared)
        ids = self.ids if packed is not None else self.ids[:-1]
        return write_frame(ids, len(shared), parts if packed is None else packed, epoch=epoch)

    def decode(self, body: bytes | memoryview, shapes: Shapes | None = None) -> dict[str, Tensor]:
        """Returns the shared tensors in `body`; see `decode_body`."""
        return decode_body(body, self.shapes if shapes is None else shapes)

    def _written(
        self, tensors: Tensors, shared: Shapes, rng: Generator, memory: MutableMapping[str, Array] | None
    ) -> Iterable[Array]:
        if does_remember(self.tensors):
            return self.tensors.encode(tensors, shared, self.values, rng, memory=memory)
        return self.tensors.encode(tensors, shared, self.values, rng)

    @staticmethod
    def _packed(stage: LosslessStage, parts: Sequence[Array], shared: Shapes) -> Sequence[Array] | None:
        """Returns the packed payload; None where it had better travel as it is, without the stage in its header."""
        packed = stage.encode(parts)
        length = sum(part.nbytes for part in parts)
        smaller = sum(part.nbytes for part in packed) < length
        return packed if smaller and length <= most_bytes(shared) else None


def make_codec(spec: str, shapes: Shapes) -> Codec:
    """Returns the codec for one line such as `topk:0.01|int8`; without a tensor stage it is `dense`.

    The prefix `ef` is a matter of the device that encodes (`feedback.py`), and no part of the codec.

    Raises:
        CodecError: an unknown stage, an argument that makes no sense, stages in an order that does not work, or
            stages that error feedback does not work with.
    """
    split = split_spec(spec)
    if split.prefix == DELTA:
        raise CodecError(f"codec {spec!r}: delta is for [compression] down, where the device holds a model already")
    codec = build_codec(split, shapes)
    check_memory(split, codec)
    for part in parts_of(codec) if split.prefix == FEEDBACK else ():
        if not (part.tensors.is_contraction and part.values.is_contraction):
            raise CodecError(
                f"codec {part.spec!r}: the error of a draw can be larger than the update, and ef would pile it up"
                " without end: leave ef out, or use topk, threshold, sign, int8, or qsgd with more bits or a smaller"
                " bucket"
            )
    return codec


def build_codec(split: CodecSpec, shapes: Shapes) -> Codec:
    """Returns the codec of a line's stages, whatever its prefix.

    Raises:
        CodecError: as `make_codec`.
    """
    if split.layers:
        return _layered(split, shapes)
    typed = list(split.stages or (("dense", ""),))
    _check_prefixes(split)
    found = [stage_by_name(name, split.text) for name, _ in typed if name != RICE]
    _check_rice(split, [stage for _, stage in found])
    arguments = [argument for name, argument in typed if name != RICE]
    if found and found[0][1].kind != StageKind.TENSORS:
        found.insert(0, STAGES["dense"])
        arguments.insert(0, "")
    arranged = arrange([stage for _, stage in found], f"codec {split.text!r}")
    given = {stage.kind: argument for (_, stage), argument in zip(found, arguments, strict=True)}
    return Codec(
        spec=split.text,
        shapes=shapes,
        ids=tuple(stage_id for stage_id, _ in found),
        tensors=arranged.tensors.parse(given[StageKind.TENSORS]),
        values=arranged.values.parse(given.get(StageKind.VALUES, "")),
        lossless=arranged.lossless.parse(given[StageKind.LOSSLESS]) if arranged.lossless else None,
    )


def check_memory(split: CodecSpec, codec: Codec) -> None:
    """Refuses a stage that remembers where nobody keeps what it remembers.

    Raises:
        CodecError: there is one, and no error feedback.
    """
    for part in parts_of(codec):
        if split.prefix != FEEDBACK and does_remember(part.tensors):
            raise CodecError(
                f"codec {part.spec!r}: it is biased and goes on from the update before, so it needs error feedback"
                f" to keep what it leaves out: write {FEEDBACK}|{split.text}, for [compression] up"
            )


def _layered(split: CodecSpec, shapes: Shapes) -> Codec:
    """Returns the codec of a line with layers; lines that no tensor goes through are checked, too."""
    lines = {split.own: split_spec(split.own)} | {line: split_spec(line) for _, line in split.layers}
    for line, own in lines.items():
        if own.prefix:
            raise CodecError(f"codec {split.text!r}: {own.prefix} stands once, before the whole line, got {line!r}")
        build_codec(own, ())
    try:
        groups = grouped(shared_shapes(shapes), split.own, split.layers)
    except CodecError as error:
        raise CodecError(f"codec {split.text!r}: {error}") from None
    return Codec(
        spec=split.text,
        shapes=shapes,
        ids=(STAGES[LAYERS][0],),
        tensors=Layers(tuple(Group.of(specs, build_codec(lines[line], specs)) for line, specs in groups.items())),
        values=Float32(),
    )


def parts_of(codec: Codec) -> Sequence[GroupCodec]:
    """Returns the codecs that numbers go through: the codec itself, or those of its groups."""
    return [group.codec for group in codec.tensors.groups] if isinstance(codec.tensors, Layers) else [codec]


def _check_prefixes(split: CodecSpec) -> None:
    """Refuses a prefix that does not stand first, or that has an argument."""
    for name, _ in split.stages:
        if name in (FEEDBACK, DELTA):
            raise CodecError(f"codec {split.text!r}: {name} stands before the stages, once and without an argument")


def _check_rice(split: CodecSpec, stages: Sequence[StageClass]) -> None:
    """Refuses `rice` where nothing is coded with it, twice, or with an argument."""
    typed = [argument for name, argument in split.stages if name == RICE]
    if typed and not any(getattr(stage, "codes_indices", False) for stage in stages):
        raise CodecError(
            f"codec {split.text!r}: rice codes places, so a stage such as topk or qsgd must stand before it"
        )
    if typed and typed != [""]:
        raise CodecError(f"codec {split.text!r}: rice stands at most once and takes no argument")


def _check_names(tensors: Tensors, shapes: Shapes, shared: Shapes) -> None:
    missing = [spec.name for spec in shared if spec.name not in tensors]
    if missing:
        raise CodecError(f"tensors to encode lack {', '.join(map(repr, missing))}")
    unknown = set(tensors) - {spec.name for spec in shapes}
    if unknown:
        raise CodecError(f"tensors to encode hold {', '.join(map(repr, sorted(unknown)))}, unknown to the task")
