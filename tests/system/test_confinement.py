"""Confinement of a process: with Landlock, as without it, and under the filters of the device's unit."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from onnx_graphs import constant_model
from requirements import needs

from edgefl.provision.provisioning_files import load_text
from edgefl.system.confinement import Confinement, list_import_paths, make_command, make_environment

pytestmark = pytest.mark.extended
PROGRAM = Path(__file__).parents[1] / "confined_work.py"
KINDS = ("landlock", "namespaces")


@pytest.fixture
def state(tmp_path):
    for name in ("key", "shard"):
        (tmp_path / name).write_text(name)
        (tmp_path / name).chmod(0o600)
    (tmp_path / "own").mkdir()
    return tmp_path


def run(kind, state, *works, names=()):
    environment = {**os.environ, "TMPDIR": str(state / "own"), "HOME": str(state / "own")}
    done = subprocess.run(
        [sys.executable, PROGRAM, kind, state, ",".join(names), *works],
        capture_output=True, text=True, check=False, timeout=120, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def list_unit_calls():
    """Returns the system calls that the device's unit allows, as this machine's systemd reads it."""
    groups, current = {}, ""
    shown = subprocess.run(["systemd-analyze", "syscall-filter"], capture_output=True, text=True, check=True)
    for line in shown.stdout.splitlines():
        word = line.strip().lstrip("# ")
        if line.startswith("@"):
            current = line.strip()
        elif re.fullmatch(r"@?[\w-]+", word):
            groups.setdefault(current, []).append(word)

    def expand(word):
        return set().union(*map(expand, groups[word])) if word.startswith("@") else {word}

    allowed = expand("@default")
    for value in re.findall(r"^SystemCallFilter=(.*)$", load_text("units/edgefl-device.service"), re.MULTILINE):
        words = set().union(*map(expand, value.lstrip("~").split()))
        allowed = allowed - words if value.startswith("~") else allowed | words
    return sorted(allowed)


def check_closed(report):
    assert report["gaps"] == []
    assert report["key"].startswith(("PermissionError", "FileNotFoundError"))
    assert (report["shard"], report["own"], report["copy"]) == ("done", "done", "done")
    assert all("PermissionError" in report[name] for name in ("socket", "fork", "agent")), report


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_the_mode_of_the_key_does_nothing(kind, state):
    report = run(kind, state)
    assert (state / "key").stat().st_mode & 0o777 == 0o600, report["mode"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_key_the_network_and_other_processes_are_closed_and_numpy_and_onnxruntime_work(kind, state):
    constant_model(state / "own" / "model.onnx", 3)
    report = run(kind, state, "numpy", f"onnx={state / 'own' / 'model.onnx'}")
    check_closed(report)
    assert (report["numpy"], report["onnx"]) == ("done", "done")
    assert (state / "own" / "copy").read_text() == "shard"
    assert (state / "own" / "x").read_text() == "x"


@needs("systemd")
@pytest.mark.parametrize("kind", KINDS)
def test_torch_and_onnxruntime_work_confined_under_the_system_calls_of_the_device_s_unit(kind, state):
    pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
    names = list_unit_calls()
    assert {"landlock_restrict_self", "seccomp", "mount", "clone3", "socket"} <= set(names)
    assert not {"bpf", "init_module", "reboot", "chroot", "setuid", "swapon"} & set(names)
    constant_model(state / "own" / "model.onnx", 3)
    report = run(kind, state, "torch", f"onnx={state / 'own' / 'model.onnx'}", names=names)
    check_closed(report)
    assert (report["torch"], report["onnx"]) == ("done", "done")


def test_a_confined_process_gets_no_secret_by_its_environment_and_no_folder_that_nothing_needs(monkeypatch, tmp_path):
    monkeypatch.setenv("EDGEFL_JOIN_TOKEN", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.syspath_prepend(tmp_path)
    confinement = Confinement(secret=str(tmp_path), writable=[str(tmp_path / "own")])
    environment = make_environment(confinement)
    assert (environment["OMP_NUM_THREADS"], environment["TMPDIR"]) == ("2", str(tmp_path / "own"))
    assert "secret" not in str(environment)
    assert str(tmp_path) not in list_import_paths()
    (tmp_path / "own_fleet.py").write_text("")
    monkeypatch.setenv("EDGEFL_ALLOW_MODULES", "own_fleet.tasks")
    assert str(tmp_path) in list_import_paths()
    assert make_environment(None)["EDGEFL_JOIN_TOKEN"] == "secret"
    assert make_command("edgefl.x", None)[-2:] == ["-m", "edgefl.x"]
