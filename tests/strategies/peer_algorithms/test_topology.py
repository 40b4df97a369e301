"""Graphs by name and their edges, degrees and weights; and schedules: when edges fire."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl.core.errors import ConfigError
from edgefl.strategies.peer_algorithms.topology import (
    Topology,
    make_edge_schedule,
    make_topology,
    read_hosts,
    read_topology,
)

NAMES = tuple("abcdefgh")


@pytest.mark.parametrize(
    ("spec", "degrees"),
    [
        ("ring", [2] * 8),
        ("multiplex:2", [4] * 8),
        ("exponential", [5] * 8),  # the node four places on is the same on either side
        ("paper-random", [4, 2, 2, 2, 3, 2, 3, 2]),
        ("complete", [7] * 8),
        ("star", [7, 1, 1, 1, 1, 1, 1, 1]),
        ("grid", [2, 3, 3, 2, 2, 3, 3, 2]),
        ("grid:3", [2, 3, 2, 3, 4, 2, 2, 2]),
    ],
)
def test_a_graph_has_the_degrees_of_its_kind(spec: str, degrees: list[int]) -> None:
    graph = make_topology(spec, NAMES)
    assert [graph.degree(name) for name in NAMES] == degrees
    assert [len(graph.neighbours(name)) for name in NAMES] == degrees
    assert all(name in graph.neighbours(other) for name in NAMES for other in graph.neighbours(name))


@pytest.mark.parametrize(("spec", "gap"), [("ring", 0.195), ("multiplex:2", 0.517), ("paper-random", 0.073)])
def test_the_spectral_gaps_are_those_of_the_paper(spec: str, gap: float) -> None:
    magnitudes = np.sort(np.abs(np.linalg.eigvalsh(make_topology(spec, NAMES).compute_metropolis_weights())))
    assert 1 - magnitudes[-2] == pytest.approx(gap, abs=5e-4)


def test_a_node_of_an_exponential_graph_has_the_powers_of_two_on_either_side() -> None:
    graph = make_topology("exponential", [f"{number:02}" for number in range(50)])
    assert sorted(graph.neighbours("00")) == ["01", "02", "04", "08", "16", "34", "42", "46", "48", "49"]


@pytest.mark.parametrize("spec", ["paper-random", "star"])
def test_weights_are_symmetric_positive_and_sum_to_one(spec: str) -> None:
    weights = make_topology(spec, NAMES).compute_metropolis_weights()
    assert np.array_equal(weights, weights.T)
    assert weights.sum(axis=0) == pytest.approx(np.ones(8))
    assert np.diag(weights).min() > 0


def test_signs_are_opposite_at_the_ends_of_an_edge() -> None:
    graph = make_topology("ring", NAMES)
    assert [graph.sign("a", "b"), graph.sign("b", "a"), graph.sign("a", "h"), graph.sign("h", "a")] == [-1, 1, -1, 1]


def test_a_random_graph_is_connected_and_the_same_for_a_seed() -> None:
    one, again, other = (make_topology("erdos-renyi:0.3", NAMES, seed) for seed in (1, 1, 2))
    assert one == again
    assert one.edges != other.edges


def test_a_node_leaves_with_its_edges() -> None:
    left = make_topology("ring", NAMES).remove_node("c")
    assert left.nodes == tuple("abdefgh")
    assert left.neighbours("d") == ("e",)
    assert len(make_topology("ring", tuple("ab")).edges) == 1
    with pytest.raises(ConfigError, match="not connected: no path from b to c, d, e, f, g, h"):
        make_topology("star", NAMES).remove_node("a")


@pytest.mark.parametrize(
    ("spec", "names", "message"),
    [
        ("torus", NAMES, "graph 'torus' is unknown; known: ring"),
        ("multiplex:5", NAMES, "multiplex:5 needs at least 10 nodes, got 8"),
        ("paper-random", NAMES[:7], "paper-random has 8 nodes, got 7"),
        ("grid:0", NAMES, "at least one column"),
        ("erdos-renyi:0", NAMES, "a probability above 0 and at most 1"),
        ("erdos-renyi:1e", NAMES, "a probability"),
        ("erdos-renyi:0.001", NAMES, "was drawn 100 times, and each time the graph is not connected"),
        ("ring", NAMES[:1], "at least two nodes"),
        ("ring", "aab", "different names"),
    ],
)
def test_what_is_no_graph_is_refused(spec: str, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_topology(spec, names)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([("a", "b")], "not connected: no path from a to c"),
        ([("a", "b"), ("b", "x")], "edge b - x: no node is called 'x'; known: a, b, c"),
        ([("a", "b"), ("c", "c")], "edge c - c joins a node to itself"),
    ],
)
def test_what_is_no_edge_is_refused(edges: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Topology.from_edges("abc", edges)


SLOTTED = Topology.from_edges(
    "abc", [("a", "b"), ("a", "c"), ("b", "c")], slots={("a", "b"): 1, ("a", "c"): 3}, periods={"c": 2}
)


def bursts(
    schedule: str, node: str, count: int, period: int = 4, graph: Topology = SLOTTED
) -> list[tuple[int, tuple[str, ...]]]:
    period = graph.periods.get(node, period)
    firing = make_edge_schedule(
        schedule, edges=graph.make_link_configs(node, period), period=period, rng=np.random.default_rng(5)
    )
    found, iteration = [], 0
    for _ in range(count):
        found.append(firing(iteration, graph.neighbours(node)))
        iteration += found[-1][0]
    return found


def test_in_step_all_edges_fire_after_every_period() -> None:
    assert bursts("sync", "a", 2) == [(4, ("b", "c"))] * 2
    assert bursts("sync", "c", 1) == [(2, ("a", "b"))]


def test_at_slots_an_edge_fires_when_the_counter_is_there() -> None:
    steps, when = 0, []
    for iterations, neighbours in bursts("slots", "a", 4):
        steps += iterations
        when.append((steps, neighbours))
    assert when == [(1, ("b",)), (3, ("c",)), (5, ("b",)), (7, ("c",))]
    assert bursts("slots", "b", 1) == [(4, ("a", "c"))]


def test_at_random_each_edge_fires_once_in_a_period_on_average() -> None:
    period = 8
    graph = make_topology("multiplex:2", tuple("abcdefgh"))
    found = bursts("poisson", "a", 1500, period, graph)
    steps = sum(iterations for iterations, _ in found)
    for neighbour in graph.neighbours("a"):
        rate = sum(neighbour in neighbours for _, neighbours in found) / steps
        # 5.6 standard errors of a chance of 1 in `period` over so many steps.
        assert abs(rate - 1 / period) <= 5.6 * np.sqrt((1 / period) * (1 - 1 / period) / steps)


def test_a_node_without_neighbours_trains_on() -> None:
    firing = make_edge_schedule(
        "poisson", edges=SLOTTED.make_link_configs("a", 4), period=4, rng=np.random.default_rng(1)
    )
    assert firing(0, ()) == (4, ())
    slots = make_edge_schedule(
        "slots", edges=SLOTTED.make_link_configs("a", 4), period=4, rng=np.random.default_rng(1)
    )
    assert slots(2, ()) == (4, ())


NODES = {
    "north": {"device": "cuda:0", "round": 8, "edges": {"east": 0, "west": 4}},
    "east": {"device": "cpu", "round": 8, "edges": {"north": 0, "west": 2}},
    "west": {"round": 4, "edges": ["north", "east"]},
}


def file_with(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "file.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def changed(name: str, **entry: Any) -> dict[str, Any]:
    return {"nodes": {**NODES, name: {**NODES.get(name, {}), **entry}}}


def test_a_node_list_becomes_a_graph(tmp_path: Path) -> None:
    graph = read_topology(file_with(tmp_path, {"nodes": NODES}))
    assert graph.nodes == ("north", "east", "west")
    assert graph.edges == (("north", "east"), ("north", "west"), ("east", "west"))
    assert graph.periods == {"north": 8, "east": 8, "west": 4}
    assert graph.slots["north", "west"] == 4
    assert graph.slots["west", "north"] == 0
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_topology(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ({}, 'must hold a table "nodes"'),
        ({"nodes": {"a": 3}}, "node a must be a table, got 3"),
        (changed("west", edges=["north"]), "node east lists the edge to west, but west not the one to east"),
        (changed("west", edges=["north", "east", "south"]), "node west has an edge to south, which is no node"),
        (changed("north", edges={"east": 8, "west": 4}), "slot of the edge from north to east .* from 0 to 7, got 8"),
        (changed("north", round=0), "round of node north must be a whole number from 1 to 1000000000, got 0"),
        (
            changed("west", edges="north"),
            "edges of node west must be a list of names or a table of slots, got 'north'",
        ),
        (changed("west", edges=["north", "north", "east"]), "node west lists a neighbour twice"),
        (
            {"nodes": {**NODES, "x": {"edges": ["y"]}, "y": {"edges": ["x"]}}},
            "the graph is not connected: no path from north to x, y",
        ),
        (
            '{"nodes": {"a": {"edges": ["b"]}, "b": {"edges": ["a"]}, "a": {"edges": ["b"]}}}',
            "'a' stands in one table twice",
        ),
    ],
)
def test_a_node_list_that_makes_no_sense_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_topology(file_with(tmp_path, content))


def test_hosts_are_read_by_name(tmp_path: Path) -> None:
    hosts = read_hosts(file_with(tmp_path, {"hosts": [{"name": "north", "addr": "10.0.0.2", "port": 7001}]}))
    assert hosts == {"north": "10.0.0.2:7001"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, 'must hold a list "hosts"'),
        ({"hosts": [{"name": "n", "addr": "a", "port": 0}]}, "port of host 1 must be a whole number from 1 to 65535"),
        ({"hosts": [{"name": "", "addr": "a", "port": 1}]}, "name of host 1 must be a text, got ''"),
        ({"hosts": [{"name": n, "addr": "a", "port": 1} for n in "nm"]}, r"host 2 \(m, a:1\) stands there twice"),
    ],
)
def test_hosts_that_make_no_sense_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_hosts(file_with(tmp_path, content))
