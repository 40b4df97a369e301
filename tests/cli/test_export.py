"""`edgefl export flower-app`."""

import tomllib

import pytest

from edgefl.cli.main import main
from edgefl.config import load_run

RUN = """
[run]
task = "digits"
rounds = 4
[strategy]
name = "fedavg"
learning_rate = 0.5
"""


@pytest.fixture
def edgefl(capsys):
    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        return ended.value.code, *capsys.readouterr()

    return call


@pytest.fixture
def run_file(tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path / "run.toml"


def test_the_app_is_written_and_its_files_are_named(edgefl, run_file, tmp_path):
    code, out, _ = edgefl("export", "flower-app", run_file, "--out", tmp_path / "app")
    assert code == 0
    app = tmp_path / "app"
    written = [path for path in app.rglob("*") if path.is_file() and app / "edgefl" not in path.parents]
    assert sorted(out.splitlines()) == sorted(map(str, [*written, app / "edgefl"]))
    assert load_run(tmp_path / "app" / "edgefl_app" / "run.toml") == load_run(run_file)
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert project["tool"]["flwr"]["app"]["config"]["scheme"] == "dirichlet:0.5", "the task's own way"


def test_another_scheme_can_be_chosen(edgefl, run_file, tmp_path):
    assert edgefl("export", "flower-app", run_file, "--out", tmp_path / "app", "--scheme", "iid")[0] == 0
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert project["tool"]["flwr"]["app"]["config"]["scheme"] == "iid"


@pytest.mark.parametrize(
    ("text", "scheme", "code", "told"),
    [
        (RUN, "by-colour", 3, "by-colour"),
        (RUN.replace("fedavg", "fedavgg"), "iid", 6, "unknown strategy 'fedavgg'"),
        (RUN.replace("digits", "digitz"), "iid", 5, "digitz"),
        (RUN.replace("rounds", "round"), "iid", 3, "did you mean run.rounds?"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_leaves_nothing(edgefl, run_file, text, scheme, code, told):
    run_file.write_text(text)
    app = run_file.with_name("app")
    found, _, err = edgefl("export", "flower-app", run_file, "--out", app, "--scheme", scheme)
    assert (found, told in err, err.count("\n")) == (code, True, 1)
    assert not app.exists()


def test_a_folder_that_is_in_use_is_refused(edgefl, run_file, tmp_path):
    code, _, err = edgefl("export", "flower-app", run_file, "--out", tmp_path)
    assert code == 2
    assert "exists and is not an empty folder" in err
