"""Smoke test of an idle slot: version, dependencies, and imports of the bundles' projects.

It runs in processes of the new slot, as the device's own user, with a time limit.
"""

from __future__ import annotations

from collections.abc import Iterable

from packaging.version import InvalidVersion, Version

from edgefl.core.errors import BundleError
from edgefl.device.updates.slots import Slots
from edgefl.device.updates.subprocesses import SubprocessRunner

SMOKE_TEST_TIMEOUT_S = 300.0
_GROUP_PREFIX = "edgefl."
_IMPORT_SCRIPT = f"""
import sys
from importlib.metadata import distribution
for name in sys.argv[1:]:
    for point in distribution(name).entry_points:
        if point.group.startswith({_GROUP_PREFIX!r}):
            try:
                point.load()
            except BaseException as error:
                sys.exit(f"{{point.group}} {{point.name}} = {{point.value}}: {{type(error).__name__}}: {{error}}")
"""


def run_smoke_test(
    slots: Slots, name: str, *, version: str, projects: Iterable[str], runner: SubprocessRunner
) -> None:
    """Raises `BundleError` unless edgefl has this version and the projects can be imported."""
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
        raise BundleError(f"what it brings cannot be imported: {import_check.get_error_line()}")


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
