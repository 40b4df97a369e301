"""A whole graph of nodes in one process, on losses with exact gradients: what methods do, without any carrier."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator

from edgefl.core.types import Array
from edgefl.strategies.peer_algorithms.algorithm import GossipAlgorithm, GossipMessage
from edgefl.strategies.peer_algorithms.gossip_node import make_algorithm
from edgefl.strategies.peer_algorithms.topology import EdgeScheduleKind, Topology, make_edge_schedule

Gradient = Callable[[Array], Array]


@dataclass(frozen=True, kw_only=True)
class Quadratics:
    """f_i(w) = (w - b_i)ᵀ A_i (w - b_i) / 2, one for each node."""

    matrices: Array
    minima: Array

    @classmethod
    def drawn(cls, count: int, size: int = 10, condition: float = 10.0, seed: int = 3) -> "Quadratics":
        rng = np.random.default_rng(seed)
        matrices = []
        for _ in range(count):
            basis, _ = np.linalg.qr(rng.normal(size=(size, size)))
            matrices.append(basis @ np.diag(rng.uniform(1, condition, size)) @ basis.T)
        return cls(matrices=np.array(matrices), minima=rng.normal(size=(count, size)) * 3)

    @property
    def smoothness(self) -> float:
        return float(max(np.linalg.eigvalsh(matrix)[-1] for matrix in self.matrices))

    def gradients(self) -> list[Gradient]:
        return [lambda w, a=a, b=b: a @ (w - b) for a, b in zip(self.matrices, self.minima, strict=True)]

    def optimum(self, weights: Sequence[float] | None = None) -> Array:
        """Returns the minimum of the sum, each term as often as `weights` says."""
        times = np.ones(len(self.minima)) if weights is None else np.asarray(weights, dtype=float)
        total = np.einsum("i,ijk->jk", times, self.matrices)
        return np.linalg.solve(total, np.einsum("i,ijk,ik->j", times, self.matrices, self.minima))


@dataclass(kw_only=True)
class Network:
    """Nodes that make exact gradient steps and pass each other mail, some of which may be lost, late or doubled."""

    graph: Topology
    gradients: dict[str, Gradient]
    nodes: dict[str, GossipAlgorithm]
    learning_rate: float
    period: int
    schedule: str = EdgeScheduleKind.SYNC
    speeds: dict[str, float] = field(default_factory=dict)
    loss: float = 0.0
    delay: float = 0.0
    doubled: bool = False
    rng: Generator = field(default_factory=lambda: np.random.default_rng(9))

    @classmethod
    def of(cls, method: str, graph: Topology, gradients: Sequence[Gradient], *, start: Array, rate: float,
           period: int, **options: object) -> "Network":  # fmt: skip
        nodes = {}
        is_damped = method == "d2" and graph.should_damp()
        for name in graph.nodes:
            edges = graph.make_link_configs(name, period, is_damped=is_damped)
            nodes[name] = make_algorithm(method, name, edges, learning_rate=rate, period=period)
            nodes[name].is_pairwise = options.get("schedule") == EdgeScheduleKind.PAIR
            nodes[name].start({"w": start})
        named = dict(zip(graph.nodes, gradients, strict=True))
        return cls(graph=graph, gradients=named, nodes=nodes, learning_rate=rate, period=period, **options)  # type: ignore[arg-type]

    def weights(self) -> Array:
        return np.array([node.weights["w"] for node in self.nodes.values()])

    def error(self, optimum: Array) -> float:
        """Returns the largest distance of a node to the optimum, by its length."""
        return float(np.linalg.norm(self.weights() - optimum, axis=1).max() / np.linalg.norm(optimum))

    def run(self, iterations: int) -> "Network":
        """Lets every node do that many local iterations, or as many as are whole exchanges."""
        if self.schedule == EdgeScheduleKind.SYNC:
            for _ in range(iterations // self.period):
                self.exchange()
        else:
            self._run_at_their_pace(iterations)
        return self

    def exchange(self) -> None:
        """K local steps of every node, then exchanges over all edges until it is time for the next ones."""
        for node in self.nodes.values():
            self.train(node, self.period)
        while True:
            self.deliver([mail for node in self.nodes.values() for mail in node.make_messages(node.neighbours)])
            for node in self.nodes.values():
                node.mix()
            if all(node.should_train_before(node.exchanges + 1) for node in self.nodes.values()):
                break

    def train(self, node: GossipAlgorithm, iterations: int) -> None:
        weights, rate = node.weights["w"].copy(), self.learning_rate
        correction = node.correction()
        pull = correction.correction.get("w", 0.0)
        for _ in range(iterations):
            gradient = self.gradients[node.name](weights)
            weights = (weights - rate * (gradient - pull)) / (1 + rate * correction.shrinkage)
        node.apply_local_steps({"w": weights}, iterations, rate)

    def deliver(self, mail: Sequence[GossipMessage]) -> None:
        """Brings mail and what it is answered with; all questions before the first answer."""
        answers: list[GossipMessage] = []
        for each in mail:
            for _ in range(2 if self.doubled else 1):
                if each.receiver in self.nodes and self.rng.random() >= self.loss:
                    answers += self.nodes[each.receiver].receive(each)
        if answers:
            self.deliver(answers)

    def _run_at_their_pace(self, iterations: int) -> None:
        firing = {
            name: make_edge_schedule(
                self.schedule, edges=self.graph.make_link_configs(name, self.period), period=self.period, rng=self.rng
            )
            for name in self.nodes
        }
        due = self._bursts(firing, [(0.0, name) for name in self.nodes], iterations)
        late: list[tuple[float, int, GossipMessage]] = []
        number = 0
        for now, name, burst in due:
            while late and late[0][0] <= now:
                self.deliver([heapq.heappop(late)[2]])
            if name not in self.nodes:
                continue
            node = self.nodes[name]
            self.train(node, burst[0])
            for mail in node.make_messages(burst[1]):
                number += 1
                heapq.heappush(late, (now + self.delay * self.rng.random(), number, mail))
            node.mix()

    def _bursts(self, firing: dict, starts: list, iterations: int) -> Iterator:
        heap = []
        for place, (now, name) in enumerate(starts):
            burst = firing[name](0, self.nodes[name].neighbours)
            heapq.heappush(heap, (now + burst[0] * self.speeds.get(name, 1.0), place, name, burst))
        until = float(iterations)
        while heap and heap[0][0] <= until:
            now, place, name, burst = heapq.heappop(heap)
            yield now, name, burst
            if name in self.nodes:
                node = self.nodes[name]
                burst = firing[name](node.iterations, node.neighbours)
                heapq.heappush(heap, (now + burst[0] * self.speeds.get(name, 1.0), place, name, burst))
