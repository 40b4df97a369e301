"""`edgefl strategies`: the list is the registry's, and what `new` writes works as it stands."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from edgefl.cli.main import main
from edgefl.decentralised.methods import METHODS
from edgefl.strategies.registry import BUILT_IN, make_strategy, settings_of
from edgefl.strategies.rounds import RoundRules

ROOT = Path(__file__).parents[2]
HOPPING = '''"""Hops: goes on one leg."""

class Hops:
    kind = "decentralised"

    def __init__(self, legs):
        pass
'''
ASYNCHRONOUS = {"adacomp", "asgd", "bounded", "dc-asgd", "fedasync", "fedbuff"}


@pytest.fixture
def edgefl(capsys):
    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        return ended.value.code, *capsys.readouterr()

    return call


def listed(edgefl):
    code, out, _ = edgefl("strategies", "list", "--format", "json")
    assert code == 0
    found = json.loads(out)
    assert (found["v"], found["kind"]) == (1, "strategies")
    return {row["name"]: row for row in found["rows"]}


def test_every_strategy_is_listed_with_its_kind_and_what_it_is(edgefl):
    rows = listed(edgefl)
    assert list(rows) == [*sorted(BUILT_IN), "flwr:NAME"]
    for name, row in rows.items():
        kind = "decentralised" if name in METHODS else "asynchronous" if name in ASYNCHRONOUS else "synchronous"
        assert row["kind"] == kind, name
        assert row["summary"].endswith((".", "QFedAvg")), name


def test_the_settings_are_the_strategys_with_their_defaults(edgefl):
    rows = listed(edgefl)
    for name in BUILT_IN:
        assert rows[name]["settings"] == json.loads(json.dumps(settings_of(name))), name


def test_the_table_shows_a_strategys_own_settings_and_those_of_all_once(edgefl):
    _, out, _ = edgefl("strategies", "list")
    (line,) = [line for line in out.splitlines() if line.startswith("fedbuff")]
    assert "buffer_size=10" in line
    assert "weight_decay" not in line
    (shared,) = [line for line in out.splitlines() if line.startswith("Shared by most: ")]
    assert "learning_rate=0.05 schedule=constant" in shared
    assert "flwr:NAME" in out
    assert "FedAdam, " in out


def test_a_strategy_of_a_broken_package_does_not_hide_the_others(edgefl, tmp_path, monkeypatch):
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[edgefl.strategies]\nlame = no_such_package:Lame\nhops = hopping:Hops\n")
    (tmp_path / "hopping.py").write_text(HOPPING)
    monkeypatch.syspath_prepend(tmp_path)
    rows = listed(edgefl)
    assert "cannot be imported" in rows["lame"]["summary"]
    assert rows["hops"] == {
        "name": "hops",
        "kind": "decentralised",
        "summary": "Hops: goes on one leg.",
        "settings": {"legs": "required"},
    }
    assert rows["fedavg"]["kind"] == "synchronous"


def test_a_new_strategy_works_and_its_test_passes_as_written(edgefl, tmp_path):
    code, out, _ = edgefl("strategies", "new", "trimmed_mean", "--out", tmp_path / "mine")
    assert code == 0
    files = [tmp_path / "mine" / name for name in ("trimmed_mean.py", "test_trimmed_mean.py")]
    assert out.splitlines()[:2] == [str(path) for path in files]
    assert 'name = "trimmed_mean:TrimmedMean"' in out
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "."],
        cwd=tmp_path / "mine",
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def checked(command, file):
    arguments = [sys.executable, "-m", *command, str(file)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_new_strategy_is_formatted_and_short(edgefl, tmp_path, monkeypatch):
    edgefl("strategies", "new", "own", "--out", tmp_path)
    own = tmp_path / "own.py"
    lines = [line for line in own.read_text().split('"""')[2].splitlines() if line.strip()]
    assert len(lines) < 25
    checked(["ruff", "format", "--check"], own)
    monkeypatch.syspath_prepend(tmp_path)
    assert make_strategy("own:Own", {"trim": 2, "epochs": 2}, RoundRules()).init({}) is not None
    sys.modules.pop("own", None)


@pytest.mark.slow
def test_a_new_strategy_is_strictly_typed(edgefl, tmp_path):
    edgefl("strategies", "new", "own", "--out", tmp_path)
    checked(["mypy", "--strict"], tmp_path / "own.py")


def test_what_is_there_is_not_overwritten(edgefl, tmp_path):
    for name in ("mine.py", "test_mine.py"):
        (tmp_path / name).write_text("precious")
        code, _, err = edgefl("strategies", "new", "mine", "--out", tmp_path)
        assert code == 2
        assert f"{tmp_path / name} exists" in err
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "precious")]
        (tmp_path / name).unlink()


@pytest.mark.parametrize("name", ["Mine", "my-own", "2nd", "a/b", "..", "", "class", "mine_", "ü", "random", "numpy"])
def test_a_name_that_cannot_be_a_module_of_ones_own_is_refused(edgefl, tmp_path, name):
    code, _, err = edgefl("strategies", "new", name, "--out", tmp_path)
    assert code == 2
    assert err.startswith("edgefl: ")
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_line(edgefl, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = edgefl("strategies", "new", "mine", "--out", tmp_path / "file" / "deeper")
    assert code in {2, 4}
    assert err.count("\n") <= 4
