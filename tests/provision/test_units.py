"""The units, judged by systemd's own tools: nothing to complain about, and little that they could reach."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from edgefl.provision.drop_ins import shard_drop_ins
from edgefl.provision.sources import path as source

UNITS = sorted(path.name for path in source("units").glob("*.service"))
# JetPack 6 has systemd 249.
YOUNGER_THAN_249 = ("RestartSteps", "RestartMaxDelaySec", "WantsMountsFor", "MemoryPressureWatch", "PrivatePIDs")

pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


@pytest.fixture
def board(tmp_path: Path) -> Path:
    """A root with our units, a program where they look for it, and the units of this machine."""
    for program in ("opt/edgefl/current/bin/python", "bin/sh"):
        (tmp_path / program).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    shutil.copytree("/usr/lib/systemd/system", tmp_path / "usr/lib/systemd/system", symlinks=True)
    units = tmp_path / "etc/systemd/system"
    units.mkdir(parents=True)
    for name in UNITS:
        shutil.copy(source(f"units/{name}"), units)
    return tmp_path


def drop_in(board: Path, unit: str, name: str, content: bytes) -> None:
    folder = board / "etc/systemd/system" / f"{unit}.d"
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)


def no_drop_in(_board: Path) -> None:
    pass


def with_gpu(board: Path) -> None:
    drop_in(board, "edgefl-device.service", "10-gpu.conf", source("units/10-gpu.conf").read_bytes())


def with_shards(board: Path) -> None:
    for place, content in shard_drop_ins({"digits": "/home/pi/data/digits.npz", "x": "/root/x"}).items():
        assert isinstance(content, bytes)
        _, unit, name = place.split("/")
        drop_in(board, unit.removesuffix(".d"), name, content)


def with_broker(board: Path) -> None:
    drop_in(board, "edgefl-coordinator.service", "10-broker.conf", source("units/10-broker.conf").read_bytes())


@pytest.mark.parametrize("add", [no_drop_in, with_gpu, with_shards, with_broker])
def test_systemd_has_nothing_to_say_against_the_units(board: Path, add: Callable[[Path], None]) -> None:
    add(board)
    done = subprocess.run(
        ["systemd-analyze", "verify", f"--root={board}", *UNITS],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unknown_key_would_be_found(board: Path) -> None:
    drop_in(board, UNITS[0], "x.conf", b"[Service]\nRestartStepps=3\n")
    done = subprocess.run(
        ["systemd-analyze", "verify", f"--root={board}", *UNITS],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "RestartStepps" in done.stderr


def exposure_limit(unit: str) -> float:
    """At most 2.0; the updater must be root, give up its rights for what it tries, and reach the coordinator."""
    return 2.4 if unit == "edgefl-update.service" else 2.0


@pytest.mark.parametrize("add", [no_drop_in, with_gpu, with_shards, with_broker])
@pytest.mark.parametrize("unit", UNITS)
def test_little_is_exposed(board: Path, unit: str, add: Callable[[Path], None]) -> None:
    add(board)
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--root={board}", unit],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    found = re.search(r"exposure level for \S+: ([\d.]+)", done.stdout)
    assert found is not None, done.stderr
    assert float(found[1]) <= exposure_limit(unit)


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_keeps_to_what_old_systemds_know_and_torch_needs(unit: str) -> None:
    text = source(f"units/{unit}").read_text()
    keys = set(re.findall(r"^(\w+)=", text, re.MULTILINE))
    assert not keys & set(YOUNGER_THAN_249)
    assert not keys & {"MemoryDenyWriteExecute", "ProcSubset"}
    assert "StartLimitIntervalSec=0" in text or "Type=oneshot" in text, "what always runs is started for ever"


@pytest.mark.parametrize("unit", UNITS)
def test_what_a_unit_runs_is_a_command_of_edgefl_with_these_options(unit: str) -> None:
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
