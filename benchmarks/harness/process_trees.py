"""Memory and CPU time of whole process trees, read from /proc: what a device costs its board, children included."""

from __future__ import annotations

import ctypes
import os
import signal
import statistics
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

PROC = Path("/proc")
INTERVAL_S = 0.2
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look at a tree: `pss_bytes` shares out pages that several processes use, `cpu_s` only ever grows."""

    at_s: float
    pss_bytes: int
    cpu_s: float
    num_processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a tree took between two points of time; `cores` is CPU seconds a second."""

    peak_bytes: int
    median_bytes: int
    cores: float


class Meter:
    """Looks at some trees every `interval_s` while it is entered; `roots` maps a label to a process id."""

    def __init__(self, roots: Mapping[str, int], *, interval_s: float = INTERVAL_S) -> None:
        self.samples: dict[str, list[Sample]] = {label: [] for label in roots}
        self.machine: list[tuple[float, float]] = []
        self.commands: set[str] = set()
        self._roots, self._interval_s = dict(roots), interval_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meter", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def cost(self, label: str, begin_s: float, end_s: float) -> Cost:
        """Returns what the tree `label` took in a span of Unix time that holds at least two looks."""
        seen = [sample for sample in self.samples[label] if begin_s <= sample.at_s <= end_s]
        if len(seen) < 2:
            raise ValueError(
                f"the rounds took {end_s - begin_s:.2f} s, too short to measure {label}; run more rounds"
            )
        return Cost(
            peak_bytes=max(sample.pss_bytes for sample in seen),
            median_bytes=int(statistics.median(sample.pss_bytes for sample in seen)),
            cores=(seen[-1].cpu_s - seen[0].cpu_s) / (seen[-1].at_s - seen[0].at_s),
        )

    def other_cores(self, begin_s: float, end_s: float) -> float:
        """Returns how many cores were busy with anything else than the trees: neighbours, kernel, hypervisor, us."""
        seen = [(at_s, busy_s) for at_s, busy_s in self.machine if begin_s <= at_s <= end_s]
        if len(seen) < 2:
            raise ValueError(f"the rounds took {end_s - begin_s:.2f} s, too short to measure; run more rounds")
        busy = (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])
        return max(0.0, busy - sum(self.cost(label, begin_s, end_s).cores for label in self.samples))

    def _run(self) -> None:
        while not self._is_over.wait(self._interval_s):
            children = children_by_parent()
            self.machine.append((time.time(), machine_busy_s()))
            for label, root in self._roots.items():
                pids = tree(root, children)
                self.commands |= {command(pid) for pid in pids}
                self.samples[label].append(look(pids))


def look(pids: Collection[int]) -> Sample:
    """Returns the sum over some processes; one that has ended meanwhile counts nothing."""
    return Sample(
        at_s=time.time(),
        pss_bytes=sum(pss_bytes(pid) for pid in pids),
        cpu_s=sum(cpu_s(pid) for pid in pids),
        num_processes=len(pids),
    )


def tree_cpu_s() -> float:
    """Returns the CPU seconds of this process and of all below it."""
    return sum(cpu_s(pid) for pid in tree(os.getpid(), children_by_parent()))


def children_by_parent() -> dict[int, list[int]]:
    """Returns the ids of all processes of this machine under the id of their parent."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    return children


def tree(root: int, children: Mapping[int, Iterable[int]]) -> list[int]:
    """Returns `root` and all that descend from it, parents first."""
    found = [root]
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def pss_bytes(pid: int) -> int:
    """Returns the proportional set size; 0 for a process that is gone or a zombie."""
    try:
        text = (PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return 0
    lines = (line.split() for line in text.splitlines())
    return next((int(line[1]) * 1024 for line in lines if line[0] == "Pss:"), 0)


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds of a process and of its children that have ended; 0 for one that is gone."""
    fields = _stat(pid)
    return sum(int(ticks) for ticks in fields[11:15]) / CLOCK_TICKS if fields else 0.0


def machine_busy_s() -> float:
    """Returns the CPU seconds that all cores together have been busy since boot, stolen time included."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = (PROC / "stat").read_text().split()[1:9]
    return sum(int(ticks) for ticks in (user, nice, system, irq, softirq, steal)) / CLOCK_TICKS


def command(pid: int) -> str:
    """Returns the short name of a process, "" for one that is gone."""
    try:
        return (PROC / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""


def adopt_orphans() -> None:
    """Makes this process the parent of descendants that lose theirs, so that none escapes `end_descendants`."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """For `preexec_fn`: if the benchmark is killed, what it started ends too."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def end_descendants(*, timeout_s: float = 5.0) -> None:
    """Ends all that descends from this process: asked at first, killed after `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    asked: set[int] = set()
    while alive := _living_descendants():
        is_late = time.monotonic() > until_s
        for pid in alive if is_late else alive - asked:
            _send(pid, signal.SIGKILL if is_late else signal.SIGTERM)
        asked |= alive
        time.sleep(0.02)


def _living_descendants() -> set[int]:
    """Returns the descendants that still run; adopted ones that ended are reaped on the way."""
    me = os.getpid()
    children = children_by_parent()
    alive = {pid for pid in tree(me, children) if pid != me and not _is_zombie(pid)}
    for pid in set(children.get(me, ())) - alive:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue
    return alive


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _is_zombie(pid: int) -> bool:
    return _stat(pid)[:1] in ([], ["Z"])


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the state on; the name before them may hold blanks."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()
