"""The line that a person types: stages joined by bars, each with what follows its colon, and prefixes for wrappers.

topk:0.01|int8|rice      stages
ef|topk:0.01|int8        the device keeps what its codec leaves out and adds it to the next update
delta|fp16               the model as what changed since the version that the device holds
"""

from __future__ import annotations

from dataclasses import dataclass

FEEDBACK = "ef"
DELTA = "delta"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """A line taken apart. `prefix` is `ef`, `delta` or empty; `stages` are names and arguments, as typed."""

    text: str
    prefix: str
    stages: tuple[tuple[str, str], ...]

    @property
    def codec(self) -> str:
        """Returns the line without its prefix; `dense` when nothing else was typed."""
        return "|".join(f"{name}:{argument}" if argument else name for name, argument in self.stages) or "dense"


def split_spec(text: str) -> CodecSpec:
    """Returns the parts of a line; whether its stages exist and fit together is the registry's business."""
    parts = [part.strip().partition(":") for part in text.split("|")]
    prefix = parts[0][0] if parts[0] in ((FEEDBACK, "", ""), (DELTA, "", "")) else ""
    stages = tuple((name, argument) for name, _, argument in parts[1 if prefix else 0 :])
    return CodecSpec(text=text, prefix=prefix, stages=stages)
