"""Property inference: told from plain updates, not from strongly noised ones."""

import math
from importlib.util import find_spec

import numpy as np
import pytest

from edgefl.core.config import parse_run
from edgefl.core.errors import ConfigError, DataError
from edgefl.simulation.attacks.property_inference import Property, audit_property, classify, compute_interval
from edgefl.simulation.simulated_run import prepare_simulation

PLAIN = {
    "run": {"task": "digits", "rounds": 20, "seed": 3, "evaluate_on": "none"},
    "strategy": {"name": "fedavg", "epochs": 1, "learning_rate": 0.1},
    "guard": {"enabled": False},
}
ZEROS = Property(class_number=0, share=0.5)


@pytest.fixture
def infer():
    def call(changes=None, *, requested=ZEROS, devices=6, **options):
        config, data = prepare_simulation(parse_run({**PLAIN, **(changes or {})}), devices=devices)
        found = audit_property(config, data, requested, **{"num_examples": 30, "num_trials": 40, **options})
        return {(audit.settings, audit.seen_by): audit for audit in found}

    return call


def test_a_class_is_told_from_plain_updates_and_not_from_those_of_strongly_noised_gradients(infer):
    privacy = {"unit": "example", "epsilon": 0.1, "delta": 1e-5, "clip": 1.0}
    found = infer({"privacy": privacy})
    assert found["plain", "coordinator"].accuracy > 0.9
    assert found["plain", "coordinator"].low > 0.5
    noised = found["run", "coordinator"]
    assert noised.accuracy < 0.8, "its noise has no seed: of 40 coins 0.8 is 3.8 deviations above a half"
    assert (noised.boards, noised.examples, noised.trials) == (1, 30, 40)


@pytest.mark.skipif(
    find_spec("dp_accounting") is None,
    reason="dp-accounting is not installed: pip install -e '.[privacy]' -c constraints.txt",
)
def test_privacy_of_devices_hides_a_class_from_who_gets_the_models_and_not_from_the_coordinator(infer):
    found = infer({"privacy": {"unit": "device", "epsilon": 0.5, "delta": 1e-5, "clip": 0.5, "boards": 6}})
    assert found["run", "coordinator"].accuracy > 0.9
    assert found["run", "models"].boards == 6
    assert found["run", "models"].accuracy < 0.8


def test_a_run_without_protection_has_the_plain_view_once_and_the_models(infer):
    assert infer().keys() == {("plain", "coordinator"), ("run", "models")}


def test_the_classifier_tells_what_differs_and_guesses_where_nothing_does():
    rng = np.random.default_rng(0)
    has = np.arange(40) % 2 == 0
    noise = rng.standard_normal((80, 200))
    signal = noise + 3.0 * np.where(np.tile(has, 2), 1.0, -1.0)[:, None] * (np.arange(200) == 7)
    assert (classify(signal[:40], has, signal[40:]) == has).mean() > 0.8
    assert 0.2 < (classify(noise[:40], has, noise[40:]) == has).mean() < 0.8
    assert not classify(np.ones((4, 3)), has[:4], np.ones((2, 3))).any()


def test_the_interval_is_wilsons():
    # z = 1.96: (0.8 + z²/200 ± z sqrt(0.16/100 + z²/40000)) / (1 + z²/100)
    assert compute_interval(0.8, 100, 0.95) == pytest.approx((0.7112, 0.8666), abs=1e-4)
    assert compute_interval(1.0, 40, 0.95) == pytest.approx((0.9124, 1.0), abs=1e-4)
    assert all(map(math.isfinite, compute_interval(0.0, 20, 0.99)))


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        ({}, {"num_trials": 21}, ConfigError, "an even number of trials from 20, got 21"),
        ({}, {"confidence": 1.0}, ConfigError, r"confidence of an audit must be in \(0, 1\), got 1"),
        (
            {},
            {"requested": Property(class_number=0, share=1.5)},
            ConfigError,
            r"share of a class must be in \(0, 1\]",
        ),
        (
            {},
            {"requested": Property(class_number=11, share=0.5)},
            DataError,
            "half of the examples has 0 of class 11",
        ),
        ({"strategy": {"name": "fedavg", "seconds": 1.0}}, {}, ConfigError, "give strategy.epochs or iterations"),
        ({"strategy": {"name": "dsgd"}}, {}, ConfigError, "a strategy whose boards send the update of one model"),
        ({"compression": {"up": "auto"}}, {}, ConfigError, "one codec as compression.up, got 'auto'"),
    ],
)
def test_what_cannot_be_attacked_is_said_in_a_line(infer, changes, options, error, message):
    with pytest.raises(error, match=message):
        infer(changes, **options)
