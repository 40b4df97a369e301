import os
import subprocess
import sys

import pytest
from requirements import needs

from edgefl.core.errors import NotAllowedError
from edgefl.provision import systemd_units as units


@pytest.fixture
def provision(run):
    def call(*words):
        ran = run("provision", "systemd", "--python", units.DEFAULT_PYTHON, *words)
        assert ran.code == 0, ran.err
        return ran.out

    return call


def test_a_devices_units_have_the_paths_of_this_installation_and_show_its_data(provision, tmp_path):
    told = provision("--out", tmp_path, "--python", "/opt/mine/bin/python", "--shard", "digits=/home/pi/digits.npz")
    device = (tmp_path / "edgefl-device.service").read_text()
    assert "ExecStart=/opt/mine/bin/python -m edgefl device start" in device
    assert units.DEFAULT_PYTHON not in "".join(path.read_text() for path in tmp_path.rglob("*.*") if path.is_file())
    assert "BindReadOnlyPaths=-/home/pi\n" in (tmp_path / "edgefl-join.service.d" / "20-shards.conf").read_text()
    assert "systemctl enable --now edgefl-join.service edgefl-device.service" in told
    assert "join.json" in told
    assert provision("--gpu").count("# /etc/systemd/system/") == 3, "without --out the units are printed"


def test_a_coordinator_with_its_broker_apart_is_written_once(provision, tmp_path):
    words = ("--coordinator", "--broker", "--out", tmp_path)
    assert "wrote" in provision(*words)
    names = {"edgefl-broker.service", "edgefl-coordinator.service", "edgefl-coordinator.service.d/10-broker.conf"}
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == names
    conf = tmp_path / "edgefl-coordinator.service.d" / "10-broker.conf"
    assert "--broker mqtts://127.0.0.1:8883" in conf.read_text()
    assert "wrote" not in provision(*words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--coordinator --gpu", "are for devices"),
        ("--broker", "is for a coordinator"),
        ("--python /home/pi/venv/bin/python", "where the units' sandbox hides it"),
        ("--python python3", "must be absolute"),
        ("--shard digits", "must be TASK=PATH, got 'digits'"),
    ],
)
def test_what_makes_no_sense_is_told(refused, words, told):
    refused(["provision", "systemd", "--python", units.DEFAULT_PYTHON, *words.split()], 2, told)


@needs("root")  # it puts another folder over /etc for a while
def test_install_puts_units_and_user_in_place_and_enables_them(tmp_path):
    for name in ("upper", "work", "bin"):
        (tmp_path / name).mkdir()
    calls = tmp_path / "calls"
    (tmp_path / "bin" / "systemctl").write_text(f'#!/bin/sh\necho "$@" >>{calls}\n')
    (tmp_path / "bin" / "systemctl").chmod(0o755)
    overlay = f"lowerdir=/etc,upperdir={tmp_path / 'upper'},workdir={tmp_path / 'work'}"
    script = (
        f"mount -t overlay overlay -o {overlay} /etc && for i in 1 2; do "
        f"{sys.executable} -m edgefl provision systemd --python {units.DEFAULT_PYTHON} --coordinator --install "
        "|| exit; done; id edgefl-coordinator"
    )
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = ["unshare", "--mount", "sh", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "uid=" in done.stdout
    assert done.stdout.count("wrote ") == 1
    assert calls.read_text().splitlines() == ["daemon-reload", "enable --now edgefl-coordinator.service"] * 2
    assert (tmp_path / "upper" / "systemd" / "system" / "edgefl-coordinator.service").exists()


def test_install_needs_root(monkeypatch):
    monkeypatch.setattr(units.os, "geteuid", lambda: 1000)
    with pytest.raises(NotAllowedError, match="by root"):
        units.install_units(units.SystemdInstallation())
