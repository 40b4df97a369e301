"""Bad input: one clear line on stderr, the documented exit code, no traceback, nothing lost."""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from edgefl.simulation.local_fleet import LocalFleet, find_free_port

GOOD = '[run]\ntask = "digits"\n'
RUN_FILES = [
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
    (GOOD + 'init = "none.safetensors"\n', 40, ["none.safetensors"]),
    (GOOD + 'init = "shard.npz"\n', 13, ["shard.npz"]),
    ("[run\n", 3, ["TOML"]),
    ("", 3, ["run"]),
    (None, 3, ["run.toml"]),
]
COMMANDS = [
    ("run show nothing", {}, 40, "no run"),
    ("run stop nothing", {}, 40, "no run"),
    ("run watch", {}, 40, "no run"),
    ("devices show nothing", {}, 40, "no device"),
    ("history rounds --run nothing", {}, 40, "no run"),
    ("run list --url https://127.0.0.1:{port}", {}, 20, "cannot be reached"),
    ("run list", {"XDG_CONFIG_HOME": "{folder}"}, 37, "{folder}/edgefl/operator.toml"),
    ("history why latest", {"XDG_CONFIG_HOME": "{folder}"}, 37, "{folder}/edgefl/operator.toml"),
    ("coordinator start --dir {folder}/c", {}, 36, "edgefl coordinator init"),
    ("device start --state {folder}/d", {}, 36, "edgefl device join"),
    ("demo --task motionsense", {"EDGEFL_DATA": ""}, 4, "--data"),
    ("demo --task fashion-mnist --data {folder}/none", {"EDGEFL_DATA": ""}, 4, "{folder}/none"),
]


@contextmanager
def make_fleet(tools: Any, root: Path) -> Iterator[LocalFleet]:
    with tools.fleet(root, []) as running:
        yield running


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands are typed in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_file_that_makes_no_sense_is_refused_and_nothing_of_it_queued(
    fleet: LocalFleet, tools: Any, folder: Path
) -> None:
    (folder / "shard.npz").write_bytes(b"no model")
    for text, code, words in RUN_FILES:
        (folder / "run.toml").unlink(missing_ok=True)
        if text is not None:
            (folder / "run.toml").write_text(text)
        ended = tools.as_operator(fleet, "run", "submit", "run.toml")
        assert ended.code == code, (text, ended.err)
        assert all(word in ended.line for word in words), ended.line
    (folder / "run.toml").write_text(GOOD)
    ended = tools.as_operator(fleet, "run", "submit", "run.toml", EDGEFL_TOKEN="wrong")
    assert (ended.code, "token" in ended.line) == (37, True)
    assert tools.as_operator(fleet, "run", "list", "--format", "json").rows == []


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_what_is_not_there_is_told(fleet: LocalFleet, tools: Any, folder: Path, command: Any) -> None:
    words, variables, code, told = command
    places = {"folder": str(folder), "port": find_free_port()}
    own = {name: value.format(**places) for name, value in variables.items()}
    ended = tools.as_operator(fleet, *words.format(**places).split(), **own)
    assert (ended.code, told.format(**places) in ended.line) == (code, True), ended.err


def test_a_demo_never_clears_a_folder_of_somebody_else(tools: Any, folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.txt").write_text("all of it")
    assert tools.typed("demo", "--out", "mine").code == 2
    assert (folder / "mine" / "thesis.txt").read_text() == "all of it"


def test_a_demo_that_needs_torch_says_how_to_install_it(tools: Any, folder: Path) -> None:
    (folder / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    done = subprocess.run(
        [sys.executable, "-m", "edgefl.cli.main", "demo", "--task", "fashion-mnist", "--data", str(folder)],
        env={**tools.environment, "PYTHONPATH": f"{folder}{os.pathsep}{tools.environment['PYTHONPATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 5
    assert "[train]" in done.stderr
    assert not (folder / "demo-run").exists()


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        ("digits={half}", "half.npz is damaged"),
        ("mnist={whole}", "of task digits"),
        ("digits=nowhere.npz", "nowhere.npz"),
    ],
)
def test_a_shard_that_cannot_be_used_does_not_join(
    fleet: LocalFleet, tools: Any, folder: Path, shard: str, words: str
) -> None:
    whole = tools.shards[0]
    (folder / "half.npz").write_bytes(whole.read_bytes()[:5000])
    (folder / "half.json").write_bytes(whole.with_suffix(".json").read_bytes())
    token = fleet.make_client().post("/edgefl/v1/tokens")["token"]
    given = shard.format(half=folder / "half.npz", whole=whole)
    state = ("--shard", given, "--state", folder / "state")
    ended = tools.typed("device", "join", f"127.0.0.1:{fleet.port}", "--token", token, *state)
    assert (ended.code, words in ended.line) == (4, True), ended.err
    assert not (folder / "state").exists(), "nothing was written"
    assert fleet.get_presence() == {}, "nobody has joined"


@pytest.fixture
def start(tools: Any, folder: Path) -> Callable[..., Any]:
    """Types the start of a coordinator that was set up in `c` and has a database."""
    for words in (("init", "--port", find_free_port()), ("token",)):
        ended = tools.typed("coordinator", words[0], "--dir", "c", *words[1:], XDG_CONFIG_HOME=str(folder))
        assert ended.code == 0, ended.err
    return lambda *words: tools.typed("coordinator", "start", "--dir", "c", "--host", "127.0.0.1", *words)


def test_a_port_that_is_taken_and_a_broker_that_makes_no_sense_are_told(start: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for words, told in (
            (("--port", port), f"port {port} is in use"),
            (("--broker", "auto", "--broker-port", port), f"port {port} on 127.0.0.1 is already in use"),
            (("--broker", "embedded", "--broker-port", port), f"port {port} on 127.0.0.1 is already in use"),
        ):
            ended = start(*words)
            assert (ended.code, told in ended.line) == (21, True), ended.err
    ended = start("--broker", "mosquito")
    assert (ended.code, "mosquito" in ended.line) == (3, True)


def test_a_database_that_is_not_ours_or_of_a_newer_program_is_left_alone(
    start: Callable[..., Any], tools: Any
) -> None:
    database = Path("c") / "edgefl.db"
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    newer = database.read_bytes()
    with closing(sqlite3.connect("other.db")) as connection, connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    for content, code, words in (
        (newer, 12, "update edgefl"),
        (b"a diary of another kind\n" * 100, 10, "is not a database"),
        (Path("other.db").read_bytes(), 10, "recipes"),
    ):
        database.write_bytes(content)
        ended = start()
        assert (ended.code, words in ended.line) == (code, True), ended.err
        if words == "recipes":
            with closing(sqlite3.connect(database)) as connection:
                assert list(connection.execute("SELECT name FROM sqlite_master")) == [("recipes",)]
        else:
            assert tools.typed("history", "events", "--dir", "c").code == code
            assert database.read_bytes() == content


@pytest.mark.extended
def test_a_coordinator_waits_for_a_broker_that_is_down(tools: Any, folder: Path) -> None:
    with tools.fleet(folder, [], broker=f"mqtts://127.0.0.1:{find_free_port()}") as fleet:
        assert fleet.make_client().get("/healthz")["status"] == "ok"
        assert "the broker does not answer yet" in (folder / "coordinator.log").read_text()
        assert fleet.terminate("coordinator") == 0
