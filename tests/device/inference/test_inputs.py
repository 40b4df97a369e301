"""Rows to run a model on, from every kind of file, and what is said of those that hold none."""

import gzip
import io
import struct

import numpy as np
import pytest
from digit_shards import digit_shard
from onnx_graphs import constant_model

from edgefl.core.errors import EdgeflError, UsageError
from edgefl.device.inference.inputs import read_inputs
from edgefl.device.inference.onnx_model import OnnxModel

ROWS = np.arange(128, dtype=np.float32).reshape(2, 8, 8)


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


@pytest.fixture
def model(tmp_path):
    constant_model(tmp_path / "model.onnx", 1)
    return OnnxModel(tmp_path / "model.onnx")


def test_npy_and_npz_files_give_their_rows(model, tmp_path):
    np.save(tmp_path / "many.npy", ROWS)
    np.save(tmp_path / "one.npy", ROWS[0])
    np.save(tmp_path / "flat.npy", ROWS.reshape(2, 64))
    assert read_inputs(tmp_path / "flat.npy", model).inputs.shape == (2, 64)
    np.savez(tmp_path / "named.npz", inputs=ROWS, labels=np.array([1, 2]))
    np.savez(tmp_path / "bare.npz", x=ROWS)
    for name in ("many.npy", "named.npz", "bare.npz"):
        assert (read_inputs(tmp_path / name, model).inputs == ROWS).all(), name
    assert read_inputs(tmp_path / "one.npy", model).inputs.shape == (1, 8, 8)
    labels = read_inputs(tmp_path / "named.npz", model).labels
    assert labels is not None
    assert labels.tolist() == [1, 2]


@pytest.mark.parametrize("header", ["", ",".join(f"p{number}" for number in range(64)) + "\n"])
def test_a_csv_file_gives_flat_rows_with_or_without_names(model, tmp_path, header):
    lines = "\n".join(",".join(str(value) for value in row) for row in ROWS.reshape(2, 64))
    (tmp_path / "rows.csv").write_text(f"{header}{lines}\n\n")
    rows = read_inputs(tmp_path / "rows.csv", model).inputs
    assert (rows == ROWS.reshape(2, 64)).all()
    assert len(model.predict(rows)) == 2


def test_an_idx_file_gives_its_images(model, tmp_path):
    images = np.arange(3 * 64, dtype=np.uint8).reshape(3, 8, 8)
    content = struct.pack(">BBBBIII", 0, 0, 8, 3, *images.shape) + images.tobytes()
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
    assert (read_inputs(tmp_path / "t10k-images-idx3-ubyte.gz", model).inputs == images).all()


def test_a_shard_and_a_folder_that_grows_are_read_as_the_task_does(model, tmp_path):
    rows = read_inputs(digit_shard(tmp_path / "digits.npz", 50), model)
    assert rows.labels is not None
    assert len(rows.inputs) == len(rows.labels) == 50
    folder = tmp_path / "collected"
    folder.mkdir()
    np.savez(folder / "monday.npz", inputs=ROWS.astype(np.uint8), labels=np.array([1, 2]))
    assert len(read_inputs(folder, model).inputs) == 2
    constant_model(tmp_path / "plain.onnx", 1, task="")
    with pytest.raises(UsageError, match="does not say of which task it is"):
        read_inputs(folder, OnnxModel(tmp_path / "plain.onnx"))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("none.npy", None, "there is no"),
        ("a.npy", b"x", "is no .npy array"),
        ("a.npz", b"x", "is no readable .npz file"),
        ("a.csv", b"", "holds no row of numbers"),
        ("a.csv", b"1,2\n3\n", "row 2 has 1 values, the first has 2"),
        ("a.csv", b"1,2\n3,x\n", "row 2 holds 'x', not a number"),
        ("a.csv", b"1,2\n3,nan\n", "row 2 holds 'nan', not a number"),
        ("a.csv", b"\xff\xfe", "cannot be read"),
        ("a.jpg", b"x", "is none of .npy"),
        ("a.npy", npy(np.array([{}], dtype=object)), "is no .npy array"),
        ("a.npz", npz(a=ROWS, b=ROWS), "one array alone"),
    ],
)
def test_a_file_without_rows_is_named_in_one_line(model, tmp_path, name, content, expected):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(EdgeflError) as caught:
        read_inputs(tmp_path / name, model)
    assert expected in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)
