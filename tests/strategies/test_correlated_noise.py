"""Correlated noise: its deviation on prefix sums, what a device can move, limits of participation, and restarts."""

import copy
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


def test_a_version_after_a_restart_has_other_noise_and_counts_once_more():
    mean = correlated(noise=1.0)
    first = release(mean, 1)
    mean.recorder.restart(0)
    np.testing.assert_array_equal(first, release(mean, 1))  # the same sum is the same release
    assert not np.allclose(first, release(mean, 1, value=1.0) - 1.0)
    assert mean.recorder.spend.total == 2
    mean.recorder.restart(1)
    mean.recorder.restart(1)
    assert mean.recorder.spend.list_segments(2) == (1, 1)
    release(mean, 2)
    assert mean.recorder.spend.list_segments(3) == (1, 1, 1)
    assert mean.recorder.spend.list_segments(1) == (1,)


@pytest.mark.parametrize("released", [0, 1])
def test_a_backup_that_is_restored_twice_gives_no_two_sums_the_same_noise(released):
    mean = correlated(noise=1.0)
    mean.recorder.restart(0)
    for version in range(1, released + 1):
        release(mean, version)
    mean.recorder.restart(released)
    backup, noise = copy.deepcopy(mean.recorder.spend), []
    for value in (5.0, 7.0):
        again = correlated(noise=1.0, spend=copy.deepcopy(backup))
        again.recorder.restart(released)
        noise.append(release(again, released + 1, value=value, size=1000) - value)
    assert abs(np.corrcoef(noise)[0, 1]) < 5.5 / math.sqrt(1000)


@pytest.mark.parametrize("dies", [False, True])
def test_a_replay_across_noise_that_began_anew_is_the_same_and_says_so_again(dies):
    mean = correlated(noise=1.0)
    release(mean, 1, names=("a",))
    release(mean, 2, names=("b",))
    if dies:  # between the record of the new beginning and that of the release
        mean.recorder.restart(1)

    def play_on():
        released = [
            mean.release(
                {"w": np.full(3, value)}, {"w": np.zeros(3)}, version=version, clip=1.0, num_below=0.0,
                participants=names,
            )
            for version, value, names in [(1, 0.0, "a"), (2, 9.0, "c"), (3, 9.0, "a")]
        ]  # fmt: skip
        return [each.displacement["w"].tolist() for each in released], [each.participations for each in released]

    first, counts = play_on()
    assert counts == [{"a": 1}, {"a": 1, "b": 1, "c": 1}, None]
    assert play_on() == (first, counts)
    assert (mean.recorder.spend.total, mean.recorder.spend.restarts) == (4, (2,))


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


def play(strategy, state, names, now_s=0.0, silent=()):
    """The state after a round in which all that are asked answer but the silent ones, and who was asked."""
    state, decision = strategy.assign(state, view_of(*names, now_s=now_s))
    asked = [order.device_id for order in decision.instructions]
    for order in decision.instructions:
        if order.device_id not in silent:
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


@pytest.mark.parametrize("silent", "abcd")
def test_who_is_asked_does_not_depend_on_who_answers(silent):
    asked = []
    for silent_ones in (set(), {silent}):
        mean = correlated(separation=2)
        strategy = fedavg(mean, max_devices=2, seed=1)
        state, rounds = strategy.init(START), []
        for _ in range(6):
            state, names = play(strategy, state, "abcd", silent=silent_ones)
            rounds.append(names)
        asked.append((rounds, mean.recorder.spend.participations))
    assert asked[0] == asked[1]


def test_boards_of_a_release_whose_noise_began_anew_rest_behind_it():
    mean = correlated(separation=3)
    strategy = fedavg(mean)
    state, _ = play(strategy, strategy.init(START), "abc")
    state, asked = play(strategy, strategy.init(START), "ab", silent={"a"})  # a replay comes to another sum
    assert (asked, mean.recorder.spend.restarts) == (["a", "b"], (1,))
    assert state.participations == {"a": (2, 1), "b": (2, 1), "c": (1, 0)}
    assert play(strategy, state, "abc")[1] == ["c"]


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
    state, asked = play(strategy, state, "ab", silent={"a"})
    assert asked == ["a", "b"]
    assert state.participations == {"a": (2, 1), "b": (2, 1)}


def test_a_late_board_that_may_not_take_part_either_does_not_prolong_the_wait():
    strategy = fedavg(correlated(separation=2, participations=1))
    state, _ = play(strategy, strategy.init(START), "abc")
    late = view_of("a", "b", busy={"c": ["v0-a1-c"]}, now_s=0.0)
    for late.now_s in (0.0, MAX_REST_S):
        state, decision = strategy.assign(state, late)
        assert decision.instructions == ()
    late.now_s = MAX_REST_S + 1
    with pytest.raises(StrategyError, match="0 of 3 may"):
        strategy.assign(state, late)
    state.waiting_since_s = None
    del state.participations["c"]  # it may, as soon as it has answered
    strategy.assign(state, late)
    late.now_s *= 3
    assert strategy.assign(state, late)[1].instructions == ()


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
