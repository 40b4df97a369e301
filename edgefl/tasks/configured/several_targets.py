"""Options of several targets with a loss each: what is own of one of them has its name in front, `age/huber`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from edgefl.core.errors import ConfigError
from edgefl.core.heads import SEPARATOR
from edgefl.core.metrics import MAX_METRICS
from edgefl.tasks.configured.options import DISTANCES, MAX_LABELS, MAX_TARGETS, Goal, Names, split_names
from edgefl.tasks.losses.class_losses import CrossEntropy
from edgefl.tasks.losses.registry import make_loss
from edgefl.tasks.losses.value_losses import Quantile
from edgefl.tasks.metrics.registry import make_metric

_ITEMS = {"labels": MAX_LABELS, "loss": MAX_TARGETS, "loss_weights": MAX_TARGETS, "metrics": MAX_METRICS}
"""Options, and how many items each may have."""


def has_several(columns: Sequence[str], labels: Names, loss: Names) -> bool:
    """Returns whether targets have a loss each: they are several, and labels or losses are own of single ones."""
    return len(columns) > 1 and bool(labels or any(SEPARATOR in part for part in loss))


def split_by_target(task: str, option: str, value: Names, columns: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns what an option says of each column that it names: `sex/f,sex/m,age/x` as `{sex: (f, m), age: (x,)}`.

    A part without a name goes on with what stands before it, such as the second of two quantiles.

    Raises:
        ConfigError: the first part has no name, or a name is none of the targets'.
    """
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    for item in split_names(task, option, value, at_most=_ITEMS[option]) if value else ():
        target, separator, text = item.partition(SEPARATOR)
        if separator and target in columns:
            name = target
            found[name] = (*found.get(name, ()), text)
        elif name and not separator and option == "loss":
            found[name] = (*found[name][:-1], f"{found[name][-1]},{item}")
        else:
            raise ConfigError(
                f"task.{option} must say of which target it is, such as {columns[0]}{SEPARATOR}"
                f"{text or item}, got {item!r}; targets are {', '.join(columns)}"
            )
    return found


def split_labels(task: str, labels: Names, columns: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Returns the names of each target's classes, none for values.

    Raises:
        ConfigError: as `split_by_target`, or one has a single class.
    """
    found = split_by_target(task, "labels", labels, columns)
    if single := [name for name, classes in found.items() if len(classes) == 1]:
        raise ConfigError(f"task.labels must name at least 2 classes of {single[0]}, got {found[single[0]][0]}")
    return MappingProxyType({name: found.get(name, ()) for name in columns})


def make_goal_of_several(
    task: str, labels: Mapping[str, tuple[str, ...]], *, loss: Names, weights: Names, metrics: Names
) -> Goal:
    """Returns what a task of several targets predicts.

    Args:
        task: its name.
        labels: of each target, none for values.
        loss: by target; else cross-entropy of classes and mse of values.
        weights: by target; else 1.
        metrics: by target; else accuracy of classes, and rmse of values whose loss is a distance.

    Raises:
        ConfigError: they do not fit each other, or one does not exist.
    """
    columns = [*labels]
    own = split_by_target(task, "loss", loss, columns)
    losses = {name: own[name][-1] if name in own else "cross-entropy" if labels[name] else "mse" for name in columns}
    made = {name: make_loss(one) for name, one in losses.items()}
    for name, one in made.items():
        if isinstance(one, CrossEntropy) != bool(labels[name]):
            right = "cross-entropy, with labels" if labels[name] else "a loss of values, without labels"
            raise ConfigError(f"task.loss of {name} must be {right}, got {losses[name]!r:.100}")
    usual = {
        name: "accuracy" if labels[name] else "rmse"
        for name, one in made.items()
        if labels[name] or isinstance(one, DISTANCES)
    }
    chosen = split_by_target(task, "metrics", metrics, columns) or {name: (text,) for name, text in usual.items()}
    names = [(name, metric) for name, texts in chosen.items() for metric in texts][:MAX_METRICS]
    return Goal(
        labels=(),
        loss=MappingProxyType(losses),
        loss_weights=MappingProxyType(_split_weights(task, weights, columns)),
        metrics=MappingProxyType({f"{a}{SEPARATOR}{b}": make_metric(b).direction for a, b in names}),
        num_outputs=MappingProxyType(
            {
                name: len(labels[name]) or (len(one.quantiles) if isinstance(one, Quantile) else 1)
                for name, one in made.items()
            }
        ),
    )


def _split_weights(task: str, weights: Names, columns: Sequence[str]) -> dict[str, float]:
    found = split_by_target(task, "loss_weights", weights, columns)
    try:
        return {name: float(texts[-1]) for name, texts in found.items()}
    except ValueError:
        raise ConfigError(
            f"task.loss_weights must be numbers, such as {columns[0]}/0.5, got {weights!r:.100}"
        ) from None
