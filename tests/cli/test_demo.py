"""`edgefl demo` as a user types it."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class Demo:
    folder: Path
    done: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return Demo(folder, _demo(folder, "--rounds", "12"))


def _demo(folder, *words):
    return subprocess.run(
        [sys.executable, "-m", "edgefl.cli.main", "demo", *words],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_it_ends_well_with_a_row_for_every_round(demo):
    assert demo.done.returncode == 0, demo.done.stderr
    rows = [line.split() for line in demo.done.stdout.splitlines() if re.match(r"\s+\d+\s+4 ", line)]
    assert [int(row[0]) for row in rows] == list(range(1, 13))
    assert float(rows[-1][2]) >= 0.9


def test_it_says_where_the_database_is(demo):
    (path,) = re.findall(r"^database: (.+)$", demo.done.stdout, re.MULTILINE)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT count(*) FROM updates WHERE outcome = 'used'").fetchone() == (12 * 4,)
    assert connection.execute("SELECT count(DISTINCT device_id) FROM heartbeats").fetchone() == (5,)
    connection.close()


def test_the_line_to_query_it_with_works(demo):
    (line,) = re.findall(r"^query it: edgefl (.+)$", demo.done.stdout, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-m", "edgefl.cli.main", *line.split()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1 + 12 * 4


def test_it_leaves_the_users_own_settings_alone(demo):
    assert sorted(path.name for path in demo.folder.iterdir()) == ["demo-run"]


def test_it_leaves_no_process_behind(demo):
    found = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(demo.folder) in _text(path)]
    assert not found


def _text(path):
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


@pytest.mark.slow
def test_a_second_demo_replaces_the_first(demo):
    done = _demo(demo.folder, "--rounds", "1", "--devices", "1", "--scheme", "iid", "--broker", "embedded")
    assert done.returncode == 0, done.stderr
    connection = sqlite3.connect(demo.folder / "demo-run" / "coordinator" / "edgefl.db")
    assert connection.execute("SELECT count(*) FROM updates").fetchone() == (1,)
    connection.close()


def test_a_mistake_leaves_the_earlier_demo_alone(tmp_path):
    earlier = tmp_path / "demo-run" / "kept.txt"
    earlier.parent.mkdir()
    earlier.write_text("of an earlier demo")
    (earlier.parent / ".edgefl-demo").touch()
    mistakes = (
        (["--scheme", "nope"], 3),
        (["--scheme", "natural"], 4),
        (["--task", "fashion-mnist", "--data", "no"], 4),
    )
    for words, code in mistakes:
        done = _demo(tmp_path, *words)
        assert done.returncode == code
        assert len(done.stderr.splitlines()) == 1
        assert earlier.exists()


def test_a_folder_that_cannot_be_made_is_said_in_one_line(tmp_path):
    done = _demo(tmp_path, "--out", "/dev/null/demo")
    assert done.returncode == 4
    assert done.stderr == "edgefl: /dev/null/demo cannot be written: Not a directory\n"


@pytest.mark.slow
def test_the_last_rounds_of_an_asynchronous_demo_do_not_push_out_the_first(tmp_path):
    done = _demo(tmp_path, "--strategy", "asgd", "--rounds", "2", "--devices", "3", "--broker", "embedded")
    assert done.returncode == 0, done.stderr
    rounds = [int(line.split()[0]) for line in done.stdout.splitlines() if re.match(r"\s+\d+\s+\d+ ", line)]
    assert rounds[:2] == [1, 2]
