"""`fedasync`: a share of each device's model is mixed in, less of it the older it is."""

from types import SimpleNamespace

import numpy as np
import pytest

from edgefl.errors import ConfigError
from edgefl.strategies.fedasync import FedAsync
from edgefl.strategies.rounds import RoundRules
from edgefl.types import DeviceInfo, Update, UpdateMetrics

AB = ("a", "b")
VIEW = SimpleNamespace(
    now_s=0.0, devices={name: DeviceInfo(device_id=name) for name in AB}, idle=list(AB), busy={},
    speeds={}, progress={}, vitals={},
)  # fmt: skip


def begun(start, **options):
    strategy = FedAsync(**options).build(RoundRules())
    state, decision = strategy.assign(strategy.init({"w": np.asarray(start)}), VIEW)
    return strategy, state, {order.device_id: order for order in decision.orders}


def moved(strategy, state, order, displacement):
    update = Update(
        assignment_id=order.assignment_id, device_id=order.device_id, base_version=order.base_version,
        tensors={"w": np.asarray(displacement)}, metrics=UpdateMetrics(),
    )  # fmt: skip
    return strategy.aggregate(strategy.receive(state, update))


def test_the_model_goes_a_share_of_the_way_to_the_devices_own():
    strategy, state, orders = begun([1.0], alpha=0.5, staleness="constant")
    state = moved(strategy, state, orders["a"], [1.0])  # a's model is 2
    assert state.model["w"][0] == pytest.approx(1.5)
    state = moved(strategy, state, orders["b"], [-1.0])  # b's is 0: it began at 1, not at 1.5
    assert state.model["w"][0] == pytest.approx(0.75)


def test_whatever_the_drift_the_share_is_of_the_models_and_not_of_the_displacement():
    strategy, state, orders = begun([1.0], alpha=1.0, staleness="constant")
    for name, displacement in (("a", 3.0), ("b", -5.0)):
        state = moved(strategy, state, orders[name], [displacement])
        assert state.model["w"][0] == pytest.approx(1.0 + displacement)


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
    strategy = FedAsync(alpha=0.6, **options).build(RoundRules())
    assert {delay: strategy.share(delay) for delay in delays} == pytest.approx(delays)


def test_a_full_share_without_delay_is_the_displacement_to_the_last_bit():
    rng = np.random.default_rng(0)
    start, displacement = rng.standard_normal((2, 30)).astype(np.float32)
    strategy, state, orders = begun(start, alpha=1.0)
    assert moved(strategy, state, orders["a"], displacement).model["w"].tobytes() == (start + displacement).tobytes()


def test_models_are_kept_while_somebody_works_on_them():
    strategy, state, orders = begun([0.0])
    assert set(state.models) == {0}
    state = moved(strategy, state, orders["a"], [1.0])
    assert set(state.models) == {0}
    state = moved(strategy, state, orders["b"], [1.0])
    assert set(state.models) == set()
    assert strategy.bytes_per_device(1000) == 1000


def test_the_proximal_term_of_the_paper_is_done_by_the_devices():
    plan = FedAsync(mu=0.01).plan()
    assert (plan.algorithm, plan.options) == ("prox", {"mu": 0.01})
    assert FedAsync().plan().algorithm == "sgd"
    with pytest.raises(ConfigError, match=r"strategy\.mu needs strategy\.optimizer = 'sgd', got 'adam'"):
        FedAsync(mu=0.01, optimizer="adam").plan()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.0}, r"strategy.alpha must be in \(0, 1\], got 0.0"),
        ({"staleness": "linear"}, "strategy.staleness must be one of constant, polynomial, hinge, got 'linear'"),
        ({"staleness_a": -1.0}, "strategy.staleness_a must be a number of 0 or more, got -1.0"),
        ({"staleness_b": -1.0}, "strategy.staleness_b must be a number of 0 or more, got -1.0"),
        ({"mu": -1.0}, "strategy.mu must be a number of 0 or more, got -1.0"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        FedAsync(**options).build(RoundRules())
