"""What README and docs say: links lead somewhere, commands and settings exist, examples work as they stand.

Where a text lies and how it puts things is free; a page, a run file or a module that is added is looked at unasked.
"""

import ast
import importlib
import re
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import fields, replace

import click
import numpy as np
import pytest
from markdown_pages import PAGES, ROOT, fences, inline_code

import edgefl
from edgefl.cli.main import edgefl as cli
from edgefl.compression.codec import decode_body, make_codec
from edgefl.compression.codec_benchmark import make_random_update
from edgefl.compression.error_feedback import ErrorFeedback
from edgefl.compression.registry import KIND as CODECS
from edgefl.core.conditions import NO_CONDITIONS, parse_conditions
from edgefl.core.config import (
    AlertSettings,
    CertificateSettings,
    ConnectionSettings,
    HomeAssistantSettings,
    OpenIdSettings,
    RunConfig,
    parse_run,
)
from edgefl.core.errors import CodecError
from edgefl.core.safe_parsing import format_toml
from edgefl.core.settings import from_mapping
from edgefl.core.types import TensorSpec, TrainConfig, derive_rng
from edgefl.device.collect.settings import AnswerSection, load_collect_file
from edgefl.engine.assembly.build import build_run
from edgefl.simulation.advice.automatic import make_base
from edgefl.simulation.faults import load_faults
from edgefl.simulation.profiles import parse_catalogue
from edgefl.simulation.simulated_run import simulate
from edgefl.strategies.registry import KIND as STRATEGIES
from edgefl.strategies.registry import find_strategy
from edgefl.tasks.datasets.central import load_central_data
from edgefl.tasks.datasets.shards import check_shard
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.local_algorithms.registry import KIND as LOCAL_STEPS
from edgefl.tasks.local_algorithms.registry import make_local_algorithm
from edgefl.tasks.registry import list_backends, make_task

by_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """Examples keep their history in a home of their own, never in that of whoever runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("CONFIG", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))


# Links


def anchors(text):
    titles = re.findall(r"^#+ (.+?)(?: \{.*\})?$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@by_page
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", PAGES[path]):
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        assert not anchor or there.suffix != ".md" or anchor in anchors(there.read_text()), target


A_BOARD_S = (
    "/home/pi/", "/var/", "/opt/edgefl/", "/opt/nvidia/", "/bin/", "/boot/", "/run/", "/srv/", "/data/", "/etc/",
    "/usr/", "/dev/", "/proc/", "/sys/", "/path/to/",
)  # fmt: skip
A_ROUTE = ("/v1/", "/edgefl/", "/healthz", "/metrics", "/predict", "/model/")


def test_no_text_names_a_path_of_the_machine_that_it_was_written_on():
    shipped = [ROOT / "Makefile", *(path for path in (ROOT / "provisioning").rglob("*") if path.is_file())]
    for path, text in {**PAGES, **{path: path.read_text() for path in shipped}}.items():
        plain = re.sub(r'"(\$\w+)"', r"\1", text)  # "$folder"/name of a script
        for found in re.findall(r"(?<![\w./~…:<>})*+#-])/[a-z][\w.+-]*(?:/[\w.+-]*)*", plain):
            is_bare = found in {"/home", "/opt", "/root", "/tmp"}
            assert is_bare or f"{found}/".startswith((*A_BOARD_S, *A_ROUTE)), f"{path.name}: {found}"


# Commands


def commands(text):
    """Every `edgefl …` of a text, in a block for a shell or in running text."""
    blocks = "\n".join(fences(text, "sh", "")).replace("\\\n", " ")
    for line in [*(line.partition(" # ")[0] for line in blocks.splitlines()), *inline_code(text)]:
        if match := re.search(r"(?:^|[\s/])edgefl (?=[a-z])(.+)", line):
            yield match[1].split()


def named(words):
    """The commands that are named (`a|b` are two), and the options beside them."""
    found = [cli]
    while words and all(isinstance(command, click.Group) for command in found):
        names = words[0].split("|")
        deeper = [group.get_command(click.Context(group), name) for group in found for name in names]
        assert None not in deeper, f"there is no command edgefl {' '.join(words)}"
        found, words = deeper, words[1:]
    return found, set(re.findall(r"(?<!\S)(-{1,2}[a-z][a-z-]*)", " ".join(words)))


@by_page
def test_every_command_and_option_exists(path):
    for words in commands(PAGES[path]):
        for command in (found := named(words))[0]:
            known = {
                option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
            }
            assert found[1] <= known | {"--help"}, f"edgefl {' '.join(words)}"


def test_commands_are_found_in_blocks_and_in_running_text():
    assert sum(len(list(commands(text))) for text in PAGES.values()) > 50
    assert list(commands("a `edgefl run\nlist` b\n```sh\n.venv/bin/edgefl demo --rounds 2 # c\n```\n")) == [
        ["demo", "--rounds", "2"], ["run", "list"],
    ]  # fmt: skip


def test_every_make_target_and_extra_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for path, text in PAGES.items():
        lines = [line for body in fences(text, "sh", "") for line in body.splitlines()]
        for line in [*lines, *inline_code(text)]:
            for target in re.findall(r"^make ([a-z][\w-]*)", line):
                assert target in targets, f"{path.name}: make {target}"
            for extra in re.findall(r"edgefl(?:-fleet)?\[([\w,]+)\]", line):
                assert set(extra.split(",")) <= set(extras), f"{path.name}: {extra}"


# Settings

SECTIONS = {section.name: section.type for section in fields(RunConfig)}
SETTINGS = {
    "alerts": AlertSettings, "certificates": CertificateSettings, "connections": ConnectionSettings,
    "home_assistant": HomeAssistantSettings, "openid": OpenIdSettings, "answer": AnswerSection,
}  # fmt: skip


def toml_blocks():
    return [(path.name, tomllib.loads(body)) for path, text in PAGES.items() for body in fences(text, "toml")]


def run_files():
    return [table for _, table in toml_blocks() if table.keys() <= SECTIONS.keys()]


def test_every_setting_in_a_block_exists(modules, tmp_path):
    for name, table in toml_blocks():
        if "job" in table:
            assert parse_run(table).job.name, name
        elif table.keys() == {"conditions"}:  # of a board's own file
            assert parse_conditions(format_toml(table)) != NO_CONDITIONS, name
        elif table.keys() <= SECTIONS.keys():
            # Pieces of run files are of a task whose tensors the patterns of layers are of.
            run = {"run": {"task": "fashion-mnist"}, **table}
            if "split" in table and "torch" not in list_backends():
                continue  # only torch knows where a network can be cut
            assert build_run(make_base(parse_run(run))[0], "check").strategy is not None, name
        elif table.keys() <= SETTINGS.keys():
            for section, values in table.items():
                assert from_mapping(SETTINGS[section], values, section)
        elif table.keys() - {"labels", "answer"} == {"collect", "sources"}:
            (tmp_path / "collect.toml").write_text(format_toml(table))
            assert load_collect_file(tmp_path / "collect.toml").sources, name
        elif table.keys() == {"fault"}:
            (tmp_path / "faults.toml").write_text("".join(f"[[fault]]\n{toml(one)}" for one in table["fault"]))
            assert load_faults(tmp_path / "faults.toml")
        else:
            catalogue = parse_catalogue({"profile": table.get("profile", {})}, name)
            assert catalogue.profiles or table.keys() == {"project"}, f"{name}: what is {table}?"
    assert len(run_files()) > 5


def toml(table):
    return "".join(f"{name} = {value!r}\n" for name, value in table.items())


def test_every_setting_in_running_text_exists():
    config = RunConfig.from_json({"run": {"task": "digits"}})
    for path, text in PAGES.items():
        for piece in inline_code(text):
            if match := re.fullmatch(r"(\w+)\.(\w+)(?: = .+)?", piece):
                section = getattr(config, match[1], None)
                if match[1] in SECTIONS.keys() - {"task", "strategy"} and match[2] not in {"toml", "py", "json"}:
                    assert match[2] in {item.name for item in fields(section)}, f"{path.name}: {piece}"


# Modules


def python_modules():
    """The modules of all pages by name: blocks of Python that begin with `# name.py`."""
    return {
        match[1]: body
        for text in PAGES.values()
        for body in fences(text, "python")
        if (match := re.match(r"# (\w+)\.py\n", body))
    }


def entry_points():
    found = {}
    for _, table in toml_blocks():
        for group, points in table.get("project", {}).get("entry-points", {}).items():
            found.setdefault(group, {}).update(points)
    return found


def targets(kind):
    """The classes of the pages' modules that are of one kind, by what only that kind has."""
    for name, body in python_modules().items():
        for node in ast.parse(body).body:
            methods = {item.name for item in getattr(node, "body", ()) if isinstance(item, ast.FunctionDef)}
            if isinstance(node, ast.ClassDef) and methods & kind:
                yield f"{name}:{node.name}"


STRATEGY, TASK = sorted(targets({"combine", "build"})), sorted(targets({"read"}))


@pytest.fixture
def modules(installed, monkeypatch):
    """The folder with the pages' modules and their entry points, as an installed package has them."""
    folder = installed(python_modules(), entry_points())
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{ROOT}")
    return folder


def test_every_block_of_python_is_python():
    for path, text in PAGES.items():
        for body in fences(text, "python"):
            compile(body, path.name, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_tests_of_the_pages_pass(modules):
    tests = [f"{name}.py" for name in python_modules() if name.startswith("test_")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=modules, capture_output=True, text=True, check=False)
    assert (done.returncode, tests != []) == (0, True), done.stdout + done.stderr


@pytest.mark.parametrize("target", STRATEGY)
def test_a_strategy_of_the_pages_learns(modules, tmp_path, target):
    found = [table for table in run_files() if table.get("strategy", {}).get("name") == target]
    options = found[0]["strategy"] if found else {"name": target, "learning_rate": 0.3}
    config = {"run": {"task": "digits", "seed": 7, "updates": 48}, "strategy": options, "devices": {"min": 4}}
    fleet = {"devices": 6, "scheme": "iid", "workers": 0}
    result = simulate({**config, "simulation": fleet}, root=tmp_path / "simulated")
    assert (result.status, result.metrics["accuracy"] > 0.7) == ("finished", True)


@pytest.mark.slow
@pytest.mark.parametrize("target", STRATEGY)
def test_a_strategy_of_the_pages_trains_a_real_fleet(modules, tmp_path, target):
    config = {"run": {"task": "digits", "rounds": 10}, "strategy": {"name": target, "learning_rate": 0.3}}
    result = edgefl.run({**config, "devices": {"min": 3}}, devices=3, scheme="iid", root=tmp_path / "fleet")
    assert (result.status, result.metrics["accuracy"] > 0.7) == ("finished", True)


def test_the_entry_points_of_the_pages_are_those_that_the_code_looks_for(modules):
    packages = "".join(path.read_text() for path in (ROOT / "edgefl").rglob("*.py"))
    assert {kind.group for kind in (STRATEGIES, LOCAL_STEPS, CODECS)} <= entry_points().keys()
    assert all(f'"{group}"' in packages for group in entry_points())
    for name, target in entry_points()[STRATEGIES.group].items():
        assert find_strategy(name).__name__ == target.partition(":")[2]


def test_a_local_algorithm_of_the_pages_trains(modules):
    task, data = make_task("digits"), load_central_data("digits").train
    for name, target in entry_points()[LOCAL_STEPS.group].items():
        plan = TrainConfig(algorithm=name, iterations=30, learning_rate=0.5)
        assert type(make_local_algorithm(plan)).__name__ == target.partition(":")[2]
        learner = task.learner()
        learner.load(task.init(7))
        train(learner, data, plan, derive_rng(1), clock=lambda: 0.0, on_iteration=lambda *_: False)
        assert learner.evaluate(data)[1] > 0.6


def test_a_codec_of_the_pages_keeps_its_promises(modules):
    shapes = (TensorSpec(name="fc.weight", shape=(60, 50)), TensorSpec(name="fc.bias", shape=(60,)))
    update, rng = make_random_update(shapes, np.random.default_rng(3)), np.random.default_rng(1)
    for name in entry_points()[CODECS.group]:
        (spec, *_) = re.findall(rf"\b{name}:[\w.+-]+", "".join(PAGES.values()))
        codec = make_codec(spec, shapes)
        for tensor, found in decode_body(codec.encode(update, rng), shapes).items():
            sizes, step = np.abs(update[tensor]), codec.value_stage.step
            bound = np.maximum(step / 2, sizes - 32_767 * step) * 1.0001 + sizes * 1e-6
            assert np.all(np.abs(found - update[tensor]) <= bound + 1e-9)
        with pytest.raises(CodecError, match="finite"):
            codec.encode({one.name: np.full(one.shape, np.nan, np.float32) for one in shapes}, rng)
        feedback, given, sent = ErrorFeedback(make_codec(f"ef|topk:0.1|{spec}", shapes)), 0.0, 0.0
        for number in range(20):
            moved = make_random_update(shapes, np.random.default_rng(number))
            sent += decode_body(feedback.encode(str(number), moved, rng), shapes)["fc.weight"].dense()
            feedback.record_used([str(number)])
            given += moved["fc.weight"]
        assert np.abs(given - sent - feedback.state()["residual/fc.weight"]).max() < 1e-5, "nothing is lost for good"


def readings(folder):
    """Sensor readings whose answer is a linear rule, in two files as a board would collect them."""
    inputs = np.random.default_rng(1).normal(size=(400, 4))
    folder.mkdir(parents=True)
    for number, part in enumerate(np.split(np.column_stack([inputs, inputs[:, 0] + inputs[:, 1] > 0]), 2)):
        np.savetxt(folder / f"day-{number}.csv", part, delimiter=",")
    return folder


@pytest.mark.parametrize("target", [target for target in TASK if "Greenhouse" in target])
def test_the_task_of_the_pages_reads_its_folder_as_it_grows_and_learns(modules, tmp_path, target):
    task, folder = make_task(target, {"hidden": 8}), readings(tmp_path / "readings")
    report = check_shard(task, str(folder))
    assert (report.task, report.num_examples, report.labels) == (target, 400, ("closed", "open"))
    data, learner = task.read(str(folder)), task.learner()
    learner.load(task.init(7))
    plan = replace(TrainConfig(), **{**task.defaults, "epochs": 30.0})
    train(learner, data, plan, derive_rng(7), clock=lambda: 0.0, on_iteration=lambda *_: False)
    assert learner.evaluate(data)[1] > 0.95
    (folder / "day-2.csv").write_text("1,2,3,4,1\n")
    assert len(task.read(str(folder))) == 401


def runs():
    """Blocks of Python that run a whole fleet as they stand."""
    for path, text in PAGES.items():
        for number, body in enumerate(fences(text, "python")):
            if re.search(r"^(\w+ = )?edgefl\.(run|simulate)\(", body, re.MULTILINE) and not re.match(
                r"# \w+\.py", body
            ):
                yield pytest.param(body, id=f"{path.stem}-{number}")


@pytest.mark.slow
@pytest.mark.parametrize("body", [*runs()])
def test_a_run_of_the_pages_ends_well(modules, tmp_path, monkeypatch, capsys, body):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    readings(tmp_path / "readings" / "a")
    exec(compile(body, "page", "exec"), {})
    assert " finished: " in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in python_modules() if not name.startswith("test_")])
def test_every_module_of_the_pages_can_be_imported_or_run(modules, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    body = python_modules()[name]
    if "import torch" in body:
        pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
    if "readings/" in body and (modules / "make_readings.py").exists():
        importlib.import_module("make_readings")
    importlib.import_module(name)
