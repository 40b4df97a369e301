from __future__ import annotations

from dataclasses import replace

import pytest

from edgefl.device.state import DeviceState


def test_join_takes_the_task_from_the_shard_s_card(run, front_door, shard, tmp_path):
    token = front_door.token().text()
    ran = run("device", "join", front_door.address, "--token", token, "--shard", shard, "--name", "pi-1",
              "--state", tmp_path / "d", "--accelerator", "cpu", "--threads", "1")  # fmt: skip
    assert ran.code == 0, ran.err
    assert "joined fleet lab as pi-1 (trainer)" in ran.out
    device = DeviceState.load(tmp_path / "d").device
    assert (device.shards, device.accelerator, device.threads) == ({"digits": str(shard)}, "cpu", 1)
    assert front_door.store.capabilities()["pi-1"].shards == {"digits": 12}
    assert front_door.store.capabilities()["pi-1"].facts["cores"] >= 1


def test_the_token_s_own_addresses_and_a_token_file_are_enough(run, front_door, tmp_path):
    (tmp_path / "token").write_text(front_door.token().text() + "\n")
    ran = run("device", "join", "--token-file", tmp_path / "token", "--name", "pi-1", "--state", tmp_path / "d")
    assert ran.code == 0, ran.err


@pytest.mark.parametrize(
    ("case", "code", "words"),
    [
        ("damaged", 31, "copy it whole"),
        ("unknown", 31, "no such token"),
        ("expired", 32, "expired"),
        ("used", 33, "no uses left"),
        ("wrong-ca", 34, "nothing was sent"),
        ("taken", 35, "another device is called"),
        ("unreachable", 20, "cannot be reached"),
        ("no-token", 2, "a join needs"),
        ("bad-name", 2, "device name must be"),
        ("bad-address", 2, "HOST:PORT"),
    ],
)
def test_each_failed_join_is_one_line_its_own_exit_code_and_nothing_written(
    run, make_front_door, tmp_path, case, code, words
):
    door = make_front_door()
    token, name, address = door.token(ttl_s=-5.0 if case == "expired" else 60.0), "pi-1", door.address
    if case in ("used", "taken"):
        used = token if case == "used" else door.token()
        assert (
            run("device", "join", "--token", used.text(), "--name", "pi-1", "--state", tmp_path / "first").code == 0
        )
        name = "pi-2" if case == "used" else "pi-1"
    text = {
        "damaged": token.text()[:-20],
        "unknown": replace(token, secret="x").text(),
        "unreachable": replace(token, addresses=()).text(),
    }.get(case, token.text())
    address = {"unreachable": "127.0.0.1:1", "bad-address": "a b"}.get(case, address)
    address = make_front_door().address if case == "wrong-ca" else address
    name = "Not A Slug" if case == "bad-name" else name
    given = [] if case == "no-token" else ["--token", text]
    ran = run("device", "join", address, *given, "--name", name, "--state", tmp_path / "d")
    assert (ran.code, ran.is_one_line) == (code, True), ran.err
    assert words in ran.err
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("damage", ["missing", "truncated", "foreign"])
def test_a_shard_that_cannot_be_used_is_found_before_the_token_is(run, front_door, shard, tmp_path, damage):
    text = str(shard)
    if damage == "missing":
        text = str(tmp_path / "none.npz")
    elif damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-30])
    else:
        text = f"mnist={shard}"
    ran = run("device", "join", "--token", front_door.token().text(), "--shard", text, "--state", tmp_path / "d")
    assert (ran.code, ran.is_one_line) == (4, True), ran.err
    assert front_door.requests == []


def test_a_shard_without_a_card_needs_its_task(run, front_door, tmp_path):
    (tmp_path / "folder").mkdir()
    ran = run("device", "join", "--token", front_door.token().text(), "--shard", tmp_path / "folder")
    assert (ran.code, ran.is_one_line) == (2, True)
    assert "TASK=" in ran.err


@pytest.mark.parametrize("name", ["cuda:1", "cuda"])
def test_join_takes_one_gpu_of_several(run, front_door, tmp_path, name):
    token = front_door.token().text()
    ran = run("device", "join", front_door.address, "--token", token, "--name", "pi-9", "--state", tmp_path / "d",
              "--accelerator", name)  # fmt: skip
    assert ran.code == 0, ran.err
    assert DeviceState.load(tmp_path / "d").device.accelerator == name


@pytest.mark.parametrize("name", ["cuda:", "cuda:x", "gpu", "cuda:1\n", ""])
def test_an_accelerator_that_is_none_is_refused(run, name):
    ran = run("device", "join", "--token", "x", "--accelerator", name)
    assert ran.code == 2
    assert "must be auto, cpu, cuda or cuda:N" in ran.err
