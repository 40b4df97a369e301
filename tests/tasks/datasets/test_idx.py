import gzip
import struct

import numpy as np
import pytest
from requirements import real_data_at

from edgefl.core.errors import DataError
from edgefl.tasks.datasets.idx import read_idx, read_image_set

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
    assert (test.inputs.shape, len(test.labels)) == ((10_000, 28, 28), 10_000)
    # Fashion-MNIST's twin in the same format is told apart by its bytes alone.
    other = {"mnist": "fashion-mnist", "fashion-mnist": "mnist"}[task]
    with pytest.raises(DataError, match="is not the published file"):
        read_image_set(folder, other, "t10k")
