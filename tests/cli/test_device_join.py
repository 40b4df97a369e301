"""A join from a file: the command of a board's first boot, against a real coordinator too."""

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from edgefl.coordinator.directory import init_directory
from edgefl.coordinator.enrolment.tokens import make_token
from edgefl.core.protocol import JoinToken
from edgefl.device.enrolment.join_file import JoinFile
from edgefl.device.state_dir import DeviceStateDir
from edgefl.simulation.local_fleet import find_free_port
from edgefl.storage.queries.history import read_history
from edgefl.storage.store import Store

ROOT = Path(__file__).parents[2]
TOKEN = JoinToken(ca_fingerprint="a" * 64, token_id="t", secret="s", fleet="lab", addresses=("127.0.0.1:1",))


@pytest.fixture
def written(tmp_path):
    def write(token, **changes):
        path = tmp_path / "join.json"
        path.write_text(JoinFile(**{"token": token.text(), "name": "pi-1", **changes}).to_text())
        return path

    return write


def test_a_file_says_it_all_and_is_gone_after_the_join(run, front_door, written, shard, tmp_path):
    token = replace(front_door.token(role="evaluator"), addresses=("127.0.0.1:1",))  # the file's come first
    file = written(token, role="evaluator", shards={"digits": str(shard)}, addresses=(front_door.address,))
    ran = run("device", "join", "--file", file, "--until-joined", "--delete-file", "--state", tmp_path / "d")
    assert ran.code == 0, ran.err
    assert "joined fleet lab as pi-1 (evaluator)" in ran.out
    assert DeviceStateDir.load(tmp_path / "d").settings.shards == {"digits": str(shard)}
    assert front_door.store.get_all_capabilities()["pi-1"].shards == {"digits": 12}
    assert not file.exists()


def test_data_that_is_missing_holds_up_no_join_is_told_and_is_used_when_it_comes(
    run, front_door, written, tmp_path, caplog, monkeypatch
):
    shards = {"digits": "/nowhere/d.npz", "no-such-task": "/nowhere/x"}
    with written(front_door.token(), shards=shards).open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        ran = run("device", "join", "--file", "-", "--until-joined", "--state", tmp_path / "d")
    assert ran.code == 0, ran.err
    assert DeviceStateDir.load(tmp_path / "d").settings.shards == shards
    assert all(f"joining without data for {task}" in caplog.text for task in shards)
    told = front_door.store.get_all_capabilities()["pi-1"]
    assert (told.shards, set(told.facts["shard_errors"])) == ({}, set(shards))
    found = [row for row in read_history(front_door.store, "events") if row["kind"] == "shard-unreadable"]
    assert {(row["device_id"], row["message"].split(":")[0]) for row in found} == {("pi-1", task) for task in shards}


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        ("--file {missing}", 3, "cannot be read"),
        ("--file {broken}", 3, "not JSON"),
        ("--file {long}", 3, "longer than"),
        ("--file {good} --name pi-2", 2, "--file goes without"),
        ("--file - --delete-file", 2, "standard input cannot be removed"),
        ("--delete-file --token efl1.x", 2, "goes with --file"),
    ],
)
def test_a_wrong_use_is_one_line_and_an_exit_code(refused, written, tmp_path, given, code, words):
    (tmp_path / "broken").write_text("{")
    (tmp_path / "long").write_text("x" * 100_000)
    places = {"good": written(TOKEN), **{name: tmp_path / name for name in ("missing", "broken", "long")}}
    refused(["device", "join", *given.format(**places).split(), "--state", tmp_path / "d"], code, words)


@pytest.mark.parametrize(("case", "code"), [("expired", 32), ("used", 33)])
def test_a_token_that_lets_nobody_in_ends_with_its_own_code_and_keeps_the_file(
    run, front_door, written, tmp_path, case, code
):
    token = front_door.token(ttl_s=-5.0 if case == "expired" else 60.0)
    if case == "used":
        run("device", "join", "--file", written(token, name="pi-2"), "--state", tmp_path / "other")
    file = written(token)
    ran = run("device", "join", "--file", file, "--until-joined", "--delete-file", "--state", tmp_path / "d")
    assert (ran.code, file.exists(), token.text() in ran.err) == (code, True, False), ran.err


@pytest.mark.slow
def test_a_board_that_was_switched_on_first_joins_when_its_coordinator_comes(written, tmp_path):
    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-m", "edgefl", *map(str, arguments)], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(tmp_path / "config")},
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        started.callback(process.communicate, timeout=60)
        started.callback(process.terminate)
        return process

    directory = init_directory(tmp_path / "coordinator", hosts=["127.0.0.1"], fleet="lab", port=find_free_port())
    with Store.open(directory.database) as store:
        file = written(make_token(store, directory, now=time.time()))
    with ExitStack() as started:
        board = start("device", "join", "--file", file, "--until-joined", "--delete-file", "--state", tmp_path / "d")
        seen = ""
        for line in board.stdout:
            if "not joined yet" in line and "not joined yet" not in seen:
                start("-q", "coordinator", "start", "--dir", directory.root, "--host", "127.0.0.1",
                      "--broker-port", find_free_port())  # fmt: skip
            seen += line
        assert board.wait(60) == 0, seen
    assert "not joined yet" in seen
    assert "joined fleet lab as pi-1" in seen
    assert not file.exists()
    assert DeviceStateDir.load(tmp_path / "d").device_id == "pi-1"


def test_a_url_from_the_browser_is_an_address_and_a_second_join_uses_nothing_up(run, front_door, shard, tmp_path):
    token = front_door.token()
    join = ["device", "join", f"https://{front_door.address}/#/fleet", "--token-file", tmp_path / "token"]
    join += ["--shard", shard, "--state", tmp_path / "d", "--name", "pi-1"]
    (tmp_path / "token").write_text(token.text())
    first = run(*join)
    assert (first.code, "used up" in first.out, "could not be used" in first.out) == (0, False, False), first.err
    assert "it was a member already: nothing of the token was used up" in run(*join).out


def test_a_mistyped_address_is_said_with_the_one_that_was_used(run, front_door, shard, tmp_path):
    (tmp_path / "token").write_text(front_door.token().text())
    wrong = f"127.0.0.1:{find_free_port()}"
    ran = run(
        "device", "join", wrong, "--token-file", tmp_path / "token", "--shard", shard, "--state", tmp_path / "d"
    )
    assert ran.code == 0, ran.err
    assert f"{wrong} could not be used; it joined at {front_door.address}, as the token says" in ran.out
