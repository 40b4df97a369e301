"""What may stand in a codec's line, in the words of `edgefl codecs list`, and what to measure of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from edgefl.compression.codec import make_codec
from edgefl.compression.measuring import dense
from edgefl.compression.registry import RICE, STAGES, StageClass, find_stage, stage_names
from edgefl.compression.specs import DELTA, FEEDBACK, split_spec
from edgefl.errors import CodecError
from edgefl.types import Tensors

LAYERS = "layers"
LARGE_FRACTION = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What there is to say of a stage.

    Attributes:
        argument: what follows its name; empty where nothing does, in brackets what may be left out.
        summary: what it does, and who found it.
        lines: codecs that show it.
    """

    argument: str = ""
    summary: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A row of the list; with `is_contraction` it works behind `ef`. None where nothing is lost, or not told."""

    name: str
    kind: str
    argument: str
    summary: str
    is_biased: bool | None = None
    is_contraction: bool | None = None


ENTRIES: Mapping[str, Entry] = MappingProxyType(
    {
        FEEDBACK: Entry(
            summary="error feedback: what is left out of an update is added to the next (Karimireddy et al. 2019)",
            lines=("ef|topk:0.01|int8",),
        ),
        DELTA: Entry(summary="for `down`: the entries that changed since the version that the device holds"),
        LAYERS: Entry(
            argument="; PATTERN = CODEC", summary="tensors by a codec of their own (Parallel-SGD's per variable)"
        ),
        "dense": Entry(summary="all entries as they are; stands in front where no other tensor stage does",
                       lines=("dense",)),
        "topk": Entry(argument="FRACTION", summary="the largest entries of each tensor (AdaComp, Hardy et al. 2017)",
                      lines=("topk:0.01", "topk:0.01|fp16", "topk:0.01|int8")),
        "threshold": Entry(argument="SIZE", summary="the entries of at least that magnitude (Strom 2015)"),
        "randk": Entry(argument="FRACTION", summary="random entries, scaled up (random masks, Konečný et al. 2016)",
                       lines=("randk:0.01",)),
        "atomo": Entry(argument="COUNT or FRACTION", lines=("atomo:0.01",),
                       summary="random entries, the larger the likelier: least variance (ATOMO, Wang et al. 2018)"),
        "atomo-svd": Entry(argument="RANK[:RULE]", lines=("atomo-svd:3", "atomo-svd:16|qsgd:4"),
                           summary="random singular vectors, the larger the likelier (ATOMO, Wang et al. 2018)"),
        "powersgd": Entry(argument="RANK[:RULE]", lines=("ef|powersgd:2",),
                          summary="low rank by one warm power iteration; needs ef (Vogels et al. 2019)"),
        "lss": Entry(argument="BITS[:FRACTION]", lines=("lss:2", "lss:2|fp16"),
                     summary="clusters of alike values, and means of buckets in each (LSS/CASQ, Fu et al. 2019)"),
        "fp16": Entry(summary="IEEE half precision", lines=("fp16", "fp16|zstd", "fp16|shuffle")),
        "bf16": Entry(summary="the upper half of a float32", lines=("bf16",)),
        "int8": Entry(argument="[channel]", lines=("int8", "int8:channel"),
                      summary="127ths of the largest magnitude, of each tensor or of each row of its first axis"),
        "natural": Entry(summary="a power of two beside the value, at random (Horváth et al. 2019)",
                         lines=("natural",)),
        "qsgd": Entry(argument="BITS[:BUCKET]", lines=("qsgd:1", "qsgd:2", "qsgd:4", "qsgd:8"),
                      summary="levels of the norm of a bucket, at random (QSGD, Alistarh et al. 2017)"),
        "terngrad": Entry(argument="[CLIP]", lines=("terngrad", "terngrad:inf"),
                          summary="-s, 0 or s, at random (TernGrad, Wen et al. 2017)"),
        "sign": Entry(summary="the sign, times the mean magnitude (Karimireddy et al. 2019)", lines=("sign",)),
        "onebit": Entry(argument="[BUCKET]", lines=("onebit", "onebit:512"),
                        summary="the sign, times the mean of its side of zero (1-bit SGD, Seide et al. 2014)"),
        RICE: Entry(summary="may be typed behind what codes places or levels; it is used wherever it is smallest"),
        "zstd": Entry(argument="[LEVEL]", summary="Zstandard over the whole; left out where it saves nothing",
                      lines=("topk:0.01|int8|zstd",)),
        "shuffle": Entry(argument="[LEVEL]", summary="first bytes of all numbers, then second ones; Zstandard"),
    }
)  # fmt: skip
"""In the order of the list: what stands in front, tensor stages, value stages, lossless ones."""


def listed() -> list[Listed]:
    """Returns a row for all that may be typed, stages of installed packages last."""
    own = [name for name in ENTRIES if name in {FEEDBACK, RICE} or name in STAGES]
    undescribed = [name for name in stage_names() if name not in ENTRIES]
    return [_listed(name) for name in [*own, *undescribed]]


def usual_lines(update: Tensors) -> list[str]:
    """Returns a line or more for every stage, with an argument that suits the update."""
    lines: list[str] = []
    for row in listed():
        entry = ENTRIES.get(row.name)
        if row.name == "threshold":
            lines.append(f"threshold:{_large(update):.3g}")
        elif entry is not None:
            lines += entry.lines
        elif _works(row.name):
            lines.append(row.name)
    return list(dict.fromkeys(lines))


def _listed(name: str) -> Listed:
    entry = ENTRIES.get(name)
    if name in {FEEDBACK, DELTA, LAYERS, RICE}:
        kind = "any" if name == RICE else LAYERS if name == LAYERS else "prefix"
        return Listed(name=name, kind=kind, argument=ENTRIES[name].argument, summary=ENTRIES[name].summary)
    try:
        stage = find_stage(name)
    except CodecError as error:  # of a package that cannot be imported: the others are there all the same
        return Listed(name=name, kind="?", argument="?", summary=str(error))
    unbiased, contraction = (_property(name, stage, which) for which in ("is_unbiased", "is_contraction"))
    return Listed(
        name=name,
        kind=str(stage.kind),
        argument="?" if entry is None else entry.argument,
        is_biased=None if unbiased is None else not unbiased,
        is_contraction=contraction,
        summary=_first_line(stage) if entry is None else entry.summary,
    )


def _property(name: str, stage: StageClass, which: str) -> bool | None:
    """Returns what a class says of itself or, where that depends on the argument, its first line."""
    found: object = getattr(stage, which, None)
    if found is None or isinstance(found, bool):
        return found
    entry = ENTRIES.get(name)
    line = entry.lines[0] if entry is not None and entry.lines else name
    arguments = [argument for each, argument in split_spec(line).stages if each == name]
    try:
        return bool(getattr(stage.parse(arguments[0] if arguments else ""), which))
    except CodecError:  # of a package: it does not say, and needs an argument that nobody knows here
        return None


def _first_line(stage: StageClass) -> str:
    return (stage.__doc__ or "").strip().partition("\n")[0]


def _works(line: str) -> bool:
    try:
        make_codec(line, ())
    except CodecError:
        return False
    return True


def _large(update: Tensors) -> float:
    """Returns the magnitude that one entry in a hundred exceeds."""
    magnitudes = [
        np.abs(dense(tensor)).reshape(-1) for tensor in update.values() if dense(tensor).dtype == np.float32
    ]
    values = np.concatenate(magnitudes) if magnitudes else np.zeros(0)
    return max(float(np.quantile(values, 1 - LARGE_FRACTION)), 1e-30) if values.size else 1.0
