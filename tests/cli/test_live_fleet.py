"""`edgefl run`, `devices` and `model` against a real fleet of two devices, and the commands that make it up."""

import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import apart_strategy
import numpy as np
import pytest
from safetensors.numpy import load_file

from edgefl import simulate
from edgefl.cli.fleet.models import COLUMNS as MODEL_COLUMNS
from edgefl.cli.run import COLUMNS
from edgefl.coordinator import pki
from edgefl.core.errors import NetworkError, NotFoundError, StoreError, WrongCaError
from edgefl.core.types import Dataset
from edgefl.simulation.local_fleet import LocalFleet, partition_devices
from edgefl.system.atomic_files import compute_sha256
from edgefl.tasks.registry import make_task

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    devices, test_shards = partition_devices("digits", "iid", 2, root / "shards", None, 7)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(apart_strategy.TESTS), prepend=":")
        environment.setenv("EDGEFL_ALLOW_MODULES", "apart_strategy")
        with LocalFleet(root=root, devices=devices, test_shards=test_shards) as running:
            yield running


@pytest.fixture
def edgefl(command, fleet, monkeypatch, tmp_path):
    """The command line of the fleet's operator, in a folder of his own, without a coordinator's directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(fleet.root / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return command


@pytest.fixture
def offline(command, fleet):
    """The same commands on the coordinator's directory alone."""
    return lambda *words: command(*words, "--dir", fleet.directory)


@pytest.fixture
def run_file(tmp_path):
    def write(name="run", more="", **run):
        settings = {"task": "digits", "evaluate_on": "coordinator", "name": name, **run}
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        path = tmp_path / f"{name}.toml"
        path.write_text("\n".join(["[run]", *lines, more or "[devices]\nmin = 2"]) + "\n")
        return path

    return write


def get_run(fleet, run_id):
    return fleet.make_client().get(f"/edgefl/v1/runs/{run_id}")


def test_devices_are_listed_for_people_and_programs_and_shown_with_what_they_can(edgefl):
    rows = {row["device_id"]: row for row in edgefl("devices", "list", "--format", "json").rows}
    roles = {name: (row["presence"], row["role"]) for name, row in rows.items()}
    trainer = ("online", "trainer")
    assert roles == {"device-01": trainer, "device-02": trainer, "coordinator-evaluator": ("online", "evaluator")}
    assert rows["device-01"]["examples"]["digits"] > 500
    assert rows["device-01"]["version"]
    assert len(edgefl("devices", "list", "--format", "csv").out.splitlines()) == 1 + 3
    assert any("device-01" in line and "online" in line for line in edgefl("devices", "list").out.splitlines())
    (row,) = edgefl("devices", "show", "device-01", "--format", "json").rows
    assert row["capabilities"]["cores"] >= 1
    assert "cores" in edgefl("devices", "show", "device-01").out


def test_an_admin_names_users_from_afar_and_nobody_else_does(edgefl, offline, monkeypatch, tmp_path):
    token = edgefl("user", "add", "Ada@example.org", "--role", "operator", "--expires", "7d").out.strip()
    assert edgefl("user", "add", "bob", "--role", "admin", "--file", "bob.toml").code == 0
    rows = edgefl("user", "list", "--format", "json").rows
    assert [(row["name"], row["role"], row["state"]) for row in rows] == [
        ("ada@example.org", "operator", "active"), ("bob", "admin", "active"),
    ]  # fmt: skip
    assert rows[0]["expires_at"] - rows[0]["created_at"] == 7 * 86400
    assert not any("sha256" in name for row in rows for name in row)
    (tmp_path / "of-bob" / "edgefl").mkdir(parents=True)
    (tmp_path / "bob.toml").rename(tmp_path / "of-bob" / "edgefl" / "operator.toml")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "of-bob"))
    for words, code, said in (
        (("add", "bob"), 35, "'bob' already"),
        (("add", "eve", "--expires", "never"), 2, "lifetime"),
        (("add", "e ve"), 2, "user name"),
        (("revoke", "eve"), 40, "no active user 'eve'"),
        (("add", "eve", "--file", tmp_path / "no" / "file"), 10, "cannot be written"),
    ):
        ran = edgefl("user", *words)
        assert (ran.code, ran.is_one_line, said in ran.err) == (code, True, True), ran.err
    monkeypatch.setenv("EDGEFL_TOKEN", token)
    for words in (("list",), ("add", "eve", "--role", "admin"), ("revoke", "bob")):
        ran = edgefl("user", *words)
        said = "edgefl: this needs the role admin; ada@example.org has the role operator\n"
        assert (ran.code, ran.err) == (42, said)
    monkeypatch.delenv("EDGEFL_TOKEN")
    assert "may do nothing" in edgefl("user", "revoke", "ada@example.org").out
    monkeypatch.setenv("EDGEFL_TOKEN", token)
    ran = edgefl("user", "list")
    assert (ran.code, ran.err) == (37, "edgefl: the access token of ada@example.org is revoked\n")
    told = [
        (row["actor"].split()[0], row["action"], row["outcome"])
        for row in offline("history", "audit", "--format", "json").rows
    ]
    assert [row for row in told if "users" in row[1]] == [
        ("init", "POST users/Ada@example.org as operator", "done"),
        ("init", "POST users/bob as admin", "done"),
        ("bob", "POST users/bob", "refused (409)"),
        ("bob", "POST users/eve", "refused (400)"),
        ("bob", "POST users/e ve", "refused (400)"),
        ("bob", "POST users/eve/revoke", "refused (404)"),
        ("bob", "POST users/eve as viewer", "done"),
        ("bob", "POST users/eve/revoke", "done"),
        ("ada@example.org", "POST users/eve", "refused (403)"),
        ("ada@example.org", "POST users/bob/revoke", "refused (403)"),
        ("bob", "POST users/ada@example.org/revoke", "done"),
    ]


def test_a_device_is_drained_and_resumed(edgefl, fleet):
    for word, presence in (("drain", "draining"), ("resume", "online")):
        assert "device-01" in edgefl("devices", word, "device-01").out
        fleet._wait_until(lambda presence=presence: fleet.get_presence()["device-01"] == presence, presence)
        (row,) = edgefl("devices", "show", "device-01", "--format", "json").rows
        assert row["drained"] is (word == "drain")


def test_statistics_of_a_fleet_are_those_of_all_its_examples_and_no_model(edgefl, fleet):
    asked = edgefl("stats", "digits", "--columns", "10-12", "--boards", 2, "--format", "json")
    assert asked.code == 0, asked.err
    result = json.loads(asked.out)
    task = make_task("digits")
    parts = {spec.name: task.read(spec.shards["digits"]) for spec in fleet.devices}
    pooled = Dataset.concatenate([*parts.values()])
    values = pooled.inputs.reshape(len(pooled), -1)[:, 10:13].astype(float)
    for number, column in enumerate(result["columns"]):
        assert column["mean"] == pytest.approx(values[:, number].mean(), rel=1e-12)
        assert column["std"] == pytest.approx(values[:, number].std(), rel=1e-12)
        assert values[:, number].min() <= column["min"] < column["max"] <= values[:, number].max()
    assert {board["device_id"]: board["rows"] for board in result["boards"]} == {
        name: len(part) for name, part in parts.items()
    }
    run_id = asked.err.split()[1]
    assert edgefl("model", "list", "--run", run_id, "--format", "json").rows == []
    assert json.loads(edgefl("run", "result", run_id).out)["rows"] == len(pooled)


def test_a_model_from_sums_is_evaluated_exported_and_the_same_as_simulated(edgefl, fleet, run_file, tmp_path):
    file = run_file("bayes", '[task]\nmodel = "logistic"\n[strategy]\nname = "naive-bayes"\n[devices]\nmin = 2')
    assert edgefl("run", "submit", file, "--wait").code == 0
    run = edgefl("run", "show", "--format", "json").rows[0]
    assert (run["strategy"], run["rounds"], run["accuracy"] > 0.85) == ("naive-bayes", 1, True)
    assert edgefl("model", "export", "latest", "--out", tmp_path / "bayes.onnx").code == 0
    live = load_file(fleet.get_model_path(get_run(fleet, run["run_id"])["model"]))
    shards = [spec.shards["digits"] for spec in fleet.devices]
    simulated = load_file(simulate(file, devices=shards, root=tmp_path / "simulated").model)
    assert {name: tensor.tobytes() for name, tensor in live.items()} == {
        name: tensor.tobytes() for name, tensor in simulated.items()
    }


@pytest.mark.parametrize(
    "words",
    ["devices show a/b", "devices show ü", "devices drain nobody", "run stop ü", "run show a/b", "run watch a?b"],
)
def test_a_name_of_no_device_or_run_is_one_line(edgefl, words):
    ran = edgefl(*words.split())
    assert (ran.code, ran.is_one_line) == (40, True), ran.err


@pytest.fixture(scope="module")
def six(fleet, tmp_path_factory):
    """The id of a run of six rounds that were all evaluated."""
    from edgefl.core.config import parse_run  # noqa: PLC0415 only here

    run = {"task": "digits", "name": "six", "rounds": 6, "evaluate_on": "coordinator"}
    run_id = fleet.submit(parse_run({"run": run, "devices": {"min": 2}, "models": {"keep_every": 2}}))
    fleet.wait_for_run(run_id)
    return run_id


@pytest.fixture
def best(fleet, six):
    scored = [row for row in fleet.list_history("rounds", run=six) if row["accuracy"] is not None]
    return max(scored, key=lambda row: (row["accuracy"], row["round"]))


def test_models_are_those_that_the_rule_keeps_with_the_history_s_accuracies(edgefl, offline, fleet, six, best):
    rows = edgefl("model", "list", "--run", "six", "--format", "json").rows
    assert list(rows[0]) == list(MODEL_COLUMNS)
    assert [row["round"] for row in rows] == sorted({2, 4, 5, 6} | {best["round"]})
    known = {row["round"]: row["accuracy"] for row in fleet.list_history("rounds", run=six)}
    assert [row["accuracy"] for row in rows] == [pytest.approx(known[row["round"]]) for row in rows]
    assert [row["round"] for row in rows if row["best"]] == [best["round"]]
    assert [row["round"] for row in rows if row["latest"]] == [6]
    assert rows == offline("model", "list", "--run", "six", "--format", "json").rows
    assert rows[0]["sha256"][:12] in edgefl("model", "list", "--run", "six").out


def test_a_model_is_shown_and_exported_alike_from_a_coordinator_and_from_its_directory(
    edgefl, offline, fleet, six, tmp_path
):
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
    (row,) = edgefl("model", "show", "six:latest", "--format", "json").rows
    assert (row["run_id"], row["task"], row["task_options"], row["latest"]) == (six, "digits", {}, True)
    assert offline("model", "show", "six:latest", "--format", "json").rows == [row]
    assert row["sha256"] in edgefl("model", "show", row["sha256"][:10]).out
    names, first, second = [spec.name for spec in make_task("digits").shapes()], tmp_path / "a.pt", tmp_path / "b.pt"
    for out, where in ((first, edgefl), (second, offline)):
        assert where("model", "export", "six:6", "--out", out).code == 0
        assert list(torch.load(out, weights_only=True)) == names
        assert where("model", "export", "--run", "six", "--out", out.with_suffix(".safetensors")).code == 0
        assert compute_sha256(out.with_suffix(".safetensors")) == row["sha256"]
    assert set(load_file(first.with_suffix(".safetensors"))) == set(names)


def test_an_onnx_file_is_checked_on_the_coordinator_s_own_test_shard_or_on_made_up_inputs(
    edgefl, offline, fleet, best, tmp_path
):
    pytest.importorskip("onnx", reason="needs onnx: pip install '.[export]'")
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install onnxruntime")
    out, shard = tmp_path / "model.onnx", fleet.root / "shards" / "test.npz"
    ran = offline("model", "export", "six:best", "--out", out, "--quantise")
    assert ran.code == 0, ran.err
    assert str(shard) in ran.out
    assert f"accuracy {best['accuracy']:.4f} with float32, 0." in ran.out
    data = make_task("digits").read(str(shard))
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"inputs": data.inputs.astype(np.float32)})
    assert (logits.argmax(axis=1) == data.targets).mean() > 0.8
    (row,) = offline("model", "show", "six:best", "--format", "json").rows
    assert session.get_modelmeta().custom_metadata_map["edgefl.model"] == row["sha256"]
    assert "made-up inputs" in edgefl("model", "export", "six:best", "--out", out).out


def test_models_are_evaluated_on_the_coordinator_s_shard_as_recorded_and_on_a_part_of_a_device_s(
    edgefl, offline, fleet, six
):
    rows = offline("model", "evaluate", "--run", "six", "--on", "coordinator", "--format", "json").rows
    assert len(rows) >= 4
    assert [row["accuracy"] for row in rows] == [pytest.approx(row["recorded_accuracy"]) for row in rows]
    shard = fleet.root / "shards" / "device-01.npz"
    parts = [
        edgefl("model", "evaluate", "six:best", "six:5", "--shard", shard, *part, "--format", "json").rows
        for part in ((), ("--part", "all"))
    ]
    assert [len(rows) for rows in parts] == [2, 2]
    assert 0.05 < parts[0][0]["num_examples"] / parts[1][0]["num_examples"] < 0.2


def test_models_are_evaluated_by_metrics_that_are_named(edgefl, fleet, six):
    shard = fleet.root / "shards" / "device-01.npz"
    options = [word for name in ("f1-micro", "log-loss", "f1:3") for word in ("--metric", name)]
    evaluated = ("model", "evaluate", "six:best", "--shard", shard, "--part", "all", "--format", "json")
    (row,) = edgefl(*evaluated, *options).rows
    assert row["f1-micro"] == pytest.approx(row["accuracy"])
    assert row["log-loss"] == pytest.approx(row["loss"], rel=1e-5)
    assert 0 < row["f1:3"] <= 1
    assert "unknown metric 'f2'" in edgefl(*evaluated, "--metric", "f2").err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("show beef", 40, "no kept model begins with 'beef'"),
        ("show six:77", 40, "run 'six' has no kept model of round 77; kept are those of round 2, "),
        ("export latest --out model.bin", 2, "--out must end in .onnx, .pt, .pth, .safetensors"),
        ("export latest --out m.onnx --format torch", 2, "must end in .pt or .pth, got m.onnx"),
        ("export latest --out none/m.onnx", 2, "none/m.onnx must be a new file"),
        ("export --out m.onnx", 2, "say which model"),
        ("export latest --out m.pt --quantise", 2, "--quantise, --shard and --part are for onnx"),
        ("export latest --out m.onnx --shard none.npz", 4, "shard 'none.npz' of task digits does not"),
        ("evaluate", 2, "say what to evaluate on"),
        ("evaluate --shard x --on coordinator", 2, "say what to evaluate on"),
        ("evaluate --on coordinator", 4, "no test shard of task digits"),
        ("list --run nobody", 40, "no run 'nobody'"),
        ("list --dir x --url https://localhost:1", 2, "give one of them"),
        ("list --url https://localhost:1", 20, "--dir DIR) has the models"),
    ],
)
def test_a_mistake_with_models_is_one_line_and_its_exit_code(edgefl, six, words, code, said, tmp_path):
    ran = edgefl("model", *words.split())
    assert (ran.code, ran.err.count("\n")) == (code, 1), ran.err
    assert said in ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_model_is_noticed_before_anything_is_written(offline, fleet, six, tmp_path):
    (row,) = offline("model", "show", "six:2", "--format", "json").rows
    path = fleet.get_model_path(row["sha256"])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"\xff")
    try:
        for suffix in ("safetensors", "onnx", "pt"):
            ran = offline("model", "export", "six:2", "--out", tmp_path / f"m.{suffix}")
            assert (ran.code, "is damaged" in ran.err) == (13, True)
    finally:
        path.write_bytes(whole)
    assert list(tmp_path.iterdir()) == []


def test_a_download_names_what_is_wrong(fleet, six, tmp_path):
    operator, other_ca = fleet.make_client(), pki.create_authority("another").cert_pem.decode()
    with (tmp_path / "file").open("wb") as into:
        with pytest.raises(NotFoundError, match="no kept model begins with 'beef'"):
            operator.download("/edgefl/v1/models/beef/file", into)
        with pytest.raises(NetworkError, match="answered 404: Not Found"):
            operator.download("/edgefl/v1/nothing", into)
        with pytest.raises(WrongCaError, match="nothing was sent"):
            replace(operator, ca_pem=other_ca).download("/edgefl/v1/models/best/file", into)
    assert (tmp_path / "file").stat().st_size == 0
    with Path("/dev/full").open("wb", buffering=0) as full, pytest.raises(StoreError, match="/dev/full cannot be"):
        operator.download("/edgefl/v1/models/best/file", full)


def test_a_running_coordinator_gives_the_same_sheets_as_its_store(edgefl, offline, fleet, six, tmp_path):
    out, sheets = tmp_path / "a.png", []
    for where in (edgefl, offline, lambda *words: edgefl(*words, "--url", f"https://127.0.0.1:{fleet.port}")):
        assert where("history", "plot", "timeline", "--run", "six", "--out", out).code == 0
        sheets.append(out.read_bytes())
    assert sheets[0] == sheets[1] == sheets[2]


def test_submit_prints_the_id_watch_stays_to_the_end_and_show_names_every_setting(edgefl, run_file, fleet):
    ran = edgefl("run", "submit", run_file("first", rounds=3), "--watch")
    assert ran.code == 0
    assert ran.err.splitlines()[-1].startswith("first finished: round 3 of 3, accuracy 0.")
    run_id = ran.out.strip()
    (row,) = edgefl("run", "show", run_id, "--format", "json").rows
    assert set(row) == {*COLUMNS, "priority", "resumes", "config"}
    assert (row["status"], row["rounds"], row["reason"]) == ("finished", 3, "rounds reached 3")
    assert row["config"]["run"]["rounds"] == 3
    assert fleet.get_model_path(fleet.make_client().get(f"/edgefl/v1/runs/{run_id}")["model"]).stat().st_size > 19_000
    table = edgefl("run", "show", "first").out
    assert "run.evaluate_on" in table
    assert "strategy.name" in table
    assert "of the nodes" not in table


def test_a_shell_completes_runs_and_shows_no_error_without_a_coordinator(edgefl, run_file, monkeypatch, tmp_path):
    run_id = edgefl("run", "submit", run_file("completed", rounds=1), "--wait").out.strip()
    for name, value in (("_EDGEFL_COMPLETE", "bash_complete"), ("COMP_CWORD", "3")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COMP_WORDS", f"edgefl run watch {run_id[:9]}")
    assert f"plain,{run_id}" in edgefl().out.splitlines()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    assert edgefl().out.strip() == ""


def test_runs_wait_for_each_other_and_are_listed_oldest_first(edgefl, run_file, fleet):
    first, second = (
        edgefl("run", "submit", run_file(name, rounds=rounds)).out.strip()
        for name, rounds in (("q-1", 20), ("q-2", 1))
    )
    assert [row["run_id"] for row in edgefl("run", "list", "--format", "json").rows][-2:] == [first, second]
    ended = fleet.wait_for_run(second)
    assert ended["status"] == "finished"
    assert fleet.wait_for_run(first)["finished_at"] <= ended["started_at"]


def test_a_run_that_waits_for_boards_says_whom_it_lacks_and_ends_at_its_limit(edgefl, run_file, fleet):
    section = '[devices]\nmin = 5\nwait_s = 12\nnames = ["device-01", "device-02", "pi-9"]'
    run_id = edgefl("run", "submit", run_file("lonely", more=section)).out.strip()
    behind = edgefl("run", "submit", run_file("behind", rounds=1)).out.strip()
    fleet._wait_until(lambda: get_run(fleet, run_id)["status"] == "waiting", "waiting")
    rows = {row["run_id"]: row for row in edgefl("run", "list", "--format", "json").rows}
    lacking = (
        "waiting for 3 more boards with a shard for digits: 2 ready (device-01, device-02), "
        "pi-9: there is no such device in the fleet"
    )
    assert (rows[run_id]["status"], rows[run_id]["reason"]) == ("waiting", lacking)
    assert rows[behind]["reason"].startswith(f"it comes after run {run_id}, which waits for boards")
    assert rows[behind]["reason"].endswith(f"edgefl run stop {run_id}")
    watched = edgefl("run", "watch", run_id)
    assert f"lonely: {lacking}" in watched.err.splitlines()
    assert (watched.code, get_run(fleet, run_id)["status"]) == (41, "failed")
    assert f"gave up after devices.wait_s = 12 s: {lacking}" in watched.err
    assert fleet.wait_for_run(behind)["status"] == "finished"


def test_wait_says_on_stderr_what_a_run_waits_for(edgefl, run_file):
    section = "[devices]\nmin = 3\nwait_s = 4"
    ran = edgefl("run", "submit", run_file("patient", more=section), "--wait")
    assert ran.code == 41
    assert ran.err.startswith("patient: waiting for 1 more board with a shard for digits: 2 ready")


def test_a_dry_run_of_a_run_that_would_not_start_says_so_last_and_ends_with_41(edgefl, run_file):
    file = run_file("never", more='[devices]\ngroups = ["nobody"]')
    for fmt in ("table", "json"):
        ran = edgefl("run", "submit", file, "--dry-run", "--format", fmt)
        assert (ran.code, ran.err.count("\n")) == (41, 1)
        assert "edgefl: this run would not start now: it needs 1, and no devices can take part" in ran.err
    assert json.loads(ran.out)["num_devices"] == 0
    assert edgefl("run", "submit", run_file("soon"), "--dry-run").code == 0


def test_auto_is_chosen_by_what_the_boards_took_and_stored_in_full(edgefl, run_file, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))  # simulated runs are kept there
    assert edgefl("run", "submit", run_file("measures", rounds=2), "--wait").code == 0
    file = run_file("chosen", more='[strategy]\nname = "auto"\nlearning_rate = 0.2', rounds=2)
    planned = edgefl("run", "submit", file, "--dry-run", "--format", "json")
    assert planned.code == 0, planned.err
    assert "strategy.name = 'auto' is " in planned.err
    ran = edgefl("run", "submit", file, "--wait", "--format", "json")
    assert ran.code == 0, ran.err
    (run,) = ran.rows
    stored = edgefl("run", "show", run["run_id"], "--format", "json").rows[0]["config"]
    assert stored["strategy"]["name"] == run["strategy"] != "auto"
    assert "minimise" not in stored["strategy"]
    assert f"strategy.name = 'auto' is {run['strategy']}, " in ran.err
    assert stored["advice"]["seconds"] > 0


def test_settings_that_only_the_coordinator_knows_are_named_with_file_and_line_too(edgefl, run_file):
    file = run_file("typo", more='[strategy]\nlearnign_rate = 0.1\nepochs = "two"')
    for dry in ((), ("--dry-run",)):
        ran = edgefl("run", "submit", file, *dry)
        assert (ran.code, ran.is_one_line) == (3, True)
        assert f"edgefl: {file}: strategy." in ran.err
        hint = "strategy.learnign_rate (line 6): fedavg has no such setting (did you mean learning_rate?)"
        assert hint in ran.err
        assert "strategy.epochs (line 7) must be" in ran.err


def test_a_device_is_removed_only_after_a_yes_and_if_it_is_there(edgefl):
    assert edgefl("devices", "remove", "nobody", "--yes").code == 40
    ran = edgefl("devices", "remove", "device-01")
    assert (ran.code, ran.is_one_line, "Say --yes" in ran.err) == (2, True, True)
    assert edgefl("devices", "show", "device-01").code == 0


def test_stop_ends_a_run_after_what_is_in_flight_and_keeps_its_model(edgefl, run_file, fleet):
    run_id = edgefl("run", "submit", run_file("endless", rounds=1_000_000)).out.strip()
    while len(fleet.list_history("rounds", run=run_id)) < 3:
        threading.Event().wait(0.05)
    assert edgefl("run", "stop", run_id).out == f"{run_id} stopping\n"
    watched = edgefl("run", "watch", run_id)
    assert watched.code == 0
    assert watched.err.splitlines()[-1].startswith("endless stopped: round ")
    ended = fleet.wait_for_run(run_id)
    assert (ended["status"], ended["reason"]) == ("stopped", "stopped by the operator")
    assert fleet.get_model_path(ended["model"]).exists()
    assert all(row["outcome"] is not None for row in fleet.list_history("updates", run=run_id, limit=10)), (
        "none is open"
    )
    again = edgefl("run", "stop", run_id)
    assert (again.code, "is stopped already" in again.err) == (2, True)


def test_stop_takes_a_waiting_run_out_of_the_queue(edgefl, run_file, fleet):
    first = edgefl("run", "submit", run_file("blocks", "[devices]\nmin = 50", rounds=9)).out.strip()
    second = edgefl("run", "submit", run_file("waits", rounds=1)).out.strip()
    assert edgefl("run", "stop", second).out == f"{second} stopped\n"
    assert edgefl("run", "stop", first).code == 0
    assert fleet.wait_for_run(first)["status"] == "stopped"
    assert fleet.list_history("rounds", run=second) == []
    assert fleet.make_client().get(f"/edgefl/v1/runs/{second}")["started_at"] is None


def test_a_run_that_fails_says_why_and_watch_ends_with_41(edgefl, run_file):
    ran = edgefl("run", "submit", run_file("hopeless", "[strategy]\nlearning_rate = 1e30", rounds=3), "--watch")
    assert ran.code == 41
    assert re.match("edgefl: run .* failed: ", ran.err.splitlines()[-1])


def test_submit_says_what_the_strategy_keeps_for_the_devices_and_refuses_too_much(edgefl, run_file):
    strategy = '[strategy]\nname = "dc-asgd"'
    ran = edgefl("run", "submit", run_file("compensated", strategy, rounds=1), "--watch")
    assert (ran.code, "B for 2 devices" in ran.err) == (0, True)
    refused = edgefl("run", "submit", run_file("too-much", strategy, max_state_bytes=1000))
    assert (refused.code, "raise run.max_state_bytes" in refused.err) == (3, True)


def test_the_end_of_a_run_with_models_of_single_devices_tells_the_average_and_the_nodes(edgefl, run_file, fleet):
    ran = edgefl(
        "run", "submit", run_file("apart", f'[strategy]\nname = "{apart_strategy.NAME}"', rounds=3), "--watch"
    )
    assert ran.code == 0, ran.err
    words = ran.err.splitlines()[-1]
    told = re.fullmatch(r"accuracy of the average model (\S+), of the nodes (\S+) \(worst (\S+)\)", words)
    average, nodes, worst = map(float, told.groups())
    assert average > 0.4
    assert worst < 0.25
    assert nodes == pytest.approx((average + worst) / 2, abs=1e-4), "the first has the average"
    assert edgefl("run", "show", "apart").out.splitlines()[-1] == words
    (row,) = edgefl("run", "show", "apart", "--format", "json").rows
    assert (row["node_accuracy"], row["disagreement"]) == (pytest.approx(nodes, abs=1e-4), 0.75)
    rounds = fleet.list_history("rounds", run=row["run_id"])
    assert [one["facts"]["disagreement"] for one in rounds] == [0.25, 0.5, 0.75]
    assert all(one["node_accuracy"] is not None for one in rounds)


def test_a_device_that_leaves_is_offline_at_once(edgefl, fleet):
    assert fleet.terminate("device-01") == 0
    rows = {row["device_id"]: row for row in edgefl("devices", "list", "--format", "json").rows}
    assert rows["device-01"]["presence"] == "offline"
