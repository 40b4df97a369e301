"""Releases of a private run: what one board can change, the noise, and what is recorded before a model leaves."""

import math

import numpy as np
import pytest
from strategy_turns import begun, update_of, view_of

from edgefl.core.errors import PrivacyBudgetError, StrategyError
from edgefl.strategies.private_mean import (
    KEPT_RELEASES,
    PrivacySpend,
    PrivateMean,
    SpendRecorder,
    compute_clip_factor,
)
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.strategy_config import RoundRules

KEY = bytes(range(32))
START = {"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}


def private(*, noise=1e-9, key=KEY, epsilon=100.0, save=lambda _: None, **settings):
    """A mean whose epsilon is the number of releases."""
    return PrivateMean(**{
        "first_clip": 1.0, "quantile": None, "noise_multiplier": noise, "num_expected": 2.0, "epsilon": epsilon,
        "sampling": None, "compute_epsilon": lambda sampled, repeated: float(sampled + repeated),
        "recorder": SpendRecorder(spend=PrivacySpend(key=key), save=save), **settings,
    })  # fmt: skip


def fedavg(mean):
    return make_strategy("fedavg", {"iterations": 1}, RoundRules(privacy=mean))


def play(strategy, updates, names="abc"):
    """The state after a round with these updates by device."""
    state, orders = begun(strategy, START, names)
    for name, tensors in updates.items():
        state = strategy.receive(state, update_of(orders[name], tensors, num_examples=100))
    assert strategy.ready(state, view_of(*names))
    return strategy.aggregate(state)


def step_of(w, b=0.0):
    return {"w": np.array(w, np.float32), "b": np.array(b, np.float32)}


def test_one_board_moves_the_model_by_its_clip_over_the_number_that_is_expected_and_no_more():
    small = step_of([0.3, 0.0, 0.0])
    for long in (step_of([1e6, 0.0, 0.0]), step_of([0.0, -3.0, 4.0], 12.0), step_of([1e30, 1e30, 0.0])):
        with_it, without = (
            play(fedavg(private()), {"a": small, "b": update, "c": small}) for update in (long, step_of([0.0] * 3))
        )
        moved = np.concatenate([(with_it.model[name] - without.model[name]).reshape(-1) for name in START])
        assert np.linalg.norm(moved) <= 1.0 / 2.0
        assert np.linalg.norm(moved) == pytest.approx(0.5, rel=1e-5)


def test_updates_weigh_alike_and_a_lost_one_changes_no_divisor():
    state = play(fedavg(private(num_expected=4.0)), {"a": step_of([0.4, 0, 0])})
    np.testing.assert_allclose(state.model["w"], [0.1, 0, 0], atol=1e-7)


def test_a_round_that_nobody_answers_is_noise_alone():
    state = play(fedavg(private(noise=1.0)), {})
    assert (state.version, state.used) == (1, ())
    assert np.linalg.norm(state.model["w"]) > 0


def test_a_board_that_answers_two_orders_of_a_round_counts_once():
    strategy = fedavg(private())
    state, orders = begun(strategy, START, "a")
    state.open[0].add_assignment("second", "a")
    state = strategy.receive(state, update_of(orders["a"], step_of([1.0, 0, 0])))
    second = update_of(orders["a"], step_of([1.0, 0, 0]))
    state = strategy.receive(state, second.__class__(**{**_fields(second), "assignment_id": "second"}))
    state = strategy.aggregate(state)
    assert state.used == (orders["a"].assignment_id,)
    np.testing.assert_allclose(state.model["w"], [0.5, 0, 0], atol=1e-6)


def _fields(update):
    return {name: getattr(update, name) for name in update.__dataclass_fields__}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_update_without_a_finite_norm_is_left_out(bad):
    state = play(fedavg(private()), {"a": step_of([0.4, 0, 0]), "b": step_of([bad, 0, 0])})
    np.testing.assert_allclose(state.model["w"], [0.2, 0, 0], atol=1e-6)


def test_a_clipped_update_is_never_above_the_norm_in_single_precision():
    rng = np.random.default_rng(1)
    for _ in range(50):
        tensor = (rng.standard_normal(1000) * 10).astype(np.float32)
        shortened = (tensor * np.float32(compute_clip_factor({"w": tensor}, 0.7))).astype(np.float64)
        assert np.linalg.norm(shortened) <= 0.7
    assert compute_clip_factor({"w": np.array([0.3, 0.4], np.float32)}, 0.6) == 1.0


def test_noise_has_the_scale_that_is_accounted_for():
    # Of n normal draws the mean deviates by a share of 1/√n, and the mean square by √(2/n). Beyond 5.5 of these lies
    # less than one draw in a million.
    draws, clip, noise, expected = 200_000, 0.5, 1.7, 10.0
    model = {"w": np.zeros(draws)}
    mean = private(noise=noise, key=b"\x07" * 32, num_expected=expected)
    for version in (1, 2):
        found = mean.release({}, model, version=version, clip=clip, num_below=0.0).displacement["w"]
        sigma = noise * clip / expected
        assert abs(found.mean()) < 5.5 * sigma / math.sqrt(draws)
        assert abs((found**2).mean() / sigma**2 - 1) < 5.5 * math.sqrt(2 / draws)
        tail = (np.abs(found) > 2 * sigma).mean()
        assert tail == pytest.approx(0.0455, abs=5.5 * math.sqrt(0.0455 / draws))


def test_two_rounds_and_two_keys_have_unrelated_noise():
    model = {"w": np.zeros(100_000)}
    draws = [
        private(noise=1.0, key=key).release(total, model, version=version, clip=1.0, num_below=0.0).displacement["w"]
        for key, version, total in [
            (KEY, 1, {}), (KEY, 2, {}), (bytes(32), 1, {}), (KEY, 1, {"w": np.full(100_000, 1e-9)}),
        ]
    ]  # fmt: skip
    for index, first in enumerate(draws):
        for second in draws[index + 1 :]:
            assert abs(np.corrcoef(first, second)[0, 1]) < 5.5 / math.sqrt(100_000)


def test_with_an_adaptive_norm_both_noises_together_are_the_one_that_is_accounted_for():
    mean = private(noise=1.2, quantile=0.5, num_expected=40.0)
    assert mean.update_noise > 1.2
    assert mean.update_noise**-2 + (2 * mean.count_noise) ** -2 == pytest.approx(1.2**-2)


def test_an_adaptive_norm_finds_the_quantile_of_the_updates():
    mean = private(quantile=0.5, num_expected=200.0, epsilon=1e9)
    norms, clip = np.linspace(0.5, 1.5, 200), 0.1
    for version in range(1, 200):
        below = sum(0.5 if norm <= clip else -0.5 for norm in norms)
        clip = mean.release({}, START, version=version, clip=clip, num_below=below).clip
    assert clip == pytest.approx(1.0, abs=0.1)


def test_a_round_of_an_adaptive_norm_clips_by_the_norm_of_the_last():
    strategy = fedavg(private(quantile=0.5, num_expected=2000.0))
    state = play(strategy, {"a": step_of([9.0, 0, 0])})
    assert state.clip != 1.0
    assert strategy.facts(state)["clip_norm"] == state.clip


def test_the_spend_is_saved_before_a_version_is_released():
    saved = []

    def save(spend):
        saved.append((spend.sampled, spend.repeated))
        raise OSError

    strategy = fedavg(private(save=save))
    state, _ = begun(strategy, START, "a")
    with pytest.raises(OSError):
        strategy.aggregate(state)
    assert saved == [(1, 0)]
    assert not state.model["w"].any()


def test_a_replay_repeats_the_released_model_and_spends_nothing():
    mean = private(noise=1.0)
    updates = {"a": step_of([0.4, 0, 0]), "b": step_of([0, 0, 7.0])}
    first, again = (play(fedavg(mean), updates) for _ in range(2))
    assert (mean.recorder.spend.sampled, mean.recorder.spend.repeated) == (1, 0)
    np.testing.assert_array_equal(first.model["w"], again.model["w"])


def test_another_sum_of_a_released_version_is_a_release_more():
    mean = private(noise=1.0)
    strategy = fedavg(mean)
    first = play(strategy, {"a": step_of([0.4, 0, 0])})
    mean.recorder.restart(0)
    second = play(strategy, {"a": step_of([0.4, 0, 0]), "b": step_of([0.1, 0, 0])})
    assert (mean.recorder.spend.sampled, mean.recorder.spend.repeated) == (1, 1)
    assert strategy.facts(second)["epsilon"] == 2.0
    assert np.abs(first.model["w"] - second.model["w"]).max() > 0.06, "the noise is another, not the sum alone"


def test_no_version_is_released_behind_the_budget():
    mean = private(epsilon=2.0)
    strategy = fedavg(mean)
    state = strategy.init(START)
    for _ in range(2):
        state, decision = strategy.assign(state, view_of("a"))
        state = strategy.receive(state, update_of(decision.instructions[0], step_of([0.1, 0, 0])))
        assert strategy.ready(state, view_of("a"))
        state = strategy.aggregate(state)
    state, decision = strategy.assign(state, view_of("a"))
    state = strategy.receive(state, update_of(decision.instructions[0], step_of([0.1, 0, 0])))
    assert not strategy.ready(state, view_of("a"))
    assert not strategy.ready(strategy.finish(state), view_of("a")), "nor in the drain"
    with pytest.raises(StrategyError, match=r"version 3 would pass the privacy budget of epsilon = 2"):
        strategy.aggregate(state)


def test_a_version_is_made_anew_only_where_the_budget_has_room_for_it():
    mean = private(epsilon=3.0)
    for version in (1, 2, 3):
        mean.release({}, START, version=version, clip=1.0, num_below=0.0)
    assert mean.can_release(3), "a replay comes by"
    mean.recorder.restart(1)
    assert [mean.can_release(version) for version in (1, 2, 3)] == [True, False, False]
    assert mean.compute_spent(1) == 1.0
    assert mean.compute_spent(0) == 0.0


def test_old_digests_are_forgotten_and_count_as_another_release():
    mean = private(epsilon=1e9)
    for version in range(1, KEPT_RELEASES + 3):
        mean.release({}, {}, version=version, clip=1.0, num_below=0.0)
    assert len(mean.recorder.spend.releases) == KEPT_RELEASES
    mean.release({}, {}, version=1, clip=1.0, num_below=0.0)
    assert mean.recorder.spend.repeated == 1


def test_a_sample_takes_each_board_with_the_probability_and_by_itself():
    mean, names = private(sampling=0.2), [f"d{number}" for number in range(10)]
    samples = np.array([[name in mean.sample(names, version) for name in names] for version in range(4000)])
    tolerance = 5.5 * math.sqrt(0.2 * 0.8 / len(samples))
    np.testing.assert_allclose(samples.mean(axis=0), 0.2, atol=tolerance)
    together = np.corrcoef(samples.T) - np.eye(10)
    assert np.abs(together).max() < 5.5 / math.sqrt(len(samples))
    assert mean.sample(names, 5) == mean.sample(names, 5)
    assert any(mean.sample(names, n) != private(sampling=0.2, key=bytes(32)).sample(names, n) for n in range(20))


def test_an_empty_sample_is_a_round_of_its_own_that_closes_at_once():
    strategy = fedavg(private(sampling=1e-12))
    state, decision = strategy.assign(strategy.init(START), view_of("a", "b"))
    assert (decision.instructions, decision.next_wake_s) == ((), 0.0)
    assert strategy.ready(state, view_of("a", "b"))
    assert strategy.aggregate(state).version == 1


def test_a_fleet_without_idle_boards_spends_nothing():
    strategy = fedavg(private(sampling=0.5))
    state, decision = strategy.assign(strategy.init(START), view_of())
    assert not state.open
    assert decision.next_wake_s > 1
    assert not strategy.ready(state, view_of())


@pytest.mark.parametrize("sampling", [None, 0.5])
def test_no_round_opens_with_fewer_boards_than_the_run_asks_for_idle_or_busy(sampling):
    strategy = make_strategy("fedavg", {}, RoundRules(privacy=private(sampling=sampling), min_devices=3))
    state, _ = begun(strategy, START)
    state = strategy.aggregate(state)
    for view in (view_of("a"), view_of("a", "b"), view_of("a", busy={"b": ["evaluation"]})):
        state, decision = strategy.assign(state, view)
        assert (state.open, decision.instructions) == ([], ())
        assert decision.next_wake_s > 1
    assert not strategy.ready(state, view_of("a"))
    state, _ = strategy.assign(state, view_of("a", "b", busy={"c": ["evaluation"]}))
    assert len(state.open) == 1


def test_the_sum_of_many_clipped_updates_differs_by_one_of_them():
    # In single precision 2²⁴ + 1 is 2²⁴.
    updates = {"a": step_of([2.0**24, 0, 0]), "b": step_of([1.0, 0, 0]), "c": step_of([-(2.0**24), 0, 0])}
    state = play(fedavg(private(first_clip=2.0**30, noise=1e-18)), updates)
    assert state.model["w"][0] == 0.5


def test_a_version_that_is_made_anew_otherwise_than_it_was_to_be_ends_the_budget():
    mean = private(epsilon=2.0)
    for version in (1, 2):
        mean.release({}, START, version=version, clip=1.0, num_below=0.0)
    assert mean.can_release(2)
    with pytest.raises(PrivacyBudgetError, match="version 2 would pass the privacy budget"):
        mean.release({"b": np.ones(())}, START, version=2, clip=1.0, num_below=0.0)
    assert (mean.can_release(1), mean.can_release(2)) == (True, False)


def test_lost_boards_are_not_replaced():
    strategy = fedavg(private(noise=1.0))
    state, orders = begun(strategy, START, "ab")
    state, decision = strategy.assign(state, view_of("c", "d"))
    assert orders
    assert decision.instructions == ()
    assert strategy.ready(state, view_of("c", "d"))
