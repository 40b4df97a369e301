"""The tally in a model says which trainings were lost and which count twice."""

import re

import numpy as np
import pytest


@pytest.fixture(scope="module")
def tallied(harness):
    return harness("tallied_task")


def make_tally(columns, trainings=6):
    """Returns a model of three devices whose tally begins with these columns."""
    tally = np.zeros((3, trainings), np.float32)
    tally[:, : len(columns)] = np.transpose(columns)
    return {"tally": tally}


ALL, FIRST_TWO = [1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0.0]
WHOLE, SHORT = (2, frozenset({0, 1, 2})), (2, frozenset({0, 1}))


def test_even_means_of_those_whose_updates_were_used_are_right(tallied):
    assert tallied.list_faults(make_tally([ALL, ALL, ALL, FIRST_TWO]), [WHOLE, SHORT]) == []


@pytest.mark.parametrize(
    ("columns", "rounds", "fault"),
    [
        (
            [ALL, FIRST_TWO],
            [WHOLE],
            r"round 1, lost or doubled: \[0, 1\] are in it, the updates of \[0, 1, 2\] were used",
        ),
        ([ALL, [1 / 3, 1 / 3, 0.0]], [WHOLE], "round 1, lost: 0.3333, 0.3333, 0"),
        ([ALL, ALL, [2 / 3, 1 / 3, 1 / 3], ALL], [WHOLE, WHOLE], "round 2, doubled"),
        ([ALL, [0.5, 0.25, 0.25]], [WHOLE], "round 1, doubled"),
        ([FIRST_TWO, ALL], [WHOLE], "round 1, lost or doubled"),
        ([ALL, ALL, ALL], [WHOLE], "there are more than 2 trainings"),
    ],
)
def test_what_was_lost_or_counted_twice_is_said_with_its_round(tallied, columns, rounds, fault):
    (said, *_) = tallied.list_faults(make_tally(columns), rounds)
    assert re.search(fault, said)


def test_a_device_adds_itself_to_the_training_that_the_model_has_come_to(tallied):
    task = tallied.TalliedTask(devices=3, trainings=4, size_bytes=1000)
    assert sum(spec.size for spec in task.shapes()) * 4 == 1000
    task.read("shards/2.npz")
    learner = task.learner()
    learner.load(task.init(1) | make_tally([ALL, FIRST_TWO], trainings=4))
    learner.gradient(None)
    expected = np.zeros((3, 4), np.float32)
    expected[2, 2] = -1.0
    np.testing.assert_array_equal(learner.gradients["tally"], expected)
    assert np.abs(learner.gradients["weights"]).max() > 0
