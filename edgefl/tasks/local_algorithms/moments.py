"""Optimiser state beside each weight, and hyperparameters; for NumPy and torch alike."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, Learner, TrainConfig

log = logging.getLogger(__name__)

ITERATIONS = "iterations"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameter:
    """One option of a local algorithm: its default, and its range from 0 to below a bound."""

    default: float
    positive: bool = False
    below: float = math.inf

    def is_valid(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return (value > 0 or (value == 0 and not self.positive)) and value < self.below

    def __str__(self) -> str:
        lower = "above 0" if self.positive else "0 or more"
        return lower if self.below == math.inf else f"{lower} and below {self.below:g}"


def parse_hyperparameters(plan: TrainConfig, specs: Mapping[str, Hyperparameter]) -> dict[str, float]:
    """Returns the options of a plan over their defaults.

    Raises:
        ConfigError: the algorithm has no such option, or a value is out of its range.
    """
    for name, value in plan.options.items():
        if name not in specs:
            raise ConfigError(
                f"local algorithm {plan.algorithm} has no option {name!r}, only {', '.join(specs) or 'none'}"
            )
        if not specs[name].is_valid(value):
            raise ConfigError(f"{name} of local algorithm {plan.algorithm} must be {specs[name]}, got {value!r}")
    return {name: float(plan.options.get(name, number.default)) for name, number in specs.items()}


class Moments:
    """Arrays of some kinds (`velocity`, `square`) beside each weight, zero at first, and the iterations so far.

    They are the backend's own arrays; `state` gives NumPy copies that `restore` takes, on any device.
    """

    def __init__(self, *moment_names: str) -> None:
        self._arrays: dict[str, dict[str, Any]] = {kind: {} for kind in moment_names}
        self.iterations = 0

    def reset(self, learner: Learner) -> None:
        self._arrays = {kind: zeros_like(learner.gradients) for kind in self._arrays}
        self.iterations = 0

    def get(self, name: str) -> list[Any]:
        """Returns the arrays beside one weight, in the order of the kinds."""
        return [arrays[name] for arrays in self._arrays.values()]

    def state(self) -> dict[str, Array]:
        named_arrays = self._get_named_arrays()
        return {
            ITERATIONS: np.array(self.iterations),
            **{key: to_numpy(array) for key, array in named_arrays.items()},
        }

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Restores a state; one that does not fit the model is ignored. Called after `reset`."""
        named_arrays = self._get_named_arrays()
        saved_shapes = {key: tuple(value.shape) for key, value in saved.items() if key != ITERATIONS}
        if ITERATIONS not in saved or saved_shapes != {
            key: tuple(array.shape) for key, array in named_arrays.items()
        }:
            log.warning("the saved moments of the local algorithm do not fit the model; they begin anew")
            return
        self.iterations = int(saved[ITERATIONS])
        for key, array in named_arrays.items():
            copy_into(array, saved[key])

    def _get_named_arrays(self) -> dict[str, Any]:
        return {f"{kind}/{name}": array for kind, arrays in self._arrays.items() for name, array in arrays.items()}


def zeros_like(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns zeros in the backend's own kind of array."""
    # With a temporary extra dimension: NumPy's sum of an array without any is a scalar.
    zeros = {name: (array[None] + 0.0)[0, ...] for name, array in arrays.items()}
    for array in zeros.values():
        array[...] = 0.0  # not times zero: a NaN of an earlier batch would stay
    return zeros


def to_numpy(array: Any) -> Array:
    """Returns a copy of the backend's array in NumPy."""
    return np.array(array.cpu().numpy() if hasattr(array, "cpu") else array)


def copy_into(array: Any, value: Array) -> None:
    """Writes a NumPy array into the backend's own."""
    array[...] = array.new_tensor(value) if hasattr(array, "new_tensor") else value
