"""`fedasync`: a share of each device's model is mixed in, less of it the older it is."""

import numpy as np
import pytest
from strategy_turns import begun, moved

from edgefl.strategies.asynchronous.fedasync import FedAsyncConfig
from edgefl.strategies.synchronous.strategy import RoundRules


def asked(start, **options):
    strategy = FedAsyncConfig(**options).build(RoundRules())
    return strategy, *begun(strategy, {"w": start}, "ab")


def mixed(strategy, state, order, displacement):
    return moved(strategy, state, order, {"w": displacement})


def test_the_model_goes_a_share_of_the_way_to_the_devices_own():
    strategy, state, orders = asked([1.0], alpha=0.5, staleness="constant")
    state = mixed(strategy, state, orders["a"], [1.0])  # a's model is 2
    assert state.model["w"][0] == pytest.approx(1.5)
    state = mixed(strategy, state, orders["b"], [-1.0])  # b's is 0: it began at 1, not at 1.5
    assert state.model["w"][0] == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("options", "delays"),
    [
        ({"staleness": "constant"}, {0: 0.6, 9: 0.6}),
        ({"staleness": "polynomial"}, {0: 0.6, 3: 0.3, 8: 0.2}),
        ({"staleness": "polynomial", "staleness_a": 1.0}, {1: 0.3, 2: 0.2}),
        ({"staleness": "hinge"}, {0: 0.6, 4: 0.6, 5: 0.6 / 11, 6: 0.6 / 21}),
        ({"staleness": "hinge", "staleness_a": 1.0, "staleness_b": 0.0}, {0: 0.6, 1: 0.3, 2: 0.2}),
    ],
)
def test_the_share_falls_with_the_delay_as_the_paper_says(options, delays):
    strategy = FedAsyncConfig(alpha=0.6, **options).build(RoundRules())
    assert {delay: strategy.compute_mixing_weight(delay) for delay in delays} == pytest.approx(delays)


def test_a_full_share_without_delay_is_the_displacement_to_the_last_bit():
    rng = np.random.default_rng(0)
    start, displacement = rng.standard_normal((2, 30)).astype(np.float32)
    strategy, state, orders = asked(start, alpha=1.0)
    assert mixed(strategy, state, orders["a"], displacement).model["w"].tobytes() == (start + displacement).tobytes()


def test_models_are_kept_while_somebody_works_on_them():
    strategy, state, orders = asked([0.0])
    assert set(state.models) == {0}
    state = mixed(strategy, state, orders["a"], [1.0])
    assert set(state.models) == {0}
    state = mixed(strategy, state, orders["b"], [1.0])
    assert set(state.models) == set()
    assert strategy.bytes_per_device(1000) == 1000


def test_the_proximal_term_of_the_paper_is_done_by_the_devices():
    plan = FedAsyncConfig(mu=0.01).plan()
    assert (plan.algorithm, plan.options) == ("prox", {"mu": 0.01})
    assert FedAsyncConfig().plan().algorithm == "sgd"
