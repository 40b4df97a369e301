"""Analyses: runs whose updates are sums of statistics over each board's examples, and which the coordinator solves.

Their names stand in `[strategy] name`; their settings are the dataclasses here, which the coordinator checks and the
boards check again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from numpy.typing import NDArray

ANALYSIS_KEY = "analysis"
"""Key of an instruction's header: name and settings of the analysis that the instruction is of."""
MAX_CELLS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardSums:
    """What one board answered: its sums, by name."""

    device_id: str
    sums: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsSettings:
    """Settings of `statistics`: figures of each column and the numbers of each class, on each board and in all.

    Attributes:
        columns: names, numbers and ranges of numbers such as `0-9`, with commas between them; empty for all.
        min_group: least number of examples that anything a board says of values is about.
        cells: of the histogram that quantiles are read from; an error is at most the width of one.
    """

    columns: str = ""
    min_group: int = field(default=5, metadata={"at_least": 1, "at_most": 1_000_000})
    cells: int = field(default=256, metadata={"at_least": 2, "at_most": MAX_CELLS})

    num_rounds: ClassVar[int] = 2
    kind: ClassVar[str] = "analysis"
    summary: ClassVar[str] = "figures of each column and class, on each board and in all; trains nothing"


ANALYSES: Mapping[str, type[Any]] = MappingProxyType({"statistics": StatisticsSettings})
"""Settings of each analysis, by name."""
ANALYSES_WITH_RESULT = frozenset({"statistics"})
"""Those whose result is a text in JSON; the others' is a model."""


def get_num_rounds(strategy: str) -> int | None:
    """Returns the rounds of an analysis that has a fixed number of them; None for all else."""
    return getattr(ANALYSES.get(strategy), "num_rounds", None)
