"""The synchronous template, on boards with a pace."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from paced_fleet import Board, PacedFleet, run

from edgefl.errors import StrategyError
from edgefl.loop import OpenGate
from edgefl.storage.checkpoints import load_state, save_state
from edgefl.strategies.gate import SelectedView
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.rounds import RoundRules, RoundState
from edgefl.strategies.server_optimizers import ServerOptimizer
from edgefl.tally import Goal
from edgefl.types import Assignment, Recall, Update, UpdateMetrics

NEVER = 1e9


def fedavg(options=None, **rules):
    return make_strategy("fedavg", {"iterations": 1, "learning_rate": 0.5, **(options or {})}, RoundRules(**rules))


def fleet_of(**paces):
    return PacedFleet({name: Board(pace) for name, pace in paces.items()})


def used(fleet):
    return [sorted(name.split("-")[2] for name in names) for names in fleet.journal.aggregates]


def test_go_on_closes_a_round_at_the_barrier_with_those_that_answered_and_recalls_the_others():
    fleet = fleet_of(a=1.0, b=2.0, c=NEVER)
    run(fleet, fedavg(barrier_s=5.0), rounds=1)
    assert used(fleet) == [["a", "b"]]
    assert fleet.recalls()[0] == (5.0, "c")


def test_go_on_uses_what_a_recall_brings_when_nobody_had_answered():
    fleet = fleet_of(a=3.0, b=NEVER)
    run(fleet, fedavg({"iterations": 100}, barrier_s=5.0), rounds=1)
    assert [(update.device_id, update.metrics.iterations) for _, update in fleet.arrived] == [("a", 2)]
    assert used(fleet) == [["a"]]
    assert fleet.arrived[0][0] == 6.0
    assert fleet.now_s > 10.0  # b was waited for once more


def test_ask_again_gives_late_devices_the_work_once_more_and_the_first_answer_counts():
    fleet = fleet_of(a=1.0, b=1.0)
    fleet.boards["b"].answers = False
    fleet.at(4.0, lambda: setattr(fleet.boards["b"], "answers", True) or [])
    run(fleet, fedavg(barrier_s=5.0, rescue="ask-again"), rounds=1)
    assert [order.assignment_id for order in fleet.assignments()] == ["v0-a1-a", "v0-a1-b", "v0-a2-b"]
    assert fleet.journal.aggregates == [("v0-a1-a", "v0-a2-b")]
    assert [at for at, _ in fleet.arrived][:2] == [1.0, 6.0]


def test_two_copies_of_one_piece_of_work_count_once():
    strategy = fedavg(barrier_s=5.0, rescue="ask-again")
    state = strategy.init({"w": np.zeros(1)})
    view = view_at(0.0, idle=["a"])
    state, decision = strategy.assign(state, view)
    first = decision.orders[0]
    state, decision = strategy.assign(state, view_at(5.0, busy={"a": [first.assignment_id]}))
    second = decision.orders[0]
    for order, value in ((second, 4.0), (first, 100.0)):
        state = strategy.receive(state, update_for(order, value))
    assert strategy.ready(state, view_at(6.0, idle=["a"]))
    state = strategy.aggregate(state)
    assert strategy.used(state) == (second.assignment_id,)
    assert strategy.model(state)["w"].tolist() == [4.0]


@pytest.mark.parametrize("rescue", ["none", "ask-again", "go-on"])
def test_a_barrier_that_passes_twice_ends_the_run_and_names_round_time_and_devices(rescue):
    fleet = fleet_of(a=1.0, b=1.0)
    strategy = fedavg(barrier_s=5.0, rescue=rescue)
    fleet.at(2.5, lambda: [setattr(board, "answers", False) for board in fleet.boards.values()] and [])
    with pytest.raises(StrategyError, match=r"round 4 waited 10 s for a, b: barrier_s = 5 passed twice") as caught:
        run(fleet, strategy, rounds=9)
    assert rescue in str(caught.value)
    assert fleet.now_s == pytest.approx(13.0)


def test_a_barrier_does_not_count_while_nobody_is_there():
    fleet = fleet_of(a=1.0)
    fleet.at(0.5, lambda: fleet.leave("a"))
    fleet.at(500.0, lambda: fleet.join("a"))
    run(fleet, fedavg(barrier_s=5.0, rescue="none"), rounds=1)
    assert fleet.now_s == 501.0


def test_the_barrier_counts_anew_after_a_restart_whose_clock_begins_at_zero():
    strategy = fedavg(barrier_s=5.0, rescue="none")
    state, decision = strategy.assign(strategy.init({"w": np.zeros(1)}), view_at(1e6, idle=["a"]))
    busy = {"a": [order.assignment_id for order in decision.orders]}
    for now_s in (3.0, 7.9, 12.9):
        state, decision = strategy.assign(state, view_at(now_s, busy=busy))
        assert 0 < decision.next_wake_s <= 5.0
    with pytest.raises(StrategyError):
        strategy.assign(state, view_at(13.0, busy=busy))


def test_a_message_names_ten_devices_and_counts_the_rest():
    strategy = fedavg(barrier_s=1.0, rescue="none")
    names = [f"pi-{i:02d}" for i in range(25)]
    state, decision = strategy.assign(strategy.init({"w": np.zeros(1)}), view_at(0.0, idle=names))
    busy = {order.device_id: [order.assignment_id] for order in decision.orders}
    state, _ = strategy.assign(state, view_at(1.0, busy=busy))
    with pytest.raises(StrategyError, match=r"pi-00, .*, pi-09 and 15 more: "):
        strategy.assign(state, view_at(2.0, busy=busy))


@dataclass
class RestingGate(OpenGate):
    resting: frozenset = frozenset()

    def view(self, view):
        return SelectedView(view, [name for name in view.idle if name not in self.resting])


def test_k_of_n_closes_when_all_others_rest():
    fleet = fleet_of(a=1.0, b=1.0, c=1.0)
    gate = RestingGate(frozenset({"c"}))
    run(fleet, fedavg(min_updates=3), gate=gate, rounds=2)
    assert used(fleet) == [["a", "b"]] * 2
    assert fleet.now_s == 2.0


def test_at_the_end_of_a_run_a_round_closes_with_what_came_though_k_are_asked_for():
    fleet = fleet_of(a=1.0, b=1.0, c=NEVER)
    fleet.at(5.0, lambda: fleet.leave("c"))
    run(fleet, fedavg(min_updates=3), goal=Goal(seconds=3.0))
    assert used(fleet) == [["a", "b"]]


def test_a_fraction_of_the_idle_is_asked_rounded_up():
    names = [f"pi-{i:02d}" for i in range(100)]
    for fraction, expected in ((0.07, 7), (0.071, 8), (1.0, 100), (0.001, 1)):
        strategy = fedavg(fraction=fraction)
        _, decision = strategy.assign(strategy.init({"w": np.zeros(1)}), view_at(0.0, idle=names))
        assert len(decision.orders) == expected
        assert [order.device_id for order in decision.orders] == sorted(order.device_id for order in decision.orders)


def test_the_learning_rate_follows_the_schedule_by_closed_rounds():
    fleet = fleet_of(a=1.0)
    run(fleet, fedavg({"schedule": "step:2:0.1"}), rounds=5)
    rates = [order.plan.learning_rate for order in fleet.assignments()]
    assert rates == pytest.approx([0.5, 0.5, 0.05, 0.05, 0.005])


def test_the_server_optimizer_takes_the_step_and_remembers_over_rounds():
    server = ServerOptimizer(kind="momentum", beta1=0.5)
    fleet, plain = fleet_of(a=1.0), fleet_of(a=1.0)
    state = run(fleet, fedavg(server=server), rounds=2)
    assert state.moments.keys() == {"m/w"}
    # d₁ = 0.5, w₁ = 0.5; d₂ = 0.25, m₂ = 0.5·0.5 + 0.25, w₂ = 1.
    assert state.model["w"].tolist() == [1.0, 1.0]
    assert run(plain, fedavg(), rounds=2).model["w"].tolist() == [0.75, 0.75]


def test_a_device_that_is_asked_seldom_learns_of_all_its_used_updates():
    """An error-feedback codec takes back what it is not told of, so that silence would count an update twice."""
    fleet = fleet_of(**dict.fromkeys("abcdef", 1.0))
    run(fleet, fedavg(max_devices=2), rounds=30)
    told = [name for order in fleet.assignments() for name in order.settled]
    last = {order.device_id: order.assignment_id for order in fleet.assignments()}
    everything = {name for names in fleet.journal.aggregates for name in names}
    assert everything - set(told) == set(last.values())
    assert max(len(order.settled) for order in fleet.assignments()) == 3


def test_a_device_whose_assignment_was_lost_is_told_again():
    fleet = fleet_of(a=1.0, b=1.0)
    fleet.at(1.5, lambda: fleet.leave("b"))
    fleet.at(2.5, lambda: fleet.join("b"))
    run(fleet, fedavg(), rounds=4)
    asked = [order.settled for order in fleet.assignments() if order.device_id == "b"]
    assert asked == [(), ("v0-a1-b",), ("v0-a1-b",)]  # as the newest two are in any case


def test_a_state_survives_in_the_middle_of_a_round(tmp_path):
    strategy = fedavg(server=ServerOptimizer(kind="adam"))
    views = {name: view_at(0.0, busy={n: [f"v0-a1-{n}"] for n in "abc" if n > name}) for name in "abc"}
    states = []
    for saves in (False, True):
        state, decision = strategy.assign(strategy.init({"w": np.zeros(2)}), view_at(0.0, idle=["a", "b", "c"]))
        for order in reversed(decision.orders):
            state = strategy.receive(state, update_for(order, ord(order.device_id), size=2))
            if saves:
                save_state(tmp_path, state, 0)
                state = load_state(tmp_path, RoundState)
        assert strategy.ready(state, views["c"])
        states.append(strategy.aggregate(state))
    assert states[0].model["w"].tobytes() == states[1].model["w"].tobytes()
    assert states[0].used == states[1].used == ("v0-a1-a", "v0-a1-b", "v0-a1-c")
    assert states[0].settled == states[1].settled


class CountingView:
    """Counts what a strategy reads; `busy` and `idle` are live and cost nothing."""

    def __init__(self, names):
        self.now_s, self.devices, self.speeds, self.progress, self.vitals = 0.0, {}, {}, {}, {}
        self.names, self.reads = names, 0
        self.working = {}

    @property
    def busy(self):
        return CountingMap(self, self.working)

    @property
    def idle(self):
        self.reads += len(self.names)
        return [name for name in self.names if name not in self.working]


class CountingMap(dict):
    def __init__(self, view, content):
        super().__init__(content)
        self.view = view

    def get(self, key, default=None):
        self.view.reads += 1
        return super().get(key, default)

    def __iter__(self):
        self.view.reads += len(self)
        return super().__iter__()

    def values(self):
        self.view.reads += len(self)
        return super().values()

    def items(self):
        self.view.reads += len(self)
        return super().items()


@pytest.mark.parametrize("name", ["fedavg", "fednova", "esync", "local", "redundant"])
def test_an_event_costs_a_few_reads_however_many_devices_there_are(name):
    reads = {}
    for num_devices in (50, 400):
        strategy = make_strategy(name, {}, RoundRules(barrier_s=1e6))
        view = CountingView([f"pi-{i:04d}" for i in range(num_devices)])
        state, decision = strategy.assign(strategy.init({"w": np.zeros(1)}), view)
        view.working = {order.device_id: [order.assignment_id] for order in decision.orders}
        view.reads = 0
        for order in decision.orders[: num_devices - 1]:
            del view.working[order.device_id]
            state = strategy.receive(state, update_for(order, 1.0))
            if strategy.ready(state, view):
                break
            state, _ = strategy.assign(state, view)
        reads[num_devices] = view.reads / max(1, len(decision.orders))
    assert reads[400] <= reads[50] + 1 < 10


def test_an_order_is_never_a_recall_of_something_unknown():
    fleet = fleet_of(a=1.0, b=2.0, c=NEVER)
    run(fleet, fedavg(barrier_s=3.0), rounds=3)
    given = {order.assignment_id for _, order in fleet.given if isinstance(order, Assignment)}
    assert {order.assignment_id for _, order in fleet.given if isinstance(order, Recall)} <= given


def view_at(now_s, *, idle=(), busy=None):
    busy = busy or {}
    return SimpleNamespace(
        now_s=now_s,
        devices=dict.fromkeys([*idle, *busy]),
        idle=list(idle),
        busy=busy,
        speeds={},
        progress={},
        vitals={},
    )


def update_for(order, value, size=1):
    return Update(
        assignment_id=order.assignment_id,
        device_id=order.device_id,
        base_version=order.base_version,
        tensors={"w": np.full(size, float(value))},
        metrics=UpdateMetrics(num_examples=5, iterations=1, compute_s=0.1),
    )
