"""The local step of SCAFFOLD: the gradient less the device's control variate, plus the coordinator's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edgefl.errors import ConfigError
from edgefl.tasks.descent import SgdStep
from edgefl.tasks.moments import as_numpy, copy_into, zeros_like
from edgefl.types import Array, Dataset, Learner, LocalPlan


class ScaffoldStep(SgdStep):
    """y ← y - η(g - c_i + c), and at the end c_i ← c_i - c + (x - y)/(Kη), which lives on.

    c comes in the plan's inbox, tensor after tensor in the order of the parameters; none is zero.
    Source: Karimireddy et al., SCAFFOLD, ICML 2020, algorithm 1, option II.
    """

    def __init__(self, plan: LocalPlan) -> None:
        super().__init__(plan)
        self._start: dict[str, Array] = {}
        self._own: dict[str, Array] = {}
        self._common: dict[str, Array] = {}
        self._correction: dict[str, Any] = {}
        self._steps = 0

    def begin(self, learner: Learner) -> None:
        super().begin(learner)
        self._start = {name: as_numpy(weight) for name, weight in learner.parameters.items()}
        self._own = {name: np.zeros_like(array) for name, array in self._start.items()}
        self._common = _unpacked(self._plan, self._start)
        self._correction = zeros_like(learner.parameters)
        self._correct()

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Goes on from the control variate of the assignment before; one of another model is left aside."""
        if {name: array.shape for name, array in saved.items()} == {n: a.shape for n, a in self._own.items()}:
            self._own = {name: np.array(array) for name, array in saved.items()}
            self._correct()

    def step(self, learner: Learner, batch: Dataset) -> None:
        super().step(learner, batch)
        self._steps += 1
        for name, weight in learner.parameters.items():
            weight += self._plan.learning_rate * self._correction[name]  # noqa: PLW2901 in place: the learner's own

    def end(self, learner: Learner) -> None:
        scale = self._plan.learning_rate * max(1, self._steps)
        for name, weight in learner.parameters.items():
            moved = (self._start[name] - as_numpy(weight)) / self._start[name].dtype.type(scale or 1.0)
            self._own[name] = self._own[name] - self._common[name] + moved

    def state(self) -> dict[str, Array]:
        return dict(self._own)

    def _correct(self) -> None:
        for name, array in self._correction.items():
            copy_into(array, self._own[name] - self._common[name])


def _unpacked(plan: LocalPlan, like: Mapping[str, Array]) -> dict[str, Array]:
    """Returns c by tensor.

    Raises:
        ConfigError: what came is of another model.
    """
    if not plan.inbox:
        return {name: np.zeros_like(array) for name, array in like.items()}
    body = plan.inbox[0].body
    wanted = sum(array.nbytes for array in like.values())
    if len(body) != wanted:
        raise ConfigError(f"the control variate that came has {len(body)} bytes, expected {wanted}")
    found, start = {}, 0
    for name, array in like.items():
        kind = array.dtype.newbyteorder("<")
        found[name] = np.frombuffer(body, kind, array.size, start).reshape(array.shape).astype(array.dtype)
        start += array.nbytes
    return found
