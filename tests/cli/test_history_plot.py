"""`edgefl history plot` on simulated runs; from a coordinator that runs see test_live_fleet.py."""

import logging
import sys

import pytest

from edgefl.cli.history_plot import ApiHistoryReader, find_batch_size
from edgefl.cli.history_source import HistorySource
from edgefl.core.errors import NetworkError
from edgefl.history.plots.options import PLOT_KINDS
from edgefl.simulation.simulated_run import simulate

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
            "simulation": {"devices": 4, "profiles": ["pi-5", "pi-zero-2w"], "workers": 0},
        }
        simulate(config, root=root)
    return root


@pytest.fixture
def plot(run, simulated):
    return lambda *words: run("history", "plot", *words, "--dir", simulated)


@pytest.mark.extended
def test_every_kind_is_drawn_from_simulated_runs(plot, tmp_path):
    out = tmp_path / "sheet.svg"
    for kind in PLOT_KINDS:
        names = ["dsgd"] if kind in {"timeline", "disagreement"} else RUNS
        done = plot(kind, *(word for name in names for word in ("--run", name)), "--out", out)
        assert (done.code, done.out) == (0, f"{kind} of {', '.join(names)}: {out}\n"), done.err
        assert out.read_text().startswith("<?xml")
        out.unlink()


def test_the_options_choose_the_sheet_and_the_suffix_the_format_without_a_word_about_fonts(plot, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    png, pdf = tmp_path / "a.png", tmp_path / "a.pdf"
    assert plot("--run", "dsgd", "--x", "rounds", "--out", png).code == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    done = plot("timeline", "--run", "fedavg", "--rounds", "1:3", "--title", "mine", "--out", pdf)
    assert (done.code, done.err, caplog.messages) == (0, "", [])
    assert pdf.read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--out a.jpg", 2, "--out must end with .png, .pdf, .svg, got a.jpg"),
        ("--out none/a.png", 2, "none, which is no directory"),
        ("--out taken.png", 2, "taken.png cannot be written: Is a directory"),
        ("--out a.png --rounds 4:2", 2, "from the lower to the higher"),
        ("--out a.png --rounds 9:", 40, "run dsgd has rounds 1 to 4, none in 9:"),
        ("--out a.png --run nothing", 40, "no run 'nothing'"),
        ("--out a.png --url https://localhost:1", 2, "give one of them"),
        ("disagreement --run fedavg --out a.png", 40, "run fedavg has no disagreement"),
        ("staleness --x time --out a.png", 2, "--x chooses the axis of"),
        ("pie --out a.png", 2, "'pie' is not one of"),
    ],
)
def test_bad_input_is_told_with_an_exit_code_and_no_file_is_left(plot, tmp_path, monkeypatch, words, code, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.png").mkdir()
    ran = plot(*words.split())
    assert (ran.code, ran.out, message in ran.err) == (code, "", True), ran.err
    assert [path.name for path in tmp_path.glob("*.*")] == ["taken.png"]


def test_without_matplotlib_it_says_how_to_get_it(plot, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = plot("--out", tmp_path / "a.png")
    assert (ran.code, ran.is_one_line, "[plots]'" in ran.err) == (8, True, True), ran.err


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
    monkeypatch.setattr("edgefl.system.api_client.CoordinatorClient.from_options", lambda _url: Pages(1, 2, 3, 4, 5))
    source = ApiHistoryReader(HistorySource(directory=None, url="https://localhost:9443"))
    assert [row["round"] for row in source.read_rows("updates", run="r")] == [1, 2, 3, 4, 5]
    assert [row["round"] for row in source.read_rows("updates", run="r", limit=3)] == [3, 4, 5]
    with pytest.raises(NetworkError, match="answered without rows"):
        source.read_rows("rounds", run="r")


@pytest.mark.parametrize(
    ("task", "strategy", "config", "expected"),
    [
        ("digits", "fedavg", {"strategy": {"batch_size": 5}}, 5),
        ("digits", "fedavg", {}, 8),
        ("noop", "fedavg", {}, 64),
        ("this:Task", "fedavg", {}, None),
        ("digits", "this:Strategy", {}, None),
        ("digits", "fedavg", {"task": {"model": "no such model"}}, None),
    ],
)
def test_the_batch_size_is_the_run_file_s_else_the_task_s_and_nobody_s_code_is_imported_for_it(
    task, strategy, config, expected
):
    assert find_batch_size(task, strategy, config) == expected
    assert "this" not in sys.modules
