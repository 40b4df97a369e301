"""The control groups around this process, and the memory that they leave it."""

from __future__ import annotations

import re
from pathlib import Path

from edgefl.device.board.board_files import number, text, whole


def cgroups(root: Path) -> list[Path]:
    """Returns this process's control group (version 2) and those around it: the tightest limit of all holds."""
    match = re.search(r"^0::(/[\x20-\x7e]{0,500})$", text(root / "proc/self/cgroup") or "", re.MULTILINE)
    top = root / "sys/fs/cgroup"
    own = top / match[1].lstrip("/") if match and ".." not in match[1] else top
    return [own, *[folder for folder in own.parents if folder == top or top in folder.parents]]


def memory_left_bytes(root: Path) -> int | None:
    """Returns what the tightest group around this process still lets it take; None where none has a limit.

    A unit whose child is killed for want of memory may be stopped as a whole. Files that are only kept in memory for
    speed do not count: they go when room is needed.
    """
    left = []
    for folder in cgroups(root):
        limit, used = number(folder / "memory.max"), number(folder / "memory.current")
        if limit is not None and used is not None:
            match = re.search(r"^inactive_file (\d+)$", text(folder / "memory.stat") or "", re.MULTILINE)
            kept = (whole(match[1]) or 0) if match else 0
            left.append(max(0, limit - max(0, used - kept)))
    return min(left, default=None)
