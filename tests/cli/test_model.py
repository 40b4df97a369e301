"""`edgefl model` against a real fleet that runs, and against its directory after it has stopped."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

from edgefl.cli.main import main
from edgefl.cli.model import COLUMNS, command
from edgefl.config import parse_run
from edgefl.coordinator import pki
from edgefl.errors import NetworkError, NotFoundError, StoreError, WrongCaError
from edgefl.files import sha256_of_file
from edgefl.local_fleet import LocalFleet
from edgefl.local_run import cut_devices
from edgefl.tasks.registry import make_task

ROUNDS = 6


@dataclass
class Ended:
    code: int
    out: str
    err: str

    def rows(self):
        return list(json.loads(self.out)["rows"])


@dataclass
class Trained:
    fleet: LocalFleet
    run_id: str
    shards: Path

    @property
    def models(self):
        return self.fleet.directory / "models"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A coordinator after a run of six rounds that were all evaluated."""
    root = tmp_path_factory.mktemp("models")
    cut = cut_devices("digits", "iid", 2, root / "shards", None, 7)
    with LocalFleet(root=root, devices=cut.devices, test_shards=cut.test_shards) as fleet:
        config = {"run": {"task": "digits", "name": "six", "rounds": ROUNDS, "evaluate_on": "coordinator"}}
        run_id = fleet.submit(parse_run({**config, "devices": {"min": 2}, "models": {"keep_every": 2}}))
        fleet.wait_run(run_id)
        yield Trained(fleet, run_id, root / "shards")


@pytest.fixture
def edgefl(trained):
    def call(*words):
        process = trained.fleet.popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate(timeout=60)
        return Ended(process.returncode, out.decode(), err.decode())

    return call


@pytest.fixture
def offline(trained):
    """The same commands on the directory alone."""

    def call(*words):
        where = ("--dir", str(trained.fleet.directory))
        return CliRunner(mix_stderr=False).invoke(
            command, [*(str(word) for word in words), *where], catch_exceptions=False
        )

    return call


@pytest.fixture
def outside(trained, tmp_path, monkeypatch):
    """An empty folder, in which this process is the fleet's operator and has no coordinator of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(trained.fleet.root / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


def best_of(trained):
    scored = [row for row in trained.fleet.history("rounds", run=trained.run_id) if row["accuracy"] is not None]
    return max(scored, key=lambda row: (row["accuracy"], row["round"]))


def test_list_names_what_the_rule_keeps_with_the_history_s_accuracies(edgefl, trained):
    rows = edgefl("model", "list", "--format", "json").rows()
    assert list(rows[0]) == list(COLUMNS)
    best = best_of(trained)["round"]
    assert [row["round"] for row in rows] == sorted({2, 4, 5, 6} | {best})
    told = {row["round"]: row["accuracy"] for row in trained.fleet.history("rounds", run=trained.run_id)}
    assert [row["accuracy"] for row in rows] == [pytest.approx(told[row["round"]]) for row in rows]
    assert [row["round"] for row in rows if row["best"]] == [best]
    assert [row["round"] for row in rows if row["latest"]] == [6]
    assert {row["sha256"] for row in rows} == {path.stem for path in trained.models.iterdir()}
    table = edgefl("model", "list", "--run", "six").out.splitlines()
    assert table[0].split()[:3] == ["sha256", "run", "id"]
    assert rows[0]["sha256"][:12] in table[1]


def test_both_ways_of_asking_tell_the_same(edgefl, offline, tmp_path):
    assert json.loads(offline("list", "--format", "json").stdout)["rows"] == edgefl(
        "model", "list", "--format", "json"
    ).rows()  # fmt: skip
    assert offline("show", "best", "--format", "csv").stdout == edgefl("model", "show", "best", "--format", "csv").out
    edgefl("model", "export", "six:6", "--out", tmp_path / "a.safetensors")
    offline("export", "--run", "six", "--out", tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_show_tells_what_a_model_is(edgefl, trained):
    (row,) = edgefl("model", "show", "latest", "--format", "json").rows()
    assert (row["run_id"], row["task"], row["task_options"], row["latest"]) == (trained.run_id, "digits", {}, True)
    table = edgefl("model", "show", row["sha256"][:10]).out
    assert row["sha256"] in table
    assert "bytes file     19.6 kB" in table


def test_safetensors_are_the_kept_file_and_any_reader_opens_them(edgefl, trained, tmp_path):
    out = tmp_path / "model.safetensors"
    said = edgefl("model", "export", "latest", "--out", out)
    assert (said.code, said.err) == (0, "")
    sha256 = edgefl("model", "show", "latest", "--format", "json").rows()[0]["sha256"]
    assert sha256_of_file(out) == sha256
    assert sha256 in said.out
    assert {name: array.shape for name, array in load_file(out).items()} == {
        spec.name: spec.shape for spec in make_task("digits").shapes()
    }


def test_onnx_is_checked_on_the_coordinator_s_own_test_shard(offline, trained, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    out = tmp_path / "model.onnx"
    said = offline("export", "best", "--out", out, "--quantise")
    assert said.exit_code == 0, said.stderr
    best = best_of(trained)["accuracy"]
    assert f"round {best_of(trained)['round']}, accuracy {best:.4f} when it was trained" in said.stdout
    assert f"inputs of {trained.shards / 'test.npz'}: largest difference " in said.stdout
    assert f"accuracy {best:.4f} with float32, 0." in said.stdout
    assert "8-bit weights: 20 kB became 7." in said.stdout
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    metadata = session.get_modelmeta().custom_metadata_map
    assert (
        metadata["edgefl.model"]
        == json.loads(offline("show", "best", "--format", "json").stdout)["rows"][0]["sha256"]
    )
    data = make_task("digits").read(str(trained.shards / "test.npz"))
    (logits,) = session.run(["logits"], {"inputs": data.inputs.astype(np.float32)})
    assert (logits.argmax(axis=1) == data.labels).mean() > 0.8


def test_onnx_of_a_coordinator_elsewhere_says_that_its_inputs_were_made_up(edgefl, tmp_path, monkeypatch):
    pytest.importorskip("onnx")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    said = edgefl("model", "export", "latest", "--out", tmp_path / "model.onnx")
    assert "on 64 made-up inputs, since no --shard was given" in said.out
    shard_said = edgefl("model", "export", "latest", "--out", tmp_path / "model.onnx", "--quantise")
    assert "not known without labelled data; give --shard" in shard_said.out


def test_torch_loads_what_was_exported_for_it(edgefl, tmp_path):
    torch = pytest.importorskip("torch")
    said = edgefl("model", "export", "latest", "--out", tmp_path / "model.pt")
    assert said.code == 0, said.err
    assert list(torch.load(tmp_path / "model.pt", weights_only=True)) == [
        s.name for s in make_task("digits").shapes()
    ]


def test_evaluate_finds_the_accuracies_that_were_recorded(offline, trained):
    rows = json.loads(offline("evaluate", "--on", "coordinator", "--format", "json").stdout)["rows"]
    assert len(rows) >= 4
    assert [row["accuracy"] for row in rows] == [pytest.approx(row["recorded_accuracy"]) for row in rows]
    assert {row["num_examples"] for row in rows} == {len(make_task("digits").read(str(trained.shards / "test.npz")))}


def test_evaluate_takes_the_test_part_of_a_device_s_shard(edgefl, trained):
    shard = trained.shards / "device-01.npz"
    rows = edgefl("model", "evaluate", "best", "six:5", "--shard", shard, "--format", "json").rows()
    everything = edgefl("model", "evaluate", "best", "--shard", shard, "--part", "all", "--format", "json").rows()
    assert len(rows) == 2
    assert 0.05 < rows[0]["num_examples"] / everything[0]["num_examples"] < 0.2
    assert len(edgefl("model", "evaluate", "best", "--shard", shard).out.splitlines()) == 2


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("show", "beef"), 40, "no kept model begins with 'beef'"),
        (("show", "six:77"), 40, "run 'six' has no kept model of round 77; kept are those of round 2, "),
        (("export", "latest", "--out", "model.bin"), 2, "--out must end in .onnx, .pt, .pth, .safetensors"),
        (("export", "latest", "--out", "m.onnx", "--format", "torch"), 2, "must end in .pt or .pth, got m.onnx"),
        (("export", "latest", "--out", "none/m.onnx"), 2, "none/m.onnx must be a new file in a folder that exists"),
        (("export", "--out", "m.onnx"), 2, "say which model"),
        (("export", "latest", "--out", "m.pt", "--quantise"), 2, "--quantise, --shard and --part are for onnx"),
        (
            ("export", "latest", "--out", "m.onnx", "--shard", "none.npz"),
            4,
            "shard 'none.npz' of task digits does not",
        ),
        (("evaluate",), 2, "say what to evaluate on"),
        (("evaluate", "--shard", "x", "--on", "coordinator"), 2, "say what to evaluate on"),
        (("evaluate", "--on", "coordinator"), 4, "no test shard of task digits in a coordinator's directory on this"),
        (("list", "--run", "nobody"), 40, "no run 'nobody'"),
        (("list", "--dir", "x", "--url", "https://localhost:1"), 2, "give one of them"),
        (
            ("list", "--url", "https://localhost:1"),
            20,
            "--dir DIR reads the models of a coordinator that does not run",
        ),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_its_exit_code(words, code, said, outside, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["model", *words])
    told = capsys.readouterr()
    assert (ended.value.code, told.err.count("\n")) == (code, 1)
    assert said in told.err
    assert list(outside.iterdir()) == []


def test_a_damaged_file_is_noticed_before_anything_is_written(trained, offline, tmp_path, capsys):
    row = json.loads(offline("show", "six:2", "--format", "json").stdout)["rows"][0]
    path = trained.models / f"{row['sha256']}.safetensors"
    whole = path.read_bytes()
    for suffix in ("safetensors", "onnx", "pt"):
        path.write_bytes(whole[:-1] + b"\xff")
        try:
            with pytest.raises(SystemExit) as ended:
                main(
                    [
                        "model",
                        "export",
                        "six:2",
                        "--out",
                        str(tmp_path / f"m.{suffix}"),
                        "--dir",
                        str(path.parents[1]),
                    ]
                )
        finally:
            path.write_bytes(whole)
        assert ended.value.code == 13
        assert "is damaged" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_download_names_what_is_wrong(trained, tmp_path):
    operator = trained.fleet.operator()
    with (tmp_path / "file").open("wb") as into:
        with pytest.raises(NotFoundError, match="no kept model begins with 'beef'"):
            operator.download("/edgefl/v1/models/beef/file", into)
        with pytest.raises(NetworkError, match="answered 404: Not Found"):
            operator.download("/edgefl/v1/nothing", into)
        with pytest.raises(WrongCaError, match="nothing was sent"):
            replace(operator, ca_pem=other_ca()).download("/edgefl/v1/models/best/file", into)
    assert (tmp_path / "file").stat().st_size == 0
    with Path("/dev/full").open("wb", buffering=0) as full, pytest.raises(StoreError, match="/dev/full cannot be"):
        operator.download("/edgefl/v1/models/best/file", full)


def other_ca():
    return pki.create_authority("another").cert_pem.decode()
