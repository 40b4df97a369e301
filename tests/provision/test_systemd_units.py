"""The units, judged by systemd's own tools: nothing to complain about, and little that they could reach."""

import re
import shutil
import subprocess

import click
import pytest
from requirements import needs

from edgefl.core.errors import BundleError
from edgefl.provision.payload import render_shard_drop_ins
from edgefl.provision.provisioning_files import find_path as source

UNITS = sorted(path.name for path in source("units").glob("*.service"))
# JetPack 6 has systemd 249.
YOUNGER_THAN_249 = ("RestartSteps", "RestartMaxDelaySec", "WantsMountsFor", "MemoryPressureWatch", "PrivatePIDs")

SERVICE, PATH = source("units/edgefl-update.service"), source("units/edgefl-update.path")

NEEDS_ANALYZE = needs("systemd")


def drop_in(root, unit, name, content):
    folder = root / "etc/systemd/system" / f"{unit}.d"
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)


def nothing(_root):
    pass


def with_gpu(root):
    drop_in(root, "edgefl-device.service", "10-gpu.conf", source("units/10-gpu.conf").read_bytes())


def with_shards(root):
    for place, content in render_shard_drop_ins({"digits": "/home/pi/data/digits.npz", "x": "/root/x"}).items():
        assert isinstance(content, bytes)
        _, unit, name = place.split("/")
        drop_in(root, unit.removesuffix(".d"), name, content)


def with_broker(root):
    drop_in(root, "edgefl-coordinator.service", "10-broker.conf", source("units/10-broker.conf").read_bytes())


@pytest.fixture(scope="module", params=[nothing, with_gpu, with_shards, with_broker])
def board(request, tmp_path_factory):
    """A root with our units, a program where they look for it, and the units of this machine."""
    root = tmp_path_factory.mktemp("board")
    for program in ("opt/edgefl/current/bin/python", "bin/sh"):
        (root / program).parent.mkdir(parents=True, exist_ok=True)
        (root / program).write_text("#!/bin/sh\n")
        (root / program).chmod(0o755)
    shutil.copytree("/usr/lib/systemd/system", root / "usr/lib/systemd/system", symlinks=True)
    units = root / "etc/systemd/system"
    units.mkdir(parents=True)
    for name in (*UNITS, PATH.name):
        shutil.copy(source(f"units/{name}"), units)
    request.param(root)
    return root


def analyze(*words):
    return subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, check=False, timeout=60)


def test_what_waits_for_the_join_is_started_with_the_device_which_that_starts():
    texts = {name: source(f"units/{name}").read_text() for name in UNITS}
    assert "OnSuccess=edgefl-device.service\n" in texts["edgefl-join.service"]
    waiting = [name for name, text in texts.items() if "ConditionPathExists=%S/edgefl/device.json\n" in text]
    assert waiting == ["edgefl-device.service", "edgefl-serve.service"]
    assert re.search(r"^WantedBy=.*\bedgefl-device\.service$", texts["edgefl-serve.service"], re.MULTILINE)
    assert "After=edgefl-device.service\n" in texts["edgefl-serve.service"]


@NEEDS_ANALYZE
def test_systemd_has_nothing_to_say_against_the_units_and_would_find_an_unknown_key(board):
    done = analyze("verify", f"--root={board}", *UNITS, PATH.name)
    assert (done.returncode, done.stderr) == (0, "")
    drop_in(board, UNITS[0], "x.conf", b"[Service]\nRestartStepps=3\n")
    done = analyze("verify", f"--root={board}", *UNITS)
    (board / "etc/systemd/system" / f"{UNITS[0]}.d" / "x.conf").unlink()
    assert "RestartStepps" in done.stderr


def exposure_limit(unit):
    """At most 2.0; the updater must be root, give up its rights for what it tries, and reach the coordinator."""
    return 2.4 if unit == "edgefl-update.service" else 2.0


@NEEDS_ANALYZE
def test_little_is_exposed(board):
    done = analyze("security", "--offline=true", f"--root={board}", *UNITS)
    found = dict(re.findall(r"exposure level for (\S+): ([\d.]+)", done.stdout))
    assert sorted(found) == UNITS, done.stderr
    assert {unit: value for unit, value in found.items() if float(value) > exposure_limit(unit)} == {}


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_keeps_to_what_old_systemds_know_and_torch_needs(unit):
    text = source(f"units/{unit}").read_text()
    keys = set(re.findall(r"^(\w+)=", text, re.MULTILINE))
    assert not keys & set(YOUNGER_THAN_249)
    assert not keys & {"MemoryDenyWriteExecute", "ProcSubset"}
    assert "StartLimitIntervalSec=0" in text or "Type=oneshot" in text, "what always runs is started for ever"


@pytest.mark.parametrize("unit", UNITS)
def test_what_a_unit_runs_is_a_command_of_edgefl_with_these_options(unit):
    from edgefl.cli.main import edgefl  # noqa: PLC0415 of this test alone

    for line in re.findall(
        r"^ExecStart=\S+ (?:-I )?-m edgefl (.+)$", source(f"units/{unit}").read_text(), re.MULTILINE
    ):
        words = line.partition(" -- ")[0].split()
        command: click.Command = edgefl
        while isinstance(command, click.Group):
            found = command.get_command(click.Context(command), words.pop(0))
            assert found is not None, line
            command = found
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known


def test_an_updater_that_is_killed_is_started_again_and_one_that_refused_a_bundle_is_not():
    keys = dict(re.findall(r"^(\w+)=(.*)$", SERVICE.read_text(), re.MULTILINE))
    assert (keys.get("Restart"), keys.get("RestartSec")) == ("on-failure", "30s")
    assert keys["SuccessExitStatus"] == str(BundleError.exit_code)


def test_the_path_watches_where_the_agent_leaves_its_requests():
    from edgefl.device.updates.protocol import REQUEST_FILE, REQUEST_FOLDER  # noqa: PLC0415 only here

    assert f"PathChanged=/var/lib/edgefl/{REQUEST_FOLDER}/{REQUEST_FILE}\n" in PATH.read_text()
