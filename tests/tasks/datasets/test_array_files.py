"""Arrays of others: the header is held against what is there before anything is allocated."""

import gzip
import io
import struct
import tracemalloc
from contextlib import contextmanager

import numpy as np
import pytest
from fuzz.codec_readers import zipped
from fuzz.shard_readers import bomb, pickled
from requirements import real_data_at

from edgefl.core.errors import DataError
from edgefl.tasks.datasets.array_files import read_idx, read_image_set, read_npy, read_npz


def read(tmp_path, content, **options):
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    with path.open("rb") as file:
        return read_npz(file, **options)


@contextmanager
def in_less_than(num_bytes):
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < num_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_was_saved_comes_back_as_it_was(tmp_path, save):
    arrays = {
        "a": np.arange(6, dtype=">i2").reshape(2, 3), "b": np.asfortranarray(np.ones((3, 2), np.float32)),
        "c": np.array(2.5), "d": np.zeros((0, 4)), "e": np.array([True]), "f": np.array(["x", "yz"]),
    }  # fmt: skip
    out = io.BytesIO()
    save(out, **arrays)
    found = read(tmp_path, out.getvalue())
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert (found[name].dtype, found[name].flags.writeable) == (array.dtype, True)
    assert list(read(tmp_path, out.getvalue(), names=("c", "a"))) == ["c", "a"]
    with pytest.raises(ValueError, match="no array 'z', only a, b"):
        read(tmp_path, out.getvalue(), names=("c", "z"))


def test_an_array_that_is_said_to_be_larger_than_it_is_and_a_bomb_cost_no_memory(tmp_path):
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f8", "fortran_order": False, "shape": (10**12,)})
    for content in (zipped({"a": head.getvalue() + bytes(80)}), zipped({"a": head.getvalue()})):
        with in_less_than(1 << 20), pytest.raises(ValueError, match="has 8000000000000 bytes"):
            read(tmp_path, content)
    with pytest.raises(ValueError, match="are there"):
        read_npy(head.getvalue() + bytes(80))
    content = bomb("inputs", 65 << 20)
    assert len(content) < 1 << 17
    with in_less_than(1 << 20), pytest.raises(ValueError, match="more than 100 times as much"):
        read(tmp_path, content)


def test_pickled_objects_and_bytes_behind_an_array_are_refused(tmp_path):
    with pytest.raises(ValueError, match="pickled objects"):
        read(tmp_path, pickled())
    objects, numbers = io.BytesIO(), io.BytesIO()
    np.save(objects, np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="pickled objects"):
        read_npy(objects.getvalue())
    np.save(numbers, np.arange(3))
    with pytest.raises(ValueError, match="24 bytes, 25 are there"):
        read(tmp_path, zipped({"a": numbers.getvalue() + b"x"}))


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06", b"\x93NUMPY\x01\x00\x02\x00{}", b"\x93NUMPY\x09\x00"])
def test_what_is_no_archive_and_no_array_is_a_value_error(tmp_path, content):
    with pytest.raises(ValueError):
        read(tmp_path, content)
    with pytest.raises(ValueError):
        read_npy(content)


IMAGES = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
CONTENT = b"\0\0\x08\x03" + struct.pack(">3I", 2, 3, 3) + IMAGES.tobytes()


@pytest.mark.parametrize("content", [CONTENT, gzip.compress(CONTENT)], ids=["plain", "gzip"])
def test_reads_plain_and_gzipped_files(tmp_path, content):
    (tmp_path / "images").write_bytes(content)
    assert np.array_equal(read_idx(tmp_path / "images"), IMAGES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no IDX file of unsigned bytes: it starts with nothing"),
        (b"\0\0\x0d\x01\0\0\0\0", "is no IDX file of unsigned bytes: it starts with 00000d01"),
        (CONTENT[:9], "ends within its header, after 9 bytes"),
        (CONTENT[:-1], r"has 33 bytes, its header \[2, 3, 3\] asks for 34"),
        (CONTENT + b"x", r"has 35 bytes, its header \[2, 3, 3\] asks for 34"),
        (b"\0\0\x08\x03" + b"\xff" * 12, r"asks for \d{28,}"),
        (gzip.compress(CONTENT, mtime=0)[:-9], "cannot be read"),
        (b"\x1f\x8bnonsense", "cannot be read"),
    ],
)
def test_a_damaged_file_is_one_clear_line_with_its_name(tmp_path, content, message):
    path = tmp_path / "images-idx3"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"images-idx3 .*{message}"):
        read_idx(path)


def test_another_file_than_the_published_one_and_none_at_all_are_refused(tmp_path):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(CONTENT)
    with pytest.raises(DataError, match="train-images-idx3-ubyte is not the published file: its decompressed MD5 is"):
        read_image_set(tmp_path, "mnist", "train")
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte.gz does not exist; --data names the folder"):
        read_image_set(tmp_path, "mnist", "t10k")


@pytest.mark.parametrize("task", ["mnist", "fashion-mnist"])
def test_the_published_files_are_recognised(task):
    folder = real_data_at(task)
    test = read_image_set(folder, task, "t10k")
    assert (test.inputs.shape, len(test.targets)) == ((10_000, 28, 28), 10_000)
    # Fashion-MNIST's twin in the same format is told apart by its bytes alone.
    other = {"mnist": "fashion-mnist", "fashion-mnist": "mnist"}[task]
    with pytest.raises(DataError, match="is not the published file"):
        read_image_set(folder, other, "t10k")
