"""The README's examples are used as they stand, and what it names exists."""

from __future__ import annotations

import re
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest

from edgefl import compression, strategies, tasks
from edgefl.assembly import assemble
from edgefl.cli.main import edgefl as cli
from edgefl.config import RunSection, parse_run
from edgefl.local_fleet import LocalDevice, LocalFleet
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.rounds import RoundRules
from edgefl.tasks.local_training import train
from edgefl.tasks.registry import make_task
from edgefl.tasks.shards import check_shard
from edgefl.types import Assignment, DeviceInfo, LocalPlan, Strategy, Update, UpdateMetrics, derived_rng

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TEXTS = [README, *(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))]

PIP_OPTIONS = {"--extra-index-url", "--no-deps"}
FUZZ_OPTIONS = {"--reader", "--cases", "--seconds", "--engine", "--input"}
BENCHMARK_OPTIONS = {
    "--all", "--at-a-time", "--beat-s", "--flower-python", "--gaps", "--only", "--pin", "--ramp-s", "--rounds-up-to",
    "--turns",
}  # fmt: skip

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def fences(text: str, language: str) -> list[str]:
    return [body for kind, body in _FENCE.findall(text) if kind == language]


def inline_code(text: str) -> list[str]:
    """Every piece of code in running text; it may be broken over two lines."""
    return [piece.replace("\n", " ") for piece in re.findall(r"`([^`]+)`", _FENCE.sub("", text))]


def code_lines(text: str) -> list[str]:
    """Every line of a shell or output block, and every inline piece of code."""
    blocks = [line for kind in ("sh", "") for body in fences(text, kind) for line in body.splitlines()]
    return [*(line.partition(" # ")[0] for line in blocks), *inline_code(text)]


@dataclass(frozen=True)
class Mention:
    """One `edgefl …` in a text: the commands that it names (`a|b` are two), and the options beside them."""

    line: str
    commands: dict[str, click.Command] = field(default_factory=dict)
    options: frozenset[str] = frozenset()


def mention(line: str, words: list[str]) -> Mention:
    found: dict[str, click.Command] = {"": cli}
    while words and all(isinstance(command, click.Group) for command in found.values()):
        deeper: dict[str, click.Command] = {}
        for path, group in found.items():
            for name in words[0].split("|"):
                command = group.get_command(click.Context(group), name)  # type: ignore[attr-defined]
                assert command is not None, f"there is no command edgefl{path} {name}: {line}"
                deeper[f"{path} {name}".strip()] = command
        found, words = deeper, words[1:]
    return Mention(line, found, frozenset(re.findall(r"(?<!\S)(-{1,2}[a-z][a-z-]*)", " ".join(words))))


def mentions() -> Iterator[Mention]:
    for line in (line for text in TEXTS for line in code_lines(text)):
        if match := re.search(r"(?:^|[\s/])edgefl (?=[a-z])(.+)", line):
            yield mention(line, match[1].split())


def leaves(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from leaves(command, f"{path} {name}".strip())
        else:
            yield f"{path} {name}".strip(), command


def options_of(command: click.Command) -> set[str]:
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


def test_every_command_and_option_that_the_texts_name_exists() -> None:
    found = list(mentions())
    assert len(found) > 20, "the search for commands finds too few"
    for said in found:
        for path, command in said.commands.items():
            assert said.options <= options_of(command), f"edgefl {path} lacks an option of: {said.line}"


def test_an_option_that_stands_alone_in_the_texts_belongs_to_some_command() -> None:
    known = {option for _, command in leaves(cli) for option in options_of(command)} | options_of(cli) | {"--help"}
    lines = [line for text in TEXTS for line in inline_code(text)]
    alone = {option for line in lines for option in re.findall(r"(?:^|\s)(--[a-z][a-z-]+)", line)}
    assert {"--broker", "--role"} <= alone
    assert alone - known <= PIP_OPTIONS | FUZZ_OPTIONS | BENCHMARK_OPTIONS, "an option that no command has"


def test_every_command_is_mentioned_in_the_texts() -> None:
    said = {path for found in mentions() for path in found.commands}
    assert {path for path, _ in leaves(cli)} - said == set()


def test_every_make_target_in_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)", "\n".join(code_lines(README)), re.MULTILINE)
    assert "demo" in targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def test_the_readme_is_short_and_so_are_its_lines() -> None:
    lines = README.splitlines()
    assert len(lines) <= 200
    assert not [line for line in lines if len(line) > 125]


def test_the_entry_points_in_the_docs_are_those_that_the_code_looks_for() -> None:
    files = [Path(package.__path__[0]) for package in (tasks, strategies, compression)]
    code = "".join(path.read_text() for room in files for path in room.glob("*.py"))
    page = (ROOT / "docs" / "reference" / "python-api.md").read_text()
    named = set(re.findall(r"`(edgefl\.(?:tasks|strategies|codecs|local_steps))`", page))
    assert len(named) == 4
    for group in named:
        assert f'"{group}"' in code, group


def test_the_guide_counts_the_methods_of_a_strategy() -> None:
    names = [name for name, value in vars(Strategy).items() if isinstance(value, FunctionType) and name[0] != "_"]
    guide = (ROOT / "docs" / "how-to" / "write-a-strategy.md").read_text()
    assert f"all {['seven', 'eight', 'nine', 'ten'][len(names) - 7]} methods" in guide.lower()


def test_the_readme_s_run_file_can_be_run() -> None:
    (text,) = fences(README, "toml")
    assembled = assemble(parse_run(tomllib.loads(text)), "check")
    assert (assembled.config.devices.min, assembled.config.run.rounds) == (3, 20)
    rules = re.search(r"# or (.+?):", text)
    assert rules is not None
    assert set(rules[1].split(", ")) <= set(RunSection.__dataclass_fields__)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the README's modules, importable here and in processes that are started."""
    folder = tmp_path / "modules"
    folder.mkdir()
    names = []
    for body in fences(README, "python"):
        if match := re.match(r"# (\w+)\.py\n", body):
            (folder / f"{match[1]}.py").write_text(body)
            names.append(match[1])
    assert names == ["greenhouse", "trimmed"]
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{ROOT}")
    before: dict[str, ModuleType] = dict(sys.modules)
    yield folder
    for name in names:
        if name not in before:
            sys.modules.pop(name, None)


def write_readings(folder: Path, seed: int, num_rows: int = 400) -> Path:
    """Sensor readings whose answer is a linear rule, in two files as a board would collect them."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(num_rows, 4))
    rows = np.column_stack([inputs, inputs[:, 0] + inputs[:, 1] > 0])
    folder.mkdir(parents=True)
    for number, part in enumerate(np.split(rows, 2)):
        np.savetxt(folder / f"day-{number}.csv", part, delimiter=",")
    return folder


def test_the_readme_s_task_reads_its_folder_and_learns(modules: Path, tmp_path: Path) -> None:
    task: Any = make_task("greenhouse:Greenhouse", {"hidden": 8})
    readings = write_readings(tmp_path / "readings", seed=1)
    report = check_shard(task, str(readings))
    assert (report.task, report.num_examples, report.labels) == ("greenhouse:Greenhouse", 400, ("closed", "open"))
    data, learner = task.read(str(readings)), task.learner()
    learner.load(task.init(7))
    plan = replace(LocalPlan(), **{**task.defaults, "epochs": 30.0})
    train(learner, data, plan, derived_rng(7), clock=iter(range(10**6)).__next__, on_iteration=lambda *_: False)
    assert learner.evaluate(data)[1] > 0.95


def test_the_readme_s_task_sees_that_its_folder_has_grown(modules: Path, tmp_path: Path) -> None:
    readings = write_readings(tmp_path / "readings", seed=1)
    (readings / "day-2.csv").write_text("1,2,3,4,1\n")
    assert len(make_task("greenhouse:Greenhouse").read(str(readings))) == 401


def test_the_readme_s_strategy_leaves_the_extremes_out(modules: Path) -> None:
    devices = {name: DeviceInfo(device_id=name) for name in ("a", "b", "c")}
    view: Any = SimpleNamespace(
        now_s=0.0, devices=devices, idle=list(devices), busy={}, speeds={}, progress={}, vitals={}
    )
    strategy = make_strategy("trimmed:TrimmedMean", {"trim": 1, "learning_rate": 0.2}, RoundRules())
    state, decision = strategy.assign(strategy.init({"w": np.zeros(1, np.float32)}), view)
    orders = [order for order in decision.orders if isinstance(order, Assignment)]
    assert [order.plan.learning_rate for order in orders] == [0.2] * 3
    for order, moved in zip(orders, (-900.0, 7.0, 8000.0), strict=True):
        update = Update(
            assignment_id=order.assignment_id,
            device_id=order.device_id,
            base_version=0,
            tensors={"w": np.array([moved], np.float32)},
            metrics=UpdateMetrics(num_examples=1),
        )
        state = strategy.receive(state, update)
    assert strategy.ready(state, view)
    assert np.asarray(strategy.model(strategy.aggregate(state))["w"]).tolist() == [7.0]


@pytest.mark.slow
def test_the_readme_s_task_and_strategy_train_a_real_fleet(modules: Path, tmp_path: Path) -> None:
    name = "greenhouse:Greenhouse"
    devices = [
        LocalDevice(name=f"d-{seed}", shards={name: str(write_readings(tmp_path / f"shard-{seed}", seed))})
        for seed in (1, 2)
    ]
    config = {"run": {"task": name, "rounds": 10}, "strategy": {"name": "trimmed:TrimmedMean", "epochs": 3.0}}
    with LocalFleet(root=tmp_path / "fleet", devices=devices) as fleet:
        run = fleet.wait_run(fleet.submit(parse_run({**config, "devices": {"min": 2}})))
        last = fleet.history("rounds", run=run["run_id"])[-1]
    assert (run["status"], last["num_updates"], last["source"]) == ("finished", 2, "device")
    assert last["accuracy"] > 0.9


@pytest.mark.slow
def test_the_readme_s_notebook_lines_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (lines,) = [body for body in fences(README, "python") if body.startswith("import edgefl")]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    exec(compile(lines, "README.md", "exec"), {})
    told, figures = capsys.readouterr().out.splitlines()
    accuracy, num_updates = figures.split()
    assert told.endswith(f" finished: rounds reached 10; accuracy {float(accuracy):.4f}")
    assert float(accuracy) > 0.8
    assert int(num_updates) == 40
