"""Who exchanges with whom: an undirected, connected graph of devices, by name or from a file.

Source of the graphs N1 (`multiplex:2`) and N2 (`paper-random`): Niwa et al., Asynchronous Decentralized Optimization
With Implicit Stochastic Variance Reduction, ICML 2021. Weights: Xiao, Boyd, Fast Linear Iterations for Distributed
Averaging, 2004 (Metropolis).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from edgefl.errors import ConfigError
from edgefl.types import Array, EdgeSide, derived_rng

Edge = tuple[str, str]

SPECS = ("ring", "multiplex:K", "paper-random", "complete", "star", "grid", "grid:COLUMNS", "erdos-renyi:P")

_SPEC = re.compile(r"(ring|paper-random|complete|star|grid)|(multiplex|grid):(\d+)|(erdos-renyi):([0-9.eE+-]+)")
_PAPER_RANDOM = ((0, 1), (0, 4), (0, 6), (0, 7), (1, 6), (2, 4), (2, 5), (3, 6), (3, 7), (4, 5))
_MOST_DRAWS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Devices and the edges between them.

    Attributes:
        nodes: in their order, which gives each edge its sign.
        edges: pairs of nodes, the earlier node first, in order.
        slots: of (node, neighbour), when the node's side fires in the schedule `slots`; 0 where nothing stands.
        periods: of a node, its local iterations between two exchanges, where a file says so.
    """

    nodes: tuple[str, ...]
    edges: tuple[Edge, ...]
    slots: Mapping[Edge, int] = field(default_factory=dict)
    periods: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        nodes: Iterable[str],
        edges: Iterable[Edge],
        *,
        slots: Mapping[Edge, int] | None = None,
        periods: Mapping[str, int] | None = None,
    ) -> Self:
        """Returns the graph, its edges in order and each once.

        Raises:
            ConfigError: fewer than two nodes, a name that stands twice or is unknown, a loop, or parts without a
                path between them.
        """
        names = tuple(nodes)
        places = {name: place for place, name in enumerate(names)}
        if len(names) < 2 or len(places) != len(names):
            raise ConfigError(
                f"a graph needs at least two nodes with different names, got {', '.join(names) or 'none'}"
            )
        found = set()
        for one, other in edges:
            for name in (one, other):
                if name not in places:
                    raise ConfigError(f"edge {one} - {other}: no node is called {name!r}; known: {', '.join(names)}")
            if one == other:
                raise ConfigError(f"edge {one} - {other} joins a node to itself")
            found.add((one, other) if places[one] < places[other] else (other, one))
        graph = cls(
            nodes=names,
            edges=tuple(sorted(found, key=lambda edge: (places[edge[0]], places[edge[1]]))),
            slots=dict(slots or {}),
            periods=dict(periods or {}),
        )
        graph._check_connected()
        return graph

    def neighbours(self, node: str) -> tuple[str, ...]:
        """Returns a node's neighbours, in the order of the nodes."""
        joined = {other for edge in self.edges if node in edge for other in edge} - {node}
        return tuple(name for name in self.nodes if name in joined)

    def degree(self, node: str) -> int:
        return sum(node in edge for edge in self.edges)

    def sign(self, node: str, neighbour: str) -> float:
        """Returns the node's side of the edge's constraint: 1 for the later of the two, -1 for the earlier."""
        return 1.0 if self.nodes.index(node) > self.nodes.index(neighbour) else -1.0

    def sides(self, node: str, period: int, *, is_damped: bool = False) -> tuple[EdgeSide, ...]:
        """Returns what a node has to know of its edges.

        Args:
            node: whose they are.
            period: local iterations between two exchanges, of nodes that no file gives another.
            is_damped: the mixing matrix is (I + W)/2.
        """
        degrees = {name: self.degree(name) for name in (node, *self.neighbours(node))}
        return tuple(
            EdgeSide(
                neighbour=other,
                sign=self.sign(node, other),
                degree=max(degrees[node], degrees[other]),
                weight=1 / (1 + max(degrees[node], degrees[other])) / (2 if is_damped else 1),
                period=max(self.periods.get(name, period) for name in (node, other)),
                slot=self.slots.get((node, other), 0),
            )
            for other in self.neighbours(node)
        )

    def without(self, node: str) -> Self:
        """Returns the graph that is left when a node leaves with its edges.

        Raises:
            ConfigError: what is left is not connected, or a single node.
        """
        return type(self).of(
            [name for name in self.nodes if name != node],
            [edge for edge in self.edges if node not in edge],
            slots={edge: slot for edge, slot in self.slots.items() if node not in edge},
            periods={name: period for name, period in self.periods.items() if name != node},
        )

    def metropolis(self) -> Array:
        """Returns the symmetric [n, n] weights W_ij = 1 / (1 + max(d_i, d_j)), whose rows sum to 1."""
        weights = np.zeros((len(self.nodes), len(self.nodes)))
        places = {name: place for place, name in enumerate(self.nodes)}
        degrees = {name: self.degree(name) for name in self.nodes}
        for one, other in self.edges:
            weight = 1 / (1 + max(degrees[one], degrees[other]))
            weights[places[one], places[other]] = weights[places[other], places[one]] = weight
        np.fill_diagonal(weights, 1 - weights.sum(axis=1))
        return weights

    def needs_damping(self) -> bool:
        """Says whether the Metropolis weights have an eigenvalue of -1/3 or less, with which D2 does not converge."""
        return float(np.linalg.eigvalsh(self.metropolis())[0]) <= -1 / 3

    def spectral_gap(self) -> float:
        """Returns 1 less the second largest magnitude among the eigenvalues of the Metropolis weights."""
        magnitudes = np.sort(np.abs(np.linalg.eigvalsh(self.metropolis())))
        return float(1 - magnitudes[-2])

    def _check_connected(self) -> None:
        first, *others = connected_parts(self.nodes, self.edges)
        if others:
            apart = [name for name in self.nodes if name not in first]
            raise ConfigError(f"the graph is not connected: no path from {self.nodes[0]} to {', '.join(apart)}")


def connected_parts(nodes: Sequence[str], edges: Iterable[Edge]) -> list[list[str]]:
    """Returns the parts of a graph between which there is no path, each in the order of the nodes."""
    joined: dict[str, set[str]] = {name: set() for name in nodes}
    for one, other in edges:
        joined[one].add(other)
        joined[other].add(one)
    parts: list[list[str]] = []
    left = list(nodes)
    while left:
        reached, waiting = {left[0]}, [left[0]]
        while waiting:
            new = joined[waiting.pop()] - reached
            reached |= new
            waiting += new
        parts.append([name for name in left if name in reached])
        left = [name for name in left if name not in reached]
    return parts


def check_spec(spec: str) -> re.Match[str]:
    """Returns the parts of a graph's name.

    Raises:
        ConfigError: there is no such graph.
    """
    parts = _SPEC.fullmatch(spec)
    if parts is None:
        raise ConfigError(f"graph {spec!r} is unknown; known: {', '.join(SPECS)}, or a file")
    return parts


def make_graph(spec: str, nodes: Sequence[str], seed: int = 0) -> Graph:
    """Returns the graph that a user's text names, over these nodes.

    Args:
        spec: `ring`; `multiplex:K` (ring, each node with the K next on either side); `paper-random` (eight nodes);
            `complete`; `star` (the first node in the middle); `grid` (as square as it goes) or `grid:COLUMNS`;
            `erdos-renyi:P` (each edge with probability P).
        nodes: names, in order.
        seed: for `erdos-renyi`, which is drawn until it is connected.

    Raises:
        ConfigError: an unknown spec, or one that cannot be had with so many nodes.
    """
    plain, counted, count, _, probability = check_spec(spec).groups()
    match plain or counted:
        case "ring":
            edges = _circle(nodes, 1)
        case "multiplex":
            edges = _circle(nodes, int(count))
        case "paper-random":
            if len(nodes) != 8:
                raise ConfigError(f"graph paper-random has 8 nodes, got {len(nodes)}")
            edges = [(nodes[one], nodes[other]) for one, other in _PAPER_RANDOM]
        case "complete":
            edges = list(itertools.combinations(nodes, 2))
        case "star":
            edges = [(nodes[0], other) for other in nodes[1:]]
        case "grid":
            edges = _grid(nodes, int(count) if count else _columns(len(nodes)))
        case _:
            return _drawn(spec, nodes, probability, seed)
    return Graph.of(nodes, edges)


def _circle(nodes: Sequence[str], reach: int) -> list[Edge]:
    if not 1 <= reach <= max(1, len(nodes) // 2):
        raise ConfigError(f"graph multiplex:{reach} needs at least {2 * max(reach, 1)} nodes, got {len(nodes)}")
    return [
        (node, nodes[(place + step) % len(nodes)])
        for place, node in enumerate(nodes)
        for step in range(1, reach + 1)
        if len(nodes) > 1
    ]


def _columns(count: int) -> int:
    """Returns how many columns make a full grid as square as it goes."""
    return next(count // rows for rows in range(math.isqrt(count), 0, -1) if count % rows == 0)


def _grid(nodes: Sequence[str], columns: int) -> list[Edge]:
    if columns < 1:
        raise ConfigError("graph grid needs at least one column")
    edges = []
    for place, node in enumerate(nodes):
        if (place + 1) % columns and place + 1 < len(nodes):
            edges.append((node, nodes[place + 1]))
        if place + columns < len(nodes):
            edges.append((node, nodes[place + columns]))
    return edges


def _drawn(spec: str, nodes: Sequence[str], probability: str, seed: int) -> Graph:
    try:
        chance = float(probability)
    except ValueError:
        chance = math.nan
    if not 0 < chance <= 1:
        raise ConfigError(f"graph {spec!r} needs a probability above 0 and at most 1")
    pairs = list(itertools.combinations(nodes, 2))
    for draw in range(_MOST_DRAWS):
        drawn = derived_rng(seed, "graph", spec, draw).random(len(pairs)) < chance
        try:
            return Graph.of(nodes, itertools.compress(pairs, drawn))
        except ConfigError as error:
            last = error
    raise ConfigError(f"graph {spec!r} over {len(nodes)} nodes was drawn {_MOST_DRAWS} times, and each time {last}")
