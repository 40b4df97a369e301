"""A join from a file: the command of a board's first boot, against a real coordinator too."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgefl.cli.main import main
from edgefl.coordinator.directory import init_directory
from edgefl.coordinator.joining.tokens import TokenTerms, make_token
from edgefl.device.joining.join_file import JoinFile
from edgefl.device.state import DeviceState
from edgefl.local_fleet import free_port
from edgefl.protocol import JoinToken
from edgefl.storage.queries import history
from edgefl.storage.store import Store
from edgefl.tasks.cards import ShardCard
from edgefl.tasks.shards import write_shard
from edgefl.types import Dataset

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(capsys):
    def call(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["device", "join", *map(str, arguments)])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


@pytest.fixture
def written(tmp_path):
    def write(token, **changes):
        path = tmp_path / "join.json"
        path.write_text(JoinFile(**{"token": token.text(), "name": "pi-1", **changes}).text())
        return path

    return write


def test_a_file_says_it_all_and_is_gone_after_the_join(run, front_door, written, tmp_path):
    shard = tmp_path / "a.npz"
    data = Dataset(inputs=np.zeros((12, 8, 8), dtype=np.uint8), labels=np.arange(12) % 3)
    write_shard(shard, data, ShardCard(task="digits"))
    file = written(front_door.token(), role="evaluator", shards={"digits": str(shard)})
    code, out, err = run("--file", file, "--until-joined", "--delete-file", "--state", tmp_path / "d")
    assert code == 0, err
    assert "joined fleet lab as pi-1 (evaluator)" in out
    assert DeviceState.load(tmp_path / "d").device.shards == {"digits": str(shard)}
    assert front_door.store.capabilities()["pi-1"].shards == {"digits": 12}
    assert not file.exists()


def test_data_that_is_missing_holds_up_no_join_is_told_and_is_used_when_it_comes(
    run, front_door, written, tmp_path, caplog
):
    file = written(front_door.token(), shards={"digits": "/nowhere/d.npz", "no-such-task": "/nowhere/x"})
    code, _, err = run("--file", file, "--until-joined", "--state", tmp_path / "d")
    assert code == 0, err
    assert set(DeviceState.load(tmp_path / "d").device.shards) == {"digits", "no-such-task"}
    for task in ("digits", "no-such-task"):
        assert f"joining without data for {task}" in caplog.text
    told = front_door.store.capabilities()["pi-1"]
    assert told.shards == {}
    assert "'/nowhere/d.npz' of task digits does not exist" in told.facts["shard_errors"]["digits"]
    found = [row for row in history(front_door.store, "events") if row["kind"] == "shard-unreadable"]
    assert {row["message"].split(":")[0] for row in found} == {"digits", "no-such-task"}
    assert {row["device_id"] for row in found} == {"pi-1"}
    assert file.exists()


def test_the_addresses_of_the_file_come_before_the_token_s(run, front_door, written, tmp_path):
    token = replace(front_door.token(), addresses=("127.0.0.1:1",))
    code, _, err = run("--file", written(token, addresses=(front_door.address,)), "--state", tmp_path / "d")
    assert code == 0, err


def test_the_standard_input_can_be_the_file(run, front_door, written, tmp_path, monkeypatch):
    with written(front_door.token()).open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        code, _, err = run("--file", "-", "--state", tmp_path / "d")
    assert code == 0, err


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        (["--file", "{missing}"], 3, "cannot be read"),
        (["--file", "{broken}"], 3, "not JSON"),
        (["--file", "{long}"], 3, "longer than"),
        (["--file", "{good}", "--name", "pi-2"], 2, "--file goes without"),
        (["--file", "-", "--delete-file"], 2, "standard input cannot be removed"),
        (["--delete-file", "--token", "efl1.x"], 2, "goes with --file"),
    ],
)
def test_a_wrong_use_is_one_line_and_an_exit_code(run, written, tmp_path, given, code, words):
    (tmp_path / "broken").write_text("{")
    (tmp_path / "long").write_text("x" * 100_000)
    good = JoinToken(ca_fingerprint="a" * 64, token_id="t", secret="s", fleet="lab", addresses=("127.0.0.1:1",))
    places = {"good": written(good), **{name: tmp_path / name for name in ("missing", "broken", "long")}}
    arguments = [word.format(**places) for word in given]
    ended, out, err = run(*arguments, "--state", tmp_path / "d")
    assert (ended, out, err.count("\n")) == (code, "", 1), err
    assert words in err


@pytest.mark.parametrize(("case", "code"), [("expired", 32), ("used", 33)])
def test_a_token_that_lets_nobody_in_ends_with_its_own_code_and_keeps_the_file(
    run, front_door, written, tmp_path, case, code
):
    token = front_door.token(ttl_s=-5.0 if case == "expired" else 60.0)
    if case == "used":
        run("--file", written(token, name="pi-2"), "--state", tmp_path / "other")
    file = written(token)
    ended, _, err = run("--file", file, "--until-joined", "--delete-file", "--state", tmp_path / "d")
    assert ended == code, err
    assert file.exists()
    assert token.text() not in err


class Processes:
    """A board that joins and a coordinator that may start later, as processes of their own."""

    def __init__(self, root):
        self.root = root
        self.directory = init_directory(root / "coordinator", hosts=["127.0.0.1"], fleet="lab", port=free_port())
        self.running = []

    def token(self):
        with Store.open(self.directory.database) as store:
            return make_token(store, self.directory, TokenTerms(), now=time.time())

    def start(self, *arguments):
        process = subprocess.Popen(
            [sys.executable, "-m", "edgefl", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(self.root / "config")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.running.append(process)
        return process

    def start_coordinator(self):
        self.start("-q", "coordinator", "start", "--dir", self.directory.root, "--host", "127.0.0.1",
                   "--broker", "embedded", "--broker-port", str(free_port()))  # fmt: skip

    def stop(self):
        for process in self.running:
            process.terminate()
        for process in self.running:
            process.communicate(timeout=60)


@pytest.fixture
def processes(tmp_path):
    made = Processes(tmp_path)
    yield made
    made.stop()


@pytest.mark.slow
def test_a_board_that_was_switched_on_first_joins_when_its_coordinator_comes(processes, written, tmp_path):
    file = written(processes.token())
    board = processes.start(
        "device", "join", "--file", file, "--until-joined", "--delete-file", "--state", tmp_path / "d"
    )
    assert board.stdout is not None
    seen = []
    for line in board.stdout:
        seen.append(line)
        if "not joined yet" in line and len(processes.running) == 1:
            processes.start_coordinator()
    assert board.wait(60) == 0, "".join(seen)
    assert "joined fleet lab as pi-1" in "".join(seen)
    assert len(processes.running) == 2, "the coordinator was there before it was started"
    assert not file.exists()
    assert DeviceState.load(tmp_path / "d").device_id == "pi-1"
