"""Updates to measure codecs on: from files, and from a network when its images are there."""

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from edgefl.errors import DataError
from edgefl.tasks.gradients import SETTINGS, measured_gradient, network_shapes, read_gradient

ARRAYS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(3, dtype=np.int64)}


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_file_gives_its_arrays_and_their_shapes(tmp_path, suffix):
    path = tmp_path / f"mine{suffix}"
    np.savez(path, **ARRAYS) if suffix == ".npz" else save_file(ARRAYS, path)
    found = read_gradient(path)
    assert {name: array.tolist() for name, array in found.tensors.items()} == {
        name: array.tolist() for name, array in ARRAYS.items()
    }
    assert {spec.name: (spec.shape, spec.dtype) for spec in found.shapes} == {
        "w": ((2, 3), "float32"),
        "n": ((), "int64"),
    }
    assert found.source == path.name


@pytest.mark.parametrize("name", ["missing.npz", "missing.safetensors", "gradient.pt", "folder.npz"])
def test_a_file_that_cannot_be_read_is_told_in_one_line(tmp_path, name):
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(DataError) as error:
        read_gradient(tmp_path / name)
    assert name in str(error.value)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"a letter to my aunt" * 30], ids=["empty", "text"])
def test_a_damaged_file_is_told_in_one_line(tmp_path, suffix, content):
    path = tmp_path / f"mine{suffix}"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"is damaged|cannot be read"):
        read_gradient(path)


@pytest.mark.parametrize("value", [np.array(["a"]), np.array([{}], dtype=object), np.array([1j])])
def test_what_is_no_number_is_refused(tmp_path, value):
    path = tmp_path / "mine.npz"
    np.savez(path, w=value)
    with pytest.raises(DataError, match=r"numbers|objects"):
        read_gradient(path)


def header_of(kind, shape, num_bytes):
    """Returns a .safetensors file with one tensor of zeros."""
    header = f'{{"w": {{"dtype": "{kind}", "shape": {shape}, "data_offsets": [0, {num_bytes}]}}}}'.encode()
    return len(header).to_bytes(8, "little") + header + bytes(num_bytes)


def zipped(name, content, method=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr(name, content)
    return buffer.getvalue()


HUGE = (
    b"\x93NUMPY\x01\x00\x76\x00"
    + b"{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999999,), }".ljust(117)
    + b"\n"
)
DEFLATED = zipped("w.npy", bytes(500), zipfile.ZIP_DEFLATED)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.safetensors", header_of("BF16", "[2]", 4), "bfloat16"),
        ("a.safetensors", header_of("F8_E4M3", "[4]", 4), "float8"),
        ("a.npz", zipped("w.txt", b"a letter"), "is damaged, or holds objects"),
        ("a.npz", zipped("w.npy", HUGE), "damaged"),
        ("a.npz", DEFLATED[:40] + b"zzzz" + DEFLATED[44:], "damaged"),
    ],
)
def test_what_files_of_others_may_hold_is_told_in_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        read_gradient(tmp_path / name)
    assert "\n" not in str(error.value)


def test_types_that_a_library_adds_to_numpy_are_named_too(tmp_path):
    pytest.importorskip("ml_dtypes")
    (tmp_path / "a.safetensors").write_bytes(header_of("BF16", "[2]", 4))
    with pytest.raises(DataError, match="bfloat16"):
        read_gradient(tmp_path / "a.safetensors")


def test_an_array_that_was_saved_without_a_name_is_told(tmp_path):
    with (tmp_path / "mine.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataError, match="one array without a name"):
        read_gradient(tmp_path / "mine.npz")


def test_arrays_of_the_other_byte_order_are_what_they_are_in_ours(tmp_path):
    np.savez(tmp_path / "mine.npz", w=np.arange(3, dtype=">f4"))
    found = read_gradient(tmp_path / "mine.npz")
    assert [spec.dtype for spec in found.shapes] == ["float32"]
    assert found.tensors["w"].tolist() == [0, 1, 2]


def test_a_file_without_arrays_is_refused(tmp_path):
    np.savez(tmp_path / "mine.npz")
    with pytest.raises(DataError, match="got none"):
        read_gradient(tmp_path / "mine.npz")


def test_the_networks_have_the_sizes_that_their_texts_say():
    for name, setting in SETTINGS.items():
        assert f"{sum(spec.size for spec in network_shapes(name)):,} parameters" in setting.what


def test_without_images_there_is_no_real_gradient(tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        measured_gradient("mnist-cnn", tmp_path / "nowhere")


def test_a_gradient_of_real_images_has_the_shapes_of_its_network():
    root = os.environ.get("EDGEFL_DATA")
    if not root or not (Path(root) / "mnist").is_dir():
        pytest.skip("needs the MNIST images in $EDGEFL_DATA")
    pytest.importorskip("torch")
    found = measured_gradient("mnist-cnn")
    assert {spec.name: spec.shape for spec in found.shapes} == {
        name: tensor.shape for name, tensor in found.tensors.items()
    }
    assert all(np.abs(tensor).max() > 0 for tensor in found.tensors.values())
