"""`edgefl sweep` as a user types it: combinations and seeds, what goes on after a stop, and what failed."""

import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import edgefl
from edgefl.core.errors import ConfigError, StoreBusyError, StoreError
from edgefl.simulation.sweep import (
    LOCK_NAME,
    SweepMetric,
    SweepOutcome,
    parse_values,
    plan_sweep,
    run_sweep,
    summarise,
)
from edgefl.storage.repositories.records import RunStatus
from edgefl.storage.store import Store
from edgefl.system.atomic_files import lock_file

RUN = (
    '[run]\ntask = "digits"\nrounds = 2\n[task]\nmodel = "logistic"\n'
    '[simulation]\ndevices = 3\nprofiles = ["pi-5"]\nworkers = 0\n'
)
RATES = "strategy.learning_rate=0.001,0.5"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


@pytest.fixture
def sweep(run, file, tmp_path):
    """The rows of a sweep over the run file."""

    def call(*words):
        ran = run("sweep", file, "--dir", tmp_path / "d", *words, "--format", "json")
        assert ran.code == 0, ran.err
        return ran.rows

    return call


@pytest.fixture
def list_runs(run, tmp_path):
    return lambda: run("history", "runs", "--dir", tmp_path / "d", "--format", "json").rows


def test_every_combination_is_run_with_every_seed_and_the_best_stands_first(sweep, list_runs, run, file, tmp_path):
    rows = sweep("--set", RATES, "--seeds", 2)
    assert [row["learning_rate"] for row in rows] == [0.5, 0.001]
    assert [(row["runs"], row["failed"], row["rounds"]) for row in rows] == [(2, 0, 2)] * 2
    by_name = {row["name"]: row["accuracy"] for row in list_runs()}
    values = [by_name[f"digits-fedavg learning_rate=0.5 seed={seed}"] for seed in (7, 8)]
    assert rows[0]["accuracy"] == pytest.approx(statistics.mean(values))
    assert rows[0]["accuracy_spread"] == pytest.approx(statistics.stdev(values)) != 0
    alone = run("simulate", file, "--seed", 8, "--dir", tmp_path / "one", "--format", "json").rows
    file.write_text(f"{RUN}[strategy]\nlearning_rate = 0.001\n")
    changed = run("simulate", file, "--seed", 8, "--dir", tmp_path / "one", "--format", "json").rows
    by_file = by_name["digits-fedavg learning_rate=0.001 seed=8"]
    assert changed[-1]["accuracy"] == by_file != alone[-1]["accuracy"]


def test_the_table_says_how_to_draw_the_sweep(run, file, tmp_path):
    table = run("sweep", file, "--dir", tmp_path / "d", "--set", RATES, "--seeds", 2).out
    assert re.search(r"^4 runs, by accuracy, highest first\nlearning rate +accuracy", table)
    assert re.search(r"^0\.5 +0\.\d+ ± 0\.\d+ +2 +0 ", table, re.MULTILINE)
    words = re.search(r"draw it: edgefl (.*) --run '(.*)' --spread --out (.*)", table)
    sheet = tmp_path / words[3]
    drawn = run(*words[1].split(), "--run", words[2], "--spread", "--out", sheet.with_suffix(".svg"))
    assert drawn.code == 0, drawn.err
    text = sheet.with_suffix(".svg").read_text()
    assert [text.count(f"learning_rate={rate} (mean of 2)") > 0 for rate in (0.001, 0.5)] == [True, True]


def test_what_the_history_has_to_its_end_is_not_run_again(sweep, list_runs, file, tmp_path):
    first = sweep("--set", RATES, "--seeds", 2)
    assert sweep("--set", RATES, "--seeds", 2) == first
    assert sweep("--set", RATES, "--seeds", 1, "--jobs", 1)[0]["runs"] == 1
    assert len(list_runs()) == 4
    sweep("--set", RATES, "--seeds", 3)
    assert Counter(row["status"] for row in list_runs()) == {"finished": 6}
    with closing(Store.open(tmp_path / "d" / "edgefl.db")) as store:  # as a killed process leaves it
        killed = store.list_runs()[-1].run_id
        store.set_run_status(killed, RunStatus.RUNNING, at=1.0)
    assert sweep("--set", RATES, "--seeds", 2) == first
    statuses = {row["run_id"]: row["status"] for row in list_runs()}
    assert (statuses[killed], statuses[f"{killed}-2"], len(statuses)) == ("interrupted", "finished", 7)
    file.write_text(RUN.replace("rounds = 2", "rounds = 1"))
    sweep("--set", RATES)
    assert len(list_runs()) == 9  # other settings, other runs


def test_other_profiles_or_faults_in_a_file_of_the_same_name_are_other_runs(sweep, list_runs, tmp_path):
    faults = tmp_path / "faults.toml"
    for device in ("device-01", "device-01", "device-02"):
        faults.write_text(f'[[fault]]\ndevice = "{device}"\nat_s = 0\nkind = "kill"\n')
        sweep("--faults", faults)
    assert len(list_runs()) == 2


def test_a_file_that_is_changed_during_a_sweep_fails_the_runs_that_come_after(file, tmp_path):
    faults, folder = tmp_path / "faults.toml", tmp_path / "d"
    faults.write_text("")
    file.write_text(f'{RUN}faults = "{faults}"\n')
    outcomes = run_sweep(plan_sweep(file, {}, 2), folder, on_end=lambda _: faults.write_text("# changed\n"))
    assert [outcome.is_finished for outcome in outcomes] == [True, False]
    assert outcomes[1].reason == f"{faults} was changed after the sweep began; start the sweep again"
    again = run_sweep(plan_sweep(file, {}, 2), folder)
    assert [outcome.is_finished for outcome in again] == [True, True]


def test_other_code_of_a_task_of_ones_own_is_another_run(run, list_runs, file, shard, tmp_path, monkeypatch):
    module = tmp_path / "own_noop.py"
    module.write_text("from edgefl.tasks.noop import NoopTask\n\n\nclass Own(NoopTask):\n    name = 'own_noop:Own'\n")
    monkeypatch.syspath_prepend(tmp_path)
    file.write_text(RUN.replace('"digits"', '"own_noop:Own"').replace('[task]\nmodel = "logistic"\n', ""))
    words = ("sweep", file, "--allow-module", "own_noop", "--shards", shard.parent, "--dir", tmp_path / "d")
    for _ in range(2):
        assert run(*words).code == 0
    module.write_text(f"{module.read_text()}    other = 1\n")
    done = run(*words)
    assert (done.code, len(list_runs())) == (0, 2), done.err


def test_the_scales_of_a_run_that_was_killed_are_interrupted_with_it(file, tmp_path):
    (one,) = plan_sweep(file, {}, 1)
    (tmp_path / "d").mkdir()
    with closing(Store.open(tmp_path / "d" / "edgefl.db")) as store:
        for run_id in (one.run_id, f"{one.run_id}-scales", f"{one.run_id}-scales-2", "sim-0"):
            store.add_run(
                run_id=run_id, name="", task="digits", strategy="fedavg", config={}, seed=7, submitted_at=1.0
            )
            store.set_run_status(run_id, RunStatus.RUNNING, at=1.0)
        (outcome,) = run_sweep([one], tmp_path / "d")
        statuses = {record.run_id: str(record.status) for record in store.list_runs()}
    assert outcome.is_finished
    assert statuses.pop("sim-0") == "running"
    assert statuses.pop(f"{one.run_id}-2") == "finished"
    assert [*statuses.values()] == ["interrupted"] * 3


def make_outcome(run, value, accuracy, *, is_finished=True):
    metrics = {"accuracy": accuracy, "rounds": 2, "bytes_up": 1, "bytes_down": 1, "seconds": value}
    return SweepOutcome(run=replace(run, values={"a.b": value}), is_finished=is_finished, reason="", metrics=metrics)


def test_a_combination_stands_behind_where_a_seed_has_no_value_and_its_means_are_of_the_same_runs(file):
    (one,) = plan_sweep(file, {}, 1)
    rows = summarise(
        [make_outcome(one, 1, 0.9), make_outcome(one, 1, None, is_finished=False), make_outcome(one, 2, 0.5),
         replace(make_outcome(one, 3, 0.8), metrics={**make_outcome(one, 3, 0.8).metrics, "seconds": 5.0}),
         make_outcome(one, 3, None), make_outcome(one, 4, None)],
        SweepMetric(name="accuracy", is_max=True),
    )  # fmt: skip
    counts = ("num_runs", "num_failed", "num_unknown", "seconds")
    assert [(row["values"]["a.b"], *(row[name] for name in counts)) for row in rows] == [
        (2, 1, 0, 0, 2), (1, 1, 1, 0, 1), (3, 1, 0, 1, 5), (4, 1, 0, 1, 4)
    ]  # fmt: skip


def test_a_run_that_diverges_is_a_row_and_the_others_go_on(sweep, list_runs, run, file, tmp_path):
    words = ("--set", "strategy.learning_rate=1e300,0.5")
    rows = sweep(*words)
    assert [(row["learning_rate"], row["runs"], row["failed"]) for row in rows] == [(0.5, 1, 0), (1e300, 0, 1)]
    assert (rows[1]["accuracy"], rows[1]["rounds"]) == (None, None)
    sweep(*words)
    assert len(list_runs()) == 2
    sweep(*words, "--retry-failed")
    assert Counter(row["status"] for row in list_runs()) == {"finished": 1, "failed": 2}
    done = run("sweep", file, "--dir", tmp_path / "d", "--set", "strategy.learning_rate=1e300")
    assert (done.code, "all 1 runs failed; the last: no device can do this work" in done.err) == (41, True)


def test_all_that_is_wrong_with_the_settings_is_named_at_once_and_nothing_is_run(refused, file, tmp_path):
    words = [
        "sweep", file, "--dir", tmp_path / "d", "--set", "strategy.learnign_rate=0.1,0.2", "--set", "run.rounds=0,2",
        "--set", "rounds=3", "--set", "stratgy.epochs=1", "--set", "compression.up=topk:2,dense",
    ]  # fmt: skip
    for message in (
        "strategy.learnign_rate: fedavg has no such setting (did you mean learning_rate?)",
        "run.rounds must be a whole number at least 1, got 0",
        "rounds must be SECTION.NAME: did you mean run.rounds?",
        "unknown setting stratgy: did you mean strategy?",
        "compression.up: codec stage 'topk' needs a fraction over 0 and at most 1, got topk:2",
    ):
        refused(words, 3, message)
    refused(["sweep", file, "--set", "run.seed=1", "--set", "x"], 3, "--seeds varies it; --set must be SETTING=VALUE")
    refused(["sweep", file, "--set", "run.rounds=1", "--set", "run.rounds=2"], 3, "run.rounds is set twice")
    refused(["sweep", file, "--set", 'simulation.profiles=["pi-9"]'], 3, "pi-9")
    refused(["sweep", file, "--set", "simulation.scheme=magic"], 3, "scheme must be one of")
    refused(["sweep", file, "--seeds", 1000, "--set", f"run.rounds={','.join(map(str, range(1, 12)))}"], 2, "10000")
    file.write_text(RUN.replace("rounds", "rouns"))
    refused(["sweep", file, "--set", "run.rounds=0"], 3, "run.rouns")
    assert not (tmp_path / "d").exists()


def test_a_setting_that_another_one_brings_may_be_set_with_it(sweep):
    words = ("--set", "strategy.name=fedprox,fedavg", "--set", "strategy.epochs=1", "--bookkeeping-only")
    assert [row["name"] for row in sweep(*words)] == ["fedprox", "fedavg"]


def test_values_are_toml_or_texts():
    found = parse_values(["a.b=1,2.5,true,x|y:3", 'c.d="p,q",r', 'e.f=["pi-4"],["pi-5"]', "g.h=2026-01-05,1,1.0,1"])
    assert found == {
        "a.b": (1, 2.5, True, "x|y:3"),
        "c.d": ('"p', 'q"', "r"),
        "e.f": (["pi-4"], ["pi-5"]),
        "g.h": ("2026-01-05", 1),
    }
    assert parse_values(['c.d="p,q","r"']) == {"c.d": ("p,q", "r")}
    assert parse_values(['a.b={"*.bias"="dense"},true,1']) == {"a.b": ({"*.bias": "dense"}, True, 1)}
    with pytest.raises(ConfigError, match=r"--set e\.f: a list .* with texts in quotation marks, got .*pi-5\]"):
        parse_values(['e.f=["pi-4"],[pi-5]'])


def test_codecs_of_layers_may_vary(sweep, list_runs):
    rows = sweep("--set", 'compression.layers={"*.bias"="dense"},{"*.bias"="int8"}', "--bookkeeping-only")
    assert sorted(row["layers"]["*.bias"] for row in rows) == ["dense", "int8"]
    names = {row["name"] for row in list_runs()}
    assert names == {f"digits-fedavg layers=~.bias:{one} seed=7" for one in ("int8", "dense")}


def test_two_sweeps_do_not_work_in_one_folder(refused, file, tmp_path):
    with lock_file(tmp_path / LOCK_NAME, "taken"):
        refused(["sweep", file, "--dir", tmp_path], StoreBusyError.exit_code, "another sweep works in")


def test_names_of_runs_tell_settings_apart_and_fit_a_name(sweep, list_runs):
    sweep("--set", "compression.up=topk:0.5|int8", "--set", "task.model=logistic", "--bookkeeping-only")
    sweep("--set", "simulation.starts_at=2026-01-05T18:00:00.000000+01:00", "--set", "simulation.detect_s=1.00000001",
          "--set", "devices.require=any", "--set", "compression.residuals=periodic", "--set", "run.deadline_s=3600.5",
          "--set", "strategy.batch_size=10,20", "--bookkeeping-only")  # fmt: skip
    names = [row["name"] for row in list_runs()]
    assert names[0] == "digits-fedavg up=topk:0.5+int8 model=logistic seed=7"
    assert len(set(names)) == 3
    assert all(len(name) <= 120 and name.endswith("seed=7") for name in names)


def start(file, folder, *words):
    path = os.pathsep.join([str(Path(edgefl.__file__).parents[1]), *filter(None, sys.path)])
    command = [sys.executable, "-m", "edgefl", "sweep", str(file), "--dir", str(folder), *words]
    environment = {**os.environ, "PYTHONPATH": path}
    # Ctrl-C counts for it also where these tests run in the background of a shell, which ignores it there.
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 no lock is taken there
    )  # fmt: skip


def wait_for_runs(folder, num_finished, *, within_s=200.0):
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        with (
            contextlib.suppress(StoreError),  # not there yet, or not whole
            closing(Store.open(folder / "edgefl.db", read_only=True)) as store,
        ):
            if store.count_runs(RunStatus.FINISHED) >= num_finished:
                return
        time.sleep(0.05)
    pytest.fail(f"{num_finished} runs did not finish in time")


@pytest.mark.extended
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("ending", "jobs"), [(signal.SIGKILL, "2"), (signal.SIGINT, "2"), (signal.SIGINT, "1")])
def test_a_sweep_that_is_ended_goes_on_and_repeats_no_finished_run(sweep, list_runs, file, tmp_path, ending, jobs):
    file.write_text(RUN.replace("rounds = 2", "rounds = 20"))
    with start(file, tmp_path / "d", "--set", RATES, "--seeds", "3", "--jobs", jobs) as process:
        try:
            wait_for_runs(tmp_path / "d", 2)
        finally:
            process.send_signal(ending)
        _, errors = process.communicate(timeout=100)
    if ending == signal.SIGINT:
        assert re.search(r"stopped after \d of 6 runs; the same command goes on there", errors), errors
        assert not [row for row in list_runs() if row["status"] == "running"]
    finished = {row["run_id"] for row in list_runs() if row["status"] == "finished"}
    assert 2 <= len(finished) < 6
    rows = sweep("--set", RATES, "--seeds", 3)
    assert [row["runs"] for row in rows] == [3, 3]
    after = list_runs()
    assert Counter(row["status"] for row in after).keys() <= {"finished", "interrupted"}
    assert sorted(Counter(row["name"] for row in after if row["status"] == "finished").values()) == [1] * 6
    assert finished <= {row["run_id"] for row in after}


@pytest.mark.extended
def test_runs_side_by_side_give_the_same_rows_as_one_after_another(sweep, run, file, tmp_path):
    one = sweep("--set", RATES, "--seeds", 2)
    both = run("sweep", file, "--dir", tmp_path / "e", "--set", RATES, "--seeds", 2, "--jobs", 2, "--format", "json")
    assert both.rows == one


@pytest.fixture
def dying(tmp_path, monkeypatch, death):
    """A task whose process dies in training."""
    (tmp_path / "dying.py").write_text(
        "import os\n\nfrom edgefl.tasks.noop import NoopTask\n\n\nclass Dying(NoopTask):\n"
        "    name = 'dying:Dying'\n\n    def __init__(self, *, dies: bool = False) -> None:\n"
        "        super().__init__(size_bytes=400)\n        self.dies = dies\n\n"
        "    def learner(self, **options):\n        learner = super().learner(**options)\n"
        f"        if self.dies:\n            learner.gradient = lambda _: {death}\n        return learner\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("death", ["os._exit(3)", "os.kill(os.getpid(), 9)"])
@pytest.mark.usefixtures("dying")
def test_a_process_that_dies_ends_its_run_alone_and_one_ended_by_a_signal_not_for_good(
    run, list_runs, file, shard, caplog, death
):
    is_killed = "kill" in death
    file.write_text(RUN.replace('"digits"', '"dying:Dying"').replace('[task]\nmodel = "logistic"\n', ""))
    done = run("sweep", file, "--allow-module", "dying", "--shards", shard.parent, "--dir", file.parent / "d",
               "--set", "task.dies=true,false", "--seeds", 2, "--jobs", 2, "--format", "json")  # fmt: skip
    assert [(row["dies"], row["runs"], row["failed"]) for row in done.rows] == [(False, 2, 0), (True, 0, 2)], done.err
    words = "its process was ended by signal 9" if is_killed else "its process ended with code 3"
    assert caplog.text.count(f"failed: {words}") == 2
    statuses = {row["status"] for row in list_runs() if "dies=true" in row["name"]}
    assert statuses == {"interrupted" if is_killed else "failed"}
