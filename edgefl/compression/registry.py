"""Codecs by what a person types (`topk:0.01|int8`) and by what stands in a body's header.

A number once given to a stage is never given to another one; stages of other packages (entry point
`edgefl.codecs`) travel by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from types import MappingProxyType

from numpy.random import Generator

from edgefl.compression.atomo import Atomo
from edgefl.compression.changes import Changes
from edgefl.compression.dense import Dense
from edgefl.compression.floats import BFloat16, Float16, Float32
from edgefl.compression.int8 import Int8
from edgefl.compression.layers import Group, GroupCodec, Layers, grouped
from edgefl.compression.lossless import Shuffle, Zstd
from edgefl.compression.lss import Lss
from edgefl.compression.natural import Natural
from edgefl.compression.onebit import OneBit
from edgefl.compression.powersgd import PowerSgd
from edgefl.compression.qsgd import Qsgd
from edgefl.compression.sign import Sign
from edgefl.compression.sparse import RandK, Threshold, TopK
from edgefl.compression.specs import DELTA, FEEDBACK, CodecSpec, split_spec
from edgefl.compression.spectral import AtomoSvd
from edgefl.compression.stages import LosslessStage, StageKind, TensorStage, ValueStage, does_remember
from edgefl.compression.terngrad import TernGrad
from edgefl.compression.wire import MAX_PAYLOAD_BYTES, Frame, Reader, StageId, read_frame, write_frame
from edgefl.errors import CodecError
from edgefl.types import Array, Shapes, Tensor, Tensors

StageClass = type[TensorStage] | type[ValueStage] | type[LosslessStage]
ENTRY_POINTS = "edgefl.codecs"

STAGES: Mapping[str, tuple[int, StageClass]] = MappingProxyType(
    {
        "dense": (1, Dense),
        "fp16": (2, Float16),
        "bf16": (3, BFloat16),
        "int8": (4, Int8),
        "qsgd": (5, Qsgd),
        "terngrad": (6, TernGrad),
        "sign": (7, Sign),
        "topk": (8, TopK),
        "threshold": (9, Threshold),
        "randk": (10, RandK),
        "delta": (11, Changes),
        "zstd": (12, Zstd),
        "shuffle": (13, Shuffle),
        "atomo": (14, Atomo),
        "atomo-svd": (15, AtomoSvd),
        "powersgd": (16, PowerSgd),
        "natural": (17, Natural),
        "onebit": (18, OneBit),
        "lss": (19, Lss),
        "layers": (20, Layers),
    }
)
"""Our own stages: name, number on the wire, class."""

LAYERS = "layers"
RICE = "rice"
"""May be typed behind a stage that codes places; it is always used where it is smallest, so it has no number."""


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
        return packed if smaller and length <= _most_bytes(shared) else None


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
    for part in _parts(codec) if split.prefix == FEEDBACK else ():
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
    found = [_stage_by_name(name, split.text) for name, _ in typed if name != RICE]
    _check_rice(split, [stage for _, stage in found])
    arguments = [argument for name, argument in typed if name != RICE]
    if found and found[0][1].kind != StageKind.TENSORS:
        found.insert(0, STAGES["dense"])
        arguments.insert(0, "")
    arranged = _arranged([stage for _, stage in found], f"codec {split.text!r}")
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
    for part in _parts(codec):
        if split.prefix != FEEDBACK and does_remember(part.tensors):
            raise CodecError(
                f"codec {part.spec!r}: it is biased and goes on from the update before, so it needs error feedback"
                f" to keep what it leaves out: write {FEEDBACK}|{split.text}, for [compression] up"
            )


def decode_body(body: bytes | memoryview, shapes: Shapes, *, epoch: int = 0) -> dict[str, Tensor]:
    """Returns the shared tensors of `shapes`; the header says which codec reads them.

    Arrays are read-only views of `body` where possible: copy what is to be written to.

    Raises:
        CodecError: the body is damaged, of an unknown codec, of another epoch or of another task; or it is a delta,
            which `delta.apply_delta` reads.
    """
    frame = read_frame(body)
    if is_delta_frame(frame):
        raise CodecError("body is a delta of a model, expected whole tensors")
    return decode_frame(frame, shapes, epoch=epoch)


def decode_frame(frame: Frame, shapes: Shapes, *, epoch: int = 0) -> dict[str, Tensor]:
    """Returns what `decode_body` does, of a body whose header was read."""
    shared = shared_shapes(shapes)
    if frame.num_tensors != len(shared):
        raise CodecError(f"body holds {frame.num_tensors} tensors, the task shares {len(shared)}")
    if frame.epoch != epoch:
        raise CodecError(f"body is of epoch {frame.epoch}, expected {epoch}")
    stages = _arranged([_stage_by_id(stage) for stage in frame.stages], "body")
    payload = frame.payload
    if stages.lossless is not None:
        payload = stages.lossless.decode(payload, _most_bytes(shared))
    reader = Reader(payload)
    decoded = stages.tensors.decode(reader, shared, stages.values)
    reader.finish()
    return decoded


def decode_group(body: memoryview, shapes: Shapes) -> dict[str, Tensor]:
    """Returns the tensors of one group of `Layers`, whose body may hold no more layers.

    Raises:
        CodecError: as `decode_body`.
    """
    frame = read_frame(body)
    if is_delta_frame(frame) or STAGES[LAYERS][0] in frame.stages:
        raise CodecError("payload holds layers or a delta within a layer, expected whole tensors")
    return decode_frame(frame, shapes)


def is_delta_frame(frame: Frame) -> bool:
    """Says whether a body tells only what changed in a model."""
    return frame.stages[0] == STAGES[DELTA][0]


def shared_shapes(shapes: Shapes) -> Shapes:
    """Returns the specs of the tensors that travel, in order."""
    return tuple(spec for spec in shapes if spec.shared)


def stage_names() -> list[str]:
    """Returns the names of all stages, those of installed packages included."""
    return sorted({*STAGES, FEEDBACK, RICE, *(point.name for point in entry_points(group=ENTRY_POINTS))})


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


def _parts(codec: Codec) -> Sequence[GroupCodec]:
    """Returns the codecs that numbers go through: the codec itself, or those of its groups."""
    return [group.codec for group in codec.tensors.groups] if isinstance(codec.tensors, Layers) else [codec]


def find_stage(name: str) -> StageClass:
    """Returns the class of a stage, of ours or of an installed package.

    Raises:
        CodecError: there is none of that name.
    """
    return _stage_by_name(name, name)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arranged:
    tensors: type[TensorStage]
    values: type[ValueStage]
    lossless: type[LosslessStage] | None


def _arranged(stages: Sequence[StageClass], what: str) -> _Arranged:
    kinds = [StageKind(stage.kind) for stage in stages]
    # Each kind at most once, in the order in which they are defined, a tensor stage first.
    if kinds != [kind for kind in StageKind if kind in kinds] or StageKind.TENSORS not in kinds:
        raise CodecError(
            f"{what} must be a tensor stage, then at most one value stage, then at most one lossless stage,"
            f" got {', '.join(kinds) or 'none'}"
        )
    by_kind: dict[StageKind, StageClass] = dict(zip(kinds, stages, strict=True))
    return _Arranged(
        tensors=by_kind[StageKind.TENSORS],  # type: ignore[arg-type]  # mypy cannot see that its kind was checked
        values=by_kind.get(StageKind.VALUES, Float32),  # type: ignore[arg-type]  # likewise
        lossless=by_kind.get(StageKind.LOSSLESS),  # type: ignore[arg-type]  # likewise
    )


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


def _most_bytes(shared: Shapes) -> int:
    """Returns how long an unpacked payload may be: none of our stages takes a third of it."""
    return min(MAX_PAYLOAD_BYTES, 4 * sum(spec.nbytes for spec in shared) + 256 * len(shared) + 4096)


def _stage_by_name(name: str, spec: str) -> tuple[StageId, StageClass]:
    if name in STAGES:
        return STAGES[name]
    found = _third_party(name)
    if found is None:
        raise CodecError(
            f"unknown stage {name!r} in codec {spec!r}{_suggestion(name)}; known: {', '.join(stage_names())}"
        )
    return name, found


def _suggestion(name: str) -> str:
    close = get_close_matches(name, stage_names(), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _stage_by_id(stage: StageId) -> StageClass:
    if isinstance(stage, str):
        found = _third_party(stage)
        if found is None:
            raise CodecError(f"body was written by codec stage {stage!r}: install the package that has it")
        return found
    for number, known in STAGES.values():
        if number == stage:
            return known
    raise CodecError(f"body was written by codec stage number {stage}, which this edgefl does not know: update it")


def _third_party(name: str) -> StageClass | None:
    for point in entry_points(group=ENTRY_POINTS, name=name):
        stage: StageClass = point.load()
        return stage
    return None


def _check_names(tensors: Tensors, shapes: Shapes, shared: Shapes) -> None:
    missing = [spec.name for spec in shared if spec.name not in tensors]
    if missing:
        raise CodecError(f"tensors to encode lack {', '.join(map(repr, missing))}")
    unknown = set(tensors) - {spec.name for spec in shapes}
    if unknown:
        raise CodecError(f"tensors to encode hold {', '.join(map(repr, sorted(unknown)))}, unknown to the task")
