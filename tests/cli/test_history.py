"""`edgefl history` on a real store: formats, filters, one-line errors, and while somebody writes."""

import csv
import io
import json
import sqlite3
from datetime import UTC, datetime

import pytest
from click.testing import CliRunner

from edgefl.cli.history import command, parse_time
from edgefl.cli.main import main
from edgefl.cli.render import human, human_bytes, print_pages, print_rows
from edgefl.errors import UsageError
from edgefl.storage import queries
from edgefl.storage.columns import COLUMNS, OF_NODES, columns_of
from edgefl.storage.records import EvaluationRow, UpdateRow
from edgefl.storage.store import Store
from edgefl.types import Outcome


@pytest.fixture
def directory(tmp_path):
    with Store.open(tmp_path / "edgefl.db") as store:
        for number, run_id in enumerate(("run-1", "run-2"), start=1):
            store.add_run(
                run_id=run_id,
                name="n",
                task="digits",
                strategy="fedavg",
                config={},
                seed=7,
                submitted_at=float(number),
            )
            store.open_round(run_id, 1, started_at=1000.0 * number)
            update = UpdateRow(
                assignment_id="a", device_id="pi-1", round=1, base_version=0, outcome=Outcome.USED,
                bytes_up=1_234_567, bytes_down=5, loss=0.25, num_examples=4, metrics={"grad": 1.5},
                received_at=1000.0 * number,
            )  # fmt: skip
            store.record_updates(run_id, [update])
            evaluated = EvaluationRow(
                assignment_id="e", round=1, version=1, device_id="pi-1", source="device", loss=0.5, accuracy=0.875,
                num_examples=8, at=1001.0 * number,
            )  # fmt: skip
            store.record_evaluations(run_id, [evaluated])
            store.close_round(run_id, 1, version=1, closed_at=1000.0 * number + 2)
        store.record_event("note", "line one\nline two \x1b[31m", at=1.0, data={"k": [1]})
    return tmp_path


@pytest.fixture
def ask(directory):
    def run(*arguments, where=None):
        return CliRunner(mix_stderr=False).invoke(
            command, [*arguments, "--dir", str(where or directory)], catch_exceptions=False
        )

    return run


def test_json_agrees_with_sql_and_names_version_and_kind(ask, directory):
    answer = json.loads(ask("updates", "--format", "json").stdout)
    assert (answer["v"], answer["kind"]) == (1, "updates")
    with sqlite3.connect(directory / "edgefl.db") as raw:
        raw.row_factory = sqlite3.Row
        expected = [dict(row) for row in raw.execute("SELECT * FROM updates ORDER BY id")]
    raw.close()
    for row in expected:
        row["metrics"] = json.loads(row["metrics"])
    assert answer["rows"] == [{name: row[name] for name in COLUMNS["updates"]} for row in expected]


@pytest.mark.parametrize("kind", sorted(COLUMNS))
def test_csv_has_the_columns_of_json(ask, kind):
    lines = list(csv.DictReader(io.StringIO(ask(kind, "--format", "csv").stdout)))
    rows = json.loads(ask(kind, "--format", "json").stdout)["rows"]
    assert len(lines) == len(rows)
    assert all(tuple(line) == tuple(row) for line, row in zip(lines, rows, strict=True))
    assert all(list(row) == [name for name in columns_of(kind, "device") if name not in OF_NODES] for row in rows)


def test_a_table_away_from_a_terminal_is_aligned_and_has_units(ask):
    heading, *lines = ask("rounds").stdout.splitlines()
    assert heading.split()[:3] == ["run", "id", "round"]
    assert len(lines) == 2
    assert "1.23 MB" in lines[0]
    assert "0.875" in lines[0]
    assert "device" in lines[0]
    assert lines[0].index("1.23 MB") + len("1.23 MB") == heading.index("bytes up") + len("bytes up")


def test_what_devices_say_cannot_break_the_table_or_colour_the_terminal(ask):
    _, *lines = ask("events").stdout.splitlines()
    assert len(lines) == 1
    assert "\x1b" not in lines[0]


@pytest.mark.parametrize(
    ("arguments", "runs"),
    [
        ((), ["run-1", "run-2"]),
        (("--run", "latest"), ["run-2"]),
        (("--run", "run-1"), ["run-1"]),
        (("--since", "1970-01-01T00:33"), ["run-2"]),
        (("--until", "1970-01-01T00:33"), ["run-1"]),
        (("--since", "1h"), []),
        (("--limit", "1"), ["run-2"]),
        (("--device", "pi-1"), ["run-1", "run-2"]),
        (("--device", "pi-2"), []),
    ],
)
def test_options_choose_rows(ask, arguments, runs):
    answer = json.loads(ask("rounds", *arguments, "--format", "json").stdout)
    assert [row["run_id"] for row in answer["rows"]] == runs


def test_reads_while_somebody_writes(ask, directory):
    with Store.open(directory / "edgefl.db") as store, store.batch():
        store.record_event("note", "not yet", at=2.0)
        assert len(json.loads(ask("events", "--format", "json").stdout)["rows"]) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["rounds", "--run", "nothing"], 40, "no run"),
        (["rounds", "--since", "yesterday"], 2, "a time is an age"),
        (["rounds", "--url", "https://localhost:1"], 2, "give one of them"),
        (["rounds", "--limit", "0"], 2, "0 is not in the range"),
        (["nonsense"], 2, "No such command"),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(directory, capsys, arguments, code, words):
    where = [] if arguments == ["nonsense"] else ["--dir", str(directory)]
    with pytest.raises(SystemExit) as end:
        main(["history", *arguments, *where])
    assert end.value.code == code
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert "Traceback" not in err


def test_a_directory_without_a_store_is_one_line_and_stays_empty(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["history", "rounds", "--dir", str(tmp_path)])
    assert end.value.code == 10
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_without_options_and_operator_file_the_default_directory_is_read(directory, monkeypatch, capsys):
    home = directory / "home"
    default = home / ".local/share/edgefl/coordinator"
    default.parent.mkdir(parents=True)
    default.symlink_to(directory)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("EDGEFL_URL", raising=False)
    with pytest.raises(SystemExit) as end:
        main(["history", "rounds", "--format", "csv"])
    assert end.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_programs_get_every_row_and_a_table_says_that_it_was_cut(ask, directory):
    with Store.open(directory / "edgefl.db") as store, store.batch():
        for number in range(150):
            store.record_event("note", f"event {number}", at=10.0 + number)
    assert len(json.loads(ask("events", "--format", "json").stdout)["rows"]) == 151
    assert len(list(csv.DictReader(io.StringIO(ask("events", "--format", "csv").stdout)))) == 151
    assert len(json.loads(ask("events", "--format", "json", "--limit", "7").stdout)["rows"]) == 7
    table = ask("events")
    assert len(table.stdout.splitlines()) == 101
    assert "event 149" in table.stdout.splitlines()[-1]
    assert table.stderr == "only the newest 100 rows are shown; --limit N shows more\n"
    assert ask("events", "--limit", "151").stderr == ""


def test_ages_and_dates_are_times():
    assert parse_time("2h", now=10_000.0) == 2800.0
    assert parse_time("1.5m", now=100.0) == 10.0
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
    assert human(name, value) == text


def test_sizes_change_their_unit_before_they_need_four_digits():
    assert [human_bytes(n) for n in (999, 1000, 999_400, 999_600, 10**9)] == [
        "999 B",
        "1 kB",
        "999 kB",
        "1 MB",
        "1 GB",
    ]


def test_a_table_of_nothing_still_has_its_heading(capsys):
    print_rows([], ("round", "loss"), title="Rounds")
    assert capsys.readouterr().out == "Rounds\nround  loss\n"


HEADING = "run id round version closed at num devices num updates train loss loss accuracy source"
NODE_FIGURES = {"node_accuracy": 0.5, "worst_node_accuracy": 0.0}


@pytest.fixture
def with_nodes(directory):
    """The second run's devices have models of their own."""
    with Store.open(directory / "edgefl.db") as store:
        facts = {"disagreement": 0.0625, "spread": 2.0}
        store.set_round_figures("run-2", 1, {**NODE_FIGURES, "facts": facts})
        own = EvaluationRow(
            assignment_id="e:pi-1", round=1, version=1, device_id="pi-1", source="device", loss=9.0, accuracy=0.0,
            num_examples=8, at=2003.0, subject="pi-1",
        )  # fmt: skip
        store.record_evaluations("run-2", [own])


def test_a_table_of_runs_without_nodes_looks_as_it_always_did(ask, with_nodes):
    heading, _ = ask("rounds", "--run", "run-1").stdout.splitlines()
    assert " ".join(heading.split()) == f"{HEADING} bytes up bytes down"
    assert "subject" not in ask("evaluations", "--run", "run-1").stdout


def test_rounds_show_the_nodes_where_a_run_has_them(ask, with_nodes):
    heading, row = ask("rounds", "--run", "run-2").stdout.splitlines()
    names = "node accuracy worst node accuracy disagreement"
    assert " ".join(heading.split()) == f"{HEADING} {names} bytes up bytes down"
    assert row.split()[-9:] == ["0.875", "device", "0.5", "0", "0.0625", "1.23", "MB", "5", "B"]
    both = json.loads(ask("rounds", "--format", "json").stdout)["rows"]
    added = {name: [row[name] for row in both] for name in both[0] if name in OF_NODES}
    assert added == {
        "node_accuracy": [None, 0.5],
        "worst_node_accuracy": [None, 0.0],
        "facts": [None, {"disagreement": 0.0625, "spread": 2.0}],
        "disagreement": [None, 0.0625],
    }
    (line,) = csv.DictReader(io.StringIO(ask("rounds", "--run", "run-2", "--format", "csv").stdout))
    assert (line["accuracy"], line["node_accuracy"], line["disagreement"]) == ("0.875", "0.5", "0.0625")
    assert json.loads(line["facts"])["spread"] == 2.0


def test_evaluations_name_whose_model_they_are_of_where_there_are_several(ask, with_nodes):
    rows = json.loads(ask("evaluations", "--run", "run-2", "--format", "json").stdout)["rows"]
    assert [(row["accuracy"], row["subject"]) for row in rows] == [(0.875, ""), (0.0, "pi-1")]
    assert "subject" in ask("evaluations", "--run", "run-2").stdout.splitlines()[0]


def test_a_condition_chooses_rows_and_a_bad_one_is_one_line(ask, directory, capsys):
    answer = json.loads(ask("updates", "--where", "loss<1", "--where", "run_id=run-2", "--format", "json").stdout)
    assert [row["run_id"] for row in answer["rows"]] == ["run-2"]
    with pytest.raises(SystemExit) as end:
        main(["history", "updates", "--where", "nonsense=1", "--dir", str(directory)])
    assert end.value.code == 2
    assert "cannot be chosen by 'nonsense'; they have run_id, round" in capsys.readouterr().err


@pytest.mark.parametrize(("by", "keys"), [("device", ["pi-1"]), ("day", ["1970-01-01"]), ("run", ["run-1", "run-2"])])
def test_sums_are_by_what_is_asked_for(ask, by, keys):
    rows = json.loads(ask("traffic", "--by", by, "--format", "json").stdout)["rows"]
    assert [next(iter(row.values())) for row in rows] == keys
    assert sum(row["bytes_up"] for row in rows) == 2 * 1_234_567
    table = ask("traffic", "--by", by).stdout.splitlines()
    assert table[0].split("  ")[0] == {"device": "device id", "day": "day", "run": "run id"}[by]
    assert len(table) == 1 + len(keys)


def test_why_is_a_sentence_or_facts(ask):
    sentence = ask("why", "run-2", "1").stdout
    assert sentence.startswith(("Round 1 took 2.0 s", "Round 1 waited"))
    told = json.loads(ask("why", "latest", "1", "--format", "json").stdout)
    assert (told["v"], told["run_id"], told["round"], told["sentence"]) == (1, "run-2", 1, sentence.rstrip("\n"))
    assert ask("why", "run-2").stdout == sentence, "of the round that took longest"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["why", "nothing", "1"], 40, "no run 'nothing'"),
        (["why", "run-1", "9"], 40, "has no round 9"),
        (["why", "run-1", "first"], 2, "not a valid integer"),
        (["accuracy", "--device", "pi-1"], 2, "the accuracy is the model's"),
        (["traffic", "--by", "week"], 2, "is not one of"),
    ],
)
def test_questions_that_make_no_sense_are_one_line_and_an_exit_code(directory, capsys, arguments, code, words):
    with pytest.raises(SystemExit) as end:
        main(["history", *arguments, "--dir", str(directory)])
    assert end.value.code == code
    assert words in capsys.readouterr().err


def test_export_writes_a_folder_and_says_how_many_runs(ask, directory):
    out = directory / "files"
    assert ask("export", str(out)).stdout == f"wrote 2 runs to {out}\n"
    assert (out / "run-1/devices/pi-1.csv").is_file()
    assert ask("export", str(out), "--run", "latest", "--force").stdout == f"wrote 1 run to {out}\n"


def test_a_history_of_many_pages_is_printed_whole_and_in_order(ask, directory, monkeypatch):
    monkeypatch.setattr(queries, "PAGE_ROWS", 7)
    with Store.open(directory / "edgefl.db") as store, store.batch():
        for number in range(20):
            store.record_event("note", f"event {number}", at=10.0 + number // 3)
    rows = json.loads(ask("events", "--format", "json").stdout)["rows"]
    assert [row["message"] for row in rows[1:]] == [f"event {number}" for number in range(20)]
    lines = list(csv.DictReader(io.StringIO(ask("events", "--format", "csv").stdout)))
    assert [line["message"] for line in lines[1:]] == [f"event {number}" for number in range(20)]


@pytest.mark.parametrize("rows", [[], [{"a": 1}], [{"a": 1, "b": [{"c": "\u00e9"}]}, {"a": None, "b": {}}]])
def test_json_that_is_printed_as_it_comes_is_the_json_of_all_at_once(capsys, rows):
    print_rows(rows, ("a", "b"), "json", kind="k")
    at_once = capsys.readouterr().out
    print_pages([rows[:1], rows[1:]], ("a", "b"), "json", kind="k")
    assert capsys.readouterr().out == at_once
