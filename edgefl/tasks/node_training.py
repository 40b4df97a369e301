"""What a node of a graph does for one assignment: takes its mail, trains with the method's correction, and posts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator

from edgefl.decentralised.engine import Engine
from edgefl.tasks.descent import CorrectedStep
from edgefl.tasks.local_training import train
from edgefl.types import Array, Dataset, EdgeMessage, Learner, LocalPlan, Shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResult:
    """What an assignment of a node brought; `model` is None unless the plan asks for a report."""

    outbox: tuple[EdgeMessage, ...]
    model: dict[str, Array] | None
    iterations: int
    num_examples: int
    loss: float | None
    compute_s: float


def begin_node(engine: Engine, learner: Learner, shapes: Shapes) -> None:
    """Starts a node, or starts it anew, from what is shared of the learner's model; buffers stay with the node."""
    held, parameters = learner.read(), learner.parameters
    shared = {spec.name: held[spec.name] for spec in shapes if spec.shared}
    engine.begin({name: array for name, array in shared.items() if name in parameters})
    engine.buffers = {name: array for name, array in shared.items() if name not in parameters}


def work_as_node(  # noqa: PLR0913 as `local_training.train`
    engine: Engine,
    learner: Learner,
    data: Dataset,
    plan: LocalPlan,
    rng: Generator,
    *,
    clock: Callable[[], float],
    on_iteration: Callable[[int, float], bool],
) -> NodeResult:
    """Does one assignment whose messages the coordinator carries.

    Args:
        engine: the node, which has begun.
        learner: of the task; afterwards it holds the node's model.
        data: the training part of the shard.
        plan: with `node` and `inbox`; with 0 iterations nothing is trained.
        rng: orders the examples.
        clock: seconds, monotone.
        on_iteration: as `local_training.train` has it.

    Raises:
        DataError: there are no examples.
        ConfigError: the plan makes no sense.
    """
    assert plan.node is not None
    engine.follow(plan.node.edges)
    outbox = engine.take(plan.inbox)
    engine.settle()
    model = engine.model() if plan.node.reports else None
    model = None if model is None else {name: np.array(array) for name, array in model.items()}
    iterations, loss, compute_s = 0, None, 0.0
    if plan.iterations:
        result = train_node(engine, learner, data, plan, rng, clock=clock, on_iteration=on_iteration)
        iterations, loss, compute_s = result
    if plan.node.fires:
        outbox = (*outbox, *engine.post(plan.node.fires))
    return NodeResult(
        outbox=outbox,
        model=model,
        iterations=iterations,
        num_examples=len(data),
        loss=loss,
        compute_s=compute_s,
    )


def train_node(  # noqa: PLR0913 as `local_training.train`
    engine: Engine,
    learner: Learner,
    data: Dataset,
    plan: LocalPlan,
    rng: Generator,
    *,
    clock: Callable[[], float],
    on_iteration: Callable[[int, float], bool],
) -> tuple[int, float, float]:
    """Makes local steps from the node's model and tells the node.

    Returns:
        Iterations, mean loss, and seconds of computing.
    """
    learner.load(engine.model())
    step = CorrectedStep(replace(plan, node=None), engine.correction())
    result = train(learner, data, plan, rng, clock=clock, on_iteration=on_iteration, step=step)
    after = learner.read()
    engine.trained({name: after[name] for name in engine.node.weights}, result.iterations, plan.learning_rate)
    engine.buffers = {name: after[name] for name in engine.buffers}
    return result.iterations, result.loss, result.compute_s
