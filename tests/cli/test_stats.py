"""`edgefl stats` on shards of this machine; of a fleet see test_live_fleet.py."""

import json

import numpy as np
import pytest

from edgefl.core.types import Dataset
from edgefl.storage.state_serialisation import encode_model
from edgefl.tasks.datasets.shards import ShardMetadata, write_shard
from edgefl.tasks.registry import make_task


@pytest.fixture
def shards(tmp_path):
    """Two boards' shards of digits, and all of their examples."""
    rng, parts = np.random.default_rng(3), []
    for name, size in (("one", 60), ("two", 90)):
        data = Dataset(inputs=rng.integers(0, 17, (size, 8, 8)).astype(np.uint8), targets=rng.integers(0, 9, size))
        write_shard(tmp_path / f"{name}.npz", data, ShardMetadata(task="digits", scheme="iid", source="made up"))
        parts.append(make_task("digits").read(str(tmp_path / f"{name}.npz")))
    return [tmp_path / "one.npz", tmp_path / "two.npz"], Dataset.concatenate(parts)


def test_it_prints_the_figures_of_columns_and_classes(run, shards):
    paths, pooled = shards
    words = ("stats", "digits", "--columns", "9-10", "--min-group", 1, "--shard", paths[0], "--shard", paths[1])
    result = json.loads(run(*words, "--format", "json").out)
    values = pooled.inputs.reshape(len(pooled), -1)[:, 9].astype(float)
    assert (result["kind"], result["rows"], len(result["columns"])) == ("statistics", 150, 2)
    assert result["columns"][0]["mean"] == pytest.approx(values.mean(), rel=1e-12)
    assert result["classes"] == {str(label): int((pooled.targets == label).sum()) for label in range(10)}
    assert [board["device_id"] for board in result["boards"]] == [str(path) for path in paths]
    table = run(*words).out
    assert "digits: 150 examples" in table
    assert [line.split()[0] for line in table.splitlines() if line.startswith(("9 ", "10 ", "all "))] == [
        "9",
        "10",
        "all",
    ]
    lines = run(*words, "--format", "csv").out.splitlines()
    assert lines[0] == "name,count,missing,mean,std,min,5 %,25 %,50 %,75 %,95 %,max,boards"
    assert len(lines) == 3


def test_files_without_a_class_count_for_none(run, tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install -e '.[pictures]'")
    for folder, num in (("dark", 6), ("bright", 7), (".unlabelled", 8)):
        (tmp_path / "shard" / folder).mkdir(parents=True)
        for place in range(num):
            picture = image.fromarray(np.full((8, 8), 10 * place, np.uint8))
            picture.save(tmp_path / "shard" / folder / f"20260101T00000{place}.000-{place:016x}.png")
    file = tmp_path / "run.toml"
    file.write_text(
        '[run]\ntask = "pictures"\n[task]\nlabels = ["dark", "bright"]\nsize = 8\nunlabelled = true\n'
        "[strategy]\nconsistency_weight = 1.0\n"
    )
    result = json.loads(run("stats", file, "--shard", tmp_path / "shard", "--format", "json").out)
    assert (result["rows"], result["classes"]) == (13, {"dark": 6, "bright": 7})


def test_what_cannot_be_asked_is_one_line(run, shards, tmp_path):
    (path, _), _ = shards
    for words, code, said in (
        (("digits", "--shard", path, "--columns", "64"), 3, "there are 64, 0 to 63"),
        (("digits", "--shard", path, "--min-group", 80), 4, "no board has 80 examples or more of task digits"),
        (("digits", "--shard", path, "--url", "https://x"), 2, "give one of them"),
        (("digitz", "--shard", path), 5, "did you mean digits"),
    ):
        ended = run("stats", *words)
        assert (ended.code == code, ended.is_one_line, said in ended.err) == (True, True, True), ended.err


def test_a_run_file_has_the_options_of_its_task_and_the_names_of_its_columns(run, tmp_path):
    file, table = tmp_path / "run.toml", tmp_path / "house.csv"
    file.write_text('[run]\ntask = "table"\n[task]\ncolumns = ["heat", "damp"]\ntarget = "open"\n')
    rows = np.random.default_rng(4).normal(20, 5, (30, 3))
    table.write_text("heat,damp,open\n" + "".join(",".join(map(repr, row)) + "\n" for row in rows.tolist()))
    result = json.loads(run("stats", file, "--shard", table, "--format", "json").out)
    assert [column["name"] for column in result["columns"]] == ["heat", "damp", "target"]
    found = [(column["mean"], column["std"]) for column in result["columns"]]
    assert np.array(found)[:2] == pytest.approx(np.stack([rows.mean(axis=0), rows.std(axis=0)], axis=1)[:2])


def test_drift_beyond_the_threshold_ends_with_a_code_of_its_own(run, tmp_path):
    file, old, new = tmp_path / "run.toml", tmp_path / "june.csv", tmp_path / "july.csv"
    file.write_text('[run]\ntask = "table"\n[task]\ncolumns = ["heat", "damp"]\ntarget = "open"\n')
    rows = np.random.default_rng(5).normal(20, 5, (80, 3))
    for path, shift in ((old, 0), (new, 12)):
        moved = rows + np.array([shift, 0, 0])
        path.write_text("heat,damp,open\n" + "".join(",".join(map(repr, row)) + "\n" for row in moved.tolist()))
    words = ("data", "drift", file, "--reference", old, "--data", new, "--format", "json")
    ended = run(*words)
    result = json.loads(ended.out)
    assert (ended.code, result["kind"], result["rows"][0]["name"]) == (0, "drift", "heat")
    assert result["rows"][0]["psi"] > 0.25
    assert [row["psi"] for row in result["rows"][1:]] == [0, 0, None]
    joint = result["rows"][-1]
    assert (joint["name"], joint["num_newer"], joint["mmd"] > 0.1, joint["p"]) == ("joint", 80, True, 1 / 500)
    ended = run(*words, "--threshold", 0.25)
    assert (ended.code, "of column heat; 1 of 3 columns are above" in ended.err) == (52, True), ended.err
    assert json.loads(ended.out) == result
    assert run("data", "drift", file, "--reference", old, "--data", old, "--threshold", 0.25).code == 0
    model = tmp_path / "model.safetensors"
    task = make_task("table", {"columns": "heat,damp", "target": "open"})
    model.write_bytes(encode_model(task.init(7)))
    features = json.loads(run(*words, "--model", model).out)["rows"]
    assert features[:-1] == result["rows"]
    assert (features[-1]["name"], features[-1]["num_newer"], features[-1]["p"]) == ("features", 80, 1 / 500)
    refused = run(*words, "--threshold", "nan")
    assert (refused.code, "--threshold must be a number above 0, got nan" in refused.err) == (2, True)
