import numpy as np
import pytest
from strategy_turns import begun, update_of

from edgefl.core.types import Algorithm, Dataset, TrainConfig, Update, UpdateMetrics, derive_rng
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.strategy_config import RoundRules
from edgefl.strategies.synchronous.fednova import compute_step_weight
from edgefl.tasks.local_algorithms.local_training import train


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
    data = Dataset(inputs=np.zeros((50, 1)), labels=np.zeros(50, np.int64))
    result = train(Ramp(), data, plan, derive_rng(1), clock=lambda: 0.0, on_iteration=lambda *_: False)
    moved = result.displacement["w"][0] / plan.learning_rate
    assert compute_step_weight(plan, iterations) == pytest.approx(moved, rel=1e-12)
    assert compute_step_weight(plan, 0) == pytest.approx(1.0)


def one_round(strategy, moves):
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
        strategy.compute_norm(Update(assignment_id="x", device_id="a", base_version=v, tensors={}, metrics=metrics))
        for v in (0, 1)
    ]
    assert norms == [pytest.approx(1 + 0.5), pytest.approx(1 + 0.75)]


def test_a_proximal_term_changes_the_plan():
    plan = make_strategy("fednova", {"mu": 0.2}, RoundRules()).plan
    assert (plan.algorithm, plan.options) == ("prox", {"mu": 0.2})
    assert make_strategy("fednova", {}, RoundRules()).plan.algorithm == "sgd"
    assert make_strategy("fednova", {"mu": 0.2, "optimizer": "decay"}, RoundRules()).plan.algorithm == "decay"
