"""Run files in, frozen settings out; a mistake is one line that names the key."""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pytest

from edgefl.core.config import (
    MAX_NAME_CHARS,
    RunConfig,
    RunSection,
    check_run_name,
    load_run,
    parse_run,
    parse_run_text,
)
from edgefl.core.errors import ConfigError
from edgefl.core.settings import from_mapping
from edgefl.core.types import APP_JOB_PREFIX, Scalar

FULL = """
[run]
task = "fashion-mnist"
name = "first"
rounds = 50
accuracy = 0.9
seconds = 60
seed = 11
evaluate_on = "devices"
min_updates = 3
deadline_s = 2
round_timeout_s = 30
on_timeout = "reassign"
updates_per_round = 12
[task]
model = "cnn-small"
[strategy]
name = "esync"
learning_rate = 0.032
nesterov = true
[compression]
up = "topk:0.01|int8|rice"
down = "dense|fp16"
[compression.layers]
"*.bias" = "dense"
"0.*" = "topk:0.1|int8"
"*" = "fp16"
[devices]
groups = ["lab", "roof"]
min = 2
count = 5
join = "start"
min_memory_bytes = 500_000_000
accelerator = true
max_temperature_c = 75
min_battery = 0.5
unhealthy_policy = "rest"
[server]
optimizer = "yogi"
learning_rate = 0.1
[guard]
max_norm = 10
norm_ratio = 5.0
refusals_before_quarantine = 2
[simulation]
devices = 100
profiles = ["pi-4:3", "pi-5"]
scheme = "dirichlet:0.5"
"""
LAYERS = [("*.bias", "dense"), ("0.*", "topk:0.1|int8"), ("*", "fp16")]


@pytest.fixture
def load(tmp_path):
    def written(text):
        (tmp_path / "run.toml").write_text(text)
        return load_run(tmp_path / "run.toml")

    return written


def facts(section, names):
    return tuple(getattr(section, name) for name in names.split())


def test_reads_every_table_of_a_run_file_and_json_brings_the_same_run_back(load):
    config = load(FULL)
    assert facts(config.run, "task rounds accuracy seed") == ("fashion-mnist", 50, 0.9, 11)
    assert facts(config.run, "round_timeout_s on_timeout updates_per_round") == (30.0, "reassign", 12)
    assert (config.task, config.strategy.name) == ({"model": "cnn-small"}, "esync")
    assert config.strategy.options == {"learning_rate": 0.032, "nesterov": True}
    assert facts(config.compression, "up down") == ("topk:0.01|int8|rice", "dense|fp16")
    assert facts(config.devices, "groups min count join") == (("lab", "roof"), 2, 5, "start")
    assert facts(config.devices, "min_memory_bytes accelerator unhealthy_policy") == (500_000_000, True, "rest")
    assert facts(config.devices, "max_temperature_c min_battery") == (75.0, 0.5)
    assert facts(config.server, "optimizer learning_rate beta1") == ("yogi", 0.1, 0.9)
    assert facts(config.guard, "max_norm norm_ratio refusals_before_quarantine") == (10.0, 5.0, 2)
    assert facts(config.simulation, "devices profiles") == (100, ("pi-4:3", "pi-5"))
    assert [type(value) for value in facts(config.run, "seconds deadline_s")] == [float, float]
    again = RunConfig.from_json(json.loads(json.dumps(config.to_json(), allow_nan=False)))
    assert again == config
    assert [*again.compression.layers.items()] == LAYERS, "in the order of the file"


def test_gives_every_default_to_a_file_that_names_only_the_task():
    config = parse_run({"run": {"task": "digits"}})
    assert config == RunConfig(run=RunSection(task="digits"))
    assert facts(config.run, "rounds seed evaluate_every round_timeout_s on_timeout") == (10, 7, 1, None, "aggregate")
    assert (config.strategy.name, config.compression.up, config.devices.join) == ("fedavg", "dense", "anytime")
    assert (config.server.optimizer, config.guard.max_norm, config.guard.refusals_before_quarantine) == (
        "none",
        None,
        3,
    )
    assert facts(config.devices, "fraction accelerator unhealthy_policy") == (None, False, "smaller")
    value = config.to_json()
    assert (value["run"]["rounds"], value["strategy"], value["devices"]["groups"]) == (10, {"name": "fedavg"}, [])
    assert "init" not in value["run"]
    assert parse_run({"run": {"task": "digits", "accuracy": 0.9}}).run.rounds is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run.rounds = 3


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("section", "table", "expected"),
    [
        ("run", {"micro_batch_size": 8}, "unknown setting run.micro_batch_size: it is strategy.micro_batch_size now"),
        ("run", {"rouds": 3}, "unknown setting run.rouds: did you mean run.rounds?"),
        ("run", {"rounds": 0}, "run.rounds must be a whole number at least 1, got 0"),
        ("run", {"rounds": "ten"}, "run.rounds must be a whole number at least 1, got 'ten'"),
        ("run", {"rounds": True}, "run.rounds must be a whole number at least 1, got true"),
        ("run", {"rounds": 2.0}, "run.rounds must be a whole number at least 1, got 2.0"),
        ("run", {"accuracy": 93}, "run.accuracy must be a number above 0 and at most 1, got 93"),
        ("run", {"accuracy": NAN}, "run.accuracy must be a number above 0 and at most 1, got nan"),
        ("run", {"seconds": INF}, "run.seconds must be a number above 0, got inf"),
        ("run", {"seconds": False}, "run.seconds must be a number above 0, got false"),
        ("run", {"seconds": 10**400}, "run.seconds must be a number above 0"),
        ("run", {"local_test_fraction": 1}, "run.local_test_fraction must be a number at least 0 and below 1, got 1"),
        ("run", {"name": 3}, "run.name must be a text, got 3"),
        ("run", {"round_timeout_s": 0}, "run.round_timeout_s must be a number above 0, got 0"),
        ("run", {"on_timeout": "pray"}, "run.on_timeout must be one of 'aggregate', 'reassign', 'none', got 'pray'"),
        ("run", {"updates_per_round": 0}, "run.updates_per_round must be a whole number at least 1, got 0"),
        ("run", {"evaluate_on": "moon"}, "run.evaluate_on must be one of 'auto', 'coordinator', 'devices'"),
        ("run", 3, "run must be a table, got 3"),
        ("stratgy", {}, "unknown setting stratgy: did you mean strategy?"),
        (
            "zzz",
            {},
            "unknown setting zzz: known are adapt, advice, aggregation, compression, conditions, devices, guard, job",
        ),
        ("task", {"a": [[1]]}, "task.a must be a text, a number or true/false, got [[1]]"),
        ("strategy", {"options": {}}, "strategy.options must be a text, a number or"),
        ("strategy", {"lr": NAN}, "strategy.lr must be a text, a number or"),
        ("devices", {"groups": "lab"}, "devices.groups must be a list of texts, got 'lab'"),
        ("devices", {"min": 4, "count": 2}, "devices.count must be at least devices.min = 4"),
        ("devices", {"count": 2, "fraction": 0.5}, "devices.count and devices.fraction both say how many are asked"),
        ("devices", {"fraction": 0}, "devices.fraction must be a number above 0 and at most 1"),
        ("devices", {"unhealthy_policy": "sick"}, "devices.unhealthy_policy must be one of 'smaller', 'rest'"),
        ("server", {"optimizer": "sgd"}, "server.optimizer must be one of 'none', 'momentum'"),
        ("server", {"beta1": 1}, "server.beta1 must be a number at least 0 and below 1, got 1"),
        ("guard", {"norm_ratio": 1}, "guard.norm_ratio must be a number above 1, got 1"),
        ("simulation", {"jitter": 3}, "simulation.jitter must be a number at least 0 and at mo"),
        ("simulation", {"workers": 257}, "simulation.workers must be a whole number at least 0 and at most 256, got"),
        ("simulation", {"iteration_s": 1e300}, "simulation.iteration_s must be a number above 0 and at most 1000000"),
        (
            "simulation",
            {"server_up_bytes_per_s": 1e-300},
            "simulation.server_up_bytes_per_s must be a number at leas",
        ),
        (
            "compression",
            {"layers": {"*.bias": 3}},
            "compression.layers.*.bias must be a codec such as 'dense', got 3",
        ),
        ("compression", {"layers": {"*.bias": ["fp16"]}}, "compression.layers.*.bias must be a text"),
        (
            "compression",
            {"layers": {"a=b": "fp16"}},
            "compression.layers: 'a=b' = 'fp16' must be a pattern of tensor",
        ),
        ("compression", {"layers": {" ": "fp16"}}, "compression.layers: ' ' = 'fp16' must be a pattern"),
        (
            "compression",
            {"layers": {"a": "fp16; b = int8"}},
            "compression.layers: 'a' = 'fp16; b = int8' must be a pa",
        ),
        ("compression", {"layers": "fp16"}, "compression.layers must be a table, got 'fp16'"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_what_would_be_right(section, table, expected):
    if section == "run" and isinstance(table, dict):
        table = {"task": "digits"} | table
    refused({"run": {"task": "digits"}, section: table}, expected)


def refused(mapping, expected):
    with pytest.raises(ConfigError) as caught:
        parse_run(mapping)
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


def test_a_file_without_a_task_is_refused_and_one_section_may_contradict_another():
    refused({}, "[run] is missing, with at least task")
    refused({"run": {}}, "run.task is missing: a text")
    refused([], "the file must be a table, got []")
    few = {"run": {"task": "d", "min_updates": 3}, "devices": {"count": 2}}
    refused(few, "run.min_updates must be at most devices.count = 2, got 3")


def test_a_file_that_is_no_toml_or_not_there_is_one_line_with_its_name(load, tmp_path):
    with pytest.raises(ConfigError, match=r"run\.toml: unknown setting run\.rouds"):
        load("[run]\nrouds = 3")
    for content in (b"[run", b"\xff\xfe"):
        (tmp_path / "run.toml").write_bytes(content)
        with pytest.raises(ConfigError, match="is not TOML"):
            load_run(tmp_path / "run.toml")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_run(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="the run file is not TOML"):
        parse_run_text("[run")


def test_paths_are_meant_from_the_folder_of_the_run_file_and_are_absolute_in_a_pasted_one(load, tmp_path):
    config = load(
        '[run]\ntask = "digits"\ninit = "models/first.safetensors"\n'
        '[simulation]\nprofile_file = "boards.toml"\nfaults = "/a/faults.toml"\ndata = "data"\n'
    )
    root = tmp_path.resolve()
    assert config.run.init == str(root / "models/first.safetensors")
    expected = (str(root / "boards.toml"), "/a/faults.toml", str(root / "data"))
    assert facts(config.simulation, "profile_file faults data") == expected
    text = '[run]\ntask = "digits"\ninit = "{}"\n[strategy]\nname = "dsgd"\ngraph = "{}"\n'
    assert (
        parse_run_text(text.format("/models/m.safetensors", "/graphs/ring.json")).run.init == "/models/m.safetensors"
    )
    with pytest.raises(ConfigError, match=r"run\.init must be an absolute path .* got 'm\.safetensors'"):
        parse_run_text(text.format("m.safetensors", "ring"))
    with pytest.raises(ConfigError, match=r"strategy\.graph must be an absolute path .* got 'ring\.json'"):
        parse_run_text(text.format("/models/m.safetensors", "ring.json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    rate: float = field(default=0.1, metadata={"above": 0})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    mode: Literal["fast", "slow"]
    inner: Inner | None = None
    names: tuple[str, ...] = ()
    extra: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class Listener:
    port: int = field(default=8000, metadata={"at_least": 0, "at_most": 65535})


def test_fills_any_dataclass_with_nested_optional_and_free_fields_and_names_the_whole_path_of_a_key():
    table = {"mode": "fast", "inner": {"rate": 2}, "names": ["a"], "extra": {"x": 1}}
    expected = Outer(mode="fast", inner=Inner(rate=2.0), names=("a",), extra={"x": 1})
    assert from_mapping(Outer, table, path="strategy") == expected
    with pytest.raises(ConfigError, match=r"^strategy\.inner\.rate must be a number above 0, got -1$"):
        from_mapping(Outer, {"mode": "fast", "inner": {"rate": -1}}, path="strategy")
    assert from_mapping(Listener, {"port": 0}, "coordinator").port == 0
    with pytest.raises(ConfigError, match=r"coordinator\.port must be a whole number at least 0 and at most 65535"):
        from_mapping(Listener, {"port": 70000}, "coordinator")


def test_a_run_excludes_devices_that_it_does_not_name_and_says_which_run_it_replaces():
    tables = {"run": {"task": "digits", "replaces": "20260301-1"}, "devices": {"names": ["a"], "exclude": ["b"]}}
    config = parse_run(tables)
    assert (config.devices.exclude, config.run.replaces) == (("b",), "20260301-1")
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    plain = parse_run({"run": {"task": "digits"}}).to_json()
    assert "exclude" not in plain["devices"], "stored runs stay as they are"
    assert "replaces" not in plain["run"]
    refused(
        {"run": {"task": "digits"}, "devices": {"names": ["a"], "exclude": ["a"]}},
        "devices.names and devices.exclude both have 'a'",
    )
    refused({"run": {"task": "digits", "replaces": "../x"}}, "run.replaces must be the id of a run, got '../x'")


@pytest.mark.parametrize(
    ("require", "is_right"),
    [*((each, True) for each in ("any", "all", 3)), *((each, False) for each in ("most", 0, -1, True, 2.5, ["all"]))],
)
def test_as_many_devices_may_be_required_as_a_run_file_says(require, is_right):
    mapping = {"run": {"task": "digits"}, "devices": {"require": require}}
    if is_right:
        config = parse_run(mapping)
        assert (config.devices.require, RunConfig.from_json(config.to_json())) == (require, config)
    else:
        refused(mapping, "devices.require must be a whole number at least 1 or one of 'any', 'all'")


@pytest.mark.parametrize(
    "name", [None, "digits again", "Läufe 7", "a.b", "x" * MAX_NAME_CHARS, "mnist (lr=0.1, 10-50)"]
)
def test_a_run_s_name_may_be_what_people_write(name):
    check_run_name(name)


WRONG = ["", " ", ".", "..", ". .", "a/b", "/", "a\\b", "a\nb", "\x1b[2J", "a\x00", "\u202eabc", "\u2028"]
WRONG += ["-rf", "=1+1", "a\u3164b", "a<b>", 'a"b']


@pytest.mark.parametrize("name", [*WRONG, "x" * (MAX_NAME_CHARS + 1)])
def test_a_run_s_name_is_no_path_no_option_no_formula_and_no_control_character(name):
    with pytest.raises(ConfigError, match=r"run\.name must be 1 to .* letter or digit, got") as told:
        check_run_name(name)
    assert len(str(told.value)) < 250, "the message does not repeat all of it"
    assert str(told.value).isprintable()


def test_all_wrong_settings_of_a_file_are_named_at_once_with_their_lines(tmp_path):
    (tmp_path / "run.toml").write_text(
        '[run]\ntask = "digits"\n\nrounds = "sixty"\nacuracy = 0.9\n[device]\nmin = 3\n[guard]\n"enabled" = 3\n'
    )
    with pytest.raises(ConfigError) as refused:
        load_run(tmp_path / "run.toml")
    assert str(refused.value) == (
        f"{tmp_path / 'run.toml'}: unknown setting device (line 6): did you mean devices?; "
        "unknown setting run.acuracy (line 5): did you mean run.accuracy?; "
        "run.rounds (line 4) must be a whole number at least 1, got 'sixty'; "
        "guard.enabled (line 9) must be true or false, got 3"
    )


def test_a_file_of_a_thousand_wrong_settings_names_some_and_how_many_more():
    with pytest.raises(ConfigError, match=r"and 980 more$") as refused:
        parse_run({"run": {"task": "digits", **{f"x{number}": 1 for number in range(1000)}}})
    assert len(str(refused.value)) < 20_000


JOB = {"run": {"name": "counting", "seconds": 60.0}, "job": {"name": "texts:Words", "parts": 4, "language": "de"}}

APP = {"job": {"name": f"{APP_JOB_PREFIX}quickstart"}}


def test_a_job_is_a_run_whose_task_is_its_name_and_keeps_its_own_options():
    config = parse_run({**JOB, "devices": {"groups": ["kitchen"]}})
    assert (config.run.task, config.strategy.name, config.job.options) == ("texts:Words", "job", {"language": "de"})
    value = config.to_json()
    assert set(value) == {"run", "job", "devices"}
    assert RunConfig.from_json(value) == config
    assert "job" not in parse_run({"run": {"task": "digits"}}).to_json()


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"job": {"parts": 4}}, "job.name must be a job's name, such as my_jobs:WordCount, got None"),
        ({**JOB, "compression": {"up": "int8"}}, "compression means nothing beside job, which trains nothing"),
        ({**JOB, "strategy": {"name": "fedavg"}}, "strategy means nothing beside job, which trains nothing"),
        (
            {**APP, "privacy": {"unit": "device"}},
            "leave it out, and use Flower's, such as LocalDpMod or DifferentialPrivacy",
        ),
        ({**APP, "privacy": {"unit": "example"}}, "privacy protects nothing of a Flower app"),
        (
            {**APP, "guard": {"enabled": True}},
            "guard means nothing for a Flower app, whose own code trains; leave it",
        ),
        ({**JOB, "run": {"task": "digits"}}, "run.task means nothing for a job; leave it out"),
        ({**JOB, "run": {"seed": 1}}, "run.seed means nothing for a job; leave it out"),
        ({**APP, "run": {"rounds": 1}}, "run.rounds means nothing for a job; leave it out"),
        ({**JOB, "devices": {"count": 2}}, "devices.count means nothing for a job; leave it out"),
        ({"job": {"name": "a:B", "parts": 0}}, "job.parts must be a whole number at least 1"),
        ({"job": {"name": "a:B", "max_part_bytes": 10**12}}, "job.max_part_bytes must be a whole number at least 1"),
        ({**JOB, "jobs": {}}, "unknown setting jobs"),
    ],
)
def test_what_means_nothing_for_a_job_is_refused_by_name(tables, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_run(tables)


def test_a_run_has_conditions_without_budgets_and_all_that_is_wrong_in_them_is_named():
    conditions = {"zone": "Europe/Oslo", "hours": ["22:00-06:00"], "min_battery": 0.5, "unmetered": True}
    for tables in ({"run": {"task": "digits"}}, JOB):
        config = parse_run({**tables, "conditions": conditions})
        assert config.to_json()["conditions"] == conditions
        assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
        assert "conditions" not in parse_run(tables).to_json(), "stored runs stay as they are"
    wrong = {"min_battery": 50, "mains": "yes", "day": {"traffic_mb": 1}}
    with pytest.raises(ConfigError) as refusal:
        parse_run({"run": {"task": "digits"}, "conditions": wrong})
    for part in ("unknown setting conditions.day", "conditions.min_battery must", "conditions.mains must"):
        assert part in str(refusal.value)
    wrong = {"zone": "Mars", "hours": ["1", "2"], "weekdays": ["x"]}
    with pytest.raises(ConfigError) as refusal:
        parse_run({"run": {"task": "digits"}, "conditions": wrong})
    assert len(refusal.value.faults) == 4


def test_a_list_of_a_task_s_options_is_the_same_as_one_text_with_commas():
    task = {"columns": ["a", "b_0..3"], "means": [1, -2.5], "size": 3}
    config = parse_run({"run": {"task": "table"}, "task": task})
    assert config.task == {"columns": "a,b_0..3", "means": "1,-2.5", "size": 3}
    assert RunConfig.from_json(config.to_json()) == config
    refused(
        {"run": {"task": "table"}, "task": {"columns": ["a,b"]}}, "task.columns must hold entries without a comma"
    )
    refused({"run": {"task": "table"}, "task": {"columns": [True]}}, "task.columns must be a text, a number or true")
