"""Schedules: when edges fire, by themselves and beside each other."""

import numpy as np

from edgefl.decentralised.edge_schedule import NextExchange, make_edge_schedule
from edgefl.decentralised.topology import Topology, make_topology

GRAPH = Topology.from_edges(
    "abc", [("a", "b"), ("a", "c"), ("b", "c")], slots={("a", "b"): 1, ("a", "c"): 3}, periods={"c": 2}
)


def bursts(schedule: str, node: str, count: int, period: int = 4, graph: Topology = GRAPH) -> list[NextExchange]:
    period = graph.periods.get(node, period)
    firing = make_edge_schedule(
        schedule, edges=graph.make_link_configs(node, period), period=period, rng=np.random.default_rng(5)
    )
    found, iteration = [], 0
    for _ in range(count):
        found.append(firing.next_exchange(iteration, graph.neighbours(node)))
        iteration += found[-1].iterations
    return found


def test_in_step_all_edges_fire_after_every_period() -> None:
    assert bursts("sync", "a", 2) == [NextExchange(iterations=4, neighbours=("b", "c"))] * 2
    assert bursts("sync", "c", 1) == [NextExchange(iterations=2, neighbours=("a", "b"))]


def test_at_slots_an_edge_fires_when_the_counter_is_there() -> None:
    steps, when = 0, []
    for burst in bursts("slots", "a", 4):
        steps += burst.iterations
        when.append((steps, burst.neighbours))
    assert when == [(1, ("b",)), (3, ("c",)), (5, ("b",)), (7, ("c",))]
    assert bursts("slots", "b", 1) == [NextExchange(iterations=4, neighbours=("a", "c"))]


def test_at_random_each_edge_fires_once_in_a_period_on_average() -> None:
    period = 8
    graph = make_topology("multiplex:2", tuple("abcdefgh"))
    found = bursts("poisson", "a", 1500, period, graph)
    steps = sum(burst.iterations for burst in found)
    for neighbour in graph.neighbours("a"):
        rate = sum(neighbour in burst.neighbours for burst in found) / steps
        # 5.6 standard errors of a chance of 1 in `period` over so many steps.
        assert abs(rate - 1 / period) <= 5.6 * np.sqrt((1 / period) * (1 - 1 / period) / steps)


def test_a_node_without_neighbours_trains_on() -> None:
    firing = make_edge_schedule(
        "poisson", edges=GRAPH.make_link_configs("a", 4), period=4, rng=np.random.default_rng(1)
    )
    assert firing.next_exchange(0, ()) == NextExchange(iterations=4, neighbours=())
    assert (
        make_edge_schedule("slots", edges=GRAPH.make_link_configs("a", 4), period=4, rng=np.random.default_rng(1))
        .next_exchange(2, ())
        .iterations
        == 4
    )
