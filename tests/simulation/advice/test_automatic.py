"""`[strategy] name = "auto"`: what stands in its place in the settings of the run, and when there is none."""

import json
import time
from dataclasses import replace

import pytest

import edgefl
from edgefl.client.advice import settle_strategy
from edgefl.core.config import StrategySection, parse_run
from edgefl.core.errors import ConfigError, DataError, RunFailedError, StrategyError
from edgefl.engine.assembly.build import build_run
from edgefl.simulation.advice.automatic import choose_settings, make_base, settle_simulation

PROFILES = """
[profile.fast]
speed = 0.002
up_bytes_per_s = 200_000
[profile.slow]
speed = 0.0004
up_bytes_per_s = 200_000
"""


class FleetWithoutRuns:
    def read_rows(self, kind, **_):
        return []

    def read_capabilities(self, _):
        return {}


def make_config(folder, *, run=(), **options):
    (folder / "profiles.toml").write_text(PROFILES)
    section = {"devices": 3, "profiles": ["fast", "slow"], "scheme": "iid", "jitter": 0.0}
    return parse_run({
        "run": {"task": "digits", "accuracy": 0.6, **dict(run)},
        "task": {"model": "logistic"},
        "strategy": {"name": "auto", "learning_rate": 0.2, **options},
        "simulation": {**section, "profile_file": str(folder / "profiles.toml")},
    })  # fmt: skip


def test_what_auto_stands_for_is_the_default_strategy_with_the_same_options(tmp_path):
    config = make_config(tmp_path, minimise="bytes")
    base, minimise = make_base(config)
    assert (base.strategy.name, base.strategy.options, minimise) == ("fedavg", {"learning_rate": 0.2}, "bytes")
    assert (base.run, base.simulation) == (config.run, config.simulation)
    named = parse_run({"run": {"task": "digits"}, "strategy": {"name": "asgd"}})
    assert make_base(named) == (named, "time")


def test_another_quantity_than_time_bytes_and_energy_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"strategy\.minimise must be one of time, bytes, energy, got 'money'"):
        make_base(make_config(tmp_path, minimise="money"))


def test_where_nothing_chooses_the_name_is_refused_with_who_would(tmp_path):
    with pytest.raises(StrategyError, match=r'"auto" is replaced before a run is submitted, by edgefl run submit'):
        build_run(make_config(tmp_path), "r1")


def test_a_fleet_that_never_trained_the_task_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"strategy\.name = 'auto': no board of this fleet has trained digits yet"):
        settle_strategy(make_config(tmp_path), FleetWithoutRuns(), root=tmp_path)


def test_settings_that_name_a_strategy_stay_and_no_history_is_read():
    named = parse_run({"run": {"task": "digits"}})
    assert settle_strategy(named, None).config is named
    assert settle_simulation(named, clock=time.monotonic).config is named


def test_a_simulation_that_trains_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is chosen by training, and this simulation trains nothing"):
        edgefl.connect(directory=tmp_path).simulate(make_config(tmp_path, run={"rounds": 3}), bookkeeping_only=True)


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_the_choice_is_complete_settings_with_reasons_and_a_second_run_of_them_is_the_same(tmp_path):
    choice = choose_settings(make_config(tmp_path), tmp_path / "sims", clock=time.monotonic, seconds=400)
    assert choice.config.strategy.name not in {"auto", ""}
    assert "minimise" not in choice.config.strategy.options
    assert choice.config.advice.seconds > 0
    assert choice.config.run.accuracy == pytest.approx(0.6)
    assert choice.reasons[0].startswith(f"strategy.name = 'auto' is {choice.config.strategy.name}, ")
    assert "reaches accuracy >= 0.6" in choice.reasons[1]
    stored = parse_run(json.loads(json.dumps(choice.config.to_json())))
    assert stored == choice.config
    first, second = (edgefl.simulate(config, root=tmp_path / "h") for config in (choice.config, stored))
    assert first.metrics["accuracy"] == second.metrics["accuracy"] >= 0.6


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_a_goal_that_nothing_reaches_is_one_line_and_chooses_nothing(tmp_path):
    config = make_config(tmp_path, run={"accuracy": 0.9999, "rounds": 1})
    with pytest.raises(RunFailedError, match=r"^strategy\.name = 'auto': no.*name a strategy, or give") as caught:
        choose_settings(config, tmp_path / "sims", clock=time.monotonic, seconds=60)
    assert "\n" not in str(caught.value)


def test_joules_of_a_simulated_run_are_power_by_the_time_of_computing(tmp_path):
    config = make_config(tmp_path, run={"rounds": 2, "accuracy": None})
    named = replace(config, strategy=StrategySection(name="fedavg"))
    run = edgefl.connect(directory=tmp_path / "h").simulate(named)
    assert run.row["energy_j"] is None
    profiles = tmp_path / "profiles.toml"
    profiles.write_text(PROFILES.replace("speed", "power_w = 3\nspeed", 1))
    powered = edgefl.connect(directory=tmp_path / "p").simulate(named)
    joules = {}
    for row in powered.fleet.history("updates"):
        joules.setdefault(row["device_id"], []).append((row["energy_j"], row["compute_s"]))
    known = [pair for rows in joules.values() for pair in rows if pair[0] is not None]
    assert len(known) == 4  # of two fast boards in two rounds
    assert all(energy == pytest.approx(3 * seconds) for energy, seconds in known)
    assert powered.row["energy_j"] == pytest.approx(sum(energy for energy, _ in known))
