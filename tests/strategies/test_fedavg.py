from types import SimpleNamespace

import numpy as np
import pytest

from edgefl.errors import ConfigError
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.rounds import RoundRules
from edgefl.types import Update, UpdateMetrics


def view(*idle, busy=()):
    return SimpleNamespace(now_s=0.0, devices={}, idle=list(idle), busy=dict(busy), speeds={}, progress={})


def one_round(strategy, moves, num_examples):
    state = strategy.init({"w": np.array([10.0, 20.0], np.float32)})
    state, decision = strategy.assign(state, view(*moves))
    for order in decision.orders:
        update = Update(
            assignment_id=order.assignment_id,
            device_id=order.device_id,
            base_version=0,
            tensors={"w": np.array(moves[order.device_id], np.float32)},
            metrics=UpdateMetrics(num_examples=num_examples[order.device_id]),
        )
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


def test_a_device_without_examples_still_counts():
    model = one_round(make_strategy("fedavg", {}, RoundRules()), {"a": [2.0, 2.0], "b": [4.0, 4.0]}, {"a": 0, "b": 0})
    assert model.tolist() == [13.0, 23.0]


def test_iterations_replace_epochs_and_every_option_reaches_the_plan():
    options = {"iterations": 4, "epochs": 9.0, "batch_size": 3, "momentum": 0.5, "weight_decay": 0.1}
    plan = make_strategy("fedavg", options, RoundRules()).plan
    assert (plan.iterations, plan.epochs, plan.batch_size, plan.momentum, plan.weight_decay) == (4, None, 3, 0.5, 0.1)


def test_orders_carry_codec_deadline_and_base_version():
    strategy = make_strategy("fedavg", {}, RoundRules(codec="dense|fp16", deadline_s=9.0))
    _, decision = strategy.assign(strategy.init({"w": np.zeros(1)}), view("a"))
    (order,) = decision.orders
    assert (order.codec, order.deadline_s, order.base_version, order.device_id) == ("dense|fp16", 9.0, 0, "a")


@pytest.mark.parametrize(
    "options", [{"iterations": 0}, {"epochs": 0.0}, {"batch_size": -1}, {"learning_rate": -0.1}, {"momentum": -1.0}]
)
def test_settings_that_no_device_could_follow_are_refused_before_the_run(options):
    with pytest.raises(ConfigError, match=f"strategy.{next(iter(options))} must be"):
        make_strategy("fedavg", options, RoundRules())
