"""Codec lines as typed: stages joined by bars, each with an argument behind its colon, and wrapper prefixes.

topk:0.01|int8|rice               stages
ef|topk:0.01|int8                 the device keeps its codec's residual and adds it to the next update
delta|fp16                        the model as entries changed since the device's version
ef|topk:0.01; *.bias = dense      some tensors by a codec of their own, see `per_layer.py`; `ef` covers them, too
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgefl.core.errors import CodecError
from edgefl.core.types import Scalar

FEEDBACK_PREFIX = "ef"
DELTA_PREFIX = "delta"
LAYER_SEPARATOR = ";"
PATTERN_SEPARATOR = "="


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
