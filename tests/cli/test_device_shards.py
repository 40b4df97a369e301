from __future__ import annotations


def test_shards_may_come_later_and_are_checked(run, front_door, shard, tmp_path):
    token = front_door.token().text()
    assert run("device", "join", "--token", token, "--name", "pi-1", "--state", tmp_path / "d").code == 0
    assert run("device", "shard", "check", "--state", tmp_path / "d").code == 40
    ran = run("device", "shard", "add", "digits", shard, "--state", tmp_path / "d")
    assert "digits: 12 examples" in ran.out
    ran = run("device", "shard", "check", "digits", "--state", tmp_path / "d")
    assert ran.code == 0
    assert "class 2" in ran.out
    assert "missing: 3, 4, 5, 6, 7, 8, 9" in ran.out
    assert run("device", "shard", "check", "mnist", "--state", tmp_path / "d").code == 40
