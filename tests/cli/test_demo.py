"""`edgefl demo` as a user types it."""

import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def demo(folder, *words):
    """Runs it where the user has nothing but edgefl, and returns how it ended."""
    return subprocess.run(
        [sys.executable, "-m", "edgefl.cli.main", "demo", *words], capture_output=True, text=True, check=False,
        cwd=folder, env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(ROOT)}, timeout=100,
    )  # fmt: skip


def processes_of(folder):
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder) in path.read_bytes().decode(errors="replace"):
                yield path
        except OSError:
            continue


def rounds_in(out, num_updates=r"\d+"):
    return [line.split() for line in out.splitlines() if re.match(rf"\s+\d+\s+{num_updates} ", line)]


def test_a_whole_fleet_trains_tells_its_rounds_and_leaves_a_store_that_can_be_asked(command, tmp_path):
    done = demo(tmp_path, "--rounds", "6", "--devices", "2")
    assert done.returncode == 0, done.stderr
    rows = rounds_in(done.stdout, "2")
    assert [int(row[0]) for row in rows] == list(range(1, 7))
    assert float(rows[-1][2]) >= 0.8
    (path,) = re.findall(r"^database: (.+)$", done.stdout, re.MULTILINE)
    with closing(sqlite3.connect(path)) as store:
        assert store.execute("SELECT count(*) FROM updates WHERE outcome = 'used'").fetchone() == (6 * 2,)
        assert store.execute("SELECT count(DISTINCT device_id) FROM heartbeats").fetchone() == (3,)
    (line,) = re.findall(r"^query it: edgefl (.+)$", done.stdout, re.MULTILINE)
    assert len(command(*line.split()).out.splitlines()) == 1 + 6 * 2
    assert [path.name for path in tmp_path.iterdir()] == ["demo-run"], "the user's own settings are left alone"
    assert list(processes_of(tmp_path)) == []


def test_a_mistake_is_one_line_and_leaves_an_earlier_demo_alone(refused, tmp_path, monkeypatch):
    earlier = tmp_path / "demo-run" / "kept.txt"
    earlier.parent.mkdir()
    earlier.write_text("of an earlier demo")
    (earlier.parent / ".edgefl-demo").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EDGEFL_DATA", raising=False)
    refused(["demo", "--scheme", "nope"], 3, "scheme must be one of")
    refused(["demo", "--scheme", "natural"], 4, "who its examples come from")
    refused(["demo", "--task", "fashion-mnist", "--data", "no"], 4, "does not exist")
    refused(["demo", "--out", "/dev/null/demo"], 4, "/dev/null/demo cannot be written: Not a directory")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").touch()
    refused(["demo", "--out", "mine"], 2, "is not of an earlier demo")
    assert earlier.exists()


@pytest.mark.slow
def test_a_second_demo_replaces_the_first_and_shows_the_first_rounds_of_an_asynchronous_run(tmp_path):
    (tmp_path / "demo-run").mkdir()
    (tmp_path / "demo-run" / ".edgefl-demo").touch()
    (tmp_path / "demo-run" / "kept.txt").touch()
    done = demo(tmp_path, "--strategy", "asgd", "--rounds", "2", "--devices", "3")
    assert done.returncode == 0, done.stderr
    assert [int(row[0]) for row in rounds_in(done.stdout)][:2] == [1, 2]
    assert not (tmp_path / "demo-run" / "kept.txt").exists()
