"""Audits of privacy: the statistics of the bound, canaries in runs without, with and with faulty privacy."""

import math
from fractions import Fraction
from importlib.util import find_spec

import numpy as np
import pytest

from edgefl.core.config import parse_run
from edgefl.core.errors import ConfigError, DataError
from edgefl.simulation import privacy_audit
from edgefl.simulation.privacy_audit import (
    CanaryTrainer,
    audit_privacy,
    bound_epsilon,
    compute_auc,
    compute_likelihood_ratios,
    compute_logit,
    compute_p_value,
    find_strongest_bound,
)
from edgefl.simulation.simulated_run import prepare_simulation
from edgefl.strategies.private_mean import PrivateMean
from edgefl.strategies.update_guard import compute_norm

accounted = pytest.mark.skipif(
    find_spec("dp_accounting") is None,
    reason="dp-accounting is not installed: pip install -e '.[privacy]' -c constraints.txt",
)
PLAIN = {
    "run": {"task": "digits", "rounds": 3, "seed": 3, "evaluate_on": "none"},
    "strategy": {"name": "fedavg", "iterations": 2, "learning_rate": 0.1},
    "guard": {"enabled": False},
}
PRIVATE = {"unit": "device", "epsilon": 0.5, "delta": 1e-5, "clip": 1.0, "boards": 4}
OF_EXAMPLES = {"unit": "example", "epsilon": 0.5, "delta": 1e-4, "clip": 1.0}


@pytest.fixture
def audit(tmp_path):
    def call(run=PLAIN, *, devices=4, **options):
        config, data = prepare_simulation(parse_run(run), devices=devices)
        return audit_privacy(config, data, tmp_path, **options)

    return call


def compute_exactly(canaries, guesses, correct, odds, delta):
    """Returns the p-value in fractions; `odds` is e to the power of ε."""
    q = odds / (1 + odds)
    density = [math.comb(guesses, k) * q**k * (1 - q) ** (guesses - k) for k in range(guesses + 1)]
    slope = max((sum(density[correct - i : correct]) / i for i in range(1, correct + 1)), default=Fraction(0))
    return min(Fraction(1), sum(density[correct:]) + 2 * canaries * delta * slope)


@pytest.mark.parametrize(("guesses", "correct"), [(10, 10), (20, 15), (40, 22), (30, 0)])
@pytest.mark.parametrize("odds", [1, 3, 20])
def test_the_p_value_is_that_of_the_theorem_in_fractions(guesses, correct, odds):
    expected = compute_exactly(50, guesses, correct, Fraction(odds), Fraction(1, 1000))
    assert compute_p_value(50, guesses, correct, math.log(odds), 1e-3) == pytest.approx(float(expected), rel=1e-9)


def test_without_a_wrong_guess_the_bound_is_that_of_the_geometric_law():
    q = 0.05 ** (1 / 100)
    assert bound_epsilon(100, 100, 100, 0.0, 0.05) == pytest.approx(math.log(q / (1 - q)), abs=1e-6)
    assert bound_epsilon(100, 100, 50, 0.0, 0.05) == 0.0


def test_randomised_response_is_bounded_below_its_epsilon_and_not_far():
    """Its guesses are right with probability e^ε / (1 + e^ε), the most that ε allows."""
    bounds = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        included = rng.random(600) < 0.5
        says_so = np.where(rng.random(600) < math.e / (1 + math.e), included, ~included)
        bounds.append(find_strongest_bound(says_so + 1e-3 * rng.random(600), included, 0.0, 0.95)[2])
    assert sum(bound > 1.0 for bound in bounds) <= 3
    assert np.mean(bounds) > 0.6


def test_scores_that_say_nothing_prove_nothing():
    rng = np.random.default_rng(1)
    included = rng.random(400) < 0.5
    assert find_strongest_bound(rng.random(400), included, 1e-5, 0.95)[2] == 0.0
    assert find_strongest_bound(np.full(400, np.nan), included, 1e-5, 0.95)[2] == 0.0
    assert compute_auc(np.zeros(400), included) == 0.5
    assert compute_auc(included.astype(float), included) == 1.0
    assert compute_auc(-included.astype(float), included) == 0.0
    assert compute_auc(np.array([2.0, 1.0, 1.0, 0.0]), np.array([True, True, False, False])) == 0.875


def test_devices_leave_traces_in_a_run_without_privacy(audit):
    found = audit(num_canaries=60)
    assert (found.unit, found.canaries, found.epsilon_promised) == ("device", 60, None)
    assert found.auc == 1.0
    assert found.correct >= found.guesses - abs(2 * found.included - 60)  # as many are guessed in as out
    assert found.epsilon_lower > 2.0
    assert not found.is_broken


@accounted
def test_privacy_hides_devices_and_noise_that_is_missing_is_found(audit, monkeypatch):
    run = {**PLAIN, "privacy": PRIVATE}
    found = audit(run, num_canaries=60)
    assert found.epsilon_promised == 0.5
    assert found.epsilon_lower <= 0.5
    assert not found.is_broken
    monkeypatch.setattr(PrivateMean, "update_noise", property(lambda _: 0.0))
    broken = audit(run, num_canaries=60)
    assert broken.is_broken
    assert broken.epsilon_lower > 2.0


@accounted
def test_canaries_send_as_much_as_the_clip_and_the_others_what_they_trained(audit, monkeypatch):
    lengths = {"honest": [], "canary": []}
    original = CanaryTrainer.change_displacement

    def note(self, instruction, displacement):
        sent = original(self, instruction, displacement)
        lengths["honest" if int(instruction.device_id[-2:]) <= 4 else "canary"].append(compute_norm(sent))
        return sent

    monkeypatch.setattr(CanaryTrainer, "change_displacement", note)
    found = audit({**PLAIN, "privacy": PRIVATE}, num_canaries=10)
    assert len(lengths["honest"]) == 4 * 3
    assert all(length != pytest.approx(1.0) for length in lengths["honest"])
    assert lengths["canary"] == pytest.approx([1.0] * 3 * found.included)


OVERFIT = {
    **PLAIN,
    "run": {**PLAIN["run"], "rounds": 5},
    "strategy": {"name": "fedavg", "epochs": 4, "learning_rate": 0.5},
}


def test_examples_with_wrong_labels_leave_traces_and_private_gradients_hide_them(audit):
    plain = audit(OVERFIT, unit="example", num_canaries=200)
    assert plain.auc > 0.65
    assert plain.epsilon_lower > 0.5
    run = {**OVERFIT, "strategy": {"name": "fedavg", "epochs": 4, "learning_rate": 0.05}, "privacy": OF_EXAMPLES}
    private = audit(run, num_canaries=200)
    assert (private.unit, private.epsilon_promised) == ("example", 0.5)
    assert not private.is_broken
    assert private.auc < 0.65


def test_likelihoods_compare_with_shadow_models_of_both_kinds():
    # Example 0 has confidence 3 with it and 1 without; example 1 has 9 with it and 7 without.
    coins = np.array([[True, True], [True, True], [False, False], [False, False]])
    shadows = np.array([[2.5, 9.5], [3.5, 8.5], [0.5, 7.5], [1.5, 6.5]])
    scores = compute_likelihood_ratios(np.array([3.0, 7.0]), shadows, coins)
    # Each deviation is 1/2, of two degrees of freedom for four: a variance of 1/2, and (2² - 0) / 2 / 0.5 = 4.
    assert scores == pytest.approx([4.0, -4.0])
    assert compute_logit(np.array([math.log(2.0)])) == pytest.approx([0.0])
    assert np.isfinite(compute_logit(np.array([0.0, np.inf, np.nan]))).all()
    only_members = compute_likelihood_ratios(np.array([3.0, 7.0]), shadows, np.ones_like(coins))
    assert np.isfinite(only_members).all()


@pytest.mark.extended
def test_shadow_models_tell_members_of_a_run_and_private_gradients_hide_them(audit):
    few = {**OVERFIT, "run": {**OVERFIT["run"], "rounds": 2, "local_test_fraction": 0.9}}
    few["strategy"] = {"name": "fedavg", "epochs": 20, "learning_rate": 0.5}
    plain = audit(few, num_canaries=60, shadows=8, devices=2)
    assert (plain.unit, plain.shadows) == ("example", 8)
    assert plain.auc > 0.7
    few = {**few, "strategy": {**few["strategy"], "epochs": 2}, "privacy": {**OF_EXAMPLES, "delta": 1e-3}}
    private = audit(few, num_canaries=60, shadows=4, devices=2)
    assert not private.is_broken
    assert private.auc < 0.85, "its noise has no seed: of 60 coins 0.85 is 4.7 deviations above a half"


def test_shadow_models_need_the_cross_entropy_of_one_class(audit, monkeypatch):
    simulated = []
    monkeypatch.setattr(privacy_audit, "simulate_with_data", lambda *_, **__: simulated.append(1) or 1 / 0)
    few = {**OVERFIT, "task": {"loss": "mse"}}
    with pytest.raises(DataError, match=r"LiRA needs the cross-entropy of one class .* 10 classes sum to"):
        audit(few, num_canaries=16, shadows=4, devices=2)
    assert not simulated, "no shadow is trained for nothing"
    with pytest.raises(ZeroDivisionError):
        audit(OVERFIT, num_canaries=16, shadows=4, devices=2)


def test_canaries_are_as_the_coin_says_whatever_is_audited(audit):
    first, second = audit(num_canaries=16), audit(num_canaries=16)
    assert (first.included, first.correct) == (second.included, second.correct)
    assert 0 < first.included < 16


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        ({}, {"num_canaries": 7}, ConfigError, "an audit needs at least 8 canaries, got 7"),
        ({}, {"confidence": 1.0}, ConfigError, r"confidence of an audit must be in \(0, 1\), got 1"),
        ({}, {"num_canaries": 5000}, ConfigError, "5000 canaries are too many for a model of [0-9]+ parameters"),
        ({}, {"num_canaries": 5000, "unit": "example"}, DataError, "5000 canaries are more than half of the"),
        ({}, {"shadows": 3}, ConfigError, "LiRA needs at least 4 shadow models, got 3"),
        ({}, {"shadows": 8, "unit": "device"}, ConfigError, "shadow models are of examples"),
        (
            {"devices": {"groups": ["lab"]}},
            {},
            ConfigError,
            "leave devices.names, devices.groups and devices.exclude out",
        ),
        ({"simulation": {"accelerator": "cuda"}}, {}, ConfigError, "in this process, on the CPU"),
        ({"simulation": {"workers": 2}}, {}, ConfigError, "in this process, on the CPU"),
    ],
)
def test_what_cannot_be_audited_is_said_in_a_line(audit, changes, options, error, message):
    with pytest.raises(error, match=message):
        audit({**PLAIN, **changes}, **options)
