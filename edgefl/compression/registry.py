"""Stages by what a person types (`topk`) and by what stands in a body's header.

A number once given to a stage is never given to another one; stages of other packages (entry point
`edgefl.codecs`) travel by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from types import MappingProxyType

from edgefl.compression.layers import Layers
from edgefl.compression.lossless import Shuffle, Zstd
from edgefl.compression.specs import FEEDBACK
from edgefl.compression.stages import LosslessStage, StageKind, TensorStage, ValueStage
from edgefl.compression.tensors.atomo import Atomo
from edgefl.compression.tensors.changes import Changes
from edgefl.compression.tensors.dense import Dense
from edgefl.compression.tensors.lss import Lss
from edgefl.compression.tensors.powersgd import PowerSgd
from edgefl.compression.tensors.sparse import RandK, Threshold, TopK
from edgefl.compression.tensors.spectral import AtomoSvd
from edgefl.compression.values.floats import BFloat16, Float16, Float32
from edgefl.compression.values.int8 import Int8
from edgefl.compression.values.natural import Natural
from edgefl.compression.values.onebit import OneBit
from edgefl.compression.values.qsgd import Qsgd
from edgefl.compression.values.sign import Sign
from edgefl.compression.values.terngrad import TernGrad
from edgefl.compression.wire import StageId
from edgefl.errors import CodecError

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
AUTO = "auto"
RICE = "rice"
"""May be typed behind a stage that codes places; it is always used where it is smallest, so it has no number."""


def stage_names() -> list[str]:
    """Returns the names of all stages, those of installed packages included."""
    return sorted({*STAGES, FEEDBACK, RICE, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def find_stage(name: str) -> StageClass:
    """Returns the class of a stage, of ours or of an installed package.

    Raises:
        CodecError: there is none of that name.
    """
    return stage_by_name(name, name)[1]


def stage_by_name(name: str, spec: str) -> tuple[StageId, StageClass]:
    """Returns what a stage is called on the wire, and its class; `spec` is the line that it stands in.

    Raises:
        CodecError: there is none of that name.
    """
    if name in STAGES:
        return STAGES[name]
    found = _third_party(name)
    if found is None and name == AUTO:
        raise CodecError(f"codec {spec!r}: auto chooses among codecs in a run, by its [compression] up, and is none")
    if found is None and not name:
        raise CodecError(f"codec {spec!r}: a stage is missing; known: {', '.join(stage_names())}")
    if found is None:
        raise CodecError(
            f"unknown stage {name!r} in codec {spec!r}{_suggestion(name)}; known: {', '.join(stage_names())}"
        )
    return name, found


def stage_by_id(stage: StageId) -> StageClass:
    """Returns the class of a stage that stands in a header.

    Raises:
        CodecError: it is not known here.
    """
    if isinstance(stage, str):
        found = _third_party(stage)
        if found is None:
            raise CodecError(f"body was written by codec stage {stage!r}: install the package that has it")
        return found
    for number, known in STAGES.values():
        if number == stage:
            return known
    raise CodecError(f"body was written by codec stage number {stage}, which this edgefl does not know: update it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arranged:
    """Stages by their kind."""

    tensors: type[TensorStage]
    values: type[ValueStage]
    lossless: type[LosslessStage] | None


def arrange(stages: Sequence[StageClass], what: str) -> Arranged:
    """Returns stages by their kind; `what` they are of is named in the error.

    Raises:
        CodecError: they stand in an order that does not work.
    """
    kinds = [StageKind(stage.kind) for stage in stages]
    # Each kind at most once, in the order in which they are defined, a tensor stage first.
    if kinds != [kind for kind in StageKind if kind in kinds] or StageKind.TENSORS not in kinds:
        raise CodecError(
            f"{what} must be a tensor stage, then at most one value stage, then at most one lossless stage,"
            f" got {', '.join(kinds) or 'none'}"
        )
    by_kind: dict[StageKind, StageClass] = dict(zip(kinds, stages, strict=True))
    return Arranged(
        tensors=by_kind[StageKind.TENSORS],  # type: ignore[arg-type]  # mypy cannot see that its kind was checked
        values=by_kind.get(StageKind.VALUES, Float32),  # type: ignore[arg-type]  # likewise
        lossless=by_kind.get(StageKind.LOSSLESS),  # type: ignore[arg-type]  # likewise
    )


def _suggestion(name: str) -> str:
    close = get_close_matches(name, stage_names(), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _third_party(name: str) -> StageClass | None:
    for point in entry_points(group=ENTRY_POINTS, name=name):
        try:
            stage: StageClass = point.load()
        except Exception as error:  # an import runs a package's own code, which may raise anything
            raise CodecError(f"codec stage {name!r} of an installed package cannot be loaded: {error}") from error
        return stage
    return None
