import numpy as np
from strategy_turns import begun, update_of, view_of

from edgefl.strategies.registry import make_strategy
from edgefl.strategies.synchronous.strategy import RoundRules


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
    (order,) = decision.orders
    assert (order.codec, order.deadline_s, order.base_version, order.device_id) == ("dense|fp16", 9.0, 0, "a")


def test_fedprox_has_the_proximal_term_and_everything_else_of_fedavg():
    prox = make_strategy("fedprox", {"mu": 0.1, "epochs": 2.0, "momentum": 0.9}, RoundRules())
    average = make_strategy("fedavg", {"epochs": 2.0, "momentum": 0.9}, RoundRules())
    assert (prox.plan.algorithm, dict(prox.plan.options)) == ("prox", {"mu": 0.1})
    assert (prox.plan.epochs, prox.plan.momentum) == (average.plan.epochs, average.plan.momentum)
    assert prox.compute_weight is average.compute_weight
