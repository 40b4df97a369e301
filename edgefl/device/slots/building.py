"""Builds the idle slot: a fresh virtual environment, the packages of the one in use, a bundle's wheels over them.

What a pack had before and has no more goes; of a removal that is all.

What stays the same is not copied but linked: an SD card has no room and no writes to spare for a second torch. pip
replaces files by new ones, it never writes into them, so the slot in use is not touched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgefl.bundles.manifest import Kind, Manifest
from edgefl.device.slots.children import Children
from edgefl.device.slots.layout import RECORD, Slots, files_of
from edgefl.errors import BundleError, StoreFullError

INSTALL_WITHIN_S = 1800.0
_OWN = frozenset({"bin", "pyvenv.cfg", "lib64", RECORD})
_INSTALL = (
    "install", "--no-index", "--no-deps", "--only-binary", ":all:", "--force-reinstall", "--no-cache-dir",
    "--no-warn-script-location",
)  # fmt: skip
_UNINSTALL = ("uninstall", "--yes")
_QUIETLY = ("--disable-pip-version-check", "--root-user-action", "ignore", "--quiet")
_FULL = os.strerror(errno.ENOSPC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """The wheels of a bundle that a board takes, each with the paths in it; a removal has none."""

    manifest: Manifest
    names: dict[Path, list[str]]
    projects: tuple[str, ...]


def build_slot(slots: Slots, name: str, brought: Brought, children: Children) -> None:
    """Makes a slot anew from the one in use and the wheels of a bundle.

    Raises:
        BundleError: the wheels would replace what is not theirs, or pip refuses them.
        StoreFullError: there is no room for them.
    """
    clear_slot(slots, name)
    old, new = slots.path(slots.in_use()), slots.path(name)
    venv.EnvBuilder(with_pip=False, symlinks=True).create(new)
    for path in old.iterdir():
        if path.name not in _OWN:
            link_tree(path, new / path.name)
    _rewrite_scripts(old, new)
    if brought.manifest.kind is Kind.PACK:
        check_collisions(slots, name, brought)
    if gone := _former(slots, brought) - set(brought.projects):
        _pip(slots, name, (*_UNINSTALL, *sorted(gone)), children)
    before = _commands(slots, name)
    if brought.names:
        _pip(slots, name, (*_INSTALL, *map(str, brought.names)), children)
    if brought.manifest.kind is Kind.PACK:
        _check_commands(slots, name, brought, before)


def clear_slot(slots: Slots, name: str) -> None:
    """Removes a slot that is not in use."""
    if name == slots.in_use():
        raise BundleError(f"slot {name} is in use and is not touched")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(slots.path(name))


def link_tree(source: Path, target: Path) -> None:
    """Makes `target` a tree of hard links to the files of `source`; copies where the file system has none."""
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


def check_collisions(slots: Slots, name: str, brought: Brought) -> None:
    """Raises `BundleError` when a pack brings what belongs to the release or to another pack."""
    own = _former(slots, brought)
    folder, there = slots.packages(name), slots.installed(name)
    if foreign := [project for project in brought.projects if project in there and project not in own]:
        raise BundleError(
            f"it brings {foreign[0]}, which this board has already ({there[foreign[0]]}) and not from this pack; "
            "a pack uses what the board has, and brings only what it lacks"
        )
    former = files_of(folder, own)
    for wheel, names in brought.names.items():
        for path in names:
            if path not in former and (folder / path).exists():
                raise BundleError(f"{wheel.name} would replace {path}, which belongs to something else on this board")


def _former(slots: Slots, brought: Brought) -> set[str]:
    """Returns the projects that came with the pack of this name before."""
    pack = slots.record(slots.in_use()).packs.get(brought.manifest.name)
    return set(pack.projects) if pack is not None else set()


def _check_commands(slots: Slots, name: str, brought: Brought, before: Mapping[str, object]) -> None:
    """Raises when pip has made a command of the pack in place of another; the wheel's paths do not show it."""
    after = _commands(slots, name)
    own = {Path(path).name for path in files_of(slots.packages(slots.in_use()), _former(slots, brought))}
    if replaced := sorted(each for each in before if after.get(each) != before[each] and each not in own):
        raise BundleError(f"its command {replaced[0]} would replace one that this board has")


def _commands(slots: Slots, name: str) -> dict[str, object]:
    """Returns what tells each command of a slot from another one of the same name."""
    found = {path.name: path.lstat() for path in (slots.path(name) / "bin").iterdir()}
    return {each: (of.st_ino, of.st_ctime_ns) for each, of in found.items()}


def _pip(slots: Slots, name: str, words: Sequence[str], children: Children) -> None:
    done = children.as_root(
        [str(slots.python(name)), "-I", "-m", "pip", words[0], *_QUIETLY, *words[1:]], within_s=INSTALL_WITHIN_S
    )
    if done.returncode and _FULL in done.stderr:
        raise StoreFullError(f"there is no room for it in {slots.root}: {done.last_line()}")
    if done.returncode:
        raise BundleError(f"pip cannot {words[0]} it: {done.last_line()}")


def _rewrite_scripts(old: Path, new: Path) -> None:
    """Copies the commands of the slot in use, so that they start the new slot's Python."""
    mark, fresh = f"#!{old}/bin/python".encode(), f"#!{new}/bin/python".encode()
    for path in (old / "bin").iterdir():
        if path.is_symlink() or not path.is_file() or (new / "bin" / path.name).exists():
            continue
        content = path.read_bytes()
        if content.startswith(mark):
            made = new / "bin" / path.name
            made.write_bytes(content.replace(mark, fresh, 1))
            made.chmod(path.stat().st_mode & 0o777)
