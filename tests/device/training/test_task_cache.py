import os

import numpy as np

from edgefl.core.types import Dataset
from edgefl.device.training.task_cache import TaskCache, compute_shard_version
from edgefl.tasks.datasets.shards import ShardMetadata, write_shard


def test_a_picture_that_is_replaced_in_place_makes_another_version_and_a_collector_s_notes_do_not(tmp_path):
    (tmp_path / "robin").mkdir()
    picture = tmp_path / "robin" / "a.png"
    picture.write_bytes(b"one")
    os.utime(tmp_path / "robin", ns=(1, 1))
    before = compute_shard_version(tmp_path)
    for name in (".collect.json", "robin/.a.png.abcdefgh.tmp"):
        (tmp_path / name).write_bytes(b"x")
    os.utime(tmp_path / "robin", ns=(1, 1))
    assert compute_shard_version(tmp_path) == before
    picture.write_bytes(b"two")
    os.utime(picture, ns=(2, 2))
    assert compute_shard_version(tmp_path) not in {before, None}
    assert compute_shard_version(tmp_path / "none") is None


def test_the_rows_of_a_shard_lie_in_memory_once_and_a_new_shard_takes_their_place(tmp_path):
    path = tmp_path / "digits.npz"
    cache = TaskCache(lambda: {"digits": str(path)}, accelerator="cpu", threads=1)

    def write(num_examples):
        rows = np.random.default_rng(0).random((num_examples, 8, 8), np.float32)
        write_shard(path, Dataset(inputs=rows, targets=np.arange(num_examples) % 10), ShardMetadata(task="digits"))

    write(200)
    task = cache.get("digits", {})
    cache.check_data(task)  # as before a run
    assert len(task.data) == 200
    training, test = cache.load_split(task, 0.1)
    assert len(training) + len(test) == 200
    assert task.data is None
    assert task.num_examples == 200
    assert cache.load_split(task, 0.1)[0] is training
    rest, root = cache.load_root_split(task, 50)
    assert len(rest) + len(root) == 200
    assert 20 < len(root) < 80
    write(120)
    training, test = cache.load_split(task, 0.1)
    assert len(training) + len(test) == 120
    assert len(task.splits) == 1
    cache.check_data(task)  # as before a second run
    assert task.data is None
    assert len(cache.load_data(task)) == task.num_examples == 120
    assert cache.load_split(task, 0.1)[0] is training
    assert task.data is None
