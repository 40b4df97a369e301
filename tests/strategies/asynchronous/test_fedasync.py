"""Asynchronous federated averaging: mixing model by model, and in buffers of K updates."""

from dataclasses import replace

import numpy as np
import pytest
from strategy_turns import begun, moved, update_of, view_of

from edgefl.strategies.aggregation import QueuedUpdate, ServerOptimizer
from edgefl.strategies.asynchronous.fedasync import FedAsyncConfig, FedBuffConfig, count_examples
from edgefl.strategies.strategy_config import RoundRules

UPDATE = QueuedUpdate(assignment_id="", device_id="", base_version=0, learning_rate=0.1, num_examples=1, tensors={})


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


@pytest.mark.parametrize("options", [{"staleness": "constant"}, {}, {"staleness_a": 0.2}])
@pytest.mark.parametrize("num_devices", [1, 3, 50])
def test_a_model_of_the_usual_age_weighs_one_of_the_number_of_devices(options, num_devices):
    strategy = FedAsyncConfig(**options).build(RoundRules())
    weights = [strategy.compute_mixing_weight(delay, num_devices) for delay in (0, num_devices - 1, 2 * num_devices)]
    assert weights[1] == pytest.approx(1 / num_devices)
    assert 1 >= weights[0] >= weights[1] >= weights[2]


@pytest.mark.parametrize("num_fast", [4, 50])
@pytest.mark.parametrize("options", [{}, {"staleness": "hinge"}, {"staleness_a": 2.0}, {"staleness": "constant"}])
def test_devices_that_go_most_of_the_way_to_an_optimum_do_not_lead_beyond_it(options, num_fast):
    names = [f"pi-{number:02}" for number in range(50)]
    strategy = FedAsyncConfig(**options).build(RoundRules())
    state, orders = begun(strategy, {"w": np.zeros(1)}, names)
    starts, path = dict.fromkeys(names, 0.0), []
    for turn in range(400):
        name = names[turn % num_fast]
        state = moved(strategy, state, orders[name], {"w": [0.9 * (1.0 - starts[name])]}, num_examples=10)
        busy = {other: [order.assignment_id] for other, order in orders.items() if other != name}
        state, decision = strategy.assign(state, view_of(name, busy=busy))
        orders[name], starts[name] = decision.instructions[0], float(state.model["w"][0])
        path.append(starts[name])
    assert min(path) >= 0.0
    assert max(path) < 1.3


def follow(num_devices, **options):
    """How far equal updates, worth 12 rounds, move the model in a round: on average, and by the last of them."""
    names = [f"pi-{number:02}" for number in range(num_devices)]
    strategy = FedAsyncConfig(**options).build(RoundRules())
    state, orders = begun(strategy, {"w": np.zeros(1)}, names)
    for turn in range(12 * num_devices):
        before, name = state.model["w"][0], names[turn % num_devices]
        state = moved(strategy, state, orders[name], {"w": [1.0]}, num_examples=10)
        busy = {other: [order.assignment_id] for other, order in orders.items() if other != name}
        state, decision = strategy.assign(state, view_of(name, busy=busy))
        orders[name] = decision.instructions[0]
    return state.model["w"][0] / 12, num_devices * (state.model["w"][0] - before)


@pytest.mark.parametrize("num_devices", [1, 3, 10, 50])
def test_an_update_of_each_device_moves_the_model_as_far_as_a_round_by_default(num_devices):
    mean, last = follow(num_devices)
    assert mean == pytest.approx(1.0, abs=0.2)
    assert last == pytest.approx(1.0, abs=0.1)


def test_with_an_alpha_the_model_is_mixed_as_in_the_paper_whatever_the_number_of_devices_and_examples():
    strategy, state, orders = asked([0.0], alpha=0.6)
    state = moved(strategy, state, orders["a"], {"w": [1.0]}, num_examples=1)
    assert state.model["w"][0] == pytest.approx(0.6)
    state = moved(strategy, state, orders["b"], {"w": [1.0]}, num_examples=900)
    assert state.model["w"][0] == pytest.approx(0.6 + 0.6 * 2**-0.5 * (1 - 0.6))


def test_a_model_weighs_in_proportion_to_its_examples_by_default():
    steps = []
    for num_examples in (30, 10):
        strategy, state, orders = asked([0.0])
        state = moved(strategy, state, orders["a"], {"w": [0.0]}, num_examples=20)
        steps.append(moved(strategy, state, orders["b"], {"w": [1.0]}, num_examples=num_examples).model["w"][0])
    assert steps == pytest.approx([(1 + 0.5) * 0.5 * 30 / 25, (1 + 0.5) * 0.5 * 10 / 15])


def test_boards_that_claim_a_billion_examples_take_no_weight_from_others_however_often_they_send():
    claims = {}
    for turn in range(200):
        for name in "abc":
            honest = count_examples(claims, replace(UPDATE, device_id=name, num_examples=10))
        liar = count_examples(claims, replace(UPDATE, device_id=f"liar-{turn % 2}", num_examples=10**9))
    assert liar <= 2
    assert honest > 0.4
    for number in range(1100):
        count_examples(claims, replace(UPDATE, device_id=f"pi-{number}", num_examples=10))
    assert set(claims.values()) == {10}
    assert len(claims) == 1000


def test_running_means_go_to_the_devices_own_and_no_further():
    strategy = FedAsyncConfig().build(RoundRules(server=ServerOptimizer(buffers=frozenset({"mean"}))))
    state, orders = begun(strategy, {"mean": np.zeros(1)}, "ab")
    state = moved(strategy, state, orders["a"], {"mean": [0.0]})
    assert moved(strategy, state, orders["b"], {"mean": [1.0]}).model["mean"][0] == pytest.approx(0.5)


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


ABC = ("a", "b", "c")


def asked_for_buffer(model, size=2, **rules):
    strategy = FedBuffConfig(buffer_size=size).build(RoundRules(**rules))
    return strategy, *begun(strategy, model, ABC)


def received(strategy, state, order, num_examples=1, **tensors):
    return strategy.receive(state, update_of(order, tensors, num_examples=num_examples))


def test_k_updates_are_one_version_and_move_the_model_by_their_mean():
    strategy, state, orders = asked_for_buffer({"w": np.array([1.0])})
    state = received(strategy, state, orders["c"], w=[0.5])
    assert not strategy.ready(state, view_of(*ABC))
    state = received(strategy, state, orders["a"], w=[0.1])
    assert strategy.ready(state, view_of(*ABC))
    state = strategy.aggregate(state)
    assert state.model["w"][0] == pytest.approx(1.3)
    assert (state.version, state.used) == (1, (orders["c"].assignment_id, orders["a"].assignment_id))
    assert not strategy.ready(state, view_of(*ABC))


@pytest.mark.parametrize("config", [FedAsyncConfig(), FedBuffConfig(buffer_size=2)])
def test_work_on_a_model_that_was_given_up_does_not_count_any_more(config):
    strategy = config.build(RoundRules())
    state, orders = begun(strategy, {"w": np.array([1.0])}, ABC)
    state = received(strategy, state, orders["a"], w=[5.0])
    state = received(strategy, state, orders["b"], w=[5.0])
    state = strategy.aggregate(state)
    state = strategy.restore_model(state, {"w": np.array([1.0])})
    state = received(strategy, state, orders["c"], w=[5.0])
    assert not strategy.ready(state, view_of(*ABC))
    assert (state.version, state.model["w"].tolist(), state.holders) == (1, [1.0], {})


@pytest.mark.parametrize(("num_devices", "size"), [(1, 1), (3, 3), (10, 10), (20, 10), (41, 21)])
def test_a_buffer_is_that_of_the_paper_or_half_of_the_devices_and_not_more_than_there_are(num_devices, size):
    names = [f"pi-{number:02}" for number in range(num_devices)]
    strategy = FedBuffConfig().build(RoundRules())
    state, orders = begun(strategy, {"w": np.array([0.0])}, names)
    for number, name in enumerate(names[:size], 1):
        assert not strategy.ready(state, view_of(*names))
        state = received(strategy, state, orders[name], w=[1.0])
        assert strategy.ready(state, view_of(*names)) == (number == size)


def test_an_update_that_is_s_versions_old_weighs_one_over_the_root_of_one_plus_s():
    strategy, state, orders = asked_for_buffer({"w": np.array([0.0])}, size=1)
    for name, expected in (("a", 1.0), ("b", 1.0 + 2**-0.5), ("c", 1.0 + 2**-0.5 + 3**-0.5)):
        state = strategy.aggregate(received(strategy, state, orders[name], w=[1.0]))
        assert state.model["w"][0] == pytest.approx(expected)


def test_a_clipped_update_counts_as_its_share_of_a_buffer():
    strategy, state, orders = asked_for_buffer({"w": np.array([0.0])}, size=2)
    state = received(strategy, state, orders["a"], w=[4.0])
    update = replace(update_of(orders["b"], {"w": np.array([1.0])}), is_clipped=True, share=0.25)
    state = strategy.aggregate(strategy.receive(state, update))
    assert (state.model["w"][0], state.share) == (pytest.approx(4.0), 0.0)


def test_what_comes_beyond_a_full_buffer_goes_into_the_next():
    strategy, state, orders = asked_for_buffer({"w": np.array([0.0])})
    for name in ABC:
        state = received(strategy, state, orders[name], w=[1.0])
    state = strategy.aggregate(state)
    assert state.model["w"][0] == pytest.approx(1.0)
    assert state.buffered == (orders["c"].assignment_id,)
    assert state.total["w"][0] == pytest.approx(2**-0.5)


def test_a_device_works_on_while_its_update_waits_in_the_buffer():
    strategy, state, orders = asked_for_buffer({"w": np.array([0.0])}, size=3)
    state = received(strategy, state, orders["a"], w=[1.0])
    state, decision = strategy.assign(state, view_of("a", busy={name: [orders[name].assignment_id] for name in "bc"}))
    (again,) = decision.instructions
    # What is in the buffer will be used for certain, and the device may forget it.
    assert (again.device_id, again.base_version, again.used_assignments) == ("a", 0, (orders["a"].assignment_id,))
    state = received(strategy, state, again, w=[1.0])
    state = received(strategy, state, orders["b"], w=[1.0])
    assert strategy.aggregate(state).model["w"][0] == pytest.approx(1.0)


def test_one_model_is_in_memory_however_large_the_buffer_is():
    strategy, state, orders = asked_for_buffer({"w": np.zeros(1000, np.float32)}, size=3)
    for name in "ab":
        state = received(strategy, state, orders[name], w=np.ones(1000, np.float32))
    assert not state.queue
    assert state.total["w"].tolist() == [2.0] * 1000


def test_the_servers_optimiser_takes_the_mean_of_the_buffer():
    server = ServerOptimizer(kind="momentum", beta1=0.5, learning_rate=2.0)
    strategy, state, orders = asked_for_buffer({"w": np.array([0.0])}, size=1, server=server)
    state = strategy.aggregate(received(strategy, state, orders["a"], w=[1.0]))
    assert state.model["w"][0] == pytest.approx(2.0)


def test_running_means_become_the_devices_mean_and_counters_come_from_the_most_examples():
    server = ServerOptimizer(buffers=frozenset({"mean"}))
    strategy, state, orders = asked_for_buffer({"mean": np.array([1.0]), "seen": np.array(3)}, server=server)
    state = received(strategy, state, orders["a"], 5, mean=[1.0], seen=4)
    state = received(strategy, state, orders["b"], 9, mean=[3.0], seen=7)
    state = strategy.aggregate(state)
    assert state.model["mean"][0] == pytest.approx((2.0 + 4.0) / 2)
    assert int(state.model["seen"]) == 10


def test_at_the_end_of_a_run_a_part_filled_buffer_counts_once_nobody_is_at_work():
    strategy, state, orders = asked_for_buffer({"w": np.array([1.0])}, size=10)
    state = received(strategy, state, orders["a"], w=[0.5])
    state = strategy.finish(received(strategy, state, orders["b"], w=[0.1]))
    assert not strategy.ready(state, view_of("a", "b", busy={"c": [orders["c"].assignment_id]}))
    assert strategy.ready(state, view_of(*ABC))
    state = strategy.aggregate(state)
    assert state.model["w"][0] == pytest.approx(1.3)
    assert state.used == (orders["a"].assignment_id, orders["b"].assignment_id)
    assert not strategy.ready(state, view_of(*ABC))
