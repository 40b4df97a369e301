"""Plain averaging: weights, double buffering, what one step is, and one device alone."""

import numpy as np
import pytest
from paced_fleet import Board, PacedFleet, run, trained
from strategy_turns import begun, update_of, view_of

from edgefl.core.types import (
    Algorithm,
    Dataset,
    ExamplePrivacy,
    TrainConfig,
    TrainInstruction,
    Update,
    UpdateMetrics,
    derive_rng,
)
from edgefl.engine.progress import StoppingCriteria
from edgefl.strategies.participation import DeviceSelection, RunParticipationPolicy
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.strategy_config import RoundRules
from edgefl.strategies.synchronous.fedavg import compute_step_weight
from edgefl.tasks.local_algorithms.local_training import train


def one_round(strategy, moves, num_examples):
    state, orders = begun(strategy, {"w": np.array([10.0, 20.0], np.float32)}, tuple(moves))
    for name, order in orders.items():
        update = update_of(order, {"w": np.array(moves[name], np.float32)}, num_examples=num_examples[name])
        state = strategy.receive(state, update)
    return strategy.model(strategy.aggregate(state))["w"]


def test_fedavg_weighs_by_examples():
    moves = {"a": [4.0, 0.0], "b": [0.0, 8.0]}
    model = one_round(make_strategy("fedavg", {}, RoundRules()), moves, {"a": 100, "b": 300})
    assert model.tolist() == [10.0 + 4.0 / 4, 20.0 + 8.0 * 3 / 4]


def test_ssgd_weighs_everybody_the_same():
    moves = {"a": [4.0, 0.0], "b": [0.0, 8.0]}
    model = one_round(make_strategy("ssgd", {}, RoundRules()), moves, {"a": 100, "b": 300})
    assert model.tolist() == [12.0, 24.0]


def test_ssgd_is_fedavg_with_one_step_and_equal_shards_bit_for_bit():
    rng = np.random.default_rng(3)
    moves = {name: rng.standard_normal(2).tolist() for name in "abcde"}
    fedavg = make_strategy("fedavg", {"iterations": 1, "learning_rate": 0.3}, RoundRules())
    ssgd = make_strategy("ssgd", {"learning_rate": 0.3}, RoundRules())
    assert fedavg.plan == ssgd.plan
    same = dict.fromkeys(moves, 1)
    assert one_round(fedavg, moves, same).tobytes() == one_round(ssgd, moves, same).tobytes()


def test_iterations_replace_epochs_and_every_option_reaches_the_plan():
    options = {"iterations": 4, "epochs": 9.0, "batch_size": 3, "momentum": 0.5, "weight_decay": 0.1}
    plan = make_strategy("fedavg", options, RoundRules()).plan
    assert (plan.iterations, plan.epochs, plan.batch_size, plan.momentum, plan.weight_decay) == (4, None, 3, 0.5, 0.1)


def test_orders_carry_codec_deadline_and_base_version():
    strategy = make_strategy("fedavg", {}, RoundRules(codec="dense|fp16", deadline_s=9.0))
    _, decision = strategy.assign(strategy.init({"w": np.zeros(1)}), view_of("a"))
    (order,) = decision.instructions
    assert (order.codec, order.deadline_s, order.base_version, order.device_id) == ("dense|fp16", 9.0, 0, "a")


def test_fedprox_has_the_proximal_term_and_everything_else_of_fedavg():
    prox = make_strategy("fedprox", {"mu": 0.1, "epochs": 2.0, "momentum": 0.9}, RoundRules())
    average = make_strategy("fedavg", {"epochs": 2.0, "momentum": 0.9}, RoundRules())
    assert (prox.plan.algorithm, dict(prox.plan.options)) == ("prox", {"mu": 0.1})
    assert (prox.plan.epochs, prox.plan.momentum) == (average.plan.epochs, average.plan.momentum)
    assert prox.compute_weight is average.compute_weight


TARGETS = {"a": 1.0, "b": -2.0, "c": 5.0}


def fleet_of(paces, exchange_s=0.0):
    return PacedFleet({name: Board(pace, exchange_s, target=TARGETS[name]) for name, pace in paces.items()})


def ssgd(**options):
    return make_strategy("ssgd", {"learning_rate": 0.25, "double_buffering": True, **options}, RoundRules())


def delayed(num_rounds, names, start):
    """The recursion itself: w_{t+1} = w_t + Δ(w_{t-1}), and both first rounds begin at w_0."""
    models = [np.full(2, start)]
    for number in range(num_rounds):
        base = models[max(0, number - 1)]
        moves = [trained(base, TARGETS[name], 0.25, 1) - base for name in names]
        models.append(models[-1] + sum(moves[1:], moves[0]) / len(moves))
    return models


@pytest.mark.parametrize("paces", [{"a": 1.0}, {"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 0.2, "b": 1.7, "c": 0.9}])
def test_double_buffering_is_sgd_with_a_delay_of_one_step_and_ends_with_all_that_was_computed(paces):
    fleet = fleet_of(paces, exchange_s=0.5)
    state = run(fleet, ssgd(), rounds=6, start=3.0)
    assert state.version == 7  # the round that was in flight at the goal is applied too
    assert state.model["w"].tobytes() == delayed(7, paces, 3.0)[7].tobytes()


def test_rounds_that_are_complete_at_once_still_begin_at_the_model_of_their_turn():
    """Both rounds arrive before the first is closed; the third must begin at the model between them."""
    strategy = ssgd()
    state, models, fleet = strategy.init({"w": np.full(2, 3.0)}), [], fleet_of({"a": 1.0})
    starts, waiting = [], []
    for turn in range(6):
        state, decision = strategy.assign(state, fleet.view())
        assert (decision.next_wake_s == 0.0) == (turn > 0)  # what is complete is closed without another event
        for order in decision.instructions:
            starts.append(strategy.version(state))
            fleet.dispatch([order], _Source(strategy.model(state)))
            waiting.append(fleet.queues["a"].pop())
        for work in waiting:  # all that is out comes back in one breath
            work.done = 1
            state = strategy.receive(state, fleet.update("a", work))
        waiting.clear()
        while strategy.ready(state, fleet.view()):
            state = strategy.aggregate(state)
            models.append(np.array(strategy.model(state)["w"]))
    assert starts[:4] == [0, 0, 1, 2]
    expected = delayed(len(models), "a", 3.0)[1:]
    assert all(np.array_equal(model, other) for model, other in zip(models, expected, strict=True))


class _Source:
    def __init__(self, model):
        self._model = model

    def model(self):
        return self._model


def test_the_last_complete_round_is_not_forgotten_when_the_run_ends_in_the_same_breath():
    fleet = fleet_of({"a": 1.0})
    fleet.at(2.0, list)
    together = fleet.wait

    def wait(until_s):  # both rounds' updates in one batch, as a coordinator that was busy sees them
        events = list(together(until_s))
        while len([e for e in events if hasattr(e, "tensors")]) == 1 and fleet.queues["a"]:
            events += together(until_s)
        return events

    fleet.wait = wait
    state = run(fleet, ssgd(), goal=StoppingCriteria(rounds=1), start=3.0)
    assert state.version == 2
    assert state.model["w"].tobytes() == delayed(2, "a", 3.0)[2].tobytes()


def test_a_device_that_dies_and_one_that_comes_back_neither_block_nor_spoil_two_rounds_at_a_time():
    fleet = fleet_of({"a": 1.0, "b": 1.0, "c": 1.0})
    fleet.at(2.5, lambda: fleet.leave("b"))
    fleet.at(5.5, lambda: fleet.join("b"))
    state = run(fleet, ssgd(), rounds=10)
    assert state.version == 11
    assert {len(names) for names in fleet.journal.aggregates} == {2, 3}
    assert len(fleet.journal.aggregates[-1]) == 3


def test_a_device_whose_update_was_lost_is_not_asked_on_while_it_works_for_the_other_round():
    """A gate lets a device rest, or refuses what it sends; it must come to be idle for that to have an effect."""
    fleet, strategy = fleet_of({"a": 1.0, "b": 1.0}), ssgd()
    ended = fleet.answer

    def answer(name, work):
        if name == "a":
            return ended(name, work)
        lost = fleet.lose(name, work, "refused")
        if fleet.queues[name]:
            fleet.begin(name, fleet.queues[name][0])
        return [lost]

    fleet.answer = answer
    run(fleet, strategy, rounds=4)
    outstanding = [order.base_version for order in fleet.assignments() if order.device_id == "b"]
    assert outstanding.count(0) == 2
    assert 1 not in outstanding


def test_ssgd_is_one_step_unless_it_is_told_otherwise():
    plans = {
        "plain": make_strategy("ssgd", {}, RoundRules()).plan,
        "three": make_strategy("ssgd", {"iterations": 3}, RoundRules()).plan,
        "epochs": make_strategy("ssgd", {"iterations": 0, "epochs": 2.0}, RoundRules()).plan,
        "seconds": make_strategy("ssgd", {"seconds": 4.0}, RoundRules()).plan,
    }
    budgets = {name: (plan.iterations, plan.epochs, plan.seconds) for name, plan in plans.items()}
    assert budgets == {
        "plain": (1, None, None), "three": (3, None, None), "epochs": (None, 2.0, None), "seconds": (None, None, 4.0),
    }  # fmt: skip


def test_double_buffering_sleeps_while_a_finished_round_waits_for_somebody_to_ask():
    strategy = make_strategy("ssgd", {"double_buffering": True}, RoundRules(max_devices=1, min_updates=2))
    state = strategy.init({"w": np.zeros(1)})
    state, first = strategy.assign(state, view_of("a"))
    order = first.instructions[0]
    state.open = state.open[:1]  # nobody had room for a second one
    state = strategy.receive(state, update_of(order, {"w": [1.0]}, num_examples=1, iterations=1))
    state, decision = strategy.assign(state, view_of())  # and now it is gone
    assert not strategy.ready(state, view_of())
    assert (decision.instructions, decision.next_wake_s) == ((), 60.0)


def test_a_board_that_is_to_rest_gets_no_more_work_though_it_is_never_idle():
    fleet = fleet_of({"a": 1.0, "b": 1.0})
    fleet.at(3.5, lambda: fleet.resting.add("a") or [])
    fleet.at(9.5, lambda: fleet.resting.discard("a") or [])
    run(fleet, ssgd(), gate=RunParticipationPolicy(selection=DeviceSelection(unhealthy_policy="rest")), rounds=20)
    asked = [at for at, order in fleet.given if isinstance(order, TrainInstruction) and order.device_id == "a"]
    assert not [at for at in asked if 3.5 < at < 9.5]
    assert max(asked) > 9.5


def test_at_the_barrier_one_that_rests_is_not_asked_again():
    fleet = fleet_of({"a": 1.0, "b": 30.0})
    fleet.at(3.0, lambda: fleet.resting.add("b") or [])
    rules = RoundRules(round_timeout_s=20.0, on_timeout="reassign")
    strategy = make_strategy("ssgd", {"learning_rate": 0.25}, rules)
    run(fleet, strategy, gate=RunParticipationPolicy(selection=DeviceSelection(unhealthy_policy="rest")), rounds=1)
    assert [order.device_id for order in fleet.assignments()] == ["a", "b"]


BOARDS = {"b": Board(1.0, target=2.0, num_examples=7), "a": Board(1.0, target=4.0, num_examples=3), "c": Board(1.0)}


def local(**options):
    return make_strategy("local", {"iterations": 3, "learning_rate": 0.3, **options}, RoundRules(min_devices=2))


def test_the_first_by_name_trains_alone_exactly_as_it_would_without_a_fleet():
    fleet = PacedFleet(dict(BOARDS))
    state = run(fleet, local(), rounds=4)
    assert {order.device_id for order in fleet.assignments()} == {"a"}
    alone = np.zeros(2)
    for _ in range(4):
        alone = alone + (trained(alone, 4.0, 0.3, 3) - alone)
    assert state.model["w"].tobytes() == alone.tobytes()


def test_the_named_device_trains_and_the_others_rest():
    fleet = PacedFleet(dict(BOARDS))
    run(fleet, local(device="b"), rounds=2)
    assert {order.device_id for order in fleet.assignments()} == {"b"}


def test_a_device_that_is_lost_in_a_round_does_not_end_the_run():
    fleet = PacedFleet(dict(BOARDS))
    fleet.at(1.0, lambda: fleet.leave("b"))
    fleet.at(30.0, lambda: fleet.join("b"))
    state = run(fleet, local(device="b"), rounds=2)
    assert state.version == 2
    assert {order.device_id for order in fleet.assignments()} == {"b"}


def test_a_device_that_joins_later_under_an_earlier_name_does_not_take_over():
    fleet = PacedFleet(dict(BOARDS))
    fleet.leave("a")
    fleet.at(1.0, lambda: fleet.join("a"))
    run(fleet, local(), rounds=3)
    assert {order.device_id for order in fleet.assignments()} == {"b"}


class Ramp:
    """A learner whose loss falls by 1 for every unit of the weight: its gradient is always -1."""

    def __init__(self):
        self.parameters, self.gradients = {"w": np.zeros(1)}, {"w": np.zeros(1)}

    def load(self, tensors):
        self.parameters["w"][...] = tensors["w"]

    def read(self):
        return {"w": self.parameters["w"].copy()}

    def gradient(self, batch):
        self.gradients["w"][...] = -1.0
        return 0.0


PLANS = {
    "plain": TrainConfig(),
    "momentum": TrainConfig(momentum=0.9),
    "prox": TrainConfig(algorithm=Algorithm.PROX, options={"mu": 0.5}),
    "prox and momentum": TrainConfig(algorithm=Algorithm.PROX, options={"mu": 0.5}, momentum=0.6),
    "decay": TrainConfig(algorithm=Algorithm.DECAY),
    "gradient": TrainConfig(algorithm=Algorithm.GRADIENT),
}


@pytest.mark.parametrize("iterations", [1, 7])
@pytest.mark.parametrize("name", PLANS)
def test_the_norm_is_how_far_a_board_really_goes_along_a_constant_gradient(name, iterations):
    plan = TrainConfig(**{f: getattr(PLANS[name], f) for f in ("algorithm", "options", "momentum")},
                     iterations=iterations, learning_rate=0.1, batch_size=1)  # fmt: skip
    data = Dataset(inputs=np.zeros((50, 1)), targets=np.zeros(50, np.int64))
    result = train(Ramp(), data, plan, derive_rng(1), clock=lambda: 0.0, on_iteration=lambda *_: False)
    moved = result.displacement["w"][0] / plan.learning_rate
    assert compute_step_weight(plan, iterations) == pytest.approx(moved, rel=1e-12)
    assert compute_step_weight(plan, 0) == pytest.approx(1.0)


def fednova_round(strategy, moves):
    """moves: device -> (displacement, iterations, examples)"""
    state, orders = begun(strategy, {"w": np.zeros(1)}, tuple(moves))
    for name, order in orders.items():
        value, iterations, num_examples = moves[name]
        update = update_of(order, {"w": [value]}, num_examples=num_examples, iterations=iterations)
        state = strategy.receive(state, update)
    return float(strategy.model(strategy.aggregate(state))["w"][0])


def test_a_device_with_more_steps_does_not_pull_harder():
    # Both gradients are ±1 per step: with equal weights they cancel, however many steps were taken.
    nova, average = make_strategy("fednova", {}, RoundRules()), make_strategy("fedavg", {}, RoundRules())
    moves = {"a": (30.0, 30, 10), "b": (-2.0, 2, 10)}
    assert fednova_round(nova, moves) == pytest.approx(0.0)
    assert fednova_round(average, moves) == 14.0


def test_the_step_is_the_mean_number_of_steps_times_the_mean_direction():
    # p = (3/4, 1/4), τ_eff = 3/4·4 + 1/4·2 = 3.5, directions 2 and 1.
    nova = make_strategy("fednova", {}, RoundRules())
    assert fednova_round(nova, {"a": (8.0, 4, 30), "b": (2.0, 2, 10)}) == pytest.approx(3.5 * (3 / 4 * 2 + 1 / 4 * 1))


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"mu": 0.3}])
def test_with_equal_steps_it_is_federated_averaging(options):
    moves = {"a": (8.0, 5, 30), "b": (2.0, 5, 10)}
    nova, average = make_strategy("fednova", options, RoundRules()), make_strategy("fedavg", {}, RoundRules())
    assert fednova_round(nova, moves) == pytest.approx(fednova_round(average, moves))


def test_the_norm_follows_the_learning_rate_of_the_round():
    strategy = make_strategy("fednova", {"mu": 1.0, "learning_rate": 0.5, "schedule": "step:1:0.5"}, RoundRules())
    metrics = UpdateMetrics(iterations=2)
    norms = [
        strategy.compute_norm(Update(assignment_id="x", device_id="a", base_version=v, tensors={}, metrics=metrics))
        for v in (0, 1)
    ]
    assert norms == [pytest.approx(1 + 0.5), pytest.approx(1 + 0.75)]


def test_a_proximal_term_changes_the_plan():
    plan = make_strategy("fednova", {"mu": 0.2}, RoundRules()).plan
    assert (plan.algorithm, plan.options) == ("prox", {"mu": 0.2})
    assert make_strategy("fednova", {}, RoundRules()).plan.algorithm == "sgd"
    assert make_strategy("fednova", {"mu": 0.2, "optimizer": "decay"}, RoundRules()).plan.algorithm == "decay"


def test_an_update_that_counts_no_more_still_says_what_its_board_has_spent_of_privacy():
    privacy = ExamplePrivacy(optimizer="sgd", clip=1.0, epsilon=8.0, delta=1e-5, noise=1.0)
    strategy = make_strategy("fedavg", {}, RoundRules(example_privacy=privacy))
    state, orders = begun(strategy, {"w": [0.0]}, "ab")
    state = strategy.receive(state, update_of(orders["a"], {"w": [1.0]}, num_examples=1, extra={"epsilon": 1.5}))
    state.open.clear()  # its round is closed
    state = strategy.receive(state, update_of(orders["b"], {"w": [1.0]}, num_examples=1, extra={"epsilon": 2.5}))
    assert strategy.facts(state) == {"epsilon": 2.5}
