"""Commands that send to an S3 storage, and fetch from it: a real server, and what a kill left behind."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
from filled_store import FilledStore
from s3_server import run_s3_server
from safetensors.numpy import load, save_file

from edgefl.client import sources
from edgefl.coordinator.directory import init_directory, load_directory
from edgefl.storage.checkpoints import save_model
from edgefl.storage.store import Store
from edgefl.system import object_storage
from edgefl.system.atomic_files import compute_sha256

pytestmark = pytest.mark.extended


@pytest.fixture
def server(monkeypatch, tmp_path):
    with run_s3_server(monkeypatch, tmp_path) as server:
        yield server


@pytest.fixture
def root(tmp_path):
    init_directory(tmp_path / "coordinator", hosts=["127.0.0.1"], fleet="lab", port=8000)
    Store.open(tmp_path / "coordinator" / "edgefl.db").close()
    return tmp_path / "coordinator"


def test_a_backup_whose_sending_broke_off_goes_on_and_is_restored_from_there(
    run, refused, server, root, tmp_path, monkeypatch
):
    file = tmp_path / "fleet.tar.gz"
    backup = ["coordinator", "backup", "--dir", root, file, "--to", "s3://lab/monday/"]
    with monkeypatch.context() as patched:
        patched.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        patched.setenv("AWS_MAX_ATTEMPTS", "1")
        ran = run(*backup)
        assert (ran.code, "the storage cannot be used" in ran.err) == (20, True)
    content = file.read_bytes()
    assert run(*backup).out == f"{file} is there, and goes on to be sent\nsent to s3://lab/monday/fleet.tar.gz\n"
    assert server.read("monday/fleet.tar.gz") == content == file.read_bytes()
    refused(backup, 2, "fleet.tar.gz exists already")
    server.files.rm_file("lab/monday/fleet.tar.gz")  # what nothing says was on its way is not sent as today's
    refused(backup, 2, "fleet.tar.gz exists already")
    assert server.keys() == []
    assert (
        run(
            "coordinator", "backup", "--dir", root, tmp_path / "next.tar.gz", "--to", "s3://lab/monday/fleet.tar.gz"
        ).code
        == 0
    )
    content = (tmp_path / "next.tar.gz").read_bytes()
    restored = run("coordinator", "restore", "s3://lab/monday/fleet.tar.gz", "--dir", tmp_path / "new" / "place")
    assert (restored.code, restored.err) == (0, "")
    assert load_directory(tmp_path / "new" / "place").fleet == "lab"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["place"]
    server.write("torn.tar.gz", content[:-100])
    refused(["coordinator", "restore", "s3://lab/torn.tar.gz", "--dir", tmp_path / "other"], 10, "no whole backup")
    assert not (tmp_path / "other").exists()


def test_a_base_is_fetched_and_must_be_the_one_that_was_meant(run, refused, server, root, tmp_path, monkeypatch):
    save_file({"fc.weight": np.ones((2, 3), np.float32)}, tmp_path / "fc.safetensors")
    server.write("fc.safetensors", (tmp_path / "fc.safetensors").read_bytes())
    add = ["base", "add", "s3://lab/fc.safetensors", "--name", "fc", "--dir", root]
    refused([*add, "--sha256", "0" * 64], 4, "must have SHA-256")
    refused(["base", "add", tmp_path / "fc.safetensors", "--dir", root, "--sha256", "0" * 64], 4, "must have SHA-256")
    assert run("base", "list", "--dir", root, "--format", "json").rows == []
    refused(["base", "add", "s3://lab/", "--dir", root], 2, "s3://BUCKET/KEY")
    with monkeypatch.context() as patched:  # whatever another fetch has put there meanwhile
        patched.setattr(
            object_storage, "download_file", lambda _address, path, **_: save_file({"x": np.ones(1)}, path)
        )
        sha256 = compute_sha256(tmp_path / "fc.safetensors")
        refused([*add, "--sha256", sha256], 4, "must have SHA-256")
    assert run("base", "list", "--dir", root, "--format", "json").rows == []
    assert run(*add).code == 0
    (row,) = run("base", "list", "--dir", root, "--format", "json").rows
    assert (row["name"], row["num_parameters"]) == ("fc", 6)
    assert run(*add, "--sha256", row["sha256"]).code == 0
    names = sorted(path.name for path in load_directory(root).bases.iterdir())
    assert names == sorted([f"{row['sha256']}.safetensors", "names.json"])


def test_a_model_and_a_history_are_sent_beside_the_files_here(run, refused, server, root, tmp_path, monkeypatch):
    sha256, path = save_model(tmp_path / "models", {"w": np.arange(3.0)})
    row = {
        "sha256": sha256, "run_id": "r", "task": "digits", "round": 1, "accuracy": None, "bytes_file": 1,
        "task_options": {},
    }  # fmt: skip
    source = SimpleNamespace(
        find_model=lambda *_: row, open_model_file=lambda _sha256: contextlib.nullcontext(path), directory=None
    )
    with monkeypatch.context() as patched:
        patched.setattr(sources, "resolve_source", lambda *_: source)
        export = ["model", "export", "best", "--out", tmp_path / "m.safetensors", "--to"]
        for _ in range(2):
            assert run(*export, "s3://lab/models/").out.endswith("sent to s3://lab/models/m.safetensors\n")
    assert load(server.read("models/m.safetensors"))["w"].tolist() == [0, 1, 2]
    store = FilledStore.open(root / "edgefl.db")
    store.make_token()
    store.join("d1")
    store.submit("r1")
    store.record_round("r1", 1, ["d1"])
    store.close()
    export = ["history", "export", tmp_path / "history", "--dir", root, "--to"]
    assert "files to s3://lab/history/" in run(*export, "s3://lab/history/").out
    files = [one for one in (tmp_path / "history").rglob("*") if one.is_file()]
    sent = {f"history/{one.relative_to(tmp_path / 'history')}": one.read_bytes() for one in files}
    assert len(sent) > 3
    assert {key: server.read(key) for key in sorted(server.keys()) if key.startswith("history/")} == sent
    assert run(*export, "s3://lab/file", "--force").code == 2
    refused(["history", "export", tmp_path / "x", "--dir", root, "--to", "ftp://lab/x"], 2, "s3://BUCKET/KEY")
    monkeypatch.setattr(object_storage, "MAX_KEY_BYTES", 3)
    refused(["history", "export", tmp_path / "x", "--dir", root, "--to", "s3://lab/long"], 2, "s3://BUCKET/KEY")
