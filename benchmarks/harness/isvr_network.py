"""A whole graph of nodes in one process, at equal speeds in virtual time, with a task's own learner on real images.

One unit of time is one local iteration. A node takes its mail when it begins a burst of iterations, and posts when it
ends it, as devices do; mail takes no time. In pairs it takes mail at once, after the iterations that it has done.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.random import Generator

from edgefl.compression.peer_codec import PeerCodec, select_peer_tensors
from edgefl.core.types import Array, Dataset, Learner, PeerMessage, Task, derive_rng
from edgefl.strategies.peer_algorithms.gossip_node import ALGORITHMS, GossipNode, make_algorithm
from edgefl.strategies.peer_algorithms.topology import EdgeSchedule, make_edge_schedule, make_topology
from edgefl.tasks.local_algorithms.local_training import start_node, train_node
from harness.class_shards import CUTS, NUM_NODES, class_shards
from harness.isvr_cell import Cell

Parts = Mapping[str, Mapping[str, Array]]


Burst = tuple[int, tuple[str, ...]]
"""Iterations of a node, and the neighbours it exchanges with after them."""


class Network:
    """The nodes, and the mail between them.

    Args:
        cell: what to run.
        task: whose first model the nodes start from.
        learner: in which all nodes train in turn.
        images: dealt among the nodes.
    """

    def __init__(self, cell: Cell, task: Task, learner: Learner, images: Dataset) -> None:
        self.num_messages = self.num_bytes = 0
        self.engines: dict[str, GossipNode] = {}
        self._cell, self._learner = cell, learner
        self._is_pairwise = cell.exchange == "pair"
        self._trained_until: dict[str, int] = {}
        names = [f"node-{number}" for number in range(NUM_NODES)]
        self._graph = make_topology(cell.graph, names)
        shards = class_shards(images.targets, CUTS[cell.cut], derive_rng(cell.seed, "cut"))
        self._data = {name: images.take(rows) for name, rows in zip(names, shards, strict=True)}
        self._rngs = {name: derive_rng(cell.seed, "batches", name) for name in names}
        self._inboxes: dict[str, list[PeerMessage]] = {name: [] for name in names}
        self._losses = derive_rng(cell.seed, "losses")
        self._handover = Handover()
        self._message_bytes = 0 if cell.codec else _dense_bytes(cell, task)
        for name in names:
            self.engines[name] = self._engine(name, task)
        self._firing = {name: self._schedule(name) for name in names}

    def _engine(self, name: str, task: Task) -> GossipNode:
        cell = self._cell
        is_damped = cell.method == "d2" and self._graph.should_damp()
        node = make_algorithm(
            cell.method,
            name,
            self._graph.make_link_configs(name, cell.period, is_damped=is_damped),
            learning_rate=cell.rate,
            period=cell.period,
            **({} if cell.k_eta is None else {"k_eta": cell.k_eta}),
        )
        node.is_pairwise = self._is_pairwise
        coder = PeerCodec(cell.codec, select_peer_tensors(task.shapes()), epoch=1) if cell.codec else self._handover
        engine = GossipNode(node, coder, derive_rng(cell.seed, "edges", name))
        self._learner.load(task.init(cell.seed))
        start_node(engine, self._learner, task.shapes())
        return engine

    def _schedule(self, name: str) -> EdgeSchedule:
        cell = self._cell
        sides = self._graph.make_link_configs(name, cell.period)
        return make_edge_schedule(
            cell.exchange, edges=sides, period=cell.period, rng=derive_rng(cell.seed, "firing", name)
        )

    @property
    def exchanges_per_edge(self) -> float:
        return self.num_messages / 2 / len(self._graph.edges)

    @property
    def bytes_per_edge(self) -> float:
        return self.num_bytes / len(self._graph.edges)

    def mean_model(self) -> dict[str, Array]:
        models = [engine.model() for engine in self.engines.values()]
        return {
            name: np.mean([model[name] for model in models], axis=0, dtype=np.float64).astype(array.dtype)
            for name, array in models[0].items()
        }

    def run(self) -> Iterator[int]:
        """Lets every node do its iterations, and stops at each point of the curve to give the time."""
        bursts: dict[str, Burst] = {}
        due: list[tuple[int, str]] = []
        for name in self.engines:
            self._begin_burst(name, 0, bursts, due)
        marks = self._cell.marks
        while due:
            now = due[0][0]
            while marks and marks[0] < now:
                yield marks.pop(0)
            together = []
            while due and due[0][0] == now:
                together.append(heapq.heappop(due)[1])
            for name in together:
                self._end_burst(name, bursts[name][1], now)
            for name in together:
                self._begin_burst(name, now, bursts, due)
        yield from marks

    def _begin_burst(self, name: str, now: int, bursts: dict[str, Burst], due: list[tuple[int, str]]) -> None:
        engine = self.engines[name]
        messages, self._inboxes[name] = self._inboxes[name], []
        self._send(engine.receive(messages))
        engine.finish_exchange()
        node, self._trained_until[name] = engine.algorithm, now
        if not engine.should_train_next():
            bursts[name] = 0, node.neighbours
        elif node.iterations < self._cell.iterations:
            iterations, neighbours = self._firing[name](node.iterations, node.neighbours)
            remaining = self._cell.iterations - node.iterations
            is_over = self._is_pairwise and iterations > remaining
            bursts[name] = min(iterations, remaining), () if is_over else neighbours
        else:
            return
        heapq.heappush(due, (now + bursts[name][0], name))

    def _end_burst(self, name: str, neighbours: tuple[str, ...], now: int) -> None:
        self._train_until(name, now)
        messages = self.engines[name].start_exchange(neighbours)
        for message in messages if self._is_pairwise else ():
            self._train_until(message.edge[1], now)
        self._send(messages)

    def _train_until(self, name: str, now: int) -> None:
        """Makes a node's iterations up to now: mail never changes those before, so later is as good as meanwhile."""
        engine = self.engines[name]
        iterations = min(now - self._trained_until[name], self._cell.iterations - engine.algorithm.iterations)
        self._trained_until[name] = now
        if iterations > 0:
            plan = self._cell.plan(engine.algorithm.iterations, iterations)
            train_node(
                engine,
                self._learner,
                self._data[name],
                plan,
                self._rngs[name],
                clock=no_time,
                on_iteration=never,
            )

    def _send(self, messages: tuple[PeerMessage, ...]) -> None:
        self.num_messages += len(messages)
        for message in messages:
            self.num_bytes += self._message_bytes or len(message.body)
            if self._losses.random() < self._cell.lost:
                continue
            if self._is_pairwise:
                self._send(self.engines[message.edge[1]].receive([message]))
            else:
                self._inboxes[message.edge[1]].append(message)


class Handover:
    """A coder that gives the parts of a message as they are under a number: exact as dense, without its copies."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, Parts] = {}
        self._numbers = itertools.count()

    def encode(self, receiver: str, parts: Parts, rng: Generator) -> bytes:  # noqa: ARG002 as codecs have it
        key = next(self._numbers).to_bytes(8, "little")
        self._waiting[key] = parts
        return key

    def decode(self, sender: str, body: bytes) -> Parts:  # noqa: ARG002 likewise
        return self._waiting.pop(body)

    def remove_peer(self, neighbour: str) -> None: ...


def _dense_bytes(cell: Cell, task: Task) -> int:
    """Returns the length of a message without a codec."""
    model, shapes = task.init(cell.seed), select_peer_tensors(task.shapes())
    tensors = {spec.name: model[spec.name] for spec in shapes}
    part_names = ALGORITHMS[cell.method].parts
    # Gradient tracking sends its two parts in turn.
    parts = part_names[:1] if cell.method == "gradient-tracking" else part_names
    coder = PeerCodec("", shapes, epoch=1)
    return len(coder.encode("neighbour", dict.fromkeys(parts, tensors), derive_rng(cell.seed)))


def no_time() -> float:
    return 0.0


def never(iterations: int, seconds: float) -> bool:  # noqa: ARG001 as `train` calls it
    return False
