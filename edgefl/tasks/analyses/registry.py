"""Analyses by name: made of what a run file, or an instruction's header, says."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from edgefl.core.analyses import ANALYSES, ANALYSIS_KEY, DEFAULT_MIN_GROUP
from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.extensions import format_name
from edgefl.core.settings import check_options, check_settings, list_options
from edgefl.core.types import Json, Scalar, Task
from edgefl.tasks.analyses.analysis import Analysis

_CLASSES = MappingProxyType(
    {
        "boosted-trees": "analyses.trees.boosted_trees:BoostedTrees",
        "column-scales": "configured.column_scales:ColumnScales",
        "k-means": "analyses.k_means:KMeans",
        "linear-regression": "analyses.linear_regression:LinearRegression",
        "naive-bayes": "analyses.naive_bayes:NaiveBayes",
        "pca": "analyses.principal_components:PrincipalComponents",
        "statistics": "analyses.column_statistics:ColumnStatistics",
    }
)
"""By name; imported only where one is asked for, since boards that only train need none of them."""


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
    _check_group_size(settings.min_group)
    module, _, class_name = _CLASSES[name].partition(":")
    analysis: Analysis = getattr(import_module(f"edgefl.tasks.{module}"), class_name)(task, settings)
    return analysis


def _check_group_size(min_group: int) -> None:
    """Checks that two runs with other groups differ by nothing, or by a whole group.

    Raises:
        ConfigError: they would not, so that their figures together would tell single values.
    """
    times, rest = divmod(min_group, DEFAULT_MIN_GROUP)
    if min_group != 1 and (rest or times & (times - 1)):
        raise ConfigError(
            f"strategy.min_group must be 1, or {DEFAULT_MIN_GROUP} times a power of two (5, 10, 20, 40, …), got "
            f"{min_group}: the figures of two runs would tell single values"
        )


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
