"""`edgefl simulate`: a table of rounds, a store to ask, and one line for what makes no sense."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable

import apart_strategy
import pytest

from edgefl.cli.main import main

RUN = '[run]\ntask = "digits"\nrounds = 2\n[task]\nmodel = "logistic"\n[simulation]\nprofiles = ["pi-5"]\n'


Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def edgefl(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.syspath_prepend(apart_strategy.TESTS)

    def call(*words):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["-q", *map(str, words)])
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(words, int(ended.value.code or 0), out, err)

    return call


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def test_it_prints_the_rounds_and_where_to_ask_for_more(edgefl, file, tmp_path):
    done = edgefl("simulate", file, "--devices", 3, "--profile", "pi-4", "--profile", "pi-zero-2w")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].split()[:4] == ["round", "num", "updates", "accuracy"]
    assert [line.split()[:2] for line in lines[2:4]] == [["1", "3"], ["2", "3"]]
    assert "virtual time:" in lines[4]
    query = lines[5].removeprefix("query it: edgefl ").split()
    asked = edgefl(*query, "--format", "json")
    assert len(json.loads(asked.stdout)["rows"]) == 2 * 3
    assert (tmp_path / "edgefl" / "simulations" / "edgefl.db").exists()


def test_json_has_the_rounds_in_full_and_nothing_else(edgefl, file, tmp_path):
    done = edgefl("simulate", file, "--dir", tmp_path / "d", "--seed", 3, "--format", "json")
    rows = json.loads(done.stdout)["rows"]
    assert [row["round"] for row in rows] == [1, 2]
    assert rows[1]["ended_s"] == pytest.approx(rows[0]["seconds"] + rows[1]["seconds"])


def test_without_training_there_is_no_accuracy(edgefl, file, tmp_path):
    words = ("simulate", file, "--devices", 200, "--bookkeeping-only", "--dir", tmp_path / "d", "--format", "json")
    done = edgefl(*words)
    rows = json.loads(done.stdout)["rows"]
    assert [row["num_updates"] for row in rows] == [200, 200]
    assert {row["accuracy"] for row in rows} == {None}


def test_faults_are_taken_from_a_script(edgefl, file, tmp_path):
    (tmp_path / "faults.toml").write_text('[[fault]]\ndevice = "device-01"\nat_s = 0\nkind = "kill"\n')
    words = ("simulate", file, "--devices", 3, "--dir", tmp_path / "d", "--format", "json")
    done = edgefl(*words, "--faults", tmp_path / "faults.toml")
    assert [row["num_updates"] for row in json.loads(done.stdout)["rows"]] == [2, 2]


def test_the_profiles_are_listed_with_their_sources(edgefl, tmp_path):
    table = edgefl("simulate", "--list-profiles").stdout
    assert all(
        name in table for name in ("pi-zero-2w", "pi-3b-plus", "pi-4", "pi-5", "jetson-nano", "jetson-orin-nano")
    )
    assert "estimated: speed" in table
    (tmp_path / "mine.toml").write_text('[profile.mine]\nspeed = 3\nsource.speed = "measured: by me"\n')
    words = ("simulate", "--list-profiles", "--profile", tmp_path / "mine.toml", "--format", "json")
    rows = {row["name"]: row for row in json.loads(edgefl(*words).stdout)["rows"]}
    assert rows["mine"]["source"] == {"speed": "measured: by me"}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "a simulation needs a run file"),
        (("none.toml",), 3, "none.toml: cannot be read"),
        (("run.toml", "--profile", "pi4"), 3, "no profile 'pi4': did you mean pi-4?"),
        (("run.toml", "--profile", "none.toml"), 3, "none.toml: cannot be read"),
        (("run.toml", "--scheme", "odd"), 3, "scheme must be one of"),
        (("run.toml", "--faults", "none.toml"), 3, "none.toml: cannot be read"),
        (("run.toml", "--devices", "9999"), 3, "devices must be 1 to"),
    ],
)
def test_what_makes_no_sense_is_one_line(edgefl, words, code, message, file, tmp_path):
    placed = [str(file) if word == "run.toml" else word for word in words]
    done = edgefl("simulate", *placed)
    assert done.returncode == code
    assert done.stdout == ""
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_nodes_of_a_run_that_has_them_are_shown_and_told_at_the_end(edgefl, file, tmp_path):
    file.write_text(f'{RUN}[strategy]\nname = "{apart_strategy.NAME}"\n')
    done = edgefl("simulate", file, "--devices", 2, "--scheme", "iid")
    assert done.returncode == 0, done.stderr
    _, heading, *_, last, words, _, _ = done.stdout.splitlines()
    names = "round num updates accuracy node accuracy worst node accuracy disagreement loss"
    assert " ".join(heading.split()).startswith(names)
    _, _, average, nodes, worst, disagreement = last.split()[:6]
    assert disagreement == "0.5"
    told = re.fullmatch(r"accuracy of the average model (\S+), of the nodes (\S+) \(worst (\S+)\)", words)
    assert told is not None
    assert [float(number) for number in told.groups()] == pytest.approx(
        [float(average), float(nodes), float(worst)], abs=1e-4
    )
    asked = edgefl("simulate", file, "--devices", 2, "--scheme", "iid", "--format", "json")
    assert json.loads(asked.stdout)["rows"][-1]["disagreement"] == 0.5
