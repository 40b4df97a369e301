"""Methods that average: which of them reach the optimum when the nodes' data differ, and which cannot."""

from dataclasses import replace

import numpy as np
import pytest
from node_network import Network, Quadratics

from edgefl.core.errors import ConfigError
from edgefl.core.types import GossipConfig
from edgefl.strategies.peer_algorithms.algorithm import GossipMessage
from edgefl.strategies.peer_algorithms.gossip_node import ALGORITHMS, make_algorithm, make_configured_algorithm
from edgefl.strategies.peer_algorithms.topology import make_topology
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.strategy_config import RoundRules

NAMES = tuple(f"n{place}" for place in range(8))
QUADRATICS = Quadratics.drawn(8)
OPTIMUM = QUADRATICS.optimum()
RATE = 0.2 / QUADRATICS.smoothness


def network(method: str, spec: str = "ring", period: int = 8, **options: object) -> Network:
    graph = make_topology(spec, NAMES)
    return Network.of(method, graph, QUADRATICS.gradients(), start=np.zeros(10), rate=RATE, period=period, **options)


@pytest.mark.parametrize(
    ("method", "period", "spec", "schedule", "expected"),
    [
        ("dsgd", 8, "ring", "sync", 0.78),
        ("dsgd", 1, "multiplex:2", "sync", 0.19),
        pytest.param("ad-psgd", 8, "paper-random", "poisson", 0.83, marks=pytest.mark.extended),
    ],
)
def test_plain_and_pairwise_averaging_end_beside_the_optimum(
    method: str, period: int, spec: str, schedule: str, expected: float
) -> None:
    run = network(method, spec, period, schedule=schedule).run(1600)
    assert expected / 10 < run.error(OPTIMUM) < expected * 10


@pytest.mark.extended
@pytest.mark.parametrize(
    ("method", "period", "spec", "iterations"),
    [("gradient-tracking", 1, "ring", 800), ("d2", 1, "paper-random", 800), ("k-gt", 8, "ring", 3200)],
)
def test_corrected_averaging_reaches_the_optimum_and_a_lower_learning_rate_leaves_it_there(
    method: str, period: int, spec: str, iterations: int
) -> None:
    run = network(method, spec, period).run(iterations)
    assert run.error(OPTIMUM) < 1e-4
    run.learning_rate /= 4
    assert run.run(800).error(OPTIMUM) < 1e-4


def test_averaging_once_is_the_metropolis_mean() -> None:
    graph = make_topology("paper-random", NAMES)
    rng = np.random.default_rng(1)
    starts = rng.normal(size=(8, 3))
    run = Network.of("dsgd", graph, [lambda w: 0 * w] * 8, start=np.zeros(3), rate=1.0, period=1)
    for node, start in zip(run.nodes.values(), starts, strict=True):
        node.start({"w": start})
    run.exchange()
    assert run.weights() == pytest.approx(graph.compute_metropolis_weights() @ starts, abs=1e-15)


def test_corrections_of_all_nodes_cancel() -> None:
    run = network("k-gt", "paper-random").run(200)
    total = sum(node.correction().correction["w"] for node in run.nodes.values())
    assert total == pytest.approx(np.zeros(10), abs=1e-10)


def test_trackers_add_up_to_the_gradients() -> None:
    run = network("gradient-tracking", period=1).run(40)
    states = [node.state() for node in run.nodes.values()]
    trackers, gradients = (sum(state[f"{kind}/w"] for state in states) for kind in ("tracker", "gradient"))
    assert trackers == pytest.approx(gradients, abs=1e-9)


@pytest.mark.parametrize(("method", "schedule"), [("ad-psgd", "poisson"), ("ad-psgd", "pair"), ("dsgd", "pair")])
def test_pairwise_averaging_keeps_the_mean_of_all_models(method: str, schedule: str) -> None:
    graph = make_topology("complete", NAMES)
    run = Network.of(method, graph, [lambda w: 0 * w] * 8, start=np.zeros(3), rate=1.0, period=4, schedule=schedule)
    starts = np.random.default_rng(1).normal(size=(8, 3))
    for node, start in zip(run.nodes.values(), starts, strict=True):
        node.start({"w": start})
    run.run(200)
    assert run.weights() == pytest.approx(np.tile(starts.mean(axis=0), (8, 1)), abs=1e-6)


def test_nobody_asks_again_before_the_answer_is_there_or_taken_for_lost() -> None:
    graph = make_topology("complete", ("a", "b"))
    one, other = (
        make_algorithm("ad-psgd", name, graph.make_link_configs(name, 1), learning_rate=0.1, period=1)
        for name in "ab"
    )
    one.start({"w": np.array([8.0])})
    other.start({"w": np.array([0.0])})
    (question,) = one.make_messages(("b",))
    assert one.make_messages(("b",)) == []
    one.apply_local_steps({"w": np.array([10.0])}, 1, 0.1)  # it goes on meanwhile
    (answer,) = other.receive(question)
    one.receive(replace(answer, step=answer.step + 7))  # of another question
    one.receive(answer)
    one.receive(answer)
    assert (one.weights["w"][0], other.weights["w"][0]) == (6.0, 4.0)
    assert len(one.make_messages(("b",))) == 1
    assert [len(one.make_messages(("b",))) for _ in range(9)] == [0] * 8 + [1]


def test_the_ends_of_an_edge_in_pairs_move_by_its_weight() -> None:
    links = make_topology("ring", NAMES)
    one, other = (
        make_configured_algorithm(
            GossipConfig(
                method="dsgd",
                edges=links.make_link_configs(name, 8),
                learning_rate=0.1,
                period=8,
                schedule="pair",
            ),
            name,
        )
        for name in NAMES[:2]
    )
    one.start({"w": np.zeros(1)})
    other.start({"w": np.full(1, 6.0)})
    (request,) = one.make_messages((NAMES[1],))
    (reply,) = other.receive(request)
    one.receive(reply)
    assert (one.weights["w"][0], other.weights["w"][0]) == (2.0, 4.0)
    one.mix()
    assert one.weights["w"][0] == 2.0


def test_two_that_ask_each_other_at_a_time_meet_in_the_middle() -> None:
    graph = make_topology("complete", ("a", "b"))
    one, other = (
        make_algorithm("ad-psgd", name, graph.make_link_configs(name, 1), learning_rate=0.1, period=1)
        for name in "ab"
    )
    one.start({"w": np.zeros(1)})
    other.start({"w": np.full(1, 4.0)})
    (to_other,), (to_one,) = one.make_messages(("b",)), other.make_messages(("a",))
    assert one.receive(to_one) == other.receive(to_other) == []
    assert [one.weights["w"][0], other.weights["w"][0]] == [2.0, 2.0]


@pytest.mark.parametrize("method", ["dsgd", "k-gt", "gradient-tracking", "d2"])
def test_a_node_goes_on_from_its_state_to_the_bit(method: str) -> None:
    period = 1 if method in {"gradient-tracking", "d2"} else 8
    whole, parted = network(method, period=period).run(160), network(method, period=period).run(80)
    for name, node in parted.nodes.items():
        again = type(node)(name, parted.graph.make_link_configs(name, period), learning_rate=RATE, period=period)
        again.start({"w": np.full(10, 9.0)})
        again.restore(node.state())
        parted.nodes[name] = again
    assert np.array_equal(parted.run(80).weights(), whole.weights())


@pytest.mark.parametrize("method", ALGORITHMS)
def test_callers_arrays_are_not_touched(method: str) -> None:
    graph = make_topology("ring", NAMES)
    start = np.ones(4)
    node = make_algorithm(method, "n0", graph.make_link_configs("n0", 1), learning_rate=0.1, period=1)
    node.start({"w": start})
    ended = np.full(4, 2.0)
    node.apply_local_steps({"w": ended}, 1, 0.1)
    mail = node.make_messages(node.neighbours)
    sent = [{name: array.copy() for name, array in each.parts[part].items()} for each in mail for part in each.parts]
    node.mix()
    node.apply_local_steps({"w": np.full(4, 5.0)}, 1, 0.1)
    assert start.tolist() == [1.0] * 4
    assert ended.tolist() == [2.0] * 4
    for before, now in zip(sent, [each.parts[part] for each in mail for part in each.parts], strict=True):
        assert {name: array.tolist() for name, array in before.items()} == {
            name: array.tolist() for name, array in now.items()
        }


@pytest.mark.parametrize("method", ["gradient-tracking", "d2"])
def test_methods_of_one_step_refuse_more(method: str) -> None:
    with pytest.raises(ConfigError, match=f"{method} exchanges after every local iteration: .* got 8"):
        make_algorithm(
            method, "n0", make_topology("ring", NAMES).make_link_configs("n0", 8), learning_rate=0.1, period=8
        )


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="method 'gossip' is unknown; known: pdmm-isvr"):
        make_algorithm(
            "gossip", "n0", make_topology("ring", NAMES).make_link_configs("n0", 8), learning_rate=0.1, period=8
        )


def mix_once(own: np.ndarray, others: np.ndarray, num_rogues: int) -> np.ndarray:
    """What a node's model becomes by the models of its neighbours on a complete graph."""
    names = NAMES[: 1 + len(others)]
    links = make_topology("complete", names).make_link_configs(names[0], 1)
    plan = GossipConfig(method="dsgd", edges=links, learning_rate=1.0, period=1, num_rogues=num_rogues)
    node = make_configured_algorithm(plan, names[0])
    node.start({"w": own})
    node.make_messages(())
    for name, other in zip(names[1:], others, strict=True):
        node.receive(GossipMessage(sender=name, receiver=names[0], step=1, parts={"w": {"w": other}}))
    node.mix()
    return node.weights["w"]


@pytest.mark.parametrize("num_rogues", [0, 1, 2, 3, 4, 9])
def test_a_neighbour_moves_dsgd_by_no_more_than_the_farthest_that_is_no_rogue(num_rogues: int) -> None:
    rng = np.random.default_rng(num_rogues)
    own, others = rng.normal(size=6), rng.normal(size=(4, 6)) * np.array([[1], [2], [3], [50]])
    steps = others - own
    lengths = np.linalg.norm(steps, axis=1)
    radius = np.sort(lengths)[::-1][num_rogues] if num_rogues < 4 else np.inf  # more rogues than that: no rule helps
    expected = own + (steps * np.minimum(1, radius / lengths)[:, None]).sum(axis=0) / 5
    assert mix_once(own, others, num_rogues) == pytest.approx(expected, rel=1e-12)


def test_a_message_as_large_as_numbers_get_moves_dsgd_no_further() -> None:
    own, others = np.zeros(4, np.float32), np.ones((3, 4), np.float32)
    others[0] = 3e38
    mixed = mix_once(own, others, 1)
    assert np.isfinite(mixed).all()
    assert np.linalg.norm(mixed) <= 3 * 2.0 / 4


def test_only_methods_with_a_bound_take_a_number_of_rogues() -> None:
    assert make_strategy("dsgd", {"num_rogues": 1}, RoundRules()).config.num_rogues == 1
    for method in set(ALGORITHMS) - {"dsgd"}:
        with pytest.raises(ConfigError, match="num_rogues"):
            make_strategy(method, {"num_rogues": 1}, RoundRules())
