"""Topologies and edge schedules: which devices exchange with which, and after how many local iterations.

Source of the graphs N1 (`multiplex:2`) and N2 (`paper-random`) and of the schedules: Niwa et al., Asynchronous
Decentralized Optimization With Implicit Stochastic Variance Reduction, ICML 2021. Weights: Xiao, Boyd, Fast Linear
Iterations for Distributed Averaging, 2004 (Metropolis).

Files: `node_list.json` and `hosts.json` of the README of the same authors (ECL-ISVR).

node_list.json  {"nodes": {NAME: {"device": …, "round": K, "edges": [NAME, …] or {NAME: SLOT, …}}, …}}
hosts.json      {"hosts": [{"name": NAME, "addr": HOST, "port": PORT}, …]}
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.random import Generator

from edgefl.core.errors import ConfigError
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Array, PeerLinkConfig, derive_rng

Edge = tuple[str, str]

TOPOLOGY_SPECS = (
    "ring",
    "multiplex:K",
    "exponential",
    "paper-random",
    "complete",
    "star",
    "grid",
    "grid:COLUMNS",
    "erdos-renyi:P",
)

_SPEC_PATTERN = re.compile(
    r"(ring|exponential|paper-random|complete|star|grid)|(multiplex|grid):(\d+)|(erdos-renyi):([0-9.eE+-]+)"
)
_PAPER_RANDOM = ((0, 1), (0, 4), (0, 6), (0, 7), (1, 6), (2, 4), (2, 5), (3, 6), (3, 7), (4, 5))
_MAX_DRAWS = 100

EdgeSchedule = Callable[[int, Sequence[str]], tuple[int, tuple[str, ...]]]
"""(local iterations done, neighbours) -> iterations to the next exchange, one at least, and whose edges fire then."""

_MAX_PORT = 65535
_MAX_PERIOD = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Undirected connected graph of devices.

    Attributes:
        nodes: in the order that determines each edge's sign.
        edges: pairs of nodes, the earlier node first, in order.
        slots: of (node, neighbour), when the node's side fires in the schedule `slots`; 0 where missing.
        periods: of a node, its local iterations between two exchanges, where a file sets them.
    """

    nodes: tuple[str, ...]
    edges: tuple[Edge, ...]
    slots: Mapping[Edge, int] = field(default_factory=dict)
    periods: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_edges(
        cls,
        nodes: Iterable[str],
        edges: Iterable[Edge],
        *,
        slots: Mapping[Edge, int] | None = None,
        periods: Mapping[str, int] | None = None,
    ) -> Self:
        """Returns the topology with sorted, unique edges.

        Raises:
            ConfigError: fewer than two nodes, a duplicate or unknown name, a loop, or a disconnected graph.
        """
        names = tuple(nodes)
        positions = {name: position for position, name in enumerate(names)}
        if len(names) < 2 or len(positions) != len(names):
            raise ConfigError(
                f"a graph needs at least two nodes with different names, got {', '.join(names) or 'none'}"
            )
        ordered_edges = set()
        for first, second in edges:
            for name in (first, second):
                if name not in positions:
                    raise ConfigError(
                        f"edge {first} - {second}: no node is called {name!r}; known: {', '.join(names)}"
                    )
            if first == second:
                raise ConfigError(f"edge {first} - {second} joins a node to itself")
            ordered_edges.add((first, second) if positions[first] < positions[second] else (second, first))
        graph = cls(
            nodes=names,
            edges=tuple(sorted(ordered_edges, key=lambda edge: (positions[edge[0]], positions[edge[1]]))),
            slots=dict(slots or {}),
            periods=dict(periods or {}),
        )
        graph._check_connected()
        return graph

    def neighbours(self, node: str) -> tuple[str, ...]:
        """Returns a node's neighbours, in the order of the nodes."""
        adjacent = {end for edge in self.edges if node in edge for end in edge} - {node}
        return tuple(name for name in self.nodes if name in adjacent)

    def degree(self, node: str) -> int:
        return sum(node in edge for edge in self.edges)

    def sign(self, node: str, neighbour: str) -> float:
        """Returns the node's sign in the edge's constraint: 1 for the later node, -1 for the earlier."""
        return 1.0 if self.nodes.index(node) > self.nodes.index(neighbour) else -1.0

    def make_link_configs(self, node: str, period: int, *, is_damped: bool = False) -> tuple[PeerLinkConfig, ...]:
        """Returns the link configurations of a node's edges.

        Args:
            node: owner of the edges.
            period: default local iterations between two exchanges, where no file sets them.
            is_damped: the mixing matrix is (I + W)/2.
        """
        degrees = {name: self.degree(name) for name in (node, *self.neighbours(node))}
        return tuple(
            PeerLinkConfig(
                neighbour=neighbour,
                sign=self.sign(node, neighbour),
                degree=max(degrees[node], degrees[neighbour]),
                weight=1 / (1 + max(degrees[node], degrees[neighbour])) / (2 if is_damped else 1),
                period=max(self.periods.get(name, period) for name in (node, neighbour)),
                slot=self.slots.get((node, neighbour), 0),
            )
            for neighbour in self.neighbours(node)
        )

    def remove_node(self, node: str) -> Self:
        """Returns the topology without a node and its edges.

        Raises:
            ConfigError: the remainder is disconnected, or a single node.
        """
        return type(self).from_edges(
            [name for name in self.nodes if name != node],
            [edge for edge in self.edges if node not in edge],
            slots={edge: slot for edge, slot in self.slots.items() if node not in edge},
            periods={name: period for name, period in self.periods.items() if name != node},
        )

    def compute_metropolis_weights(self) -> Array:
        """Returns the symmetric [n, n] weights W_ij = 1 / (1 + max(d_i, d_j)), whose rows sum to 1."""
        weights = np.zeros((len(self.nodes), len(self.nodes)))
        positions = {name: position for position, name in enumerate(self.nodes)}
        degrees = {name: self.degree(name) for name in self.nodes}
        for first, second in self.edges:
            weight = 1 / (1 + max(degrees[first], degrees[second]))
            weights[positions[first], positions[second]] = weights[positions[second], positions[first]] = weight
        np.fill_diagonal(weights, 1 - weights.sum(axis=1))
        return weights

    def should_damp(self) -> bool:
        """Returns whether a Metropolis eigenvalue is -1/3 or less, with which D2 does not converge."""
        return float(np.linalg.eigvalsh(self.compute_metropolis_weights())[0]) <= -1 / 3

    def _check_connected(self) -> None:
        first, *other_components = connected_components(self.nodes, self.edges)
        if other_components:
            unreachable = [name for name in self.nodes if name not in first]
            raise ConfigError(f"the graph is not connected: no path from {self.nodes[0]} to {', '.join(unreachable)}")


def connected_components(nodes: Sequence[str], edges: Iterable[Edge]) -> list[list[str]]:
    """Returns the connected components of a graph, each in the order of the nodes."""
    adjacency: dict[str, set[str]] = {name: set() for name in nodes}
    for first, second in edges:
        adjacency[first].add(second)
        adjacency[second].add(first)
    components: list[list[str]] = []
    remaining = list(nodes)
    while remaining:
        reached, frontier = {remaining[0]}, [remaining[0]]
        while frontier:
            discovered = adjacency[frontier.pop()] - reached
            reached |= discovered
            frontier += discovered
        components.append([name for name in remaining if name in reached])
        remaining = [name for name in remaining if name not in reached]
    return components


def parse_topology_spec(spec: str) -> re.Match[str]:
    """Returns the match of a topology's name.

    Raises:
        ConfigError: the name is unknown.
    """
    match = _SPEC_PATTERN.fullmatch(spec)
    if match is None:
        raise ConfigError(f"graph {spec!r} is unknown; known: {', '.join(TOPOLOGY_SPECS)}, or a file")
    return match


def make_topology(spec: str, nodes: Sequence[str], seed: int = 0) -> Topology:
    """Returns the topology of a spec over these nodes.

    Args:
        spec: `ring`; `multiplex:K` (ring, each node with the K next on either side); `exponential` (each node with
            those 1, 2, 4, 8, … places on, about log₂ n on either side; Ying et al., Exponential Graph is Provably
            Efficient for Decentralized Deep Training, NeurIPS 2021); `paper-random` (eight nodes); `complete`;
            `star` (the first node in the middle); `grid` (as square as it goes) or `grid:COLUMNS`; `erdos-renyi:P`
            (each edge with probability P).
        nodes: names, in order.
        seed: for `erdos-renyi`, which is redrawn until it is connected.

    Raises:
        ConfigError: an unknown spec, or one impossible with so many nodes.
    """
    fixed_name, counted_name, count, _, probability = parse_topology_spec(spec).groups()
    match fixed_name or counted_name:
        case "ring":
            edges = _make_ring_edges(nodes, (1,))
        case "multiplex":
            if not 1 <= int(count) <= max(1, len(nodes) // 2):
                needed = 2 * max(int(count), 1)
                raise ConfigError(f"graph {spec} needs at least {needed} nodes, got {len(nodes)}")
            edges = _make_ring_edges(nodes, range(1, int(count) + 1))
        case "exponential":
            edges = _make_ring_edges(nodes, [1 << bit for bit in range((len(nodes) // 2).bit_length())])
        case "paper-random":
            if len(nodes) != 8:
                raise ConfigError(f"graph paper-random has 8 nodes, got {len(nodes)}")
            edges = [(nodes[first], nodes[second]) for first, second in _PAPER_RANDOM]
        case "complete":
            edges = list(itertools.combinations(nodes, 2))
        case "star":
            edges = [(nodes[0], second) for second in nodes[1:]]
        case "grid":
            edges = _make_grid_edges(nodes, int(count) if count else _compute_grid_columns(len(nodes)))
        case _:
            return _make_random_topology(spec, nodes, probability, seed)
    return Topology.from_edges(nodes, edges)


def _make_ring_edges(nodes: Sequence[str], steps: Sequence[int]) -> list[Edge]:
    """Returns the edges of each node to those that are so many places on."""
    return [
        (node, nodes[(position + step) % len(nodes)])
        for position, node in enumerate(nodes)
        for step in steps
        if len(nodes) > 1
    ]


def _compute_grid_columns(count: int) -> int:
    """Returns the column count of the most square full grid."""
    return next(count // rows for rows in range(math.isqrt(count), 0, -1) if count % rows == 0)


def _make_grid_edges(nodes: Sequence[str], columns: int) -> list[Edge]:
    if columns < 1:
        raise ConfigError("graph grid needs at least one column")
    edges = []
    for position, node in enumerate(nodes):
        if (position + 1) % columns and position + 1 < len(nodes):
            edges.append((node, nodes[position + 1]))
        if position + columns < len(nodes):
            edges.append((node, nodes[position + columns]))
    return edges


def _make_random_topology(spec: str, nodes: Sequence[str], probability: str, seed: int) -> Topology:
    try:
        edge_probability = float(probability)
    except ValueError:
        edge_probability = math.nan
    if not 0 < edge_probability <= 1:
        raise ConfigError(f"graph {spec!r} needs a probability above 0 and at most 1")
    pairs = list(itertools.combinations(nodes, 2))
    for attempt in range(_MAX_DRAWS):
        is_edge = derive_rng(seed, "graph", spec, attempt).random(len(pairs)) < edge_probability
        try:
            return Topology.from_edges(nodes, itertools.compress(pairs, is_edge))
        except ConfigError as error:
            last_error = error
    raise ConfigError(
        f"graph {spec!r} over {len(nodes)} nodes was drawn {_MAX_DRAWS} times, and each time {last_error}"
    )


class EdgeScheduleKind(StrEnum):
    """Kind of edge schedule: with `pair` both ends of an edge exchange when either fires, with `poisson` its own."""

    SYNC = "sync"
    SLOTS = "slots"
    POISSON = "poisson"
    PAIR = "pair"


def _find_next_slot(
    iteration: int, neighbours: Sequence[str], *, slots: Mapping[str, int], period: int
) -> tuple[int, tuple[str, ...]]:
    """An edge fires when the iterations done, modulo `period`, reach its slot; one without a slot has slot 0."""
    iterations_until = {neighbour: (slots.get(neighbour, 0) - iteration - 1) % period + 1 for neighbour in neighbours}
    iterations = min(iterations_until.values(), default=period)
    return iterations, tuple(neighbour for neighbour in neighbours if iterations_until[neighbour] == iterations)


def _draw_next_exchange(
    _iteration: int, neighbours: Sequence[str], *, period: int, rng: Generator
) -> tuple[int, tuple[str, ...]]:
    """Each edge fires with probability 1 / `period` after every iteration, by the node's `rng`; memoryless."""
    # The first of n edges fires after a geometric number of iterations; conditioned on that, any of them may
    # fire.
    if not neighbours or period == 1:
        return period, tuple(neighbours)
    none_fires_probability = (1 - 1 / period) ** len(neighbours)
    iterations = int(rng.geometric(1 - none_fires_probability))
    fires_mask = rng.random(len(neighbours)) < 1 / period
    while not fires_mask.any():
        fires_mask = rng.random(len(neighbours)) < 1 / period
    return iterations, tuple(
        neighbour for neighbour, is_firing in zip(neighbours, fires_mask, strict=True) if is_firing
    )


def make_edge_schedule(
    schedule: str, *, edges: Sequence[PeerLinkConfig], period: int, rng: Generator
) -> EdgeSchedule:
    """Returns a node's schedule.

    Args:
        schedule: one of `EdgeScheduleKind`.
        edges: of the node, with their slots.
        period: K, local iterations between two exchanges of an edge.
        rng: the node's own stream, for `poisson` and `pair`.
    """
    match EdgeScheduleKind(schedule):
        case EdgeScheduleKind.SYNC:
            return partial(_find_next_slot, slots={}, period=period)
        case EdgeScheduleKind.SLOTS:
            slots = {edge.neighbour: edge.slot for edge in edges}
            return partial(_find_next_slot, slots=slots, period=period)
        case EdgeScheduleKind.PAIR:  # either end fires an edge, so each half as often
            return partial(_draw_next_exchange, period=2 * period, rng=rng)
        case _:
            return partial(_draw_next_exchange, period=period, rng=rng)


def read_topology(path: str | Path) -> Topology:
    """Returns the topology of a `node_list.json`; the "device" entries are ignored.

    Raises:
        ConfigError: no such file, malformed, an edge that only one side lists, a slot outside of the node's round, or
            a graph that is not connected.
    """
    nodes = _read_json(path).get("nodes")
    if not isinstance(nodes, Mapping):
        raise ConfigError(f'{path} must hold a table "nodes"')
    edges: dict[str, dict[str, int]] = {}
    periods: dict[str, int] = {}
    for name, entry in nodes.items():
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{path}: node {name} must be a table, got {entry!r}")
        periods[name] = _parse_int(entry.get("round", 1), 1, _MAX_PERIOD, f"{path}: round of node {name}")
        edges[name] = _parse_edges(name, entry.get("edges"), periods[name], path)
    for name, neighbour_slots in edges.items():
        for neighbour in neighbour_slots:
            if neighbour not in edges:
                raise ConfigError(f"{path}: node {name} has an edge to {neighbour}, which is no node")
            if name not in edges[neighbour]:
                raise ConfigError(
                    f"{path}: node {name} lists the edge to {neighbour}, but {neighbour} not the one to {name}"
                )
    slots: dict[Edge, int] = {
        (name, neighbour): slot
        for name, neighbour_slots in edges.items()
        for neighbour, slot in neighbour_slots.items()
    }
    try:
        return Topology.from_edges(edges, slots, slots=slots, periods=periods)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_hosts(path: str | Path) -> dict[str, str]:
    """Returns the listening addresses of a `hosts.json`, ADDRESS:PORT by name.

    Raises:
        ConfigError: no such file, malformed, or a duplicate name or address.
    """
    content = _read_json(path).get("hosts")
    if not isinstance(content, list):
        raise ConfigError(f'{path} must hold a list "hosts"')
    hosts: dict[str, str] = {}
    for number, entry in enumerate(content, 1):
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{path}: host {number} must be a table, got {entry!r}")
        name, address = entry.get("name"), entry.get("addr")
        for key, value in (("name", name), ("addr", address)):
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{path}: {key} of host {number} must be a text, got {value!r}")
        port = _parse_int(entry.get("port"), 1, _MAX_PORT, f"{path}: port of host {number}")
        if name in hosts or f"{address}:{port}" in hosts.values():
            raise ConfigError(f"{path}: host {number} ({name}, {address}:{port}) stands there twice")
        hosts[str(name)] = f"{address}:{port}"
    return hosts


def _parse_edges(name: str, entry: Any, period: int, path: str | Path) -> dict[str, int]:
    if isinstance(entry, list) and all(isinstance(neighbour, str) for neighbour in entry):
        if len(set(entry)) != len(entry):
            raise ConfigError(f"{path}: node {name} lists a neighbour twice: {', '.join(entry)}")
        return dict.fromkeys(entry, 0)
    if isinstance(entry, Mapping):
        return {
            str(neighbour): _parse_int(slot, 0, period - 1, f"{path}: slot of the edge from {name} to {neighbour}")
            for neighbour, slot in entry.items()
        }
    raise ConfigError(f"{path}: edges of node {name} must be a list of names or a table of slots, got {entry!r}")


def _parse_int(value: Any, minimum: int, maximum: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ConfigError(f"{what} must be a whole number from {minimum} to {maximum}, got {value!r}")
    return value


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the table; the JSON parser would silently keep the last of two equal keys."""
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands in one table twice")
    return table


def _read_json(path: str | Path) -> Mapping[str, Any]:
    try:
        content = parse_json(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_reject_duplicates)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} must hold a table")
    return content
