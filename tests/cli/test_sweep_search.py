"""`edgefl sweep --search --early-stop` as a user types it: what is stopped, what goes on, and what is refused."""

import json
import sqlite3
from contextlib import closing

import pytest

from edgefl.core.errors import ConfigError, RunFailedError, StoreError, UsageError
from edgefl.simulation import sweep as sweeps
from edgefl.simulation.search.early_stopping import AshaSettings
from edgefl.simulation.sweep import SweepPlan, parse_values, plan_sweep, run_sweep
from edgefl.simulation.trials import Search, run_search

RUN = (
    '[run]\ntask = "digits"\nrounds = 4\n[task]\nmodel = "logistic"\n'
    '[simulation]\ndevices = 3\nprofiles = ["pi-5"]\nworkers = 0\n'
)
RATES = "strategy.learning_rate=0.5,0.4,0.0001"
SPACE = ("strategy.learning_rate=0.0001..1.0:log",)
ASHA = AshaSettings(eta=2)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def describe(outcomes):
    return [(outcome.run.run_id, outcome.is_stopped, outcome.reason, outcome.metrics) for outcome in outcomes]


def list_run_ids(folder):
    with closing(sqlite3.connect(folder / "edgefl.db")) as store:
        return [run_id for (run_id,) in store.execute("SELECT run_id FROM runs ORDER BY run_id")]


def search_for(file, folder, num_trials=5, **options):
    search = Search(space=parse_values(SPACE, allow_ranges=True), searcher="random", num_trials=num_trials)
    plan = SweepPlan(file, 1)
    search.check(plan)
    return run_search(plan, search, folder, early_stop=ASHA, **options)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_run_that_is_behind_trains_no_further_and_stands_behind(run, file, tmp_path, jobs):
    words = ("--set", RATES, "--early-stop", "asha:2", "--jobs", jobs, "--dir", tmp_path / "d")
    found = run("sweep", file, *words, "--format", "json")
    assert found.code == 0, found.err
    rows = {row["learning_rate"]: row for row in found.rows}
    assert found.rows[-1]["learning_rate"] == 0.0001
    assert rows[0.0001]["stopped"] == 1
    assert rows[0.0001]["rounds"] < 4
    assert max(row["rounds"] for row in found.rows) == 4
    again = run("sweep", file, *words, "--format", "json")
    assert again.rows == found.rows
    assert len(list_run_ids(tmp_path / "d")) == 3, "nothing is simulated again"


def test_without_early_stopping_or_with_other_settings_a_stopped_run_is_simulated_to_its_end(file, tmp_path):
    runs = plan_sweep(file, parse_values([RATES]), 1)
    assert [one.is_stopped for one in run_sweep(runs, tmp_path / "d", early_stop=ASHA)] == [False, True, True]
    other = run_sweep(runs, tmp_path / "d", early_stop=AshaSettings(eta=2, first_rung=3))
    assert [one.metrics["rounds"] for one in other if one.is_stopped] == [3, 3]
    assert all(one.is_finished and one.metrics["rounds"] == 4 for one in run_sweep(runs, tmp_path / "d"))


def test_a_run_that_is_as_good_as_asked_is_not_stopped(file, tmp_path):
    file.write_text(RUN.replace("rounds = 4", "rounds = 4\naccuracy = 0.01\ntrust_single_evaluation = true"))
    runs = plan_sweep(file, parse_values([RATES]), 1)
    outcomes = run_sweep(runs, tmp_path / "d", early_stop=ASHA)
    assert all(one.is_finished for one in outcomes)
    assert {one.reason for one in outcomes} == {"accuracy reached 0.01"}


def test_a_search_that_is_stopped_at_any_run_goes_on_as_if_it_had_not_been(file, tmp_path, monkeypatch):
    whole = describe(search_for(file, tmp_path / "whole"))
    assert any(is_stopped for _, is_stopped, _, _ in whole)
    original, num_calls = sweeps.simulate, 0

    def stop_after(config, **options):
        nonlocal num_calls
        num_calls += 1
        if num_calls in {2, 4}:
            early_stop = options.pop("early_stop")

            def interrupt(number, read_rounds):
                assert not early_stop(0, read_rounds)
                raise KeyboardInterrupt

            options["early_stop"] = interrupt
        return original(config, **options)

    monkeypatch.setattr(sweeps, "simulate", stop_after)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            search_for(file, tmp_path / "d")
    assert describe(search_for(file, tmp_path / "d")) == whole
    assert len({run_id for run_id, *_ in whole}) == 5
    monkeypatch.setattr(sweeps, "simulate", original)
    assert describe(search_for(file, tmp_path / "d", num_trials=6))[:5] == whole, "more trials go on behind them"


def test_a_trial_is_durable_before_it_starts(file, tmp_path, monkeypatch):
    def fail(config, **_):
        (path,) = (tmp_path / "d").glob("search-*.json")
        trials = json.loads(path.read_text())["trials"]
        assert trials[-1]["strategy.learning_rate"] == config["strategy"]["learning_rate"]
        raise RunFailedError(f"trial {len(trials)}")

    monkeypatch.setattr(sweeps, "simulate", fail)
    assert [one.reason for one in search_for(file, tmp_path / "d", num_trials=2)] == ["trial 1", "trial 2"]


def test_choices_that_come_again_are_simulated_once(file, tmp_path):
    search = Search(space=parse_values(["strategy.epochs=1,2"]), searcher="random", num_trials=6)
    outcomes = run_search(SweepPlan(file, 1), search, tmp_path / "d")
    assert sorted(one.run.values["strategy.epochs"] for one in outcomes) == [1, 2]


def test_a_damaged_file_of_trials_is_named(file, tmp_path):
    search_for(file, tmp_path / "d", num_trials=1)
    (path,) = (tmp_path / "d").glob("search-*.json")
    for content in ('{"trials": [{"a": 1}]}', '{"trials": [1]}', "{"):
        path.write_text(content)
        with pytest.raises(StoreError, match="not the trials of a search"):
            search_for(file, tmp_path / "d", num_trials=1)


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["--set", "strategy.learning_rate=0.1..1"], ConfigError, "needs --search"),
        (["--search", "random", "--set", "strategy.learning_rate=1..0.1"], ConfigError, "LOW < HIGH"),
        (["--search", "random", "--set", "strategy.learning_rate=-1.0..1"], ConfigError, "learning_rate"),
        (["--search", "random"], UsageError, "needs settings to vary"),
        (
            ["--search", "random", "--trials", "10000", "--seeds", "2", "--set", *SPACE],
            UsageError,
            "at most 10000 runs",
        ),
        (["--trials", "3", "--set", RATES], UsageError, "--trials needs --search"),
        (["--early-stop", "median", "--set", RATES], ConfigError, "asha:ETA:FIRST"),
        (["--early-stop", "asha", "--bookkeeping-only", "--set", RATES], UsageError, "--bookkeeping-only"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_run(run, file, tmp_path, words, error, message):
    found = run("sweep", file, "--dir", tmp_path / "d", *words)
    assert (found.code, message in found.err) == (error.exit_code, True), found.err
    assert not (tmp_path / "d").exists()


def test_optuna_searches_with_early_stopping_and_goes_on(run, file, tmp_path):
    pytest.importorskip("optuna", reason="optuna is not installed: pip install 'edgefl-fleet[optuna]'")
    words = (
        "--set",
        *SPACE,
        "--search",
        "optuna",
        "--early-stop",
        "asha",
        "--dir",
        tmp_path / "d",
        "--format",
        "json",
    )
    run("sweep", file, "--trials", "6", *words)
    found = run("sweep", file, "--trials", "13", *words)
    assert found.code == 0, found.err
    assert len(found.rows) == len(list_run_ids(tmp_path / "d")) == 13
    whole = run("sweep", file, "--trials", "13", *words[:-4], "--dir", tmp_path / "whole", "--format", "json")
    assert whole.rows == found.rows
