"""`edgefl simulate`, `demo` and `data` as a user types them: tables, stores, and one line for what makes no sense."""

import json
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import apart_strategy
import pytest

from edgefl.cli.experiments import make_demo_run
from edgefl.device.collect.alignment import Row
from edgefl.device.collect.row_store import StoreLimits, open_row_store
from edgefl.system.row_labels import LabelKind, LabelLine, append_row_labels

RUN = (
    '[run]\ntask = "digits"\nrounds = 2\n[task]\nmodel = "logistic"\n[simulation]\nprofiles = ["pi-5"]\nworkers = 0\n'
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


@pytest.fixture
def simulate(run, file, tmp_path):
    """The rows of a simulation of the run file."""
    return lambda *words: run("simulate", file, "--dir", tmp_path / "d", *words, "--format", "json").rows


def test_it_prints_the_rounds_and_where_to_ask_for_more(run, file, tmp_path):
    done = run("simulate", file, "--devices", 3, "--profile", "pi-4", "--profile", "pi-zero-2w")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[1].split()[:4] == ["round", "num", "updates", "accuracy"]
    assert [line.split()[:2] for line in lines[2:4]] == [["1", "3"], ["2", "3"]]
    assert "virtual time:" in lines[4]
    assert len(run(*lines[5].removeprefix("query it: edgefl ").split(), "--format", "json").rows) == 2 * 3
    assert (tmp_path / "data" / "edgefl" / "simulations" / "edgefl.db").exists()


def test_options_replace_what_the_run_file_says_and_json_has_the_rounds_in_full(simulate, tmp_path):
    rows = simulate("--seed", 3)
    assert [row["round"] for row in rows] == [1, 2]
    assert rows[1]["ended_s"] == pytest.approx(rows[0]["seconds"] + rows[1]["seconds"])
    rows = simulate("--devices", 200, "--bookkeeping-only")
    assert [(row["num_updates"], row["accuracy"]) for row in rows] == [(200, None)] * 2
    (tmp_path / "faults.toml").write_text('[[fault]]\ndevice = "device-01"\nat_s = 0\nkind = "kill"\n')
    assert [row["num_updates"] for row in simulate("--devices", 3, "--faults", tmp_path / "faults.toml")] == [2, 2]


def test_an_accelerator_is_named_as_torch_does(run, file):
    done = run("simulate", file, "--accelerator", "tpu")
    assert (done.code, done.err.strip()) == (
        3,
        "edgefl: simulation.accelerator must be cpu, cuda or cuda:N, got 'tpu'",
    )


def test_each_entry_of_a_folder_of_shards_is_one_device_s_data(run, simulate, file, refused, shard, tmp_path):
    (tmp_path / "readings").mkdir()
    for name in ("b.npz", "a.npz"):
        shutil.copy(shard, shard.with_name(name))
        shutil.copy(shard.with_suffix(".json"), shard.with_name(name).with_suffix(".json"))
    shutil.copy(shard, shard.with_name("test.npz"))
    assert [row["num_updates"] for row in simulate("--shards", shard.parent)] == [3, 3]
    assert [row["num_updates"] for row in simulate("--shards", shard, "--shards", shard.with_name("a.npz"))] == [2, 2]
    for words, code, said in (
        (("--shards", tmp_path / "nowhere"), 4, "a folder with one entry per device"),
        (("--shards", tmp_path / "readings"), 4, "holds no shard"),
        (("--shards", shard.parent, "--devices", 2), 2, "--shards says who has what"),
    ):
        refused(["simulate", file, *words], code, said)


def test_wrong_settings_of_the_task_and_of_the_strategy_are_named_in_one_try(run, file):
    file.write_text('[run]\ntask = "digits"\nrounds = 1\n[task]\nmodle = "x"\n[strategy]\nlearnign_rate = 1.0\n')
    done = run("simulate", file)
    assert (done.code, done.is_one_line) == (3, True), done.err
    assert "task.modle: digits has no such setting (did you mean model?)" in done.err
    assert "strategy.learnign_rate: fedavg has no such setting (did you mean learning_rate?)" in done.err


def test_a_task_without_a_data_set_says_how_to_bring_shards_and_its_own_error_is_a_line(
    refused, monkeypatch, tmp_path
):
    (tmp_path / "weather.py").write_text(
        "from edgefl.tasks.noop import NoopTask\n\n\nclass Weather(NoopTask):\n    name = 'weather:Weather'\n\n"
        "    def read(self, path):\n        raise KeyError('no column')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own.toml").write_text('[run]\ntask = "weather:Weather"\nrounds = 1\n')
    words = ["simulate", tmp_path / "own.toml", "--allow-module", "weather"]
    refused(words, 5, "edgefl simulate FILE --shards DIR")
    (tmp_path / "none.toml").write_text('[run]\ntask = "weather:Wether"\nrounds = 1\n')
    refused(["simulate", tmp_path / "none.toml", *words[2:]], 5, "Wether")
    refused([*words, "--shards", tmp_path / "own.toml"], 4, "cannot read shard")


def test_the_profiles_are_listed_with_their_sources(run, tmp_path):
    table = run("simulate", "--list-profiles").out
    names = ("pi-zero-2w", "pi-3b-plus", "pi-4", "pi-5", "jetson-nano", "jetson-orin-nano", "estimated: speed")
    assert all(name in table for name in names)
    (tmp_path / "mine.toml").write_text('[profile.mine]\nspeed = 3\nsource.speed = "measured: by me"\n')
    rows = run("simulate", "--list-profiles", "--profile", tmp_path / "mine.toml", "--format", "json").rows
    assert {row["name"]: row["source"] for row in rows}["mine"] == {"speed": "measured: by me"}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("", 2, "a simulation needs a run file"),
        ("none.toml", 3, "none.toml: cannot be read"),
        ("{file} --profile pi4", 3, "no profile 'pi4': did you mean pi-4?"),
        ("{file} --profile none.toml", 3, "none.toml: cannot be read"),
        ("{file} --scheme odd", 3, "scheme must be one of"),
        ("{file} --faults none.toml", 3, "none.toml: cannot be read"),
        ("{file} --devices 9999", 3, "devices must be 1 to"),
    ],
)
def test_what_makes_no_sense_is_one_line(refused, file, words, code, message):
    refused(["simulate", *words.format(file=file).split()], code, message)


def test_the_nodes_of_a_run_that_has_them_are_shown_and_told_at_the_end(run, simulate, file, monkeypatch):
    monkeypatch.syspath_prepend(apart_strategy.TESTS)
    monkeypatch.setenv("EDGEFL_ALLOW_MODULES", "apart_strategy")
    file.write_text(f'{RUN}[strategy]\nname = "{apart_strategy.NAME}"\n')
    done = run("simulate", file, "--devices", 2, "--scheme", "iid")
    assert done.code == 0, done.err
    _, heading, *_, last, words, _, _ = done.out.splitlines()
    names = "round num updates accuracy node accuracy worst node accuracy disagreement loss"
    assert " ".join(heading.split()).startswith(names)
    shown = last.split()[2:6]
    told = re.fullmatch(r"accuracy of the average model (\S+), of the nodes (\S+) \(worst (\S+)\)", words)
    assert [*map(float, told.groups()), 0.5] == pytest.approx([*map(float, shown)], abs=1e-4)
    assert simulate("--devices", 2, "--scheme", "iid")[-1]["disagreement"] == 0.5


ROOT = Path(__file__).parents[2]


def demo(folder, *words):
    """Runs it where the user has nothing but edgefl, and returns how it ended."""
    return subprocess.run(
        [sys.executable, "-m", "edgefl.cli.main", "demo", *words], capture_output=True, text=True, check=False,
        cwd=folder, env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(ROOT)}, timeout=100,
    )  # fmt: skip


def processes_of(folder):
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder) in path.read_bytes().decode(errors="replace"):
                yield path
        except OSError:
            continue


def rounds_in(out, num_updates=r"\d+"):
    return [line.split() for line in out.splitlines() if re.match(rf"\s+\d+\s+{num_updates} ", line)]


def test_a_whole_fleet_trains_tells_its_rounds_and_leaves_a_store_that_can_be_asked(command, tmp_path):
    done = demo(tmp_path, "--rounds", "6", "--devices", "2")
    assert done.returncode == 0, done.stderr
    rows = rounds_in(done.stdout, "2")
    assert [int(row[0]) for row in rows] == list(range(1, 7))
    assert float(rows[-1][2]) >= 0.8
    (path,) = re.findall(r"^database: (.+)$", done.stdout, re.MULTILINE)
    with closing(sqlite3.connect(path)) as store:
        assert store.execute("SELECT count(*) FROM updates WHERE outcome = 'used'").fetchone() == (6 * 2,)
        assert store.execute("SELECT count(DISTINCT device_id) FROM heartbeats").fetchone() == (3,)
    (line,) = re.findall(r"^query it: edgefl (.+)$", done.stdout, re.MULTILINE)
    assert len(command(*line.split()).out.splitlines()) == 1 + 6 * 2
    assert [path.name for path in tmp_path.iterdir()] == ["demo-run"], "the user's own settings are left alone"
    assert list(processes_of(tmp_path)) == []


def test_a_mistake_is_one_line_and_leaves_an_earlier_demo_alone(refused, tmp_path, monkeypatch):
    earlier = tmp_path / "demo-run" / "kept.txt"
    earlier.parent.mkdir()
    earlier.write_text("of an earlier demo")
    (earlier.parent / ".edgefl-demo").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EDGEFL_DATA", raising=False)
    refused(["demo", "--scheme", "nope"], 3, "scheme must be one of")
    refused(["demo", "--scheme", "natural"], 4, "who its examples come from")
    refused(["demo", "--task", "fashion-mnist", "--data", "no"], 4, "does not exist")
    refused(["demo", "--out", "/dev/null/demo"], 4, "/dev/null/demo cannot be written: Not a directory")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").touch()
    refused(["demo", "--out", "mine"], 2, "is not of an earlier demo")
    assert earlier.exists()


@pytest.mark.slow
def test_a_second_demo_replaces_the_first_and_shows_the_first_rounds_of_an_asynchronous_run(tmp_path):
    (tmp_path / "demo-run").mkdir()
    (tmp_path / "demo-run" / ".edgefl-demo").touch()
    (tmp_path / "demo-run" / "kept.txt").touch()
    done = demo(tmp_path, "--strategy", "asgd", "--rounds", "2", "--devices", "3")
    assert done.returncode == 0, done.stderr
    assert [int(row[0]) for row in rounds_in(done.stdout)][:2] == [1, 2]
    assert not (tmp_path / "demo-run" / "kept.txt").exists()


def test_the_cut_is_told_for_people_and_for_programs_as_the_cards_on_disk_say(run, tmp_path):
    words = ("data", "shard", "digits", "--scheme", "by-class", "--devices", "5", "--out", tmp_path)
    names = [*(f"device-0{number}" for number in range(1, 6)), "test"]
    rows = {line.split()[0]: line.split()[1:] for line in run(*words).out.splitlines() if line.split()}
    assert set(names) <= set(rows)
    assert all(int(rows[name][0]) == sum(map(int, rows[name][1:])) for name in names)
    printed = json.loads(run(*words, "--format", "json").out)
    assert (printed["v"], [row["shard"] for row in printed["shards"]]) == (1, names)
    for row in printed["shards"]:
        card = json.loads((tmp_path / f"{row['shard']}.json").read_text())
        for name in ("task", "num_examples", "counts", "sha256"):
            assert row[name] == card[name]


TABLE = '[run]\ntask = "table"\n[task]\ncolumns = ["a", "b"]\ntarget = "c"\nlabels = ["x", "y"]\n'


@pytest.fixture
def table_file(tmp_path):
    path = tmp_path / "table.toml"
    path.write_text(TABLE)
    (tmp_path / "rows.csv").write_text("a,b,c\n" + "".join(f"{row},{row % 7},{'xy'[row % 2]}\n" for row in range(60)))
    return path


def test_a_run_file_says_how_the_rows_of_a_table_are_cut(run, table_file, tmp_path):
    out = tmp_path / "shards"
    words = ("--run-file", table_file, "--data", tmp_path / "rows.csv", "--scheme", "by-class", "--devices", 2)
    done = run("data", "shard", "table", *words, "--out", out, "--format", "json")
    rows = {row["shard"]: row["counts"] for row in json.loads(done.out)["shards"]}
    assert [[*rows[name]] for name in ("device-01", "device-02")] == [["0"], ["1"]]
    card = json.loads((out / "device-01.json").read_text())
    assert (card["options"]["columns"], card["options"]["target"], card["labels"]) == ("a,b", "c", ["x", "y"])
    assert run("simulate", table_file, "--shards", out, "--dir", tmp_path / "d").code == 0


def test_models_are_evaluated_on_the_test_data_that_is_given(run, refused, table_file, tmp_path):
    rows, one, same = (tmp_path / name for name in ("rows.csv", "one.csv", "same.csv"))
    one.write_text("a,b,c\n4,4,x\n")
    same.write_text("a,b,c\n4,4,y\n")
    table_file.write_text(TABLE + "[simulation]\nworkers = 0\n")
    words = ("--devices", 2, "--dir", tmp_path / "d", "--format", "json")
    of_data = [run("simulate", table_file, "--data", rows, "--test", path, *words).rows for path in (one, same)]
    assert {(a["accuracy"], b["accuracy"]) for a, b in zip(*of_data, strict=True)} <= {(0.0, 1.0), (1.0, 0.0)}
    out = tmp_path / "shards"
    cut = ("--run-file", table_file, "--data", rows, "--devices", 2, "--test", one, "--out", out, "--format", "json")
    counts = {
        row["shard"]: sum(row["counts"].values())
        for row in json.loads(run("data", "shard", "table", *cut).out)["shards"]
    }
    assert (counts.pop("test"), sum(counts.values())) == (1, 60), "nothing of the data is kept back"
    of_shards = [
        run("simulate", table_file, "--shards", out, "--test", path, *words[2:]).rows for path in (one, same)
    ]
    assert all({a["accuracy"], b["accuracy"]} == {0.0, 1.0} for a, b in zip(*of_shards, strict=True))
    table_file.write_text(TABLE + f'[simulation]\nworkers = 0\ntest = "{one}"\n')
    again = run("simulate", table_file, "--data", rows, *words).rows
    assert [row["accuracy"] for row in again] == [row["accuracy"] for row in of_data[0]]


def test_a_model_is_evaluated_by_its_task_s_own_metrics_and_the_shard_may_name_the_task(run, table_file, tmp_path):
    table_file.write_text(TABLE.replace("[task]\n", '[task]\nmetrics = ["f1-macro"]\n'))
    rows = tmp_path / "rows.csv"
    place = ("--dir", tmp_path / "d")
    assert run("simulate", table_file, "--data", rows, "--devices", 2, *place).code == 0
    words = ("--part", "all", "--metric", "log-loss", *place, "--format", "json")
    ran = [run("model", "evaluate", "latest", "--shard", path, *words) for path in (rows, f"table={rows}")]
    assert ran[0].rows == ran[1].rows, ran[1].err
    (row,) = ran[0].rows
    assert 0 < row["f1-macro"] <= 1
    assert [*row][-2:] == ["f1-macro", "log-loss"]


def test_test_data_that_cannot_be_used_is_one_line(refused, file, table_file, tmp_path):
    data = ["--data", tmp_path / "rows.csv", "--dir", tmp_path / "d"]
    (tmp_path / "other.csv").write_text("a,c\n1,x\n")
    refused(["simulate", table_file, "--test", tmp_path / "no.csv", *data], 4, "must be a CSV, Parquet or Arrow file")
    refused(["simulate", table_file, "--test", tmp_path / "other.csv", *data], 4, "has no column 'b'")
    refused(["simulate", table_file, "--test", "a.csv", "--bookkeeping-only"], 2, "--bookkeeping-only has none")
    for words in (["simulate", file], ["demo"], ["data", "shard", "digits", "--out", tmp_path / "s"]):
        refused([*words, "--test", "a.csv"], 3, "task 'digits' has test data of its own, got a.csv; leave it out")


def test_a_kept_autoencoder_is_measured_against_its_own_input(run, table_file, tmp_path):
    lines = TABLE.replace('target = "c"\nlabels = ["x", "y"]', 'loss = "reconstruction:mae"\nscales = 30')
    table_file.write_text(lines + "[simulation]\nworkers = 0\n")
    rows, root = tmp_path / "rows.csv", tmp_path / "d"
    assert run("simulate", table_file, "--data", rows, "--devices", 2, "--dir", root).code == 0
    words = ("latest", "--dir", root, "--shard", rows, "--part", "all", "--metric", "mae", "--format", "json")
    (row,) = run("model", "evaluate", *words).rows
    assert row["mae"] == pytest.approx(row["loss"], abs=1e-6)


def test_a_kept_model_is_not_scored_on_weak_labels(run, refused, tmp_path):
    file, rows, root, folder = (tmp_path / name for name in ("table.toml", "rows.csv", "d", "collected"))
    file.write_text(
        '[run]\ntask = "table"\n[task]\ncolumns = ["a"]\ntarget = "label"\nlabels = ["x", "y"]\n'
        "[simulation]\nworkers = 0\n"
    )
    rows.write_text("a,label\n" + "".join(f"{row},{'xy'[row % 2]}\n" for row in range(60)))
    assert run("simulate", file, "--data", rows, "--devices", 2, "--dir", root).code == 0
    with open_row_store(folder, ("a",), StoreLimits(max_bytes=10**6)) as store:
        store.commit([Row(1000.0 + row, (float(row),), 1) for row in range(20)], {}, {}, 0.0)
    append_row_labels(folder, [LabelLine(since_s=1000.0, until_s=1019.0, label="x", kind=LabelKind.WEAK)])
    words = ("model", "evaluate", "latest", "--dir", root, "--shard", folder, "--part", "all", "--format", "json")
    refused(words, 4, "holds no examples but those of weak labels")
    append_row_labels(folder, [LabelLine(since_s=1000.0, until_s=1004.0, label="x", kind=LabelKind.PERSON)])
    (row,) = run(*words).rows
    assert row["num_examples"] == 5


def test_a_table_without_its_run_file_or_with_another_s_is_one_line(refused, table_file, tmp_path):
    rows = ["--data", tmp_path / "rows.csv", "--out", tmp_path / "shards"]
    refused(["data", "shard", "table", *rows], 3, "task.columns is missing: table cannot do without")
    refused(["data", "shard", "digits", "--run-file", table_file, *rows], 2, "is about the task table")
    refused(["demo", "--task", "digits", "--run-file", table_file, *rows], 2, "the command about digits")
    refused(["demo", "--task", "table", *rows], 3, "task.columns is missing")


def test_a_demo_is_that_of_its_run_file_and_options_go_before_it(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        TABLE + '[strategy]\nname = "fedavg"\nepochs = 3.0\n[devices]\nmin = 9\nnames = ["pi-1"]\n'
        '[compression]\nup = "fp16"\n'
    )
    options = {"task": None, "strategy": None, "rounds": None, "seed": None, "devices": 3}
    config = make_demo_run(path, **options)
    assert (config.run.task, config.task["columns"], config.strategy.options) == ("table", "a,b", {"epochs": 3.0})
    assert (config.devices.min, config.devices.names, config.compression.up) == (3, (), "fp16")
    config = make_demo_run(path, **options | {"strategy": "asgd", "rounds": 5, "seed": 8})
    assert (config.strategy.name, config.strategy.options, config.run.rounds, config.run.seed) == ("asgd", {}, 5, 8)
    plain = make_demo_run(None, **options)
    assert (plain.run.task, plain.run.rounds, plain.run.seed, plain.strategy.name) == ("digits", 20, 7, "fedavg")


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["digits", "--scheme", "magic"], 3, "scheme must be one of natural, iid"),
        (["mnist", "--data", "nowhere"], 4, "nowhere of task mnist does not exist"),
        (["cifar"], 5, "'cifar' has no data set to cut"),
    ],
)
def test_bad_input_is_one_line_and_its_exit_code(refused, tmp_path, words, code, told):
    refused(["data", "shard", *words, "--out", tmp_path], code, told)
    assert not list(tmp_path.iterdir())


def test_a_reference_is_one_device_with_all_of_the_data_and_stands_beside_the_run(run, file, refused, tmp_path):
    done = run("simulate", file, "--devices", 3, "--dir", tmp_path / "d", "--reference")
    assert "reference, one device with all of the data: accuracy 0." in done.out
    assert "\nthe fleet: accuracy 0." in done.out
    rows = run("history", "runs", "--dir", tmp_path / "d", "--format", "json").rows
    assert {row["strategy"] for row in rows} == {"fedavg", "local"}
    file.write_text(RUN.replace("rounds = 2", "") + '[strategy]\nname = "statistics"\ncolumns = "20"\n')
    done = run("simulate", file, "--devices", 3, "--dir", tmp_path / "d", "--reference")
    results = [json.loads(Path(path).read_text()) for path in re.findall(r"result:? (/\S+)", done.out)]
    assert [len(result["boards"]) for result in results] == [3, 1]
    assert results[0]["columns"][0]["mean"] == results[1]["columns"][0]["mean"]
    refused(["simulate", file, "--reference", "--bookkeeping-only"], 2, "goes without --shards, --bookkeeping-only")
