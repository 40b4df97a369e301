"""Makes the locks of all families of boards from pyproject.toml and constraints.txt; needs uv and the package index.

    python provisioning/locks/make_locks.py [--check] [BOARD ...]

Each requirement has the hash of one wheel: the one that pip on such a board would choose. A source distribution,
whose build would run code, is never accepted. `--check` writes nothing and fails when a lock is not what would be
written.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename
from uv import find_uv_bin

from edgefl.provision.wheels import (
    LOCK_SUFFIXES,
    WHEEL_PLATFORMS,
    PinnedWheel,
    WheelPlatform,
    get_lock_name,
    get_platform,
)

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def main() -> int:
    """Returns the exit code: 1 when `--check` found a stale lock."""
    options = argparse.ArgumentParser(description="Make the locks in provisioning/locks.")
    options.add_argument("--check", action="store_true", help="only say which locks are stale")
    options.add_argument("boards", nargs="*", metavar="BOARD", help=f"of {', '.join(WHEEL_PLATFORMS)} [default: all]")
    asked = options.parse_args()
    check: bool = asked.check
    stale = []
    for family in map(get_platform, asked.boards or WHEEL_PLATFORMS):
        for extra in LOCK_SUFFIXES:
            if extra == "train" and not family.has_torch:
                continue
            path = HERE / get_lock_name(family, extra)
            text = made_lock(family, extra)
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                stale.append(path.name)
            if not check:
                path.write_text(text, encoding="utf-8")
    sys.stdout.write("".join(f"{name} {'is stale' if check else 'is new'}\n" for name in stale))
    return int(check and bool(stale))


def made_lock(family: WheelPlatform, extra: str) -> str:
    """Returns the text of one lock."""
    tags = _tags(family)
    chosen = [_chosen(package, tags) for package in _resolved(family, extra)]
    wheels = sorted((wheel for wheel, _ in chosen), key=lambda wheel: wheel.name)
    megabytes = sum(size for _, size in chosen) / 1e6
    what = {"": "a device without torch", "train": "a device with torch", "coordinator": "a coordinator"}[extra]
    return "\n".join([
        f"# {family.title}: CPython {family.python_version}, {family.machine}, glibc 2.{family.glibc}; {what}.",
        f"# {len(wheels)} wheels, {megabytes:.0f} MB. Made by provisioning/locks/make_locks.py; do not edit.",
        "--only-binary :all:",
        *(wheel.format_requirement() for wheel in wheels),
        "",
    ])  # fmt: skip


def _resolved(family: WheelPlatform, extra: str) -> list[dict[str, Any]]:
    """Returns the packages that uv resolves for the board, each with all of its wheels."""
    words = [
        find_uv_bin(), "pip", "compile", "pyproject.toml", "--no-config", "--quiet",
        "--constraints", "constraints.txt", "--format", "pylock.toml", "--only-binary", ":all:",
        "--python-version", family.python_version,
        "--python-platform", f"{family.machine}-manylinux_2_28",
        *(("--extra", extra) if extra else ()),
        # A coordinator runs Flower's server; a device imports neither that nor what only it needs.
        *(("--excludes", str(HERE / "not-on-boards.txt")) if extra != "coordinator" else ()),
    ]  # fmt: skip
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"uv could not resolve {family.name}: {done.stderr.strip()}")
    packages: list[dict[str, Any]] = tomllib.loads(done.stdout)["packages"]
    return packages


def _tags(family: WheelPlatform) -> list[Tag]:
    """Returns what the board installs, the best first, as pip on it would rank."""
    platforms = family.list_platform_tags()
    native = cpython_tags(python_version=family.python, abis=[family.abi], platforms=platforms)
    pure = compatible_tags(python_version=family.python, interpreter=family.abi, platforms=platforms)
    return [*native, *pure]


def _chosen(package: Mapping[str, Any], tags: list[Tag]) -> tuple[PinnedWheel, int]:
    """Returns the best wheel of a package for these tags, and its bytes."""
    ranks = {tag: rank for rank, tag in enumerate(tags)}
    fitting = []
    for wheel in package.get("wheels", ()):
        file = wheel.get("name") or wheel["url"].rpartition("/")[2]
        _, _, build, marks = parse_wheel_filename(file)
        known = [ranks[mark] for mark in marks if mark in ranks]
        if known:
            fitting.append((min(known), [-int(build[0])] if build else [0], file, wheel))
    if not fitting:
        sys.exit(f"{package['name']} {package['version']} has no wheel for {tags[0]}")
    _, _, file, wheel = min(fitting, key=lambda each: each[:3])
    locked = PinnedWheel(
        name=package["name"], version=package["version"], sha256=wheel["hashes"]["sha256"], file=file
    )
    return locked, int(wheel["size"])


if __name__ == "__main__":
    sys.exit(main())
