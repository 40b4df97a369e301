import json
import os
from pathlib import Path

import numpy as np
import pytest

from edgefl.errors import DataError
from edgefl.tasks.cards import ShardCard, card_path, read_card
from edgefl.tasks.registry import make_task
from edgefl.tasks.shards import check_shard, read_shard, shard_files, write_shard
from edgefl.types import Dataset

IMAGES = np.arange(3 * 64, dtype=np.uint8).reshape(3, 8, 8) % 17
LABELS = np.array([4, 0, 4])


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "device-01.npz"
    write_shard(path, Dataset(inputs=IMAGES, labels=LABELS), ShardCard(task="digits", scheme="iid"))
    return path


def read(path):
    return make_task("digits", {}).read(str(path))


def forget_card(path):
    card_path(path).unlink()
    folder = path.parent / "folder"
    folder.mkdir()
    path.rename(folder / path.name)
    return folder


def test_a_shard_comes_back_as_it_was_written(shard):
    data = read(shard)
    assert np.array_equal(data.inputs, IMAGES)
    assert data.inputs.dtype == np.uint8
    assert data.labels.tolist() == [4, 0, 4]


def test_the_card_says_what_the_shard_holds(shard):
    card = read_card(shard)
    assert (card.task, card.scheme, card.num_examples, dict(card.counts)) == ("digits", "iid", 3, {0: 1, 4: 2})
    assert json.loads(card_path(shard).read_text())["v"] == 1


def test_nothing_temporary_is_left_beside_a_shard(shard):
    assert sorted(file.name for file in shard.parent.iterdir()) == ["device-01.json", "device-01.npz"]


def test_a_truncated_shard_is_one_clear_line(shard):
    shard.write_bytes(shard.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"device-01.npz is damaged: its SHA-256 is"):
        read(shard)


def test_a_truncated_shard_without_a_card_is_one_clear_line(shard):
    shard.write_bytes(shard.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"device-01.npz is not a readable .npz file"):
        read(forget_card(shard))


def test_every_single_flipped_bit_is_noticed(shard):
    whole = shard.read_bytes()
    for position in range(0, len(whole), 37):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        shard.write_bytes(damaged)
        with pytest.raises(DataError, match="is damaged"):
            read(shard)


def test_a_shard_of_another_task_is_one_clear_line(shard):
    with pytest.raises(DataError, match="is of task digits, this is task mnist"):
        read_shard(str(shard), "mnist")


def test_a_shard_without_a_card_says_what_to_do(shard):
    card_path(shard).unlink()
    with pytest.raises(DataError, match=r"has no card device-01.json; put a file without one into a folder"):
        read(shard)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"task": 3, "sha256": ""}', '{"task": "digits", "sha256": "", "counts": 4}']
)
def test_a_card_that_is_none_is_one_clear_line(shard, text):
    card_path(shard).write_text(text)
    with pytest.raises(DataError, match=r"shard card .*device-01.json cannot be read"):
        read(shard)


def test_a_card_may_say_more_than_this_version_knows(shard):
    card = json.loads(card_path(shard).read_text())
    card_path(shard).write_text(json.dumps({**card, "collected_by": "a newer edgefl"}))
    assert len(read(shard)) == 3


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"inputs": IMAGES}, "has no array 'labels', only inputs"),
        ({"inputs": IMAGES, "labels": np.array([0.5, 1.0, 2.0])}, r"must be integers \[n\], got float64 \[3\]"),
        ({"inputs": IMAGES, "labels": np.array([[0], [1], [2]])}, r"must be integers \[n\], got int64 \[3, 1\]"),
        ({"inputs": IMAGES[:2], "labels": LABELS}, r"one row for each of 3 labels, got uint8 \[2, 8, 8\]"),
        ({"inputs": IMAGES[:, :7], "labels": LABELS}, r"must be \[8, 8\] each, got \[7, 8\]"),
        ({"inputs": IMAGES, "labels": np.array([0, 10, 1])}, r"must lie in 0..9, got 10"),
        ({"inputs": IMAGES, "labels": np.array([0, -1, 1])}, r"must lie in 0..9, got -1"),
        ({"inputs": IMAGES[:0], "labels": LABELS[:0]}, "holds no examples"),
        ({"inputs": np.where(IMAGES == 0, np.nan, IMAGES), "labels": LABELS}, "NaN or an infinity, first in row 0"),
        ({"inputs": np.array(["a", "b", "c"]), "labels": LABELS}, "must be numbers"),
        ({"inputs": np.array([None] * 3), "labels": LABELS}, "is not a readable .npz file"),
    ],
)
def test_arrays_that_make_no_sense_are_one_clear_line(tmp_path, arrays, message):
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(DataError, match=message):
        read(tmp_path)


def test_one_bare_array_under_the_name_of_a_shard_is_one_clear_line(tmp_path):
    with (tmp_path / "own.npz").open("wb") as file:
        np.save(file, IMAGES)
    with pytest.raises(DataError, match=r"one array without a name"):
        read(tmp_path)


@pytest.mark.parametrize("path", ["", "/nowhere/shard.npz"])
def test_a_shard_that_is_not_there_is_one_clear_line(path):
    with pytest.raises(DataError, match=r"does not exist; give a .npz file or a folder"):
        read(path)


@pytest.mark.parametrize("closed", ["home", "home/data", "home/data/device-01.npz", None])
def test_data_that_is_closed_to_this_user_is_one_clear_line(tmp_path, shard, closed):
    folder = tmp_path / "home" / "data"
    folder.mkdir(parents=True)
    for file in (shard, card_path(shard)):
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


def test_an_empty_folder_says_so(tmp_path):
    with pytest.raises(DataError, match=r"holds no .npz file yet"):
        read(tmp_path)


def test_a_folder_is_read_as_it_grows_and_files_still_being_written_are_passed_over(tmp_path, shard):
    folder = forget_card(shard)
    assert len(read(folder)) == 3
    (folder / ".device-02.npz.77.tmp").write_bytes(b"half")
    (folder / ".hidden.npz").write_bytes(b"half")
    assert len(read(folder)) == 3
    np.savez(folder / "b.npz", inputs=IMAGES[:2], labels=np.array([1, 2]))
    assert read(folder).labels.tolist() == [1, 2, 4, 0, 4]
    assert [file.name for file in shard_files(folder)] == ["b.npz", "device-01.npz"]


def test_a_file_in_a_folder_is_checked_against_its_card(shard):
    shard.write_bytes(shard.read_bytes() + b"x")
    with pytest.raises(DataError, match="is damaged"):
        read(shard.parent)


def test_files_of_different_shapes_in_a_folder_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", inputs=np.zeros((1, 2)), labels=np.array([0]))
    np.savez(tmp_path / "b.npz", inputs=np.zeros((1, 3)), labels=np.array([0]))
    with pytest.raises(DataError, match="inputs of different shapes"):
        read_shard(str(tmp_path), "own")


def test_the_report_names_counts_and_missing_classes(shard):
    report = check_shard(make_task("digits", {}), str(shard))
    assert (report.num_examples, dict(report.counts)) == (3, {0: 1, 4: 2})
    assert report.missing == (1, 2, 3, 5, 6, 7, 8, 9)


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written: File exists"):
        write_shard(tmp_path / "file" / "s.npz", Dataset(inputs=IMAGES, labels=LABELS), ShardCard(task="digits"))


def test_a_full_disk_leaves_the_old_shard_whole(shard):
    before = shard.read_bytes()

    class Full:
        """An array that the disk has no room for."""

        def __array__(self, *_, **__):
            raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match="cannot be written: No space left on device"):
        write_shard(shard, Dataset(inputs=Full(), labels=LABELS), ShardCard(task="digits"))
    assert shard.read_bytes() == before
    assert len(list(shard.parent.iterdir())) == 2
