"""`edgefl history` on real stores and simulated runs: formats, filters, errors, figures, and while somebody writes.

For a coordinator that runs see test_live_fleet.py.
"""

import csv
import io
import json
import logging
import sqlite3
import sys
from contextlib import closing
from datetime import UTC, datetime

import pytest

from edgefl.cli.history import parse_time
from edgefl.cli.output import format_bytes, format_value, print_pages, print_rows
from edgefl.client.sources import ApiSource, find_batch_size
from edgefl.core.errors import NetworkError, UsageError
from edgefl.core.types import UpdateStatus
from edgefl.history import PLOT_KINDS
from edgefl.simulation.simulated_run import simulate
from edgefl.storage.queries import history
from edgefl.storage.queries.columns import COLUMNS, DEVICE_MODEL_COLUMNS, get_columns
from edgefl.storage.repositories.records import EvaluationRow, UpdateRow
from edgefl.storage.store import Store


def evaluation(key, accuracy, at, subject=""):
    return EvaluationRow(assignment_id=key, round=1, version=1, device_id="pi-1", source="device", loss=0.5,
                         accuracy=accuracy, num_examples=8, at=at, subject=subject)  # fmt: skip


@pytest.fixture
def directory(tmp_path):
    with Store.open(tmp_path / "edgefl.db") as store:
        for number, run_id in enumerate(("run-1", "run-2"), start=1):
            facts = {"name": "n", "task": "digits", "strategy": "fedavg", "config": {}, "seed": 7}
            store.add_run(run_id=run_id, submitted_at=float(number), **facts)
            store.open_round(run_id, 1, started_at=1000.0 * number)
            update = UpdateRow(
                assignment_id="a", device_id="pi-1", round=1, base_version=0, outcome=UpdateStatus.USED,
                bytes_up=1_234_567, bytes_down=5, loss=0.25, num_examples=4, metrics={"grad": 1.5},
                received_at=1000.0 * number,
            )  # fmt: skip
            store.record_updates(run_id, [update])
            store.record_evaluations(run_id, [evaluation("e", 0.875, 1001.0 * number)])
            store.close_round(run_id, 1, version=1, closed_at=1000.0 * number + 2)
        store.record_event("note", "line one\nline two \x1b[31m", at=1.0, data={"k": [1]})
    return tmp_path


@pytest.fixture
def ask(run, directory):
    return lambda *words: run("history", *words, "--dir", directory)


@pytest.fixture
def rows(ask):
    return lambda *words: ask(*words, "--format", "json").rows


@pytest.fixture
def lines(ask):
    return lambda *words: list(csv.DictReader(io.StringIO(ask(*words, "--format", "csv").out)))


@pytest.fixture
def events(directory):
    """Writes so many events more, several at the same time."""

    def write(number):
        with Store.open(directory / "edgefl.db") as store, store.batch():
            for each in range(number):
                store.record_event("note", f"event {each}", at=10.0 + each // 3)
        return [f"event {each}" for each in range(number)]

    return write


def test_json_agrees_with_sql_and_names_version_and_kind(ask, directory):
    answer = json.loads(ask("updates", "--format", "json").out)
    assert (answer["v"], answer["kind"]) == (1, "updates")
    with closing(sqlite3.connect(directory / "edgefl.db")) as raw:
        raw.row_factory = sqlite3.Row
        expected = [dict(row) for row in raw.execute("SELECT * FROM updates ORDER BY id")]
    for row in expected:
        row["metrics"] = json.loads(row["metrics"])
    assert answer["rows"] == [{name: row[name] for name in COLUMNS["updates"]} for row in expected]


def test_every_kind_has_the_same_columns_as_csv_and_as_json(rows, lines):
    for kind in COLUMNS:
        found = rows(kind)
        assert [tuple(line) for line in lines(kind)] == [tuple(row) for row in found], kind
        assert all(
            list(row) == [name for name in get_columns(kind, "device") if name not in DEVICE_MODEL_COLUMNS]
            for row in found
        )


def test_a_table_away_from_a_terminal_is_aligned_has_units_and_is_not_broken_by_what_devices_say(ask):
    heading, *lines = ask("rounds").out.splitlines()
    assert heading.split()[:3] == ["run", "id", "round"]
    assert len(lines) == 2
    assert all(word in lines[0] for word in ("1.23 MB", "0.875", "device"))
    assert lines[0].index("1.23 MB") + len("1.23 MB") == heading.index("bytes up") + len("bytes up")
    _, line = ask("events").out.splitlines()
    assert "\x1b" not in line


@pytest.mark.parametrize(
    ("arguments", "runs"),
    [
        ("", ["run-1", "run-2"]),
        ("--run latest", ["run-2"]),
        ("--run run-1", ["run-1"]),
        ("--since 1970-01-01T00:33", ["run-2"]),
        ("--until 1970-01-01T00:33", ["run-1"]),
        ("--since 1h", []),
        ("--limit 1", ["run-2"]),
        ("--device pi-1", ["run-1", "run-2"]),
        ("--device pi-2", []),
        ("--where accuracy<1 --where run_id=run-2", ["run-2"]),
    ],
)
def test_options_choose_rows(rows, arguments, runs):
    assert [row["run_id"] for row in rows("rounds", *arguments.split())] == runs


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("rounds --run nothing", 40, "no run"),
        ("rounds --since yesterday", 2, "a time is an age"),
        ("rounds --url https://localhost:1", 2, "give one of them"),
        ("rounds --limit 0", 2, "0 is not in the range"),
        ("nonsense", 2, "there is no command 'nonsense': see edgefl history --help"),
        ("updates --where nonsense=1", 2, "cannot be chosen by 'nonsense'; they have run_id, round"),
        ("why nothing 1", 40, "no run 'nothing'"),
        ("why run-1 9", 40, "has no round 9"),
        ("why run-1 first", 2, "not a valid integer"),
        ("accuracy --device pi-1", 2, "the accuracy is the model's"),
        ("traffic --by week", 2, "is not one of"),
    ],
)
def test_what_makes_no_sense_is_told_with_an_exit_code(ask, arguments, code, words):
    ran = ask(*arguments.split())
    assert (ran.code, ran.out, words in ran.err) == (code, "", True), ran.err


def test_it_reads_while_somebody_writes_and_of_a_folder_without_a_store_it_makes_none(
    rows, directory, refused, tmp_path_factory
):
    with Store.open(directory / "edgefl.db") as store, store.batch():
        store.record_event("note", "not yet", at=2.0)
        assert len(rows("events")) == 1
    empty = tmp_path_factory.mktemp("empty")
    refused(["history", "rounds", "--dir", empty], 10, str(empty))
    assert list(empty.iterdir()) == []


def test_without_options_and_operator_file_the_default_directory_is_read(run, directory):
    default = directory / "data" / "edgefl" / "coordinator"
    default.parent.mkdir(parents=True)
    default.symlink_to(directory)
    assert len(run("history", "rounds", "--format", "csv").out.splitlines()) == 3


def test_programs_get_every_row_in_order_and_a_table_says_that_it_was_cut(ask, rows, lines, events, monkeypatch):
    monkeypatch.setattr(history, "PAGE_ROWS", 40)
    messages = events(150)
    assert [row["message"] for row in rows("events")[1:]] == messages
    assert [line["message"] for line in lines("events")[1:]] == messages
    assert len(rows("events", "--limit", "7")) == 7
    table = ask("events")
    assert len(table.out.splitlines()) == 101
    assert "event 149" in table.out.splitlines()[-1]
    assert "newest 100 rows" in table.err
    assert ask("events", "--limit", "151").err == ""


def test_ages_and_dates_are_times():
    assert [parse_time("2h", now=10_000.0), parse_time("1.5m", now=100.0)] == [2800.0, 10.0]
    assert parse_time("2026-01-31T18:00", now=0.0) == datetime(2026, 1, 31, 18, tzinfo=UTC).timestamp()
    assert parse_time("2026-01-31T18:00+02:00", now=0.0) == datetime(2026, 1, 31, 16, tzinfo=UTC).timestamp()
    for text in ("", "2", "h", "-2h", "soon"):
        with pytest.raises(UsageError, match="a time is an age"):
            parse_time(text, now=0.0)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("loss", None, "-"),
        ("loss", 0.123456, "0.1235"),
        ("received_at", 0.0, "1970-01-01 00:00:00"),
        ("memory_bytes", 999, "999 B"),
        ("bytes_up", 1_000_000, "1 MB"),
        ("groups", ["a", "b"], "a, b"),
        ("examples", {"digits": 3}, "digits=3"),
        ("ok", True, "yes"),
        ("round", 12, "12"),
    ],
)
def test_a_person_reads_units(name, value, text):
    assert format_value(name, value) == text


def test_sizes_change_their_unit_before_they_need_four_digits():
    shown = [format_bytes(size) for size in (999, 1000, 999_400, 999_600, 10**9)]
    assert shown == ["999 B", "1 kB", "999 kB", "1 MB", "1 GB"]


def test_a_table_of_nothing_still_has_its_heading(capsys):
    print_rows([], ("round", "loss"), title="Rounds")
    assert capsys.readouterr().out == "Rounds\nround  loss\n"


@pytest.mark.parametrize("rows", [[], [{"a": 1}], [{"a": 1, "b": [{"c": "\u00e9"}]}, {"a": None, "b": {}}]])
def test_json_that_is_printed_as_it_comes_is_the_json_of_all_at_once(capsys, rows):
    print_rows(rows, ("a", "b"), "json", kind="k")
    at_once = capsys.readouterr().out
    print_pages([rows[:1], rows[1:]], ("a", "b"), "json", kind="k")
    assert capsys.readouterr().out == at_once


def test_only_runs_whose_devices_have_models_of_their_own_have_columns_for_them(ask, rows, lines, directory):
    with Store.open(directory / "edgefl.db") as store:
        facts = {"disagreement": 0.0625, "spread": 2.0}
        store.set_round_metrics("run-2", 1, {"node_accuracy": 0.5, "worst_node_accuracy": 0.0, "facts": facts})
        store.record_evaluations("run-2", [evaluation("e:pi-1", 0.0, 2003.0, "pi-1")])
    plain, (heading, line) = (ask("rounds", "--run", run).out.splitlines() for run in ("run-1", "run-2"))
    assert {"accuracy", "node", "disagreement"} - set(plain[0].split()) == {"node", "disagreement"}
    assert "node accuracy  worst node accuracy  disagreement  bytes up" in heading
    assert line.split()[-9:] == ["0.875", "device", "0.5", "0", "0.0625", "1.23", "MB", "5", "B"]
    assert [{name: row[name] for name in row if name in DEVICE_MODEL_COLUMNS} for row in rows("rounds")] == [
        {"node_accuracy": None, "worst_node_accuracy": None, "facts": None, "disagreement": None},
        {"node_accuracy": 0.5, "worst_node_accuracy": 0.0, "facts": facts, "disagreement": 0.0625},
    ]
    (line,) = lines("rounds", "--run", "run-2")
    assert (line["node_accuracy"], line["disagreement"], json.loads(line["facts"])) == ("0.5", "0.0625", facts)
    found = rows("evaluations", "--run", "run-2")
    assert [(row["accuracy"], row["subject"]) for row in found] == [(0.875, ""), (0.0, "pi-1")]
    headings = [ask("evaluations", "--run", run).out.splitlines()[0] for run in ("run-1", "run-2")]
    assert ["subject" in heading for heading in headings] == [False, True]


@pytest.mark.parametrize(("by", "keys"), [("device", ["pi-1"]), ("day", ["1970-01-01"]), ("run", ["run-1", "run-2"])])
def test_sums_are_by_what_is_asked_for(ask, rows, by, keys):
    found = rows("traffic", "--by", by)
    assert [next(iter(row.values())) for row in found] == keys
    assert sum(row["bytes_up"] for row in found) == 2 * 1_234_567
    table = ask("traffic", "--by", by).out.splitlines()
    assert table[0].split("  ")[0] == {"device": "device id", "day": "day", "run": "run id"}[by]
    assert len(table) == 1 + len(keys)


def test_why_is_a_sentence_or_facts(ask):
    sentence = ask("why", "run-2", "1").out
    assert sentence.startswith(("Round 1 took 2.0 s", "Round 1 waited"))
    told = json.loads(ask("why", "latest", "1", "--format", "json").out)
    assert (told["v"], told["run_id"], told["round"], told["sentence"]) == (1, "run-2", 1, sentence.rstrip("\n"))
    assert ask("why", "run-2").out == f"The longest round of {told['run_name']}. {sentence}"


def test_export_writes_a_folder_and_says_how_many_runs(ask, directory):
    out = directory / "files"
    assert ask("export", out).out == f"wrote 2 runs to {out}\n"
    assert (out / "run-1/devices/pi-1.csv").is_file()
    assert ask("export", out, "--run", "latest", "--force").out == f"wrote 1 run to {out}\n"


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
    svg = tmp_path / "a.svg"
    assert plot("accuracy", "--run", "dsgd", "--reference", "fedavg", "--out", svg).code == 0
    assert svg.read_text().count(' reference"') == 3


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
        if given.get("limit") is not None:
            return {"rows": [{"round": number} for number in self.numbers[-given["limit"] :]]}
        begin = int(given["after"] or 0)
        behind = begin + 2
        rows = [{"round": number} for number in self.numbers[begin:behind]]
        return {"rows": rows, "next": str(behind) if behind < len(self.numbers) else None}


def test_a_coordinator_that_gives_pages_is_asked_until_the_last(monkeypatch):
    monkeypatch.setattr("edgefl.system.api_client.CoordinatorClient.from_options", lambda _url: Pages(1, 2, 3, 4, 5))
    source = ApiSource("https://localhost:9443")
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
