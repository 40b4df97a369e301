"""`bounded`: ssgd at 0, asgd at -1, and in between nobody runs too far ahead of the slowest that is alive."""

import pytest
from faulty_fleet import FaultyFleet, first_model
from strategy_turns import view_of

from edgefl.core.types import HealthMetrics
from edgefl.engine.round_loop import run_rounds
from edgefl.engine.stopping import StoppingCriteria
from edgefl.strategies.asynchronous.asgd import ASGDConfig
from edgefl.strategies.asynchronous.ssp import SSPConfig
from edgefl.strategies.evaluation import EvaluationSchedule
from edgefl.strategies.participation import DeviceSelection, RunParticipationPolicy
from edgefl.strategies.synchronous.ssgd import SSGDConfig
from edgefl.strategies.synchronous.strategy import RoundRules

NOBODY = EvaluationSchedule(evaluate_on="none")


class Clocks(FaultyFleet):
    """Notes the number of finished steps of everybody at work whenever somebody begins one."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.steps, self.leads = dict.fromkeys(self.info, 0), []

    def begin(self, order):
        at_work = {other.device_id for other in self.out.values()} & self.present
        slowest = min((self.steps[name] for name in at_work), default=self.steps[order.device_id])
        self.leads.append(self.steps[order.device_id] - slowest)
        super().begin(order)

    def update(self, order, *args):
        self.steps[order.device_id] += 1
        return super().update(order, *args)


def run(settings, updates=60, faults=None, *, fleet=None):
    strategy, fleet = settings.build(RoundRules()), fleet or Clocks(faults=faults or {})
    state, reason = run_rounds(
        strategy, strategy.init(first_model()), fleet=fleet, journal=fleet.journal,
        goal=StoppingCriteria(updates=updates), evaluate=NOBODY,
    )  # fmt: skip
    return fleet, strategy.model(state), reason


@pytest.mark.parametrize(("bound", "other", "faults"), [(0, SSGDConfig, {}), (-1, ASGDConfig, {"b": "slow"})])
def test_a_bound_of_nothing_is_ssgd_and_no_bound_is_asgd_to_the_last_bit(bound, other, faults):
    first, model, _ = run(SSPConfig(staleness=bound, learning_rate=0.1), faults=faults)
    second, same, _ = run(other(learning_rate=0.1), faults=faults)
    assert first.given == second.given
    assert first.journal.used == second.journal.used
    assert all(model[name].tobytes() == same[name].tobytes() for name in model)


@pytest.mark.parametrize("bound", [1, 5])
def test_nobody_begins_a_step_further_ahead_of_the_slowest_than_the_bound(bound):
    fleet, _, reason = run(SSPConfig(staleness=bound), updates=120, faults={"b": "slow"})
    assert reason == "updates reached 120"
    assert max(fleet.leads) == bound
    without, _, _ = run(ASGDConfig(), updates=120, faults={"b": "slow"})
    assert max(without.leads) > 5


def test_the_slowest_leaves_the_bound_when_it_dies_and_nobody_waits_for_it():
    fleet, _, _ = run(SSPConfig(staleness=1), updates=100, faults={"b": "slow"})
    dying = Clocks(faults={"b": "slow"})
    dying.at(1.0, lambda: dying.leave("b"))
    run(SSPConfig(staleness=1), updates=100, fleet=dying)
    assert dying.now_s < fleet.now_s / 2


def test_one_that_comes_back_goes_on_at_the_pace_of_the_slowest():
    fleet = Clocks(faults={})
    fleet.at(0.1, lambda: fleet.leave("b"))
    fleet.at(5.0, lambda: fleet.join("b"))
    run(SSPConfig(staleness=1), updates=200, fleet=fleet)
    assert fleet.steps["b"] > 5  # and the others did not wait until it had made up what it missed
    assert fleet.steps["a"] - fleet.steps["b"] > 10


def test_a_board_that_rests_holds_nobody_up_when_the_slowest_has_died():
    strategy = SSPConfig(staleness=1).build(RoundRules())
    state, fleet = strategy.init(first_model()), FaultyFleet(faults={}, names=("a", "b", "c"))

    def asked(*lost):
        nonlocal state
        for order in [order for order in fleet.out.values() if order.device_id in lost]:
            del fleet.out[order.assignment_id]
        state, decision = strategy.assign(state, fleet.view())
        fleet.out |= {order.assignment_id: order for order in decision.orders}
        return [order.device_id for order in decision.orders]

    def answer(name):
        nonlocal state
        (order,) = [order for order in fleet.out.values() if order.device_id == name]
        del fleet.out[order.assignment_id]
        state = strategy.aggregate(strategy.receive(state, fleet.update(order, 1, 0.1)))

    assert asked() == ["a", "b", "c"]
    assert asked("b") == ["b"]
    assert asked("b") == []  # twice lost: it rests
    for expected in (["a"], []):  # two steps ahead of c, a waits
        answer("a")
        assert asked() == expected
    fleet.present.discard("c")
    assert asked("c") == ["a"]


def test_one_that_was_lost_and_answers_late_does_not_stop_the_clocks_when_all_leave():
    strategy, names = SSPConfig(staleness=1).build(RoundRules()), [f"pi-{number:02}" for number in range(12)]
    fleet = FaultyFleet(faults={}, names=names)
    state, decision = strategy.assign(strategy.init(first_model()), fleet.view())
    late = decision.orders[-1]
    fleet.present.discard(late.device_id)
    for _ in range(3):
        fleet.out = {order.assignment_id: order for order in decision.orders if order is not late}
        for order in fleet.out.values():
            state = strategy.aggregate(strategy.receive(state, fleet.update(order, 1, 0.1)))
        fleet.out.clear()
        state, decision = strategy.assign(state, fleet.view())
    assert state.slowest > 1
    state = strategy.receive(state, fleet.update(late, 1, 0.1))  # so late that the slowest is ahead of it
    fleet.present.clear()
    state, decision = strategy.assign(state, fleet.view())
    assert decision.orders == ()
    fleet.present.add(late.device_id)
    state, decision = strategy.assign(state, fleet.view())
    assert [order.device_id for order in decision.orders] == [late.device_id]


def test_one_that_rests_is_not_asked_in_place_of_one_that_has_joined():
    strategy = SSPConfig(staleness=1).build(RoundRules())
    gate, fleet = (
        RunParticipationPolicy(selection=DeviceSelection(unhealthy_policy="rest")),
        FaultyFleet(faults={}, names=("a", "b", "c")),
    )
    fleet.present.discard("c")
    state, decision = strategy.assign(strategy.init(first_model()), gate.eligible_view(fleet.view()))
    fleet.out = {order.assignment_id: order for order in decision.orders}
    (order,) = [order for order in decision.orders if order.device_id == "a"]
    del fleet.out[order.assignment_id]
    state = strategy.aggregate(strategy.receive(state, fleet.update(order, 1, 0.1)))
    fleet.present.add("c")
    view = fleet.view()
    view.health = {"a": HealthMetrics(is_throttled=True)}
    state, decision = strategy.assign(state, gate.eligible_view(view))
    assert "a" not in [order.device_id for order in decision.orders]


def test_a_board_alone_that_was_lost_twice_is_asked_again_when_its_rest_is_over():
    strategy = SSPConfig(staleness=1).build(RoundRules())
    state, given = strategy.init(first_model()), []
    for now_s in (0.0, 10.0, 20.0, 20.5, 80.0):  # whatever it is given is lost at once
        state, decision = strategy.assign(state, view_of("a", now_s=now_s))
        given.append(len(decision.orders))
    assert given == [1, 1, 0, 0, 1]
