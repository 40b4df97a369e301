"""Run files of runs that replace others."""

import pytest

from edgefl.core.config import RunConfig, parse_run
from edgefl.core.errors import ConfigError, UsageError
from edgefl.engine.replacement import CleanModel, make_replacement, require_boards

OLD = {
    "run": {"task": "digits", "rounds": 10, "updates": 50, "seconds": 60.0, "bytes": 1000, "epochs": 3.0},
    "strategy": {"name": "fedavg", "learning_rate": 0.5},
}


def test_a_model_from_before_leaves_the_rest_of_each_stop_rule_and_all_else_is_as_it_was():
    config = parse_run(OLD)
    model = CleanModel(path="/models/x.safetensors", rounds=4, updates=49, seconds=70.0, bytes=400)
    made, notes = make_replacement(config, "run-1", ["b", "a"], model=model)
    assert (made.run.rounds, made.run.updates, made.run.seconds, made.run.bytes) == (6, 1, 1.0, 600)
    assert (made.run.init, made.run.replaces, made.devices.exclude) == ("/models/x.safetensors", "run-1", ("a", "b"))
    assert (made.run.epochs, made.strategy, made.run.seed) == (3.0, config.strategy, config.run.seed)
    assert any("run.epochs is the whole 3" in note for note in notes)
    assert RunConfig.from_json(made.to_json()) == made


def test_without_a_model_it_starts_where_the_old_run_did_with_all_rounds():
    tables = {**OLD, "run": {**OLD["run"], "init": "/own.safetensors"}, "devices": {"exclude": ["z"]}}
    made, notes = make_replacement(parse_run(tables), "run-1", ["a"])
    assert (made.run.init, made.run.rounds, made.devices.exclude, notes) == ("/own.safetensors", 10, ("z", "a"), [])


def test_who_is_left_out_is_no_longer_named_and_who_is_kept_is():
    config = parse_run({**OLD, "devices": {"names": ["a", "b"]}})
    assert make_replacement(config, "run-1", ["a"])[0].devices.names == ("b",)
    kept = make_replacement(config, "run-1", ["a"], keep_devices=True)[0]
    assert (kept.devices, kept.run.replaces) == (config.devices, "run-1")
    with pytest.raises(UsageError, match="names no other device"):
        make_replacement(config, "run-1", ["a", "b"])


def test_means_and_scales_of_the_device_are_asked_for_again_and_the_model_of_the_old_ones_is_not_taken():
    task = {"columns": "heat,damp", "target": "load", "means": "1,2", "scales": "3,4"}
    config = parse_run({"run": {"task": "table"}, "task": task})
    made = make_replacement(config, "run-1", ["a"], has_their_scales=True)[0]
    assert made.task == {"columns": "heat,damp", "target": "load", "normalise": "fleet"}
    with pytest.raises(ConfigError, match="starts without it"):
        make_replacement(config, "r", ["a"], has_their_scales=True, model=CleanModel(path="/m", rounds=1))


def test_a_whole_model_takes_the_place_of_a_pretrained_base():
    config = parse_run({"run": {"task": "mnist"}, "adapt": {"frozen": ["fc.*"], "base": "/base.safetensors"}})
    made = make_replacement(config, "run-1", ["a"], model=CleanModel(path="/m", rounds=1))[0]
    assert (made.adapt.base, made.adapt.frozen) == (None, config.adapt.frozen)
    assert make_replacement(config, "run-1", ["a"])[0].adapt.base == "/base.safetensors"


def test_a_private_run_s_note_says_that_budgets_add_up():
    config = parse_run(
        {"run": {"task": "digits"}, "privacy": {"unit": "device", "epsilon": 8, "delta": 1e-5, "clip": 1.0}}
    )
    assert "adds up" in make_replacement(config, "run-1", ["a"])[1][0]


def test_a_job_is_refused():
    with pytest.raises(UsageError, match=r"is a job.*devices\.exclude"):
        make_replacement(parse_run({"job": {"name": "jobs:Count"}}), "run-1", ["a"])


def test_a_run_that_needed_all_boards_needs_those_that_are_left():
    config = parse_run({"run": {"task": "digits", "min_updates": 3}, "devices": {"min": 3, "count": 4, "require": 3}})
    made, notes = require_boards(config, 2)
    assert (made.devices.min, made.devices.count, made.devices.require, made.run.min_updates) == (2, 2, 2, 2)
    assert notes[0] == "devices.min is 2 in place of 3: no more boards are left"
    assert require_boards(config, 4) == (config, [])
    with pytest.raises(UsageError, match="no other board of the fleet has data of task digits"):
        require_boards(config, 0)
