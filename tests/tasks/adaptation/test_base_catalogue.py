"""Bases of a coordinator: by name or hash, never another file under a name, nothing that no device could read."""

import hashlib

import numpy as np
import pytest
from safetensors.numpy import save_file

from edgefl.core.errors import ConfigError, DataError, NotFoundError, UsageError
from edgefl.tasks.adaptation import base_catalogue
from edgefl.tasks.adaptation.base_catalogue import BaseCatalogue, compute_digest, find_base_file
from edgefl.tasks.adaptation.base_file import encode_base, load_base


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "pretrained.safetensors"
    save_file({"fc.weight": np.ones((2, 3), np.float32), "fc.bias": np.ones(2, np.float32)}, path)
    return path


@pytest.fixture
def catalogue(tmp_path):
    return BaseCatalogue(tmp_path / "bases")


def test_a_scalar_of_a_base_such_as_the_batches_that_a_normalisation_has_seen_stays_a_scalar(tmp_path):
    path = tmp_path / "base.safetensors"
    tensors = {"bn.num_batches_tracked": np.array(3), "fc.weight": np.arange(6.0).reshape(2, 3).T}
    path.write_bytes(encode_base(tensors))
    for name, tensor in load_base(path).items():
        np.testing.assert_array_equal(tensor, tensors[name], strict=True)


def test_a_base_is_copied_under_its_hash_and_found_by_its_name_and_its_hash(file, catalogue, tmp_path):
    base = catalogue.add(file, "fc")
    assert (base.name, base.num_tensors, base.num_parameters) == ("fc", 2, 8)
    assert base.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    path = tmp_path / "bases" / f"{base.sha256}.safetensors"
    assert path.read_bytes() == file.read_bytes()
    assert catalogue.find("fc") == catalogue.find(base.sha256) == catalogue.find(base.sha256[:8]) == path
    assert catalogue.add(file, "fc") == base
    assert catalogue.list_bases() == [base]
    assert compute_digest(file) == compute_digest(path) == base.sha256
    assert catalogue.add(file, "fc", sha256=base.sha256) == base
    with pytest.raises(DataError, match="must have SHA-256 0000"):
        catalogue.add(file, "other", sha256="0" * 64)
    assert catalogue.list_bases() == [base]


def test_a_damaged_base_is_repaired_by_the_good_file_and_a_file_that_changes_meanwhile_is_refused(
    file, catalogue, tmp_path, monkeypatch
):
    path = catalogue.find(catalogue.add(file, "fc").sha256)
    path.write_bytes(file.read_bytes()[:-1] + b"x")
    catalogue.add(file, "fc")
    assert path.read_bytes() == file.read_bytes()
    path.unlink()
    monkeypatch.setattr(base_catalogue, "compute_sha256", lambda _: "ab" * 32)  # of what was there a moment ago
    with pytest.raises(DataError, match="must have SHA-256 abab"):
        catalogue.add(file)
    assert not list((tmp_path / "bases").glob("*.safetensors"))


def test_one_without_a_name_is_listed_and_found_by_its_hash(file, catalogue):
    base = catalogue.add(file)
    assert catalogue.list_bases() == [base]
    with pytest.raises(NotFoundError, match="no base 'fc', only none; bring it: edgefl base add"):
        catalogue.find("fc")
    with pytest.raises(NotFoundError):
        catalogue.find(base.sha256[:3])


def test_a_name_means_one_base_until_that_is_removed(file, catalogue, tmp_path):
    base = catalogue.add(file, "fc")
    other = tmp_path / "other.safetensors"
    save_file({"fc.weight": np.zeros((2, 3), np.float32)}, other)
    with pytest.raises(UsageError, match=f"base fc is {base.sha256[:12]} already"):
        catalogue.add(other, "fc")
    assert catalogue.remove("fc") == base.sha256
    assert catalogue.add(other, "fc").num_tensors == 1
    assert [found.name for found in catalogue.list_bases()] == ["fc"]


def test_what_is_no_base_is_refused(file, catalogue, tmp_path, monkeypatch):
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(DataError, match="is no safetensors file"):
        catalogue.add(damaged, "x")
    header = b'{"w":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}'
    damaged.write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    with pytest.raises(DataError, match="tensor 'w' is of type BF16, save it as one of F64, F32"):
        catalogue.add(damaged, "x")
    save_file({}, damaged)
    with pytest.raises(DataError, match="holds no tensors"):
        catalogue.add(damaged, "x")
    with pytest.raises(UsageError, match="base name must be"):
        catalogue.add(file, "../x")
    monkeypatch.setattr(base_catalogue, "MAX_BASE_BYTES", 10)
    with pytest.raises(DataError, match="a device takes 10 at most"):
        catalogue.add(file, "x")
    assert catalogue.list_bases() == []


def test_damaged_names_are_told(file, catalogue, tmp_path):
    catalogue.add(file, "fc")
    (tmp_path / "bases" / "names.json").write_text("[1")
    with pytest.raises(DataError, match=r"names\.json cannot be read"):
        catalogue.find("fc")


def test_a_run_file_names_a_file_or_a_base_of_a_coordinator(file, catalogue, tmp_path):
    catalogue.add(file, "fc")
    assert find_base_file(str(file), None) == file
    assert find_base_file("fc", tmp_path / "bases") == catalogue.find("fc")
    with pytest.raises(ConfigError, match=r"adapt\.base: there is no file"):
        find_base_file("absent.safetensors", tmp_path / "bases")
    with pytest.raises(ConfigError, match="only a coordinator has bases by name"):
        find_base_file("fc", None)
