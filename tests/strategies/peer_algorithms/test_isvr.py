"""ISVR on functions whose optimum is known: the vectors and identities of its specification."""

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from node_network import Network, Quadratics

from edgefl.core.errors import ConfigError
from edgefl.core.types import GossipConfig
from edgefl.strategies.peer_algorithms.algorithm import GossipMessage
from edgefl.strategies.peer_algorithms.gossip_node import make_configured_algorithm
from edgefl.strategies.peer_algorithms.isvr import AdmmIsvr, Isvr, PdmmIsvr
from edgefl.strategies.peer_algorithms.topology import Topology, make_topology

NAMES = tuple(f"n{place}" for place in range(8))
METHODS = ("pdmm-isvr", "admm-isvr")
QUADRATICS = Quadratics.drawn(8)
RATE = 0.2 / QUADRATICS.smoothness


STEPS_OF = {"pdmm-isvr": 2000, "admm-isvr": 8000}
"""Steps to the optimum of QUADRATICS; with half the pull and half of each z kept, ADMM takes so many more."""


def network(method: str, spec: str = "ring", **options: object) -> Network:
    graph = make_topology(spec, NAMES)
    return Network.of(method, graph, QUADRATICS.gradients(), start=np.zeros(10), rate=RATE, period=8, **options)


class TwoScalars:
    """f₁ = (w - 1)²/2, f₂ = 3(w - 5)²/2, whose sum is least at 4; μ = 0.1, K = 2 and the paper's own step size."""

    graph = Topology.from_edges(("a", "b"), [("a", "b")])

    def __init__(self, kind: type[Isvr]) -> None:
        self.nodes = {
            name: kind(name, self.graph.make_link_configs(name, 2), learning_rate=0.1, period=2, step_size="node")
            for name in self.graph.nodes
        }
        for node in self.nodes.values():
            node.start({"w": np.zeros(1)})
        gradients = {"a": lambda w: w - 1, "b": lambda w: 3 * (w - 5)}
        self.network = Network(
            graph=self.graph, gradients=gradients, nodes=dict(self.nodes), learning_rate=0.1, period=2
        )
        self.steps = 0

    def after(self, steps: int) -> list[float]:
        """Lets both make local steps one by one, with an exchange after every second."""
        while self.steps < steps:
            self.steps += 1
            for node in self.nodes.values():
                self.network.train(node, 1)
            if self.steps % 2 == 0:
                self.network.deliver(
                    [mail for node in self.nodes.values() for mail in node.make_messages(node.neighbours)]
                )
        return [float(node.weights["w"][0]) for node in self.nodes.values()]

    def duals(self) -> list[float]:
        return [
            float(node.state()[f"dual/{other}/w"][0]) for node, other in zip(self.nodes.values(), "ba", strict=True)
        ]


@pytest.mark.parametrize(
    ("kind", "expected", "duals"),
    [
        (
            PdmmIsvr,
            {1: (0.05, 0.75), 2: (0.0725, 1.0125), 4: (1.55530625, 1.23440625), 6: (2.0722135781, 1.8965032031),
             12: (3.1133383746, 3.0745675248)},
            {2: (-2.025, 0.145), 4: (-2.3238125, 1.0856125)},
        ),
        (
            AdmmIsvr,
            {2: (0.0725, 1.0125), 4: (0.82124375, 1.18546875), 6: (1.4390167031, 1.3948094531),
             12: (2.3979137345, 2.3316115439)},
            {2: (-1.0125, 0.0725), 4: (-1.65546875, 0.35124375)},
        ),
    ],
)  # fmt: skip
def test_two_scalar_nodes_go_as_computed_by_hand(
    kind: type[Isvr], expected: dict[int, tuple[float, float]], duals: dict[int, tuple[float, float]]
) -> None:
    pair = TwoScalars(kind)
    for steps, weights in expected.items():
        assert pair.after(steps) == pytest.approx(weights, abs=1e-10), steps
        if steps in duals:
            assert pair.duals() == pytest.approx(duals[steps], abs=1e-10), steps
    assert pair.after(2000) == pytest.approx((4, 4), abs=1e-12)
    assert pair.duals() == pytest.approx((-4.3, 3.7), abs=1e-12)


@pytest.mark.parametrize(
    ("method", "spec", "schedule"),
    [
        ("pdmm-isvr", "ring", "sync"),
        ("pdmm-isvr", "multiplex:2", "slots"),
        pytest.param("pdmm-isvr", "paper-random", "poisson", marks=pytest.mark.extended),
        pytest.param("admm-isvr", "multiplex:2", "sync", marks=pytest.mark.extended),
        pytest.param("admm-isvr", "paper-random", "slots", marks=pytest.mark.extended),
        ("admm-isvr", "ring", "poisson"),
        ("pdmm-isvr", "paper-random", "pair"),
        ("admm-isvr", "ring", "pair"),
    ],
)
def test_all_schedules_and_graphs_reach_the_optimum(method: str, spec: str, schedule: str) -> None:
    assert network(method, spec, schedule=schedule).run(STEPS_OF[method]).error(QUADRATICS.optimum()) < 1e-6


def test_with_a_step_size_of_each_node_its_degree_counts() -> None:
    graph = make_topology("paper-random", NAMES)
    nodes = {
        name: PdmmIsvr(name, graph.make_link_configs(name, 8), learning_rate=RATE, period=8, step_size="node")
        for name in NAMES
    }
    for node in nodes.values():
        node.start({"w": np.zeros(10)})
    gradients = dict(zip(NAMES, QUADRATICS.gradients(), strict=True))
    run = Network(graph=graph, gradients=gradients, nodes=dict(nodes), learning_rate=RATE, period=8).run(4000)
    assert run.error(QUADRATICS.optimum()) > 0.05
    assert run.error(QUADRATICS.optimum([graph.degree(name) for name in NAMES])) < 1e-12


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 1 / (0.1 * 4 * 15)),  # of 16, twice the period
        ({"k_eta": 2.5}, 1 / (0.1 * 4 * 1.5)),
        ({"step_size": "node"}, 1 / (0.1 * 2 * 7)),
        ({"step_size": "node", "k_eta": 3}, 1 / (0.1 * 2 * 2)),
    ],
)
def test_a_plan_says_how_strongly_neighbours_pull(settings: dict[str, object], expected: float) -> None:
    links = make_topology("paper-random", NAMES).make_link_configs("n1", 8)  # of degree 2, its neighbours of 4 and 3
    plan = GossipConfig(method="admm-isvr", edges=links, learning_rate=0.1, period=8, **settings)  # type: ignore[arg-type]
    node = make_configured_algorithm(GossipConfig.from_json(asdict(plan)), "n1")
    node.start({"w": np.zeros(2)})
    assert node.state()["step_size/n0"] == pytest.approx(expected)


@pytest.mark.parametrize("k_eta", [1, 0, float("inf"), float("nan"), "2"])
def test_a_plan_of_no_step_size_is_refused(k_eta: Any) -> None:
    links = make_topology("ring", NAMES).make_link_configs("n1", 8)
    plan = GossipConfig(method="pdmm-isvr", edges=links, learning_rate=0.1, period=8, k_eta=k_eta)
    with pytest.raises(ConfigError, match="k_eta must be a finite number above 1"):
        make_configured_algorithm(plan, "n1")


def test_the_fixed_point_is_as_the_formulas_have_it() -> None:
    run = network("pdmm-isvr", "paper-random").run(4000)
    states = {name: node.state() for name, node in run.nodes.items()}
    total = np.zeros(10)
    for name, node in run.nodes.items():
        weights, pull = node.weights["w"], np.zeros(10)
        for other in node.neighbours:
            sign, own = node.edges[other].sign, states[name][f"dual/{other}/w"]
            assert states[other][f"dual/{name}/w"] == pytest.approx(own - 2 * sign * weights, abs=1e-12)
            pull += states[name][f"step_size/{other}"] * (sign * own - weights)
        gradient = run.gradients[name](weights)
        assert gradient == pytest.approx(pull, abs=1e-10)
        total += gradient
    assert total == pytest.approx(np.zeros(10), abs=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_mail_that_comes_twice_changes_nothing(method: str) -> None:
    once, twice = (network(method, "ring", doubled=doubled).run(160) for doubled in (False, True))
    assert np.array_equal(once.weights(), twice.weights())


def test_a_pair_exchanges_at_once_and_gives_what_it_had_after_its_last_step() -> None:
    graph = make_topology("complete", ("a", "b"))
    one, other = (PdmmIsvr(name, graph.make_link_configs(name, 8), learning_rate=0.1, period=8) for name in "ab")
    for node, value in ((one, 1.0), (other, 2.0)):
        node.is_pairwise = True
        node.start({"w": np.array([value])})
        node.apply_local_steps({"w": np.array([value])}, 1, 0.1)
    (request,) = one.make_messages(("b",))
    assert not one.has_all_messages()
    (reply,) = other.receive(request)
    assert one.receive(reply) == []
    assert one.has_all_messages()
    # y = z - 2sw with z = sw and s = -1, 1 for a, b
    assert (other.state()["dual/a/w"][0], one.state()["dual/b/w"][0]) == (1.0, -2.0)
    (again,) = other.receive(replace(request, step=request.step + 1))
    assert again.parts["y"]["w"] == reply.parts["y"]["w"], "there was no step since"
    other.apply_local_steps({"w": np.array([3.0])}, 1, 0.1)
    (later,) = other.receive(replace(request, step=request.step + 2))
    assert later.parts["y"]["w"] == 1.0 - 2 * 3.0


def test_older_mail_and_mail_of_strangers_is_dropped() -> None:
    node = AdmmIsvr("n1", make_topology("ring", NAMES).make_link_configs("n1", 8), learning_rate=RATE, period=8)
    node.start({"w": np.ones(3)})
    value = {"w": np.full(3, 7.0)}
    news = GossipMessage(sender="n0", receiver="n1", step=8, parts={"y": value})
    node.receive(news)
    before = node.state()
    for mail in (
        replace(news, step=7),
        news,
        replace(news, sender="n4", step=99),
        replace(news, receiver="n2", step=99),
    ):
        node.receive(mail)
    assert {name: array.tolist() for name, array in node.state().items()} == {
        name: array.tolist() for name, array in before.items()
    }


@pytest.mark.extended
@pytest.mark.parametrize(("method", "loss", "delay"), [("pdmm-isvr", 0.6, 0.0), ("admm-isvr", 0.3, 40.0)])
def test_lost_and_late_mail_only_delays(method: str, loss: float, delay: float) -> None:
    run = network(method, "ring", schedule="poisson", loss=loss, delay=delay).run(3 * STEPS_OF[method])
    assert run.error(QUADRATICS.optimum()) < 1e-12


@pytest.mark.extended
def test_a_board_that_is_ten_times_slower_only_delays() -> None:
    run = network("pdmm-isvr", "paper-random", schedule="slots", speeds={"n3": 10.0}).run(8000)
    assert run.error(QUADRATICS.optimum()) < 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_survivors_reach_the_survivors_optimum(method: str) -> None:
    run = network(method, "multiplex:2").run(800)
    del run.nodes["n5"]
    for node in run.nodes.values():
        node.remove_neighbour("n5")
    run.run(4000)
    assert run.error(QUADRATICS.optimum([name != "n5" for name in NAMES])) < 1e-9


def test_a_node_that_joins_is_learnt_from() -> None:
    run = network("admm-isvr", "multiplex:2")
    newcomer = run.nodes.pop("n5")
    for node in run.nodes.values():
        node.remove_neighbour("n5")
    run.run(800)
    run.nodes["n5"] = newcomer
    newcomer.start({"w": run.nodes["n4"].weights["w"]})
    for other in newcomer.neighbours:
        (side,) = (side for side in run.graph.make_link_configs(other, 8) if side.neighbour == "n5")
        run.nodes[other].add_neighbour(side)
    run.run(4000)
    assert run.error(QUADRATICS.optimum()) < 1e-9


def test_a_learning_rate_may_decay() -> None:
    run = network("pdmm-isvr").run(2000)
    run.learning_rate = RATE / 4
    assert run.run(800).error(QUADRATICS.optimum()) < 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_a_node_goes_on_from_its_state_to_the_bit(method: str) -> None:
    whole, parted = network(method, "paper-random").run(160), network(method, "paper-random").run(80)
    for name, node in parted.nodes.items():
        again = type(node)(name, parted.graph.make_link_configs(name, 8), learning_rate=RATE, period=8)
        again.start({"w": np.full(10, 9.0)})
        again.restore(node.state())
        parted.nodes[name] = again
    assert np.array_equal(parted.run(80).weights(), whole.weights())


def test_single_precision_stays_single() -> None:
    graph = make_topology("ring", NAMES)
    node = AdmmIsvr("n0", graph.make_link_configs("n0", 8), learning_rate=0.1, period=8)
    node.start({"w": np.ones(4, dtype=np.float32)})
    (mail, _) = node.make_messages(node.neighbours)
    assert mail.parts["y"]["w"].dtype == np.float32
    node.receive(GossipMessage(sender="n1", receiver="n0", step=3, parts=mail.parts))
    assert node.correction().correction["w"].dtype == np.float32
    assert {array.dtype for name, array in node.state().items() if "/w" in name} == {np.dtype(np.float32)}


def test_what_makes_no_sense_is_refused() -> None:
    graph = make_topology("ring", NAMES)
    with pytest.raises(ConfigError, match="learning rate above 0 and a period of 1 or more, got 0 and 8"):
        PdmmIsvr("n0", graph.make_link_configs("n0", 8), learning_rate=0, period=8)
    with pytest.raises(ConfigError, match="step_size must be edge or node, got 'mine'"):
        PdmmIsvr("n0", graph.make_link_configs("n0", 8), learning_rate=0.1, period=8, step_size="mine")
