"""Nodes of a graph as the coordinator sees them: who is asked for what, whose mail goes where, who comes and goes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgefl.core.errors import ConfigError
from edgefl.core.types import DeviceInfo, FinishEarlyInstruction, PeerMessage, TrainInstruction, Update, UpdateMetrics
from edgefl.strategies.aggregation import ServerOptimizer
from edgefl.strategies.decentralised.strategy import DecentralisedState, DecentralisedStrategy
from edgefl.strategies.participation import FilteredFleetView
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.strategy_config import RoundRules

NAMES = ("a", "b", "c", "d")


class LiveView(SimpleNamespace):
    """A fleet in which a test says who is there and who works."""

    def __init__(self, names: Sequence[str]) -> None:
        devices = {name: DeviceInfo(device_id=name) for name in names}
        super().__init__(now_s=0.0, devices=devices, busy={}, speeds={}, progress={}, vitals={})

    @property
    def idle(self) -> list[str]:
        return [name for name in self.devices if name not in self.busy]


class Fleet:
    """Plays the devices: what is asked is out until it is answered."""

    def __init__(
        self, name: str = "dsgd", names: Sequence[str] = NAMES, *, rules: Any = None, **options: Any
    ) -> None:
        self.strategy = make_strategy(name, options, RoundRules(**(rules or {})))
        assert isinstance(self.strategy, DecentralisedStrategy)
        self.view: Any = LiveView(names)
        self.state: DecentralisedState = self.strategy.init({"w": np.zeros(2, np.float32)})
        self.out: dict[str, TrainInstruction] = {}
        self.given: list[TrainInstruction] = []
        self.used: list[str] = []

    def ask(self) -> list[TrainInstruction]:
        self.state, decision = self.strategy.assign(self.state, self.view)
        orders = [order for order in decision.instructions if isinstance(order, TrainInstruction)]
        for order in orders:
            assert order.device_id in self.view.idle
            self.out[order.device_id] = order
            self.view.busy[order.device_id] = [order.assignment_id]
        self.given += orders
        return orders

    def answer(
        self,
        name: str,
        value: float = 0.0,
        *,
        done: int | None = None,
        fires: tuple[str, ...] | None = None,
        is_reply: bool = False,
    ) -> Update:
        order = self.out.pop(name)
        del self.view.busy[name]
        node = order.plan.node
        assert node is not None
        update = Update(
            assignment_id=order.assignment_id,
            device_id=name,
            base_version=order.base_version,
            tensors={"w": np.full(2, value, np.float32)} if node.reports else {},
            metrics=UpdateMetrics(
                iterations=order.plan.iterations or 0,
                num_examples=5,
                extra={} if node.carrier == "relay" else {"iterations_in_all": node.until if done is None else done},
            ),
            messages=tuple(
                PeerMessage(
                    edge=(name, other),
                    step=len(self.given),
                    body=f"{name}{len(self.given)}".encode(),
                    is_reply=is_reply,
                )
                for other in (node.fires if fires is None else fires)
            ),
        )
        self.state = self.strategy.receive(self.state, update)
        return update

    def lose(self, name: str) -> None:
        del self.out[name], self.view.busy[name]

    def close(self) -> int:
        closed = 0
        while self.strategy.ready(self.state, self.view):
            self.state = self.strategy.aggregate(self.state)
            self.used += self.strategy.used(self.state)
            closed += 1
        return closed

    def turn(self) -> list[TrainInstruction]:
        """Everybody answers what is out, and is asked again."""
        for place, name in enumerate(sorted(self.out)):
            self.answer(name, float(place))
        self.close()
        return self.ask()


def node_of(order: TrainInstruction) -> Any:
    assert order.plan.node is not None
    return order.plan.node


@pytest.mark.parametrize("name", ["ad-psgd", "dsgd", "gradient-tracking", "pdmm-isvr"])
def test_nodes_get_a_model_once_exchange_and_report_after_every_round(name: str) -> None:
    fleet = Fleet(name, exchanges_per_round=3)
    first = fleet.ask()
    assert [order.device_id for order in first] == list(NAMES)
    assert all(order.sends_model for order in first)
    while fleet.strategy.version(fleet.state) < 3:
        assert not any(order.sends_model for order in fleet.turn())
        assert len(fleet.given) < 400
    reports = [order for order in fleet.given if node_of(order).reports]
    assert {order.device_id for order in reports} == set(NAMES)
    assert all(order.plan.iterations == 0 and not node_of(order).fires for order in reports)
    answered = [order.assignment_id for order in fleet.given if order.device_id not in fleet.out]
    assert len(fleet.used) == len(set(fleet.used))
    assert set(fleet.used) <= {order.assignment_id for order in fleet.given}
    assert len(answered) <= len(fleet.given)


def test_the_model_is_the_mean_of_what_was_told_and_figures_say_how_far_nodes_lie_apart() -> None:
    fleet = Fleet("dsgd", exchanges_per_round=1)
    fleet.ask()
    while not fleet.strategy.version(fleet.state):
        fleet.turn()
    assert fleet.strategy.model(fleet.state)["w"].tolist() == [1.5, 1.5]
    assert [model["w"][0] for model in fleet.strategy.node_models(fleet.state).values()] == [0, 1, 2, 3]
    facts = fleet.strategy.facts(fleet.state)
    assert facts["disagreement"] == pytest.approx(np.sqrt(1.25) / 1.5)
    assert facts["nodes"] == 4


def test_in_step_nobody_goes_on_before_all_its_neighbours_have_sent() -> None:
    fleet = Fleet("dsgd")
    fleet.ask()
    fleet.answer("a")
    fleet.answer("b")
    assert fleet.ask() == []
    fleet.answer("d")
    (order,) = fleet.ask()  # a's neighbours are b and d
    assert order.device_id == "a"
    assert [message.edge for message in order.plan.messages] == [("b", "a"), ("d", "a")]


def test_at_their_own_pace_a_slow_neighbour_keeps_nobody_waiting_and_gets_only_the_newest() -> None:
    fleet = Fleet("pdmm-isvr", ("a", "b"), iterations=2, exchanges_per_round=1000)
    fleet.ask()
    for _ in range(5):
        fleet.answer("a")
        assert [order.device_id for order in fleet.ask()] == ["a"]
    newest = fleet.state.nodes["b"].queue
    assert [message.body for message in newest] == [b"a6"]


def test_in_pairs_the_other_end_is_interrupted_to_reply_and_nobody_trains_in_between() -> None:
    fleet = Fleet("pdmm-isvr", ("a", "b"), exchange="pair", exchanges_per_round=1000)
    fleet.ask()
    fleet.answer("a")
    fleet.state, decision = fleet.strategy.assign(fleet.state, fleet.view)
    (recall,) = decision.instructions  # a gets nothing to do
    assert isinstance(recall, FinishEarlyInstruction)
    assert recall.assignment_id == fleet.out["b"].assignment_id
    assert fleet.strategy.assign(fleet.state, fleet.view)[1].instructions == ()
    fleet.answer("b", fires=())  # interrupted
    (exchange,) = fleet.ask()
    assert (exchange.device_id, exchange.plan.iterations, node_of(exchange).fires) == ("b", 0, ())
    assert [message.edge for message in exchange.plan.messages] == [("a", "b")]
    fleet.answer("b", fires=("a",), is_reply=True)
    orders = {order.device_id: order for order in fleet.ask()}
    assert [(message.edge, message.is_reply) for message in orders["a"].plan.messages] == [(("b", "a"), True)]
    assert all(order.plan.iterations and node_of(order).fires for order in orders.values())


@pytest.mark.parametrize("is_gone", [True, False])
def test_in_pairs_a_neighbour_that_is_lost_with_a_request_keeps_nobody_waiting(is_gone: bool) -> None:
    fleet = Fleet("dsgd", ("a", "b"), exchange="pair", exchanges_per_round=1000)
    fleet.ask()
    fleet.answer("a")
    assert fleet.ask() == []
    fleet.lose("b")
    if is_gone:
        del fleet.view.devices["b"]
    assert "a" in {order.device_id for order in [*fleet.ask(), *fleet.ask()]}


def test_a_rule_that_compares_neighbours_is_refused_in_pairs() -> None:
    with pytest.raises(ConfigError, match="num_rogues compares neighbours"):
        Fleet("dsgd", exchange="pair", num_rogues=1)


def test_a_node_that_leaves_takes_its_edges_along_and_begins_them_anew_when_it_is_back() -> None:
    fleet = Fleet("dsgd", exchanges_per_round=100)
    fleet.ask()
    fleet.turn()
    fleet.lose("c")
    away = fleet.view.devices.pop("c")
    asked = {order.device_id: order for order in [*fleet.turn(), *fleet.turn(), *fleet.turn()]}
    assert [side.neighbour for side in node_of(asked["b"]).edges] == ["a"]
    assert [side.neighbour for side in node_of(asked["d"]).edges] == ["a"]
    fleet.view.devices["c"] = away
    asked = {order.device_id: order for order in [*fleet.turn(), *fleet.turn()]}
    epochs = {(name, side.neighbour): side.epoch for name, order in asked.items() for side in node_of(order).edges}
    assert epochs["b", "c"] == epochs["c", "b"] == epochs["c", "d"] == epochs["d", "c"] == 1
    assert epochs["a", "b"] == 0


def test_both_ends_of_an_edge_are_told_the_same_of_it() -> None:
    fleet = Fleet("pdmm-isvr", tuple("abcdefgh"), graph="paper-random")
    sides = {(order.device_id, side.neighbour): side for order in fleet.ask() for side in node_of(order).edges}
    assert len(sides) == 20
    for (one, other), side in sides.items():
        back = sides[other, one]
        assert (side.sign, side.degree, side.weight, side.period) == (
            -back.sign, back.degree, back.weight, back.period,
        )  # fmt: skip


def test_parts_that_a_leaving_node_cut_off_are_joined() -> None:
    fleet = Fleet("dsgd", graph="star", exchanges_per_round=100)
    fleet.ask()
    fleet.turn()
    fleet.lose("a")
    del fleet.view.devices["a"]
    fleet.turn()
    asked = {order.device_id: order for order in [*fleet.turn(), *fleet.turn()]}
    assert {name: [side.neighbour for side in node_of(order).edges] for name, order in asked.items()} == {
        "b": ["c"],
        "c": ["b", "d"],
        "d": ["c"],
    }


def test_a_newcomer_gets_two_neighbours_and_joins_at_their_exchange() -> None:
    fleet = Fleet("dsgd", exchanges_per_round=100)
    fleet.ask()
    for _ in range(3):
        fleet.turn()
    fleet.view.devices["e"] = DeviceInfo(device_id="e")
    asked = {order.device_id: order for order in fleet.turn()}
    assert asked["e"].sends_model
    assert len(node_of(asked["e"]).edges) == 2
    assert fleet.state.nodes["e"].exchanges == max(node.exchanges for node in fleet.state.nodes.values())


def test_a_node_that_always_fails_is_left_out_after_a_while_and_tried_again_later() -> None:
    fleet = Fleet("dsgd", exchanges_per_round=2)
    fleet.ask()
    for _ in range(60):
        if "b" in fleet.out:
            fleet.lose("b")
        fleet.turn()
        fleet.view.now_s += 1.0
    assert fleet.strategy.version(fleet.state) > 2
    tries = [order for order in fleet.given if order.device_id == "b"]
    assert 4 <= len(tries) < 15


def test_a_node_that_is_flagged_leaves_the_graph_for_good() -> None:
    fleet = Fleet("dsgd", exchanges_per_round=2)
    fleet.ask()
    fleet.answer("b")
    idle = [name for name in fleet.view.idle if name != "b"]
    fleet.view = FilteredFleetView(fleet.view, idle, blocked_devices={"b"})
    fleet.ask()
    for name in ("a", "c", "d"):
        fleet.answer(name)
    fleet.view = FilteredFleetView(fleet.view._view, ["a", "c", "d"], blocked_devices={"b"})
    orders = fleet.ask()
    assert [order.device_id for order in orders] == ["a", "c", "d"]
    assert all(side.neighbour != "b" for order in orders for side in node_of(order).edges)


def test_a_file_says_who_is_whose_neighbour_how_often_and_when(tmp_path: Path) -> None:
    path = tmp_path / "node_list.json"
    nodes = {
        "a": {"round": 4, "edges": {"b": 1}},
        "b": {"round": 2, "edges": {"a": 0, "c": 1}},
        "c": {"round": 4, "edges": {"b": 3}},
    }
    path.write_text(json.dumps({"nodes": nodes}))
    fleet = Fleet("pdmm-isvr", graph=str(path), exchange="slots")
    asked = {order.device_id: order for order in fleet.ask()}
    assert set(asked) == {"a", "b", "c"}
    assert [node_of(asked[name]).period for name in "abc"] == [4, 2, 4]
    assert [asked[name].plan.iterations for name in "abc"] == [1, 1, 3]
    assert node_of(asked["b"]).edges[0].period == 4


def test_learning_rates_change_by_round_and_step_sizes_do_not() -> None:
    options = {"learning_rate": 0.4, "schedule": "inverse-sqrt", "exchanges_per_round": 1, "iterations": 2}
    fleet = Fleet("pdmm-isvr", rules={"codec": "qsgd:2:8"}, **options)
    fleet.ask()
    while fleet.strategy.version(fleet.state) < 3:
        fleet.turn()
    last = fleet.given[-1]
    assert last.plan.learning_rate < 0.4
    assert node_of(last).learning_rate == 0.4
    assert (last.codec, node_of(last).codec) == ("dense", "qsgd:2:8")


def test_settings_of_a_method_reach_its_devices_and_others_refuse_them() -> None:
    (order, *_) = Fleet("admm-isvr", k_eta=2.5, step_size="node").ask()
    assert (node_of(order).k_eta, node_of(order).step_size) == (2.5, "node")
    with pytest.raises(ConfigError, match="k_eta must be a number above 1, got 1"):
        Fleet("pdmm-isvr", k_eta=1)
    with pytest.raises(ConfigError, match="dsgd has no such setting"):
        Fleet("dsgd", k_eta=2.0)


def test_devices_that_go_on_alone_are_asked_for_reports_only_and_the_slowest_closes_the_round() -> None:
    fleet = Fleet("pdmm-isvr", carrier="peer", iterations=4, exchanges_per_round=5, rules={"rounds": 10})
    first = fleet.ask()
    assert all(node_of(order).reports and node_of(order).carrier == "peer" for order in first)
    assert {(node_of(order).until, node_of(order).limit) for order in first} == {(20, 200)}
    fleet.answer("a", 8.0)
    assert [node_of(order).until for order in fleet.ask()] == [40]
    for name in "bc":
        fleet.answer(name)
    assert not fleet.close()
    fleet.answer("d")
    assert fleet.close() == 1
    assert fleet.strategy.model(fleet.state)["w"].tolist() == [2.0, 2.0]


def test_where_a_device_listens_a_file_says_or_the_device_itself(tmp_path: Path) -> None:
    fleet = Fleet("pdmm-isvr", ("a", "b"), carrier="direct")
    with pytest.raises(ConfigError, match="does not say where a listens"):
        fleet.ask()
    fleet.view.devices = {
        name: DeviceInfo(device_id=name, capabilities={"peer_address": f"10.0.0.{place}:8884"})
        for place, name in enumerate("ab", 1)
    }
    told = {order.device_id: node_of(order) for order in fleet.ask()}
    assert (told["a"].listen, told["a"].edges[0].address) == ("10.0.0.1:8884", "10.0.0.2:8884")
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps({"hosts": [{"name": name, "addr": f"{name}.local", "port": 9000} for name in "ab"]}))
    fleet = Fleet("pdmm-isvr", ("a", "b"), carrier="direct", hosts=str(hosts))
    assert [node_of(order).listen for order in fleet.ask()] == ["a.local:9000", "b.local:9000"]
    with pytest.raises(ConfigError, match="does not say where c listens"):
        Fleet("pdmm-isvr", ("a", "b", "c"), carrier="direct", hosts=str(hosts)).ask()


def test_a_node_that_goes_on_alone_is_not_asked_on_and_on_while_another_one_is_slow() -> None:
    fleet = Fleet("pdmm-isvr", ("a", "b"), carrier="peer", rules={"rounds": 10})
    fleet.ask()
    for _ in range(20):
        if "a" in fleet.out:
            fleet.answer("a")
        fleet.ask()
    assert len([order for order in fleet.given if order.device_id == "a"]) == 3
    fleet.answer("b")
    fleet.close()
    assert [order.device_id for order in fleet.ask()] == ["a", "b"]


def test_both_ends_keep_the_step_size_of_an_edge_when_others_join() -> None:
    fleet = Fleet("pdmm-isvr", ("a", "b"), exchanges_per_round=1000)
    fleet.ask()
    seen: dict[tuple[str, str, int], set[int]] = {}
    for number in range(40):
        if number in {5, 11, 17}:
            name = "cde"[(number - 5) // 6]
            fleet.view.devices[name] = DeviceInfo(device_id=name)
        for name in list(fleet.out)[number % 2 :: 2]:
            fleet.answer(name)
        fleet.ask()
    for order in fleet.given:
        for side in node_of(order).edges:
            edge = (*sorted((order.device_id, side.neighbour)), side.epoch)
            seen.setdefault(edge, set()).add(side.degree)  # type: ignore[arg-type]
    assert len(seen) >= 5
    assert all(len(degrees) == 1 for degrees in seen.values())


@pytest.mark.parametrize("exchange", ["sync", "poisson"])
def test_a_board_that_rests_keeps_nobody_waiting(exchange: str) -> None:
    fleet = Fleet("dsgd", exchange=exchange, exchanges_per_round=2)
    fleet.ask()
    rests = FilteredFleetView(fleet.view, [])
    for _ in range(20):
        for name in list(fleet.out):
            fleet.answer(name, 1.0)
        fleet.close()
        rests = FilteredFleetView(fleet.view, [name for name in fleet.view.idle if name != "c"])
        fleet.state, decision = fleet.strategy.assign(fleet.state, rests)
        for order in decision.instructions:
            assert isinstance(order, TrainInstruction)
            fleet.out[order.device_id] = order
            fleet.view.busy[order.device_id] = [order.assignment_id]
    assert fleet.strategy.version(fleet.state) > 2


def test_the_mail_of_work_that_was_lost_is_sent_again() -> None:
    fleet = Fleet("dsgd", ("a", "b"), exchanges_per_round=1000)
    fleet.ask()
    fleet.answer("a")
    fleet.answer("b")
    (first, _) = fleet.ask()
    assert [message.edge for message in first.plan.messages] == [("b", "a")]
    fleet.lose("a")
    (again,) = [order for order in fleet.ask() if order.device_id == "a"]
    assert again.plan.messages == first.plan.messages


def test_when_the_graph_changes_those_that_go_on_alone_are_called_to_hear_of_it() -> None:
    fleet = Fleet("pdmm-isvr", carrier="peer")
    fleet.ask()
    fleet.lose("c")
    del fleet.view.devices["c"]
    fleet.state, decision = fleet.strategy.assign(fleet.state, fleet.view)
    assert {order.device_id for order in decision.instructions if isinstance(order, FinishEarlyInstruction)} == {
        "a",
        "b",
        "d",
    }


def test_after_the_coordinator_was_away_nobody_is_taken_for_gone_at_once() -> None:
    fleet = Fleet("pdmm-isvr", carrier="peer")
    fleet.ask()
    for name in NAMES:
        fleet.answer(name)
    fleet.close()
    fleet.state = fleet.strategy.resumed(fleet.state)
    before, fleet.out, fleet.view.busy, there = list(fleet.given), {}, {}, fleet.view.devices
    fleet.view.devices = {}
    assert fleet.ask() == []
    fleet.view.devices = {name: there[name] for name in "abd"}
    again = fleet.ask()
    assert not {order.assignment_id for order in again} & {order.assignment_id for order in before}
    assert all(side.epoch == 0 for order in again for side in node_of(order).edges)
    for name in "abd":
        fleet.answer(name)
    assert not fleet.close(), "it waits for the fourth, who may only be late"
    fleet.view.now_s = 61.0
    fleet.ask()
    assert fleet.close() == 1


def test_a_server_optimiser_and_a_graph_that_does_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="no server"):
        make_strategy("dsgd", {}, RoundRules(server=ServerOptimizer(kind="adam")))
    with pytest.raises(ConfigError, match="paper-random has 8 nodes, got 4"):
        Fleet("dsgd", graph="paper-random").ask()
    for graph, message in (("torus", "graph 'torus' is unknown"), ("nowhere.json", "nowhere.json cannot be read")):
        with pytest.raises(ConfigError, match=message):
            make_strategy("dsgd", {"graph": graph}, RoundRules())
