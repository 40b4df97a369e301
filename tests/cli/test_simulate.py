"""`edgefl simulate`: a table of rounds, a store to ask, and one line for what makes no sense."""

import re

import apart_strategy
import pytest

RUN = (
    '[run]\ntask = "digits"\nrounds = 2\n[task]\nmodel = "logistic"\n[simulation]\nprofiles = ["pi-5"]\nworkers = 0\n'
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


@pytest.fixture
def simulate(run, file, tmp_path):
    """The rows of a simulation of the run file."""
    return lambda *words: run("simulate", file, "--dir", tmp_path / "d", *words, "--format", "json").rows


def test_it_prints_the_rounds_and_where_to_ask_for_more(run, file, tmp_path):
    done = run("simulate", file, "--devices", 3, "--profile", "pi-4", "--profile", "pi-zero-2w")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[1].split()[:4] == ["round", "num", "updates", "accuracy"]
    assert [line.split()[:2] for line in lines[2:4]] == [["1", "3"], ["2", "3"]]
    assert "virtual time:" in lines[4]
    assert len(run(*lines[5].removeprefix("query it: edgefl ").split(), "--format", "json").rows) == 2 * 3
    assert (tmp_path / "data" / "edgefl" / "simulations" / "edgefl.db").exists()


def test_options_replace_what_the_run_file_says_and_json_has_the_rounds_in_full(simulate, tmp_path):
    rows = simulate("--seed", 3)
    assert [row["round"] for row in rows] == [1, 2]
    assert rows[1]["ended_s"] == pytest.approx(rows[0]["seconds"] + rows[1]["seconds"])
    rows = simulate("--devices", 200, "--bookkeeping-only")
    assert [(row["num_updates"], row["accuracy"]) for row in rows] == [(200, None)] * 2
    (tmp_path / "faults.toml").write_text('[[fault]]\ndevice = "device-01"\nat_s = 0\nkind = "kill"\n')
    assert [row["num_updates"] for row in simulate("--devices", 3, "--faults", tmp_path / "faults.toml")] == [2, 2]


def test_the_profiles_are_listed_with_their_sources(run, tmp_path):
    table = run("simulate", "--list-profiles").out
    names = ("pi-zero-2w", "pi-3b-plus", "pi-4", "pi-5", "jetson-nano", "jetson-orin-nano", "estimated: speed")
    assert all(name in table for name in names)
    (tmp_path / "mine.toml").write_text('[profile.mine]\nspeed = 3\nsource.speed = "measured: by me"\n')
    rows = run("simulate", "--list-profiles", "--profile", tmp_path / "mine.toml", "--format", "json").rows
    assert {row["name"]: row["source"] for row in rows}["mine"] == {"speed": "measured: by me"}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("", 2, "a simulation needs a run file"),
        ("none.toml", 3, "none.toml: cannot be read"),
        ("{file} --profile pi4", 3, "no profile 'pi4': did you mean pi-4?"),
        ("{file} --profile none.toml", 3, "none.toml: cannot be read"),
        ("{file} --scheme odd", 3, "scheme must be one of"),
        ("{file} --faults none.toml", 3, "none.toml: cannot be read"),
        ("{file} --devices 9999", 3, "devices must be 1 to"),
    ],
)
def test_what_makes_no_sense_is_one_line(refused, file, words, code, message):
    refused(["simulate", *words.format(file=file).split()], code, message)


def test_the_nodes_of_a_run_that_has_them_are_shown_and_told_at_the_end(run, simulate, file, monkeypatch):
    monkeypatch.syspath_prepend(apart_strategy.TESTS)
    file.write_text(f'{RUN}[strategy]\nname = "{apart_strategy.NAME}"\n')
    done = run("simulate", file, "--devices", 2, "--scheme", "iid")
    assert done.code == 0, done.err
    _, heading, *_, last, words, _, _ = done.out.splitlines()
    names = "round num updates accuracy node accuracy worst node accuracy disagreement loss"
    assert " ".join(heading.split()).startswith(names)
    shown = last.split()[2:6]
    told = re.fullmatch(r"accuracy of the average model (\S+), of the nodes (\S+) \(worst (\S+)\)", words)
    assert [*map(float, told.groups()), 0.5] == pytest.approx([*map(float, shown)], abs=1e-4)
    assert simulate("--devices", 2, "--scheme", "iid")[-1]["disagreement"] == 0.5
