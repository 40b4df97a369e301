"""Codecs by what a person types (`dense|fp16`) and by what stands in a body's header.

A number once given to a stage is never given to another one; stages of other packages (entry point
`edgefl.codecs`) travel by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from types import MappingProxyType

from numpy.random import Generator

from edgefl.compression.dense import Dense, Float16, Float32
from edgefl.compression.stages import StageKind, TensorStage, ValueStage
from edgefl.compression.wire import Reader, StageId, read_frame, write_frame
from edgefl.errors import CodecError
from edgefl.types import Shapes, Tensor, Tensors

StageClass = type[TensorStage] | type[ValueStage]
ENTRY_POINTS = "edgefl.codecs"

STAGES: Mapping[str, tuple[int, StageClass]] = MappingProxyType({"dense": (1, Dense), "fp16": (2, Float16)})
"""Our own stages: name, number on the wire, class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """A codec for one task: encodes its shared tensors and decodes any body for them, whoever chose its codec."""

    spec: str
    shapes: Shapes
    ids: tuple[StageId, ...]
    tensors: TensorStage
    values: ValueStage

    def encode(self, tensors: Tensors, rng: Generator, *, epoch: int = 0) -> bytes:
        """Returns header and payload; `rng` is used by codecs that round at random.

        Raises:
            CodecError: a shared tensor is missing, unknown, or of the wrong shape or kind.
        """
        shared = shared_shapes(self.shapes)
        _check_names(tensors, self.shapes, shared)
        parts = self.tensors.encode(tensors, shared, self.values, rng)
        return write_frame(self.ids, len(shared), parts, epoch=epoch)

    def decode(self, body: bytes | memoryview, shapes: Shapes | None = None) -> dict[str, Tensor]:
        """Returns the shared tensors in `body`; see `decode_body`."""
        return decode_body(body, self.shapes if shapes is None else shapes)


def make_codec(spec: str, shapes: Shapes) -> Codec:
    """Returns the codec for one line such as `dense|fp16`.

    Raises:
        CodecError: an unknown stage, an argument that makes no sense, or stages in an order that does not work.
    """
    parts = [part.strip().partition(":") for part in spec.split("|")]
    found = [_stage_by_name(name, spec) for name, _, _ in parts]
    tensors, values = _arranged([stage for _, stage in found], f"codec {spec!r}")
    return Codec(
        spec=spec,
        shapes=shapes,
        ids=tuple(stage_id for stage_id, _ in found),
        tensors=tensors.parse(parts[0][2]),
        values=values.parse(parts[1][2] if len(parts) > 1 else ""),
    )


def decode_body(body: bytes | memoryview, shapes: Shapes, *, epoch: int = 0) -> dict[str, Tensor]:
    """Returns the shared tensors of `shapes`; the header says which codec reads them.

    Arrays are read-only views of `body` where possible: copy what is to be written to.

    Raises:
        CodecError: the body is damaged, of an unknown codec, of another epoch or of another task.
    """
    frame = read_frame(body)
    shared = shared_shapes(shapes)
    if frame.num_tensors != len(shared):
        raise CodecError(f"body holds {frame.num_tensors} tensors, the task shares {len(shared)}")
    if frame.epoch != epoch:
        raise CodecError(f"body is of epoch {frame.epoch}, expected {epoch}")
    tensors, values = _arranged([_stage_by_id(stage) for stage in frame.stages], "body")
    reader = Reader(frame.payload)
    decoded = tensors.decode(reader, shared, values)
    reader.finish()
    return decoded


def shared_shapes(shapes: Shapes) -> Shapes:
    """Returns the specs of the tensors that travel, in order."""
    return tuple(spec for spec in shapes if spec.shared)


def stage_names() -> list[str]:
    """Returns the names of all stages, those of installed packages included."""
    return sorted({*STAGES, *(point.name for point in entry_points(group=ENTRY_POINTS))})


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


def _arranged(stages: list[StageClass], what: str) -> tuple[type[TensorStage], type[ValueStage]]:
    kinds = [stage.kind for stage in stages]
    if kinds not in ([StageKind.TENSORS], [StageKind.TENSORS, StageKind.VALUES]):
        found = ", ".join(kinds)
        raise CodecError(f"{what} must be a tensor stage and at most one value stage behind it, got {found}")
    tensors, values = stages[0], stages[1] if len(stages) > 1 else Float32
    return tensors, values  # type: ignore[return-value]  # the kinds were checked above, mypy cannot see it


def _check_names(tensors: Tensors, shapes: Shapes, shared: Shapes) -> None:
    missing = [spec.name for spec in shared if spec.name not in tensors]
    if missing:
        raise CodecError(f"tensors to encode lack {', '.join(map(repr, missing))}")
    unknown = set(tensors) - {spec.name for spec in shapes}
    if unknown:
        raise CodecError(f"tensors to encode hold {', '.join(map(repr, sorted(unknown)))}, unknown to the task")
