import gc
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from edgefl.core.errors import DataError
from edgefl.core.types import Dataset, TrainConfig, derive_rng
from edgefl.tasks.augmentation import augment_batches
from edgefl.tasks.datasets import shards
from edgefl.tasks.datasets.array_files import read_npz
from edgefl.tasks.datasets.shards import (
    MAX_BYTES_IN_MEMORY,
    ShardMetadata,
    load_task_data,
    read_shard,
    split_train_test,
    write_shard,
)
from edgefl.tasks.learners.numpy_learner import DenseModel
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.losses.registry import check_data
from edgefl.tasks.stored_arrays import RowBuffer, StoredArray, is_stored, iterate_stored_batches, select_rows

ROW_NUMBERS = 250
SHAPE = (ROW_NUMBERS, 2)
NUM_ROWS = MAX_BYTES_IN_MEMORY // (8 * ROW_NUMBERS) + 100


def make_examples(num_rows=NUM_ROWS):
    rng = derive_rng(5)
    inputs = rng.standard_normal((num_rows, *SHAPE), np.float32)
    return Dataset(inputs=inputs, targets=(inputs[:, 0, 0] > 0).astype(np.int64))


def write_npz(path, save=np.savez, **arrays):
    with path.open("wb") as file:
        save(file, **arrays)


def count_open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def read_in_place(path, **options):
    with path.open("rb") as file:
        return read_npz(file, in_place="inputs".__eq__, **options)["inputs"]


@pytest.fixture(scope="module")
def examples():
    return make_examples()


@pytest.fixture(scope="module")
def large(tmp_path_factory, examples):
    """A shard just too large for memory."""
    path = tmp_path_factory.mktemp("large") / "pi.npz"
    write_shard(path, examples, ShardMetadata(task="own"))
    return path


@pytest.fixture
def parts(tmp_path):
    """30 rows of which the middle ones are in memory, and the same as an array."""
    whole = np.arange(30 * 6, dtype=">f4").reshape(30, 2, 3)
    for name, rows in (("a", whole[:12]), ("c", whole[17:])):
        write_npz(tmp_path / f"{name}.npz", other=np.zeros(3), inputs=rows)
    stored = StoredArray.concatenate(
        [read_in_place(tmp_path / "a.npz"), whole[12:17], read_in_place(tmp_path / "c.npz")]
    )
    return stored, whole


@pytest.mark.parametrize(
    "rows",
    [
        slice(None),
        slice(3, 20, 4),
        slice(None, None, -1),
        slice(5, 5),
        np.array([29, 0, 12, 12, 16, -1, 3]),
        np.arange(30) % 3 == 0,
        np.array([], np.int64),
        7,
        (slice(2, 20), 1),
        np.array([[1, 2], [3, 4]]),
    ],
)
def test_rows_of_files_are_those_of_the_same_array_in_memory(parts, rows):
    stored, whole = parts
    assert np.array_equal(stored[rows], whole[rows])
    assert (stored.shape, len(stored), stored.nbytes) == (whole.shape, 30, whole.nbytes)
    chosen, of_memory = stored.select(np.arange(28, 1, -2)), whole[28:1:-2]
    assert np.array_equal(chosen[np.array([2, -1, 0])], of_memory[[2, -1, 0]])
    assert np.array_equal(chosen.select(slice(1, 9))[:], of_memory[1:9])


def test_what_is_no_choice_of_rows_reads_it_whole(parts):
    stored, whole = parts
    assert np.array_equal(2 * stored + np.abs(stored), 3 * whole)
    assert stored.mean() == whole.mean()
    assert np.concatenate([stored, whole]).shape == (60, 2, 3)
    assert np.asarray(stored).dtype == np.concatenate([whole, whole]).dtype
    for rows in (np.array([30]), np.array([-31]), np.ones(29, bool)):
        with pytest.raises(IndexError):
            stored[rows]
    with pytest.raises(AttributeError):
        stored.no_such_thing  # noqa: B018 the access is what fails


def test_an_array_that_is_packed_or_lies_by_column_is_read_into_memory(tmp_path):
    rows = np.arange(12.0).reshape(4, 3)
    write_npz(tmp_path / "packed.npz", np.savez_compressed, inputs=rows)
    write_npz(tmp_path / "columns.npz", inputs=np.asfortranarray(rows))
    for name in ("packed", "columns"):
        found = read_in_place(tmp_path / f"{name}.npz")
        assert not is_stored(found)
        assert np.array_equal(found, rows)


def test_damage_in_place_is_found_without_a_card_and_a_file_that_shrinks_is_one_line(tmp_path):
    path = tmp_path / "part.npz"
    rows = np.arange(4000.0).reshape(40, 100)
    write_npz(path, inputs=rows)
    whole = path.read_bytes()
    path.write_bytes(whole[:20_000] + bytes([whole[20_000] ^ 1]) + whole[20_001:])
    with pytest.raises(ValueError, match="CRC"):
        read_in_place(path)
    path.write_bytes(whole)
    stored = read_in_place(path, is_checked=True)
    os.truncate(path, 20_000)
    assert np.array_equal(stored[:3], rows[:3])
    with pytest.raises(DataError, match=r"part.npz became shorter while it was in use"):
        stored[np.array([39])]


def test_a_file_in_use_outlives_its_name_and_is_closed_after(tmp_path):
    path = tmp_path / "part.npz"
    write_npz(path, inputs=np.arange(10))
    before = count_open_files()
    stored = read_in_place(path).select(np.arange(5))
    path.unlink()
    assert stored[:].tolist() == [0, 1, 2, 3, 4]
    del stored
    gc.collect()
    assert count_open_files() == before


def test_a_large_shard_stays_in_its_file_and_splits_as_in_memory(large, examples):
    data = read_shard(str(large), "own", input_shape=SHAPE, num_classes=2)
    assert is_stored(data.inputs)
    for found, expected in zip(split_train_test(data), split_train_test(examples), strict=True):
        assert is_stored(found.inputs)
        assert np.array_equal(found.targets, expected.targets)
        assert np.array_equal(found.inputs[::50], expected.inputs[::50])
    weighted = select_rows(Dataset(inputs=data.inputs, targets=data.targets, weights=data.targets + 1), slice(5))
    assert weighted.weights.tolist() == (examples.targets[:5] + 1).tolist()
    assert is_stored(weighted.inputs)


def test_a_large_folder_is_read_in_place_and_a_nan_in_it_has_its_row(tmp_path, large, examples):
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, start in enumerate((0, NUM_ROWS // 2)):
        rows = examples.take(slice(start, start + NUM_ROWS // 2))
        write_npz(folder / f"{number}.npz", inputs=rows.inputs, labels=rows.targets)
    data = read_shard(str(folder), "own")
    assert is_stored(data.inputs)
    assert np.array_equal(
        data.inputs[NUM_ROWS // 2 - 2 : NUM_ROWS // 2 + 2], examples.inputs[:][NUM_ROWS // 2 - 2 :][:4]
    )
    spoilt = examples.inputs.copy()
    spoilt[NUM_ROWS - 3, 1, 1] = np.nan
    write_npz(folder / "1.npz", inputs=spoilt, labels=examples.targets)
    with pytest.raises(DataError, match=f"hold a NaN or an infinity, first in row {NUM_ROWS - 3}"):
        read_shard(str(folder), "own")


@pytest.mark.parametrize("is_large", [True, False])
def test_files_of_a_folder_keep_the_weights_of_those_that_have_them(tmp_path, monkeypatch, examples, is_large):
    monkeypatch.setattr(shards, "MAX_BYTES_IN_MEMORY", 0 if is_large else MAX_BYTES_IN_MEMORY)
    rows = examples.take(slice(0, 6))
    write_npz(tmp_path / "0.npz", inputs=rows.inputs, labels=rows.targets)
    write_npz(tmp_path / "1.npz", inputs=rows.inputs, labels=rows.targets, weights=np.arange(6.0))
    data = read_shard(str(tmp_path), "own")
    assert is_stored(data.inputs) == is_large
    assert data.weights.tolist() == [1.0] * 6 + [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_million_short_rows_are_split_and_read_in_little_memory_beside_their_targets():
    buffer, num_rows = RowBuffer(0), 2**20
    buffer.add(np.arange(2 * num_rows, dtype=np.float32).reshape(num_rows, 2))
    data = Dataset(inputs=buffer.finish(), targets=np.zeros(num_rows, np.int32))
    tracemalloc.start()
    try:
        check_data(SimpleNamespace(name="own", loss="cross-entropy"), data)
        checked_bytes = tracemalloc.get_traced_memory()[1]
        training, test = split_train_test(data)
        split_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        batches = iterate_stored_batches(training, 32, derive_rng(1))
        next(batches)
        read_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(training) + len(test) == num_rows
    assert checked_bytes < 2 * num_rows  # no copy of all targets
    assert split_bytes < 15 * num_rows  # rows' numbers and targets, and once more while they are chosen
    assert read_bytes < 24 * num_rows  # those, and a buffer of 16 MB


@pytest.mark.parametrize("batch_size", [7, 64, 100_000])
def test_an_epoch_in_blocks_has_every_example_once_in_as_many_batches(large, examples, batch_size):
    data = read_shard(str(large), "own")
    numbers = np.arange(len(data))
    numbered = Dataset(inputs=data.inputs, targets=numbers, weak=numbers % 3 == 0)
    rng, orders = derive_rng(1), []
    for _ in range(2):
        batches = list(iterate_stored_batches(numbered, batch_size, rng))
        assert len(batches) == -(-len(data) // batch_size)
        assert sum(len(batch) != batch_size for batch in batches) <= 1
        orders.append(np.concatenate([batch.targets for batch in batches]))
        assert np.array_equal(np.sort(orders[-1]), np.arange(len(data)))
        assert all(np.array_equal(one.inputs[-1], examples.inputs[one.targets[-1]]) for one in batches[::9])
        assert all(np.array_equal(one.weak, one.targets % 3 == 0) for one in batches)
    assert not np.array_equal(*orders)


def test_batches_of_a_file_are_augmented_one_by_one(large):
    sizes = []

    def augment(inputs, targets, rng):
        sizes.append(len(inputs))
        return inputs + 1, targets

    data = read_shard(str(large), "own")
    task = SimpleNamespace(name="own", augment=augment)
    batch = next(iterate_stored_batches(augment_batches(task, data, derive_rng(1)), 64, derive_rng(1)))
    plain = next(iterate_stored_batches(data, 64, derive_rng(1)))
    assert sizes == [64]
    assert np.array_equal(batch.inputs, plain.inputs + 1)


def test_training_on_a_file_learns_and_repeats_itself(large):
    data = read_shard(str(large), "own")
    model, plan = DenseModel(sizes=(2 * ROW_NUMBERS, 2)), TrainConfig(epochs=1.0, batch_size=64, learning_rate=0.02)
    losses = []
    for _ in range(2):
        learner = model.learner()
        learner.load(model.init(1))
        train(learner, data, plan, derive_rng(3), clock=time.monotonic, on_iteration=lambda *_: False)
        losses.append(learner.evaluate(data))
    assert losses[0] == losses[1]
    assert losses[0][1] > 0.8


def test_rows_that_come_in_turn_are_in_memory_until_they_are_many():
    whole = np.arange(600, dtype=np.float32).reshape(100, 6)
    before = count_open_files()
    for max_bytes, is_in_file in ((1600, False), (1599, True), (0, True)):
        buffer = RowBuffer(max_bytes)
        for start in range(0, 100, 30):
            buffer.add(whole[start : start + 30, :4])
        found = buffer.finish()
        assert is_stored(found) == is_in_file
        assert np.array_equal(found[:], whole[:, :4])
        assert (found.shape, found.dtype) == ((100, 4), np.float32)
    del found, buffer
    gc.collect()
    assert count_open_files() == before


def test_rows_in_memory_are_not_there_twice_when_they_become_one_array():
    buffer = RowBuffer(2**24)
    tracemalloc.start()
    try:
        for number in range(64):
            buffer.add(np.full((1024, 32), number, np.float32))
        before = tracemalloc.get_traced_memory()[0]
        found = buffer.finish()
        assert tracemalloc.get_traced_memory()[0] < 1.1 * before
    finally:
        tracemalloc.stop()
    assert np.array_equal(found[::1024, 0], np.arange(64))


def test_a_shard_that_there_is_no_room_for_is_one_line(tmp_path):
    script = (
        "import resource, numpy as np; from edgefl.tasks.stored_arrays import RowBuffer\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "RowBuffer(0).add(np.zeros((2, 80000)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "DataError: a large shard needs a temporary file of 1280000 bytes and more: File too large" in done.stderr


def test_arrays_by_name_of_a_large_shard_stay_in_their_file_and_are_read_together(tmp_path, examples):
    path, numbers = tmp_path / "own.npz", np.arange(NUM_ROWS)
    task = SimpleNamespace(name="own", loss="mse")
    data = Dataset(inputs={"signal": examples.inputs, "number": numbers}, targets=numbers)
    write_shard(path, data, ShardMetadata(task="own", is_dataset=True))
    found = load_task_data(task, path)
    assert is_stored(found.inputs)
    train_part, test_part = split_train_test(found, 0.25)
    assert is_stored(train_part.inputs)
    in_memory = split_train_test(data, 0.25)
    np.testing.assert_array_equal(train_part.targets, in_memory[0].targets)
    np.testing.assert_array_equal(test_part.targets, in_memory[1].targets)
    seen = []
    for batch in iterate_stored_batches(train_part, 64, derive_rng(1)):
        np.testing.assert_array_equal(batch.inputs["number"], batch.targets)
        np.testing.assert_array_equal(batch.inputs["signal"], examples.inputs[batch.targets])
        seen += [*batch.targets]
    assert sorted(seen) == sorted(train_part.targets)
