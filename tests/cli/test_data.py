import json

from click.testing import CliRunner

from edgefl.cli.data import command
from edgefl.cli.main import main


def shard(*arguments):
    return CliRunner().invoke(command, ["shard", *arguments], catch_exceptions=False)


def test_prints_the_examples_per_class_of_every_shard(tmp_path):
    result = shard("digits", "--scheme", "dirichlet:0.5", "--devices", "4", "--out", str(tmp_path))
    assert result.exit_code == 0
    rows = {line.split()[0]: line.split()[1:] for line in result.output.splitlines() if line.split()}
    assert {f"device-0{i}" for i in (1, 2, 3, 4)} | {"test"} <= set(rows)
    assert all(int(rows[name][0]) == sum(map(int, rows[name][1:])) for name in rows if name[:3] in ("dev", "tes"))


def test_json_agrees_with_the_cards_on_disk(tmp_path):
    result = shard("digits", "--scheme", "by-class", "--devices", "5", "--out", str(tmp_path), "--format", "json")
    printed = json.loads(result.output)
    assert printed["v"] == 1
    assert [row["shard"] for row in printed["shards"]] == [*(f"device-0{i}" for i in range(1, 6)), "test"]
    for row in printed["shards"]:
        card = json.loads((tmp_path / f"{row['shard']}.json").read_text())
        assert {key: card[key] for key in ("task", "num_examples", "counts", "sha256")} == {
            key: row[key] for key in ("task", "num_examples", "counts", "sha256")
        }


def exit_code(capsys, *arguments):
    try:
        main(["data", "shard", *arguments])
    except SystemExit as stopped:
        return stopped.code, capsys.readouterr().err
    raise AssertionError("the command should have ended the process")


def test_bad_input_is_one_line_and_its_exit_code(tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    code, said = exit_code(capsys, "digits", "--scheme", "magic", *out)
    assert code == 3
    assert said.startswith("edgefl: scheme must be one of natural, iid")
    assert said.count("\n") == 1
    code, said = exit_code(capsys, "mnist", "--data", str(tmp_path / "nowhere"), *out)
    assert code == 4
    assert "nowhere of task mnist does not exist" in said
    code, said = exit_code(capsys, "cifar", *out)
    assert code == 5
    assert "'cifar' has no data set to cut" in said
    assert not list(tmp_path.iterdir())
