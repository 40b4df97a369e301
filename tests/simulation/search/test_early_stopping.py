"""ASHA: where the rungs are, and which runs go on at one."""

import math

import pytest

from edgefl.core.errors import ConfigError
from edgefl.simulation.search.early_stopping import (
    Asha,
    AshaSettings,
    RungReporter,
    find_rung_metrics,
    parse_early_stop,
)


def make_row(number, accuracy, closed_at=1.0):
    return {
        "round": number, "accuracy": accuracy, "loss": None, "closed_at": closed_at, "bytes_up": 0, "bytes_down": 0,
    }  # fmt: skip


@pytest.mark.parametrize(("text", "eta", "first"), [("asha", 3, 1), ("asha:4", 4, 1), ("asha:2:5", 2, 5)])
def test_a_text_says_eta_and_the_first_rung_and_comes_back(text, eta, first):
    settings = parse_early_stop(text)
    assert settings == AshaSettings(eta=eta, first_rung=first)
    assert parse_early_stop(str(settings)) == settings


@pytest.mark.parametrize(
    "text", ["", "ASHA", "asha:1", "asha:101", "asha:3:0", "asha:3:1:1", "asha:-3", "asha:²", "hb"]
)
def test_what_is_no_early_stopping_is_refused(text):
    with pytest.raises(ConfigError, match="asha:ETA:FIRST"):
        parse_early_stop(text)


def test_rungs_lie_eta_times_further_each_and_before_the_last_round():
    assert [*AshaSettings(eta=3, first_rung=2).list_rungs(54)] == [2, 6, 18]
    assert [*AshaSettings(eta=3, first_rung=2).list_rungs(55)] == [2, 6, 18, 54]


def test_the_best_third_of_those_that_came_so_far_go_on_by_seed_and_rung():
    asha = Asha(AshaSettings(eta=3))
    scores = [0.5, 0.4, 0.6, 0.3, 0.2, 0.55]
    goes_on = [not asha.judge(f"run-{number}", 7, 1, score) for number, score in enumerate(scores)]
    assert goes_on == [True, False, True, False, False, True]  # of 6 the best two, of fewer the best one
    assert asha.judge("other", 8, 1, 0.1) == "", "runs with another seed are not compared"
    assert asha.judge("run-2", 7, 3, 0.1) == "", "nor those at another rung"
    assert asha.judge("run-5", 7, 3, 0.05) == "stopped early by asha:3:1 at round 3: place 2 of 2"


def test_a_run_that_is_simulated_again_is_counted_once_and_one_that_diverged_ends():
    asha = Asha(AshaSettings(eta=2))
    assert asha.record("a", 7, 1, 0.5) == asha.record("a", 7, 1, 0.6) == (1, 1)
    assert "not a finite number" in asha.judge("b", 7, 1, math.nan)
    assert asha.record("c", 7, 1, 0.1) == (2, 3)


def test_a_rung_has_the_metrics_of_the_first_round_from_it_on_that_is_closed_and_evaluated():
    rows = [make_row(1, 0.1), make_row(2, None), make_row(3, 0.3, closed_at=None), make_row(4, 0.4)]
    assert find_rung_metrics(rows, 1)["accuracy"] == 0.1
    assert find_rung_metrics(rows, 2)["accuracy"] == 0.4
    assert find_rung_metrics(rows, 5) is None


def test_each_rung_is_reported_once_until_a_reason_ends_the_run():
    reported = []

    def report(rung, metrics):
        reported.append((rung, metrics["accuracy"]))
        return "behind" if rung == 4 else ""

    reporter, rows = RungReporter(AshaSettings(eta=2), 100, report), []
    reasons = []
    for number in range(1, 5):
        rows.append(make_row(number, number / 10))
        reasons.append(reporter(number, lambda: rows))
    assert reasons == ["", "", "", "behind"]
    assert reported == [(1, 0.1), (2, 0.2), (4, 0.4)]


def test_a_run_that_has_done_all_its_rounds_is_not_judged():
    rows = [make_row(1, None), make_row(2, None), make_row(3, 0.1)]
    reporter = RungReporter(AshaSettings(eta=2), 3, lambda _rung, _metrics: "behind")
    assert reporter(3, lambda: rows) == ""
    assert find_rung_metrics(rows, 1, 4)["accuracy"] == 0.1


def test_the_rung_at_which_a_run_was_ended_is_found_again_among_the_same_runs_alone():
    asha = Asha(AshaSettings(eta=3), "these")
    assert asha.judge("a", 7, 9, 0.5) == ""
    reason = asha.judge("b", 7, 9, 0.4)
    assert reason == "stopped early by asha:3:1 in these at round 9: place 2 of 2"
    assert asha.find_last_rung(reason) == 9
    assert [Asha(AshaSettings(eta=eta), "others").find_last_rung(reason) for eta in (3, 2)] == [None, None]
    assert asha.find_last_rung(None) is None
