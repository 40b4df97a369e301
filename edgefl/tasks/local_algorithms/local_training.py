"""Training of one instruction on one device: batches, budget, and the resulting displacement or messages to peers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator

from edgefl.core.errors import ConfigError, DataError
from edgefl.core.types import Array, Dataset, Learner, ModelSpec, PeerMessage, TrainConfig
from edgefl.strategies.peer_algorithms.gossip_node import GossipNode
from edgefl.strategies.peer_algorithms.topology import EdgeScheduleKind
from edgefl.tasks.local_algorithms.batch_gradients import bound_learner, set_precision
from edgefl.tasks.local_algorithms.consistency import ConsistentAlgorithm
from edgefl.tasks.local_algorithms.example_privacy import (
    PrivateLearner,
    PrivateSteps,
    RunAccount,
    iterate_samples,
    make_private_steps,
    make_system_rng,
)
from edgefl.tasks.local_algorithms.optimizers import DriftCorrectedSgd
from edgefl.tasks.local_algorithms.personal_training import MixedAlgorithm, PulledAlgorithm, list_parts
from edgefl.tasks.local_algorithms.registry import LocalAlgorithm, StatefulLocalAlgorithm, make_local_algorithm
from edgefl.tasks.stored_arrays import is_stored, iterate_stored_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTrainingResult:
    """Result of an instruction.

    `displacement` is w_end - w_start for every tensor in the task's order, integer buffers included; `loss` is
    the mean over the examples trained on, each at the moment it was used, and None of private training, since it has
    no noise; `num_examples` is the shard's size.
    `algorithm_state` is the state passed to the run's next instruction by a plan that keeps it. `personal` is the
    device's personal copy, where the plan trains one. `epsilon` is what the run has spent of the examples' privacy.
    """

    displacement: dict[str, Array]
    iterations: int
    num_examples: int
    loss: float | None
    compute_s: float
    algorithm_state: Mapping[str, Array] | None = None
    personal: Mapping[str, Array] | None = None
    epsilon: float | None = None


def train(  # noqa: PLR0913 the last ones by name
    learner: Learner,
    data: Dataset,
    plan: TrainConfig,
    rng: Generator,
    *,
    clock: Callable[[], float],
    on_iteration: Callable[[int, float], bool],
    algorithm_state: Mapping[str, Array] | None = None,
    algorithm: LocalAlgorithm | None = None,
    local_names: Collection[str] = (),
    personal: Mapping[str, Array] | None = None,
    account: RunAccount | None = None,
) -> LocalTrainingResult:
    """Trains from the learner's present weights until the budget is spent, at least one iteration.

    With `plan.head_epochs` the local tensors are trained alone at first, then the others alone, each for at least one
    iteration (Collins et al., Exploiting Shared Representations for Personalized Federated Learning (FedRep), ICML
    2021, algorithm 1). With `plan.personal_lambda` a personal copy is trained after the model, for as many
    iterations, and the learner holds it afterwards; the result is of the model. With `plan.personal_mixture` it is
    trained beside the model, batch by batch, each of which counts as two iterations.

    Args:
        learner: holds the model to start from; afterwards the trained one.
        data: the training part of the shard.
        plan: of the instruction; exactly one of iterations, epochs and seconds is its budget.
        rng: orders the examples, anew for each epoch, and seeds random layers; a plan with `privacy` uses none of it.
        clock: seconds, monotone.
        on_iteration: called with the number of finished iterations and the mean seconds of one; True finishes early:
            this iteration was the last.
        algorithm_state: state of the instruction before, for a plan that keeps it; None starts anew.
        algorithm: the local algorithm; None for the plan's.
        local_names: the tensors that stay on the device.
        personal: the device's personal copy so far; None starts it from the model.
        account: of the examples' privacy, which a plan with `privacy` is charged to before this returns.

    Raises:
        DataError: there are no examples, or there is no room in the account.
        ConfigError: the plan is invalid, names an unknown algorithm, has an option unknown to it, or trains local
            tensors where there are none.
    """
    plan.check()
    if not len(data):
        raise DataError("the training part of the shard holds no examples")
    algorithm = algorithm or make_local_algorithm(plan)
    set_precision(learner, plan)
    _reseed(learner, rng if plan.privacy is None else make_system_rng())
    start, limit, kept = learner.read(), plan.count_iterations(len(data)), None
    private = None if plan.privacy is None else _make_private(learner, data, plan, account, limit or 0)
    loop = _TrainingLoop(data, plan, rng, clock, on_iteration)
    # The coordinator handles a diverging model; here it only must not stop the device.
    with np.errstate(over="ignore", invalid="ignore"):
        if private is not None:
            loop.run(
                private.learner, algorithm, limit, algorithm_state if plan.keeps_state else None, private.samples
            )
        elif plan.head_epochs is None:
            mixed = _make_mixed(algorithm, plan, personal)
            algorithm = _make_consistent(algorithm, data, plan, rng)
            limit_of_model = limit if limit is None or plan.personal_lambda is None else limit // 2
            loop.run(learner, mixed or algorithm, limit_of_model, algorithm_state if plan.keeps_state else None)
            kept = None if mixed is None else mixed.make_copy(learner)
        else:
            for part, limit in list_parts(learner, plan, len(data), local_names):
                loop.run(part, make_local_algorithm(plan), limit)
        displacement, loss = compute_displacement(start, learner.read()), loop.loss_sum / max(1, loop.num_seen)
        if plan.personal_lambda is not None:
            learner.load(personal or start)
            loop.run(learner, PulledAlgorithm(make_local_algorithm(plan), start, plan.personal_lambda), limit)
            kept = learner.read()
    return LocalTrainingResult(
        displacement=displacement,
        iterations=loop.iterations,
        num_examples=len(data),
        loss=loss if private is None else None,
        compute_s=clock() - loop.started_s,
        algorithm_state=_get_algorithm_state(algorithm) if plan.keeps_state else None,
        personal=kept,
        epsilon=None if private is None else private.account.charge(private.steps, loop.iterations),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PrivateTraining:
    learner: PrivateLearner
    samples: Iterator[Dataset]
    steps: PrivateSteps
    account: RunAccount


def _make_private(
    learner: Learner, data: Dataset, plan: TrainConfig, account: RunAccount | None, limit: int
) -> _PrivateTraining:
    """Returns what private steps need, where the account has room for them."""
    if account is None:
        raise ConfigError('privacy.unit = "example" needs an account of what is spent, and nobody keeps one here')
    rows = _find_labelled(data)
    rows = np.arange(len(data)) if rows is None else rows
    steps = make_private_steps(plan, len(rows), limit)
    account.check_room(steps, limit)
    return _PrivateTraining(
        learner=PrivateLearner(learner, steps, make_system_rng()),
        samples=iterate_samples(data, rows, steps.sampling, make_system_rng()),
        steps=steps,
        account=account,
    )


def _make_mixed(
    algorithm: LocalAlgorithm, plan: TrainConfig, personal: Mapping[str, Array] | None
) -> MixedAlgorithm | None:
    if plan.personal_mixture is None:
        return None
    beside = make_local_algorithm(plan)
    return MixedAlgorithm(algorithm, beside, personal, plan.personal_mixture, plan.learning_rate)


def _make_consistent(algorithm: LocalAlgorithm, data: Dataset, plan: TrainConfig, rng: Generator) -> LocalAlgorithm:
    """Returns the algorithm with the plan's consistency, where the data has examples without a label."""
    unlabelled = data.find_unlabelled()
    if unlabelled is None:
        return algorithm
    weight, threshold = plan.consistency_weight, plan.consistency_threshold
    if weight is None or threshold is None:
        raise ConfigError(
            f"{unlabelled.sum()} of {len(data)} examples have no label, which task.unlabelled reads for "
            "strategy.consistency_weight; set both or neither"
        )
    order, views = rng.spawn(2)
    batches = _iterate_batches(data, plan.batch_size, order, np.flatnonzero(unlabelled))
    return ConsistentAlgorithm(algorithm, batches, weight=weight, threshold=threshold, rng=views)


class _TrainingLoop:
    """Steps of one instruction, counted over all its parts; arguments as those of `train`.

    Attributes:
        iterations: made so far.
        loss_sum: over the examples trained on, of which there were `num_seen`.
        started_s: by the clock.
    """

    def __init__(
        self,
        data: Dataset,
        plan: TrainConfig,
        rng: Generator,
        clock: Callable[[], float],
        on_iteration: Callable[[int, float], bool],
    ) -> None:
        self._data, self._plan, self._rng = data, plan, rng
        self._clock, self._on_iteration = clock, on_iteration
        self.iterations, self.loss_sum, self.num_seen, self.started_s = 0, 0.0, 0, clock()

    def run(
        self,
        learner: Learner,
        algorithm: LocalAlgorithm,
        limit: int | None,
        state: Mapping[str, Array] | None = None,
        batches: Iterator[Dataset] | None = None,
    ) -> None:
        """Makes steps, at least one, until there are `limit` in all, the seconds are over, or it is to finish.

        The algorithm starts from `state`, where it takes one; without `batches` every example is in one of an epoch.
        """
        learner = bound_learner(learner, self._plan)
        algorithm.start(learner)
        if state and isinstance(algorithm, StatefulLocalAlgorithm):
            algorithm.restore(state)
        for batch in batches or _iterate_batches(
            self._data, self._plan.batch_size, self._rng, _find_labelled(self._data)
        ):
            self.loss_sum += len(batch) * learner.gradient(batch)
            algorithm.step(learner, batch)
            self.iterations += getattr(algorithm, "gradients_per_batch", 1)
            self.num_seen += len(batch)
            elapsed_s = self._clock() - self.started_s
            if self._on_iteration(self.iterations, elapsed_s / self.iterations):
                break
            if limit is not None and self.iterations >= limit:
                break
            if self._plan.seconds is not None and elapsed_s >= self._plan.seconds:
                break
        algorithm.finish(learner)


def _find_labelled(data: Dataset) -> Array | None:
    """Returns the rows of the examples that have a label; None where all have one.

    Raises:
        DataError: none has one.
    """
    unlabelled = data.find_unlabelled()
    rows = None if unlabelled is None else np.flatnonzero(~unlabelled)
    if rows is not None and not len(rows):
        raise DataError(f"none of the {len(data)} examples in the training part of the shard has a label")
    return rows


def _iterate_batches(data: Dataset, batch_size: int, rng: Generator, rows: Array | None = None) -> Iterator[Dataset]:
    """Yields batches of some rows or all endlessly: every one once per epoch, of which one batch may be short."""
    while True:
        if rows is None and is_stored(data.inputs):
            yield from iterate_stored_batches(data, batch_size, rng)
            continue
        order = rng.permutation(len(data) if rows is None else rows)
        for start in range(0, len(order), batch_size):
            yield data.take(order[start : start + batch_size])


def _reseed(learner: Learner, rng: Generator) -> None:
    """Seeds a model's random layers (dropout), where it has any, independently of the batches' stream."""
    reseed = getattr(learner, "reseed", None)
    if reseed is not None:
        reseed(int(rng.spawn(1)[0].integers(2**63)))


def is_finite(arrays: Mapping[str, Array]) -> bool:
    """Returns whether all numbers are finite: diverged state would spoil every later instruction."""
    return all(array.dtype.kind not in "fc" or bool(np.isfinite(array).all()) for array in arrays.values())


def _get_algorithm_state(algorithm: LocalAlgorithm) -> Mapping[str, Array]:
    """Returns the state for the next instruction; empty, for a fresh start, where training diverged."""
    state = algorithm.state() if isinstance(algorithm, StatefulLocalAlgorithm) else {}
    return state if is_finite(state) else {}


def compute_displacement(start: Mapping[str, Array], end: dict[str, Array]) -> dict[str, Array]:
    """Returns end - start, in the arrays of `end`."""
    for name, value in end.items():
        value -= start[name]  # noqa: PLW2901 in place: `read` gave copies, and a second model would not fit small devices
    return end


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipTrainingResult:
    """Result of a node's instruction; `model` is None unless the plan requests a report."""

    messages: tuple[PeerMessage, ...]
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


def run_gossip_instruction(  # noqa: PLR0913 as `train`
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
        plan: with `node` and `messages`; with 0 iterations nothing is trained.
        rng: orders the examples.
        clock: seconds, monotone.
        on_iteration: as in `train`.

    Raises:
        DataError: there are no examples.
        ConfigError: the plan is invalid.
    """
    assert plan.node is not None
    engine.update_links(plan.node.edges)
    messages = engine.receive(plan.messages)
    engine.finish_exchange()
    model = engine.model() if plan.node.reports else None
    model = None if model is None else {name: np.array(array) for name, array in model.items()}
    iterations, loss, compute_s = 0, None, 0.0
    if plan.iterations:
        result = train_node(engine, learner, data, plan, rng, clock=clock, on_iteration=on_iteration)
        iterations, loss, compute_s = result
    # In pairs an edge fires after all its iterations only: the node was interrupted to reply.
    is_interrupted = plan.node.schedule == EdgeScheduleKind.PAIR and iterations < (plan.iterations or 0)
    if plan.node.fires and not is_interrupted:
        messages = (*messages, *engine.start_exchange(plan.node.fires))
    return GossipTrainingResult(
        messages=messages,
        model=model,
        iterations=iterations,
        num_examples=len(data),
        loss=loss,
        compute_s=compute_s,
    )


def train_node(  # noqa: PLR0913 as `train`
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
    step = DriftCorrectedSgd(replace(plan, node=None), engine.algorithm.correction())
    result = train(learner, data, plan, rng, clock=clock, on_iteration=on_iteration, algorithm=step)
    tensors = learner.read()
    engine.algorithm.apply_local_steps(
        {name: tensors[name] for name in engine.algorithm.weights}, result.iterations, plan.learning_rate
    )
    engine.buffers = {name: tensors[name] for name in engine.buffers}
    return result.iterations, result.loss or 0.0, result.compute_s
