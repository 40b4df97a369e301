"""Registry of codec stages, by typed name (`topk`) and by number in a body's header.

A number is never reused for another stage; stages of other packages (entry point
`edgefl.codecs`) travel by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from types import MappingProxyType

from edgefl.compression.entropy.lossless import ByteShuffle, Zstd
from edgefl.compression.lowrank.atomo_svd import AtomoSvd
from edgefl.compression.lowrank.powersgd import PowerSgd
from edgefl.compression.per_layer import PerLayerStage
from edgefl.compression.quantisation.floats import BFloat16, Float16, Float32
from edgefl.compression.quantisation.int8 import Int8
from edgefl.compression.quantisation.natural import NaturalCompression
from edgefl.compression.quantisation.onebit import OneBitSgd
from edgefl.compression.quantisation.qsgd import Qsgd
from edgefl.compression.quantisation.sign import ScaledSign
from edgefl.compression.quantisation.terngrad import TernGrad
from edgefl.compression.sparsification.atomo import Atomo
from edgefl.compression.sparsification.dense import Dense
from edgefl.compression.sparsification.lss import Lss
from edgefl.compression.sparsification.sparse_delta import SparseDelta
from edgefl.compression.sparsification.sparsifiers import RandK, Threshold, TopK
from edgefl.compression.specs import FEEDBACK_PREFIX
from edgefl.compression.stages import LosslessStage, StageKind, TensorStage, ValueStage
from edgefl.compression.wire import StageId
from edgefl.core.errors import CodecError

StageClass = type[TensorStage] | type[ValueStage] | type[LosslessStage]
ENTRY_POINT_GROUP = "edgefl.codecs"
STAGES: Mapping[str, tuple[int, StageClass]] = MappingProxyType(
    {
        "dense": (1, Dense),
        "fp16": (2, Float16),
        "bf16": (3, BFloat16),
        "int8": (4, Int8),
        "qsgd": (5, Qsgd),
        "terngrad": (6, TernGrad),
        "sign": (7, ScaledSign),
        "topk": (8, TopK),
        "threshold": (9, Threshold),
        "randk": (10, RandK),
        "delta": (11, SparseDelta),
        "zstd": (12, Zstd),
        "shuffle": (13, ByteShuffle),
        "atomo": (14, Atomo),
        "atomo-svd": (15, AtomoSvd),
        "powersgd": (16, PowerSgd),
        "natural": (17, NaturalCompression),
        "onebit": (18, OneBitSgd),
        "lss": (19, Lss),
        "layers": (20, PerLayerStage),
    }
)
"""Built-in stages: name, number on the wire, class."""
LAYERS = "layers"
AUTO = "auto"
RICE = "rice"
"""May be typed behind a stage that codes indices; it is always used where it is smallest, so it has no number."""


def list_stage_names() -> list[str]:
    """Returns the names of all stages, those of installed packages included."""
    return sorted({*STAGES, FEEDBACK_PREFIX, RICE, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def find_stage(name: str) -> StageClass:
    """Returns the class of a stage, built in or of an installed package.

    Raises:
        CodecError: there is none of that name.
    """
    return find_stage_by_name(name, name)[1]


def find_stage_by_name(name: str, spec: str) -> tuple[StageId, StageClass]:
    """Returns the wire identity of a stage, and its class; `spec` is its line.

    Raises:
        CodecError: there is none of that name.
    """
    if name in STAGES:
        return STAGES[name]
    stage = _find_third_party(name)
    if stage is None and name == AUTO:
        raise CodecError(f"codec {spec!r}: auto chooses among codecs in a run, by its [compression] up, and is none")
    if stage is None and not name:
        raise CodecError(f"codec {spec!r}: a stage is missing; known: {', '.join(list_stage_names())}")
    if stage is None:
        raise CodecError(
            f"unknown stage {name!r} in codec {spec!r}{_format_suggestion(name)}; "
            f"known: {', '.join(list_stage_names())}"
        )
    return name, stage


def find_stage_by_id(stage: StageId) -> StageClass:
    """Returns the class of a stage in a header.

    Raises:
        CodecError: it is not known here.
    """
    if isinstance(stage, str):
        third_party = _find_third_party(stage)
        if third_party is None:
            raise CodecError(f"body was written by codec stage {stage!r}: install the package that has it")
        return third_party
    for number, built_in in STAGES.values():
        if number == stage:
            return built_in
    raise CodecError(f"body was written by codec stage number {stage}, which this edgefl does not know: update it")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePipeline:
    """Stages by their kind."""

    tensor_stage: type[TensorStage]
    value_stage: type[ValueStage]
    lossless_stage: type[LosslessStage] | None


def make_pipeline(stages: Sequence[StageClass], what: str) -> StagePipeline:
    """Returns stages by their kind; `what` names their codec in the error.

    Raises:
        CodecError: their order is invalid.
    """
    kinds = [StageKind(stage.kind) for stage in stages]
    # Each kind at most once, in the order in which they are defined, a tensor stage first.
    if kinds != [kind for kind in StageKind if kind in kinds] or StageKind.TENSORS not in kinds:
        raise CodecError(
            f"{what} must be a tensor stage, then at most one value stage, then at most one lossless stage,"
            f" got {', '.join(kinds) or 'none'}"
        )
    by_kind: dict[StageKind, StageClass] = dict(zip(kinds, stages, strict=True))
    return StagePipeline(
        tensor_stage=by_kind[StageKind.TENSORS],  # type: ignore[arg-type]  # mypy does not infer the checked kind
        value_stage=by_kind.get(StageKind.VALUES, Float32),  # type: ignore[arg-type]  # likewise
        lossless_stage=by_kind.get(StageKind.LOSSLESS),  # type: ignore[arg-type]  # likewise
    )


def _format_suggestion(name: str) -> str:
    close = get_close_matches(name, list_stage_names(), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _find_third_party(name: str) -> StageClass | None:
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            stage: StageClass = point.load()
        except Exception as error:  # an import runs a package's own code, which may raise anything
            raise CodecError(f"codec stage {name!r} of an installed package cannot be loaded: {error}") from error
        return stage
    return None
