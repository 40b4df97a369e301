"""Metrics by name: built in, of installed packages, or of a module that the operator allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from edgefl.core.errors import ConfigError, EdgeflError
from edgefl.core.extensions import ExtensionKind, find_extension, format_name, inherits_from, list_entry_points
from edgefl.core.metrics import Metric
from edgefl.tasks.losses.value_losses import MAX_QUANTILES
from edgefl.tasks.metrics.classes import (
    ClassCountMetric,
    TopKAccuracy,
    compute_balanced_accuracy,
    compute_iou,
    compute_macro_f1,
    compute_micro_f1,
)
from edgefl.tasks.metrics.probabilities import (
    CalibrationError,
    MeanOverExamples,
    compute_brier_scores,
    compute_log_losses,
)
from edgefl.tasks.metrics.ranking import HistogramMetric, compute_average_precision, compute_roc_area
from edgefl.tasks.metrics.regression import ErrorMetric, ErrorQuantile, RSquared, compute_coverage, make_pinball

KIND = ExtensionKind(
    noun="metric",
    group="edgefl.metrics",
    is_declared=inherits_from(Metric),
    declaration="inherits from edgefl.Metric",
    error=ConfigError,
)
BUILT_IN: Mapping[str, Metric] = MappingProxyType(
    {
        "accuracy": TopKAccuracy(),
        "auprc": HistogramMetric(compute=compute_average_precision),
        "auroc": HistogramMetric(compute=compute_roc_area),
        "balanced-accuracy": ClassCountMetric(compute=compute_balanced_accuracy),
        "brier": MeanOverExamples(name="brier", compute=compute_brier_scores),
        "calibration-error": CalibrationError(),
        "coverage": ErrorMetric(compute=compute_coverage, direction="max", num_quantiles=0),
        "f1-macro": ClassCountMetric(compute=compute_macro_f1),
        "f1-micro": ClassCountMetric(compute=compute_micro_f1),
        "iou": ClassCountMetric(compute=compute_iou),
        "log-loss": MeanOverExamples(name="log-loss", compute=compute_log_losses),
        "mae": ErrorMetric(compute=np.abs),
        "perplexity": MeanOverExamples(name="perplexity", compute=compute_log_losses, finish=math.exp),
        "r2": RSquared(),
        "rmse": ErrorMetric(compute=np.square, finish=math.sqrt),
    }
)
MAX_K, MAX_CLASS = 1000, 9999


def make_metric(name: str, labels: Sequence[str] = ()) -> Metric:
    """Returns the metric of that name.

    Args:
        name: a built-in metric, one of an installed package (entry point `edgefl.metrics`), or an allowed
            `module:Class`.
        labels: names of the task's classes, which may stand for their numbers in `f1:CLASS` and `iou:CLASS`.

    Raises:
        ConfigError: there is no such metric, its argument makes no sense, its module is not allowed, or its class is
            no metric's or has no direction.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    prefix, separator, argument = name.partition(":")
    if separator and prefix in _WITH_ARGUMENT:
        return _WITH_ARGUMENT[prefix](name, argument, labels)
    if name.startswith("top-"):
        return _make_top_k(name)
    return _make_own(name)


def list_metric_names() -> list[str]:
    """Returns the names of the built-in and the installed metrics, `top-K` and others with an argument included."""
    return sorted(
        {*BUILT_IN, "error-quantile:Q", "f1:CLASS", "iou:CLASS", "pinball:Q", "top-K", *list_entry_points(KIND)}
    )


def _make_own(name: str) -> Metric:
    metric_class = find_extension(KIND, name, list_metric_names())
    try:
        metric: Metric = metric_class()
    except EdgeflError:
        raise
    except (Exception, SystemExit) as error:  # another author's code may raise anything
        raise ConfigError(f"metric {name}: making it raised {type(error).__name__}: {error}") from error
    direction = getattr(metric, "direction", None)
    if direction not in ("min", "max"):
        raise ConfigError(f"metric {name}: its direction must be 'min' or 'max', got {direction!r:.40}")
    return metric


def _make_top_k(name: str) -> Metric:
    digits = name.removeprefix("top-")
    if not re.fullmatch(r"[1-9][0-9]{0,3}", digits) or int(digits) > MAX_K:
        raise ConfigError(f"metric {format_name(name)}: top-K needs a whole number from 1 to {MAX_K}, such as top-5")
    return TopKAccuracy(k=int(digits))


def _make_f1(name: str, argument: str, labels: Sequence[str]) -> Metric:
    return ClassCountMetric(compute=compute_macro_f1, class_index=_find_class(name, argument, labels))


def _make_iou(name: str, argument: str, labels: Sequence[str]) -> Metric:
    return ClassCountMetric(compute=compute_iou, class_index=_find_class(name, argument, labels))


def _find_class(name: str, argument: str, labels: Sequence[str]) -> int:
    if argument in labels:
        return labels.index(argument)
    limit = len(labels) - 1 if labels else MAX_CLASS
    if not re.fullmatch(r"0|[1-9][0-9]{0,3}", argument) or int(argument) > limit:
        known = f", or one of {', '.join(labels)}" if labels else ""
        raise ConfigError(f"metric {format_name(name)}: the class must be a number from 0 to {limit}{known}")
    return int(argument)


def _make_pinball(name: str, argument: str, labels: Sequence[str]) -> Metric:  # noqa: ARG001 one signature
    levels = argument.split("+")
    if len(levels) > MAX_QUANTILES:
        raise ConfigError(f"metric pinball takes at most {MAX_QUANTILES} quantiles, got {len(levels)}")
    quantiles = tuple(_parse_quantile(name, level, "pinball:0.9 or pinball:0.1+0.9") for level in levels)
    return ErrorMetric(compute=make_pinball(quantiles), num_quantiles=len(quantiles) if len(quantiles) > 1 else None)


def _make_error_quantile(name: str, argument: str, labels: Sequence[str]) -> Metric:  # noqa: ARG001 one signature
    return ErrorQuantile(quantile=_parse_quantile(name, argument, "error-quantile:0.95"))


def _parse_quantile(name: str, text: str, example: str) -> float:
    if not re.fullmatch(r"0\.[0-9]{1,6}", text) or not 0 < float(text) < 1:
        raise ConfigError(f"metric {format_name(name)}: the quantile must lie between 0 and 1, such as {example}")
    return float(text)


_WITH_ARGUMENT: Mapping[str, Callable[[str, str, Sequence[str]], Metric]] = MappingProxyType(
    {"f1": _make_f1, "error-quantile": _make_error_quantile, "iou": _make_iou, "pinball": _make_pinball}
)
