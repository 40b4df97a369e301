from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl.cli.main import main
from edgefl.device.state import DeviceState
from edgefl.tasks.cards import ShardCard
from edgefl.tasks.shards import write_shard
from edgefl.types import Dataset


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))

    def call(*arguments: str | Path) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["-q", *map(str, arguments)])
        out, err = capsys.readouterr()
        return Ran(int(ended.value.code or 0), out, err)

    return call


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "shards" / "device-01.npz"
    rows = np.arange(12)
    inputs = np.zeros((12, 8, 8), dtype=np.uint8)
    inputs[:, 0, 0] = rows
    write_shard(path, Dataset(inputs=inputs, labels=rows % 3), ShardCard(task="digits"))
    return path


def _one_line(ran: Ran) -> bool:
    return ran.out == "" and ran.err.startswith("edgefl: ") and ran.err.count("\n") == 1


def test_join_takes_the_task_from_the_shard_s_card(run: Any, front_door: Any, shard: Path, tmp_path: Path) -> None:
    token = front_door.token().text()
    ran = run("device", "join", front_door.address, "--token", token, "--shard", shard, "--name", "pi-1",
              "--state", tmp_path / "d", "--accelerator", "cpu", "--threads", "1")  # fmt: skip
    assert ran.code == 0, ran.err
    assert "joined fleet lab as pi-1 (trainer)" in ran.out
    device = DeviceState.load(tmp_path / "d").device
    assert (device.shards, device.accelerator, device.threads) == ({"digits": str(shard)}, "cpu", 1)
    assert front_door.store.capabilities()["pi-1"].shards == {"digits": 12}
    assert front_door.store.capabilities()["pi-1"].facts["cores"] >= 1


def test_the_token_s_own_addresses_and_a_token_file_are_enough(run: Any, front_door: Any, tmp_path: Path) -> None:
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
    run: Any, make_front_door: Any, tmp_path: Path, case: str, code: int, words: str
) -> None:
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
    assert (ran.code, _one_line(ran)) == (code, True), ran.err
    assert words in ran.err
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("damage", ["missing", "truncated", "foreign"])
def test_a_shard_that_cannot_be_used_is_found_before_the_token_is(
    run: Any, front_door: Any, shard: Path, tmp_path: Path, damage: str
) -> None:
    text = str(shard)
    if damage == "missing":
        text = str(tmp_path / "none.npz")
    elif damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-30])
    else:
        text = f"mnist={shard}"
    ran = run("device", "join", "--token", front_door.token().text(), "--shard", text, "--state", tmp_path / "d")
    assert (ran.code, _one_line(ran)) == (4, True), ran.err
    assert front_door.requests == []


def test_a_shard_without_a_card_needs_its_task(run: Any, front_door: Any, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    ran = run("device", "join", "--token", front_door.token().text(), "--shard", tmp_path / "folder")
    assert (ran.code, _one_line(ran)) == (2, True)
    assert "TASK=" in ran.err


def test_shards_may_come_later_and_are_checked(run: Any, front_door: Any, shard: Path, tmp_path: Path) -> None:
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


def test_status_says_whether_the_coordinator_is_reached(run: Any, front_door: Any, tmp_path: Path) -> None:
    assert run("device", "status", "--state", tmp_path / "d").code == 36
    run("device", "join", "--token", front_door.token().text(), "--name", "pi-1", "--state", tmp_path / "d")
    value = json.loads(run("device", "status", "--state", tmp_path / "d", "--format", "json").out)
    assert (value["v"], value["device_id"], value["coordinator"]) == (1, "pi-1", front_door.address)
    assert abs(value["clock_skew_s"]) < 1
    front_door.stop()
    assert "cannot be reached" in run("device", "status", "--state", tmp_path / "d").out


def test_starting_without_a_join_says_what_to_run(run: Any, tmp_path: Path) -> None:
    ran = run("device", "start", "--state", tmp_path / "d")
    assert (ran.code, _one_line(ran)) == (36, True), ran.err


def test_probe_prints_text_and_json(run: Any) -> None:
    assert "cores" in run("device", "probe").out
    assert json.loads(run("device", "probe", "--json").out)["v"] == 1


@pytest.mark.parametrize("name", ["cuda:1", "cuda"])
def test_join_takes_one_gpu_of_several(run: Any, front_door: Any, tmp_path: Path, name: str) -> None:
    token = front_door.token().text()
    ran = run("device", "join", front_door.address, "--token", token, "--name", "pi-9", "--state", tmp_path / "d",
              "--accelerator", name)  # fmt: skip
    assert ran.code == 0, ran.err
    assert DeviceState.load(tmp_path / "d").device.accelerator == name


@pytest.mark.parametrize("name", ["cuda:", "cuda:x", "gpu", "cuda:1\n", ""])
def test_an_accelerator_that_is_none_is_refused(run: Any, name: str) -> None:
    ran = run("device", "join", "--token", "x", "--accelerator", name)
    assert ran.code == 2
    assert "must be auto, cpu, cuda or cuda:N" in ran.err


@pytest.fixture
def joined(run: Any, front_door: Any, shard: Path, tmp_path: Path) -> Path:
    ran = run("device", "join", front_door.address, "--token", front_door.token().text(), "--shard", shard,
              "--name", "pi-1", "--state", tmp_path / "d", "--max-temperature", "75")  # fmt: skip
    assert ran.code == 0, ran.err
    return tmp_path / "d"


def test_a_temperature_limit_is_given_at_the_join_changed_and_taken_away(run: Any, joined: Path) -> None:
    assert DeviceState.load(joined).device.max_temperature_c == 75.0
    ran = run("device", "set", "--max-temperature", "68.5", "--state", joined)
    assert (ran.code, ran.out) == (0, "pi-1 rests between iterations above 68.5 °C\n")
    assert DeviceState.load(joined).device.max_temperature_c == 68.5
    assert json.loads(run("device", "status", "--state", joined, "--format", "json").out)["max_temperature_c"] == 68.5
    assert run("device", "set", "--max-temperature", "none", "--state", joined).out == "pi-1 rests never\n"
    assert DeviceState.load(joined).device.max_temperature_c is None


def test_a_limit_comes_from_the_environment_of_a_unit_too(
    run: Any, joined: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEFL_MAX_TEMPERATURE", "61")
    assert run("device", "set", "--state", joined).code == 0
    assert DeviceState.load(joined).device.max_temperature_c == 61.0


@pytest.mark.parametrize("value", ["hot", "nan", "29", "200", "-5", ""])
def test_a_limit_that_makes_no_sense_is_refused_and_the_old_one_stays(run: Any, joined: Path, value: str) -> None:
    ran = run("device", "set", f"--max-temperature={value}", "--state", joined)
    assert ran.code == 2
    assert DeviceState.load(joined).device.max_temperature_c == 75.0


def test_there_must_be_something_to_set(run: Any, joined: Path) -> None:
    ran = run("device", "set", "--state", joined)
    assert _one_line(ran)
    assert "nothing to set" in ran.err


def test_a_damaged_limit_is_named(run: Any, joined: Path) -> None:
    path = joined / "device.json"
    path.write_text(path.read_text().replace('"max_temperature_c": 75.0', '"max_temperature_c": "hot"'))
    ran = run("device", "status", "--state", joined)
    assert _one_line(ran)
    assert "max_temperature_c must be a number or null, got 'hot'" in ran.err


def test_probe_says_with_what_this_machine_trains(run: Any) -> None:
    facts = json.loads(run("device", "probe", "--json").out)
    assert facts["paths"]["digits"] == "numpy"
    assert facts["trains"] is True
