"""Advice on a run file: what is ranked first, what is left out, and whether its file costs what it says."""

import time
from dataclasses import replace

import pytest

import edgefl
from edgefl.core.config import load_run, parse_run
from edgefl.core.errors import ConfigError, RunFailedError
from edgefl.engine.progress import MetricGoal
from edgefl.simulation.advice.advice import (
    Advice,
    Option,
    Request,
    _add_own_budgets,
    _limit,
    advise,
    describe_fleet,
    merge_simulations,
    rank_options,
)
from edgefl.simulation.advice.candidates import Candidate, list_candidates
from edgefl.simulation.advice.costs import RoundCost
from edgefl.simulation.advice.explanation import explain, format_run_file, list_limits, make_rows

FAST = {"speed": 0.002, "up_bytes_per_s": 200_000.0, "down_bytes_per_s": 2_000_000.0, "power_w": 6.0}


def simulated(test):
    """Marks a test of real simulations in processes of their own: on a busy machine they take their time."""
    return pytest.mark.extended(pytest.mark.timeout(900)(test))


COST = RoundCost(
    seconds=1.0, bytes_up=10, bytes_down=10, joules=None, waiting=0.5, slowest="pi-03", slowest_s=6.0, median_s=1.0,
    sending=0.1, loss_risk=0.0, examples=100, gain=1.0,
)  # fmt: skip


def make_config(**sections):
    run = {"task": "digits", "rounds": 4, "seed": 7}
    strategy = {"name": "fedavg", "learning_rate": 0.2}
    tables = {"run": run, "task": {"model": "logistic"}, "strategy": strategy, "simulation": {"jitter": 0.0}}
    return parse_run({name: {**tables.get(name, {}), **sections.get(name, {})} for name in {**tables, **sections}})


@pytest.fixture
def describe(tmp_path):
    """A fleet of four boards, each as `FAST` but for what is said of it."""

    def make(*boards, **sections):
        profiles = tmp_path / "boards.toml"
        lines = []
        for number, changes in enumerate(boards, 1):
            values = {name: value for name, value in {**FAST, **changes}.items() if value is not None}
            lines += [f"[profile.b{number}]", *(f"{name} = {value!r}" for name, value in values.items())]
        profiles.write_text("\n".join(lines))
        return describe_fleet(
            make_config(**sections), tmp_path / "sims", devices=len(boards), profiles=[str(profiles)], scheme="iid"
        )

    return make


@pytest.fixture
def ask(describe, tmp_path):
    """An advice for boards; a few candidates are simulated."""

    def make(
        *boards, num_simulated=3, num_repeats=0, seconds=900.0, minimise="time", goal=None, budgets=None, **sections
    ):
        request = Request(
            goal=goal,
            minimise=minimise,
            budgets=budgets or {},
            seconds=seconds,
            num_jobs=2,
            num_simulated=num_simulated,
            num_repeats=num_repeats,
        )
        return advise(describe(*boards, **sections), request, tmp_path / "sims", clock=time.monotonic)

    return make


def make_option(strategy, seconds, size, joules=None, *, reached=True, quality=0.9):
    return Option(
        candidate=Candidate(strategy=strategy, options={}, codec="dense"), cost=COST, seconds=seconds, rounds=3,
        bytes_up=size, bytes_down=0, joules=joules, quality=quality, is_reached=reached,
    )  # fmt: skip


@pytest.mark.parametrize("minimise", ["time", "bytes"])
def test_one_that_is_worse_in_all_never_wins_and_is_not_on_the_front(minimise):
    dominated = make_option("esync", 10.0, 500)
    options = [dominated, make_option("fedavg", 10.0, 400), make_option("fedasync", 40.0, 30)]
    ranked = rank_options(options, Request(minimise=minimise))
    assert ranked[0].candidate.strategy == {"time": "fedavg", "bytes": "fedasync"}[minimise]
    assert {one.candidate.strategy for one in ranked if one.is_front} == {"fedavg", "fedasync"}
    assert ranked[-1 if minimise == "bytes" else 1].candidate.strategy == "esync"


def test_a_cheaper_one_that_misses_the_goal_or_a_budget_stands_behind():
    options = [
        make_option("fedavg", 1.0, 1, reached=False, quality=0.5),
        make_option("fedasync", 1.0, 1, reached=False, quality=0.8),
        make_option("esync", 5.0, 900),
        make_option("fedbuff", 9.0, 100),
    ]
    ranked = rank_options(options, Request(budgets={"bytes": 500.0}))
    assert [one.candidate.strategy for one in ranked] == ["fedbuff", "esync", "fedasync", "fedavg"]
    assert [one.is_within for one in ranked[:2]] == [True, False]


def test_a_loss_counts_the_other_way_round():
    options = [
        make_option(name, 1.0, 1, reached=False, quality=loss) for name, loss in (("fedavg", 2.0), ("esync", 1.0))
    ]
    assert rank_options(options, Request(), is_max=False)[0].candidate.strategy == "esync"


def make_advice(fleet, *, own=False, strategy="esync", is_written=False, request=None, corrections=None):
    """An advice whose best option is of 3 rounds, 10 s and 400 bytes."""
    option = make_option(strategy, 10.0, 400)
    option = replace(option, candidate=replace(option.candidate, is_written=is_written), is_front=True)
    return Advice(
        options=[option],
        written=None,
        goal=MetricGoal(name="accuracy", limit=0.8, is_max=True),
        is_own_goal=own,
        request=request or Request(),
        left_out=[],
        fleet=fleet,
        corrections=corrections or {},
    )


KEEPING = [
    {
        "privacy": {"unit": "device", "epsilon": 8.0, "delta": 1e-5, "boards": 2, "clip": 1.0},
        "guard": {"enabled": False},
    },
    {"strategy": {"schedule": "cosine:40"}},
]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("sections", KEEPING)
def test_rounds_that_noise_or_learning_rate_follow_are_simulated_and_written_as_they_are(describe, sections, own):
    run = {"rounds": 40, "seconds": 500.0}
    fleet = describe({}, {}, run=run, **sections)
    config = fleet.config
    assert _limit(config, make_option("fedavg", 10.0, 400), COST, fleet, Request()) == config
    made = make_advice(fleet, own=own, strategy="fedavg").make_run(config).run
    goal = {"until": "accuracy >= 0.8"} if own else {"accuracy": 0.8}
    assert made == replace(config.run, **goal)


def test_a_written_file_keeps_the_limits_that_hold_for_all_and_drops_those_of_other_work(describe):
    limits = {"epochs": 7.0, "updates": 20, "seconds": 500.0, "bytes": 9000}
    fleet = describe({}, {}, run=limits)
    limited = _limit(fleet.config, make_option("fedavg", 400.0, 400), COST, fleet, Request()).run
    assert (limited.rounds, limited.updates, limited.seconds, limited.bytes) == (None, None, 500.0, 9000)
    other = make_advice(fleet).make_run(fleet.config).run
    assert (other.epochs, other.updates, other.seconds, other.bytes, other.rounds) == (None, None, 500.0, 9000, 6)
    same = make_advice(fleet, is_written=True, strategy="fedavg").make_run(fleet.config).run
    assert (same.epochs, same.updates) == (7.0, 20)
    own = make_advice(fleet, own=True).make_run(fleet.config).run
    assert (own.epochs, own.updates, own.accuracy, own.until, own.rounds) == (None, None, None, None, 3)


def test_seconds_and_bytes_of_the_run_file_are_budgets_beside_those_asked_for():
    config = make_config(run={"seconds": 8.0, "bytes": 300})
    asked = _add_own_budgets(Request(budgets={"bytes": 200.0, "energy": 5.0}), config, None)
    assert asked.budgets == {"time": 8.0, "bytes": 200.0, "energy": 5.0}
    slow = rank_options([make_option("esync", 9.0, 100)], asked)[0]
    assert not slow.is_within
    # A run whose own end is the goal passes a limit by its last round.
    own = _add_own_budgets(Request(), config, make_option("fedavg", 7.0, 320))
    assert own.budgets == {"time": 8.0, "bytes": 320}


@simulated
def test_a_slow_board_is_named_and_nobody_waits_for_it_any_more(ask):
    advice = ask({}, {}, {}, {"speed": 0.0002}, goal="accuracy >= 0.8", run={"rounds": 30})
    assert advice.best.candidate.strategy in {"esync", "fedasync", "fedbuff", "asgd"}
    assert advice.best.seconds < 0.7 * advice.written.seconds
    assert advice.best.waiting < 0.3 < advice.written.waiting
    sentence = next(line for line in explain(advice) if line.startswith("device-04 takes"))
    assert f"boards wait {advice.written.waiting:.0%} of their time" in sentence
    assert f"with {advice.best.candidate} {advice.best.waiting:.0%}" in sentence


@simulated
def test_slow_links_make_a_codec_win(ask):
    slow = {"up_bytes_per_s": 300.0, "speed": 0.02}
    strategy = {"name": "fedprox"}  # of which there is no other kind: only codec and work vary
    advice = ask(slow, slow, slow, slow, goal="accuracy >= 0.8", run={"rounds": 20}, strategy=strategy)
    assert advice.best.candidate.codec != "dense"
    assert advice.best.seconds < advice.written.seconds
    assert any("with 0.3 kB/s up, spends" in line for line in explain(advice))


@simulated
def test_what_the_run_file_comes_to_is_the_goal_where_none_is_said(ask, describe, tmp_path):
    advice = ask({}, {}, {}, {}, num_simulated=1)
    assert advice.is_own_goal
    assert [one.candidate.is_written for one in advice.options] == [True]
    assert advice.written.is_reached
    assert advice.goal == MetricGoal(name="accuracy", limit=advice.written.quality, is_max=True)
    assert "nothing that was tried is better in time" in explain(advice)[0]


@simulated
def test_the_written_file_costs_in_a_simulation_what_it_says_and_the_same_advice_comes_again(ask, describe, tmp_path):
    boards = ({}, {}, {}, {"speed": 0.0002})
    first = ask(*boards, goal="accuracy >= 0.8", num_simulated=2, run={"rounds": 30})
    path = tmp_path / "advised.toml"
    path.write_text(format_run_file(first, describe(*boards, run={"rounds": 30}).config, stamp="the command"))
    written = load_run(path)
    assert path.read_text().startswith("# the command\n# ")
    assert written.strategy.name == first.best.candidate.strategy
    assert written.run.accuracy == 0.8
    result = edgefl.simulate(written, root=tmp_path / "again")
    rounds = [row for row in result.rounds if row["closed_at"] is not None]
    assert rounds[-1]["closed_at"] - rounds[0]["started_at"] == pytest.approx(written.advice.seconds)
    assert sum(row["bytes_up"] for row in rounds) == written.advice.bytes_up
    began_s = time.monotonic()
    again = ask(*boards, goal="accuracy >= 0.8", num_simulated=2, run={"rounds": 30})
    assert make_rows(again) == make_rows(first)
    assert time.monotonic() - began_s < 60


@simulated
def test_joules_are_power_by_the_time_of_computing(ask):
    advice = ask({}, {}, {}, {"power_w": 12.0}, num_simulated=1)
    result = edgefl.simulate(advice.fleet.config, root=advice.fleet.config.simulation.profile_file + "-sim")
    power = dict.fromkeys(("device-01", "device-02", "device-03"), 6.0) | {"device-04": 12.0}
    until = result.rounds[advice.written.rounds - 1]["round"]
    joules = sum(power[row["device_id"]] * row["compute_s"] for row in result.updates if row["round"] <= until)
    assert advice.written.joules == pytest.approx(joules)


def test_energy_without_the_power_of_a_board_is_refused_by_its_name(ask):
    with pytest.raises(
        ConfigError, match=r"energy is not known of 1 boards, such as device-02: give its profile power_w"
    ):
        ask({}, {"power_w": None}, minimise="energy")


@pytest.mark.parametrize(
    ("goal", "line"),
    [
        ("rmse <= 3", "--goal: the task declares no metric 'rmse', only accuracy"),
        ("accuracy <= 0.3", "--goal: accuracy gets better as it rises, got <="),
        ("good", "--goal must be a metric, <= or >=, and a number"),
    ],
)
def test_a_goal_that_makes_no_sense_is_named_before_anything_is_simulated(ask, goal, line):
    with pytest.raises(ConfigError, match=line):
        ask({}, {}, goal=goal)


@simulated
def test_a_goal_out_of_reach_is_said_with_the_nearest_and_writes_no_file(ask, describe):
    advice = ask({}, {}, goal="accuracy >= 0.9999", num_simulated=1)
    assert advice.best is None
    nearest = "reaches accuracy >= 0.9999 on the proxy data; the nearest is fedavg, 2 epochs, dense, 0."
    assert nearest in explain(advice)[0]
    with pytest.raises(RunFailedError, match=r"no candidate reached accuracy >= 0\.9999"):
        advice.make_run(advice.fleet.config)


@simulated
def test_without_time_it_says_what_did_not_end(ask):
    endless = {"rounds": 10_000_000}
    with pytest.raises(
        RunFailedError,
        match=r"did not end .* give --goal, or run\.accuracy or run\.until, more --seconds or fewer run\.rounds",
    ):
        ask({}, {}, seconds=0.1, run=endless)
    advice = ask({}, {}, seconds=0.1, goal="accuracy >= 0.9999", run=endless)
    assert advice.options == []
    assert "no simulation ended in time" in explain(advice)[0]
    assert any("the time was over before it ended" in line for line in list_limits(advice))


def test_a_robust_rule_is_kept_and_a_learning_rate_follows_the_strategy():
    robust = list_candidates(make_config(strategy={"name": "trimmed-mean"}))
    assert {one.strategy for one in robust} == {"trimmed-mean"}
    assert len({one.codec for one in robust}) > 5
    found = list_candidates(make_config())
    rates = {one.strategy: one.options["learning_rate"] for one in found}
    assert rates["scaffold"] == pytest.approx(rates["fedavg"] / 2)
    assert found[0].is_written
    assert len({one.key for one in found}) == len(found)


@simulated
def test_a_correction_changes_the_figures_and_is_said(describe, tmp_path):
    request = Request(seconds=900.0, num_jobs=2, num_simulated=1)
    fleet = describe({}, {})
    plain = advise(fleet, request, tmp_path / "sims", clock=time.monotonic)
    more = advise(fleet, request, tmp_path / "sims", clock=time.monotonic, corrections={"seconds": 1.5, "bytes": 2.0})
    assert more.best.seconds == pytest.approx(1.5 * plain.best.seconds)
    assert more.best.bytes_up == 2 * plain.best.bytes_up
    assert any(
        "corrected by the errors of earlier advice: bytes by 2.00, seconds by 1.50" in line
        for line in list_limits(more)
    )
    assert replace(more, corrections={}).best == more.best


def test_a_written_file_says_by_what_its_figures_are_corrected(describe, tmp_path):
    fleet = describe({})
    advice = make_advice(fleet, corrections={"seconds": 1.5, "bytes": 2.0})
    (path := tmp_path / "advised.toml").write_text(format_run_file(advice, fleet.config))
    found = load_run(path).advice
    assert (found.seconds, found.seconds_factor, found.bytes_factor, found.joules_factor) == (10.0, 1.5, 2.0, None)


def test_where_all_failed_the_first_reason_is_said(describe):
    advice = replace(make_advice(describe({})), options=[])
    assert explain(advice)[0].startswith("no simulation ended in time")
    failed = explain(replace(advice, failure="no device can make progress"))[0]
    assert failed == "no simulation came to a result: no device can make progress"


def test_an_option_of_several_seeds_costs_the_median_and_reached_the_goal_where_most_did():
    lucky, usual, slow = (
        make_option("fedbuff", seconds, size, 5.0) for seconds, size in ((7.0, 70), (9.0, 95), (12.0, 90))
    )
    merged = merge_simulations([lucky, usual, slow])
    assert (merged.seconds, merged.bytes_up, merged.joules, merged.num_simulations) == (9.0, 90, 5.0, 3)
    assert merged.is_reached
    missed = [replace(one, is_reached=False) for one in (usual, slow)]
    assert not merge_simulations([lucky, *missed]).is_reached
    assert merge_simulations([lucky, usual, missed[1]]).is_reached


@simulated
def test_the_best_are_simulated_with_further_seeds_and_their_medians_are_told(ask):
    advice = ask({}, {"speed": 0.0004}, goal="accuracy >= 0.6", num_repeats=2)
    assert advice.best.num_simulations == 3
    repeated = [option for option in advice.options if option.num_simulations == 3]
    assert {option.candidate.key for option in repeated} >= {one.candidate.key for one in advice.options[:3]}
    assert any("are medians of 3 simulations with seeds of their own" in line for line in list_limits(advice))
