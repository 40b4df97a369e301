"""Training of the layers after a cut, beside one device that trains those before it."""

from __future__ import annotations

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.types import Algorithm, Array, Dataset, Tensors, TrainConfig
from edgefl.tasks.learners.torch_split import RestLearner
from edgefl.tasks.local_algorithms.local_training import compute_displacement
from edgefl.tasks.local_algorithms.registry import BUILT_IN

SPLIT_ALGORITHMS = tuple(sorted(str(name) for name in BUILT_IN.keys() - {Algorithm.SCAFFOLD, Algorithm.DP_SGD}))
"""Local algorithms that use one gradient of the loss for each step, and nothing else of the run."""


class RestTraining:
    """Training of one assignment; both sides follow the same plan, batch by batch.

    With the labels here a batch is one `step`; with labels on the device it is `forward`, then `backward`.

    Args:
        learner: of the rest; used by this training alone.
        plan: of the assignment.
        model: the tensors of the rest to start from.

    Attributes:
        iterations: steps made.
    """

    def __init__(self, learner: RestLearner, plan: TrainConfig, model: Tensors) -> None:
        check_split_algorithm(plan)
        self._learner, self._algorithm = learner, BUILT_IN[plan.algorithm](plan)
        learner.load(model)
        self._start = learner.read()
        self._algorithm.start(learner)
        self._batch: Array | None = None
        self.iterations = 0

    def step(self, activations: Array, labels: Array) -> tuple[float, Array]:
        """Returns the mean loss of a batch and its gradient by the activations, and trains on it.

        Raises:
            TaskError: a label is no class of the network.
        """
        batch = Dataset(inputs=activations, targets=labels)
        loss = self._learner.gradient(batch)
        return loss, self._make_step(batch)

    def forward(self, activations: Array) -> Array:
        """Returns the network's outputs for a batch, whose gradient `backward` takes."""
        self._batch = activations
        return self._learner.forward(activations)

    def backward(self, output_gradient: Array) -> Array:
        """Returns the gradient of the loss by the activations of `forward`, and trains on them.

        Raises:
            TaskError: there was no `forward`.
        """
        self._learner.backward(output_gradient)
        assert self._batch is not None
        # Only the length of the batch counts here: the device has the labels.
        batch = Dataset(inputs=self._batch, targets=np.zeros(len(self._batch), np.int64))
        self._batch = None
        return self._make_step(batch)

    def finish(self) -> dict[str, Array]:
        """Returns the displacement of the rest; called once, after the last step."""
        with np.errstate(over="ignore", invalid="ignore"):
            self._algorithm.finish(self._learner)
            return compute_displacement(self._start, self._learner.read())

    def _make_step(self, batch: Dataset) -> Array:
        gradient = self._learner.input_gradient
        self._algorithm.step(self._learner, batch)
        self.iterations += 1
        return gradient


def check_split_algorithm(plan: TrainConfig) -> None:
    """Checks that both sides of a cut can follow a plan.

    Raises:
        ConfigError: they cannot.
    """
    if plan.algorithm not in SPLIT_ALGORITHMS:
        raise ConfigError(
            f"strategy.optimizer: a split network trains with {', '.join(SPLIT_ALGORITHMS)}, got {plan.algorithm!r}"
        )
    if plan.keeps_state:
        raise ConfigError("strategy.keep_optimizer: a split network begins each round with a new optimiser")
    if plan.node is not None or plan.messages:
        raise ConfigError("split.after: a split network trains with strategies that send the model alone")
    # The rest makes a step for each batch that it gets, so that parts would be steps of their own.
    unfit = {
        "micro_batch_size": plan.micro_batch_size is not None,
        "max_gradient_norm": plan.max_gradient_norm is not None,
        "precision": plan.precision is not None,
    }
    if found := [name for name, is_set in unfit.items() if is_set]:
        raise ConfigError(f"strategy.{found[0]} does not go with split.after; leave one of them out")
