"""Catalogue of codec stages for `edgefl codecs list`, and example codecs to measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from edgefl.compression.codec import make_codec
from edgefl.compression.codec_benchmark import to_dense
from edgefl.compression.registry import RICE, STAGES, StageClass, find_stage, list_stage_names
from edgefl.compression.specs import DELTA_PREFIX, FEEDBACK_PREFIX, parse_spec
from edgefl.core.errors import CodecError
from edgefl.core.types import Tensors

LAYERS = "layers"
LARGE_ENTRY_FRACTION = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDescription:
    """Description of a stage.

    Attributes:
        argument: the text behind its name; empty where there is none, optional parts in brackets.
        summary: its effect, and its authors.
        example_specs: codecs with it.
    """

    argument: str = ""
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
        FEEDBACK_PREFIX: StageDescription(
            summary="error feedback: what is left out of an update is added to the next (Karimireddy et al. 2019)",
            example_specs=("ef|topk:0.01|int8",),
        ),
        DELTA_PREFIX: StageDescription(
            summary="for `down`: the entries that changed since the version that the device holds"
        ),
        LAYERS: StageDescription(
            argument="; PATTERN = CODEC", summary="tensors by a codec of their own (Parallel-SGD's per variable)"
        ),
        "dense": StageDescription(summary="all entries as they are; stands in front where no other tensor stage does",
                       example_specs=("dense",)),
        "topk": StageDescription(argument="FRACTION",
                      summary="the largest entries of each tensor (AdaComp, Hardy et al. 2017)",
                      example_specs=("topk:0.01", "topk:0.01|fp16", "topk:0.01|int8")),
        "threshold": StageDescription(argument="SIZE", summary="the entries of at least that magnitude (Strom 2015)"),
        "randk": StageDescription(argument="FRACTION",
                       summary="random entries, scaled up (random masks, Konečný et al. 2016)",
                       example_specs=("randk:0.01",)),
        "atomo": StageDescription(argument="COUNT or FRACTION", example_specs=("atomo:0.01",),
                       summary="random entries, the larger the likelier: least variance (ATOMO, Wang et al. 2018)"),
        "atomo-svd": StageDescription(argument="RANK[:RULE]", example_specs=("atomo-svd:3", "atomo-svd:16|qsgd:4"),
                           summary="random singular vectors, the larger the likelier (ATOMO, Wang et al. 2018)"),
        "powersgd": StageDescription(argument="RANK[:RULE]", example_specs=("ef|powersgd:2",),
                          summary="low rank by one warm power iteration; needs ef (Vogels et al. 2019)"),
        "lss": StageDescription(argument="BITS[:FRACTION]", example_specs=("lss:2", "lss:2|fp16"),
                     summary="clusters of alike values, and means of buckets in each (LSS/CASQ, Fu et al. 2019)"),
        "fp16": StageDescription(summary="IEEE half precision", example_specs=("fp16", "fp16|zstd", "fp16|shuffle")),
        "bf16": StageDescription(summary="the upper half of a float32", example_specs=("bf16",)),
        "int8": StageDescription(argument="[channel]", example_specs=("int8", "int8:channel"),
                      summary="127ths of the largest magnitude, of each tensor or of each row of its first axis"),
        "natural": StageDescription(summary="a power of two beside the value, at random (Horváth et al. 2019)",
                         example_specs=("natural",)),
        "qsgd": StageDescription(argument="BITS[:BUCKET]", example_specs=("qsgd:1", "qsgd:2", "qsgd:4", "qsgd:8"),
                      summary="levels of the norm of a bucket, at random (QSGD, Alistarh et al. 2017)"),
        "terngrad": StageDescription(argument="[CLIP]", example_specs=("terngrad", "terngrad:inf"),
                          summary="-s, 0 or s, at random (TernGrad, Wen et al. 2017)"),
        "sign": StageDescription(summary="the sign, times the mean magnitude (Karimireddy et al. 2019)",
                      example_specs=("sign",)),
        "onebit": StageDescription(argument="[BUCKET]", example_specs=("onebit", "onebit:512"),
                        summary="the sign, times the mean of its side of zero (1-bit SGD, Seide et al. 2014)"),
        RICE: StageDescription(
                      summary="may be typed behind what codes places or levels; it is used wherever it is smallest"),
        "zstd": StageDescription(argument="[LEVEL]",
                      summary="Zstandard over the whole; left out where it saves nothing",
                      example_specs=("topk:0.01|int8|zstd",)),
        "shuffle": StageDescription(argument="[LEVEL]",
                      summary="first bytes of all numbers, then second ones; Zstandard"),
    }
)  # fmt: skip
"""In the order of the list: prefixes, tensor stages, value stages, lossless stages."""


def list_stages() -> list[StageListing]:
    """Returns a row for all known stages, those of installed packages last."""
    own_names = [name for name in STAGE_DESCRIPTIONS if name in {FEEDBACK_PREFIX, RICE} or name in STAGES]
    other_names = [name for name in list_stage_names() if name not in STAGE_DESCRIPTIONS]
    return [_make_listing(name) for name in [*own_names, *other_names]]


def make_example_specs(update: Tensors) -> list[str]:
    """Returns a line or more for every stage, with an argument that suits the update."""
    lines: list[str] = []
    for row in list_stages():
        entry = STAGE_DESCRIPTIONS.get(row.name)
        if row.name == "threshold":
            lines.append(f"threshold:{_compute_large_magnitude(update):.3g}")
        elif entry is not None:
            lines += entry.example_specs
        elif _is_valid_spec(row.name):
            lines.append(row.name)
    return list(dict.fromkeys(lines))


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


def _is_valid_spec(spec: str) -> bool:
    try:
        make_codec(spec, ())
    except CodecError:
        return False
    return True


def _compute_large_magnitude(update: Tensors) -> float:
    """Returns the magnitude that one entry in a hundred exceeds."""
    magnitudes = [
        np.abs(to_dense(tensor)).reshape(-1) for tensor in update.values() if to_dense(tensor).dtype == np.float32
    ]
    values = np.concatenate(magnitudes) if magnitudes else np.zeros(0)
    return max(float(np.quantile(values, 1 - LARGE_ENTRY_FRACTION)), 1e-30) if values.size else 1.0
