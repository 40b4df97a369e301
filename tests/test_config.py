"""Run files in, frozen settings out; a mistake is one line that names the key."""

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pytest

from edgefl.config import (
    MAX_NAME_CHARS,
    CoordinatorSettings,
    RunConfig,
    RunSection,
    check_run_name,
    from_mapping,
    load_run,
    parse_run,
    parse_run_text,
)
from edgefl.errors import ConfigError
from edgefl.types import Scalar

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
barrier_s = 30
rescue = "ask-again"
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
[devices]
groups = ["lab", "roof"]
min = 2
count = 5
join = "start"
min_memory_bytes = 500_000_000
accelerator = true
max_temperature_c = 75
min_battery = 0.5
unwell = "rest"
[server]
optimizer = "yogi"
learning_rate = 0.1
[guard]
max_norm = 10
max_norm_ratio = 4.0
flag_after = 2
[simulation]
devices = 100
profiles = ["pi-4:3", "pi-5"]
scheme = "dirichlet:0.5"
"""


def run_file(folder, text):
    file = folder / "run.toml"
    file.write_text(text)
    return file


def problem(mapping):
    with pytest.raises(ConfigError) as caught:
        parse_run(mapping)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_reads_every_table_of_a_run_file(tmp_path):
    config = load_run(run_file(tmp_path, FULL))
    assert (config.run.task, config.run.rounds, config.run.accuracy, config.run.seed) == (
        "fashion-mnist",
        50,
        0.9,
        11,
    )
    assert config.task == {"model": "cnn-small"}
    assert config.strategy.name == "esync"
    assert config.strategy.options == {"learning_rate": 0.032, "nesterov": True}
    assert (config.compression.up, config.compression.down) == ("topk:0.01|int8|rice", "dense|fp16")
    assert (config.devices.groups, config.devices.min, config.devices.count) == (("lab", "roof"), 2, 5)
    assert config.devices.join == "start"
    assert (config.run.barrier_s, config.run.rescue, config.run.updates_per_round) == (30.0, "ask-again", 12)
    assert (config.devices.min_memory_bytes, config.devices.accelerator) == (500_000_000, True)
    assert (config.devices.max_temperature_c, config.devices.min_battery, config.devices.unwell) == (
        75.0,
        0.5,
        "rest",
    )
    assert (config.server.optimizer, config.server.learning_rate, config.server.beta1) == ("yogi", 0.1, 0.9)
    assert (config.guard.max_norm, config.guard.max_norm_ratio, config.guard.flag_after) == (10.0, 4.0, 2)
    assert (config.simulation.devices, config.simulation.profiles) == (100, ("pi-4:3", "pi-5"))


def test_codecs_of_layers_keep_the_order_of_the_file():
    config = parse_run(tomllib.loads(LAYERS_FILE))
    assert list(config.compression.layers.items()) == [("*.bias", "dense"), ("0.*", "topk:0.1|int8"), ("*", "fp16")]
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert list(RunConfig.from_json(config.to_json()).compression.layers) == ["*.bias", "0.*", "*"]


LAYERS_FILE = """
[run]
task = "digits"
[compression]
up = "ef|topk:0.01|int8"
[compression.layers]
"*.bias" = "dense"
"0.*" = "topk:0.1|int8"
"*" = "fp16"
"""


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ({"*.bias": 3}, "compression.layers.*.bias must be a codec such as 'dense', got 3"),
        ({"*.bias": ["fp16"]}, "compression.layers.*.bias must be a text"),
        ({"a=b": "fp16"}, "compression.layers: 'a=b' = 'fp16' must be a pattern of tensor names and one codec"),
        ({" ": "fp16"}, "compression.layers: ' ' = 'fp16' must be a pattern"),
        ({"a": "fp16; b = int8"}, "compression.layers: 'a' = 'fp16; b = int8' must be a pattern"),
        ("fp16", "compression.layers must be a table, got 'fp16'"),
    ],
)
def test_layers_are_patterns_with_a_codec_each(layers, expected):
    assert problem({"run": {"task": "d"}, "compression": {"layers": layers}}).startswith(expected)


def test_gives_every_default_to_a_file_that_names_only_the_task():
    config = parse_run({"run": {"task": "digits"}})
    assert config == RunConfig(run=RunSection(task="digits"))
    assert (config.run.rounds, config.run.seed, config.run.evaluate_every) == (10, 7, 1)
    assert (config.strategy.name, config.compression.up, config.devices.join) == ("fedavg", "dense", "anytime")
    assert (config.run.barrier_s, config.run.rescue, config.run.updates_per_round) == (None, "go-on", None)
    assert (config.server.optimizer, config.guard.max_norm, config.guard.flag_after) == ("none", None, 3)
    assert (config.devices.fraction, config.devices.accelerator, config.devices.unwell) == (None, False, "smaller")


def test_adds_the_default_rounds_only_when_no_other_stop_rule_is_given():
    assert parse_run({"run": {"task": "digits", "accuracy": 0.9}}).run.rounds is None


def test_whole_numbers_become_floats_where_seconds_are_meant(tmp_path):
    config = load_run(run_file(tmp_path, FULL))
    assert isinstance(config.run.seconds, float)
    assert isinstance(config.run.deadline_s, float)


def test_json_brings_the_same_run_back(tmp_path):
    config = load_run(run_file(tmp_path, FULL))
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json(), allow_nan=False))) == config


def test_json_writes_the_defaults_out():
    value = parse_run({"run": {"task": "digits"}}).to_json()
    assert value["run"]["rounds"] == 10
    assert value["strategy"] == {"name": "fedavg"}
    assert value["devices"]["groups"] == []
    assert "init" not in value["run"]


def test_settings_cannot_be_reassigned():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse_run({"run": {"task": "digits"}}).run.rounds = 3


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({"rouds": 3}, "unknown setting run.rouds: did you mean run.rounds?"),
        ({"rounds": 0}, "run.rounds must be a whole number at least 1, got 0"),
        ({"rounds": "ten"}, "run.rounds must be a whole number at least 1, got 'ten'"),
        ({"rounds": True}, "run.rounds must be a whole number at least 1, got True"),
        ({"rounds": 2.0}, "run.rounds must be a whole number at least 1, got 2.0"),
        ({"accuracy": 93}, "run.accuracy must be a number above 0 and at most 1, got 93"),
        ({"accuracy": float("nan")}, "run.accuracy must be a number above 0 and at most 1, got nan"),
        ({"seconds": float("inf")}, "run.seconds must be a number above 0, got inf"),
        ({"seconds": False}, "run.seconds must be a number above 0, got False"),
        ({"local_test_fraction": 1}, "run.local_test_fraction must be a number at least 0 and below 1, got 1"),
        ({"name": 3}, "run.name must be a text, got 3"),
        ({"barrier_s": 0}, "run.barrier_s must be a number above 0, got 0"),
        ({"rescue": "pray"}, "run.rescue must be one of 'go-on', 'ask-again', 'none', got 'pray'"),
        ({"updates_per_round": 0}, "run.updates_per_round must be a whole number at least 1, got 0"),
        ({"evaluate_on": "moon"}, "run.evaluate_on must be one of 'auto', 'coordinator', 'devices', 'evaluator'"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_what_would_be_right(run, expected):
    assert problem({"run": {"task": "digits"} | run}).startswith(expected)


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({}, "[run] is missing, with at least task"),
        ({"run": {}}, "run.task is missing: a text"),
        ({"run": 3}, "run must be a table, got 3"),
        ([], "the file must be a table, got []"),
        ({"run": {"task": "digits"}, "stratgy": {}}, "unknown setting stratgy: did you mean strategy?"),
        (
            {"run": {"task": "digits"}, "zzz": {}},
            "unknown setting zzz: known are compression, devices, guard, models, run",
        ),
        ({"run": {"task": "digits"}, "task": {"a": [1]}}, "task.a must be a text, a number or true/false, got [1]"),
        ({"run": {"task": "d"}, "strategy": {"options": {}}}, "strategy.options must be a text, a number or"),
        ({"run": {"task": "d"}, "strategy": {"lr": float("nan")}}, "strategy.lr must be a text, a number or"),
        ({"run": {"task": "d"}, "devices": {"groups": "lab"}}, "devices.groups must be a list of texts, got 'lab'"),
        ({"run": {"task": "d"}, "devices": {"min": 4, "count": 2}}, "devices.count must be at least devices.min = 4"),
        (
            {"run": {"task": "d"}, "devices": {"count": 2, "fraction": 0.5}},
            "devices.count and devices.fraction both say how many are asked; give one of them",
        ),
        (
            {"run": {"task": "d"}, "devices": {"fraction": 0}},
            "devices.fraction must be a number above 0 and at most 1",
        ),
        ({"run": {"task": "d"}, "devices": {"unwell": "sick"}}, "devices.unwell must be one of 'smaller', 'rest'"),
        (
            {"run": {"task": "d"}, "server": {"optimizer": "sgd"}},
            "server.optimizer must be one of 'none', 'momentum'",
        ),
        (
            {"run": {"task": "d"}, "server": {"beta1": 1}},
            "server.beta1 must be a number at least 0 and below 1, got 1",
        ),
        (
            {"run": {"task": "d"}, "guard": {"max_norm_ratio": 1}},
            "guard.max_norm_ratio must be a number above 1, got 1",
        ),
        (
            {"run": {"task": "d"}, "simulation": {"jitter": 3}},
            "simulation.jitter must be a number at least 0 and at mo",
        ),
        (
            {"run": {"task": "d"}, "simulation": {"workers": 257}},
            "simulation.workers must be a whole number at least 0 and at most 256, got 257",
        ),
        (
            {"run": {"task": "d"}, "simulation": {"iteration_s": 1e300}},
            "simulation.iteration_s must be a number above 0 and at most 1000000.0, got 1e+300",
        ),
        (
            {"run": {"task": "d"}, "simulation": {"server_up_bytes_per_s": 1e-300}},
            "simulation.server_up_bytes_per_s must be a number at least 1, got 1e-300",
        ),
        (
            {"run": {"task": "d", "min_updates": 3}, "devices": {"count": 2}},
            "run.min_updates must be at most devices.c",
        ),
    ],
)
def test_a_wrong_table_is_named(mapping, expected):
    assert problem(mapping).startswith(expected)


def test_a_number_too_large_for_a_float_is_refused_and_not_a_traceback():
    assert problem({"run": {"task": "digits", "seconds": 10**400}}).startswith("run.seconds must be a number above 0")


def test_messages_of_a_file_begin_with_its_name(tmp_path):
    file = run_file(tmp_path, "[run]\nrouds = 3")
    with pytest.raises(ConfigError, match=r"run\.toml: unknown setting run\.rouds"):
        load_run(file)


@pytest.mark.parametrize("content", [b"[run", b"\xff\xfe"])
def test_a_file_that_is_no_toml_is_one_line(tmp_path, content):
    file = tmp_path / "run.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="is not TOML"):
        load_run(file)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_run(tmp_path / "absent.toml")


def test_init_is_meant_from_the_folder_of_the_run_file(tmp_path):
    file = run_file(tmp_path, '[run]\ntask = "digits"\ninit = "models/first.safetensors"')
    assert load_run(file).run.init == str(tmp_path.resolve() / "models/first.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    rate: float = field(default=0.1, metadata={"above": 0})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    mode: Literal["fast", "slow"]
    inner: Inner | None = None
    names: tuple[str, ...] = ()
    extra: Mapping[str, Scalar] = field(default_factory=dict)


def test_fills_any_dataclass_with_nested_optional_and_free_fields():
    table = {"mode": "fast", "inner": {"rate": 2}, "names": ["a"], "extra": {"x": 1}}
    assert from_mapping(Outer, table, path="strategy") == Outer(
        mode="fast", inner=Inner(rate=2.0), names=("a",), extra={"x": 1}
    )


def test_names_the_whole_path_of_a_nested_key():
    with pytest.raises(ConfigError, match=r"^strategy\.inner\.rate must be a number above 0, got -1$"):
        from_mapping(Outer, {"mode": "fast", "inner": {"rate": -1}}, path="strategy")


def test_process_settings_have_bounded_ports():
    assert from_mapping(CoordinatorSettings, {"port": 0}, "coordinator").port == 0
    with pytest.raises(ConfigError, match=r"coordinator\.port must be a whole number at least 0 and at most 65535"):
        from_mapping(CoordinatorSettings, {"port": 70000}, "coordinator")


def test_paths_of_a_simulation_are_meant_from_the_run_file_s_folder(tmp_path):
    (tmp_path / "run.toml").write_text(
        '[run]\ntask = "digits"\n'
        '[simulation]\nprofile_file = "boards.toml"\nfaults = "/a/faults.toml"\ndata = "data"\n'
    )
    section = load_run(tmp_path / "run.toml").simulation
    assert section.profile_file == str(tmp_path / "boards.toml")
    assert section.faults == "/a/faults.toml"
    assert section.data == str(tmp_path / "data")


def test_a_pasted_run_file_may_name_files_by_absolute_paths_only():
    text = '[run]\ntask = "digits"\ninit = "{}"\n[strategy]\nname = "dsgd"\ngraph = "{}"\n'
    config = parse_run_text(text.format("/models/m.safetensors", "/graphs/ring.json"))
    assert config.run.init == "/models/m.safetensors"
    with pytest.raises(ConfigError, match=r"run\.init must be an absolute path .* got 'm\.safetensors'"):
        parse_run_text(text.format("m.safetensors", "ring"))
    with pytest.raises(ConfigError, match=r"strategy\.graph must be an absolute path .* got 'ring\.json'"):
        parse_run_text(text.format("/models/m.safetensors", "ring.json"))


def test_a_pasted_text_that_is_no_toml_is_said_to_be_none():
    with pytest.raises(ConfigError, match="the run file is not TOML"):
        parse_run_text("[run")


@pytest.mark.parametrize("require", ["any", "all", 3])
def test_as_many_devices_may_be_required_as_a_run_file_says(require):
    config = parse_run({"run": {"task": "digits"}, "devices": {"require": require}})
    assert config.devices.require == require
    assert RunConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("require", ["most", 0, -1, True, 2.5, ["all"]])
def test_what_is_no_number_of_required_devices_is_refused(require):
    with pytest.raises(
        ConfigError, match=r"devices.require must be a whole number at least 1 or one of 'any', 'all'"
    ):
        parse_run({"run": {"task": "digits"}, "devices": {"require": require}})


@pytest.mark.parametrize("name", [None, "digits again", "Läufe 7", "a.b", "x" * MAX_NAME_CHARS, "-rf", "..a"])
def test_a_run_s_name_may_be_what_people_write(name):
    check_run_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        ".",
        "..",
        ". .",
        "a/b",
        "/",
        "a\\b",
        "a\nb",
        "\x1b[2J",
        "a\x00",
        "\u202eabc",
        "\u2028",
        "x" * (MAX_NAME_CHARS + 1),
    ],
)
def test_a_run_s_name_is_no_path_no_control_character_and_no_page(name):
    with pytest.raises(ConfigError, match=r"run\.name must be 1 to .* without slashes, got") as told:
        check_run_name(name)
    assert len(str(told.value)) < 250, "the message does not repeat all of it"
    assert str(told.value).isprintable()
