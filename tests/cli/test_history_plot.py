"""`edgefl history plot` on simulated runs: from a store, from a coordinator, and what it answers to nonsense."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import plotted_store as made
import pytest
from click.testing import CliRunner

from edgefl.cli.history import command
from edgefl.cli.history_plot import OperatorSource, batch_size
from edgefl.cli.history_source import Source
from edgefl.cli.main import main
from edgefl.cli.operator import grant_access
from edgefl.coordinator.directory import init_directory
from edgefl.errors import NetworkError, NotFoundError
from edgefl.history.plots.names import KINDS
from edgefl.local_fleet import LocalFleet, free_port
from edgefl.simulated_run import simulate
from edgefl.storage.store import Store

ROOT = Path(__file__).parents[2]
RUNS = {"fedavg": {}, "asgd": {}, "dsgd": {"graph": "ring"}}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """A store with three real runs on four virtual boards."""
    root = tmp_path_factory.mktemp("simulated")
    for name, options in RUNS.items():
        config = {
            "run": {"task": "digits", "name": name, "rounds": 4},
            "task": {"model": "logistic"},
            "strategy": {"name": name, **options},
            "simulation": {"devices": 4, "profiles": ["pi-5", "pi-zero-2w"]},
        }
        simulate(config, root=root)
    return root


@pytest.fixture
def plot(simulated):
    def run(*words):
        told = ["plot", *map(str, words), "--dir", str(simulated)]
        return CliRunner(mix_stderr=False).invoke(command, told, catch_exceptions=False)

    return run


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_every_kind_is_drawn_from_a_simulated_run(plot, tmp_path, kind):
    out = tmp_path / "sheet.png"
    done = plot(*([kind] if kind else []), "--run", "dsgd", "--out", out)
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"{kind or 'accuracy and loss'} of dsgd: {out}\n"
    assert out.read_bytes().startswith(b"\x89PNG")
    assert out.stat().st_size > 10_000


@pytest.mark.parametrize("kind", ["accuracy", "throughput", "traffic", "computing-time", "staleness"])
def test_several_runs_share_a_sheet(plot, tmp_path, kind):
    runs = [word for name in RUNS for word in ("--run", name)]
    done = plot(kind, *runs, "--out", tmp_path / "sheet.svg", "--title", "three strategies")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "sheet.svg").read_text().startswith("<?xml")


def test_the_same_runs_give_the_same_file(plot, tmp_path):
    for ending in ("png", "svg", "pdf"):
        first, second = tmp_path / f"1.{ending}", tmp_path / f"2.{ending}"
        for out in (first, second):
            plot("timeline", "--run", "fedavg", "--rounds", "1:3", "--out", out)
        assert first.read_bytes() == second.read_bytes(), ending


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--out", "a.jpg"], 2, "--out must end with .png, .pdf, .svg, got a.jpg"),
        (["--out", "none/a.png"], 2, "none, which is no directory"),
        (["--out", "a.png", "--rounds", "4:2"], 2, "from the lower to the higher"),
        (["--out", "a.png", "--rounds", "9:"], 40, "run dsgd has rounds 1 to 4, none in 9:"),
        (["--out", "a.png", "--run", "nothing"], 40, "no run 'nothing'"),
        (["--out", "a.png", "--url", "https://localhost:1"], 2, "give one of them"),
        (["disagreement", "--run", "fedavg", "--out", "a.png"], 40, "run fedavg has no disagreement"),
        (["staleness", "--x", "time", "--out", "a.png"], 2, "--x chooses the axis of"),
        (["pie", "--out", "a.png"], 2, "'pie' is not one of"),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code_and_no_file(  # noqa: PLR0917 pytest passes them by name
    simulated, tmp_path, monkeypatch, capsys, words, code, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["history", "plot", *words, "--dir", str(simulated)])
    assert end.value.code == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_one_line(simulated, tmp_path, capsys):
    (tmp_path / "a.png").mkdir()
    with pytest.raises(SystemExit) as end:
        main(["history", "plot", "--out", str(tmp_path / "a.png"), "--dir", str(simulated)])
    assert end.value.code == 2
    assert capsys.readouterr().err == f"edgefl: {tmp_path}/a.png cannot be written: Is a directory\n"


def typed(path, *words):
    return subprocess.run(
        [sys.executable, "-m", "edgefl.cli.main", "history", "plot", *map(str, words)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_matplotlib_it_says_how_to_get_it(simulated, tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = typed(path, "--dir", simulated, "--out", tmp_path / "a.png")
    assert done.returncode == 1
    assert "pip install 'edgefl[plots]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_pdf_is_written_without_a_word_about_fonts(simulated, tmp_path):
    done = typed(str(ROOT), "--dir", simulated, "--run", "fedavg", "--out", tmp_path / "a.pdf")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")


def test_a_running_coordinator_gives_the_same_sheets_as_its_store(tmp_path, monkeypatch):
    monkeypatch.delenv("EDGEFL_URL", raising=False)
    monkeypatch.delenv("EDGEFL_TOKEN", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "fleet" / "config"))
    sheets = []
    with LocalFleet(root=tmp_path / "fleet", devices=(), broker="embedded") as fleet:
        with Store.open(fleet.database) as store:
            made.add_synchronous(store, "a run")
        for where in (["--url", f"https://127.0.0.1:{fleet.port}"], [], ["--dir", str(fleet.directory)]):
            for kind in ("accuracy", "timeline"):
                words = ["plot", kind, "--run", "a run", "--out", str(tmp_path / "a.png"), *where]
                done = CliRunner(mix_stderr=False).invoke(command, words, catch_exceptions=False)
                assert done.exit_code == 0, done.stderr
                sheets.append((tmp_path / "a.png").read_bytes())
        with pytest.raises(NotFoundError, match="no run 'nobody'"):
            CliRunner().invoke(
                command, ["plot", "--run", "nobody", "--out", str(tmp_path / "b.png")], catch_exceptions=False
            )
    assert sheets[:2] == sheets[2:4] == sheets[4:]
    assert len(set(sheets)) == 2


class Pages:
    """An operator's connection to a coordinator that gives two rows at a time."""

    def __init__(self, *numbers):
        self.numbers = numbers

    def get(self, path, params=None):
        given = params or {}
        if path != "/edgefl/v1/history/updates":
            return {"v": 1}
        if given["limit"] is not None:
            return {"rows": [{"round": number} for number in self.numbers[-given["limit"] :]]}
        begin = int(given["after"] or 0)
        behind = begin + 2
        rows = [{"round": number} for number in self.numbers[begin:behind]]
        return {"rows": rows, "next": str(behind) if behind < len(self.numbers) else None}


def test_a_coordinator_that_gives_pages_is_asked_until_the_last(monkeypatch):
    pages = Pages(1, 2, 3, 4, 5)
    monkeypatch.setattr("edgefl.client.Operator.from_options", lambda _url: pages)
    source = OperatorSource(Source(directory=None, url="https://localhost:9443"))
    assert [row["round"] for row in source.rows("updates", run="r")] == [1, 2, 3, 4, 5]
    assert [row["round"] for row in source.rows("updates", run="r", limit=3)] == [3, 4, 5]
    with pytest.raises(NetworkError, match="answered without rows"):
        source.rows("rounds", run="r")


def test_a_coordinator_that_does_not_run_is_an_error_that_names_the_other_way(tmp_path, monkeypatch):
    directory = init_directory(tmp_path / "c", hosts=["127.0.0.1"], fleet="lab", port=free_port())
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    grant_access(directory)
    with pytest.raises(NetworkError, match="--dir DIR reads the store"):
        CliRunner().invoke(command, ["plot", "--out", str(tmp_path / "b.png")], catch_exceptions=False)


def test_the_batch_size_is_the_run_file_s_else_the_task_s():
    assert batch_size("digits", "fedavg", {"strategy": {"batch_size": 5}}) == 5
    assert batch_size("digits", "fedavg", {}) == 8
    assert batch_size("noop", "fedavg", {}) == 64


def test_nobody_s_code_is_imported_to_learn_a_batch_size():
    assert batch_size("this:Task", "fedavg", {}) is None
    assert batch_size("digits", "this:Strategy", {}) is None
    assert batch_size("digits", "fedavg", {"task": {"model": "no such model"}}) is None
    assert "this" not in sys.modules
