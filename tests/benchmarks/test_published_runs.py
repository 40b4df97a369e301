"""Runs of other frameworks' settings: what of a run counts, and which aims are missed."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from edgefl.core.errors import RunFailedError
from edgefl.storage.store import Store

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def program(harness):
    harness("options")  # so that the programs find it
    return lambda name: runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name=name)


@pytest.fixture
def outcome(program):
    flare = program("flare_edge")

    def make(name, seed, minutes):
        return flare["Outcome"](
            name=name, seed=seed, minutes=minutes, accuracy=0.4, minutes_to_target=None, curve=(), wall_s=0.0
        )

    return flare, make


def test_nothing_counts_that_was_still_out_when_the_budget_was_used_up(harness, tmp_path):
    runs = harness("published_runs")
    config = {
        "run": {"task": "digits", "updates": 8, "deadline_s": None},
        "strategy": {"name": "fedbuff", "buffer_size": 1, "iterations": 1},
        "simulation": {"devices": 4, "iteration_s": 1.0},
    }
    curve = runs.run_of(config, str(tmp_path), num_updates=8, is_trained=False)
    used = sorted(row["ended_at"] for row in curve.updates if row["outcome"] == "used")
    began = min(row["dispatched_at"] for row in curve.updates)
    assert len(used) > 8
    assert curve.num_rounds == 8
    assert curve.seconds == pytest.approx(used[7] - began, abs=0.5)
    assert curve.seconds < used[-1] - began
    assert curve.points == ()


def test_a_run_that_fails_before_its_first_round_is_an_empty_curve(harness, tmp_path, monkeypatch):
    runs = harness("published_runs")

    def fail(_config, *, root, **_):
        with Store.open(Path(root) / runs.DATABASE_NAME):
            raise RunFailedError("no device has joined")

    monkeypatch.setattr(runs.edgefl, "simulate", fail)
    curve = runs.run_of({}, str(tmp_path))
    assert curve == runs.Curve(num_rounds=0, seconds=0.0, points=(), updates=())


def test_fedbuff_is_evaluated_by_its_own_rounds_of_ten_updates(harness, program, tmp_path):
    flare = program("flare_edge")
    choose = flare["choose_interval"]
    assert [choose("fedbuff", number) for number in (1, 2, 5, 10)] == [16, 8, 2, 1]
    assert [choose(flare["AS_THEIRS"], number) for number in (1, 10)] == [160, 16]
    assert [choose(flare["SYNCHRONOUS"], number) for number in (1, 5)] == [10, 2]
    config = {
        "run": {"task": "digits", "updates": 160, "updates_per_round": 16, "evaluate_on": "none"},
        "simulation": {"devices": 16, "iteration_s": 1.0},
    }
    for name in ("fedasync", "fedbuff"):
        tables = {**config, "strategy": {**flare["STRATEGIES"][name]["strategy"], "iterations": 1}}
        curve = harness("published_runs").run_of(tables, str(tmp_path / name), num_updates=160, is_trained=False)
        assert curve.num_rounds == 160 // flare["UPDATES_PER_ROUND"][name]


def test_a_table_of_times_alone_says_nothing_of_accuracies(outcome):
    flare, make = outcome
    rows = [replace(make(name, 7, 78.0), accuracy=None) for name in flare["THEIRS"]]
    assert "none of" not in flare["as_text"]({}, rows)


def test_an_accuracy_is_reached_at_its_first_evaluation(harness):
    curve = harness("published_runs").Curve(
        num_rounds=3, seconds=3.0, points=((1.0, 0.2), (2.0, 0.5), (3.0, 0.4)), updates=()
    )
    assert [curve.seconds_to(accuracy) for accuracy in (0.2, 0.3, 0.5, 0.6)] == [1.0, 2.0, 2.0, None]


def test_a_profile_holds_for_its_model_alone(harness, tmp_path):
    from edgefl.simulation.profiles import load_catalogue  # noqa: PLC0415 after the harness

    path = tmp_path / "profiles.toml"
    harness("published_runs").write_profiles(path, "lenet", {"slow": 0.25}, jitter=0.1, latency_s=2.5)
    profile = load_catalogue([path]).get("slow")
    assert list(profile.iterations) == ["cifar-10/lenet"]
    assert profile.iterations["cifar-10/lenet"].compute_seconds(4) == 0.25
    assert (profile.jitter, profile.latency_s) == (0.1, 2.5)


def test_asynchronous_is_measured_against_synchronous_of_the_same_seed(outcome):
    flare, make = outcome
    wait, go = flare["SYNCHRONOUS"], flare["AS_THEIRS"]
    good = [make(wait, 7, 80.0), make(wait, 8, 40.0), make(go, 7, 40.0), make(go, 8, 20.0)]
    assert flare["list_missed"](good) == []
    late = [make(wait, 7, 80.0), make(wait, 8, 40.0), make(go, 7, 44.6), make(go, 8, 22.3)]
    assert flare["list_missed"](late) == ["asynchronous is 1.79 times as soon, aim 1.8"]
    beyond = flare["list_missed"]([make(wait, 7, 83.0), make(go, 7, 45.0)])
    assert [text.partition(":")[0] for text in beyond] == [wait, go]


def test_the_delays_are_in_turn_or_drawn_anew_for_each_seed(program):
    choose = program("flare_edge")["choose_delays"]
    kinds = choose(7, is_drawn=False)
    assert kinds == choose(8, is_drawn=False)
    assert [kinds.count(kind) for kind in ("short", "medium", "long")] == [6, 5, 5]
    assert choose(7, is_drawn=True) == choose(7, is_drawn=True) != choose(8, is_drawn=True)


def test_as_many_are_at_work_as_overlap(program):
    rows = [{"dispatched_at": at, "ended_at": end} for at, end in ((0, 2), (1, 3), (2, 4), (5, None))]
    assert program("flare_edge")["_count_most_at_work"](rows) == 2


@pytest.mark.extended
def test_the_networks_have_as_many_weights_as_the_published_ones(harness):
    networks = harness("published_networks")
    sizes = [
        sum(part.numel() for part in kind().parameters())
        for kind in (networks.FlareNetwork, networks.FlotillaNetwork)
    ]
    assert sizes == [62_006, 122_570]


@pytest.mark.parametrize(
    ("benchmark", "words", "told"),
    [
        ("flare_edge.py", "--strategies fedbuff --times-only", "--strategies needs 'synchronous'"),
        ("flotilla_scale.py", "--data . --lives 0", "--lives must be above 0"),
        ("flotilla_scale.py", "--data . --clients 9", "--clients at least 10"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused_in_one_line(refused, benchmark, words, told):
    assert told in refused(benchmark, *words.split())
