"""Learning rates by round, against values worked out by hand."""

import pytest

from edgefl.core.errors import ConfigError, StrategyError
from edgefl.strategies.learning_rate_schedules import SCHEDULES, parse_schedule


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("constant", [1, 1, 1, 1, 1]),
        ("step:2:0.5", [1, 1, 0.5, 0.5, 0.25]),
        ("exponential:0.5", [1, 0.5, 0.25, 0.125, 0.0625]),
        ("inverse-sqrt", [1, 2**-0.5, 3**-0.5, 0.5, 5**-0.5]),
        ("cosine:4", [1, 0.5 + 2**-1.5, 0.5, 0.5 - 2**-1.5, 0]),
        ("linear:4", [1, 0.75, 0.5, 0.25, 0]),
    ],
)
def test_the_factor_follows_the_closed_rounds(spec, expected):
    schedule = parse_schedule(spec)
    assert [schedule(done) for done in range(5)] == pytest.approx(expected, abs=1e-12)


def test_a_schedule_that_ends_stays_at_its_end_and_each_that_is_listed_begins_at_one():
    assert parse_schedule("linear:4")(100) == parse_schedule("cosine:4")(100) == 0.0
    for listed in SCHEDULES:
        assert parse_schedule(listed.replace("N", "5").replace("F", "0.9"))(0) == 1.0


@pytest.mark.parametrize(
    "spec", ["", "steps:2:0.5", "step:2", "linear", "linear:x", "linear:0", "step:2:-1", "cosine:inf"]
)
def test_a_schedule_that_makes_no_sense_is_refused_with_its_text(spec):
    with pytest.raises(ConfigError, match=r"strategy\.schedule") as caught:
        parse_schedule(spec)
    assert repr(spec) in str(caught.value)


@pytest.mark.parametrize("spec", ["exponential:2", "step:1:1e300", "step:1e-300:2", "step:1e-320:2"])
def test_a_schedule_that_outgrows_all_numbers_says_so_by_its_text(spec):
    schedule = parse_schedule(spec)
    assert schedule(0) == 1.0
    with pytest.raises(StrategyError, match=r"strategy\.schedule .* after 2000 closed rounds") as caught:
        schedule(2000)
    assert repr(spec) in str(caught.value)
