"""Looks at processes and folders every few seconds, for as long as it takes."""

from __future__ import annotations

import contextlib
import csv
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Self

from harness.process_trees import PROC, children_by_parent, cpu_s, machine_busy_s, tree
from harness.soak_verdict import Look

EVERY_S = 5.0


class Sampler:
    """Looks while it is entered.

    Args:
        roots: returns the processes that there are now, by name; one may be another process later.
        kin: what a child of one of them is called, by the name of its parent; children of others are left out.
        places: files and folders, by name, whose bytes are counted.
        every_s: between two looks.
    """

    def __init__(
        self,
        roots: Callable[[], Mapping[str, int]],
        *,
        kin: Mapping[str, str],
        places: Mapping[str, Iterable[Path]],
        every_s: float = EVERY_S,
    ) -> None:
        self.looks: dict[str, list[Look]] = {}
        self.sizes: dict[str, list[tuple[float, int]]] = {name: [] for name in places}
        self.busy: list[tuple[float, float]] = []
        self._roots, self._kin, self._places, self._every_s = roots, kin, places, every_s
        self._began_s = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    @property
    def now_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began_s

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def since(self, at_s: float) -> dict[str, list[Look]]:
        """Returns the looks from then on, by name."""
        return {name: [look for look in looks if look.at_s >= at_s] for name, looks in self.looks.items()}

    def write(self, folder: Path) -> None:
        """Writes `processes.csv` and `places.csv`."""
        with (folder / "processes.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("process", "at_s", "rss_bytes", "anonymous_bytes", "num_handles", "num_threads", "cpu_s"))
            for name, looks in self.looks.items():
                rows.writerows(
                    (name, f"{look.at_s:.1f}", look.rss_bytes, look.anonymous_bytes, look.num_handles,
                     look.num_threads, f"{look.cpu_s:.2f}")
                    for look in looks
                )  # fmt: skip
        with (folder / "places.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("place", "at_s", "bytes"))
            for name, sizes in self.sizes.items():
                rows.writerows((name, f"{at_s:.1f}", size) for at_s, size in sizes)

    def _run(self) -> None:
        while not self._is_over.wait(self._every_s):
            children = children_by_parent()
            self.busy.append((self.now_s, machine_busy_s()))
            for name, pid in self._roots().items():
                self._look(name, pid)
                if name in self._kin:
                    for child in tree(pid, children)[1:]:
                        self._look(self._kin[name], child)
            for name, paths in self._places.items():
                self.sizes[name].append((self.now_s, sum(bytes_of(path) for path in paths)))

    def _look(self, name: str, pid: int) -> None:
        if (look := look_at(pid, self.now_s)) is not None:
            self.looks.setdefault(name, []).append(look)


def look_at(pid: int, at_s: float) -> Look | None:
    """Returns how a process is, None for one that is gone."""
    try:
        lines = [line.split() for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines()]
        status = (PROC / str(pid) / "status").read_text()
        num_handles = len(os.listdir(PROC / str(pid) / "fd"))  # noqa: PTH208 names alone, thousands of times
    except OSError:
        return None
    sizes = {line[0]: int(line[1]) * 1024 for line in lines[1:] if line[1].isdecimal()}
    if "Rss:" not in sizes:  # a zombie
        return None
    num_threads = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Threads:"))
    return Look(
        at_s=at_s,
        rss_bytes=sizes["Rss:"],
        anonymous_bytes=sizes["Anonymous:"],
        num_handles=num_handles,
        num_threads=num_threads,
        cpu_s=cpu_s(pid),
    )


def bytes_of(path: Path) -> int:
    """Returns the length of a file, or of all files in a folder; 0 where there is none."""
    if path.is_dir():
        return sum(bytes_of(entry) for entry in _entries(path))
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _entries(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(folder.iterdir())
    return []
