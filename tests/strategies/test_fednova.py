import numpy as np
import pytest
from paced_fleet import Board, PacedFleet, run

from edgefl.errors import ConfigError
from edgefl.strategies.fednova import step_weight
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.rounds import RoundRules
from edgefl.tasks.local_training import train
from edgefl.types import Algorithm, Dataset, LocalPlan, Update, UpdateMetrics, derived_rng


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
    "plain": LocalPlan(),
    "momentum": LocalPlan(momentum=0.9),
    "prox": LocalPlan(algorithm=Algorithm.PROX, options={"mu": 0.5}),
    "prox and momentum": LocalPlan(algorithm=Algorithm.PROX, options={"mu": 0.5}, momentum=0.6),
    "decay": LocalPlan(algorithm=Algorithm.DECAY),
    "gradient": LocalPlan(algorithm=Algorithm.GRADIENT),
}


@pytest.mark.parametrize("iterations", [1, 2, 7, 40])
@pytest.mark.parametrize("name", PLANS)
def test_the_norm_is_how_far_a_board_really_goes_along_a_constant_gradient(name, iterations):
    plan = LocalPlan(**{f: getattr(PLANS[name], f) for f in ("algorithm", "options", "momentum")},
                     iterations=iterations, learning_rate=0.1, batch_size=1)  # fmt: skip
    data = Dataset(inputs=np.zeros((50, 1)), labels=np.zeros(50, np.int64))
    result = train(Ramp(), data, plan, derived_rng(1), clock=lambda: 0.0, on_iteration=lambda *_: False)
    moved = result.displacement["w"][0] / plan.learning_rate
    assert step_weight(plan, iterations) == pytest.approx(moved, rel=1e-12)


def test_formulas_of_the_paper_by_hand():
    assert step_weight(PLANS["plain"], 5) == 5.0
    # m = 0.5, τ = 2: velocities 1 and 1.5.
    assert step_weight(LocalPlan(momentum=0.5), 2) == 2.5
    # ημ = 0.025: 1 + 0.975.
    plan = LocalPlan(algorithm=Algorithm.PROX, options={"mu": 0.5}, learning_rate=0.05)
    assert step_weight(plan, 2) == pytest.approx(1.975)
    assert step_weight(PLANS["plain"], 0) == 1.0


def one_round(strategy, moves):
    """moves: device -> (displacement, iterations, examples)"""
    state = strategy.init({"w": np.zeros(1)})
    state, decision = strategy.assign(state, PacedFleet({name: Board(1.0) for name in moves}).view())
    for order in decision.orders:
        value, iterations, num_examples = moves[order.device_id]
        update = Update(
            assignment_id=order.assignment_id, device_id=order.device_id, base_version=0,
            tensors={"w": np.array([value])},
            metrics=UpdateMetrics(num_examples=num_examples, iterations=iterations),
        )  # fmt: skip
        state = strategy.receive(state, update)
    return float(strategy.model(strategy.aggregate(state))["w"][0])


def test_a_device_with_more_steps_does_not_pull_harder():
    # Both gradients are ±1 per step: with equal weights they cancel, however many steps were taken.
    nova, average = make_strategy("fednova", {}, RoundRules()), make_strategy("fedavg", {}, RoundRules())
    moves = {"a": (30.0, 30, 10), "b": (-2.0, 2, 10)}
    assert one_round(nova, moves) == pytest.approx(0.0)
    assert one_round(average, moves) == 14.0


def test_the_step_is_the_mean_number_of_steps_times_the_mean_direction():
    # p = (3/4, 1/4), τ_eff = 3/4·4 + 1/4·2 = 3.5, directions 2 and 1.
    nova = make_strategy("fednova", {}, RoundRules())
    assert one_round(nova, {"a": (8.0, 4, 30), "b": (2.0, 2, 10)}) == pytest.approx(3.5 * (3 / 4 * 2 + 1 / 4 * 1))


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"mu": 0.3}])
def test_with_equal_steps_it_is_federated_averaging(options):
    moves = {"a": (8.0, 5, 30), "b": (2.0, 5, 10)}
    nova, average = make_strategy("fednova", options, RoundRules()), make_strategy("fedavg", {}, RoundRules())
    assert one_round(nova, moves) == pytest.approx(one_round(average, moves))


def test_the_norm_follows_the_learning_rate_of_the_round():
    strategy = make_strategy("fednova", {"mu": 1.0, "learning_rate": 0.5, "schedule": "step:1:0.5"}, RoundRules())
    metrics = UpdateMetrics(iterations=2)
    norms = [
        strategy.norm(Update(assignment_id="x", device_id="a", base_version=v, tensors={}, metrics=metrics))
        for v in (0, 1)
    ]
    assert norms == [pytest.approx(1 + 0.5), pytest.approx(1 + 0.75)]


def test_a_proximal_term_changes_the_plan():
    plan = make_strategy("fednova", {"mu": 0.2}, RoundRules()).plan
    assert (plan.algorithm, plan.options) == ("prox", {"mu": 0.2})
    assert make_strategy("fednova", {}, RoundRules()).plan.algorithm == "sgd"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adam"}, "strategy.optimizer: fednova can normalise sgd, prox, .* got 'adam'"),
        ({"momentum": 0.9, "keep_optimizer": True}, "strategy.keep_optimizer: fednova cannot normalise"),
        ({"momentum": 1.0}, "strategy.momentum must be below 1 for fednova, got 1"),
        ({"mu": 40.0, "learning_rate": 0.05}, "strategy.mu times strategy.learning_rate must be below 2 for fednova"),
        ({"mu": -1.0}, "strategy.mu must be a number of 0 or more, got -1"),
    ],
)
def test_what_cannot_be_normalised_is_refused_before_the_run(options, message):
    with pytest.raises(ConfigError, match=message):
        make_strategy("fednova", options, RoundRules())


def test_unequal_boards_reach_the_middle_of_their_optima_where_averaging_does_not():
    ends = {}
    for name in ("fednova", "fedavg"):
        fleet = PacedFleet({"a": Board(1.0, target=1.0), "b": Board(1.0, target=-1.0)})
        strategy = make_strategy(name, {"iterations": 1, "learning_rate": 0.05}, RoundRules())
        given = fleet.step
        # a does ten steps to b's one, as a board that is faster would within `seconds`.
        fleet.step = lambda who, work, spent_s, given=given: _steps(given, who, work, spent_s)
        ends[name] = float(run(fleet, strategy, rounds=200, start=0.3).model["w"][0])
    assert abs(ends["fednova"]) < 0.15
    assert ends["fedavg"] > 0.5


def _steps(step, who, work, spent_s):
    work.done += 9 if who == "a" else 0
    return step(who, work, spent_s)
