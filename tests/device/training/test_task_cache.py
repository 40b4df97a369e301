import os

from edgefl.device.training.task_cache import compute_shard_version


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
