"""The ledger of a run: its journal against what the devices noted of their own answers, and against the history.

Everything here is a function of what was written down; nothing asks a process.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgefl.core.types import Decision, InstructionFailed, TrainInstruction, Update
from edgefl.storage.journal.record_encoding import Aggregation
from edgefl.storage.journal.wal_journal import load_journal_entries

SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a device noted of one answer; `what` is `sending`, then `taken` or `refused`, unless it was cut off."""

    device: str
    assignment: str
    sha256: str
    what: str


@dataclass(frozen=True, kw_only=True)
class Given:
    """Assignments in the journal that were about to be given out."""

    assignments: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Received:
    """An update in the journal."""

    device: str
    assignment: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Applied:
    """A version in the journal, and what it was made of."""

    version: int
    assignments: tuple[str, ...]


Noted = Given | Received | Applied | str
"""What is in a journal; a string is the assignment that was lost or refused, visibly."""


@dataclass(frozen=True, kw_only=True)
class Books:
    """All that was written down of a run; `entries` in the journal's order, `rows` of the history."""

    entries: Sequence[Noted]
    answers: Sequence[Answer]
    rows: Sequence[Mapping[str, Any]]
    rounds: Sequence[Mapping[str, Any]]


@dataclass(kw_only=True)
class Audit:
    """What came of comparing them; `problems` in words, empty when all is well."""

    num_versions: int = 0
    num_aggregated: int = 0
    num_dropped: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    taken_back: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def audit(books: Books) -> Audit:
    """Holds a run to: versions only go up, each aggregated update is a device's own and counts once, none is lost."""
    found = Audit()
    sent = {(answer.device, answer.assignment, answer.sha256) for answer in books.answers}
    received: dict[str, list[Received]] = {}
    settled: set[str] = set()
    uses: Counter[str] = Counter()
    for entry in books.entries:
        if isinstance(entry, Received):
            received.setdefault(entry.assignment, []).append(entry)
            if (entry.device, entry.assignment, entry.sha256) not in sent:
                found.foreign.append(f"{entry.assignment} of {entry.device}")
        elif isinstance(entry, Applied):
            if entry.version != found.num_versions + 1:
                found.taken_back.append(entry.version)
            found.num_versions = entry.version
            for assignment in entry.assignments:
                uses[assignment] += 1
                if assignment not in received:
                    found.foreign.append(f"{assignment}, which never came")
        elif isinstance(entry, str):
            settled.add(entry)
    found.num_aggregated, found.num_dropped = len(uses), len(settled - set(uses))
    found.doubled = [f"{assignment}: {times} times" for assignment, times in uses.items() if times > 1]
    found.lost = _lost(books.answers, received, settled)
    _tell(found)
    found.problems += _history_problems(books, uses, found.num_versions)
    return found


def forgotten(entries: Sequence[Noted], answers: Sequence[Answer], version: int) -> list[str]:
    """Returns what somebody has relied on, and the journal that a coordinator left behind does not know.

    Args:
        entries: of the journal as it is now, before anybody goes on with it.
        answers: that devices have sent by then: nothing is given out before it is durable.
        version: that an operator was told of.
    """
    given = {name for entry in entries if isinstance(entry, Given) for name in entry.assignments}
    applied = max((entry.version for entry in entries if isinstance(entry, Applied)), default=0)
    problems = []
    if unknown := sorted({answer.assignment for answer in answers} - given):
        problems.append(f"{len(unknown)} assignments were answered, and no journal knows them: {unknown[0]}, …")
    if version > applied:
        problems.append(f"version {version} was told, the journal ends with {applied}")
    return problems


def _lost(answers: Iterable[Answer], received: Mapping[str, Sequence[Received]], settled: set[str]) -> list[str]:
    """Returns answers that the coordinator took, told the device so, and knows nothing of."""
    known = {(update.assignment, update.sha256) for updates in received.values() for update in updates}
    return [
        f"{answer.assignment} of {answer.device}"
        for answer in answers
        if answer.what == "taken"
        and (answer.assignment, answer.sha256) not in known
        and answer.assignment not in settled
    ]


def _tell(found: Audit) -> None:
    for what, names in (
        ("taken by the coordinator, and in no journal", found.lost),
        ("aggregated more than once", found.doubled),
        ("aggregated, and sent by no device", found.foreign),
        ("versions that do not follow the one before", found.taken_back),
    ):
        if names:
            shown = ", ".join(map(str, names[:SHOWN])) + (", …" if len(names) > SHOWN else "")
            found.problems.append(f"{len(names)} {what}: {shown}")


def _history_problems(books: Books, uses: Mapping[str, int], num_versions: int) -> list[str]:
    problems = []
    used = Counter(str(row["assignment_id"]) for row in books.rows if row["outcome"] == "used")
    if missing := sorted(set(uses) - set(used)):
        problems.append(f"{len(missing)} aggregated updates are not in the history: {', '.join(missing[:SHOWN])}")
    if strange := sorted(name for name, times in used.items() if times > 1 or name not in uses):
        problems.append(f"{len(strange)} updates in the history were not aggregated: {', '.join(strange[:SHOWN])}")
    if open_rows := [str(row["assignment_id"]) for row in books.rows if row["outcome"] is None]:
        problems.append(f"{len(open_rows)} rows of updates without an outcome: {', '.join(open_rows[:SHOWN])}")
    numbers = [row["round"] for row in books.rounds]
    if numbers != list(range(1, len(numbers) + 1)):
        problems.append(f"rounds have gaps: {numbers}")
    if unfinished := [row["round"] for row in books.rounds if row["closed_at"] is None]:
        problems.append(f"rounds that were not closed: {unfinished}")
    per_round = Counter(row["round"] for row in books.rows if row["outcome"] == "used")
    if wrong := [row["round"] for row in books.rounds if row["num_updates"] != per_round[row["round"]]]:
        problems.append(f"rounds whose sums differ from their updates: {wrong}")
    if books.rounds and max(row["version"] or 0 for row in books.rounds) != num_versions:
        problems.append(f"the history ends with another version than the journal, which has {num_versions}")
    return problems


def read_journal_entries(folders: Sequence[Path]) -> list[Noted]:
    """Returns what the files of one journal say; of a file that lies in several folders the last one counts."""
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name)
        for folder in folders:
            for path in sorted(folder.glob("*.wal")):
                shutil.copyfile(path, whole / path.name)
        return [entry for _, found in load_journal_entries(whole, _digest) if (entry := _entry(found)) is not None]


def read_answers(file: Path, device: str, run_id: str) -> list[Answer]:
    """Returns what one device noted of its answers in a run; a line that a kill has torn is left out."""
    answers = []
    for line in file.read_text(errors="replace").splitlines() if file.exists() else ():
        try:
            note = json.loads(line)
        except ValueError:
            continue
        if note.pop("run") == run_id:
            answers.append(Answer(device=device, **note))
    return answers


def _digest(body: bytes) -> Any:
    return {"sha256": hashlib.sha256(body).hexdigest()}


def _entry(found: object) -> Noted | None:
    match found:
        case Decision():
            return Given(
                assignments=tuple(o.assignment_id for o in found.instructions if isinstance(o, TrainInstruction))
            )
        case Update():
            sha256 = str(found.tensors["sha256"])
            return Received(device=found.device_id, assignment=found.assignment_id, sha256=sha256)
        case Aggregation():
            return Applied(version=found.version, assignments=found.assignment_ids)
        case InstructionFailed():
            return found.assignment_id
    return None
