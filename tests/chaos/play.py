"""Plays a fault script on a site while a run goes on, and looks after every fault whether all is as it should be."""

from __future__ import annotations

import contextlib
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from chaos.ledger import Answer, Audit, Books, audit, forgotten, read_answers, read_journal_entries
from chaos.processes import Site

from edgefl.core.config import RunConfig
from edgefl.core.errors import EdgeflError
from edgefl.core.types import Json
from edgefl.simulation.faults import Fault

POLL_S = 0.1
OVER = frozenset({"finished", "stopped", "failed"})
WITHIN_S = 30.0
"""Within so long the fleet is in service again, whatever was done to it."""


@dataclass(kw_only=True)
class Recovery:
    """What came of one fault; seconds count from its end: until the coordinator answers, and all are back at work."""

    fault: Fault
    answers_s: float
    serves_s: float

    @property
    def what(self) -> str:
        who = "device" if self.fault.device.startswith("device") else self.fault.device
        return f"{self.fault.kind} of {who}"


@dataclass
class Play:
    """One site, and what has been done to it."""

    site: Site
    seed: int
    say: Callable[[str], None] = lambda _line: None
    recoveries: list[Recovery] = field(default_factory=list)
    left_out: list[Fault] = field(default_factory=list)
    num_interventions: int = 0
    problems: list[str] = field(default_factory=list)
    _version: int = 0
    _status: str = ""

    def __post_init__(self) -> None:
        self._rng, self._pause = random.Random(self.seed), threading.Event()

    def submit(self, config: RunConfig) -> str:
        """Queues the run that is disturbed from now on."""
        run_id = self.site.fleet.submit(config)
        self.site.run_id, self._version, self._status = run_id, 0, "queued"
        return run_id

    def disturb(self, faults: Iterable[Fault]) -> None:
        """Plays faults one after another: each when the fleet serves again, and no sooner than the script says."""
        before_s = 0.0
        for fault in faults:
            if reason := self.site.why_not(fault):
                self.left_out.append(fault)
                self.say(f"left out {fault.kind} of {fault.device}: {reason}")
                continue
            self._idle(max(0.0, fault.at_s - before_s))
            if self._status in OVER:
                self.problems.append(f"the run was over before {fault.kind} of {fault.device} at {fault.at_s:g} s")
                return
            self.say(f"{fault.at_s:8.1f} s  {fault.kind} of {fault.device}")
            self.site.begin(fault, self._rng)
            if fault.kind == "torn-tail":
                entries = read_journal_entries(self.site.journal_folders())
                self.problems += forgotten(entries, self._answers(), self._version)
            self._idle(fault.for_s or 0.0)
            self.site.end(fault)
            self._recover(fault)
            before_s = fault.at_s + (fault.for_s or 0.0)

    def finish(self, within_s: float) -> Json:
        """Waits for the end of the run and returns it."""
        self._until(lambda: self._status in OVER, within_s, "the run to end")
        return self.site.fleet.make_client().get(f"/edgefl/v1/runs/{self.site.run_id}")

    def audit(self) -> Audit:
        """Compares what was written down of the run, once it is over."""
        site, run_id = self.site, self.site.run_id
        return audit(
            Books(
                entries=read_journal_entries(site.journal_folders()),
                answers=self._answers(),
                rows=site.fleet.list_history("updates", run=run_id),
                rounds=sorted(site.fleet.list_history("rounds", run=run_id), key=lambda row: row["round"]),
            )
        )

    def _answers(self) -> list[Answer]:
        site = self.site
        files = [(name, site.notes(name) / "answers") for name in site.names]
        return [answer for name, file in files for answer in read_answers(file, name, site.run_id)]

    def _recover(self, fault: Fault) -> None:
        ended_s, version = time.monotonic(), self._version
        answers_s: list[float] = []

        def serves() -> bool:
            if self._status == "" or not self.site.is_up():
                return False
            answers_s.append(time.monotonic() - ended_s)
            return self._status in OVER or (self._version > version and self._are_online())

        self._until(serves, WITHIN_S, f"the fleet to serve after {fault.kind} of {fault.device}")
        recovery = Recovery(
            fault=fault, answers_s=min(answers_s, default=WITHIN_S), serves_s=time.monotonic() - ended_s
        )
        self.recoveries.append(recovery)
        self.say(f"            answers after {recovery.answers_s:.1f} s, serves after {recovery.serves_s:.1f} s")

    def _are_online(self) -> bool:
        return self.site.presence().count("online") == len(self.site.names)

    def _idle(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._look()
            self._pause.wait(max(0.0, min(POLL_S, until_s - time.monotonic())))

    def _until(self, is_true: Callable[[], bool], within_s: float, what: str) -> None:
        until_s = time.monotonic() + within_s
        while not is_true():
            if time.monotonic() > until_s:
                self.problems.append(f"waited {within_s:.0f} s for {what}")
                self.say(self.problems[-1])
                return
            self._look()
            self._pause.wait(POLL_S)

    def _look(self) -> None:
        """Starts what has ended, and sees how far the run is; an operator's hand that it needs is counted."""
        self.site.look_after()
        run = self.site.get(f"/edgefl/v1/runs/{self.site.run_id}")
        self._status = "" if run is None else run["status"]
        if run is None:
            return
        if run["version"] < self._version:
            self.problems.append(f"version {run['version']} after {self._version}")
        self._version = run["version"]
        if run["status"] == "interrupted":
            self.num_interventions += 1
            with contextlib.suppress(EdgeflError):
                self.site.fleet.make_client().post(f"/edgefl/v1/runs/{self.site.run_id}/resume")


def table(recoveries: Sequence[Recovery]) -> str:
    """Returns how long it took, by kind of fault: median and worst."""
    kinds = sorted({recovery.what for recovery in recoveries})
    lines = [f"{'fault':28} {'times':>5}  {'answers: median':>15} {'worst':>6}  {'serves: median':>14} {'worst':>6}"]
    for kind in kinds:
        mine = [recovery for recovery in recoveries if recovery.what == kind]
        answers, serves = [each.answers_s for each in mine], [each.serves_s for each in mine]
        lines.append(
            f"{kind:28} {len(mine):5}  {statistics.median(answers):13.1f} s {max(answers):4.1f} s  "
            f"{statistics.median(serves):12.1f} s {max(serves):4.1f} s"
        )
    return "\n".join(lines)
