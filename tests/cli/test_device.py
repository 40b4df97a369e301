"""`edgefl device` as a user types it."""

import http.client
import json
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from onnx_graphs import constant_model

from edgefl.device.collect.alignment import Row
from edgefl.device.collect.row_store import StoreLimits, open_row_store
from edgefl.device.drift_watch import list_reference_paths
from edgefl.device.inference.deployments import DeployedModel, DeploymentState, ModelStore
from edgefl.device.state_dir import DeviceStateDir


def limit(state):
    return DeviceStateDir.load(state).settings.max_temperature_c


def test_a_join_takes_the_task_from_the_shard_s_card_and_tells_the_coordinator(joined, front_door, shard):
    device, told = DeviceStateDir.load(joined).settings, front_door.store.get_all_capabilities()["pi-1"]
    assert (device.shards, device.accelerator, device.threads) == ({"digits": str(shard)}, "cuda:1", 1)
    assert (told.shards, told.facts["cores"] >= 1) == ({"digits": 12}, True)


def test_status_says_whether_the_coordinator_is_reached(run, joined, front_door, refused, tmp_path):
    for command in ("status", "start"):
        refused(["device", command, "--state", tmp_path / "none"], 36, "edgefl device join")
    value = json.loads(run("device", "status", "--state", joined, "--format", "json").out)
    assert (value["v"], value["device_id"], value["coordinator"]) == (1, "pi-1", front_door.address)
    assert abs(value["clock_skew_s"]) < 1
    front_door.stop()
    assert "cannot be reached" in run("device", "status", "--state", joined).out


def test_the_threads_of_a_start_are_kept_and_without_the_option_they_stay(run, joined, monkeypatch):
    started = []
    monkeypatch.setattr("edgefl.device.agent.run_agent", lambda state, _: started.append(state.settings.threads))
    for words in (("--threads", 3), ()):
        assert run("device", "start", "--state", joined, *words).code == 0
    assert started == [3, 3]


def test_probe_says_with_what_this_machine_trains(run):
    assert "cores" in run("device", "probe").out
    facts = json.loads(run("device", "probe", "--json").out)
    assert (facts["v"], facts["paths"]["digits"], facts["trains"]) == (1, "numpy", True)


def test_a_temperature_limit_is_given_at_the_join_changed_and_taken_away(run, joined, monkeypatch):
    assert limit(joined) == 75.0
    assert run("device", "set", "--max-temperature", "68.5", "--state", joined).code == 0
    assert limit(joined) == 68.5
    assert json.loads(run("device", "status", "--state", joined, "--format", "json").out)["max_temperature_c"] == 68.5
    monkeypatch.setenv("EDGEFL_MAX_TEMPERATURE", "61")
    assert (run("device", "set", "--state", joined).code, limit(joined)) == (0, 61.0)
    assert run("device", "set", "--max-temperature", "none", "--state", joined).code == 0
    assert limit(joined) is None


def test_the_least_group_of_an_analysis_is_the_owner_s_and_five_at_first(run, joined, refused):
    def find():
        return json.loads(run("device", "status", "--state", joined, "--format", "json").out)["min_group"]

    assert find() == 5
    assert "fewer than 20" in run("device", "set", "--min-group", 20, "--state", joined).out
    assert (find(), limit(joined)) == (20, 75.0)
    assert run("device", "set", "--min-group", 0, "--state", joined).code == 2
    refused(["device", "set", "--state", joined], 2, "--min-group N")


def test_the_most_that_examples_may_lose_of_their_privacy_is_the_owner_s_and_without_limit_at_first(
    run, joined, refused
):
    def find():
        return json.loads(run("device", "status", "--state", joined, "--format", "json").out)["max_epsilon"]

    assert find() is None
    assert "spend epsilon 3" in run("device", "set", "--max-epsilon", 3, "--state", joined).out
    assert (find(), limit(joined)) == (3.0, 75.0)
    refused(["device", "set", "--max-epsilon", "nan", "--state", joined], 2, "--max-epsilon")
    assert "any epsilon" in run("device", "set", "--max-epsilon", 0, "--state", joined).out
    assert find() is None
    path = joined / "device.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_epsilon": -1}))
    refused(["device", "status", "--state", joined], 3, "max_epsilon must be a number above 0 or null, got -1")


def test_that_updates_leave_with_masks_alone_is_the_owner_s_and_not_so_at_first(run, joined, refused):
    def find():
        return json.loads(run("device", "status", "--state", joined, "--format", "json").out)["only_masked"]

    assert find() is False
    assert "with secure aggregation alone" in run("device", "set", "--only-masked", "--state", joined).out
    assert (find(), limit(joined)) == (True, 75.0)
    assert "in all runs" in run("device", "set", "--also-unmasked", "--state", joined).out
    assert find() is False
    path = joined / "device.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "only_masked": 1}))
    refused(["device", "status", "--state", joined], 3, "only_masked must be true or false, got 1")


def test_where_bases_are_looked_for_first_is_the_owner_s_and_nowhere_at_first(run, joined, refused, tmp_path):
    def find():
        return json.loads(run("device", "status", "--state", joined, "--format", "json").out)["base_source"]

    assert find() is None
    assert "looks for bases in /media/none/here first, which is not there now" in (
        run("device", "set", "--base-source", "/media/none/here", "--state", joined).out
    )
    assert (find(), limit(joined)) == ("/media/none/here", 75.0)
    assert f"in {tmp_path} first\n" in run("device", "set", "--base-source", tmp_path, "--state", joined).out
    assert "alone" in run("device", "set", "--base-source", "none", "--state", joined).out
    assert find() is None
    path = joined / "device.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_source": 7}))
    refused(["device", "status", "--state", joined], 3, "base_source must be a text or null, got 7")


def test_what_new_data_is_compared_with_is_the_owner_s_and_nothing_at_first(run, joined, refused, tmp_path):
    def find():
        return json.loads(run("device", "status", "--state", joined, "--format", "json").out)["drift_references"]

    assert find() == {}
    june = tmp_path / "june.csv"
    june.write_text("a\n1\n")
    setting = ["device", "set", "--state", joined, "--drift"]
    assert "that of its next work" in run(*setting, "digits=first", "--drift", f"own:Task={june}").out
    assert find() == {"digits": "first", "own:Task": str(june)}
    (joined / "drift").mkdir()
    kept = list_reference_paths(joined, "digits")[0]
    kept.write_bytes(b"of an earlier setting")
    assert "compares new data of digits with nothing" in run(*setting, "digits=none").out
    assert (find(), kept.exists()) == ({"own:Task": str(june)}, False)
    for text, message in (("digits", "must be TASK=first"), ("digits=", "must be"), ("digits=gone.npz", "not exist")):
        refused([*setting, text], 2, message)


def test_when_a_board_may_train_is_the_owner_s_and_a_pause_is_for_who_is_there(run, joined, refused, tmp_path):
    def find():
        value = json.loads(run("device", "status", "--state", joined, "--format", "json").out)
        return value.get("conditions"), value.get("blocked"), value.get("budgets")

    file, state = tmp_path / "wish.toml", ("--state", joined)
    assert find() == (None, None, None)
    file.write_text('[conditions]\nhours = ["00:00-24:00"]\n[conditions.day]\ntraffic_mb = 20\n')
    assert "now it may train" in run("device", "set", "--conditions", file, *state).out
    kept = {"hours": ["00:00-24:00"], "day": {"traffic_mb": 20.0}}
    assert find() == (kept, None, {"traffic a day": "0 of 20 MB"})
    for text, message in (("[conditions]\nour = 1", "unknown setting"), ("x" * 70_000, "longer than"), ("[", "read")):
        (tmp_path / "bad.toml").write_text(text)
        refused(["device", "set", "--conditions", tmp_path / "bad.toml", *state], 3, message)
    refused(["device", "set", "--conditions", tmp_path / "gone.toml", *state], 3, "No such file")
    assert run("device", "pause", *state).out == "pi-1 trains nothing until it is resumed\n"
    assert find()[:2] == (kept, "paused on the board")
    assert run("device", "pause", "90m", *state).out == "pi-1 trains nothing for 90m\n"
    assert find()[1].startswith("paused on the board, free at ")
    for text in ("2", "0h", "2 h", "400d", "-1h"):
        refused(["device", "pause", "--", text], 2, "a duration is such as 30m")
    assert run("device", "resume", *state).out == "pi-1 trains again\n"
    assert run("device", "resume", *state).out == "pi-1 was not paused\n"
    assert run("device", "set", "--conditions", "none", *state).out == "pi-1 trains at any time\n"
    assert find() == (None, None, None)


def test_a_limit_that_makes_no_sense_is_refused_and_the_old_one_stays(run, joined, refused):
    for value in ("hot", "nan", "29", "200", "-5", ""):
        assert run("device", "set", f"--max-temperature={value}", "--state", joined).code == 2, value
    refused(["device", "set", "--state", joined], 2, "nothing to set")
    assert limit(joined) == 75.0
    path = joined / "device.json"
    path.write_text(path.read_text().replace('"max_temperature_c": 75.0', '"max_temperature_c": "hot"'))
    ran = run("device", "status", "--state", joined)
    assert (ran.is_one_line, "max_temperature_c must be a number or null, got 'hot'" in ran.err) == (True, True)


def test_what_a_collector_keeps_of_a_shard_is_shown(run, tmp_path):
    folder = tmp_path / "room"
    with open_row_store(folder, ("t",), StoreLimits(max_bytes=10**6)) as store:
        store.commit([Row(0.0, (1.0,), 1), Row(86_400.0, (2.0,), 1)], {}, {"house.refused": 3}, 0.0)
    shown = run("device", "shard", "stats", folder).out
    assert "2 rows of t, 1970-01-01 00:00 to 1970-01-02 00:00 UTC" in shown
    assert "written on 1970-01-01: 0.00 MB" in shown
    assert "left out, house.refused: 3" in shown
    told = json.loads(run("device", "shard", "stats", folder, "--format", "json").out)
    assert (told["rows"], told["left_out"]) == (2, {"house.refused": 3})
    assert told["written_bytes"]["1970-01-01"] > told["bytes"]
    assert run("device", "shard", "stats", tmp_path).code == 40


def test_shards_may_come_later_and_are_checked(run, front_door, shard, tmp_path):
    (tmp_path / "token").write_text(front_door.token().text() + "\n")
    state = ("--state", tmp_path / "d")
    assert run("device", "join", "--token-file", tmp_path / "token", "--name", "pi-1", *state).code == 0
    assert run("device", "shard", "check", *state).code == 40
    assert "digits: 12 examples" in run("device", "shard", "add", "digits", shard, *state).out
    checked = run("device", "shard", "check", "digits", *state)
    assert (checked.code, "missing: 3, 4, 5, 6, 7, 8, 9" in checked.out) == (0, True)
    assert run("device", "shard", "check", "mnist", *state).code == 40
    assert run("device", "shard", "remove", "mnist", *state).code == 40
    (tmp_path / "rows.csv").write_text("a,b\n1,x\n3,y\n")
    added = run("device", "shard", "add", "table", tmp_path / "rows.csv", *state).out
    assert added.splitlines()[1:] == ["  a: mean 2, deviation 1", "  b: texts"], added
    assert run("device", "shard", "remove", "digits", *state).out == f"pi-1 trains digits no longer; {shard} stays\n"
    assert shard.exists()
    assert [*DeviceStateDir.load(tmp_path / "d").settings.shards] == ["table"]
    run("device", "shard", "add", "digits", shard, "--only", *state)
    assert [*DeviceStateDir.load(tmp_path / "d").settings.shards] == ["digits"]


JOINS = {
    "a damaged token": (31, "copy it whole", lambda token, **_: {"token": token.text()[:-20]}),
    "an unknown token": (31, "no such token", lambda token, **_: {"token": replace(token, secret="x").text()}),
    "an expired token": (32, "expired", lambda door, **_: {"token": door.token(ttl_s=-5.0).text()}),
    "a used token": (33, "no uses left", lambda token, first, **_: first(token.text()) or {"name": "pi-2"}),
    "another fleet's CA": (34, "nothing was sent", lambda stranger, **_: {"address": stranger().address}),
    "a taken name": (35, "another device is called", lambda door, first, **_: first(door.token().text()) or {}),
    "nobody there": (20, "cannot be reached", lambda token, **_: {
        "address": "127.0.0.1:1", "token": replace(token, addresses=()).text()}),
    "no token": (2, "a join needs", lambda **_: {"token": None}),
    "a bad name": (2, "device name must be", lambda **_: {"name": "Not A Slug"}),
    "a bad address": (2, "HOST:PORT", lambda **_: {"address": "a b"}),
}  # fmt: skip


@pytest.mark.parametrize("case", JOINS)
def test_each_failed_join_is_one_line_its_own_exit_code_and_nothing_written(run, make_front_door, tmp_path, case):
    def join(token, *, name="pi-1", address=None, state="d"):
        words = [] if token is None else ["--token", token]
        return run("device", "join", address or door.address, *words, "--name", name, "--state", tmp_path / state)

    code, words, given = JOINS[case]
    door = make_front_door()
    token = door.token()
    changes = given(
        token=token, door=door, stranger=make_front_door, first=lambda text: join(text, state="first").code
    )
    ran = join(**{"token": token.text(), **changes})
    assert (ran.code, ran.is_one_line) == (code, True), ran.err
    assert words in ran.err
    assert not (tmp_path / "d").exists()


def test_a_shard_or_an_accelerator_that_cannot_be_used_is_found_before_the_token_is(
    run, front_door, refused, shard, tmp_path
):
    join = ["device", "join", "--token", front_door.token().text(), "--state", tmp_path / "d"]
    refused([*join, "--shard", tmp_path / "none.npz"], 4, "none.npz")
    refused([*join, "--shard", f"mnist={shard}"], 4, "is of task digits")
    shard.write_bytes(shard.read_bytes()[:-30])
    refused([*join, "--shard", shard], 4, "is damaged")
    refused([*join, "--shard", tmp_path], 2, "TASK=")
    for name in ("cuda:", "cuda:x", "gpu", "cuda:1\n", ""):
        ran = run(*join, "--accelerator", name)
        assert (ran.code, "must be auto, cpu, cuda or cuda:N" in ran.err) == (2, True), name
    assert front_door.requests == []


@pytest.fixture
def state(tmp_path):
    """A board on which a model is deployed that answers 4 to everything."""
    store = ModelStore(tmp_path / "pi")
    store.folder.parent.mkdir()
    store.save(DeploymentState())
    sha256 = constant_model(tmp_path / "made.onnx", 4)
    current = DeployedModel(deployment="d1", sha256=sha256, model="ab" * 32, task="digits")
    (tmp_path / "made.onnx").rename(store.path(current))
    store.save(DeploymentState(current=current))
    return tmp_path / "pi"


def test_infer_prints_class_and_probability_of_every_row_and_the_accuracy_where_there_are_labels(
    run, state, shard, tmp_path
):
    np.save(tmp_path / "rows.npy", np.zeros((3, 8, 8)))
    words = ("device", "infer", "--state", state, "--input")
    rows = run(*words, tmp_path / "rows.npy", "--format", "json").rows
    assert [(row["row"], row["class"], row["index"]) for row in rows] == [(0, "4", 4), (1, "4", 4), (2, "4", 4)]
    assert rows[0]["probability"] == pytest.approx(np.exp(5) / (np.exp(5) + 9), abs=1e-5)
    table = run(*words, tmp_path / "rows.npy").out.splitlines()
    assert (table[0].split(), len(table)) == (["row", "class", "index", "probability"], 4)
    labelled = run(*words, shard, "--format", "csv")
    assert labelled.out.splitlines()[0] == "row,class,index,probability,label"
    assert labelled.err.startswith("accuracy 0.")
    constant_model(tmp_path / "other.onnx", 7)
    other = run("device", "infer", "--model", tmp_path / "other.onnx", "--input", shard, "--format", "csv")
    assert other.out.splitlines()[1].startswith("0,7,7,")


@pytest.mark.extended
def test_infer_runs_the_code_of_a_task_that_is_not_built_in_without_the_device_s_key(run, tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEFL_ALLOW_MODULES", "hostile_task")
    (tmp_path / "pi").mkdir()
    (tmp_path / "pi" / "key.pem").write_text("secret")
    np.savez(tmp_path / "shard.npz", inputs=np.zeros((3, 64), np.float32), labels=np.full(3, 4))
    (tmp_path / "shard.json").write_text("{}")

    def infer(attack, *words):
        options = json.dumps({"attack": attack, "place": str(tmp_path / "pi")})
        facts = {"task": "hostile_task:Hostile", "task_options": options, "preprocess": '{"by": "task"}'}
        constant_model(tmp_path / "m.onnx", 4, **facts)
        where = ("--model", tmp_path / "m.onnx", "--state", tmp_path / "pi", "--input", tmp_path / "shard.npz")
        return run("device", "infer", *where, "--format", "json", *words)

    for words in ((), ("--confine", "always")):
        assert [row["label"] for row in infer("", *words).rows] == [4, 4, 4]
    for attack in ("key-by-path", "socket", "write-outside"):
        assert "RuntimeError: refused: " in infer(attack).err, attack
    with pytest.raises(RuntimeError, match="succeeded: "):
        infer("key-by-path", "--confine", "never")


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ("infer --state nowhere --input x.npy", 40, "no model is deployed in nowhere"),
        ("infer --model no.onnx --input x.npy", 4, "there is no model file no.onnx"),
        ("infer --input x.npy --threads 0", 2, "threads"),
        ("serve --model no.onnx --port 0", 4, "there is no model file no.onnx"),
    ],
)
def test_bad_input_is_told_with_an_exit_code(run, arguments, code, expected):
    ran = run("device", *arguments.split())
    assert (ran.code, ran.out, expected in ran.err) == (code, "", True)


def test_serve_answers_until_sigterm_and_ends_with_zero(state):
    command = [sys.executable, "-m", "edgefl.cli.main", "device", "serve", "--state", str(state), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline().rsplit(":", 1)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("POST", "/predict", body=json.dumps({"rows": [[0] * 64]}))
        told = json.loads(connection.getresponse().read())
        assert (told["deployment"], told["rows"][0]["class"]) == ("d1", "4")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        connection.close()
