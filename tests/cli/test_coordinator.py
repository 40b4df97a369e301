from __future__ import annotations

import json
import socket

import pytest
from webhook_receiver import Receiver

from edgefl.cli.main import main
from edgefl.client import load_operator_file, operator_path
from edgefl.coordinator.directory import load_directory
from edgefl.local_fleet import free_port
from edgefl.protocol import JoinToken
from edgefl.storage.store import Store


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))

    def call(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["-q", "coordinator", *map(str, arguments)])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def test_init_makes_the_directory_and_the_operator_file(run, tmp_path):
    code, out, err = run("init", "--host", "pi.local", "--fleet", "lab", "--port", "9000")
    assert (code, err) == (0, "")
    assert "pi.local:9000" in out
    assert "next: edgefl coordinator start\n" in out
    assert load_directory(tmp_path / "data" / "edgefl" / "coordinator").fleet == "lab"
    assert load_operator_file(operator_path()).url == "https://127.0.0.1:9000"


def test_init_again_keeps_ca_and_tokens(run, tmp_path):
    run("init", "--dir", tmp_path / "c", "--fleet", "lab")
    ca, settings = (tmp_path / "c" / "ca.pem").read_bytes(), (tmp_path / "c" / "settings.toml").read_bytes()
    assert run("init", "--dir", tmp_path / "c")[0] == 0
    assert (tmp_path / "c" / "ca.pem").read_bytes() == ca
    assert (tmp_path / "c" / "settings.toml").read_bytes() == settings


def test_init_as_another_fleet_is_one_line(run, tmp_path):
    run("init", "--dir", tmp_path / "c", "--fleet", "lab")
    code, out, err = run("init", "--dir", tmp_path / "c", "--fleet", "other")
    assert (code, out, err.count("\n")) == (3, "", 1)


def test_a_second_fleet_keeps_the_first_one_s_operator_file(run, tmp_path):
    run("init", "--dir", tmp_path / "a", "--fleet", "alpha")
    out = run("init", "--dir", tmp_path / "b", "--fleet", "beta")[1]
    (kept,) = operator_path().parent.glob("operator.alpha-*.toml")
    assert str(kept) in out


def test_token_prints_the_token_and_the_line_to_type(run, tmp_path):
    run("init", "--dir", tmp_path / "c", "--host", "pi.local", "--fleet", "lab")
    code, out, _ = run("token", "--dir", tmp_path / "c", "--ttl", "30m", "--uses", "4", "--group", "roof")
    token, line = out.splitlines()
    assert code == 0
    assert JoinToken.parse(token).addresses == ("pi.local:8000",)
    assert line == f"edgefl device join pi.local:8000 --token {token} --shard PATH"
    with Store.open(tmp_path / "c" / "edgefl.db") as store:
        (record,) = store.tokens()
    assert (record.uses_left, record.groups, record.expires_at - record.created_at) == (4, ("roof",), 1800)


def test_token_as_json(run, tmp_path):
    run("init", "--dir", tmp_path / "c", "--host", "pi.local")
    value = json.loads(run("token", "--dir", tmp_path / "c", "--format", "json", "--role", "evaluator")[1])
    assert (value["v"], value["role"], value["uses"]) == (1, "evaluator", 1)
    assert JoinToken.parse(value["token"]).token_id == value["token_id"]


def test_a_token_can_be_made_while_the_coordinator_has_the_store_open(run, front_door):
    code, out, _ = run("token", "--dir", front_door.directory.root)
    assert code == 0
    assert JoinToken.parse(out.splitlines()[0]).token_id in {record.token_id for record in front_door.store.tokens()}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--ttl", "soon"], 2), (["--uses", "0"], 2), (["--group", "A B"], 2), (["--role", "boss"], 2)],
)
def test_token_options_that_make_no_sense_exit_with_2(run, tmp_path, arguments, expected):
    run("init", "--dir", tmp_path / "c")
    code, out, err = run("token", "--dir", tmp_path / "c", *arguments)
    assert (code, out) == (expected, "")
    assert err


@pytest.mark.parametrize("command", ["token", "start", "readdress", "broker"])
def test_a_directory_that_was_not_set_up_says_so(run, tmp_path, command):
    code, out, err = run(command, "--dir", tmp_path / "none")
    assert (code, out, err.count("\n")) == (36, "", 1)
    assert "edgefl coordinator init" in err


def test_readdress_changes_what_tokens_and_the_operator_file_say(run, tmp_path):
    run("init", "--dir", tmp_path / "c", "--host", "old.lan")
    code, out, _ = run("readdress", "--dir", tmp_path / "c", "--port", "9001", "new.lan", "10.0.0.9")
    assert code == 0
    assert "new.lan:9001, 10.0.0.9:9001" in out
    token = JoinToken.parse(run("token", "--dir", tmp_path / "c")[1].splitlines()[0])
    assert token.addresses == ("new.lan:9001", "10.0.0.9:9001")
    assert load_operator_file(operator_path()).url == "https://127.0.0.1:9001"


def _kept(root):
    return {file.name: file.read_bytes() for file in root.iterdir() if file.is_file() and file.name != "lock"}


def test_starting_on_a_taken_port_changes_no_settings(run, tmp_path):
    run("init", "--dir", tmp_path / "c", "--port", "9000")
    kept, operator = _kept(tmp_path / "c"), operator_path().read_bytes()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = run("start", "--dir", tmp_path / "c", "--host", "127.0.0.1", "--port", port)
    assert (code, out, err.count("\n")) == (21, "", 1)
    assert (_kept(tmp_path / "c"), operator_path().read_bytes()) == (kept, operator)


def test_starting_a_second_time_is_one_line_and_changes_no_settings(run, tmp_path):
    run("init", "--dir", tmp_path / "c", "--port", "9000")
    kept = _kept(tmp_path / "c")
    with load_directory(tmp_path / "c").locked():
        code, out, err = run("start", "--dir", tmp_path / "c", "--host", "127.0.0.1", "--port", free_port())
    assert (code, out, err.count("\n")) == (10, "", 1)
    assert "another coordinator runs on" in err
    assert _kept(tmp_path / "c") == kept


def test_a_new_port_is_remembered_once_it_is_listened_on(run, tmp_path):
    run("init", "--dir", tmp_path / "c", "--port", "9000")
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken:  # the broker's: so the start ends by itself
        broker = ("--broker", "embedded", "--broker-port", taken.getsockname()[1])
        assert run("start", "--dir", tmp_path / "c", "--host", "127.0.0.1", "--port", port, *broker)[0] == 21
    assert load_directory(tmp_path / "c").port == port
    assert load_operator_file(operator_path()).url == f"https://127.0.0.1:{port}"


def test_a_test_shard_that_is_not_there_ends_the_start_before_anything_is_opened(run, tmp_path):
    run("init", "--dir", tmp_path / "c")
    kept = _kept(tmp_path / "c")
    code, out, err = run("start", "--dir", tmp_path / "c", "--test-shard", f"digits={tmp_path / 'nope.npz'}")
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert "nope.npz" in err
    assert _kept(tmp_path / "c") == kept
    assert not (tmp_path / "c" / "lock").exists()


def test_backup_and_restore_say_what_they_did_and_what_is_next(run, tmp_path):
    run("init", "--dir", tmp_path / "c", "--host", "pi.lan", "--fleet", "lab")
    Store.open(tmp_path / "c" / "edgefl.db").close()
    code, out, err = run("backup", "--dir", tmp_path / "c", tmp_path / "b.tar.gz")
    assert (code, err) == (0, "")
    assert "holds the fleet's keys" in out
    code, out, _ = run("backup", "--dir", tmp_path / "c", tmp_path / "b.tar.gz")
    assert (code, out) == (2, "")
    code, out, _ = run("restore", tmp_path / "b.tar.gz", "--dir", tmp_path / "new")
    assert code == 0
    assert f"edgefl coordinator init --dir {tmp_path / 'new'}" in out
    assert load_directory(tmp_path / "new").fleet == "lab"
    code, out, err = run("restore", tmp_path / "b.tar.gz", "--dir", tmp_path / "new")
    assert (code, out, err.count("\n")) == (2, "", 1)
    (tmp_path / "torn.tar.gz").write_bytes((tmp_path / "b.tar.gz").read_bytes()[:5000])
    code, out, err = run("restore", tmp_path / "torn.tar.gz", "--dir", tmp_path / "other")
    assert (code, out, err.count("\n")) == (10, "", 1)


def test_a_store_on_a_database_server_has_to_be_dumped_by_its_own_tools(run, tmp_path):
    run("init", "--dir", tmp_path / "c")
    code, out, _ = run("backup", "--dir", tmp_path / "c", tmp_path / "b.tar.gz", "--store", "postgresql://db/edgefl")
    assert code == 0
    assert "(pg_dump) now" in out
    code, out, _ = run("restore", tmp_path / "b.tar.gz", "--dir", tmp_path / "new")
    assert code == 0
    assert "its own tools" in out


def test_a_test_alert_arrives_where_the_settings_say(run, tmp_path):
    run("init", "--dir", tmp_path / "c", "--fleet", "lab")
    code, out, err = run("alert-test", "--dir", tmp_path / "c")
    assert (code, out, err.count("\n")) == (2, "", 1)
    with Receiver() as receiver:
        with (tmp_path / "c" / "settings.toml").open("a") as settings:
            settings.write(f'[alerts]\nwebhook = "{receiver.url}"\n')
        code, out, _ = run("alert-test", "--dir", tmp_path / "c")
        assert (code, out) == (0, "127.0.0.1 took the test alert\n")
        receiver.answers = [404]
        code, out, err = run("alert-test", "--dir", tmp_path / "c", "--alert-secret", "s")
        assert (code, out) == (20, "")
        assert "very-secret" not in err
    assert receiver.told() == [("test", "coordinator", "started")] * 2
    assert "X-Edgefl-Signature" in receiver.requests[1][0]
    code, _, err = run("alert-test", "--dir", tmp_path / "c", "--alert-webhook", "no-url")
    assert (code, err.count("\n")) == (3, 1)


def test_grafana_prints_a_dashboard(run):
    dashboard = json.loads(run("grafana")[1])
    assert (dashboard["title"], len(dashboard["panels"]) > 15) == ("edgefl", True)
