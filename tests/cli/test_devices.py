"""`edgefl devices` against a real fleet of one device and the coordinator's evaluator."""

from __future__ import annotations

import csv
import json
import subprocess
import time

import pytest

from edgefl.errors import RunFailedError
from edgefl.local_fleet import LocalFleet
from edgefl.local_run import cut_devices


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    root = tmp_path_factory.mktemp("devices")
    cut = cut_devices("digits", "iid", 1, root / "shards", None, 7)
    with LocalFleet(root=root, devices=cut.devices, test_shards=cut.test_shards) as running:
        yield running


def _rows(text):
    answer = json.loads(text)
    assert (answer["v"], answer["kind"]) == (1, "devices")
    return {row["device_id"]: row for row in answer["rows"]}


def test_list_says_who_is_there_and_with_what(fleet):
    rows = _rows(fleet.command("devices", "list", "--format", "json"))
    assert {name: (row["presence"], row["role"]) for name, row in rows.items()} == {
        "device-01": ("online", "trainer"),
        "coordinator-evaluator": ("online", "evaluator"),
    }
    assert rows["device-01"]["examples"]["digits"] > 1000
    assert rows["device-01"]["version"]
    (header, *lines) = csv.reader(fleet.command("devices", "list", "--format", "csv").splitlines())
    assert header[:2] == ["device_id", "presence"]
    assert len(lines) == 2


def test_list_is_a_table_for_people(fleet):
    first, *rest = fleet.command("devices", "list").splitlines()
    assert first.startswith("device id")
    assert any("device-01" in line and "online" in line for line in rest)


def test_show_gives_the_capabilities_too(fleet):
    row = _rows(fleet.command("devices", "show", "device-01", "--format", "json"))["device-01"]
    assert row["capabilities"]["cores"] >= 1
    table = fleet.command("devices", "show", "device-01")
    assert "presence" in table
    assert "cores" in table


def test_a_device_is_drained_and_resumed(fleet):
    def rest(state, words):
        assert "device-01" in fleet.command("devices", *words, "device-01")
        until_s = time.monotonic() + 60
        while fleet.presence()["device-01"] != state:
            assert time.monotonic() < until_s, f"the device never was {state}"
            time.sleep(0.05)

    rest("draining", ("drain",))
    assert _rows(fleet.command("devices", "list", "--format", "json"))["device-01"]["drained"] is True
    rest("online", ("resume",))
    with pytest.raises(RunFailedError, match="no device 'nobody'"):
        fleet.command("devices", "drain", "nobody")


def test_a_name_of_no_device_or_run_is_one_line(fleet):
    asked = ("devices show a/b", "devices show ü", "run stop ü", "run show a/b", "run watch a?b")
    for words in (*map(str.split, asked), ["run", "show", "my run"]):
        process = fleet.popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err.count(b"\n")) == (40, b"", 1), err.decode()


def test_a_device_that_leaves_is_offline_at_once(fleet):
    assert fleet.end("device-01") == 0
    rows = _rows(fleet.command("devices", "list", "--format", "json"))
    assert rows["device-01"]["presence"] == "offline"
