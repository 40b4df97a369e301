"""Instruction of a graph node: receive peer messages, train with the method's correction, send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator

from edgefl.core.types import Array, Dataset, Learner, ModelSpec, PeerMessage, TrainConfig
from edgefl.decentralised.gossip_node import GossipNode
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.local_algorithms.sgd import DriftCorrectedSgd


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipTrainingResult:
    """Result of a node's instruction; `model` is None unless the plan requests a report."""

    outbox: tuple[PeerMessage, ...]
    model: dict[str, Array] | None
    iterations: int
    num_examples: int
    loss: float | None
    compute_s: float


def start_node(engine: GossipNode, learner: Learner, shapes: ModelSpec) -> None:
    """Starts or restarts a node from the shared tensors of the learner's model; buffers stay with the node."""
    tensors, parameters = learner.read(), learner.parameters
    shared = {spec.name: tensors[spec.name] for spec in shapes if spec.shared}
    engine.start({name: array for name, array in shared.items() if name in parameters})
    engine.buffers = {name: array for name, array in shared.items() if name not in parameters}


def run_gossip_instruction(  # noqa: PLR0913 as `local_training.train`
    engine: GossipNode,
    learner: Learner,
    data: Dataset,
    plan: TrainConfig,
    rng: Generator,
    *,
    clock: Callable[[], float],
    on_iteration: Callable[[int, float], bool],
) -> GossipTrainingResult:
    """Runs one instruction with messages relayed by the coordinator.

    Args:
        engine: the started node.
        learner: of the task; afterwards it holds the node's model.
        data: the training part of the shard.
        plan: with `node` and `inbox`; with 0 iterations nothing is trained.
        rng: orders the examples.
        clock: seconds, monotone.
        on_iteration: as in `local_training.train`.

    Raises:
        DataError: there are no examples.
        ConfigError: the plan is invalid.
    """
    assert plan.node is not None
    engine.update_links(plan.node.edges)
    outbox = engine.receive(plan.inbox)
    engine.finish_exchange()
    model = engine.model() if plan.node.reports else None
    model = None if model is None else {name: np.array(array) for name, array in model.items()}
    iterations, loss, compute_s = 0, None, 0.0
    if plan.iterations:
        result = train_node(engine, learner, data, plan, rng, clock=clock, on_iteration=on_iteration)
        iterations, loss, compute_s = result
    if plan.node.fires:
        outbox = (*outbox, *engine.start_exchange(plan.node.fires))
    return GossipTrainingResult(
        outbox=outbox,
        model=model,
        iterations=iterations,
        num_examples=len(data),
        loss=loss,
        compute_s=compute_s,
    )


def train_node(  # noqa: PLR0913 as `local_training.train`
    engine: GossipNode,
    learner: Learner,
    data: Dataset,
    plan: TrainConfig,
    rng: Generator,
    *,
    clock: Callable[[], float],
    on_iteration: Callable[[int, float], bool],
) -> tuple[int, float, float]:
    """Makes local steps from the node's model and passes the result to the node.

    Returns:
        Iterations, mean loss, and seconds of computing.
    """
    learner.load(engine.model())
    step = DriftCorrectedSgd(replace(plan, node=None), engine.correction())
    result = train(learner, data, plan, rng, clock=clock, on_iteration=on_iteration, algorithm=step)
    tensors = learner.read()
    engine.apply_local_steps(
        {name: tensors[name] for name in engine.algorithm.weights}, result.iterations, plan.learning_rate
    )
    engine.buffers = {name: tensors[name] for name in engine.buffers}
    return result.iterations, result.loss, result.compute_s
