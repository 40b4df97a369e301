"""The line that a person types: stages joined by bars, each with what follows its colon, and prefixes for wrappers.

topk:0.01|int8|rice               stages
ef|topk:0.01|int8                 the device keeps what its codec leaves out and adds it to the next update
delta|fp16                        the model as what changed since the version that the device holds
ef|topk:0.01; *.bias = dense      some tensors by a codec of their own, see `layers.py`; `ef` stands for them, too
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgefl.errors import CodecError
from edgefl.types import Scalar

FEEDBACK = "ef"
DELTA = "delta"
BETWEEN_LAYERS = ";"
OF_PATTERN = "="


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """A line taken apart.

    Attributes:
        text: as typed.
        prefix: `ef`, `delta` or empty.
        stages: names and arguments, as typed.
        layers: patterns of tensor names and the lines for what matches them, the first match counts; what matches
            none goes through `stages`.
    """

    text: str
    prefix: str
    stages: tuple[tuple[str, str], ...]
    layers: tuple[tuple[str, str], ...] = ()

    @property
    def codec(self) -> str:
        """Returns the line without its prefix; `dense` when nothing else was typed."""
        return with_layers(self.own, dict(self.layers))

    @property
    def own(self) -> str:
        """Returns the line without its prefix and its layers."""
        return "|".join(f"{name}:{argument}" if argument else name for name, argument in self.stages) or "dense"


def split_spec(text: str) -> CodecSpec:
    """Returns the parts of a line; whether its stages exist and fit together is the registry's business.

    Raises:
        CodecError: something behind a semicolon is not `PATTERN = CODEC`.
    """
    line, *layers = text.split(BETWEEN_LAYERS)
    parts = [part.strip().partition(":") for part in line.split("|")]
    prefix = parts[0][0] if parts[0] in ((FEEDBACK, "", ""), (DELTA, "", "")) else ""
    stages = tuple((name, argument) for name, _, argument in parts[1 if prefix else 0 :])
    return CodecSpec(text=text, prefix=prefix, stages=stages, layers=_layers(text, layers))


def with_layers(line: str, layers: Mapping[str, Scalar]) -> str:
    """Returns the line that travels for a codec and those of some layers, in the order of the patterns."""
    return f"{BETWEEN_LAYERS} ".join([line, *(f"{pattern} {OF_PATTERN} {own}" for pattern, own in layers.items())])


def _layers(text: str, typed: list[str]) -> tuple[tuple[str, str], ...]:
    layers: dict[str, str] = {}
    for entry in typed:
        pattern, is_there, line = (part.strip() for part in entry.partition(OF_PATTERN))
        if not (pattern and is_there and line):
            raise CodecError(f"codec {text!r}: behind a semicolon stands PATTERN = CODEC, got {entry.strip()!r}")
        if pattern in layers:
            raise CodecError(f"codec {text!r}: the pattern {pattern!r} has two codecs")
        layers[pattern] = line
    return tuple(layers.items())
