"""The pages about strategies: their strategies are run as they stand, and what they name exists."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from markdown_pages import code, part, rows

import edgefl
from edgefl.adapters.flower_options import flower_names
from edgefl.assembly import assemble
from edgefl.config import parse_run
from edgefl.errors import StrategyError
from edgefl.simulated_run import simulate
from edgefl.strategies.checked import Checked
from edgefl.strategies.registry import BUILT_IN, ENTRY_POINTS, find_strategy
from edgefl.strategies.schedules import SCHEDULES
from edgefl.tasks.local_steps import ENTRY_POINT_GROUP, make_local_step
from edgefl.tasks.local_training import train
from edgefl.tasks.registry import make_task
from edgefl.tasks.sources import central_data
from edgefl.types import Algorithm, LocalPlan, derived_rng

ROOT = Path(__file__).parents[1]
PAGES = ("how-to/write-a-strategy.md", "how-to/train-without-a-server.md", "reference/strategies.md")
PAGE = "\n".join((ROOT / "docs" / page).read_text() for page in PAGES)
MODULES = ("trimmed_mean", "test_trimmed_mean", "fading", "clipping")


FENCE = re.compile(r"^```\w*\n.*?^```$", re.MULTILINE | re.DOTALL)


def fences(language, text=PAGE):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run_files():
    return [tomllib.loads(body) for body in fences("toml") if "entry-points" not in body]


def entry_points(group):
    (found,) = [body for body in fences("toml") if f'"{group}"' in body]
    return tomllib.loads(found)["project"]["entry-points"][group]


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A folder with the page's modules, installed with its entry points, importable here and in other processes."""
    written = {re.match(r"# (\w+)\.py\n", body)[1]: body for body in fences("python")}
    assert tuple(written) == MODULES
    for name, body in written.items():
        (tmp_path / f"{name}.py").write_text(body)
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    groups = {group: entry_points(group) for group in (ENTRY_POINTS, ENTRY_POINT_GROUP)}
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in table.items()) for group, table in groups.items()]
    (info / "entry_points.txt").write_text("".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


def simulated(tmp_path, strategy, **run):
    config = {"run": {"task": "digits", "seed": 7, **run}, "strategy": strategy, "devices": {"min": 4}}
    return simulate(
        {**config, "simulation": {"devices": 6, "scheme": "iid", "workers": 0}}, root=tmp_path / "simulated"
    )


def test_the_strategy_of_one_method_is_as_short_as_promised(modules):
    lines = [line for line in (modules / "trimmed_mean.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 20


def test_the_pages_test_passes(modules):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_trimmed_mean.py"]
    done = subprocess.run(command, cwd=modules, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pages_run_file_learns_in_the_simulator(modules, tmp_path):
    (config,) = [run for run in run_files() if run.get("strategy", {}).get("name") == "trimmed_mean:TrimmedMean"]
    config["simulation"]["workers"] = 0
    result = simulate(config, root=tmp_path / "simulated")
    assert (result.status, len(result.rounds)) == ("finished", 20)
    assert result.metrics["accuracy"] > 0.85


def test_the_strategy_of_nine_methods_learns_in_the_simulator(modules, tmp_path):
    result = simulated(tmp_path, {"name": "fading:Fading", "learning_rate": 0.3}, updates=90)
    assert result.status == "finished"
    assert result.metrics["accuracy"] > 0.85
    assert len(result.rounds) >= 10, "rounds of six updates"
    assert max(row["staleness"] for row in result.updates if row["staleness"] is not None) > 0


def test_a_mistake_in_it_is_told_as_the_page_says(modules, monkeypatch):
    said = re.search(r"`(strategy fading:Fading: aggregate raised ZeroDivisionError[^`]*)`", PAGE)[1]
    source = (modules / "fading.py").read_text()
    lines = source.splitlines()
    line = lines.index("        state.version += 1")
    lines[line] = "        state.version += 1 / 0"
    (modules / "fading.py").write_text("\n".join(lines))
    strategy = assemble(parse_run({"run": {"task": "digits"}, "strategy": {"name": "fading:Fading"}}), "r").strategy
    assert isinstance(strategy, Checked)
    state = strategy.init({})
    state.waiting.append(type("Update", (), {"base_version": 0})())
    with pytest.raises(StrategyError) as caught:
        strategy.aggregate(state)
    assert str(caught.value) == " ".join(said.split())


def test_the_entry_points_of_the_page_are_found(modules):
    assert find_strategy("trimmed-mean").__name__ == "TrimmedMean"
    assert type(make_local_step(LocalPlan(algorithm="clipped-sgd", iterations=1))).__name__ == "ClippedSgd"


def test_the_local_algorithm_of_the_page_trains_and_clips(modules):
    task, data = make_task("digits"), central_data("digits").train

    def moved(clip):
        learner = task.learner()
        learner.load(task.init(7))
        plan = LocalPlan(algorithm="clipped-sgd", iterations=30, learning_rate=0.5, options={"clip": clip})
        result = train(learner, data, plan, derived_rng(1), clock=lambda: 0.0, on_iteration=lambda *_: False)
        return learner.evaluate(data)[1], sum(float((d**2).sum()) for d in result.displacement.values()) ** 0.5

    accuracy, _ = moved(10.0)
    assert accuracy > 0.7
    assert moved(0.01)[1] <= 30 * 0.5 * 0.01 * 1.001


@pytest.mark.parametrize("number", range(len(run_files())))
def test_every_run_file_of_the_page_makes_sense(modules, number):
    config = run_files()[number]
    config.setdefault("run", {"task": "digits"})
    assert assemble(parse_run(config), "check").strategy is not None


def test_the_table_of_strategies_is_the_registry(modules):
    table = {code(row[0])[0]: row[1] for row in rows(part(PAGE, "Built-in strategies")) if code(row[0])}
    assert set(table) == set(BUILT_IN)
    assert set(table.values()) == {"synchronous", "asynchronous", "decentralised"}


def test_the_names_of_flower_are_all_there_and_no_other():
    text = part(PAGE, "Flower's strategies").strip().split("\n\n")[0]
    named = {name for name in code(text.replace("\n", " ")) if name[0].isupper()} | {"FedAdam"}
    assert {f"flwr:{name}" for name in named} == set(flower_names())


def test_local_algorithms_and_schedules_are_all_named():
    words = {
        title: set(code(FENCE.sub("", part(PAGE, title)))) for title in ("Local algorithms", "Asynchronous runs")
    }
    assert set(map(str, Algorithm)) <= words["Local algorithms"]
    assert set(SCHEDULES) <= words["Asynchronous runs"]


@pytest.mark.slow
def test_the_pages_strategies_train_a_real_fleet(modules, tmp_path):
    for name, options in (
        ("trimmed_mean:TrimmedMean", {"learning_rate": 0.5}),
        ("fading:Fading", {"learning_rate": 0.3}),
    ):
        config = {
            "run": {"task": "digits", "rounds": 10},
            "strategy": {"name": name, **options},
            "devices": {"min": 3},
        }
        result = edgefl.run(config, devices=3, scheme="iid", root=tmp_path / name.partition(":")[0])
        assert result.status == "finished"
        assert result.metrics["accuracy"] > 0.7
