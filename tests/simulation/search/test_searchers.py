"""What a search proposes: in its space, the same again for the same trials, and by Optuna from what came before."""

import math

import pytest

from edgefl.core.errors import ConfigError
from edgefl.simulation.search.searchers import SEARCHERS, Range, Trial, parse_range

SPACE = {
    "rate": Range(low=1e-4, high=1.0, is_log=True),
    "epochs": Range(low=1, high=4, is_int=True),
    "momentum": Range(low=0.0, high=0.9),
    "up": ("dense", ["topk:0.01", "int8"]),
}


@pytest.fixture(params=SEARCHERS)
def propose(request):
    if request.param == "optuna":
        pytest.importorskip("optuna", reason="optuna is not installed: pip install 'edgefl-fleet[optuna]'")
    return SEARCHERS[request.param]


def search(propose, num_trials, value, seed=7):
    trials = []
    for number in range(num_trials):
        values = propose(SPACE, trials, seed)
        states = {"value": value(values)}, {"value": value(values), "stopped_at": 1}, {}
        trials.append(
            Trial(values=values, is_ended=number % 7 != 6, **states[(number % 7 == 3) + 2 * (number % 7 == 6)])
        )
    return [trial.values for trial in trials]


def test_proposals_lie_in_the_space_differ_and_follow_from_the_seed_and_the_trials(propose):
    found = search(propose, 30, lambda values: values["rate"])
    assert found == search(propose, 30, lambda values: values["rate"])
    assert found != search(propose, 30, lambda values: values["rate"], seed=8)
    assert all(1e-4 <= values["rate"] <= 1 and 0 <= values["momentum"] <= 0.9 for values in found)
    assert {values["epochs"] for values in found} == {1, 2, 3, 4}
    assert all(type(values["epochs"]) is int for values in found)
    assert {str(values["up"]) for values in found} == {"dense", "['topk:0.01', 'int8']"}
    assert len({values["rate"] for values in found}) > 20
    assert all(len(f"{values['rate']:.12g}".strip("0.e-").replace(".", "")) <= 7 for values in found)


def test_a_logarithmic_range_has_as_many_small_values_as_large_ones():
    found = [SEARCHERS["random"]({"rate": SPACE["rate"]}, [None] * number, 7)["rate"] for number in range(400)]
    assert 160 < sum(rate < 1e-2 for rate in found) < 240


def test_optuna_comes_near_to_what_was_best():
    pytest.importorskip("optuna", reason="optuna is not installed: pip install 'edgefl-fleet[optuna]'")
    found = search(SEARCHERS["optuna"], 40, lambda values: abs(math.log10(values["rate"]) + 1.5))
    errors = [abs(math.log10(values["rate"]) + 1.5) for values in found]
    assert sum(errors[30:]) / 10 < 0.6 * sum(errors[:10]) / 10


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.01..0.5", Range(low=0.01, high=0.5)),
        ("1e-3..1:log", Range(low=0.001, high=1.0, is_log=True)),
        (" -2..8 ", Range(low=-2, high=8, is_int=True)),
        ("1..8:log", Range(low=1, high=8, is_int=True, is_log=True)),
        ("../a", None),
        ("1,2", None),
        ("a..b", None),
        ("1..2..3", None),
    ],
)
def test_a_range_is_two_numbers_whole_ones_of_whole_ones(text, expected):
    assert parse_range("strategy.x", text) == expected


@pytest.mark.parametrize("text", ["2..1", "1..1", "0..1:log", "-1..1:log", "-1e308..1e308", "1..1e999"])
def test_a_range_that_makes_no_sense_is_refused(text):
    with pytest.raises(ConfigError, match=r"strategy\.x: a range must be"):
        parse_range("strategy.x", text)
