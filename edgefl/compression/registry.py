"""Codec lines as typed, and the registry of their stages by name (`topk`) and by number in a body's header.

topk:0.01|int8|rice               stages joined by bars, each with an argument behind its colon
ef|topk:0.01|int8                 the device keeps its codec's residual and adds it to the next update
delta|fp16                        the model as entries changed since the device's version
ef|topk:0.01; *.bias = dense      some tensors by a codec of their own, see `codec.py`; `ef` covers them, too

A number is never reused for another stage; stages of other packages (entry point
`edgefl.codecs`) travel by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from edgefl.compression.entropy.zstd import ByteShuffle, Zstd
from edgefl.compression.low_rank import PowerSgd
from edgefl.compression.quantisation.alternating import Alternating
from edgefl.compression.quantisation.loss_aware import LossAware
from edgefl.compression.quantisation.rounding import BFloat16, Float16, Float32, Int8, OneBitSgd, ScaledSign
from edgefl.compression.quantisation.stochastic_rounding import NaturalCompression, Qsgd, TernGrad
from edgefl.compression.sparsification.atomo import Atomo, AtomoDct
from edgefl.compression.sparsification.atomo_svd import AtomoAuto, AtomoSvd
from edgefl.compression.sparsification.lss import Lss
from edgefl.compression.sparsification.sparsifiers import Dense, RandK, Slice, SparseDelta, Threshold, TopK
from edgefl.compression.stages import LosslessStage, StageKind, TensorStage, ValueStage
from edgefl.compression.wire import StageId
from edgefl.core.errors import CodecError
from edgefl.core.extensions import ExtensionKind, list_entry_points, load_entry_point
from edgefl.core.settings import find_similar
from edgefl.core.types import Scalar

FEEDBACK_PREFIX = "ef"
DELTA_PREFIX = "delta"
LAYER_SEPARATOR = ";"
PATTERN_SEPARATOR = "="

StageClass = type[TensorStage] | type[ValueStage] | type[LosslessStage]
KIND = ExtensionKind(
    noun="codec stage",
    group="edgefl.codecs",
    is_declared=lambda found: getattr(found, "kind", None) in list(StageKind),
    declaration="has a StageKind of edgefl.compression.stages as its kind",
    error=CodecError,
)
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
        "atomo-auto": (15, AtomoAuto),
        "powersgd": (16, PowerSgd),
        "natural": (17, NaturalCompression),
        "onebit": (18, OneBitSgd),
        "lss": (19, Lss),
        "atomo-dct": (21, AtomoDct),
        "alternating": (22, Alternating),
        "laq": (23, LossAware),
        "slice": (24, Slice),
    }
)
"""Built-in stages: name, number on the wire, class. Names with one number write one form, read by the first."""
LAYERS, LAYERS_ID = "layers", 20
"""The stage of `codec.py` that holds other codecs: only lines with patterns have it, so none is found by name."""
AUTO = "auto"
RICE = "rice"
"""May be typed behind a stage that codes indices; it is always used where it is smallest, so it has no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """A parsed codec line.

    Attributes:
        text: as typed.
        prefix: `ef`, `delta` or empty.
        stages: names and arguments, as typed.
        layers: patterns of tensor names and the lines of matching tensors, the first match counts; tensors without
            a match go through `stages`.
    """

    text: str
    prefix: str
    stages: tuple[tuple[str, str], ...]
    layers: tuple[tuple[str, str], ...] = ()

    @property
    def line(self) -> str:
        """The line without its prefix; `dense` by default."""
        return format_with_layers(self.default_line, dict(self.layers))

    @property
    def default_line(self) -> str:
        """The line without its prefix and its layers."""
        return "|".join(f"{name}:{argument}" if argument else name for name, argument in self.stages) or "dense"


def parse_spec(text: str) -> CodecSpec:
    """Returns the parts of a line; the registry checks whether its stages exist and fit together.

    Raises:
        CodecError: something behind a semicolon is not `PATTERN = CODEC`.
    """
    line, *layers = text.split(LAYER_SEPARATOR)
    parts = [part.strip().partition(":") for part in line.split("|")]
    prefix = parts[0][0] if parts[0] in ((FEEDBACK_PREFIX, "", ""), (DELTA_PREFIX, "", "")) else ""
    stages = tuple((name, argument) for name, _, argument in parts[1 if prefix else 0 :])
    return CodecSpec(text=text, prefix=prefix, stages=stages, layers=_parse_layers(text, layers))


def format_with_layers(line: str, layers: Mapping[str, Scalar]) -> str:
    """Returns the line of a codec and those of layers, in the order of the patterns."""
    return f"{LAYER_SEPARATOR} ".join(
        [line, *(f"{pattern} {PATTERN_SEPARATOR} {layer_line}" for pattern, layer_line in layers.items())]
    )


def _parse_layers(text: str, typed: list[str]) -> tuple[tuple[str, str], ...]:
    layers: dict[str, str] = {}
    for entry in typed:
        pattern, is_there, line = (part.strip() for part in entry.partition(PATTERN_SEPARATOR))
        if not (pattern and is_there and line):
            raise CodecError(f"codec {text!r}: behind a semicolon stands PATTERN = CODEC, got {entry.strip()!r}")
        if pattern in layers:
            raise CodecError(f"codec {text!r}: the pattern {pattern!r} has two codecs")
        layers[pattern] = line
    return tuple(layers.items())


def list_stage_names() -> list[str]:
    """Returns the names of all stages, those of installed packages included."""
    return sorted({*STAGES, FEEDBACK_PREFIX, LAYERS, RICE, *list_entry_points(KIND)})


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


def sort_stages(
    stages: Sequence[StageClass], what: str
) -> tuple[type[TensorStage], type[ValueStage], type[LosslessStage] | None]:
    """Returns the tensor, the value and the lossless stage; `what` names their codec in the error.

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
    return (
        by_kind[StageKind.TENSORS],  # type: ignore[return-value]  # mypy does not infer the checked kind
        by_kind.get(StageKind.VALUES, Float32),
        by_kind.get(StageKind.LOSSLESS),
    )


def _format_suggestion(name: str) -> str:
    similar = find_similar(name, list_stage_names())
    return f", did you mean {similar!r}?" if similar else ""


def _find_third_party(name: str) -> StageClass | None:
    stage: StageClass | None = load_entry_point(KIND, name)
    return stage


class StageDescription(NamedTuple):
    """Description of a stage.

    Attributes:
        argument: the text behind its name; empty where there is none, optional parts in brackets.
        summary: its effect, and its authors.
        example_specs: codecs with it.
    """

    argument: str
    summary: str
    example_specs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageListing:
    """A row of the list; with `is_contraction` it works behind `ef`. None: lossless, or unknown."""

    name: str
    kind: str
    argument: str
    summary: str
    is_biased: bool | None = None
    is_contraction: bool | None = None


STAGE_DESCRIPTIONS: Mapping[str, StageDescription] = MappingProxyType(
    {
        FEEDBACK_PREFIX: StageDescription("",
            "error feedback: what is left out of an update is added to the next (Karimireddy et al. 2019)",
            ("ef|topk:0.01|int8",)),
        DELTA_PREFIX: StageDescription(
            "", "for `down`: the entries that changed since the version that the device holds"),
        LAYERS: StageDescription(
            "; PATTERN = CODEC", "tensors by a codec of their own (Parallel-SGD's per variable)"),
        "dense": StageDescription("", "all entries as they are; stands in front where no other tensor stage does",
            ("dense",)),
        "topk": StageDescription("FRACTION", "the largest entries of each tensor (AdaComp, Hardy et al. 2017)",
            ("topk:0.01", "topk:0.01|fp16", "topk:0.01|int8")),
        "threshold": StageDescription("SIZE", "the entries of at least that magnitude (Strom 2015)"),
        "randk": StageDescription("FRACTION", "random entries, scaled up (random masks, Konečný et al. 2016)",
            ("randk:0.01",)),
        "atomo": StageDescription("COUNT or FRACTION",
            "random entries, the larger the likelier: least variance (ATOMO, Wang et al. 2018)",
            ("atomo:0.01",)),
        "atomo-svd": StageDescription("RANK[:RULE]",
            "random singular vectors, the larger the likelier (ATOMO, Wang et al. 2018)",
            ("atomo-svd:3", "atomo-svd:16|qsgd:4")),
        "atomo-auto": StageDescription("RANK[:RULE]",
            "as atomo-svd, or as many bytes of entries where these vary less (ATOMO's indicator)",
            ("atomo-auto:3",)),
        "atomo-dct": StageDescription("COUNT or FRACTION",
            "as atomo, on cosine coefficients of each tensor (ATOMO with Fourier atoms)",
            ("atomo-dct:0.01",)),
        "powersgd": StageDescription(
            "RANK[:RULE]", "low rank by one warm power iteration; needs ef (Vogels et al. 2019)", ("ef|powersgd:2",)),
        "slice": StageDescription("PART:PARTS",
            "a part of each tensor; the strategy redundant sets it (ndc of Parallel-SGD)",
            ("slice:2:3", "slice:1:2|fp16")),
        "lss": StageDescription("BITS[:FRACTION][:hash][:keep][:raw]",
            "clusters of alike values, and means of buckets in each (LSS/CASQ, Fu et al. 2019)",
            ("lss:2", "lss:2|fp16")),
        "laq": StageDescription("BITS",
            "levels times a scale by the curvature of the loss; needs ef (LAQ of Parallel-SGD, Hou and Kwok 2018)",
            ("ef|laq:4",)),
        "fp16": StageDescription("", "IEEE half precision", ("fp16", "fp16|zstd", "fp16|shuffle")),
        "bf16": StageDescription("", "the upper half of a float32", ("bf16",)),
        "int8": StageDescription("[channel]",
            "127ths of the largest magnitude, of each tensor or of each row of its first axis",
            ("int8", "int8:channel")),
        "natural": StageDescription("", "a power of two beside the value, at random (Horváth et al. 2019)",
            ("natural",)),
        "qsgd": StageDescription("BITS[:BUCKET]",
            "levels of the norm of a bucket, at random (QSGD, Alistarh et al. 2017)",
            ("qsgd:1", "qsgd:2", "qsgd:4", "qsgd:8")),
        "alternating": StageDescription("BITS[:random][:tan]",
            "levels times a scale, found by turns (TQN, LAQ and non-uniform levels of Parallel-SGD)",
            ("alternating:4", "alternating:4:tan", "alternating:2:random")),
        "terngrad": StageDescription("[CLIP]", "-s, 0 or s, at random (TernGrad, Wen et al. 2017)",
            ("terngrad", "terngrad:inf")),
        "sign": StageDescription("", "the sign, times the mean magnitude (Karimireddy et al. 2019)", ("sign",)),
        "onebit": StageDescription("[BUCKET]",
            "the sign, times the mean of its side of zero (1-bit SGD, Seide et al. 2014)",
            ("onebit", "onebit:512")),
        RICE: StageDescription(
            "", "may be typed behind what codes places or levels; it is used wherever it is smallest"),
        "zstd": StageDescription("[LEVEL]", "Zstandard over the whole; left out where it saves nothing",
            ("topk:0.01|int8|zstd",)),
        "shuffle": StageDescription("[LEVEL]", "first bytes of all numbers, then second ones; Zstandard"),
    }
)  # fmt: skip
"""In the order of the list: prefixes, tensor stages, value stages, lossless stages."""


def list_stages() -> list[StageListing]:
    """Returns a row for all known stages, those of installed packages last."""
    other_names = [name for name in list_stage_names() if name not in STAGE_DESCRIPTIONS]
    return [_make_listing(name) for name in [*STAGE_DESCRIPTIONS, *other_names]]


def _make_listing(name: str) -> StageListing:
    entry = STAGE_DESCRIPTIONS.get(name)
    if name in {FEEDBACK_PREFIX, DELTA_PREFIX, LAYERS, RICE}:
        kind = "any" if name == RICE else LAYERS if name == LAYERS else "prefix"
        return StageListing(
            name=name, kind=kind, argument=STAGE_DESCRIPTIONS[name].argument, summary=STAGE_DESCRIPTIONS[name].summary
        )
    try:
        stage = find_stage(name)
    except CodecError as error:  # the package cannot be imported: the other stages are listed all the same
        return StageListing(name=name, kind="?", argument="?", summary=str(error))
    unbiased, contraction = (
        _read_property(name, stage, attribute) for attribute in ("is_unbiased", "is_contraction")
    )
    return StageListing(
        name=name,
        kind=str(stage.kind),
        argument="?" if entry is None else entry.argument,
        is_biased=None if unbiased is None else not unbiased,
        is_contraction=contraction,
        summary=_get_first_line(stage) if entry is None else entry.summary,
    )


def _read_property(name: str, stage: StageClass, attribute: str) -> bool | None:
    """Returns a property of a stage class or, where it depends on the argument, its first line."""
    declared: object = getattr(stage, attribute, None)
    if declared is None or isinstance(declared, bool):
        return declared
    entry = STAGE_DESCRIPTIONS.get(name)
    line = entry.example_specs[0] if entry is not None and entry.example_specs else name
    arguments = [argument for stage_name, argument in parse_spec(line).stages if stage_name == name]
    try:
        return bool(getattr(stage.parse(arguments[0] if arguments else ""), attribute))
    except CodecError:  # of a package: it declares nothing, and needs an argument unknown here
        return None


def _get_first_line(stage: StageClass) -> str:
    return (stage.__doc__ or "").strip().partition("\n")[0]
