"""Tries a slot that nobody uses yet: does it say its version, is it complete, can what bundles brought be imported?

All of it runs in processes of the new slot, as the device's own user, with a time limit.
"""

from __future__ import annotations

from collections.abc import Iterable

from packaging.version import InvalidVersion, Version

from edgefl.device.slots.children import Children
from edgefl.device.slots.layout import Slots
from edgefl.errors import BundleError

WITHIN_S = 300.0
_GROUP_PREFIX = "edgefl."
_IMPORTS = f"""
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


def smoke_test(slots: Slots, name: str, *, version: str, projects: Iterable[str], children: Children) -> None:
    """Raises `BundleError` unless a slot works: edgefl has this version, and the projects can be imported."""
    python = [str(slots.python(name)), "-I"]
    told = children.as_device([*python, "-m", "edgefl", "--version"], within_s=WITHIN_S)
    if told.returncode:
        raise BundleError(f"in the new slot edgefl does not start: {told.last_line()}")
    if not _says(told.stdout, version):
        raise BundleError(f"the new slot says {told.stdout.strip()[:80]!r}, expected version {version}")
    _check_complete(slots, name, children)
    imported = children.as_device([*python, "-c", _IMPORTS, *sorted(projects)], within_s=WITHIN_S)
    if imported.returncode:
        raise BundleError(f"what it brings cannot be imported: {imported.last_line()}")


def _says(stdout: str, version: str) -> bool:
    try:
        return Version(stdout.rsplit(maxsplit=1)[-1]) == Version(version)
    except (IndexError, InvalidVersion):
        return False


def _check_complete(slots: Slots, name: str, children: Children) -> None:
    """Raises when pip finds something missing that was not missing before."""
    lines = _complaints(slots, name, children)
    if lines and (fresh := lines - _complaints(slots, slots.in_use(), children)):
        raise BundleError(f"this board lacks what it needs: {'; '.join(sorted(fresh))[:400]}")


def _complaints(slots: Slots, name: str, children: Children) -> set[str]:
    command = [str(slots.python(name)), "-I", "-m", "pip", "check", "--disable-pip-version-check"]
    done = children.as_device(command, within_s=WITHIN_S)
    if done.returncode == 0:
        return set()
    if done.returncode == 1 and done.stdout.strip():
        return set(done.stdout.splitlines())
    raise BundleError(f"pip check does not run in slot {name}: {done.last_line()}")
