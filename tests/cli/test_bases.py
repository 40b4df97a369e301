"""`edgefl base`: what an operator brings, sees and removes."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from edgefl.coordinator.directory import init_directory


@pytest.fixture
def folder(tmp_path):
    init_directory(tmp_path / "coordinator", hosts=["127.0.0.1"], fleet="lab", port=8000)
    return tmp_path / "coordinator"


def test_a_file_becomes_a_base_with_a_name_and_goes_again(run, folder, tmp_path):
    path = tmp_path / "pretrained.safetensors"
    save_file({"fc.weight": np.ones((2, 3), np.float32)}, path)
    added = run("base", "add", path, "--name", "fc", "--dir", folder)
    assert added.code == 0
    assert 'next: base = "fc" in [adapt]' in added.out
    (row,) = run("base", "list", "--dir", folder, "--format", "json").rows
    assert (row["name"], row["num_tensors"], row["num_parameters"]) == ("fc", 1, 6)
    assert "fc" in run("base", "list", "--dir", folder).out
    copied = run("base", "copy", "fc", tmp_path, "--dir", folder)
    assert copied.code == 0
    assert "edgefl device set --base-source FOLDER" in copied.out
    assert (tmp_path / f"{row['sha256']}.safetensors").read_bytes() == path.read_bytes()
    assert (tmp_path / f"{row['sha256']}.safetensors").stat().st_mode & 0o777 == 0o644, "others read it on a board"
    (folder / "bases" / f"{row['sha256']}.safetensors").write_bytes(b"a failing disk")
    assert "must have SHA-256" in run("base", "copy", "fc", tmp_path, "--dir", folder).err
    assert (tmp_path / f"{row['sha256']}.safetensors").read_bytes() == path.read_bytes()
    assert run("base", "add", path, "--dir", folder).code == 0
    assert run("base", "remove", "fc", "--dir", folder).out == f"removed {row['sha256']}\n"
    assert run("base", "list", "--dir", folder, "--format", "json").rows == []
    compiled = path.rename(path.with_suffix(".compiled"))
    assert 'next: compiled = "fc" in [run]' in run("base", "add", compiled, "--name", "fc", "--dir", folder).out


def test_what_is_no_base_is_one_line(refused, folder, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"no")
    refused(("base", "add", path, "--name", "fc", "--dir", folder), 4, "is no safetensors file")


def test_weights_of_the_hub_are_brought_by_name_and_nothing_else_stays(run, refused, folder, tmp_path, monkeypatch):
    save_file({"fc.weight": np.ones((2, 3), np.float32)}, tmp_path / "cached")
    hub = SimpleNamespace(hf_hub_download=lambda *_, **__: str(tmp_path / "cached"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    added = run("base", "add", "hf:lab/tiny", "--name", "tiny", "--dir", folder)
    assert added.code == 0
    assert 'next: base = "tiny" in [adapt]' in added.out
    (row,) = run("base", "list", "--dir", folder, "--format", "json").rows
    refused(("base", "add", "hf:lab/tiny", "--sha256", "ab" * 32, "--dir", folder), 4, "must have SHA-256 abab")
    names = [f"{row['sha256']}.safetensors", "names.json"]
    assert sorted(path.name for path in (folder / "bases").iterdir()) == names
