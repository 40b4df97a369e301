"""Systemd units for this machine, with the paths of this installation: in a folder or installed."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from edgefl.core.errors import EdgeflError, NotAllowedError, UsageError
from edgefl.provision import provisioning_files
from edgefl.provision.payload import render_shard_drop_ins
from edgefl.provision.provisioning_files import read_content

DEFAULT_PYTHON = "/opt/edgefl/current/bin/python"
UNITS_FOLDER = Path("/etc/systemd/system")
_INTERPRETER_PATH = re.compile(r"/[\w./+@,=-]+\Z")


MachineKind = Literal["device", "coordinator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemdInstallation:
    """Paths of edgefl here, the service to run, and the device's readable paths."""

    python: str = DEFAULT_PYTHON
    kind: MachineKind = "device"
    shards: Mapping[str, str] = field(default_factory=dict)
    has_gpu: bool = False
    has_broker: bool = False
    has_collector: bool = False
    has_server: bool = False

    @property
    def user(self) -> str:
        return "edgefl" if self.kind == "device" else "edgefl-coordinator"

    @property
    def state_dir(self) -> Path:
        return Path("/var/lib") / self.user

    @property
    def enabled_units(self) -> tuple[str, ...]:
        """The units to enable."""
        if self.kind == "device":
            collector = ("edgefl-collect.service",) if self.has_collector else ()
            server = ("edgefl-serve.service",) if self.has_server else ()
            return "edgefl-join.service", "edgefl-device.service", *collector, *server
        broker = ("edgefl-broker.service",) if self.has_broker else ()
        return (*broker, "edgefl-coordinator.service")


def render_units(installation: SystemdInstallation) -> dict[str, str]:
    """Returns the units and drop-ins of an installation, by their path below systemd's folder.

    Raises:
        UsageError: the interpreter's path cannot stand in a unit, or lies where the sandbox hides it.
    """
    if not _INTERPRETER_PATH.match(installation.python):
        raise UsageError(f"the interpreter's path must be absolute and without blanks, got {installation.python!r}")
    if installation.python.startswith(("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")):  # noqa: S108 hidden ones
        raise UsageError(
            f"{installation.python} lies where the units' sandbox hides it: install edgefl outside of homes, "
            "such as in /opt/edgefl/current, or name another with --python"
        )
    units = {
        unit: provisioning_files.load_text(f"units/{unit}").replace(DEFAULT_PYTHON, installation.python)
        for unit in installation.enabled_units
    }
    if installation.kind == "device":
        drop_ins = render_shard_drop_ins(installation.shards)
        units |= {name.removeprefix("units/"): read_content(content).decode() for name, content in drop_ins.items()}
    if installation.has_gpu:
        units["edgefl-device.service.d/10-gpu.conf"] = provisioning_files.load_text("units/10-gpu.conf")
    if installation.has_broker:
        text = provisioning_files.load_text("units/10-broker.conf").replace(DEFAULT_PYTHON, installation.python)
        units["edgefl-coordinator.service.d/10-broker.conf"] = text
    return units


def list_commands(installation: SystemdInstallation) -> list[list[str]]:
    """Returns the idempotent commands that activate the rendered units, once in place."""
    user = ["useradd", "--system", "--user-group", "--home-dir", str(installation.state_dir), "--no-create-home"]
    return [
        *([] if _has_user(installation.user) else [[*user, "--shell", "/usr/sbin/nologin", installation.user]]),
        ["systemctl", "daemon-reload"],
        ["systemctl", "enable", "--now", *installation.enabled_units],
    ]


def get_next_step(installation: SystemdInstallation) -> str:
    """Returns the set-up step of a machine that was not set up yet; empty when it was."""
    marker = installation.state_dir / ("device.json" if installation.kind == "device" else "settings.toml")
    try:
        if marker.exists():
            return ""
    except PermissionError:
        return ""
    program = f"{installation.python} -m edgefl"
    if installation.kind == "device":
        join = f"{program} device join --state {installation.state_dir}"
        return f"put the join file at /etc/edgefl/join.json (mode 600), or: {join}"
    return f"{program} coordinator init --dir {installation.state_dir} --host NAME"


def write_units(units: Mapping[str, str], folder: Path) -> list[Path]:
    """Writes rendered units below a folder; returns those that changed."""
    changed_paths = []
    for name, text in units.items():
        path = folder / name
        if path.exists() and path.read_text() == text:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.new")
        fresh.write_text(text)
        fresh.chmod(0o644)
        fresh.replace(path)
        changed_paths.append(path)
    return changed_paths


def install_units(installation: SystemdInstallation) -> list[Path]:
    """Installs and starts the units; returns the files that changed.

    Raises:
        NotAllowedError: this is not root.
        EdgeflError: a command failed.
    """
    if os.geteuid() != 0:
        raise NotAllowedError("units are installed by root: sudo edgefl provision systemd --install")
    if shutil.which("systemctl") is None:
        raise EdgeflError("this machine has no systemd; run edgefl in a container instead")
    changed_paths = write_units(render_units(installation), UNITS_FOLDER)
    for command in list_commands(installation):
        _run_command(command)
    return changed_paths


def _run_command(command: Sequence[str]) -> None:
    # Debian keeps useradd outside a user's PATH.
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}
    try:
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise EdgeflError(f"{' '.join(command)} failed: there is no program {error.filename}") from None
    if process.returncode:
        error_lines = process.stderr.strip().splitlines()
        raise EdgeflError(
            f"{' '.join(command)} failed: {error_lines[-1] if error_lines else f'status {process.returncode}'}"
        )


def _has_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
