"""The ledger finds what it is there to find: every test here plants one thing that must not happen."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from pathlib import Path

import pytest
from chaos.ledger import (
    Answer,
    Applied,
    Audit,
    Books,
    Given,
    Noted,
    Received,
    audit,
    forgotten,
    read_answers,
    read_journal_entries,
)

from edgefl.core.types import (
    Decision,
    InstructionFailed,
    LazyTensors,
    TrainConfig,
    TrainInstruction,
    Update,
    UpdateMetrics,
    UpdateStatus,
)
from edgefl.storage.journal.wal_journal import WalJournal

DEVICES = ("d1", "d2")


def books(versions: int = 3) -> Books:
    """A run in which both devices brought one update for each version."""
    named = [(f"a{version}-{device}", device, version) for version in range(1, versions + 1) for device in DEVICES]
    entries: list[Noted] = []
    for version in range(1, versions + 1):
        mine = [name for name, _, at in named if at == version]
        entries.append(Given(assignments=tuple(mine)))
        entries += [Received(device=name[-2:], assignment=name, sha256=f"of {name}") for name in mine]
        entries.append(Applied(version=version, assignments=tuple(mine)))
    return Books(
        entries=entries,
        answers=[
            Answer(device=device, assignment=name, sha256=f"of {name}", what=what)
            for name, device, _ in named
            for what in ("sending", "taken")
        ],
        rows=[{"assignment_id": name, "outcome": "used", "round": version} for name, _, version in named],
        rounds=[
            {"round": version, "closed_at": 1.0, "num_updates": 2, "version": version}
            for version in range(1, versions + 1)
        ],
    )


def only_problem(found: Audit) -> str:
    (problem,) = found.problems
    return problem


def test_a_run_in_which_all_is_well_has_no_problem() -> None:
    found = audit(books())
    assert (found.problems, found.num_versions, found.num_aggregated, found.num_dropped) == ([], 3, 6, 0)


def test_an_update_that_counts_twice_is_found() -> None:
    made = books()
    entries = list(made.entries)
    entries[7] = Applied(version=2, assignments=("a2-d1", "a1-d2"))
    found = audit(replace(made, entries=entries))
    assert found.doubled == ["a1-d2: 2 times"]
    assert any("aggregated more than once: a1-d2" in problem for problem in found.problems)


def test_an_update_that_was_taken_and_is_in_no_journal_is_found() -> None:
    made = books()
    answer = Answer(device="d1", assignment="a4-d1", sha256="x", what="taken")
    sent = replace(answer, what="sending")
    assert "in no journal: a4-d1 of d1" in only_problem(audit(replace(made, answers=[*made.answers, sent, answer])))
    assert audit(replace(made, answers=[*made.answers, sent])).problems == []
    visibly = replace(made, answers=[*made.answers, sent, answer], entries=[*made.entries, "a4-d1"])
    found = audit(visibly)
    assert (found.problems, found.num_dropped) == ([], 1)


def test_an_update_that_no_device_has_sent_is_found() -> None:
    made = books()
    answers = [answer for answer in made.answers if answer.assignment != "a2-d2"]
    assert "sent by no device: a2-d2 of d2" in only_problem(audit(replace(made, answers=answers)))
    other = [
        replace(a, sha256="another") if a.assignment == "a2-d2" else a for a in made.answers if a.what != "taken"
    ]
    assert "sent by no device: a2-d2 of d2" in only_problem(audit(replace(made, answers=other)))


def test_a_version_that_is_made_again_is_found() -> None:
    made = books()
    again = [*made.entries[:8], Applied(version=2, assignments=()), *made.entries[8:]]
    assert "do not follow the one before: 2" in only_problem(audit(replace(made, entries=again)))


def test_what_was_acted_on_before_it_was_durable_is_found() -> None:
    made = books()
    assert forgotten(made.entries, made.answers, 3) == []
    torn = made.entries[:8]
    assert forgotten(torn, made.answers[:8], 2) == []
    assert forgotten(torn, made.answers, 2) == ["2 assignments were answered, and no journal knows them: a3-d1, …"]
    assert forgotten(torn, made.answers[:8], 3) == ["version 3 was told, the journal ends with 2"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rows": lambda rows: rows[1:]}, "1 aggregated updates are not in the history: a1-d1"),
        ({"rows": lambda rows: [*rows, {**rows[0]}]}, "1 updates in the history were not aggregated: a1-d1"),
        ({"rows": lambda rows: [*rows, {**rows[0], "assignment_id": "b", "outcome": None}]}, "without an outcome: b"),
        ({"rounds": lambda rounds: rounds[1:]}, r"rounds have gaps: [2, 3]"),
        ({"rounds": lambda rounds: [{**rounds[0], "closed_at": None}, *rounds[1:]]}, "were not closed: [1]"),
        ({"rounds": lambda rounds: [{**rounds[0], "num_updates": 1}, *rounds[1:]]}, "differ from their updates: [1]"),
        ({"rounds": lambda rounds: [*rounds[:2], {**rounds[2], "version": 2}]}, "another version than the journal"),
    ],
)
def test_a_history_that_differs_from_the_journal_is_found(change, told) -> None:
    made = books()
    changed = {name: make(list(getattr(made, name))) for name, make in change.items()}
    assert any(told in problem for problem in audit(replace(made, **changed)).problems)


def test_journals_and_notes_are_read_as_they_were_written(tmp_path: Path) -> None:
    body = random.Random(3).randbytes(100)
    update = Update(
        assignment_id="a1-d1", device_id="d1", base_version=0, tensors=LazyTensors(dict), body=body,
        received_s=1.0, metrics=UpdateMetrics(iterations=1, num_examples=1),
    )  # fmt: skip
    kept, there = tmp_path / "kept", tmp_path / "there"
    with WalJournal(there, lambda _: {}, max_file_bytes=0) as journal:
        plan = TrainConfig(iterations=1)
        orders = [TrainInstruction(assignment_id="a1-d1", device_id="d1", base_version=0, plan=plan)]
        journal.record_decision(Decision(instructions=orders))
        journal.record_events([update])
        journal.record_aggregation(1, ["a1-d1"])
        journal.record_events(
            [InstructionFailed(device_id="d2", assignment_id="a1-d2", outcome=UpdateStatus.LOST, reason="gone")]
        )
    kept.mkdir()
    first = min(there.glob("*.wal"))
    first.rename(kept / first.name)
    sha256 = hashlib.sha256(body).hexdigest()
    assert read_journal_entries([kept, there]) == [
        Given(assignments=("a1-d1",)),
        Received(device="d1", assignment="a1-d1", sha256=sha256),
        Applied(version=1, assignments=("a1-d1",)),
        "a1-d2",
    ]
    notes = tmp_path / "answers"
    notes.write_text(
        f'{{"what": "sending", "run": "r", "assignment": "a1-d1", "sha256": "{sha256}"}}\n'
        '{"what": "taken", "run": "other", "assignment": "a1-d1", "sha256": "0"}\n{"what": "ta'
    )
    assert read_answers(notes, "d1", "r") == [Answer(device="d1", assignment="a1-d1", sha256=sha256, what="sending")]
    assert read_answers(tmp_path / "none", "d1", "r") == []
