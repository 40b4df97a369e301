"""Control groups of this process, and its remaining memory within them."""

from __future__ import annotations

import re
from pathlib import Path

from edgefl.device.hardware.sysfs import parse_int, read_int, read_text


def list_cgroups(root: Path) -> list[Path]:
    """Returns this process's cgroup (version 2) and its ancestors: the tightest limit of all holds."""
    match = re.search(r"^0::(/[\x20-\x7e]{0,500})$", read_text(root / "proc/self/cgroup") or "", re.MULTILINE)
    mount_point = root / "sys/fs/cgroup"
    cgroup = mount_point / match[1].lstrip("/") if match and ".." not in match[1] else mount_point
    return [cgroup, *[folder for folder in cgroup.parents if folder == mount_point or mount_point in folder.parents]]


def compute_memory_left_bytes(root: Path) -> int | None:
    """Returns the bytes left in the tightest cgroup of this process; None without a limit.

    A unit whose child is killed out of memory may be stopped as a whole. Reclaimable page cache does not count as
    used.
    """
    remaining = []
    for folder in list_cgroups(root):
        limit_bytes, used_bytes = read_int(folder / "memory.max"), read_int(folder / "memory.current")
        if limit_bytes is not None and used_bytes is not None:
            match = re.search(r"^inactive_file (\d+)$", read_text(folder / "memory.stat") or "", re.MULTILINE)
            reclaimable = (parse_int(match[1]) or 0) if match else 0
            remaining.append(max(0, limit_bytes - max(0, used_bytes - reclaimable)))
    return min(remaining, default=None)
