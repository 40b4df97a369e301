"""Divergence of a run: what is said of losses that rise, swing or stand still, and what is done."""

import math
from dataclasses import replace

import numpy as np
import pytest

from edgefl.engine.divergence import (
    MAX_LOSS,
    MAX_ROUND_LOSSES,
    QUIET_ROUNDS,
    DivergenceDetector,
    DivergenceRule,
    make_advice,
)
from edgefl.storage.state_serialisation import decode_state, encode_state

UNTRAINED = math.log(10)
RULE = DivergenceRule(untrained_loss=UNTRAINED, smaller="take less", other="take another")


def play(losses, *, rule=RULE, iterations=1000, devices=3):
    """Returns what is found in rounds with these losses, each of all devices."""
    detector, found = DivergenceDetector(), []
    for number, loss in enumerate(losses, 1):
        for _ in range(devices):
            detector.add_update(loss, iterations // devices)
        found.append(detector.close_round(number, rule))
    return [finding for finding in found if finding is not None]


GOOD = {
    "it falls": [2.3 * 0.8**number for number in range(60)],
    "it falls, then stays low and noisy": [
        max(0.02, 2.3 - 0.4 * number) * (1.5 + (-1) ** number) for number in range(40)
    ],
    "it begins above an untrained model's": [3.1, 2.9, 2.6, 2.2, 1.9, 1.5],
    "one bad round": [2.0, 1.5, 1.0, 9.0, 0.9, 0.8, 0.7, 0.6, 0.5],
    "it converges to a high loss": [2.3, 2.1, 2.0, *[1.9] * 40],
}


@pytest.mark.parametrize("losses", GOOD.values(), ids=GOOD)
def test_nothing_is_said_of_a_loss_that_falls_or_has_fallen(losses):
    assert play(losses) == []


BAD = {
    "diverges: it is 3": ([3.0, 4.0, 2.9, 3.0], 4),
    "diverges: it is not finite": ([math.inf] * 4, 4),
    "diverges: it rises from 0.4 to 1.8": ([1.0, 0.4, 0.4, 0.4, 1.8, 1.9, 2.0], 7),
    "oscillates between 0.3 and 1.9": ([0.3, 1.9] * 4, 8),
    "stands still: it is 2.31 after 8 rounds": ([2.31] * 9, 9),
}


@pytest.mark.parametrize(("words", "case"), BAD.items(), ids=list(BAD))
def test_what_is_wrong_is_said_in_words_with_what_would_help(words, case):
    losses, last = case
    (finding,) = play(losses)
    assert words in finding.message
    assert finding.message.startswith(f"round {finding.round}: the training loss ")
    assert finding.round <= last
    assert finding.message.endswith("take another" if words.startswith("stands") else "take less")


def test_few_steps_are_no_standstill():
    assert play([2.31] * 20, iterations=9) == []


def test_a_regression_that_has_learned_all_in_its_first_round_is_no_standstill():
    detector, rule = DivergenceDetector(), replace(RULE, untrained_loss=None)
    for loss in [0.28] * 20:
        detector.add_update(loss, 100)
        assert detector.close_round(1, rule) is None


@pytest.mark.parametrize("iterations", [9, 100])
def test_after_a_halving_a_loss_that_does_not_come_down_in_some_steps_is_said_though_it_varies(iterations):
    detector = DivergenceDetector(num_halvings=1)
    found = []
    for number, loss in enumerate([2.2, 2.4, 1.9, 2.3, 3.4, 2.3, 2.0, 2.4, 2.3, 2.3, 2.3, 2.3], start=1):
        detector.add_update(loss, iterations)
        found += filter(None, [detector.close_round(number, RULE)])
    assert [(one.round, "does not recover: it is 2.3 after" in one.message) for one in found] == (
        [(5, True)] if iterations == 100 else []
    )


def test_without_a_word_of_the_task_the_first_loss_is_the_measure():
    rule = DivergenceRule()
    assert play([40.0, 30.0, 22.0, 15.0, 9.0, 7.0], rule=rule) == []
    (finding,) = play([40.0, 60.0, 70.0, 90.0, 95.0], rule=rule)
    assert "it is 95, that of the first round 40" in finding.message


def test_it_is_not_said_again_at_once():
    assert [finding.round for finding in play([5.0] * 30)] == [4, 4 + QUIET_ROUNDS, 4 + 2 * QUIET_ROUNDS]


@pytest.mark.parametrize("devices", [2, 3])
def test_no_device_makes_a_run_diverge_alone(devices):
    detector = DivergenceDetector()
    for number in range(1, 40):
        for device in range(devices):
            detector.add_update(MAX_LOSS * 10 if device == 0 else 1 / number, 100)
        assert detector.close_round(number, RULE) is None


def test_the_loss_on_the_test_data_counts_too():
    detector, found = DivergenceDetector(), None
    for number in range(1, 6):
        detector.add_update(0.5, 100)
        detector.add_evaluation(8.0)
        found = found or detector.close_round(number, RULE)
    assert "the loss on the test data diverges: it is 8" in found.message


def test_updates_that_are_not_finite_are_told_before_the_run_has_no_device_left():
    detector = DivergenceDetector()
    detector.add_not_finite("a")
    detector.add_not_finite("a")
    assert detector.find_not_finite(3, 3, RULE) is None  # one of three
    detector.add_not_finite("b")
    assert "not finite" in detector.find_not_finite(3, 3, RULE).message
    detector.add_not_finite("a")
    detector.add_update(1.0, 10)
    detector.add_not_finite("b")
    assert detector.find_not_finite(40, 3, RULE) is None  # one that is finite came between


def test_the_last_good_model_is_the_first_until_one_has_learned_and_the_one_that_the_best_losses_are_of():
    detector, good = DivergenceDetector(), []
    detector.keep_model({"w": np.array(0)})
    for number, loss in enumerate([4.0, 2.3, 2.29, 1.0, 0.5, 0.5, 0.5, 9.0], 1):
        detector.add_update(loss, 100)
        detector.close_round(number, RULE)
        detector.keep_model({"w": np.array(number)})
        good.append(int(detector.good_model["w"]))
    # The median of three falls below an untrained model's in round 5, whose devices began with the model of round 4.
    assert good == [0, 0, 0, 0, 4, 5, 5, 5]


def test_a_model_that_learns_each_devices_few_classes_and_not_the_test_data_is_no_good_one():
    detector, good = DivergenceDetector(), []
    detector.keep_model({"w": np.array(0)})
    tested = [2.6, 2.3, 2.3, 2.3, 2.3, 2.3, 2.3, 2.3, 2.3, 1.0, 1.0]
    for number, loss in enumerate(tested, 1):
        detector.add_update(1.9 - number / 10, 100)
        detector.close_round(number, RULE)
        detector.keep_model({"w": np.array(number)})
        detector.add_evaluation(loss)
        good.append(int(detector.good_model["w"]))
        if number == 8:
            detector.start_again(None)
    # An evaluation is of the model before; in round 9 there is none since the new start.
    assert good == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 10]


def test_the_model_of_a_round_after_which_something_is_found_is_no_good_one():
    detector, best = DivergenceDetector(), []
    for number in range(1, 11):
        detector.add_update(2.1 - number / 10, 600)
        detector.add_evaluation(2.3 if number < 9 else 1.0)
        found = detector.close_round(number, RULE)
        best.append(detector.is_best)
        assert (found is not None) == (number == 9), "the median of the last three evaluations stands still once more"
    assert best == [False] * 9 + [True]


def test_its_memory_is_bounded_and_kept_over_a_restart():
    detector = DivergenceDetector()
    for number in range(5 * MAX_ROUND_LOSSES):
        detector.add_update(float(number), 1)
        detector.add_not_finite(f"device-{number}")
    assert len(detector.losses) == MAX_ROUND_LOSSES
    assert len(detector.not_finite) <= MAX_ROUND_LOSSES
    for number in range(3):
        detector.close_round(number, RULE)
        detector.add_update(math.nan, 1)
    restored = decode_state(encode_state(detector), DivergenceDetector)
    assert restored == detector
    assert restored.close_round(9, RULE) == detector.close_round(9, RULE)


@pytest.mark.parametrize(
    ("rate", "smaller", "other"),
    [
        (10.0, "strategy.learning_rate = 10 is too high: start again with 0.5", "= 10 is too high"),
        (
            0.5,
            "strategy.learning_rate = 0.5 is too high here: start again with 0.125",
            "another strategy.learning_rate",
        ),
        (0.01, "start again with 0.0025", "start again with strategy.learning_rate = 0.5, which suits this task"),
    ],
)
def test_the_advice_follows_from_what_the_task_recommends(rate, smaller, other):
    advice = make_advice("learning_rate", rate, 0.5, None)
    assert smaller in advice["smaller"]
    assert other in advice["other"]
