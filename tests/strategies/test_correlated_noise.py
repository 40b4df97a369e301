"""Correlated noise: its deviation on prefix sums, what a device can move, limits of participation, and restarts."""

import itertools
import math

import numpy as np
import pytest
from strategy_turns import begun, update_of, view_of

from edgefl.core.errors import PrivacyBudgetError, StrategyError
from edgefl.strategies.correlated_noise import (
    CorrelatedNoise,
    ParticipationLimits,
    compute_coefficients,
    compute_prefix_deviations,
)
from edgefl.strategies.private_mean import PrivacySpend, PrivateMean, SpendRecorder
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.strategy_config import RoundRules
from edgefl.strategies.synchronous.strategy import MAX_REST_S

KEY = bytes(range(32))
START = {"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}


def correlated(*, key=KEY, separation=3, participations=None, bands=None, spend=None, epsilon=100.0, noise=1e-9):
    """A mean with correlated noise, whose epsilon is the number of releases."""
    limits = ParticipationLimits(separation=separation, participations=participations)
    return PrivateMean(
        first_clip=1.0, quantile=None, noise_multiplier=noise, num_expected=1.0, epsilon=epsilon, sampling=None,
        compute_epsilon=lambda first, repeated: float(first + repeated),
        recorder=SpendRecorder(spend=spend or PrivacySpend(key=key)),
        correlation=CorrelatedNoise(limits=limits, bands=bands or separation),
    )  # fmt: skip


def release(mean, version, value=0.0, size=3, names=()):
    model, total = {"w": np.zeros(size)}, {"w": np.full(size, value)}
    return mean.release(total, model, version=version, clip=1.0, num_below=0.0, participants=names).displacement["w"]


def make_matrix(bands, rounds):
    """C, row by row."""
    coefficients = compute_coefficients(bands)
    return np.array(
        [
            [coefficients[row - column] if 0 <= row - column < bands else 0.0 for column in range(rounds)]
            for row in range(rounds)
        ]
    )


def test_without_an_end_the_coefficients_are_a_square_root_of_the_prefix_sums():
    square = np.convolve(compute_coefficients(30), compute_coefficients(30))[:30]
    np.testing.assert_allclose(square, 1.0)


@pytest.mark.parametrize(
    ("bands", "separation", "most", "rounds"), [(2, 3, None, 10), (3, 3, 2, 10), (1, 1, None, 6), (4, 5, 3, 12)]
)
def test_a_device_moves_no_more_than_the_worst_participations_that_the_limits_allow(bands, separation, most, rounds):
    matrix, limits = make_matrix(bands, rounds), ParticipationLimits(separation=separation, participations=most)
    found = 0.0
    for number in range(1, (most or rounds) + 1):
        for chosen in itertools.combinations(range(rounds), number):
            if all(later - former >= separation for former, later in itertools.pairwise(chosen)):
                found = max(found, float(np.linalg.norm(matrix[:, list(chosen)].sum(axis=1))))
    assert limits.compute_sensitivity(bands, [rounds]) == pytest.approx(found, rel=1e-12)


def test_noise_that_begins_anew_adds_up_and_the_most_participations_count_over_all():
    free, limited = (ParticipationLimits(separation=2, participations=most) for most in (None, 2))
    whole = free.compute_sensitivity(2, [4])
    assert free.compute_sensitivity(2, [4, 1]) == pytest.approx(math.hypot(whole, 1.0))
    assert limited.compute_sensitivity(2, [4, 1, 4]) == pytest.approx(whole)


@pytest.mark.parametrize("bands", [1, 2, 5])
def test_the_noise_on_sums_of_rounds_has_the_deviation_of_theory_over_twenty_seeds(bands):
    # Of n normal draws the mean square deviates by a share of √(2/n): beyond 5.5 lies less than one in a million.
    rounds, size, seeds, noise = 12, 2000, 20, 1.7
    squares = np.zeros(rounds)
    for seed in range(seeds):
        mean = correlated(key=bytes([seed]) * 32, separation=5, bands=bands, noise=noise)
        sums = np.cumsum([release(mean, version, size=size) for version in range(1, rounds + 1)], axis=0)
        squares += (sums**2).mean(axis=1) / seeds
    expected = (noise * compute_prefix_deviations(bands, rounds)) ** 2
    np.testing.assert_allclose(squares / expected, 1.0, atol=5.5 * math.sqrt(2 / (size * seeds)))
    inverse = np.cumsum(np.linalg.inv(make_matrix(bands, rounds)), axis=0)
    np.testing.assert_allclose(expected, noise**2 * (inverse**2).sum(axis=1))


def test_what_is_released_is_the_matrix_times_the_sums_with_independent_noise():
    rounds, size = 8, 20_000
    mean = correlated(noise=1.0)
    released = np.array([release(mean, version, size=size) for version in range(1, rounds + 1)])
    independent = make_matrix(3, rounds) @ released
    covariance = independent @ independent.T / size
    np.testing.assert_allclose(covariance, np.eye(rounds), atol=5.5 * math.sqrt(2 / size))


@pytest.mark.parametrize("killed", range(1, 7))
def test_a_run_that_is_killed_after_any_release_repeats_its_noise_and_spends_nothing(killed):
    whole = correlated(noise=1.0)
    expected = [release(whole, version, value=version) for version in range(1, 7)]
    first = correlated(noise=1.0)
    for version in range(1, killed + 1):
        release(first, version, value=version)
    for begin in range(1, killed + 1):  # the journal is replayed from any version on
        again = correlated(noise=1.0, spend=first.recorder.spend)
        for version in range(begin, 7):
            np.testing.assert_array_equal(release(again, version, value=version), expected[version - 1])
        assert (again.recorder.spend.total, again.recorder.spend.restarts) == (6, ())


def test_another_sum_of_a_released_version_gets_noise_of_its_own_and_counts():
    mean = correlated(noise=1.0)
    first = [release(mean, version, size=20_000) for version in (1, 2, 3)]
    second = release(mean, 2, value=1.0, size=20_000) - 1.0
    spend = mean.recorder.spend
    assert (spend.total, spend.restarts, spend.start) == (4, (3,), 1)
    for noise in first:
        assert abs(np.corrcoef(noise, second)[0, 1]) < 5.5 / math.sqrt(20_000)
    assert second.std() == pytest.approx(1.0, abs=0.03), "its first round has nothing to be correlated with"


def test_the_same_sum_after_a_restart_is_another_release():
    mean = correlated(noise=1.0)
    first = release(mean, 1)
    mean.recorder.restart(0)
    assert not np.array_equal(first, release(mean, 1))
    assert mean.recorder.spend.total == 2
    mean.recorder.restart(1)
    mean.recorder.restart(1)
    assert mean.recorder.spend.list_segments(2) == (1, 1)
    release(mean, 2)
    assert mean.recorder.spend.list_segments(3) == (1, 1, 1)
    assert mean.recorder.spend.list_segments(1) == (1,)


def test_a_run_keeps_the_bands_that_it_began_with():
    mean = correlated(noise=1.0, bands=2)
    expected = [release(mean, version) for version in (1, 2, 3)]
    other = correlated(noise=1.0, bands=3, spend=mean.recorder.spend)
    for version in (1, 2, 3):
        np.testing.assert_array_equal(release(other, version), expected[version - 1])
    assert other.recorder.spend.total == 3


def test_a_release_behind_the_budget_is_refused_before_its_noise_is_drawn():
    mean = correlated(epsilon=2.0)
    release(mean, 1, names=("a",))
    release(mean, 2)
    with pytest.raises(PrivacyBudgetError, match="version 3 would pass the privacy budget"):
        release(mean, 3, names=("a",))
    assert (mean.recorder.spend.total, mean.recorder.spend.participations) == (2, {"a": 1})


def play(strategy, state, names, now_s=0.0):
    """The state after a round in which all that are asked answer, and who was asked."""
    state, decision = strategy.assign(state, view_of(*names, now_s=now_s))
    asked = [order.device_id for order in decision.instructions]
    for order in decision.instructions:
        state = strategy.receive(state, update_of(order, {"w": np.ones(3, np.float32) / 9, "b": START["b"]}))
    if state.open:
        assert strategy.ready(state, view_of(*names))
        state = strategy.aggregate(state)
    return state, asked


def fedavg(mean, **rules):
    return make_strategy("fedavg", {"iterations": 1}, RoundRules(privacy=mean, **rules))


def test_boards_take_part_as_far_apart_and_as_often_as_they_may():
    mean = correlated(separation=3, participations=2)
    strategy = fedavg(mean, max_devices=2)
    state, rounds = strategy.init(START), []
    for _ in range(8):
        state, asked = play(strategy, state, "abcdef")
        rounds.append(asked)
    assert [len(asked) for asked in rounds] == [2, 2, 2, 2, 2, 2, 0, 0]
    for name in "abcdef":
        first, second = (number for number, asked in enumerate(rounds) if name in asked)
        assert second - first >= 3
    assert mean.recorder.spend.participations == dict.fromkeys("abcdef", 2)
    assert state.version == 6, "and no round opens without a board that may"


def test_a_board_that_did_not_answer_has_not_taken_part():
    strategy = fedavg(correlated(separation=3))
    state, _ = begun(strategy, START, "ab")
    assert strategy.ready(state, view_of("a", "b"))
    state = strategy.aggregate(state)
    assert play(strategy, state, "ab")[1] == ["a", "b"]


def test_an_update_that_the_limits_do_not_allow_does_not_count():
    strategy = fedavg(correlated(separation=3))
    state, orders = begun(strategy, START, "ab")
    state.participations["b"] = (1, 0)
    state.participations["a"] = (1, -1)
    state = strategy.receive(state, update_of(orders["a"], {"w": np.ones(3, np.float32), "b": START["b"]}))
    state = strategy.receive(state, update_of(orders["b"], {"w": np.ones(3, np.float32), "b": START["b"]}))
    assert set(state.open[0].below_clip) == {"b"}


def test_participations_of_versions_that_are_made_anew_count_on():
    mean = correlated(separation=2, participations=2)
    strategy = fedavg(mean)
    state, _ = play(strategy, strategy.init(START), "ab")
    mean.recorder.restart(0)
    assert mean.restore_participations() == {"a": (1, 0), "b": (1, 0)}
    state = strategy.init(START)
    state.participations = mean.restore_participations()
    state, asked = play(strategy, state, "ab")
    assert asked == ["a", "b"]
    assert state.participations == {"a": (2, 1), "b": (2, 1)}


def test_boards_that_may_never_take_part_end_the_run_after_a_week():
    strategy = fedavg(correlated(separation=2, participations=1))
    state, _ = play(strategy, strategy.init(START), "ab")
    for now_s in (10.0, MAX_REST_S):
        state, asked = play(strategy, state, "ab", now_s=now_s)
        assert asked == []
    state, _ = play(strategy, state, "", now_s=2 * MAX_REST_S)  # nobody is there: that is another wait
    state, _ = play(strategy, state, "ab", now_s=3 * MAX_REST_S)
    with pytest.raises(StrategyError, match="round 2 waited 7 days for 1 boards that may take part, 0 of 2 may"):
        play(strategy, state, "ab", now_s=4 * MAX_REST_S + 1)
