"""One assignment's training on one board: batches, budget, and the displacement that comes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from edgefl.errors import ConfigError, DataError
from edgefl.tasks.local_steps import LastingStep, LocalStep, make_local_step
from edgefl.types import Array, Dataset, Learner, LocalPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalResult:
    """What an assignment brought.

    `displacement` is w_end - w_start for every tensor in the task's order, integer buffers included; `loss` is
    the mean over the examples trained on, each at the moment it was used; `num_examples` is the shard's size.
    `step_state` is what a plan that keeps its state gives to the next assignment of the run.
    """

    displacement: dict[str, Array]
    iterations: int
    num_examples: int
    loss: float
    compute_s: float
    step_state: Mapping[str, Array] | None = None


def train(  # noqa: PLR0913 what, on what, how and by which clock; the last three by name
    learner: Learner,
    data: Dataset,
    plan: LocalPlan,
    rng: Generator,
    *,
    clock: Callable[[], float],
    on_iteration: Callable[[int, float], bool],
    step_state: Mapping[str, Array] | None = None,
    step: LocalStep | None = None,
) -> LocalResult:
    """Trains from the learner's present weights until the budget is spent, at least one iteration.

    Args:
        learner: holds the model to start from; afterwards the trained one.
        data: the training part of the shard.
        plan: what to do; exactly one of iterations, epochs and seconds is its budget.
        rng: orders the examples, anew for each epoch.
        clock: seconds, monotone.
        on_iteration: told the number of finished iterations and the mean seconds of one; True recalls the
            assignment: this iteration was the last.
        step_state: what the assignment before left, for a plan that keeps its state; None begins anew.
        step: what is done with each gradient; None for what the plan names.

    Raises:
        DataError: there are no examples.
        ConfigError: the plan makes no sense, names an unknown algorithm, or has an option that it does not know.
    """
    check_plan(plan)
    if not len(data):
        raise DataError("the training part of the shard holds no examples")
    step = step or make_local_step(plan)
    _reseed(learner, rng)
    start, started_s = learner.read(), clock()
    limit = iteration_limit(plan, len(data))
    iterations, loss, num_seen = 0, 0.0, 0
    # A diverging model is the coordinator's to judge; here it only must not stop the board.
    with np.errstate(over="ignore", invalid="ignore"):
        step.begin(learner)
        if plan.keeps_state and step_state and isinstance(step, LastingStep):
            step.restore(step_state)
        for rows in _batches(len(data), plan.batch_size, rng):
            batch = data.take(rows)
            loss += len(batch) * learner.gradient(batch)
            step.step(learner, batch)
            iterations, num_seen = iterations + 1, num_seen + len(batch)
            elapsed_s = clock() - started_s
            if on_iteration(iterations, elapsed_s / iterations) or iterations == limit:
                break
            if plan.seconds is not None and elapsed_s >= plan.seconds:
                break
        step.end(learner)
        displacement = _displacement(start, learner.read())
    return LocalResult(
        displacement=displacement,
        iterations=iterations,
        num_examples=len(data),
        loss=loss / num_seen,
        compute_s=clock() - started_s,
        step_state=_state(step) if plan.keeps_state else None,
    )


def check_plan(plan: LocalPlan) -> None:
    """Accepts a plan that a device can follow.

    Raises:
        ConfigError: no budget, two of them, or a number out of range.
    """
    budgets = {"iterations": plan.iterations, "epochs": plan.epochs, "seconds": plan.seconds}
    given = {name: value for name, value in budgets.items() if value is not None}
    if len(given) != 1:
        raise ConfigError(f"a plan needs exactly one of iterations, epochs and seconds, got {given or 'none'}")
    for name, value in {**given, "batch_size": plan.batch_size}.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} of a plan must be a finite number above 0, got {value}")
    for name in ("learning_rate", "momentum", "weight_decay"):
        value = getattr(plan, name)
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} of a plan must be a finite number of 0 or more, got {value}")


def iteration_limit(plan: LocalPlan, num_examples: int) -> int | None:
    """Returns after how many iterations a plan is done; None for one that has seconds instead."""
    if plan.epochs is not None:
        return max(1, round(plan.epochs * math.ceil(num_examples / plan.batch_size)))
    return plan.iterations


def _batches(num_examples: int, batch_size: int, rng: Generator) -> Iterator[Array]:
    """Gives row numbers for ever: every example once per epoch, the last batch of an epoch may be short."""
    while True:
        order = rng.permutation(num_examples)
        for start in range(0, num_examples, batch_size):
            yield order[start : start + batch_size]


def _reseed(learner: Learner, rng: Generator) -> None:
    """Seeds what is random inside a model (dropout), where it has any, without drawing from the batches' stream."""
    reseed = getattr(learner, "reseed", None)
    if reseed is not None:
        reseed(int(rng.spawn(1)[0].integers(2**63)))


def is_finite(arrays: Mapping[str, Array]) -> bool:
    """Says whether all numbers are: what a diverged training leaves would spoil every assignment after it."""
    return all(array.dtype.kind not in "fc" or bool(np.isfinite(array).all()) for array in arrays.values())


def _state(step: LocalStep) -> Mapping[str, Array]:
    """Returns what the next assignment goes on with; nothing, so that it begins anew, where the training diverged."""
    state = step.state() if isinstance(step, LastingStep) else {}
    return state if is_finite(state) else {}


def _displacement(start: dict[str, Array], end: dict[str, Array]) -> dict[str, Array]:
    for name, value in end.items():
        value -= start[name]  # noqa: PLW2901 in place: `read` gave copies, and a second model would not fit small boards
    return end
