"""`edgefl strategies` and `edgefl codecs`."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgefl.compression.registry import STAGES
from edgefl.core.analyses import ANALYSES
from edgefl.strategies.peer_algorithms.gossip_node import ALGORITHMS
from edgefl.strategies.registry import BUILT_IN_STRATEGIES, get_settings, make_strategy
from edgefl.strategies.strategy_config import RoundRules

ROOT = Path(__file__).parents[2]
HOPPING = '''"""Hops: goes on one leg."""
from edgefl import Strategy
class Hops(Strategy):
    kind = "decentralised"
    def __init__(self, legs): ...
'''
ASYNCHRONOUS = {"adacomp", "asgd", "bounded", "dc-asgd", "fedasync", "fedbuff"}


@pytest.fixture
def listed(run):
    return lambda: {row["name"]: row for row in run("strategies", "list", "--format", "json").rows}


@pytest.fixture
def new(run, tmp_path):
    return lambda name, out=tmp_path: run("strategies", "new", name, "--out", out)


def test_every_strategy_is_listed_with_its_kind_its_settings_and_what_it_is(listed, run):
    rows = listed()
    assert list(rows) == [*sorted(BUILT_IN_STRATEGIES), *sorted(ANALYSES), "flwr:NAME"]
    for name, row in rows.items():
        kind = "decentralised" if name in ALGORITHMS else "asynchronous" if name in ASYNCHRONOUS else "synchronous"
        kind = "analysis" if name in ANALYSES else kind
        assert row["kind"] == kind, name
        assert row["summary"], name
    for name in BUILT_IN_STRATEGIES:
        assert rows[name]["settings"] == json.loads(json.dumps(get_settings(name))), name
    table = run("strategies", "list").out
    (line,) = [line for line in table.splitlines() if line.startswith("fedbuff")]
    assert ("staleness_exponent=" in line, "weight_decay" in line) == (True, False), "only what is its own"
    assert "learning_rate=0.05 schedule=constant" in table
    assert "FedAdam, " in table


def test_a_strategy_of_a_broken_package_does_not_hide_the_others(listed, installed):
    installed({"hopping": HOPPING}, {"edgefl.strategies": {"lame": "no_such_package:Lame", "hops": "hopping:Hops"}})
    rows = listed()
    assert "cannot be imported" in rows["lame"]["summary"]
    facts = {"kind": "decentralised", "summary": "Hops: goes on one leg.", "settings": {"legs": "required"}}
    assert rows["hops"] == {"name": "hops", **facts}
    assert rows["fedavg"]["kind"] == "synchronous"


def checked(*command, folder=ROOT, **environment):
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)], cwd=folder, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": "", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_new_strategy_is_short_and_works_and_its_test_passes_as_written(new, tmp_path, monkeypatch):
    done = new("trimmed_mean", tmp_path / "mine")
    files = [tmp_path / "mine" / name for name in ("trimmed_mean.py", "test_trimmed_mean.py")]
    assert done.out.splitlines()[:2] == [str(path) for path in files]
    assert 'name = "trimmed_mean:TrimmedMean"' in done.out
    options = ("-q", "-W", "error", "-p", "no:cacheprovider", ".")
    assert "2 passed" in checked("pytest", *options, folder=tmp_path / "mine")
    checked("ruff", "format", "--check", files[0])
    assert len([line for line in files[0].read_text().split('"""')[2].splitlines() if line.strip()]) < 25
    monkeypatch.syspath_prepend(tmp_path / "mine")
    monkeypatch.setenv("EDGEFL_ALLOW_MODULES", "trimmed_mean")
    assert make_strategy("trimmed_mean:TrimmedMean", {"trim": 2, "epochs": 2}, RoundRules()).init({}) is not None
    sys.modules.pop("trimmed_mean")


@pytest.mark.slow
def test_a_new_strategy_is_strictly_typed(new, tmp_path):
    assert new("own").code == 0
    checked("mypy", "--strict", tmp_path / "own.py")


def test_what_is_there_is_not_overwritten(new, tmp_path):
    for name in ("mine.py", "test_mine.py"):
        (tmp_path / name).write_text("precious")
        done = new("mine")
        assert (done.code, f"{tmp_path / name} exists" in done.err) == (2, True)
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "precious")]
        (tmp_path / name).unlink()
    (tmp_path / "file").write_text("")
    assert new("mine", tmp_path / "file" / "deeper").code in {2, 4}


@pytest.mark.parametrize("name", ["Mine", "my-own", "2nd", "a/b", "..", "", "class", "mine_", "ü", "random", "numpy"])
def test_a_name_that_cannot_be_a_module_of_ones_own_is_refused(new, tmp_path, name):
    done = new(name)
    assert (done.code, done.is_one_line, list(tmp_path.iterdir())) == (2, True, [])


PACKAGE = '''"""A codec of somebody else's."""
from edgefl.compression.quantisation.rounding import Float16


class Half(Float16):
    """Rounds to half precision, as ours does.

    More of it.
    """
'''


@pytest.fixture
def gradient(tmp_path):
    rng = np.random.default_rng(3)
    path = tmp_path / "mine.npz"
    np.savez(path, w=rng.standard_normal((50, 40)).astype(np.float32), b=np.zeros(50, np.float32))
    return path


@pytest.fixture
def bench(run, gradient):
    def call(*words, fmt="json"):
        return run("codecs", "bench", "--gradient", gradient, "--repeats", 1, *words, "--format", fmt)

    return call


def listed_codecs(run):
    return {row["name"]: row for row in run("codecs", "list", "--format", "json").rows}


def test_lists_every_stage_with_what_it_is(run):
    found = listed_codecs(run)
    assert {*STAGES, "ef", "rice"} <= set(found)
    assert (found["topk"]["kind"], found["topk"]["biased"], found["topk"]["contraction"]) == ("tensors", True, True)
    assert (found["qsgd"]["kind"], found["qsgd"]["biased"]) == ("values", False)
    assert (found["zstd"]["kind"], found["zstd"]["biased"]) == ("lossless", None)
    assert "ATOMO, Wang et al. 2018" in run("codecs", "list").out


def test_the_stage_of_an_installed_package_is_listed_and_measured_as_every_other(run, bench, installed):
    installed({"half_codec": PACKAGE}, {"edgefl.codecs": {"half": "half_codec:Half"}})
    assert listed_codecs(run)["half"]["summary"] == "Rounds to half precision, as ours does."
    shown = {part.partition(":")[0] for row in bench().rows for part in row["codec"].split("|")}
    assert shown >= {*STAGES, "half"} - {"delta", "layers", "shuffle"}


def test_measures_the_codecs_that_are_named_in_their_order(bench):
    asked = ["topk:0.01|int8", "dense", "ef|topk:0.1"]
    found = bench(*(word for spec in asked for word in ("--codec", spec))).rows
    assert [(row["codec"], row["gradient"]) for row in found] == [(codec, "mine.npz") for codec in asked]
    sparse, whole, _ = found
    assert sparse["ratio"] > 50
    assert (whole["relative_error"], whole["index_bits"]) == (0.0, None)
    assert sparse["index_bits"] >= 0.9 * sparse["entropy_bits"] > 0
    assert all(row["encode_mb_per_s"] > 0 and row["decode_mb_per_s"] > 0 for row in found)
    (row,) = csv.DictReader(bench("--codec", "sign", fmt="csv").out.splitlines())
    assert set(row) == set(sparse)


def test_draws_a_gradient_where_there_is_no_real_one_and_says_so(run, monkeypatch):
    monkeypatch.delenv("EDGEFL_DATA", raising=False)
    ran = run("codecs", "bench", "--codec", "topk:0.01", "--repeats", 1)
    assert ran.out.startswith("gradient: drawn from Student's t")
    assert "no real gradient" in ran.err


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--codec", "topk:2"], 7, "needs a fraction"),
        (["--codec", "delta|fp16"], 7, "delta is for [compression] down"),
        (["--gradient", "vgg"], 2, "mnist-cnn, resnet-18, or a file"),
        (["--gradient", "no/such.npz"], 4, "no/such.npz"),
        (["--gradient", "mnist-cnn", "--data", "no-such-folder"], 4, "no-such-folder"),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(refused, gradient, arguments, code, text):
    refused(["codecs", "bench", "--gradient", gradient, *arguments], code, text)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), {"task": "digits", "rounds": 20, "accuracy": None, "strategy": "fedavg", "min": 3, "up": "dense|fp16"}),
        (
            ("--data", "mnist", "--boards", 9, "--goal", "0.95", "--speeds", "mixed", "--network", "slow"),
            {"task": "mnist", "rounds": 500, "accuracy": 0.95, "strategy": "fedbuff", "min": 9,
             "up": "ef|topk:0.05|int8"},
        ),
    ],
)  # fmt: skip
def test_quickstart_writes_a_run_file_that_can_be_built_and_says_what_comes_next(run, tmp_path, options, expected):
    from edgefl.core.config import load_run  # noqa: PLC0415 only here
    from edgefl.engine.assembly.build import build_run  # noqa: PLC0415 only here

    ran = run("quickstart", "--out", tmp_path / "run.toml", *options)
    assert (ran.code, f"edgefl run submit {tmp_path / 'run.toml'} --watch" in ran.out) == (0, True), ran.err
    config = load_run(tmp_path / "run.toml")
    found = {"task": config.run.task, "rounds": config.run.rounds, "accuracy": config.run.accuracy}
    found |= {"strategy": config.strategy.name, "min": config.devices.min, "up": config.compression.up}
    assert found == expected
    build_run(config, "check")
    again = run("quickstart", "--out", tmp_path / "run.toml")
    assert (again.code, "exists already" in again.err) == (2, True)


def test_quickstart_asks_on_a_terminal_what_no_option_says(run, tmp_path, monkeypatch):
    from edgefl.core.config import load_run  # noqa: PLC0415 only here

    answers = iter(["5", "0.9", "mixed", "slow"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _prompt: next(answers))
    ran = run("quickstart", "--data", "digits", "--out", tmp_path / "run.toml")
    assert (ran.code, next(answers, None)) == (0, None), ran.err
    config = load_run(tmp_path / "run.toml")
    assert (config.devices.min, config.run.accuracy, config.strategy.name) == (5, 0.9, "fedbuff")


def test_quickstart_for_a_task_of_one_s_own_says_how_its_data_is_simulated(run, tmp_path):
    ran = run("quickstart", "--data", "greenhouse:Greenhouse", "--out", tmp_path / "run.toml")
    assert (ran.code, "run.toml --shards DIR --allow-module greenhouse" in ran.out) == (0, True), ran.out


@pytest.fixture
def own_data(tmp_path):
    rows = [f"2026-01-{1 + i % 28:02},x,{i % 7},{10 * (i % 7) - 20}.5,{i % 3},{'ab'[i % 2]}" for i in range(60)]
    (tmp_path / "pump.csv").write_text("\n".join(["time,same,load,hours,mode,state", *rows]) + "\n")
    for name in ("crack", "whole", ".cache"):
        (tmp_path / "parts" / name).mkdir(parents=True)
    for name in ("crack", "whole"):
        (tmp_path / "parts" / name / "1.PNG").touch()
    (tmp_path / "readme.txt").write_text("one\ntwo, three\n")
    return tmp_path


@pytest.mark.parametrize(
    ("options", "task", "expected"),
    [
        (("--data", "pump.csv"), "table",
         {"columns": "load,hours,mode", "target": "state", "labels": "a,b", "normalise": "fleet", "missing": "drop"}),
        (("--data", "pump.csv", "--target", "mode"), "table",
         {"columns": "load,hours", "target": "mode", "labels": "0,1,2", "normalise": "fleet", "missing": "drop"}),
        (("--data", "pump.csv", "--target", "hours"), "table",
         {"columns": "load,mode", "target": "hours", "normalise": "fleet", "missing": "drop", "target_mean": 9.2,
          "target_scale": 20.26, "metrics": "rmse,r2"}),
        (("--data", "parts"), "pictures", {"labels": "crack,whole"}),
    ],
)  # fmt: skip
def test_quickstart_reads_columns_and_classes_of_data_of_one_s_own(
    run, own_data, monkeypatch, options, task, expected
):
    from edgefl.core.config import load_run  # noqa: PLC0415 only here
    from edgefl.engine.assembly.build import build_run  # noqa: PLC0415 only here

    monkeypatch.chdir(own_data)
    ran = run("quickstart", *options)
    assert ran.code == 0, ran.err
    assert f"edgefl simulate run.toml --data {options[1]} --devices 3 # try it here" in " ".join(ran.out.split())
    config = load_run(own_data / "run.toml")
    told = {name: ",".join(value) if isinstance(value, list) else value for name, value in config.task.items()}
    assert (config.run.task, told) == (task, expected)
    build_run(config, "check")


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (("--data", "table"), 2, "give its path, such as --data readings.csv"),
        (("--data", "pump.cvs"), 4, "pump.cvs is neither a task nor a file or folder here"),
        (("--data", "minst"), 4, "did you mean mnist?"),
        (("--data", "pump.csv", "--target", "ours"), 4, "has no column 'ours'; did you mean hours?"),
        (("--data", "pump.csv", "--target", "hours", "--goal", "0.9"), 2, "hours of pump.csv has values, no classes"),
        (("--data", "digits", "--target", "hours"), 2, "--target names a column of a file; digits is a task"),
        (("--data", "readme.txt"), 4, "readme.txt, row 1: 2 cells, the first line has 1"),
        (("--data", "."), 4, "has no column of numbers beside"),
        (("--data", "pump.csv", "--target", "time"), 4, "has more than 3 different texts, too many for classes"),
        (("--data", "pump.csv", "--target", "same"), 4, "'same' is the same in all rows"),
    ],
)
def test_quickstart_refuses_data_that_it_cannot_read(refused, own_data, monkeypatch, options, code, text):
    monkeypatch.chdir(own_data)
    monkeypatch.setattr("edgefl.tasks.configured.suggestion.MAX_LABELS", 3)
    if options[1] == ".":
        (own_data / "pump.csv").write_text("a,b\nx,y\n")
    refused(["quickstart", *options], code, text)
    assert not (own_data / "run.toml").exists()


@pytest.mark.parametrize("goal", ["0", "1.5", "-3", "soon", "nan", "0.0", "99999999"])
def test_quickstart_refuses_a_goal_that_is_none(run, tmp_path, goal):
    ran = run("quickstart", "--goal", goal, "--out", tmp_path / "run.toml")
    assert (ran.code, "must be rounds such as 20" in ran.err, (tmp_path / "run.toml").exists()) == (2, True, False)
