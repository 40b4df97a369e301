"""Asynchronous SGD: every update as it comes, compensated for its delay, or within a bound of steps."""

import numpy as np
import pytest
from faulty_fleet import FaultyFleet, first_model
from strategy_turns import begun, moved, view_of

from edgefl.compression.codec import make_codec
from edgefl.core.types import HealthMetrics, SparseTensor, TensorSpec
from edgefl.engine.progress import StoppingCriteria
from edgefl.engine.round_loop import run_rounds
from edgefl.strategies.aggregation import ServerOptimizer
from edgefl.strategies.asynchronous.asgd import (
    ASGDConfig,
    DCASGDConfig,
    SSPConfig,
    apply_delay_compensation,
    compute_adaptive_strength,
    update_mean_square,
)
from edgefl.strategies.participation import DeviceSelection, EvaluationSchedule, RunParticipationPolicy
from edgefl.strategies.strategy_config import RoundRules
from edgefl.strategies.synchronous.fedavg import SSGDConfig


def after(strategy, start, *moves):
    """Applies one displacement for each of the two devices, both from the first version."""
    state, orders = begun(strategy, {"w": start}, "ab")
    for order, move in zip(orders.values(), moves, strict=True):
        state = moved(strategy, state, order, {"w": move})
    return state.model["w"]


def test_displacements_are_added_whole_however_old_they_are():
    strategy = ASGDConfig(step_scale=1.0).build(RoundRules())
    found = after(strategy, np.array([1.0, 2.0]), np.array([0.5, 0.0]), np.array([0.25, -1.0]))
    assert found.tolist() == [1.75, 1.0]


def test_a_sparse_displacement_moves_only_the_entries_that_it_has():
    strategy = ASGDConfig(step_scale=1.0).build(RoundRules())
    sparse = SparseTensor(indices=np.array([1, 5]), values=np.array([1.0, 2.0], np.float32), shape=(2, 3))
    nothing = SparseTensor(indices=np.array([], np.int64), values=np.array([], np.float32), shape=(2, 3))
    found = after(strategy, np.zeros((2, 3), np.float32), sparse, nothing)
    assert found.tolist() == [[0, 1, 0], [0, 0, 2]]


def test_the_server_optimiser_takes_each_displacement_for_a_gradient():
    strategy = ASGDConfig(step_scale=1.0).build(RoundRules(server=ServerOptimizer(kind="momentum", beta1=0.5)))
    assert after(strategy, np.array([0.0]), np.array([1.0]), np.array([1.0])).tolist() == [1.0 + 1.5]


@pytest.mark.parametrize("settings", [ASGDConfig(), DCASGDConfig(compensation=0.0), SSPConfig(staleness=2)])
def test_by_default_one_of_n_devices_moves_the_model_by_an_nth(settings):
    start = np.zeros((2, 3), np.float32)
    sparse = SparseTensor(indices=np.array([1, 5]), values=np.array([1.0, 2.0], np.float32), shape=(2, 3))
    found = after(settings.build(RoundRules()), start, sparse, np.full((2, 3), 4.0, np.float32))
    assert found.dtype == np.float32
    assert found.tolist() == [[2, 2.5, 2], [2, 2, 3]]


def test_the_part_of_a_step_follows_those_at_work_and_not_those_that_have_just_answered():
    strategy = ASGDConfig().build(RoundRules(max_devices=3))
    state = strategy.init({"w": np.zeros(1)})
    state, decision = strategy.assign(state, view_of(*"abcdefgh"))
    assert strategy.compute_step_scale(state) == 1 / 3
    for order in decision.instructions:  # one after the other, with no assignment in between
        state = moved(strategy, state, order, {"w": np.array([3.0])})
    assert state.model["w"].tolist() == [3.0]
    state, _ = strategy.assign(state, view_of("a"))
    assert strategy.compute_step_scale(state) == 1.0


ABC = ("a", "b", "c")


def asked(settings, start):
    strategy = settings.build(RoundRules())
    return strategy, *begun(strategy, {"w": start}, ABC)


def stepped(strategy, state, order, displacement):
    return moved(strategy, state, order, {"w": displacement})


def test_the_adaptive_form_is_that_of_the_spec():  # E7
    squares = update_mean_square(None, np.array([-0.05]), 0.1, 0.95)
    strength = compute_adaptive_strength(squares, 2.0)
    step = apply_delay_compensation(np.array([-0.05]), np.array([1.0]), np.array([0.8]), strength, 0.1)
    assert squares[0] == pytest.approx(0.0125)
    assert strength[0] == pytest.approx(17.8885, abs=1e-4)
    assert 1.0 + step[0] == pytest.approx(0.860558, abs=1e-6)


@pytest.mark.parametrize(("variant", "expected"), [("constant", 0.9498), ("adaptive", 0.860558)])
def test_a_run_takes_the_backup_of_the_version_that_the_device_began_with(variant, expected):
    strategy, state, orders = asked(DCASGDConfig(step_scale=1.0, variant=variant, learning_rate=0.1), [0.8])
    state = stepped(strategy, state, orders["a"], [0.2])  # no delay: asgd's step
    assert state.model["w"][0] == pytest.approx(1.0)
    state = stepped(strategy, state, orders["b"], [-0.05])
    assert state.model["w"][0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("bits", "growth"), [(8, 1.001), (4, 1.38)])
def test_behind_qsgd_it_takes_the_mean_step_of_dc_qsgd_with_squares_as_much_larger_as_the_pages_say(bits, growth):
    size, rate, strength, repeats = 4096, 0.1, 0.3, 400
    luck = np.random.default_rng(3)
    gradient, drift = (luck.normal(size=size).astype(np.float32) for _ in range(2))
    codec = make_codec(f"qsgd:{bits}", (TensorSpec(name="w", shape=(size,)),))
    steps = np.zeros(size)
    for _ in range(repeats):
        sent = codec.decode(codec.encode({"w": -rate * gradient}, luck))["w"]
        steps += apply_delay_compensation(np.array(sent), drift, np.zeros_like(drift), strength, rate)
    # The worker's own: g + λ g⊙g⊙ΔW, rounded at random afterwards, which changes no mean.
    theirs = -rate * (gradient + strength * np.square(gradient) * drift)
    ours = steps / repeats
    compensation = strength * rate * np.square(gradient, dtype=np.float64) * drift
    assert (-rate * gradient - ours) @ drift / (compensation @ drift) == pytest.approx(growth, abs=0.03)
    assert np.linalg.norm(ours - theirs) < (0.02 if bits == 8 else 0.2) * np.linalg.norm(theirs)


def test_the_mean_square_is_kept_by_device():
    strategy, state, orders = asked(
        DCASGDConfig(step_scale=1.0, variant="adaptive", learning_rate=0.1, mean_square_decay=0.5), [0.0]
    )
    state = stepped(strategy, state, orders["a"], [-0.1])
    state = stepped(strategy, state, orders["b"], [-0.2])
    assert state.mean_squares["a"]["w"][0] == pytest.approx(0.5)
    assert state.mean_squares["b"]["w"][0] == pytest.approx(2.0)
    _, decision = strategy.assign(state, view_of("a", busy={"b": ["x"], "c": [orders["c"].assignment_id]}))
    state = stepped(strategy, state, decision.instructions[0], [-0.3])
    assert state.mean_squares["a"]["w"][0] == pytest.approx(0.5 * 0.5 + 0.5 * 9)


def test_mxnets_form_knows_only_the_step_of_whoever_came_last():
    strategy, state, orders = asked(
        DCASGDConfig(step_scale=1.0, variant="mxnet", compensation=0.1, learning_rate=1.0), [0.0]
    )
    for name in ABC:
        state = stepped(strategy, state, orders[name], [1.0])
    # 1; then 1 - 0.1 * (1 - 0); then 1 - 0.1 * (1.9 - 1), although c began at 0.
    assert state.model["w"][0] == pytest.approx(1.0 + 0.9 + 0.91)


@pytest.mark.parametrize("variant", ["constant", "adaptive", "mxnet"])
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_without_compensation_it_is_asgd_to_the_last_bit(variant, dtype):
    rng = np.random.default_rng(3)
    start = rng.standard_normal(50).astype(dtype)
    turns = []
    for turn in range(6):
        dense = (0.1 * rng.standard_normal(50)).astype(dtype)
        sparse = SparseTensor(indices=np.arange(0, 50, 3), values=dense[::3], shape=(50,))
        turns.append(sparse if turn % 2 else dense)
    plain = in_turn(ASGDConfig(step_scale=1.0, learning_rate=0.1), start, turns)
    other = in_turn(DCASGDConfig(step_scale=1.0, variant=variant, compensation=0.0, learning_rate=0.1), start, turns)
    assert plain.model["w"].tobytes() == other.model["w"].tobytes()
    assert not other.backups


def in_turn(settings, start, displacements):
    """Returns the state after so many answers of a, b, c, a, ... each of whom is asked again at once."""
    strategy, state, orders = asked(settings, start)
    for turn, displacement in enumerate(displacements):
        name = ABC[turn % 3]
        state = stepped(strategy, state, orders[name], displacement)
        busy = {other: [orders[other].assignment_id] for other in ABC if other != name}
        state, decision = strategy.assign(state, view_of(name, busy=busy))
        (orders[name],) = decision.instructions
    return state


def test_a_learning_rate_of_nothing_divides_by_nothing():
    strategy, state, orders = asked(DCASGDConfig(learning_rate=0.0), [0.8])
    state = stepped(strategy, state, orders["a"], [0.0])
    assert state.model["w"].tolist() == [0.8]


def test_what_is_kept_for_a_device_goes_with_it():
    strategy, state, orders = asked(DCASGDConfig(step_scale=1.0, variant="adaptive"), [0.0])
    state = stepped(strategy, state, orders["a"], [0.1])
    assert set(state.mean_squares) == {"a"}
    assert set(state.backups) == {0}
    for _ in range(3):
        state, _ = strategy.assign(state, view_of())
    assert (state.mean_squares, state.backups) == ({}, {})


@pytest.mark.parametrize(("variant", "expected"), [("constant", 1000), ("adaptive", 2000), ("mxnet", 0)])
def test_the_bytes_of_each_device_are_declared(variant, expected):
    assert DCASGDConfig(variant=variant).build(RoundRules()).bytes_per_device(1000) == expected
    assert DCASGDConfig(variant=variant, compensation=0.0).build(RoundRules()).bytes_per_device(1000) == 0


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
    strategy = SSPConfig(step_scale=1.0, staleness=1).build(RoundRules())
    state, fleet = strategy.init(first_model()), FaultyFleet(faults={}, names=("a", "b", "c"))

    def asked(*lost):
        nonlocal state
        for order in [order for order in fleet.out.values() if order.device_id in lost]:
            del fleet.out[order.assignment_id]
        state, decision = strategy.assign(state, fleet.view())
        fleet.out |= {order.assignment_id: order for order in decision.instructions}
        return [order.device_id for order in decision.instructions]

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
    strategy, names = (
        SSPConfig(step_scale=1.0, staleness=1).build(RoundRules()),
        [f"pi-{number:02}" for number in range(12)],
    )
    fleet = FaultyFleet(faults={}, names=names)
    state, decision = strategy.assign(strategy.init(first_model()), fleet.view())
    late = decision.instructions[-1]
    fleet.present.discard(late.device_id)
    for _ in range(3):
        fleet.out = {order.assignment_id: order for order in decision.instructions if order is not late}
        for order in fleet.out.values():
            state = strategy.aggregate(strategy.receive(state, fleet.update(order, 1, 0.1)))
        fleet.out.clear()
        state, decision = strategy.assign(state, fleet.view())
    assert state.slowest > 1
    state = strategy.receive(state, fleet.update(late, 1, 0.1))  # so late that the slowest is ahead of it
    fleet.present.clear()
    state, decision = strategy.assign(state, fleet.view())
    assert decision.instructions == ()
    fleet.present.add(late.device_id)
    state, decision = strategy.assign(state, fleet.view())
    assert [order.device_id for order in decision.instructions] == [late.device_id]


def test_one_that_rests_is_not_asked_in_place_of_one_that_has_joined():
    strategy = SSPConfig(step_scale=1.0, staleness=1).build(RoundRules())
    gate, fleet = (
        RunParticipationPolicy(selection=DeviceSelection(unhealthy_policy="rest")),
        FaultyFleet(faults={}, names=("a", "b", "c")),
    )
    fleet.present.discard("c")
    state, decision = strategy.assign(strategy.init(first_model()), gate.eligible_view(fleet.view()))
    fleet.out = {order.assignment_id: order for order in decision.instructions}
    (order,) = [order for order in decision.instructions if order.device_id == "a"]
    del fleet.out[order.assignment_id]
    state = strategy.aggregate(strategy.receive(state, fleet.update(order, 1, 0.1)))
    fleet.present.add("c")
    view = fleet.view()
    view.health = {"a": HealthMetrics(is_throttled=True)}
    state, decision = strategy.assign(state, gate.eligible_view(view))
    assert "a" not in [order.device_id for order in decision.instructions]


def test_a_board_alone_that_was_lost_twice_is_asked_again_when_its_rest_is_over():
    strategy = SSPConfig(step_scale=1.0, staleness=1).build(RoundRules())
    state, given = strategy.init(first_model()), []
    for now_s in (0.0, 10.0, 20.0, 20.5, 80.0):  # whatever it is given is lost at once
        state, decision = strategy.assign(state, view_of("a", now_s=now_s))
        given.append(len(decision.instructions))
    assert given == [1, 1, 0, 0, 1]
