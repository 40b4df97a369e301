import numpy as np
import pytest
from requirements import real_data_at

from edgefl.core.errors import DataError
from edgefl.tasks.datasets.central import load_central_data
from edgefl.tasks.datasets.cifar import read_test_batch, read_train_batches

LABELS = np.array([3, 9, 0], np.uint8)
IMAGES = np.random.default_rng(0).integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
RECORDS = np.concatenate([LABELS[:, None], IMAGES.reshape(3, -1)], axis=1).tobytes()


def residual_of(images):
    """Differences along columns, then rows, of green and of red and blue against it."""
    planes = np.stack([images[:, 1], images[:, 0] - images[:, 1], images[:, 2] - images[:, 1]], axis=1)
    for axis in (3, 2):
        planes = np.diff(planes, axis=axis, prepend=np.uint8(0))
    return planes


def write(folder, name, content=RECORDS):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.bin").write_bytes(content)


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"])
def test_the_binary_version_is_read_from_its_folder_or_the_one_it_was_unpacked_in(tmp_path, inner):
    for name in ("data_batch_2", "data_batch_5", "test_batch"):
        write(tmp_path / inner, name)
    central = load_central_data("cifar-10", tmp_path)
    assert np.array_equal(central.train.inputs, np.concatenate([IMAGES, IMAGES]))
    assert central.train.targets.tolist() == [3, 9, 0, 3, 9, 0]
    assert (central.test.inputs.dtype, central.test.targets.dtype) == (np.uint8, np.int64)
    assert central.source == "CIFAR-10, 2 of 5 training batches"


def test_differences_in_an_npz_are_restored_to_the_same_images(tmp_path):
    np.savez(tmp_path / "test_batch.npz", labels=LABELS, residual=residual_of(IMAGES))
    found = read_test_batch(tmp_path)
    assert np.array_equal(found.inputs, IMAGES)
    assert found.targets.tolist() == [3, 9, 0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it must be 1 to 10000 records of 3073 bytes"),
        (RECORDS[:-1], "it must be 1 to 10000 records"),
        (bytes(3073 * 10_001), "it must be 1 to 10000 records"),
        (b"\x0a" + RECORDS[1:], "a label is 10, expected 0 to 9"),
    ],
)
def test_a_damaged_binary_batch_is_one_clear_line_with_its_name(tmp_path, content, message):
    write(tmp_path, "data_batch_1", content)
    with pytest.raises(DataError, match=rf"data_batch_1\.bin is no batch of CIFAR-10: {message}"):
        read_train_batches(tmp_path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"labels": LABELS}, "is not a readable .npz file"),
        ({"labels": LABELS, "residual": IMAGES.astype(np.int16)}, "is no batch .* residual int16"),
        ({"labels": LABELS, "residual": IMAGES[:2]}, r"is no batch .* labels uint8 \[3\] and residual uint8 \[2, 3"),
        ({"labels": LABELS, "residual": IMAGES[:, :, :16]}, "is no batch"),
        ({"labels": LABELS.astype(float), "residual": IMAGES}, "is no batch"),
        ({"labels": LABELS.astype(np.int8) - 4, "residual": IMAGES}, "is no batch of CIFAR-10: a label is -4"),
        ({"labels": LABELS.astype(object), "residual": IMAGES}, "is not a readable .npz file .*objects"),
    ],
)
def test_a_damaged_npz_batch_is_one_clear_line_with_its_name(tmp_path, arrays, message):
    np.savez(tmp_path / "test_batch.npz", **arrays)
    with pytest.raises(DataError, match=rf"test_batch\.npz {message}"):
        read_test_batch(tmp_path)


def test_absent_batches_and_the_pickled_version_are_refused_with_what_would_be_read(tmp_path):
    with pytest.raises(DataError, match=r"data_batch_1\.bin does not exist; --data names the folder"):
        read_train_batches(tmp_path)
    (tmp_path / "test_batch").write_bytes(b"\x80\x02")
    with pytest.raises(DataError, match="as pickles, which are not read; download its binary version"):
        read_test_batch(tmp_path)


def test_the_real_photographs_have_their_known_means():
    central = load_central_data("cifar-10", real_data_at("cifar-10"))
    assert (central.test.inputs.shape, np.bincount(central.test.targets).tolist()) == (
        (10_000, 3, 32, 32),
        [1000] * 10,
    )
    means = central.train.inputs.mean(axis=(0, 2, 3)) / 255
    assert means == pytest.approx([0.4914, 0.4822, 0.4465], abs=0.002)
