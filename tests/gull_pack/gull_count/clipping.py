"""The local algorithm: SGD whose gradient has at most the norm `clip`, an option of the plan."""

from __future__ import annotations

from edgefl.tasks.local_algorithms.registry import LocalAlgorithm


class ClippedSgd(LocalAlgorithm):
    def __init__(self, plan):
        self.learning_rate, self.clip = plan.learning_rate, float(plan.options.get("clip", 1.0))

    def start(self, learner): ...

    def step(self, learner, batch):
        norm = float(sum((gradient**2).sum() for gradient in learner.gradients.values())) ** 0.5
        rate = self.learning_rate * min(1.0, self.clip / max(norm, 1e-12))
        for name, weight in learner.parameters.items():
            weight -= rate * learner.gradients[name]  # noqa: PLW2901 in place, as the guide shows it

    def finish(self, learner): ...
