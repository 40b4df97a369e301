"""Trains for any board of the fleet, one job after the other, exactly as a real board's trainer does.

One warm learner serves all; what a board remembers from one assignment to the next (kept optimiser state, what its
codec left out, tensors of its own) is swapped in and out with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from edgefl.compression.codec import Codec, make_codec
from edgefl.compression.decoding import decode_body
from edgefl.compression.edges import EdgeCodec, edge_shapes
from edgefl.compression.feedback import ErrorFeedback, uses_feedback
from edgefl.compression.leftovers import check_leaves_nothing, leaves_something
from edgefl.decentralised.engine import Engine
from edgefl.decentralised.methods import node_of
from edgefl.errors import DataError, TaskError
from edgefl.simulation.data import FleetData, Shard
from edgefl.simulation.training import Scores, Sent
from edgefl.tasks.local_training import LocalResult, is_finite, train
from edgefl.tasks.node_training import begin_node, work_as_node
from edgefl.tasks.registry import make_task
from edgefl.tasks.variates import OwnVariate, began_in
from edgefl.types import (
    Algorithm,
    Array,
    Assignment,
    Dataset,
    EdgeMessage,
    LocalPlan,
    NodePlan,
    Scalar,
    Tensors,
    derived_rng,
)

KEPT_BYTES = 512 * 1024 * 1024
"""Boards' examples are kept ready up to so many bytes; beyond, they are taken from the pool for every job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trade:
    """What boards train: the task with its options, and the seed of the run."""

    task: str
    options: Mapping[str, Scalar]
    seed: int


@dataclass(slots=True)
class _Memory:
    """What one board remembers of the run."""

    algorithm: str = ""
    step_state: Mapping[str, Array] | None = None
    variate: OwnVariate = field(default_factory=OwnVariate)
    spec: str = ""
    feedback: ErrorFeedback | None = None
    residents: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """The encoded update of one job."""

    body: bytes
    num_examples: int
    loss: float | None
    outbox: tuple[EdgeMessage, ...] = ()


class Workbench:
    """Does jobs.

    Args:
        trade: what is trained.
        data: on what.
        places: device id -> its shard's place in the data.
    """

    def __init__(self, trade: Trade, data: FleetData, places: Mapping[str, int]) -> None:
        task = make_task(trade.task, trade.options)
        self._trade, self._data, self._places = trade, data, places
        self._shapes = task.shapes()
        self._task = task
        # One thread, so that the same job gives the same bits in whatever process it is done.
        self._learner = task.learner(accelerator="cpu", threads=1)
        self._own_names = [spec.name for spec in self._shapes if not spec.shared]
        self._memories: dict[str, _Memory] = {}
        self._undo: dict[str, tuple[str, _Memory, Mapping[str, Array] | None]] = {}
        self._engines: dict[str, Engine] = {}
        self._ready: OrderedDict[str, Dataset] = OrderedDict()
        self._ready_bytes = 0
        self._codecs: dict[str, Codec] = {}
        self._decoded: tuple[tuple[int, str], Tensors] | None = None

    def train(
        self, order: Assignment, sent: Sent, iterations: int, *, is_unwanted: Callable[[], bool] = lambda: False
    ) -> Product:
        """Returns the update of an assignment that ends after so many iterations, or when nobody wants it any more.

        Raises:
            EdgeflError: the board cannot do it.
        """
        if order.plan.node is not None:
            return self._work_as_node(order, order.plan.node, sent, iterations)
        data, plan, spec = self._training_data(order), order.plan, order.codec or "dense"
        memory = self._remembered(order)
        source: tuple[int | str, ...] = (order.device_id,) if order.block is None else ("block", order.block)
        origin = self._trade.seed, order.base_version, *source
        self._load(memory, sent)
        if plan.algorithm == Algorithm.SCAFFOLD:
            memory.variate = memory.variate.at(began_in(plan), order.settled)
        result = train(
            self._learner,
            data,
            plan,
            derived_rng(*origin),
            clock=lambda: 0.0,
            on_iteration=lambda done, _: done >= iterations or is_unwanted(),
            step_state=_before(memory, plan),
        )
        self._keep(memory, order, result)
        rng = derived_rng(*origin, "uplink")
        if uses_feedback(spec):
            feedback = self._feedback(memory, spec)
            feedback.settle(order.settled)
            body = feedback.encode(order.assignment_id, result.displacement, rng)
        else:
            body = self._codec(spec).encode(result.displacement, rng)
        return Product(body=body, num_examples=result.num_examples, loss=result.loss)

    def _work_as_node(self, order: Assignment, plan: NodePlan, sent: Sent, iterations: int) -> Product:
        """Does an assignment of a node, which nothing takes back: a board keeps its node over a restart."""
        data = self._training_data(order)
        engine = self._engines.get(order.device_id) or self._begun(order.device_id, plan, sent)
        origin = self._trade.seed, order.base_version, order.device_id, engine.node.iterations
        result = work_as_node(
            engine,
            self._learner,
            data,
            replace(order.plan, iterations=iterations),
            derived_rng(*origin),
            clock=lambda: 0.0,
            on_iteration=lambda done, _: done >= iterations,
        )
        body = b""
        if result.model is not None:
            body = self._codec(order.codec or "dense").encode(result.model, derived_rng(*origin, "uplink"))
        return Product(body=body, num_examples=result.num_examples, loss=result.loss, outbox=result.outbox)

    def _begun(self, device_id: str, plan: NodePlan, sent: Sent) -> Engine:
        self._load(_Memory(), sent)
        codec = EdgeCodec(plan.codec, edge_shapes(self._shapes), epoch=1)
        engine = Engine(node_of(plan, device_id), codec, derived_rng(self._trade.seed, "edges", device_id))
        begin_node(engine, self._learner, self._shapes)
        self._engines[device_id] = engine
        return engine

    def undo(self, order: Assignment) -> None:
        """Puts a board's memory back to what it was before an assignment that nobody wants; its newest alone."""
        found = self._undo.get(order.device_id)
        if found is None or found[0] != order.assignment_id:
            return
        _, memory, residual = found
        if memory.feedback is not None and residual is not None:
            memory.feedback.restore(residual)
        self._memories[order.device_id] = memory
        del self._undo[order.device_id]

    def evaluate(self, device_id: str | None, sent: Sent) -> Scores:
        """Returns how good a model is on a board's test split; on the coordinator's data for None.

        Raises:
            DataError: there are no examples, or the model has diverged.
        """
        data = self._data.test if device_id is None else self._data.pool.take(self._shard(device_id).test)
        if data is None or not len(data):
            raise DataError("the local test split holds no examples")
        self._load(self._memories.get(device_id or "", _Memory()), sent)
        loss, accuracy = self._learner.evaluate(data)
        if not (np.isfinite(loss) and np.isfinite(accuracy)):
            raise DataError(f"the model's loss on the test data is {loss}: it has diverged")
        return Scores(num_examples=len(data), loss=float(loss), accuracy=float(accuracy))

    def _shard(self, device_id: str) -> Shard:
        return self._data.shards[self._places[device_id]]

    def _training_data(self, order: Assignment) -> Dataset:
        shard = self._shard(order.device_id)
        if order.block is None:
            return self._taken(order.device_id, shard.train)
        check_leaves_nothing(order.plan, order.codec or "dense", self._shapes)
        if order.block not in shard.blocks:
            raise TaskError(f"this device holds no block {order.block} of task {self._trade.task}")
        start, stop = shard.blocks[order.block]
        return self._data.pool.take(shard.rows[start:stop])

    def _taken(self, device_id: str, rows: Array) -> Dataset:
        """Returns a board's training examples, kept ready while there is room."""
        if device_id not in self._ready:
            taken = self._data.pool.take(rows)
            self._ready[device_id] = taken
            self._ready_bytes += taken.inputs.nbytes
            while self._ready_bytes > KEPT_BYTES and len(self._ready) > 1:
                self._ready_bytes -= self._ready.popitem(last=False)[1].inputs.nbytes
        self._ready.move_to_end(device_id)
        return self._ready[device_id]

    def _remembered(self, order: Assignment) -> _Memory:
        """Returns what the board knows, a copy of which is kept until its next assignment is done."""
        memory = self._memories.get(order.device_id)
        if not leaves_something(order.plan, order.codec or "dense", self._shapes):
            return memory or _Memory()
        before = memory or _Memory()
        residual = None if before.feedback is None else before.feedback.state()
        self._undo[order.device_id] = order.assignment_id, before, residual
        self._memories[order.device_id] = replace(before)
        return self._memories[order.device_id]

    def _keep(self, memory: _Memory, order: Assignment, result: LocalResult) -> None:
        if order.plan.algorithm == Algorithm.SCAFFOLD:
            memory.variate = memory.variate.moved(order.assignment_id, result.step_state or {})
        elif result.step_state is not None:
            memory.algorithm = order.plan.algorithm
            memory.step_state = {name: np.array(array) for name, array in result.step_state.items()}
        if self._own_names:
            values = self._learner.read()
            residents = {name: values[name] for name in self._own_names}
            memory.residents = residents if is_finite(residents) else memory.residents

    def _feedback(self, memory: _Memory, spec: str) -> ErrorFeedback:
        if memory.feedback is None or memory.spec != spec:
            made = ErrorFeedback(self._codec(spec))
            if memory.feedback is not None:
                made.restore(memory.feedback.state())
            memory.spec, memory.feedback = spec, made
        return memory.feedback

    def _load(self, memory: _Memory, sent: Sent) -> None:
        if self._own_names:
            self._learner.load(memory.residents or self._first_residents())
        if self._decoded is None or self._decoded[0] != sent.key:
            self._decoded = sent.key, decode_body(sent.body, self._shapes)
        self._learner.load(self._decoded[1])

    def _first_residents(self) -> dict[str, Array]:
        first = self._task.init(self._trade.seed)
        return {name: first[name] for name in self._own_names}

    def _codec(self, spec: str) -> Codec:
        if spec not in self._codecs:
            self._codecs[spec] = make_codec(spec, self._shapes)
        return self._codecs[spec]


def _before(memory: _Memory, plan: LocalPlan) -> Mapping[str, Array] | None:
    """Returns what the assignment's local algorithm goes on from."""
    if plan.algorithm == Algorithm.SCAFFOLD:
        return memory.variate.own
    return memory.step_state if memory.algorithm == plan.algorithm else None
