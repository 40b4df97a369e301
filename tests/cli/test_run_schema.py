"""The JSON schema of run files: every example fits it, and what a run would refuse does not."""

import json
import tomllib
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from edgefl.engine.assembly.schema import make_run_schema
from edgefl.strategies.registry import BUILT_IN_STRATEGIES

NOT_OF_A_RUN = {"pyproject.toml", "board.toml"}
EXAMPLES = [
    path for path in sorted(Path(__file__).parents[2].glob("examples/*/*.toml")) if path.name not in NOT_OF_A_RUN
]


@pytest.fixture(scope="module")
def validator():
    schema = json.loads(json.dumps(make_run_schema(), allow_nan=False))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.parent.name)
def test_every_example_fits_the_schema(validator, path):
    assert [error.message for error in validator.iter_errors(tomllib.loads(path.read_text()))] == []


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"run": {"rouds": 3}}, "rouds"),
        ({"run": {"rounds": 0}}, "0 is less than the minimum of 1"),
        ({"run": {"rounds": "ten"}}, "'ten' is not of type 'integer'"),
        ({"run": {"evaluate_on": "moon"}}, "'moon' is not one of"),
        ({"stratgy": {}}, "stratgy"),
        ({"server": {"beta1": 1}}, "1 is greater than or equal to the maximum of 1"),
        ({"strategy": {"learning_rate": -0.1}}, "-0.1 is less than the minimum of 0"),
        ({"strategy": {"mu": 0.1}}, "mu"),
        ({"strategy": {"name": "fedprox", "mu": -1}}, "-1 is less than the minimum of 0"),
        ({"strategy": {"name": "adacomp", "staleness": "all"}}, "'all' is not one of"),
        ({"task": {"modell": "cnn"}}, "modell"),
        ({"devices": {"require": "most"}}, "is not valid under any of the given schemas"),
    ],
)
def test_a_wrong_key_and_a_value_out_of_bounds_fail(validator, table, key):
    file = {**table, "run": {"task": "digits", **table.get("run", {})}}
    errors = [error.message for error in validator.iter_errors(file)]
    assert len(errors) == 1
    assert key in errors[0]


def test_lists_of_texts_and_of_numbers_are_options_of_a_task_that_takes_them(validator):
    table = {"columns": ["a", "b"], "target": "c", "means": [1, 2.5], "hidden": 8}
    assert validator.is_valid({"run": {"task": "table"}, "task": table})
    assert validator.is_valid({"run": {"task": "table"}, "task": {**table, "columns": "a,b"}})
    for wrong in ({"means": ["a"]}, {"columns": [1]}, {"model": ["mlp"]}, {"columns": None}):
        assert not validator.is_valid({"run": {"task": "table"}, "task": {**table, **wrong}}), wrong
    assert not validator.is_valid({"run": {"task": "table"}, "task": {"target": "c"}}), "without columns"


def test_a_file_needs_a_task_and_a_class_of_ones_own_may_have_any_options(validator):
    assert not validator.is_valid({"run": {}})
    assert validator.is_valid({"job": {"name": "mine:Job", "size": 3}, "run": {"seconds": 60}})
    assert not validator.is_valid({"job": {"parts": 3}})
    assert validator.is_valid(
        {"run": {"task": "mine:Task"}, "task": {"size": 3}, "strategy": {"name": "mine:S", "a": 1}}
    )


def test_keys_have_their_texts_and_every_strategy_its_options(validator):
    sections = validator.schema["properties"]
    assert sections["run"]["properties"]["rounds"]["description"] == "stop rule: closed rounds."
    assert sections["run"]["properties"]["seed"]["default"] == 7
    fedprox = next(
        entry["then"]["properties"]
        for entry in sections["strategy"]["allOf"]
        if entry["then"]["properties"]["name"]["const"] == "fedprox"
    )
    assert fedprox["batch_size"]["description"] == "examples of a step."
    assert "description" not in fedprox["mu"], "what only it has, its own class describes"
    named = {entry["then"]["properties"]["name"]["const"] for entry in sections["strategy"]["allOf"]}
    assert set(BUILT_IN_STRATEGIES) <= named


def test_the_command_prints_it(command):
    assert json.loads(command("run", "schema").out)["title"] == "edgefl run file"
