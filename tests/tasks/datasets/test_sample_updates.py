"""Updates to measure codecs on: from files, and from a network when its images are there."""

import io
import zipfile

import numpy as np
import pytest
from requirements import real_data_at
from safetensors.numpy import save_file

from edgefl.core.errors import DataError
from edgefl.tasks.datasets.sample_updates import (
    SAMPLE_SETTINGS,
    compute_sample_update,
    get_network_shapes,
    read_sample_update,
)

ARRAYS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(3, dtype=np.int64)}


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_file_gives_its_arrays_and_their_shapes(tmp_path, suffix):
    path = tmp_path / f"mine{suffix}"
    np.savez(path, **ARRAYS) if suffix == ".npz" else save_file(ARRAYS, path)
    found = read_sample_update(path)
    assert {name: array.tolist() for name, array in found.tensors.items()} == {"w": [[0, 1, 2], [3, 4, 5]], "n": 3}
    shapes = {spec.name: (spec.shape, spec.dtype) for spec in found.shapes}
    assert shapes == {"w": ((2, 3), "float32"), "n": ((), "int64")}
    assert found.source == path.name


def test_arrays_of_the_other_byte_order_are_what_they_are_in_ours(tmp_path):
    np.savez(tmp_path / "mine.npz", w=np.arange(3, dtype=">f4"))
    found = read_sample_update(tmp_path / "mine.npz")
    assert ([spec.dtype for spec in found.shapes], found.tensors["w"].tolist()) == (["float32"], [0, 1, 2])


@pytest.mark.parametrize("name", ["missing.npz", "missing.safetensors", "gradient.pt", "folder.npz"])
def test_a_file_that_cannot_be_read_is_told_with_its_name(tmp_path, name):
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(DataError, match=name):
        read_sample_update(tmp_path / name)


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
LETTER = b"a letter to my aunt" * 30


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.safetensors", b"", "is damaged|cannot be read"),
        ("a.safetensors", LETTER, "is damaged|cannot be read"),
        ("a.safetensors", header_of("BF16", "[2]", 4), "bfloat16"),
        ("a.safetensors", header_of("F8_E4M3", "[4]", 4), "float8"),
        ("a.npz", b"", "is damaged|cannot be read"),
        ("a.npz", LETTER, "is damaged|cannot be read"),
        ("a.npz", zipped("w.txt", b"a letter"), "is damaged, or holds objects"),
        ("a.npz", zipped("w.npy", HUGE), "damaged"),
        ("a.npz", DEFLATED[:40] + b"zzzz" + DEFLATED[44:], "damaged"),
        ("a.npz", {}, "got none"),
        ("a.npz", np.zeros(3), "one array without a name"),
        ("a.npz", {"w": np.array(["a"])}, "numbers"),
        ("a.npz", {"w": np.array([{}], dtype=object)}, "objects"),
        ("a.npz", {"w": np.array([1j])}, "numbers"),
    ],
)
def test_what_files_of_others_may_hold_is_told_in_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, dict):
        np.savez(path, **content)
    else:
        with path.open("wb") as file:
            np.save(file, content)
    with pytest.raises(DataError, match=message) as error:
        read_sample_update(path)
    assert "\n" not in str(error.value)


def test_the_networks_have_the_sizes_that_their_texts_say():
    for name, setting in SAMPLE_SETTINGS.items():
        assert f"{sum(spec.size for spec in get_network_shapes(name)):,} parameters" in setting.description


@pytest.mark.extended
def test_a_gradient_of_real_images_has_the_shapes_of_its_network(tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        compute_sample_update("mnist-cnn", tmp_path / "nowhere")
    real_data_at("mnist")
    pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
    found = compute_sample_update("mnist-cnn")
    shapes = {name: tensor.shape for name, tensor in found.tensors.items()}
    assert {spec.name: spec.shape for spec in found.shapes} == shapes
    assert all(np.abs(tensor).max() > 0 for tensor in found.tensors.values())
