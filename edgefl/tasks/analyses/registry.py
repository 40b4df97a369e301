"""Analyses by name: made of what a run file, or an instruction's header, says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from edgefl.core.analyses import ANALYSES, ANALYSIS_KEY, DEFAULT_MIN_GROUP
from edgefl.core.errors import TaskError
from edgefl.core.extensions import format_name
from edgefl.core.settings import check_options, check_settings, list_options
from edgefl.core.types import Json, Scalar, Task
from edgefl.tasks.analyses.analysis import Analysis
from edgefl.tasks.analyses.column_statistics import ColumnStatistics
from edgefl.tasks.analyses.k_means import KMeans
from edgefl.tasks.analyses.linear_regression import LinearRegression
from edgefl.tasks.analyses.naive_bayes import NaiveBayes
from edgefl.tasks.analyses.principal_components import PrincipalComponents
from edgefl.tasks.analyses.trees.boosted_trees import BoostedTrees

_CLASSES: Mapping[str, Callable[[Task, Any], Analysis]] = MappingProxyType(
    {
        "boosted-trees": BoostedTrees,
        "k-means": KMeans,
        "linear-regression": LinearRegression,
        "naive-bayes": NaiveBayes,
        "pca": PrincipalComponents,
        "statistics": ColumnStatistics,
    }
)


def make_analysis(task: Task, name: str, options: Mapping[str, Scalar]) -> Analysis:
    """Returns an analysis of a task's examples.

    Raises:
        ConfigError: an option is unknown or out of range, or the task does not say what is needed.
        TaskError: there is no such analysis here.
    """
    if name not in ANALYSES:
        raise TaskError(f"analysis {format_name(name)} is not known here, only {', '.join(ANALYSES)}; update edgefl")
    check_options(name, options, list_options(ANALYSES[name]), table="strategy")
    settings = ANALYSES[name](**options)
    check_settings(settings, "strategy")
    return _CLASSES[name](task, settings)


def check_min_group(options: Mapping[str, Scalar], least: int) -> None:
    """Checks that an analysis is about no fewer examples than the owner of this board lets it be.

    Raises:
        TaskError: it is.
    """
    found = options.get("min_group", DEFAULT_MIN_GROUP)
    if isinstance(found, int) and found < least:
        raise TaskError(
            f"strategy.min_group must be at least {least} on this board, got {found}; its owner allows less with "
            f"edgefl device set --min-group {found}"
        )


def parse_analysis(header: Json) -> tuple[str, dict[str, Scalar]] | None:
    """Returns name and options of an instruction's analysis; None where it is none.

    Raises:
        TaskError: it is malformed.
    """
    value = header.get(ANALYSIS_KEY)
    if value is None:
        return None
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise TaskError(f"an analysis must be a table with a name, got {value!r:.60}")
    options = value.get("options")
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise TaskError(f"options of an analysis must be a table, got {options!r:.60}")
    return value["name"], dict(options)
