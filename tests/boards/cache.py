"""What takes long to make and is kept: root file systems and wheels, in the folder that EDGEFL_BOARDS names."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

from edgefl.provision.provisioning_files import find_path as source
from edgefl.provision.wheels import WheelPlatform, fill_wheelhouse, get_lock_name, load_lock_text, parse_lock

HERE = Path(__file__).parent


def folder() -> Path:
    """Returns where it is kept; made when it is missing."""
    kept = Path(os.environ.get("EDGEFL_BOARDS") or Path.home() / ".cache" / "edgefl" / "boards")
    kept.mkdir(parents=True, exist_ok=True)
    return kept


def image(arch: str) -> Path:
    """Returns the root file system of a board; makes it when it is missing, which takes minutes."""
    root = folder() / f"root-{arch}"
    if not root.exists():
        subprocess.run([str(HERE / "make_root.sh"), arch, str(folder())], check=True)
    return root


def why_no_image(arch: str) -> str | None:
    """Returns why there is no root file system and none can be made, or None."""
    if (folder() / f"root-{arch}").exists():
        return None
    if os.geteuid() != 0:
        return "only root can make a board's root file system"
    needed = {"mmdebstrap": "mmdebstrap"} | ({"qemu-aarch64-static": "qemu-user-static"} if arch == "arm64" else {})
    needed |= {"arch-test": "arch-test"} if arch == "arm64" else {}
    missing = [package for program, package in needed.items() if shutil.which(program) is None]
    return f"no {', '.join(missing)} here to make a board's root file system" if missing else None


@functools.cache
def wheels(family: WheelPlatform, *, with_torch: bool = False) -> Path:
    """Returns the wheels that a board installs, with edgefl's as it was when this process asked first."""
    kept = folder() / f"wheels-{get_lock_name(family, _extra(with_torch)).removesuffix('.txt')}"
    fill_wheelhouse(kept, family, parse_lock(load_lock_text(family, _extra(with_torch))))
    return kept


def lock(family: WheelPlatform) -> Path:
    """Returns the lock that goes with the wheels."""
    return source(f"locks/{get_lock_name(family)}")


def _extra(with_torch: bool) -> str:
    return "train" if with_torch else ""
