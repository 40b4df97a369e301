"""The synchronous template, on boards with a pace."""

from dataclasses import dataclass

import numpy as np
import pytest
from paced_fleet import Board, PacedFleet, run
from strategy_turns import update_of, view_of

from edgefl.core.errors import StrategyError
from edgefl.engine.progress import StoppingCriteria
from edgefl.engine.round_loop import AcceptAllPolicy
from edgefl.strategies.aggregation import ServerOptimizer
from edgefl.strategies.participation import FilteredFleetView
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.strategy_config import RoundRules

NEVER = 1e9


def fedavg(options=None, **rules):
    return make_strategy("fedavg", {"iterations": 1, "learning_rate": 0.5, **(options or {})}, RoundRules(**rules))


def fleet_of(**paces):
    return PacedFleet({name: Board(pace) for name, pace in paces.items()})


def used(fleet):
    return [sorted(name.split("-")[2] for name in names) for names in fleet.journal.aggregates]


def test_go_on_closes_a_round_at_the_barrier_with_those_that_answered_and_recalls_the_others():
    fleet = fleet_of(a=1.0, b=2.0, c=NEVER)
    run(fleet, fedavg(round_timeout_s=5.0), rounds=1)
    assert used(fleet) == [["a", "b"]]
    assert fleet.recalls()[0] == (5.0, "c")


def test_go_on_uses_what_a_recall_brings_when_nobody_had_answered():
    fleet = fleet_of(a=3.0, b=NEVER)
    run(fleet, fedavg({"iterations": 100}, round_timeout_s=5.0), rounds=1)
    assert [(update.device_id, update.metrics.iterations) for _, update in fleet.arrived] == [("a", 2)]
    assert used(fleet) == [["a"]]
    assert fleet.arrived[0][0] == 6.0
    assert fleet.now_s > 10.0  # b was waited for once more


def test_ask_again_gives_late_devices_the_work_once_more_and_the_first_answer_counts():
    fleet = fleet_of(a=1.0, b=1.0)
    fleet.boards["b"].answers = False
    fleet.at(4.0, lambda: setattr(fleet.boards["b"], "answers", True) or [])
    run(fleet, fedavg(round_timeout_s=5.0, on_timeout="reassign"), rounds=1)
    assert [order.assignment_id for order in fleet.assignments()] == ["v0-a1-a", "v0-a1-b", "v0-a2-b"]
    assert fleet.journal.aggregates == [("v0-a1-a", "v0-a2-b")]
    assert [at for at, _ in fleet.arrived][:2] == [1.0, 6.0]


def test_two_copies_of_one_piece_of_work_count_once():
    strategy = fedavg(round_timeout_s=5.0, on_timeout="reassign")
    state = strategy.init({"w": np.zeros(1)})
    state, decision = strategy.assign(state, view_of("a"))
    first = decision.instructions[0]
    state, decision = strategy.assign(state, view_of(now_s=5.0, busy={"a": [first.assignment_id]}))
    second = decision.instructions[0]
    for order, value in ((second, 4.0), (first, 100.0)):
        state = strategy.receive(state, update_of(order, {"w": [value]}, num_examples=5))
    assert strategy.ready(state, view_of("a", now_s=6.0))
    state = strategy.aggregate(state)
    assert strategy.used(state) == (second.assignment_id,)
    assert strategy.model(state)["w"].tolist() == [4.0]


@pytest.mark.parametrize("on_timeout", ["none", "reassign", "aggregate"])
def test_a_barrier_that_passes_twice_ends_the_run_and_names_round_time_and_devices(on_timeout):
    fleet = fleet_of(a=1.0, b=1.0)
    strategy = fedavg(round_timeout_s=5.0, on_timeout=on_timeout)
    fleet.at(2.5, lambda: [setattr(board, "answers", False) for board in fleet.boards.values()] and [])
    with pytest.raises(
        StrategyError, match=r"round 4 waited 10 s for a, b: round_timeout_s = 5 passed twice"
    ) as caught:
        run(fleet, strategy, rounds=9)
    assert on_timeout in str(caught.value)
    assert fleet.now_s == pytest.approx(13.0)


def test_a_barrier_does_not_count_while_nobody_is_there():
    fleet = fleet_of(a=1.0)
    fleet.at(0.5, lambda: fleet.leave("a"))
    fleet.at(500.0, lambda: fleet.join("a"))
    run(fleet, fedavg(round_timeout_s=5.0, on_timeout="none"), rounds=1)
    assert fleet.now_s == 501.0


def test_the_barrier_counts_anew_after_a_restart_whose_clock_begins_at_zero():
    strategy = fedavg(round_timeout_s=5.0, on_timeout="none")
    state, decision = strategy.assign(strategy.init({"w": np.zeros(1)}), view_of("a", now_s=1e6))
    busy = {"a": [order.assignment_id for order in decision.instructions]}
    for now_s in (3.0, 7.9, 12.9):
        state, decision = strategy.assign(state, view_of(now_s=now_s, busy=busy))
        assert 0 < decision.next_wake_s <= 5.0
    with pytest.raises(StrategyError):
        strategy.assign(state, view_of(now_s=13.0, busy=busy))


@dataclass
class RestingGate(AcceptAllPolicy):
    resting: frozenset = frozenset()

    def eligible_view(self, view):
        return FilteredFleetView(view, [name for name in view.idle if name not in self.resting])


def test_k_of_n_closes_when_all_others_rest():
    fleet = fleet_of(a=1.0, b=1.0, c=1.0)
    gate = RestingGate(frozenset({"c"}))
    run(fleet, fedavg(min_updates=3), gate=gate, rounds=2)
    assert used(fleet) == [["a", "b"]] * 2
    assert fleet.now_s == 2.0


def test_at_the_end_of_a_run_a_round_closes_with_what_came_though_k_are_asked_for():
    fleet = fleet_of(a=1.0, b=1.0, c=NEVER)
    fleet.at(5.0, lambda: fleet.leave("c"))
    run(fleet, fedavg(min_updates=3), goal=StoppingCriteria(seconds=3.0))
    assert used(fleet) == [["a", "b"]]


def test_a_fraction_of_the_idle_is_asked_rounded_up():
    names = [f"pi-{i:02d}" for i in range(100)]
    for fraction, expected in ((0.07, 7), (0.071, 8), (1.0, 100), (0.001, 1)):
        strategy = fedavg(fraction=fraction)
        _, decision = strategy.assign(strategy.init({"w": np.zeros(1)}), view_of(*names))
        assert len(decision.instructions) == expected
        assert [order.device_id for order in decision.instructions] == sorted(
            order.device_id for order in decision.instructions
        )


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
    told = [name for order in fleet.assignments() for name in order.used_assignments]
    last = {order.device_id: order.assignment_id for order in fleet.assignments()}
    everything = {name for names in fleet.journal.aggregates for name in names}
    assert everything - set(told) == set(last.values())
    assert max(len(order.used_assignments) for order in fleet.assignments()) == 3


def test_a_device_whose_assignment_was_lost_is_told_again():
    fleet = fleet_of(a=1.0, b=1.0)
    fleet.at(1.5, lambda: fleet.leave("b"))
    fleet.at(2.5, lambda: fleet.join("b"))
    run(fleet, fedavg(), rounds=4)
    asked = [order.used_assignments for order in fleet.assignments() if order.device_id == "b"]
    assert asked == [(), ("v0-a1-b",), ("v0-a1-b",)]  # as the newest two are in any case
