"""What the pages of papers say to type: every row's settings train a small fleet, and its commands end well."""

import json
import os
import re
import shlex
import tomllib
from pathlib import Path

import numpy as np
import pytest
from markdown_pages import PAGES, ROOT, code, fences, part
from safetensors.numpy import load_file

import edgefl
from edgefl.cli.main import main
from edgefl.core.config import parse_run
from edgefl.core.safe_parsing import format_toml
from edgefl.core.types import Dataset, TrainConfig, derive_rng
from edgefl.engine.assembly.build import build_run
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.registry import make_task

PAPERS = {path.stem: text for path, text in PAGES.items() if path.parent == ROOT / "docs" / "papers"}
NUM_DEVICES = 8
LETTERS = {"B": "2", "F": "0.5", "R": "2", "S": "2"}
"""Numbers that stand for letters of the pages."""
BUDGETS = ("epochs", "updates", "seconds", "bytes", "accuracy")
ON_BOARDS = {
    ("coordinator", "start"): "cli/test_coordinator.py",
    ("device", "join"): "cli/test_device_join.py",
    ("devices", "logs"): "e2e/test_runs.py",
    ("provision", "ssh"): "provision/test_ssh_provisioning.py",
    ("run", "list"): "cli/test_live_fleet.py",
    ("run", "submit"): "cli/test_live_fleet.py",
    ("run", "watch"): "cli/test_live_fleet.py",
}
"""Commands that need a coordinator that runs, or a board, and the tests that give them one."""
SETTING = re.compile(r'(?:\[(?P<section>[\w.]+)\] )?(?P<key>[\w.]+|"[^"]+") = (?P<value>.+)')


def rows():
    """The page, the section of settings, the cells and the whole line of every row that says what to type."""
    for page, text in PAPERS.items():
        for head, body in re.findall(r"^\|[^|]+\| (type[^|]*) \|\n\|[-|]+\|\n((?:\|.+\|\n)+)", text, re.MULTILINE):
            for line in body.splitlines():
                what, typed = line[1:-1].split(" | ")
                yield page, (code(head) or ["[strategy]"])[0][1:-1], what.strip(), typed


def pieces(typed):
    """The code of a cell, without Markdown's own bars, letters as numbers."""
    for piece in code(typed):
        yield re.sub(r":([BFRS])\b", lambda found: ":" + LETTERS[found[1]], piece.replace("\\|", "|"))


def typed_runs(section, typed):
    """The tables of run files that a cell stands for: a setting that has a value already begins another one."""
    tables, last, changed = {}, None, False
    for piece in pieces(typed):
        if match := SETTING.fullmatch(piece):
            section = match["section"] or section
            last, value = (section, match["key"].strip('"')), match["value"]
        elif piece.startswith("--scheme "):
            last, value = ("simulation", "scheme"), f'"{piece.removeprefix("--scheme ")}"'
        elif piece.startswith('"') and last is not None:
            value = piece
        else:
            continue
        table = tables
        for name in last[0].split("."):
            table = table.setdefault(name, {})
        if last[1] in table:
            yield json.loads(json.dumps(tables))
        table[last[1]] = tomllib.loads(f"value = {value}")["value"]
        changed = True
    if changed:
        yield tables


def typed_commands(typed):
    return [piece for piece in pieces(typed) if piece.startswith("edgefl ")]


def strategy_of(page):
    return tomllib.loads(fences(PAPERS[page], "toml")[0])["strategy"]["name"]


def cases(is_network):
    for page, section, what, typed in rows():
        for number, tables in enumerate(typed_runs(section, typed)):
            if ("model" in tables.get("task", {})) is is_network:
                yield pytest.param(page, tables, id=f"{page}: {re.sub(r'[^ -~]', '', what)[:40]} {number}")


def shrink(tables):
    """A run's tables for one round, two exchanges, and a linear model of images; networks are tried by themselves."""
    tables = parse_run(tables).to_json()
    tables["run"] |= {**dict.fromkeys(BUDGETS), "rounds": 1, "evaluate_every": 1}
    if "exchanges_per_round" in tables["strategy"]:
        tables["strategy"]["exchanges_per_round"] = 2
    if tables["run"]["task"] != "digits":
        tables["task"] = {"model": "logistic"}
    return tables


def simulate(tables, root):
    """Runs tables on the task's own data."""
    task = tables["run"]["task"]
    data = None if task == "digits" else Path(os.environ.get("EDGEFL_DATA", "nowhere")) / task
    if data is not None and not data.is_dir():
        pytest.skip(f"needs {task}: set EDGEFL_DATA to the folder that holds it")
    return edgefl.simulate(tables, root=root, data=data)


def check_trained(tables, folder):
    """Checks that a run's updates are used, and that its model is not the one that it began with."""
    done = simulate(tables, folder / "root")
    assert done.status == "finished"
    assert any(update["outcome"] == "used" for update in done.updates)
    built = build_run(parse_run(tables), "row")
    first, last = built.make_whole(built.model), load_file(done.model)
    assert any(not np.array_equal(tensor, first[name]) for name, tensor in last.items())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the files that pages name, for all boards, and a home of its own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("CONFIG", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    names = [f"device-{number:02}" for number in range(1, NUM_DEVICES + 1)]
    nodes = {
        name: {"round": 2, "edges": [names[place - 1], names[place + 1 - NUM_DEVICES]]}
        for place, name in enumerate(names)
    }
    (tmp_path / "node_list.json").write_text(json.dumps({"nodes": nodes}))
    hosts = [{"name": name, "addr": "127.0.0.1", "port": 8884 + place} for place, name in enumerate(names)]
    (tmp_path / "hosts.json").write_text(json.dumps({"hosts": hosts}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_row_says_what_to_type_or_leads_to_a_block_that_does():
    for page, section, what, typed in rows():
        if not [*typed_runs(section, typed), *typed_commands(typed)]:
            title = "".join(re.findall(r"\]\(#([\w-]+)\)", typed))
            assert title, f"{page}: {what} has nothing to type"
            (heading,) = [
                one for one in re.findall(r"^#+ (.+)$", PAPERS[page], re.MULTILINE)
                if one.lower().replace(" ", "-") == title
            ]  # fmt: skip
            assert fences(part(PAPERS[page], heading), "toml", "sh"), f"{page}: {what}"


def test_a_setting_with_several_values_is_as_many_runs():
    cell = '`name = "a"`, `"b"` with `[guard] enabled = false` and `max = 1`, `"c:S"`, `--scheme redundant:R`, `word`'
    last = {"name": "b"}
    assert [*typed_runs("strategy", cell)] == [
        {"strategy": {"name": "a"}},
        {"strategy": last, "guard": {"enabled": False, "max": 1}},
        {"strategy": last, "guard": {"enabled": False, "max": "c:2"}, "simulation": {"scheme": "redundant:2"}},
    ]
    assert len([*rows()]) > 60


@pytest.mark.extended
@pytest.mark.parametrize(("page", "tables"), [*cases(is_network=False)])
def test_the_settings_of_a_row_train_a_small_fleet(page, tables, folder):
    is_whole = "preset" in tables.get("strategy", {})
    asked = {
        **tables,
        "run": {} if is_whole else {"task": "digits", "rounds": 1, **tables.get("run", {})},
        "strategy": {"name": strategy_of(page), **tables.get("strategy", {})},
        "simulation": {} if is_whole else {"devices": NUM_DEVICES, **tables.get("simulation", {})},
    }
    check_trained(shrink(asked), folder)


@pytest.mark.extended  # networks need torch
@pytest.mark.parametrize(("page", "tables"), [*cases(is_network=True)])
def test_a_network_of_a_row_takes_a_step(page, tables):
    options = tables["task"]
    if options["model"].startswith("torchvision:"):
        pytest.importorskip("torchvision", reason="needs torchvision: pip install '.[torchvision]'")
    run = {"run": {"task": "fashion-mnist"}, **tables, "strategy": {"name": strategy_of(page)}}
    assert build_run(parse_run(run), "row").strategy is not None
    task, rng = make_task("fashion-mnist", options), np.random.default_rng(1)
    learner, model = task.learner(threads=1), task.init(7)
    learner.load(model)
    images = Dataset(inputs=rng.integers(0, 256, (4, 28, 28), np.uint8), targets=np.arange(4))
    plan = TrainConfig(iterations=1, batch_size=4, learning_rate=0.01)
    result = train(learner, images, plan, derive_rng(1), clock=lambda: 0.0, on_iteration=lambda *_: False)
    assert result.iterations == 1
    assert sum(float(np.abs(tensor).sum()) for tensor in result.displacement.values()) > 0.0


def commands():
    for page, _, _, typed in rows():
        for piece in typed_commands(typed):
            yield page, shlex.split(piece)[1:]


def blocks(*languages):
    for page, text in PAPERS.items():
        for number, body in enumerate(fences(text, *languages)):
            yield pytest.param(page, body, id=f"{page}-{number}")


def test_what_needs_boards_is_tested_with_them():
    for names in {tuple(words[:2]) for _, words in commands()} & ON_BOARDS.keys():
        text = (ROOT / "tests" / ON_BOARDS[names]).read_text()
        assert ", ".join(f'"{name}"' for name in names) in text, names


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """A folder with a run of each name that the pages draw."""
    root = tmp_path_factory.mktemp("history")
    for name in ("dsgd", "ssgd", "esync", "pdmm", "esync-reference", "pdmm-reference"):
        strategy = {"name": "local" if name.endswith("reference") else {"pdmm": "pdmm-isvr"}.get(name, name)}
        tables = {"run": {"task": "digits", "name": name, "rounds": 1}, "strategy": strategy}
        edgefl.simulate(tables, devices=3, root=root)
    return root


@pytest.mark.extended
@pytest.mark.parametrize(
    ("page", "words"),
    [
        pytest.param(page, words, id=f"{page}: {' '.join(words)}")
        for page, words in commands()
        if tuple(words[:2]) not in ON_BOARDS
    ],
)
def test_a_command_of_a_row_ends_well(page, words, folder, history, capsys):
    run(page, words, history)
    if "--out" in words:
        assert Path(words[words.index("--out") + 1]).exists()
    else:
        assert capsys.readouterr().out.strip() or words[:2] == ["history", "export"]


def run(page, words, history):
    """Runs a command as it is typed, in a folder where the files that it names are."""
    of_history = ["--dir", str(history)] if words[0] in {"history", "model"} else []
    if words[:2] == ["data", "shard"] and not Path(os.environ.get("EDGEFL_DATA", "nowhere"), words[2]).is_dir():
        pytest.skip(f"needs {words[2]}: set EDGEFL_DATA to the folder that holds it")
    for name in {word for word in words if word.endswith(".toml")}:
        tables = {"run": {"task": "digits", "rounds": 1}, "strategy": {"name": strategy_of(page)}}
        Path(name).write_text(format_toml(tables))
    with pytest.raises(SystemExit) as ended:
        main(["-q", *words, *of_history])
    assert not ended.value.code


@pytest.mark.extended
@pytest.mark.parametrize(("page", "body"), [*blocks("toml")])
def test_a_run_file_of_a_page_trains_and_is_measured(page, body, folder):
    check_trained(shrink(tomllib.loads(body)), folder)


@pytest.mark.extended
@pytest.mark.parametrize(("page", "body"), [*blocks("sh")])
def test_the_commands_of_a_block_end_well(page, body, folder, history):
    for line in body.splitlines():
        run(page, shlex.split(line, comments=True)[1:], history)
