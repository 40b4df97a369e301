"""The units for this very machine: with the paths of this installation, in a folder or where systemd reads them."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from edgefl.errors import EdgeflError, NotAllowedError, UsageError
from edgefl.provision import sources
from edgefl.provision.drop_ins import shard_drop_ins

PROGRAM = "/opt/edgefl/current/bin/python"
UNITS = Path("/etc/systemd/system")
_PATH = re.compile(r"/[\w./+@,=-]+\Z")


class Kind(StrEnum):
    """What a machine runs."""

    DEVICE = "device"
    COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """Where edgefl lies here, what it is to run, and what the device is to see."""

    python: str = PROGRAM
    kind: Kind = Kind.DEVICE
    shards: Mapping[str, str] = field(default_factory=dict)
    has_gpu: bool = False
    has_broker: bool = False

    @property
    def user(self) -> str:
        return "edgefl" if self.kind is Kind.DEVICE else "edgefl-coordinator"

    @property
    def state(self) -> Path:
        return Path("/var/lib") / self.user

    @property
    def enabled(self) -> tuple[str, ...]:
        """The units that are to be enabled."""
        if self.kind is Kind.DEVICE:
            return "edgefl-join.service", "edgefl-device.service"
        broker = ("edgefl-broker.service",) if self.has_broker else ()
        return (*broker, "edgefl-coordinator.service")


def render(here: Installation) -> dict[str, str]:
    """Returns the units and drop-ins of an installation, by their path below systemd's folder.

    Raises:
        UsageError: the interpreter's path cannot stand in a unit, or lies where the sandbox hides it.
    """
    if not _PATH.match(here.python):
        raise UsageError(f"the interpreter's path must be absolute and without blanks, got {here.python!r}")
    if here.python.startswith(("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")):  # noqa: S108 hidden ones
        raise UsageError(
            f"{here.python} lies where the units' sandbox hides it: install edgefl outside of homes, "
            "such as in /opt/edgefl/current, or name another with --python"
        )
    made = {unit: sources.text(f"units/{unit}").replace(PROGRAM, here.python) for unit in here.enabled}
    if here.kind is Kind.DEVICE:
        drop_ins = shard_drop_ins(here.shards)
        made |= {place.removeprefix("units/"): _text(content) for place, content in drop_ins.items()}
    if here.has_gpu:
        made["edgefl-device.service.d/10-gpu.conf"] = sources.text("units/10-gpu.conf")
    if here.has_broker:
        text = sources.text("units/10-broker.conf").replace(PROGRAM, here.python)
        made["edgefl-coordinator.service.d/10-broker.conf"] = text
    return made


def commands(here: Installation) -> list[list[str]]:
    """Returns what makes the rendered units work, once they are in place; all of it may be done again."""
    user = ["useradd", "--system", "--user-group", "--home-dir", str(here.state), "--no-create-home"]
    return [
        *([] if _has_user(here.user) else [[*user, "--shell", "/usr/sbin/nologin", here.user]]),
        ["systemctl", "daemon-reload"],
        ["systemctl", "enable", "--now", *here.enabled],
    ]


def next_step(here: Installation) -> str:
    """Returns what makes a machine that was not set up yet into what it shall be; empty when it is."""
    mark = here.state / ("device.json" if here.kind is Kind.DEVICE else "settings.toml")
    try:
        if mark.exists():
            return ""
    except PermissionError:
        return ""
    program = f"{here.python} -m edgefl"
    if here.kind is Kind.DEVICE:
        return (
            f"put the join file at /etc/edgefl/join.json (mode 600), or: {program} device join --state {here.state}"
        )
    return f"{program} coordinator init --dir {here.state} --host NAME"


def write(made: Mapping[str, str], folder: Path) -> list[Path]:
    """Writes rendered units below a folder; returns those that changed."""
    changed = []
    for name, text in made.items():
        path = folder / name
        if path.exists() and path.read_text() == text:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.new")
        fresh.write_text(text)
        fresh.chmod(0o644)
        fresh.replace(path)
        changed.append(path)
    return changed


def install(here: Installation) -> list[Path]:
    """Puts the units where systemd reads them and starts them; returns the files that changed.

    Raises:
        NotAllowedError: this is not root.
        EdgeflError: a command failed.
    """
    if os.geteuid() != 0:
        raise NotAllowedError("units are installed by root: sudo edgefl provision systemd --install")
    if shutil.which("systemctl") is None:
        raise EdgeflError("this machine has no systemd; run edgefl in a container instead")
    changed = write(render(here), UNITS)
    for command in commands(here):
        _run(command)
    return changed


def _run(command: Sequence[str]) -> None:
    # Debian keeps useradd where a user's PATH does not lead.
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise EdgeflError(f"{' '.join(command)} failed: there is no program {error.filename}") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise EdgeflError(f"{' '.join(command)} failed: {said[-1] if said else f'status {done.returncode}'}")


def _has_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _text(content: bytes | Path) -> str:
    return (content if isinstance(content, bytes) else content.read_bytes()).decode()
