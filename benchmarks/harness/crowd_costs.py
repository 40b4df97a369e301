"""What single processes cost while a crowd talks to them: CPU, memory, threads, file handles; phase by phase."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from harness.process_trees import PROC, cpu_s, pss_bytes

INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One process at one time (monotone)."""

    at_s: float
    cpu_s: float
    pss_bytes: int
    num_threads: int
    num_files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCost:
    """What a process took in one phase; `cores` is CPU seconds a second, all else the largest that was seen."""

    seconds: float
    cpu_s: float
    cores: float
    median_pss_bytes: int
    peak_pss_bytes: int
    num_threads: int
    num_files: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Watch:
    """Looks at some processes twice a second while it is entered; `pids` by label."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._phase, self._looks = "", {label: dict[str, list[Look]]() for label in pids}
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self.begin("before")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def begin(self, phase: str) -> None:
        """Ends the phase that is, with a last look, and begins another one."""
        with self._lock:
            if self._phase:
                self._look()
            self._phase = phase
            self._look()

    def cost(self, label: str, phase: str) -> PhaseCost:
        """Returns what a process took in a phase that is over."""
        looks = self._looks[label][phase]
        first, last = looks[0], looks[-1]
        return PhaseCost(
            seconds=last.at_s - first.at_s,
            cpu_s=last.cpu_s - first.cpu_s,
            cores=(last.cpu_s - first.cpu_s) / (last.at_s - first.at_s),
            median_pss_bytes=int(statistics.median(look.pss_bytes for look in looks)),
            peak_pss_bytes=max(look.pss_bytes for look in looks),
            num_threads=max(look.num_threads for look in looks),
            num_files=max(look.num_files for look in looks),
        )

    def peak_rss_bytes(self, label: str) -> int:
        """Returns the most that a process has ever had resident, as the kernel noted it."""
        return _status(self._pids[label], "VmHWM") * 1024

    def _run(self) -> None:
        while not self._is_over.wait(INTERVAL_S):
            with self._lock:
                self._look()

    def _look(self) -> None:
        for label, pid in self._pids.items():
            look = Look(
                at_s=time.monotonic(), cpu_s=cpu_s(pid), pss_bytes=pss_bytes(pid),
                num_threads=_status(pid, "Threads"), num_files=_num_files(pid),
            )  # fmt: skip
            self._looks[label].setdefault(self._phase, []).append(look)


def _status(pid: int, name: str) -> int:
    """Returns a number of /proc/PID/status, 0 for a process that is gone."""
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def _num_files(pid: int) -> int:
    try:
        return sum(1 for _ in (PROC / str(pid) / "fd").iterdir())
    except OSError:
        return 0
