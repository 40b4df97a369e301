"""Analyses: runs whose updates are sums of statistics over each board's examples, and which the coordinator solves.

Their names stand in `[strategy] name`; their settings are the dataclasses here, which the coordinator checks and the
boards check again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from numpy.typing import NDArray

ANALYSIS_KEY = "analysis"
"""Key of an instruction's header: name and settings of the analysis that the instruction is of."""
MAX_CELLS = 65_536
DEFAULT_MIN_GROUP = 5
"""Examples that a board says nothing about fewer of, unless its owner lets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardSums:
    """What one board answered: its sums, by name."""

    device_id: str
    sums: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnalysisSettings:
    """What all analyses have: `min_group` is the least number of examples that anything a board says is about."""

    min_group: int = field(default=DEFAULT_MIN_GROUP, metadata={"at_least": 1, "at_most": 1_000_000})

    kind: ClassVar[str] = "analysis"
    is_model: ClassVar[bool] = True
    """Whether the answer says something of a new example: it is exported and deployed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsSettings(_AnalysisSettings):
    """Settings of `statistics`: figures of each column and the numbers of each class, on each board and in all.

    Attributes:
        columns: names, numbers and ranges of numbers such as `0-9`, with commas between them; empty for all.
        min_group: least number of examples that anything a board says of values is about.
        cells: of the histogram that quantiles are read from; an error is at most the width of one.
    """

    columns: str = ""
    cells: int = field(default=256, metadata={"at_least": 2, "at_most": MAX_CELLS})

    num_rounds: ClassVar[int] = 2
    has_result: ClassVar[bool] = True
    is_model: ClassVar[bool] = False
    summary: ClassVar[str] = "figures of each column and class, on each board and in all; trains nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnScalesSettings(_AnalysisSettings):
    """Settings of `column-scales`: mean and scale of each input column, for a training's `normalise`.

    Attributes:
        min_group: a board says nothing about a column of fewer values.
    """

    num_rounds: ClassVar[int] = 1
    has_result: ClassVar[bool] = True
    is_model: ClassVar[bool] = False
    summary: ClassVar[str] = "mean and scale of each input column, for `normalise` of a task; trains nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRegressionSettings(_AnalysisSettings):
    """Settings of `linear-regression`: least squares of a task whose model is one layer.

    Attributes:
        ridge: penalty on squared weights; 0 for none.
        min_group: a board with fewer examples says nothing.
    """

    ridge: float = field(default=0.0, metadata={"at_least": 0})

    num_rounds: ClassVar[int] = 1
    has_result: ClassVar[bool] = False
    summary: ClassVar[str] = "least squares, with or without a ridge, of a task of values: as on the pooled data"


@dataclass(frozen=True, slots=True, kw_only=True)
class NaiveBayesSettings(_AnalysisSettings):
    """Settings of `naive-bayes`: each class of a task as normal distributions of independent features.

    Attributes:
        variances: `shared` by all classes, which makes a model of one layer; or of each `class`, a result in JSON.
        smoothing: part of the largest variance of all features that is added to each.
        min_group: a class of which a board has fewer examples is not told.
    """

    variances: Literal["shared", "class"] = "shared"
    smoothing: float = field(default=1e-9, metadata={"at_least": 0})

    num_rounds: ClassVar[int] = 1
    summary: ClassVar[str] = "Gaussian naive Bayes of a task of classes: as on the pooled data"

    @property
    def has_result(self) -> bool:
        """Whether the answer is a text in JSON, and no model."""
        return self.variances == "class"


@dataclass(frozen=True, slots=True, kw_only=True)
class PcaSettings(_AnalysisSettings):
    """Settings of `pca`: the directions in which columns vary most.

    Attributes:
        columns: as of `statistics`.
        components: how many.
        min_group: a board with fewer examples says nothing.
    """

    columns: str = ""
    components: int = field(default=2, metadata={"at_least": 1, "at_most": 256})

    num_rounds: ClassVar[int] = 1
    has_result: ClassVar[bool] = True
    summary: ClassVar[str] = "principal components of the columns: as on the pooled data"


@dataclass(frozen=True, slots=True, kw_only=True)
class KMeansSettings(_AnalysisSettings):
    """Settings of `k-means`: the first round finds where the columns lie, each other one moves the centres.

    Attributes:
        clusters: how many centres.
        columns: as of `statistics`.
        seed: of the first centres.
        min_group: a cluster of which a board has fewer examples is not told.
    """

    clusters: int = field(metadata={"at_least": 1, "at_most": 1024})
    columns: str = ""
    seed: int = field(default=7, metadata={"at_least": 0})

    num_rounds: ClassVar[int | None] = None
    has_result: ClassVar[bool] = True
    summary: ClassVar[str] = "clusters of the columns by Lloyd's algorithm, one step a round: as on the pooled data"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoostedTreesSettings(_AnalysisSettings):
    """Settings of `boosted-trees`: two rounds for bins, then one for each level of each tree.

    Attributes:
        columns: as of `statistics`, without targets.
        trees: how many.
        depth: levels of a tree that may be split.
        bins: of each column.
        learning_rate: factor of what a tree adds.
        l2: penalty on squared values of leaves.
        min_gain: least gain of a split.
        min_child_weight: least sum of second derivatives of either side of a split.
        min_group: nothing that a board says of a node is about fewer examples.
    """

    columns: str = ""
    trees: int = field(default=20, metadata={"at_least": 1, "at_most": 1000})
    depth: int = field(default=3, metadata={"at_least": 1, "at_most": 8})
    bins: int = field(default=32, metadata={"at_least": 2, "at_most": 1024})
    learning_rate: float = field(default=0.3, metadata={"above": 0, "at_most": 1})
    l2: float = field(default=1.0, metadata={"at_least": 0})
    min_gain: float = field(default=0.0, metadata={"at_least": 0})
    min_child_weight: float = field(default=1.0, metadata={"at_least": 0})

    has_result: ClassVar[bool] = True
    summary: ClassVar[str] = "gradient-boosted trees of a value or of two classes: as on the pooled data"

    @property
    def num_rounds(self) -> int:
        """The rounds that all trees take."""
        return 2 + self.trees * self.depth


ANALYSES: Mapping[str, type[Any]] = MappingProxyType(
    {
        "boosted-trees": BoostedTreesSettings,
        "column-scales": ColumnScalesSettings,
        "k-means": KMeansSettings,
        "linear-regression": LinearRegressionSettings,
        "naive-bayes": NaiveBayesSettings,
        "pca": PcaSettings,
        "statistics": StatisticsSettings,
    }
)
"""Settings of each analysis, by name."""


def is_model(config: Mapping[str, Any]) -> bool:
    """Returns whether what a run answers says something of a new example, by the tables of its run file."""
    settings = ANALYSES.get(config.get("strategy", {}).get("name", ""))
    return "job" not in config and (settings is None or settings.is_model)


def has_result(config: Mapping[str, Any]) -> bool:
    """Returns whether a run's answer is a text in JSON, and no tensors of its task, by the tables of its run file."""
    options = dict(config.get("strategy", {}))
    settings = ANALYSES.get(options.pop("name", ""))
    return settings is not None and bool(settings(**options).has_result)


def get_num_rounds(strategy: str, options: Mapping[str, Any] = MappingProxyType({})) -> int | None:
    """Returns the rounds of an analysis by its settings; None where these do not say it, and for all else.

    Options need not be checked yet.
    """
    settings = ANALYSES.get(strategy)
    fixed = getattr(settings, "num_rounds", None)
    if settings is None or fixed is None or isinstance(fixed, int):
        return fixed
    try:
        found = settings(**options).num_rounds
    except TypeError:
        return None
    return found if isinstance(found, int) else None
