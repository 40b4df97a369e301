"""The local step of SCAFFOLD: the gradient less the device's control variate, plus the coordinator's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, Dataset, Learner, TrainConfig
from edgefl.tasks.local_algorithms.moments import copy_into, to_numpy, zeros_like
from edgefl.tasks.local_algorithms.sgd import Sgd


class ScaffoldSgd(Sgd):
    """y ← y - η(g - c_i + c), and at the end c_i ← c_i - c + (x - y)/(Kη), which is kept.

    c comes in the plan's inbox, tensor after tensor in the order of the parameters; no message means zero.
    Source: Karimireddy et al., SCAFFOLD, ICML 2020, algorithm 1, option II.
    """

    def __init__(self, plan: TrainConfig) -> None:
        super().__init__(plan)
        self._start_weights: dict[str, Array] = {}
        self._client_variate: dict[str, Array] = {}
        self._server_variate: dict[str, Array] = {}
        self._correction: dict[str, Any] = {}
        self._num_steps = 0

    def start(self, learner: Learner) -> None:
        super().start(learner)
        self._start_weights = {name: to_numpy(weight) for name, weight in learner.parameters.items()}
        self._client_variate = {name: np.zeros_like(array) for name, array in self._start_weights.items()}
        self._server_variate = _decode_server_variate(self._plan, self._start_weights)
        self._correction = zeros_like(learner.parameters)
        self._update_correction()

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Restores the control variate of the instruction before; one of another model is ignored."""
        if {name: array.shape for name, array in saved.items()} == {
            n: a.shape for n, a in self._client_variate.items()
        }:
            self._client_variate = {name: np.array(array) for name, array in saved.items()}
            self._update_correction()

    def step(self, learner: Learner, batch: Dataset) -> None:
        super().step(learner, batch)
        self._num_steps += 1
        for name, weight in learner.parameters.items():
            weight += self._plan.learning_rate * self._correction[name]  # noqa: PLW2901 in place: the learner's own

    def finish(self, learner: Learner) -> None:
        scale = self._plan.learning_rate * max(1, self._num_steps)
        for name, weight in learner.parameters.items():
            mean_gradient = (self._start_weights[name] - to_numpy(weight)) / self._start_weights[name].dtype.type(
                scale or 1.0
            )
            self._client_variate[name] = self._client_variate[name] - self._server_variate[name] + mean_gradient

    def state(self) -> dict[str, Array]:
        return dict(self._client_variate)

    def _update_correction(self) -> None:
        for name, array in self._correction.items():
            copy_into(array, self._client_variate[name] - self._server_variate[name])


def _decode_server_variate(plan: TrainConfig, like: Mapping[str, Array]) -> dict[str, Array]:
    """Returns c by tensor.

    Raises:
        ConfigError: it is of another model.
    """
    if not plan.inbox:
        return {name: np.zeros_like(array) for name, array in like.items()}
    body = plan.inbox[0].body
    expected_bytes = sum(array.nbytes for array in like.values())
    if len(body) != expected_bytes:
        raise ConfigError(f"the control variate that came has {len(body)} bytes, expected {expected_bytes}")
    variate, start = {}, 0
    for name, array in like.items():
        kind = array.dtype.newbyteorder("<")
        variate[name] = np.frombuffer(body, kind, array.size, start).reshape(array.shape).astype(array.dtype)
        start += array.nbytes
    return variate
