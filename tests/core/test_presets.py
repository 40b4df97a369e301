"""What a preset stands for, and what a run file may change of it."""

import pytest

import edgefl
from edgefl.core.config import parse_run
from edgefl.core.errors import ConfigError
from edgefl.core.presets import PRESETS
from edgefl.engine.assembly.build import build_run


@pytest.mark.extended  # a network needs torch
@pytest.mark.parametrize(("preset", "name"), [(preset, name) for preset in PRESETS for name in PRESETS[preset]])
def test_every_preset_is_a_run_of_its_strategy(preset, name):
    components = build_run(parse_run({"strategy": {"name": name, "preset": preset}}), "preset")
    plan = components.strategy.plan
    given = PRESETS[preset][name]["strategy"]
    assert (plan.learning_rate, plan.batch_size) == (given["learning_rate"], given["batch_size"])


def test_settings_and_budgets_of_a_run_file_take_precedence_and_it_is_stored_in_full():
    config = parse_run(
        {
            "run": {"seconds": 60.0},
            "strategy": {"name": "admm-isvr", "preset": "paper", "learning_rate": 0.1},
            "simulation": {"scheme": "iid"},
        }
    )
    assert (config.run.task, config.run.rounds, config.run.seconds) == ("fashion-mnist", None, 60.0)
    assert config.strategy.options["learning_rate"] == 0.1
    assert (config.strategy.options["step_size"], config.strategy.options["exchange"]) == ("node", "pair")
    assert (config.simulation.devices, config.simulation.scheme) == (8, "iid")
    assert "preset" not in config.to_json()["strategy"]
    assert parse_run(config.to_json()) == config


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            {"name": "fedavg", "preset": "paper"},
            "strategy.preset: 'fedavg' has no preset 'paper'; adacomp, admm-isvr",
        ),
        ({"name": "esync", "preset": "atomo"}, "strategy.preset: 'esync' has no preset 'atomo'; ssgd have it"),
        ({"name": "pdmm-isvr", "preset": "poster"}, "strategy.preset must be one of paper, atomo, parallel-sgd, got"),
        ({"name": 7, "preset": "paper"}, "strategy.preset: 7 has no preset"),
    ],
)
def test_a_preset_that_is_not_there_is_refused(strategy, message):
    with pytest.raises(ConfigError, match=message):
        parse_run({"run": {"task": "digits"}, "strategy": strategy})


@pytest.mark.extended
def test_the_isvr_paper_runs_by_its_name_on_another_task(tmp_path):
    config = {
        "run": {"task": "digits", "rounds": 2},
        "strategy": {"name": "pdmm-isvr", "preset": "paper", "exchanges_per_round": 5, "learning_rate": 0.1},
    }
    result = edgefl.simulate(config, root=tmp_path)
    assert len(result.rounds) == 2
    assert result.rounds[-1]["facts"]["nodes"] == 8
    assert result.metrics["accuracy"] > 0.5
