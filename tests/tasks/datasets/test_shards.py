import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.core.errors import ConfigError, DataError
from edgefl.core.types import Dataset
from edgefl.tasks.datasets.shards import (
    ShardMetadata,
    check_shard,
    compute_sample_hashes,
    get_metadata_path,
    list_shard_files,
    read_metadata,
    read_shard,
    split_train_test,
    write_shard,
)
from edgefl.tasks.registry import make_task

IMAGES = np.arange(3 * 64, dtype=np.uint8).reshape(3, 8, 8) % 17
LABELS = np.array([4, 0, 4])


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "device-01.npz"
    write_shard(path, Dataset(inputs=IMAGES, targets=LABELS), ShardMetadata(task="digits", scheme="iid"))
    return path


def read(path):
    return make_task("digits", {}).read(str(path))


def forget_card(path):
    get_metadata_path(path).unlink()
    folder = path.parent / "folder"
    folder.mkdir()
    path.rename(folder / path.name)
    return folder


def refused(path, message):
    with pytest.raises(DataError, match=message):
        read(path)


def test_a_shard_comes_back_as_it_was_written_and_its_card_says_what_it_holds(shard):
    data, card = read(shard), read_metadata(shard)
    assert np.array_equal(data.inputs, IMAGES)
    assert (data.inputs.dtype, data.targets.tolist()) == (np.uint8, [4, 0, 4])
    assert (card.task, card.scheme, card.num_examples, dict(card.counts)) == ("digits", "iid", 3, {0: 1, 4: 2})
    text = json.loads(get_metadata_path(shard).read_text())
    get_metadata_path(shard).write_text(json.dumps({**text, "collected_by": "a newer edgefl"}))
    assert (text["v"], len(read(shard))) == (1, 3)
    assert sorted(file.name for file in shard.parent.iterdir()) == ["device-01.json", "device-01.npz"]


def test_a_truncated_shard_is_one_clear_line_with_a_card_and_without(shard):
    shard.write_bytes(shard.read_bytes()[:-20])
    refused(shard, r"device-01.npz is damaged: its SHA-256 is")
    refused(forget_card(shard), r"device-01.npz is not a readable .npz file")


def test_every_single_flipped_bit_is_noticed_in_a_folder_too(shard):
    whole = shard.read_bytes()
    for position in range(0, len(whole), 37):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        shard.write_bytes(damaged)
        refused(shard, "is damaged")
    refused(shard.parent, "is damaged")


def test_a_shard_of_another_task_without_a_card_or_that_is_not_there_says_what_to_do(shard):
    with pytest.raises(DataError, match="is of task digits, this is task mnist"):
        read_shard(str(shard), "mnist")
    get_metadata_path(shard).unlink()
    refused(
        shard, r"no card, the file device-01.json .* inputs \[n, 8, 8\].* 0\.\.9\) for digits; put it into a folder"
    )
    for path in ("", "/nowhere/shard.npz"):
        refused(path, r"does not exist; give a .npz file or a folder")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"task": 3, "sha256": ""}', '{"task": "digits", "sha256": "", "counts": 4}']
)
def test_a_card_that_is_none_is_one_clear_line(shard, text):
    get_metadata_path(shard).write_text(text)
    refused(shard, r"shard card .*device-01.json cannot be read")


@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        (IMAGES, None, "has no array 'labels', only inputs"),
        (IMAGES, np.array([0.5, 1.0, 2.0]), r"must be integers \[n\], got float64 \[3\]"),
        (IMAGES, np.array([[0], [1], [2]]), r"must be integers \[n\], got int64 \[3, 1\]"),
        (IMAGES[:2], LABELS, r"one row for each of 3 labels, got uint8 \[2, 8, 8\]"),
        (IMAGES[:, :7], LABELS, r"must be \[8, 8\] each, got \[7, 8\]"),
        (IMAGES, np.array([0, 10, 1]), r"must lie in 0..9, got 10"),
        (IMAGES, np.array([0, -1, 1]), r"must lie in 0..9, got -1"),
        (IMAGES[:0], LABELS[:0], "holds no examples"),
        (np.where(IMAGES == 0, np.nan, IMAGES), LABELS, "NaN or an infinity, first in row 0"),
        (np.array(["a", "b", "c"]), LABELS, "must be numbers"),
        (np.array([None] * 3), LABELS, "is not a readable .npz file"),
    ],
)
def test_arrays_that_make_no_sense_are_one_clear_line(tmp_path, inputs, labels, message):
    np.savez(tmp_path / "own.npz", inputs=inputs, **({} if labels is None else {"labels": labels}))
    refused(tmp_path, message)


@pytest.mark.parametrize("closed", ["home", "home/data", "home/data/device-01.npz", None])
def test_data_that_is_closed_to_this_user_is_one_clear_line(tmp_path, shard, closed):
    folder = tmp_path / "home" / "data"
    folder.mkdir(parents=True)
    for file in (shard, get_metadata_path(shard)):
        file.chmod(0o644)
        file.rename(folder / file.name)
    for path in (tmp_path, folder.parent, folder):
        path.chmod(0o755)
    if closed is not None:
        (tmp_path / closed).chmod(0)
    place = Path("home/data") if closed == "home/data" else Path("home/data/device-01.npz")
    try:
        told = as_nobody(tmp_path, lambda: read(place))
    finally:
        for path in (folder.parent, folder):
            path.chmod(0o755)
    if closed is None:
        assert told == ""
    else:
        assert told.startswith("DataError: shard 'home/data")
        assert "may not be read by this user" in told


def as_nobody(folder, call):
    """Returns what is raised when a user calls this, in a folder, who may read nothing that is not for all."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        told = "it was cut off"
        try:
            os.chdir(folder)
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            call()
            told = ""
        except DataError as error:
            told = f"DataError: {error}"
        finally:
            os.write(writer, told.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        told = answer.read()
    os.waitpid(child, 0)
    return told


def test_a_folder_is_read_as_it_grows_and_files_still_being_written_are_passed_over(tmp_path, shard):
    folder = forget_card(shard)
    (folder / ".device-02.npz.77.tmp").write_bytes(b"half")
    (folder / ".hidden.npz").write_bytes(b"half")
    assert len(read(folder)) == 3
    np.savez(folder / "b.npz", inputs=IMAGES[:2], labels=np.array([1, 2]))
    assert read(folder).targets.tolist() == [1, 2, 4, 0, 4]
    assert [file.name for file in list_shard_files(folder)] == ["b.npz", "device-01.npz"]
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"holds no .npz file yet")
    with (folder / "c.npz").open("wb") as file:
        np.save(file, IMAGES)
    refused(folder, r"one array without a name")


def test_files_of_different_shapes_in_a_folder_are_refused(tmp_path):
    for number in (2, 3):
        np.savez(tmp_path / f"{number}.npz", inputs=np.zeros((1, number)), labels=np.array([0]))
    with pytest.raises(DataError, match="inputs of different shapes"):
        read_shard(str(tmp_path), "own")


def test_the_report_names_counts_and_missing_classes(shard):
    report = check_shard(make_task("digits", {}), str(shard))
    assert (report.num_examples, dict(report.counts)) == (3, {0: 1, 4: 2})
    assert report.missing_labels == (1, 2, 3, 5, 6, 7, 8, 9)


def test_a_full_disk_or_a_folder_that_cannot_be_written_leaves_the_old_shard_whole(shard):
    class Full:
        """An array that the disk has no room for."""

        def __array__(self, *_, **__):
            raise OSError(28, "No space left on device")

    before = shard.read_bytes()
    with pytest.raises(DataError, match="cannot be written: No space left on device"):
        write_shard(shard, Dataset(inputs=Full(), targets=LABELS), ShardMetadata(task="digits"))
    with pytest.raises(DataError, match=r"cannot be written: (File exists|Not a directory)"):
        write_shard(shard / "s.npz", Dataset(inputs=IMAGES, targets=LABELS), ShardMetadata(task="digits"))
    assert shard.read_bytes() == before
    assert len(list(shard.parent.iterdir())) == 2


def some_data(n, seed=0):
    rng = np.random.default_rng(seed)
    return Dataset(inputs=rng.integers(0, 256, (n, 4, 4)).astype(np.uint8), targets=np.arange(n))


@settings(max_examples=25, deadline=None)
@given(n=st.integers(0, 60), more=st.integers(0, 60), fraction=st.floats(0, 0.9), salt=st.text(max_size=80))
def test_data_that_grows_in_any_order_never_moves_a_sample(n, more, fraction, salt):
    everything = some_data(n + more)
    before = split_train_test(everything.take(np.random.default_rng(1).permutation(n)), fraction, salt)
    after = split_train_test(everything, fraction, salt)
    for small, large in zip(before, after, strict=True):
        assert set(small.targets) <= set(large.targets)
    assert sorted([*after[0].targets, *after[1].targets]) == list(range(n + more))


def test_about_the_asked_fraction_goes_into_the_test_part_and_none_of_zero():
    train, test = split_train_test(some_data(4000), 0.1)
    assert len(train) + len(test) == 4000
    assert 330 < len(test) < 470
    assert [len(part) for part in split_train_test(some_data(30), 0.0)] == [30, 0]


def test_copies_of_a_sample_stay_on_one_side():
    data = some_data(50)
    doubled = Dataset(inputs=np.concatenate([data.inputs] * 2), targets=np.concatenate([data.targets] * 2))
    train, test = split_train_test(doubled, 0.3)
    assert not set(train.targets) & set(test.targets)


def test_another_salt_gives_another_split():
    data = some_data(200)
    assert set(split_train_test(data, 0.3, "a")[1].targets) != set(split_train_test(data, 0.3, "b")[1].targets)


@pytest.mark.parametrize("order", "<>")
def test_hashes_are_the_same_on_every_machine(order):
    found = [hex(one) for one in compute_sample_hashes(np.array([[1, 2], [3, 4]], f"{order}i4"))]
    assert found == ["0xd402f6fe3b117d90", "0x317c94473381150"]


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(ConfigError, match=r"test fraction must be in \[0, 1\)"):
        split_train_test(some_data(3), fraction)
