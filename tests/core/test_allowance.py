"""What a board's hours and budgets allow: what is believed of a report, and which works fit."""

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.core.allowance import (
    MAX_SECONDS,
    WORK_MARGIN,
    Allowance,
    BudgetLeft,
    Window,
    WorkCost,
    format_duration,
    parse_allowance,
)
from edgefl.core.conditions import MAX_RUN_CHARS

NIGHT = Window(ends_s=3600.0, reopens_s=60_000.0)
FULL = Allowance(
    window=NIGHT,
    run="r-1",
    run_window=Window(ends_s=1800.0),
    budgets=(
        BudgetLeft(kind="traffic", period="day", left=5e6, limit=1e7, renews_s=7200.0),
        BudgetLeft(kind="processor", period="month", left=900.0, limit=1e5, renews_s=1e6, per_s=2.0),
    ),
)


def test_a_report_comes_through_json_as_it_was_and_through_the_journal():
    assert parse_allowance(json.loads(json.dumps(FULL.to_json()))) == FULL
    assert Allowance.from_fields(json.loads(json.dumps(asdict(FULL)))) == FULL


def test_what_is_left_is_rounded_so_that_no_board_is_asked_for_more():
    budget = BudgetLeft(kind="energy", period="day", left=9.9, limit=20.1, renews_s=60.2, per_s=1 / 3)
    read = parse_allowance(Allowance(window=Window(ends_s=9.9), budgets=(budget,)).to_json())
    assert (read.window.ends_s, read.budgets[0].left, read.budgets[0].per_s) == (9.0, 9.0, 0.3333)


@pytest.mark.parametrize(
    "value",
    [
        None, 3, "x", [], {}, {"window": None}, {"window": 3}, {"window": [1]}, {"window": [1, 2, 3]},
        {"window": [-1, None]}, {"window": [float("nan"), None]}, {"window": [float("inf"), None]},
        {"window": [True, None]}, {"window": ["1", None]}, {"window": [1, -1]}, {"day": 3}, {"day": {}},
        {"day": {"renews_s": 5}}, {"day": {"renews_s": 5, "traffic": 3}}, {"day": {"renews_s": 5, "traffic": [1, 2]}},
        {"day": {"renews_s": 5, "traffic": [-1, 2, None]}}, {"day": {"renews_s": 5, "traffic": [1, 2, -1]}},
        {"day": {"renews_s": 5, "traffic": [1e19, 2, None]}}, {"day": {"traffic": [1, 2, None]}},
        {"week": {"renews_s": 5, "traffic": [1, 2, None]}}, {"day": {"renews_s": 5, "water": [1, 2, None]}},
    ],
)  # fmt: skip
def test_a_report_that_makes_no_sense_is_none(value):
    assert parse_allowance(value) is None


@pytest.mark.parametrize(("kind", "per_s"), [("energy", 0), ("energy", 5e-324), ("energy", 1e-10), ("traffic", 1)])
def test_a_use_a_second_that_makes_no_sense_is_not_known_and_iterations_are_counted_all_the_same(kind, per_s):
    read = parse_allowance({"day": {"renews_s": 60, kind: [1e18, 1e18, per_s]}})
    assert read.budgets[0].per_s is None
    assert read.count_fitting(1e9, 0.0) is None


def test_a_report_is_bounded():
    read = parse_allowance({"window": [1e12, 1e12], "run": "r" * 1000, "run_window": [5, None], "x": "y"})
    assert read.window == Window(ends_s=MAX_SECONDS, reopens_s=MAX_SECONDS)
    assert len(read.run) == MAX_RUN_CHARS


def test_a_work_fits_up_to_the_end_of_the_hours_and_not_beyond_it():
    board = Allowance(window=NIGHT)
    longest_s = (3600.0 - 100.0 - 60.0) / WORK_MARGIN
    assert board.find_shortage(WorkCost(seconds=longest_s, download_s=60.0), 100.0) is None
    found = board.find_shortage(WorkCost(seconds=longest_s + 1, download_s=60.0), 100.0)
    assert (found.kind, found.free_at_s) == ("hours", 60_000.0)
    assert found.reason == "its hours end in 58.3 min, and one work may take 58.4 min"
    assert board.find_shortage(WorkCost(seconds=None), 100.0) is None, "what is not known fits"
    assert board.find_shortage(WorkCost(seconds=1.0), 4000.0).kind == "hours"
    assert board.find_shortage(WorkCost(seconds=1e9), 60_000.0) is None, "of the next hours nothing is known"


@pytest.mark.parametrize(
    ("kind", "per_s", "cost", "fits"),
    [
        ("traffic", None, WorkCost(seconds=None, num_bytes=1000.0), True),
        ("traffic", None, WorkCost(seconds=None, num_bytes=1001.0), False),
        ("traffic", None, WorkCost(seconds=1e9), True),
        ("processor", 4.0, WorkCost(seconds=200.0), True),
        ("processor", 4.0, WorkCost(seconds=200.1), False),
        ("processor", None, WorkCost(seconds=1e9), True),
        ("energy", 5.0, WorkCost(seconds=161.0), False),
        ("written", 5.0, WorkCost(seconds=159.0, num_bytes=1e9), True),
    ],
)
def test_a_work_fits_into_what_is_left_of_a_budget_until_that_begins_anew(kind, per_s, cost, fits):
    budget = BudgetLeft(kind=kind, period="day", left=1000.0, limit=5000.0, renews_s=600.0, per_s=per_s)
    found = Allowance(budgets=(budget,)).find_shortage(cost, 599.0)
    assert (found is None) == fits
    assert Allowance(budgets=(budget,)).find_shortage(cost, 600.0) is None
    if not fits:
        assert (found.kind, found.free_at_s) == ("budget", 600.0)


def test_the_words_say_how_much_is_left_of_what():
    budget = BudgetLeft(kind="traffic", period="month", left=2.5e6, limit=5e8, renews_s=60.0)
    found = Allowance(budgets=(budget,)).find_shortage(WorkCost(seconds=1.0, num_bytes=3e6), 0.0)
    assert found.reason == "it has 2.5 of 500 MB of this month left, and one work may use 3"
    assert (
        FULL.describe(0.0)
        == "30 min of its hours, 5 of 10 MB of this day, 900 of 1e+05 processor seconds of this month"
    )


def test_a_budget_that_never_holds_a_work_says_so_and_no_time():
    budget = BudgetLeft(kind="traffic", period="month", left=5e8, limit=5e8, renews_s=60.0)
    never = Allowance(budgets=(budget,)).find_shortage(WorkCost(seconds=1.0, num_bytes=6e8), 0.0)
    assert (never.reason, never.free_at_s) == ("its 500 MB a month hold no work, which may use 600", None)


def test_iterations_are_counted_that_fit_into_hours_and_budgets():
    assert Allowance(window=NIGHT).count_fitting(10.0, 1000.0, download_s=100.0) == 200  # 2500 s of 12.5
    assert FULL.count_fitting(10.0, 0.0) == 36  # 900 processor seconds, 2 a second
    assert FULL.count_fitting(1000.0, 0.0) == 0
    assert FULL.count_fitting(10.0, 1e6) is None, "hours and budgets of another time"
    assert Allowance(budgets=FULL.budgets[:1]).count_fitting(10.0, 0.0) is None


def test_the_hours_of_a_run_count_for_it_alone():
    assert FULL.select_run("r-1").window.ends_s == 1800.0
    assert FULL.select_run("r-2").window == NIGHT
    assert FULL.select_run("r-2").run_window is None


def test_only_more_than_before_or_other_hours_are_news():
    def board(left=100.0, ends_s=3600.0, kind="energy"):
        budget = BudgetLeft(kind=kind, period="day", left=left, limit=1000.0, renews_s=600.0)
        return Allowance(window=Window(ends_s=ends_s), budgets=(budget,))

    assert board(left=99.0, ends_s=3601.0).is_within(board())
    assert not board().is_within(None)
    assert board(left=110.0).is_within(board()), "the margin of a board varies"
    assert not board(left=111.0).is_within(board())
    assert not board(kind="traffic").is_within(board())
    assert not board(ends_s=3700.0).is_within(board())
    assert not board(ends_s=3500.0).is_within(board())
    assert not Allowance(budgets=board().budgets).is_within(board())
    assert not FULL.select_run("r-1").is_within(FULL)


@given(st.floats(0, 1e7), st.floats(0.001, 1e4), st.floats(0, 1e6), st.floats(0.01, 100))
def test_as_many_iterations_as_are_counted_are_a_work_that_fits_and_one_more_is_not(ends_s, step_s, left, per_s):
    budget = BudgetLeft(kind="energy", period="day", left=left, limit=1e6, renews_s=1e9, per_s=per_s)
    board = Allowance(window=Window(ends_s=ends_s), budgets=(budget,))
    count = board.count_fitting(step_s, 0.0)
    assert board.find_shortage(WorkCost(seconds=count * step_s * (1 - 1e-6)), 0.0) is None
    assert board.find_shortage(WorkCost(seconds=(count + 1) * step_s * (1 + 1e-6)), 0.0) is not None


def test_a_clock_that_is_ahead_moves_all_times():
    moved = FULL.shift(50.0)
    assert (moved.window.ends_s, moved.window.reopens_s, moved.run_window.ends_s) == (3650.0, 60_050.0, 1850.0)
    assert [budget.renews_s for budget in moved.budgets] == [7250.0, 1_000_050.0]
    assert moved.shift(-50.0) == FULL


@pytest.mark.parametrize(("seconds", "text"), [(5.0, "5 s"), (-3.0, "0 s"), (90.0, "1.5 min"), (9000.0, "2.5 h")])
def test_durations_are_short(seconds, text):
    assert format_duration(seconds) == text
