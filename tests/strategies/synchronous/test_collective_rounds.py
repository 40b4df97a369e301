"""Rounds whose devices add up their updates: groups, what counts of their replies, and a lost result."""

from types import SimpleNamespace

import numpy as np
import pytest
from strategy_turns import update_of, view_of

from edgefl.core.errors import StrategyError
from edgefl.core.types import NUM_REDUCTIONS
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.strategy_config import CollectiveRules, RoundRules

MODEL = {"w": np.zeros(2, np.float32)}


def begin(*names, collective="ring", reductions=2, strategy="fedavg", hosts=None):
    rules = RoundRules(
        collective=CollectiveRules(collective=collective, reductions=reductions, hosts=hosts or {}),
        round_timeout_s=10.0,
    )
    strategy = make_strategy(strategy, {}, rules)
    state, decision = strategy.assign(strategy.init(MODEL), view_of(*names))
    return strategy, state, {order.device_id: order for order in decision.instructions}


def answer(strategy, state, order, tensors, count, **metrics):
    return strategy.receive(state, update_of(order, tensors, extra={NUM_REDUCTIONS: float(count)}, **metrics))


def test_a_round_makes_one_group_whose_members_upload_in_turns():
    strategy, state, orders = begin("a", "b", "c", hosts={"a": "h:1"})
    (plan,) = {order.plan.collective for order in orders.values()}
    assert (plan.members, plan.uploader, plan.group) == (("a", "b", "c"), "a", "v0-a1")
    assert (plan.collective, plan.reductions, plan.weighting) == ("ring", 2, "examples")
    assert plan.addresses == ("h:1", "", "")
    for name, order in orders.items():
        state = answer(strategy, state, order, {"w": [1.0, 2.0]} if name == "a" else {}, 2)
    assert strategy.ready(state, view_of("a", "b", "c"))
    state = strategy.aggregate(state)
    assert strategy.model(state)["w"].tolist() == [1.0, 2.0]
    assert strategy.used(state) == tuple(order.assignment_id for order in orders.values())
    state, decision = strategy.assign(state, view_of("a", "b", "c"))
    assert decision.instructions[0].plan.collective.uploader == "b"
    assert begin("a", "b", strategy="ssgd")[2]["a"].plan.collective.weighting == "uniform"


@pytest.mark.parametrize(
    ("name", "num_members", "expected"),
    [
        ("butterfly", 4, "butterfly"),
        ("butterfly", 3, "binary-blocks"),
        ("binary-blocks", 4, "butterfly"),
        ("auto", 3, "binary-blocks"),
    ],
)
def test_the_collective_fits_the_number_of_members(name, num_members, expected):
    assert begin(*"abcd"[:num_members], collective=name)[2]["a"].plan.collective.collective == expected


def test_a_group_that_broke_counts_those_with_most_reductions_and_no_update_twice():
    strategy, state, orders = begin("a", "b", "c")
    state = answer(strategy, state, orders["a"], {"w": [1.0, 1.0]}, 0, num_examples=10)
    state = answer(strategy, state, orders["b"], {"w": [2.0, 2.0]}, 1, num_examples=10)
    state = answer(strategy, state, orders["c"], {"w": [6.0, 6.0]}, 1, num_examples=30)
    state = strategy.aggregate(state)
    assert strategy.model(state)["w"].tolist() == [5.0, 5.0]
    assert strategy.used(state) == (orders["b"].assignment_id, orders["c"].assignment_id)


def test_a_displacement_lost_with_its_uploader_is_asked_of_another_member_and_counts_once():
    strategy, state, orders = begin("a", "b", "c")
    for name in "bc":
        state = answer(strategy, state, orders[name], {}, 2)
    assert not strategy.ready(state, view_of("b", "c"))
    state, decision = strategy.assign(state, view_of("b", "c"))
    (order,) = decision.instructions
    assert (order.device_id, order.plan.collective.resend) == ("b", orders["b"].assignment_id)
    state, decision = strategy.assign(state, view_of("c", busy={"b": [order.assignment_id]}))
    assert decision.instructions == ()
    state = answer(strategy, state, order, {"w": [3.0, 3.0]}, 2)
    assert strategy.ready(state, view_of("b", "c"))
    state = strategy.aggregate(state)
    assert strategy.model(state)["w"].tolist() == [3.0, 3.0]
    assert strategy.used(state) == (orders["c"].assignment_id, order.assignment_id)


def test_when_nobody_holds_it_any_more_all_train_again_and_late_answers_change_nothing():
    strategy, state, orders = begin("a", "b")
    state = answer(strategy, state, orders["b"], {}, 2)
    state, decision = strategy.assign(state, view_of("b"))
    assert decision.instructions[0].plan.collective.resend
    state, decision = strategy.assign(state, view_of("a", "b"))
    assert [order.plan.collective.resend for order in decision.instructions] == ["", ""]
    fresh = {order.device_id: order for order in decision.instructions}
    state = answer(strategy, state, orders["a"], {"w": [9.0, 9.0]}, 2)
    assert not strategy.ready(state, view_of("a", "b"))
    for name in "ab":
        state = answer(strategy, state, fresh[name], {"w": [1.0, 1.0]}, 2)
    state = strategy.aggregate(state)
    assert strategy.model(state)["w"].tolist() == [1.0, 1.0]
    assert set(strategy.used(state)) == {order.assignment_id for order in fresh.values()}


def test_a_claim_of_more_reductions_than_asked_for_is_cut():
    strategy, state, orders = begin("a", "b")
    state = answer(strategy, state, orders["a"], {"w": [1.0, 1.0]}, 1e9)
    state = answer(strategy, state, orders["b"], {"w": [1.0, 1.0]}, 2)
    assert len(strategy.used(strategy.aggregate(state))) == 2


def test_esync_gives_budgets_by_speed_alone_since_an_all_reduce_ends_for_all_at_once():
    rules = RoundRules(collective=CollectiveRules(collective="ring", reductions=3))
    strategy = make_strategy("esync", {}, rules)
    state = strategy.init(MODEL)
    for name, seconds, wait_s in (("fast", 1.0, 9.0), ("slow", 4.0, 1.0)):
        order = SimpleNamespace(assignment_id=name, device_id=name, base_version=0)
        strategy.on_update(state, None, update_of(order, {}, iterations=1, compute_s=seconds, send_s=wait_s))
    plans = strategy.make_plans(state, strategy.plan, ["fast", "slow"], view_of("fast", "slow"))
    assert [plans[name].iterations for name in ("fast", "slow")] == [4, 1]
    assert state.planned_s == 13.0


def test_more_members_than_a_collective_takes_are_refused_in_one_line():
    with pytest.raises(StrategyError, match=r"at most 128 devices in a round, got 129: set devices\.count"):
        begin(*(f"d{number}" for number in range(129)))
