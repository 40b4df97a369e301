"""Build and smoke test of the idle slot: a fresh virtual environment, the active slot's packages, a bundle's wheels.

Projects that a pack no longer contains are uninstalled; a removal does only that.

Unchanged files are hard-linked, not copied: an SD card has no room and no writes to spare for a second torch. pip
replaces files by new ones, it never writes into them, so the active slot is not changed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import venv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from edgefl.core.errors import BundleError, StoreFullError
from edgefl.device.updates.slots import RECORD_FILE, Slots, list_project_files
from edgefl.system.bundles.archive import BundleKind, BundleManifest

MAX_LINE_CHARS = 400
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

INSTALL_TIMEOUT_S = 1800.0
_SLOT_SPECIFIC_FILES = frozenset({"bin", "pyvenv.cfg", "lib64", RECORD_FILE})
_INSTALL_COMMAND = (
    "install", "--no-index", "--no-deps", "--only-binary", ":all:", "--force-reinstall", "--no-cache-dir",
    "--no-warn-script-location",
)  # fmt: skip
_UNINSTALL_COMMAND = ("uninstall", "--yes")
_QUIET_OPTIONS = ("--disable-pip-version-check", "--root-user-action", "ignore", "--quiet")
_DISK_FULL_TEXT = os.strerror(errno.ENOSPC)

SMOKE_TEST_TIMEOUT_S = 300.0
_GROUP_PREFIX = "edgefl."
_REGISTRIES = {
    "edgefl.codecs": "edgefl.compression.registry",
    "edgefl.local_steps": "edgefl.tasks.local_algorithms.registry",
    "edgefl.metrics": "edgefl.tasks.metrics.registry",
    "edgefl.strategies": "edgefl.strategies.registry",
    "edgefl.tasks": "edgefl.tasks.registry",
}
"""Modules whose `KIND` says what the classes of a group must be. The new slot imports them, and not this process."""
_IMPORT_SCRIPT = f"""
import importlib, sys
from importlib.metadata import distribution

def load(point):
    try:
        from edgefl.core.extensions import load_declared
        kind = importlib.import_module({_REGISTRIES!r}[point.group]).KIND
    except (ImportError, KeyError):  # a release before this check, or a group that it does not know
        return point.load()
    return load_declared(kind, point)

for name in sys.argv[1:]:
    for point in distribution(name).entry_points:
        if point.group.startswith({_GROUP_PREFIX!r}):
            try:
                load(point)
            except BaseException as error:
                sys.exit(f"{{point.group}} {{point.name}} = {{point.value}}: {{type(error).__name__}}: {{error}}")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedCommand:
    """Result of a command; one that timed out has the code -1."""

    returncode: int
    stdout: str
    stderr: str

    def get_error_line(self) -> str:
        """Returns the most informative line: the last error of pip, or the last line."""
        lines = [line.strip() for line in (self.stderr or self.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        return errors[-1][:MAX_LINE_CHARS] if errors else f"it ended with code {self.returncode} and said nothing"


@dataclass(frozen=True, slots=True)
class SubprocessRunner:
    """Runner of commands; unprivileged ones run as the owner of `state_dir`, the device's state directory."""

    state_dir: Path

    def run_as_root(self, command: Sequence[str], *, timeout_s: float) -> CompletedCommand:
        """Runs a command with the privileges of the updater."""
        return _run(command, timeout_s, {})

    def run_as_device(self, command: Sequence[str], *, timeout_s: float) -> CompletedCommand:
        """Runs a command as the device's own user."""
        return _run(command, timeout_s, self._get_device_identity())

    def _get_device_identity(self) -> Mapping[str, object]:
        status = self.state_dir.stat()
        if os.geteuid() != 0 or status.st_uid == 0:
            return {}
        return {"user": status.st_uid, "group": status.st_gid, "extra_groups": []}


def _run(command: Sequence[str], timeout_s: float, identity: Mapping[str, object]) -> CompletedCommand:
    # The updater's environment must not influence Python or pip.
    environment = {"PATH": _PATH, "LANG": "C.UTF-8", "PIP_CONFIG_FILE": os.devnull, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        process = subprocess.run(  # type: ignore[call-overload]
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=environment,
            cwd="/",
            check=False,
            **identity,
        )
    except subprocess.TimeoutExpired:
        return CompletedCommand(returncode=-1, stdout="", stderr=f"{command[0]} took longer than {timeout_s:g} s")
    except OSError as error:
        return CompletedCommand(
            returncode=-1, stdout="", stderr=f"{command[0]} cannot be started: {error.strerror or error}"
        )
    return CompletedCommand(returncode=process.returncode, stdout=process.stdout, stderr=process.stderr)


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelSet:
    """Selected wheels of a bundle, each with its paths; empty for a removal."""

    manifest: BundleManifest
    files_by_wheel: dict[Path, list[str]]
    projects: tuple[str, ...]


def build_slot(slots: Slots, name: str, wheel_set: WheelSet, runner: SubprocessRunner) -> None:
    """Rebuilds a slot from the active one and the wheels of a bundle.

    Raises:
        BundleError: the wheels would replace foreign files, or pip fails.
        StoreFullError: no room.
    """
    delete_slot(slots, name)
    old, new = slots.path(slots.get_active_slot()), slots.path(name)
    venv.EnvBuilder(with_pip=False, symlinks=True).create(new)
    for path in old.iterdir():
        if path.name not in _SLOT_SPECIFIC_FILES:
            link_tree(path, new / path.name)
    _rewrite_scripts(old, new)
    if wheel_set.manifest.kind is BundleKind.PACK:
        check_collisions(slots, name, wheel_set)
    if removed_projects := _get_previous_projects(slots, wheel_set) - set(wheel_set.projects):
        _run_pip(slots, name, (*_UNINSTALL_COMMAND, *sorted(removed_projects)), runner)
    command_stamps = _read_command_stamps(slots, name)
    if wheel_set.files_by_wheel:
        _run_pip(slots, name, (*_INSTALL_COMMAND, *map(str, wheel_set.files_by_wheel)), runner)
    if wheel_set.manifest.kind is BundleKind.PACK:
        _check_command_collisions(slots, name, wheel_set, command_stamps)


def delete_slot(slots: Slots, name: str) -> None:
    """Deletes an idle slot."""
    if name == slots.get_active_slot():
        raise BundleError(f"slot {name} is in use and is not touched")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(slots.path(name))


def link_tree(source: Path, target: Path) -> None:
    """Makes `target` a tree of hard links to the files of `source`; copies where links are unsupported."""
    if source.is_symlink():
        if not target.is_symlink():
            target.symlink_to(source.readlink())
    elif source.is_dir():
        target.mkdir(exist_ok=True)
        for path in source.iterdir():
            link_tree(path, target / path.name)
    elif not target.exists():
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)


def check_collisions(slots: Slots, name: str, wheel_set: WheelSet) -> None:
    """Raises `BundleError` when a pack contains files or projects of the release or another pack."""
    own_projects = _get_previous_projects(slots, wheel_set)
    folder, installed = slots.site_packages(name), slots.list_projects(name)
    if foreign := [project for project in wheel_set.projects if project in installed and project not in own_projects]:
        raise BundleError(
            f"it brings {foreign[0]}, which this board has already ({installed[foreign[0]]}) and not from this pack; "
            "a pack uses what the board has, and brings only what it lacks"
        )
    former_files = list_project_files(folder, own_projects)
    for wheel, names in wheel_set.files_by_wheel.items():
        for path in names:
            if path not in former_files and (folder / path).exists():
                raise BundleError(f"{wheel.name} would replace {path}, which belongs to something else on this board")


def _get_previous_projects(slots: Slots, wheel_set: WheelSet) -> set[str]:
    """Returns the projects of the installed pack of this name."""
    pack = slots.load_record(slots.get_active_slot()).packs.get(wheel_set.manifest.name)
    return set(pack.projects) if pack is not None else set()


def _check_command_collisions(slots: Slots, name: str, wheel_set: WheelSet, previous: Mapping[str, object]) -> None:
    """Raises when a command of the pack has replaced another; not visible in the wheel's paths."""
    stamps = _read_command_stamps(slots, name)
    own_commands = {
        Path(path).name
        for path in list_project_files(
            slots.site_packages(slots.get_active_slot()), _get_previous_projects(slots, wheel_set)
        )
    }
    if replaced := sorted(
        command for command in previous if stamps.get(command) != previous[command] and command not in own_commands
    ):
        raise BundleError(f"its command {replaced[0]} would replace one that this board has")


def _read_command_stamps(slots: Slots, name: str) -> dict[str, object]:
    """Returns inode and change time of each command of a slot."""
    statuses = {path.name: path.lstat() for path in (slots.path(name) / "bin").iterdir()}
    return {command: (status.st_ino, status.st_ctime_ns) for command, status in statuses.items()}


def _run_pip(slots: Slots, name: str, arguments: Sequence[str], runner: SubprocessRunner) -> None:
    process = runner.run_as_root(
        [str(slots.python(name)), "-I", "-m", "pip", arguments[0], *_QUIET_OPTIONS, *arguments[1:]],
        timeout_s=INSTALL_TIMEOUT_S,
    )
    if process.returncode and _DISK_FULL_TEXT in process.stderr:
        raise StoreFullError(f"there is no room for it in {slots.root}: {process.get_error_line()}")
    if process.returncode:
        raise BundleError(f"pip cannot {arguments[0]} it: {process.get_error_line()}")


def _rewrite_scripts(old: Path, new: Path) -> None:
    """Copies the active slot's commands with the new slot's Python in their shebangs."""
    old_line, new_line = f"#!{old}/bin/python".encode(), f"#!{new}/bin/python".encode()
    for path in (old / "bin").iterdir():
        if path.is_symlink() or not path.is_file() or (new / "bin" / path.name).exists():
            continue
        content = path.read_bytes()
        if content.startswith(old_line):
            script = new / "bin" / path.name
            script.write_bytes(content.replace(old_line, new_line, 1))
            script.chmod(path.stat().st_mode & 0o777)


def run_smoke_test(
    slots: Slots, name: str, *, version: str, projects: Iterable[str], runner: SubprocessRunner
) -> None:
    """Raises `BundleError` unless edgefl has this version and all entry points are classes of their kind."""
    python = [str(slots.python(name)), "-I"]
    version_check = runner.run_as_device([*python, "-m", "edgefl", "--version"], timeout_s=SMOKE_TEST_TIMEOUT_S)
    if version_check.returncode:
        raise BundleError(f"in the new slot edgefl does not start: {version_check.get_error_line()}")
    if not _has_version(version_check.stdout, version):
        raise BundleError(f"the new slot says {version_check.stdout.strip()[:80]!r}, expected version {version}")
    _check_dependencies(slots, name, runner)
    import_check = runner.run_as_device(
        [*python, "-c", _IMPORT_SCRIPT, *sorted(projects)], timeout_s=SMOKE_TEST_TIMEOUT_S
    )
    if import_check.returncode:
        raise BundleError(f"what it brings cannot be used: {import_check.get_error_line()}")


def _has_version(stdout: str, version: str) -> bool:
    try:
        return Version(stdout.rsplit(maxsplit=1)[-1]) == Version(version)
    except (IndexError, InvalidVersion):
        return False


def _check_dependencies(slots: Slots, name: str, runner: SubprocessRunner) -> None:
    """Raises when pip reports dependency errors that the active slot does not have."""
    lines = _list_dependency_errors(slots, name, runner)
    if lines and (new_errors := lines - _list_dependency_errors(slots, slots.get_active_slot(), runner)):
        raise BundleError(f"this board lacks what it needs: {'; '.join(sorted(new_errors))[:400]}")


def _list_dependency_errors(slots: Slots, name: str, runner: SubprocessRunner) -> set[str]:
    command = [str(slots.python(name)), "-I", "-m", "pip", "check", "--disable-pip-version-check"]
    process = runner.run_as_device(command, timeout_s=SMOKE_TEST_TIMEOUT_S)
    if process.returncode == 0:
        return set()
    if process.returncode == 1 and process.stdout.strip():
        return set(process.stdout.splitlines())
    raise BundleError(f"pip check does not run in slot {name}: {process.get_error_line()}")
