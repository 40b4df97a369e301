"""Local algorithms along the gradient: SGD, with decay, proximal, drift-corrected, and full gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgefl.core.types import Array, Dataset, Learner, TrainConfig
from edgefl.decentralised.algorithm import GradientCorrection
from edgefl.tasks.local_algorithms.moments import (
    Hyperparameter,
    Moments,
    copy_into,
    parse_hyperparameters,
    zeros_like,
)


class Sgd:
    """Stochastic gradient descent: v ← μv + g + λw, w ← w - ηv, with the plan's momentum μ and weight decay λ."""

    def __init__(self, plan: TrainConfig, hyperparameter_specs: Mapping[str, Hyperparameter] | None = None) -> None:
        self._hyperparameters = parse_hyperparameters(plan, hyperparameter_specs or {})
        self._plan = plan
        self._moments = Moments(*(["velocity"] if plan.momentum else []))

    def start(self, learner: Learner) -> None:
        self._moments.reset(learner)

    def step(self, learner: Learner, batch: Dataset) -> None:  # noqa: ARG002 the mean gradient suffices
        plan, learning_rate = self._plan, self._compute_learning_rate()
        self._moments.iterations += 1
        for name, weight in learner.parameters.items():
            direction = learner.gradients[name]
            if plan.weight_decay:
                direction += plan.weight_decay * weight
            if plan.momentum:
                (velocity,) = self._moments.get(name)
                velocity *= plan.momentum
                velocity += direction
                direction = velocity
            weight -= learning_rate * direction  # noqa: PLW2901 in place: the learner's own array

    def _compute_learning_rate(self) -> float:
        return self._plan.learning_rate

    def finish(self, learner: Learner) -> None: ...

    def state(self) -> dict[str, Array]:
        return self._moments.state()

    def restore(self, saved: Mapping[str, Array]) -> None:
        self._moments.restore(saved)


class DecayedSgd(Sgd):
    """SGD whose learning rate falls with the iterations: η_t = η/√t, t = 1, 2, ….

    t counts from the start of the assignment, or of the run when the plan keeps its state.
    Source: Parallel-SGD, its gradient decay (there with η = 0.03).
    """

    def _compute_learning_rate(self) -> float:
        return float(self._plan.learning_rate / (self._moments.iterations + 1) ** 0.5)


class ProximalSgd(Sgd):
    """SGD on the loss plus (μ/2)·|w - w₀|², w₀ being the global model that the assignment began from.

    Options: `mu`, 0.01 unless the plan says otherwise; with 0 it is `sgd` to the bit.
    Source: Li et al., Federated Optimization in Heterogeneous Networks (FedProx), MLSys 2020, algorithm 2.
    """

    def __init__(self, plan: TrainConfig) -> None:
        super().__init__(plan, {"mu": Hyperparameter(default=0.01)})
        self._start_weights: dict[str, Any] = {}

    def start(self, learner: Learner) -> None:
        super().start(learner)
        self._start_weights = {name: weight + 0.0 for name, weight in learner.parameters.items()}

    def step(self, learner: Learner, batch: Dataset) -> None:
        if mu := self._hyperparameters["mu"]:
            for name, weight in learner.parameters.items():
                gradient = learner.gradients[name]
                gradient += mu * (weight - self._start_weights[name])
        super().step(learner, batch)


class DriftCorrectedSgd(Sgd):
    """w ← (w - η(v - c)) / (1 + ηh), v being the step of SGD: the local step of a node of a graph.

    The correction c and the shrinkage h hold for all steps of an assignment; momentum, if any, applies to v only.
    Source: Niwa et al., Asynchronous Decentralized Optimization With Implicit Stochastic Variance Reduction, 2021.
    """

    def __init__(self, plan: TrainConfig, correction: GradientCorrection) -> None:
        super().__init__(plan)
        self._correction = correction
        self._correction_arrays: dict[str, Any] = {}

    def start(self, learner: Learner) -> None:
        super().start(learner)
        self._correction_arrays = {}
        for name, array in zeros_like(learner.parameters).items():
            if name in self._correction.correction:
                copy_into(array, self._correction.correction[name])
                self._correction_arrays[name] = array

    def step(self, learner: Learner, batch: Dataset) -> None:
        super().step(learner, batch)
        learning_rate = self._plan.learning_rate
        shrunk = 1 / (1 + learning_rate * self._correction.shrinkage)
        for name, weight in learner.parameters.items():
            if name in self._correction_arrays:
                weight += learning_rate * self._correction_arrays[name]  # noqa: PLW2901 in place: the learner's own array
            if shrunk != 1:
                weight *= shrunk  # noqa: PLW2901 likewise


class FullGradientDescent:
    """One step along the mean gradient over every example seen, all of it taken at the start point."""

    def __init__(self, plan: TrainConfig) -> None:
        parse_hyperparameters(plan, {})
        self._plan = plan
        self._gradient_sum: dict[str, Any] = {}
        self._num_examples = 0

    def start(self, learner: Learner) -> None:
        self._gradient_sum = zeros_like(learner.gradients)

    def step(self, learner: Learner, batch: Dataset) -> None:
        # Weighted, so that an epoch with a short last batch still gives the exact gradient over the shard.
        self._num_examples += len(batch)
        for name, gradient in learner.gradients.items():
            self._gradient_sum[name] += len(batch) * gradient

    def finish(self, learner: Learner) -> None:
        plan, scale = self._plan, self._plan.learning_rate / max(1, self._num_examples)
        for name, weight in learner.parameters.items():
            direction = self._gradient_sum[name]
            direction *= scale
            if plan.weight_decay:
                direction += plan.learning_rate * plan.weight_decay * weight
            weight -= direction  # noqa: PLW2901 in place: the learner's own array
