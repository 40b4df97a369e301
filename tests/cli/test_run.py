"""`edgefl export flower-app`, and the lines of a run that is watched."""

import tomllib

import pytest

from edgefl.cli.run import RunProgressBar
from edgefl.core.config import load_run

RUN = '[run]\ntask = "digits"\nrounds = 4\n[strategy]\nname = "fedavg"\nlearning_rate = 0.5\n'


@pytest.fixture
def run_file(tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path / "run.toml"


@pytest.mark.parametrize(("words", "scheme"), [([], "dirichlet:0.5"), (["--scheme", "iid"], "iid")])
def test_the_app_is_written_and_its_files_are_named(run, run_file, tmp_path, words, scheme):
    ran = run("export", "flower-app", run_file, "--out", tmp_path / "app", *words)
    assert ran.code == 0, ran.err
    app = tmp_path / "app"
    written = [path for path in app.rglob("*") if path.is_file() and app / "edgefl" not in path.parents]
    assert sorted(ran.out.splitlines()) == sorted(map(str, [*written, app / "edgefl"]))
    assert load_run(tmp_path / "app" / "edgefl_app" / "run.toml") == load_run(run_file)
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert project["tool"]["flwr"]["app"]["config"]["scheme"] == scheme


@pytest.mark.parametrize(
    ("text", "scheme", "code", "told"),
    [
        (RUN, "by-colour", 3, "by-colour"),
        (RUN.replace("fedavg", "fedavgg"), "iid", 6, "unknown strategy 'fedavgg'"),
        (RUN.replace("digits", "digitz"), "iid", 5, "digitz"),
        (RUN.replace("rounds", "round"), "iid", 3, "did you mean run.rounds?"),
        (f"{RUN}\n[conditions]\nmains = true\n", "iid", 3, "conditions: nodes of a Flower app know none"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_leaves_nothing(refused, run_file, text, scheme, code, told):
    run_file.write_text(text)
    app = run_file.with_name("app")
    refused(["export", "flower-app", run_file, "--out", app, "--scheme", scheme], code, told)
    assert not app.exists()


def test_a_folder_that_is_in_use_is_refused(refused, run_file, tmp_path):
    refused(["export", "flower-app", run_file, "--out", tmp_path], 2, "exists and is not an empty folder")


def test_watching_says_at_once_that_a_run_diverges(capsys):
    row = {"name": "first", "status": "running", "rounds": 3, "accuracy": 0.1, "config": {"run": {"rounds": 10}}}
    with RunProgressBar() as progress:
        for reason in (None, None, "round 4: the training loss diverges", "round 4: the training loss diverges"):
            progress.update({**row, "reason": reason})
    assert capsys.readouterr().err.splitlines() == [
        "first running: round 3 of 10, accuracy 0.1000",
        "first running: round 3 of 10, accuracy 0.1000; round 4: the training loss diverges",
    ]
