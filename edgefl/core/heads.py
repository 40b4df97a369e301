"""Several targets of an example by name, and what a task says of the outputs that answer each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl.core.errors import ConfigError, DataError
from edgefl.core.named_arrays import NamedArrays, is_parameter

MAX_HEADS = 64
MAX_HEAD_OUTPUTS = 1_000_000
SEPARATOR = "/"
"""Between the name of a target and that of its metric: `age/mae`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What answers one of several targets: its loss, the loss's weight in their sum, and how many outputs it has.

    `num_outputs` is None where the task does not say it: as many as the loss needs.
    """

    loss: Any
    weight: float = 1.0
    num_outputs: int | None = None


def describe_loss(task: Any) -> Any:
    """Returns a task's own loss as its model takes it; None where it has none.

    Of several by name, which may be the model's own, it is a `Head` each.

    Raises:
        ConfigError: `loss_weights` or `num_outputs` are none for these losses.
    """
    loss, weights, outputs = (getattr(task, name, None) for name in ("loss", "loss_weights", "num_outputs"))
    whose = f"task {getattr(task, 'name', type(task).__name__)}"
    of_model = getattr(getattr(task, "model", None), "loss", None)
    if loss is None and isinstance(of_model, Mapping):
        loss = of_model
    if not isinstance(loss, Mapping):
        if isinstance(weights, Mapping) or isinstance(outputs, Mapping):  # a list may be for a loss of the task's own
            what = "loss_weights are" if isinstance(weights, Mapping) else "num_outputs by name are"
            raise ConfigError(f"{whose}: {what} for several losses by name, and its loss is {loss!r:.60}")
        return loss
    if not 0 < len(loss) <= MAX_HEADS:
        raise ConfigError(f"{whose}: losses by name must be 1 to {MAX_HEADS}, got {len(loss)}")
    if getattr(task, "labels", ()):
        raise ConfigError(f"{whose}: labels are of one target, and it has losses of {', '.join(map(str, loss))}")
    found_weights = _check_names(f"{whose}: loss_weights", weights, loss)
    found_outputs = _check_names(f"{whose}: num_outputs", outputs, loss)
    for name, weight in found_weights.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0.0 <= weight < math.inf:
            raise ConfigError(f"{whose}: loss_weights[{name!r}] must be finite and at least 0, got {weight!r:.40}")
    for name, count in found_outputs.items():
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_HEAD_OUTPUTS:
            raise ConfigError(
                f"{whose}: num_outputs[{name!r}] must be from 1 to {MAX_HEAD_OUTPUTS:,}, got {count!r:.40}"
            )
    return {
        name: Head(loss=one, weight=float(found_weights.get(name, 1.0)), num_outputs=found_outputs.get(name))
        for name, one in loss.items()
    }


def _check_names(what: str, found: Any, losses: Mapping[str, Any]) -> Mapping[str, Any]:
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{what} must be by the names of the losses, {', '.join(losses)}, got {found!r:.60}")
    if unknown := [name for name in found if name not in losses]:
        raise ConfigError(f"{what} name {str(unknown[0])[:60]!r}; the losses are of {', '.join(losses)}")
    return found


def is_target(name: str) -> bool:
    """Returns whether a target can have a name: that of a parameter of Python in ASCII."""
    return is_parameter(name) and name.isascii()


def join_targets(targets: Mapping[str, Any]) -> NDArray[Any]:
    """Returns arrays [n, ...] by name as one structured array [n], whose fields have their names, in their order.

    Raises:
        DataError: they are too many, a name is none of a parameter of Python in ASCII, one is no array of numbers, or
            they differ in length.
    """
    arrays = NamedArrays({name: targets[name] for name in targets}, what="targets").to_dict()
    if wrong := [name for name in arrays if not is_target(name)]:
        raise DataError(f"a name of targets must be in ASCII, got {wrong[0]!a:.70}")
    # Not aligned: NumPy leaves padding as it was in memory when it copies, and equal targets have equal bytes.
    fields = [(name, array.dtype, array.shape[1:]) for name, array in arrays.items()]
    joined = np.empty(len(next(iter(arrays.values()))), np.dtype(fields))
    for name, array in arrays.items():
        joined[name] = array
    return joined


def wrap_targets(targets: Any) -> Any:
    """Returns targets as a `Dataset` has them: a dict of arrays as one structured array, all else as it is."""
    return join_targets(targets) if isinstance(targets, Mapping) else targets
