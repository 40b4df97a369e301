"""Bad input: one clear line on stderr, the documented exit code, no traceback, nothing lost."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgefl.cli.main import main
from edgefl.local_fleet import LocalFleet, free_port

GOOD = '[run]\ntask = "digits"\n'


@dataclass
class Ended:
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """What is told beside the log: exactly one line."""
        lines = [line for line in self.err.splitlines() if line.startswith("edgefl: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[0]


Call = Callable[..., Ended]


@pytest.fixture(scope="module")
def fleet(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    root = tmp_path_factory.mktemp("bad-input")
    with tools.fleet(root, []) as running:
        yield running
    tools.check_logs(root)


def apart(environment: dict[str, str], words: tuple[object, ...]) -> Ended:
    done = subprocess.run(
        [sys.executable, "-m", "edgefl.cli.main", *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Types a command in this process, since there are many."""

    def call(*words: object, **variables: str) -> Ended:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            capsys.readouterr()
            with pytest.raises(SystemExit) as ended:
                main(list(map(str, words)))
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture
def edgefl(tools: Any, typed: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Types a command in an empty folder; what would stay, or has other packages, in a process of its own."""
    monkeypatch.chdir(tmp_path)

    def call(*words: object, **variables: str) -> Ended:
        own = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_DATA_HOME": str(tmp_path / "data"), **variables}
        if words[1] == "start" or "PYTHONPATH" in own:
            return apart({**tools.environment, **own}, words)
        return typed(*words, **own)

    return call


@pytest.fixture
def asks(fleet: LocalFleet, typed: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Types a command as the fleet's operator."""
    monkeypatch.chdir(tmp_path)
    return lambda *words, **variables: typed(*words, **{"XDG_CONFIG_HOME": str(fleet.root / "config"), **variables})


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (GOOD + "speed = 3\n", 3, ["run.speed"]),
        (GOOD + "round = 3\n", 3, ["run.round", "rounds"]),
        (GOOD + "[compresion]\n", 3, ["compresion", "compression"]),
        (GOOD + "rounds = 0\n", 3, ["run.rounds", "at least 1", "0"]),
        (GOOD + "[devices]\nmin = 5\ncount = 3\n", 3, ["devices.count", "5", "3"]),
        (GOOD + '[strategy]\nname = "fedavgg"\n', 6, ["fedavgg", "fedavg"]),
        (GOOD + '[strategy]\nname = "fedavg"\nlearning_rat = 1\n', 3, ["learning_rat"]),
        (GOOD + '[compression]\nup = "topq:1"\n', 7, ["topq"]),
        ('[run]\ntask = "digitz"\n', 5, ["digitz", "digits"]),
        (GOOD + '[task]\nmodel = "cnn"\n', 3, ["model", "cnn", "mlp"]),
        ("[run\n", 3, ["TOML"]),
        ("", 3, ["run"]),
    ],
)
def test_a_run_file_that_makes_no_sense_is_refused(
    asks: Call, tmp_path: Path, text: str, code: int, words: list[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    ended = asks("run", "submit", file)
    assert ended.code == code, ended.err
    assert all(word in ended.line for word in words), ended.line


def test_a_run_file_that_is_not_there_is_told(asks: Call) -> None:
    ended = asks("run", "submit", "none.toml")
    assert ended.code == 3
    assert "none.toml" in ended.line


def test_a_model_to_start_from_that_does_not_fit_is_refused(asks: Call, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(GOOD + 'init = "model.safetensors"\n')
    assert asks("run", "submit", tmp_path / "run.toml").code == 40
    (tmp_path / "model.safetensors").write_bytes(b"no model")
    ended = asks("run", "submit", tmp_path / "run.toml")
    assert ended.code == 13
    assert "model.safetensors" in ended.line


def test_nothing_of_this_was_queued(asks: Call) -> None:
    assert json.loads(asks("run", "list", "--format", "json").out)["rows"] == []


@pytest.mark.parametrize(
    "words", [("run", "show", "nothing"), ("run", "stop", "nothing"), ("devices", "show", "nothing"),
              ("run", "watch"), ("history", "rounds", "--run", "nothing")],
)  # fmt: skip
def test_a_run_or_device_that_does_not_exist_is_told(asks: Call, words: tuple[str, ...]) -> None:
    ended = asks(*words)
    assert ended.code == 40
    assert "no run" in ended.line or "no device" in ended.line


def test_a_wrong_operator_token_is_refused(asks: Call, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(GOOD)
    ended = asks("run", "submit", tmp_path / "run.toml", EDGEFL_TOKEN="wrong")
    assert ended.code == 37
    assert "token" in ended.line


@pytest.mark.parametrize("words", ["run list", "history rounds", "history why latest", "model list"])
def test_without_an_operator_file_the_line_says_where_it_belongs(edgefl: Call, tmp_path: Path, words: str) -> None:
    ended = edgefl(*words.split())
    assert ended.code == 37
    assert str(tmp_path / "config" / "edgefl" / "operator.toml") in ended.line


def test_a_coordinator_that_does_not_run_is_told(asks: Call) -> None:
    ended = asks("run", "list", "--url", f"https://127.0.0.1:{free_port()}")
    assert ended.code == 20
    assert "cannot be reached" in ended.line


def test_a_coordinator_that_was_not_set_up_says_how(edgefl: Call, tmp_path: Path) -> None:
    ended = edgefl("coordinator", "start", "--dir", tmp_path / "c")
    assert ended.code == 36
    assert "edgefl coordinator init" in ended.line


def test_a_device_that_has_not_joined_says_how(edgefl: Call, tmp_path: Path) -> None:
    ended = edgefl("device", "start", "--state", tmp_path / "d")
    assert ended.code == 36
    assert "edgefl device join" in ended.line


def _joins(edgefl: Call, fleet: LocalFleet, tmp_path: Path, shard: str) -> Ended:
    made = fleet.command("coordinator", "token", "--dir", str(fleet.directory), "--format", "json")
    token = json.loads(made)["token"]
    state = tmp_path / "state"
    ended = edgefl("device", "join", f"127.0.0.1:{fleet.port}", "--token", token, "--shard", shard, "--state", state)
    assert not state.exists(), "nothing was written"
    assert fleet.presence() == {}, "nobody has joined"
    return ended


def test_a_truncated_shard_does_not_join(edgefl: Call, fleet: LocalFleet, tools: Any, tmp_path: Path) -> None:
    whole = tools.shards[0]
    (tmp_path / "half.npz").write_bytes(whole.read_bytes()[:5000])
    (tmp_path / "half.json").write_bytes(whole.with_suffix(".json").read_bytes())
    ended = _joins(edgefl, fleet, tmp_path, f"digits={tmp_path / 'half.npz'}")
    assert ended.code == 4
    assert "half.npz is damaged" in ended.line


def test_a_shard_of_another_task_does_not_join(edgefl: Call, fleet: LocalFleet, tools: Any, tmp_path: Path) -> None:
    ended = _joins(edgefl, fleet, tmp_path, f"mnist={tools.shards[0]}")
    assert ended.code == 4
    assert "of task digits" in ended.line


def test_a_missing_shard_does_not_join(edgefl: Call, fleet: LocalFleet, tmp_path: Path) -> None:
    ended = _joins(edgefl, fleet, tmp_path, "digits=nowhere.npz")
    assert ended.code == 4
    assert "nowhere.npz" in ended.line


@pytest.fixture
def prepared(edgefl: Call, tmp_path: Path) -> Path:
    """A coordinator that was set up and has a database, and does not run."""
    root = tmp_path / "c"
    assert edgefl("coordinator", "init", "--dir", root, "--port", free_port()).code == 0
    assert edgefl("coordinator", "token", "--dir", root).code == 0
    return root


def _start(edgefl: Call, root: Path, *words: object) -> Ended:
    return edgefl("coordinator", "start", "--dir", root, "--host", "127.0.0.1", *words)


def test_a_taken_port_is_told(edgefl: Call, prepared: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = _start(edgefl, prepared, "--port", port)
        assert ended.code == 21
        assert f"port {port} is in use" in ended.line


@pytest.mark.parametrize("broker", ["auto", "embedded"])
def test_a_taken_broker_port_is_told(edgefl: Call, prepared: Path, broker: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = _start(edgefl, prepared, "--broker", broker, "--broker-port", port)
    assert ended.code == 21
    assert f"port {port} on 127.0.0.1 is already in use" in ended.line


def test_a_coordinator_waits_for_a_broker_that_is_down(tools: Any, tmp_path: Path) -> None:
    with tools.fleet(tmp_path, [], broker=f"mqtts://127.0.0.1:{free_port()}") as fleet:
        assert fleet.operator().get("/healthz")["status"] == "ok"
        assert "the broker does not answer yet" in (tmp_path / "coordinator.log").read_text()
        assert fleet.end("coordinator") == 0
    tools.check_logs(tmp_path)


def test_a_broker_that_makes_no_sense_is_told(edgefl: Call, prepared: Path) -> None:
    ended = _start(edgefl, prepared, "--broker", "mosquito")
    assert ended.code == 3
    assert "mosquito" in ended.line


def test_a_database_of_a_newer_program_is_left_alone(edgefl: Call, prepared: Path) -> None:
    with sqlite3.connect(prepared / "edgefl.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    before = (prepared / "edgefl.db").read_bytes()
    ended = _start(edgefl, prepared)
    assert ended.code == 12
    assert "update edgefl" in ended.line
    assert edgefl("history", "events", "--dir", prepared).code == 12
    assert (prepared / "edgefl.db").read_bytes() == before


def test_a_database_that_is_none_is_left_alone(edgefl: Call, prepared: Path) -> None:
    (prepared / "edgefl.db").write_bytes(b"a diary of another kind\n" * 100)
    for words in (("coordinator", "start", "--dir", prepared), ("history", "events", "--dir", prepared)):
        ended = edgefl(*words)
        assert ended.code == 10
        assert "is not a database" in ended.line
    assert (prepared / "edgefl.db").read_bytes() == b"a diary of another kind\n" * 100


def test_another_program_s_database_is_left_alone(edgefl: Call, prepared: Path) -> None:
    (prepared / "edgefl.db").unlink()
    with sqlite3.connect(prepared / "edgefl.db") as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()
    ended = _start(edgefl, prepared)
    assert ended.code == 10
    assert "recipes" in ended.line


def test_a_demo_without_its_data_says_which(edgefl: Call, tmp_path: Path) -> None:
    without = {"EDGEFL_DATA": ""}
    ended = edgefl("demo", "--task", "motionsense", **without)
    assert ended.code == 4
    assert "--data" in ended.line
    ended = edgefl("demo", "--task", "fashion-mnist", "--data", tmp_path / "none", **without)
    assert ended.code == 4
    assert str(tmp_path / "none") in ended.line


def test_a_demo_that_needs_torch_says_how_to_install_it(edgefl: Call, tools: Any, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    absent.mkdir()
    (absent / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    path = f"{absent}{os.pathsep}{tools.environment['PYTHONPATH']}"
    ended = edgefl("demo", "--task", "fashion-mnist", "--data", tmp_path, PYTHONPATH=path)
    assert ended.code == 5
    assert "edgefl-fleet[train]" in ended.line
    assert not (tmp_path / "demo-run").exists()


def test_a_demo_never_clears_a_folder_of_somebody_else(edgefl: Call, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    ended = edgefl("demo", "--out", "mine")
    assert ended.code == 2
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "all of it"
