"""A journal brings every strategy back to where it was: the real loop, a real journal, boards that fail."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_fleet import FAULTS, NAMES, TASK, FaultyFleet, first_model
from live_faulty_fleet import LiveFaultyFleet

from edgefl.compression.codec_selection import LinkEstimates, make_codec_selector
from edgefl.coordinator.execution.recording_fleet import FleetSnapshot, RecordingFleet
from edgefl.coordinator.execution.replay import JournalReplay, ReplayError, RunClock
from edgefl.coordinator.runs.checkpointing import RunSnapshot, create_run_snapshot
from edgefl.core.types import (
    Decision,
    DeviceInfo,
    Event,
    FinishEarlyInstruction,
    HealthMetrics,
    Instruction,
    TrainConfig,
    TrainInstruction,
)
from edgefl.engine.divergence import Divergence, DivergenceRule
from edgefl.engine.fleet_state import DispatchedInstruction
from edgefl.engine.progress import RoundCounter, StoppingCriteria
from edgefl.engine.round_loop import LoopState, run_rounds
from edgefl.storage.journal.record_encoding import TurnStarted
from edgefl.storage.journal.wal_journal import WalJournal, load_journal_entries
from edgefl.storage.state_serialisation import decode_state, decode_tensors, encode_state
from edgefl.strategies.participation import DeviceSelection, EvaluationSchedule, RunParticipationPolicy
from edgefl.strategies.registry import BUILT_IN_STRATEGIES, make_strategy
from edgefl.strategies.strategy_config import RoundRules
from edgefl.strategies.update_guard import UpdateGuard

NEEDED: dict[str, dict[str, Any]] = {"fedbuff": {"buffer_size": 4}, "gradient-tracking": {"exchanges_per_round": 4}}
NEEDED |= {name: {"iterations": 2} for name in ("ad-psgd", "admm-isvr", "dsgd", "k-gt", "pdmm-isvr")}
CODECS = ("dense", "dense|fp16", "dense|int8")
ROUNDS = dict.fromkeys(("ad-psgd", "admm-isvr", "d2", "dsgd", "gradient-tracking", "k-gt", "pdmm-isvr"), 1)
"""Of strategies whose nodes talk to each other: with hundreds of turns to a round."""
STRATEGIES = [
    pytest.param(name, marks=[pytest.mark.extended] if name in ROUNDS and name != "dsgd" else [])
    for name in sorted(BUILT_IN_STRATEGIES)
]


class ReachedError(Exception):
    """The journal is over: what follows would be new."""


class NoFleet:
    """In place of the live fleet: being asked for ends the test."""

    def view(self) -> Any:
        raise ReachedError

    resume_in_flight = dispatch = wait = view


class LoopJournal:
    """What the recorder is to the loop, without its rows."""

    def __init__(self, fleet: RecordingFleet, checked: Any) -> None:
        self.fleet, self.checked = fleet, checked

    def record_events(self, events: Sequence[Event]) -> Sequence[Event]:
        self.checked.record_events(events)
        return self.fleet.record_events(events)

    def record_decision(self, decision: Decision) -> None:
        self.fleet.record_decision(decision)

    def record_aggregation(self, version: int, assignment_ids: Sequence[str], state: object) -> None:
        self.fleet.record_aggregation(version, assignment_ids)

    def commit(self) -> None:
        self.fleet.commit()


@dataclass
class Played:
    """How the run stood at every turn: as bytes, and every so often as a whole, with its place in the journal."""

    digests: list[str] = field(default_factory=list)
    records: list[int] = field(default_factory=list)
    wholes: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    reason: str = ""
    found: list[Divergence] = field(default_factory=list)
    gate: RunParticipationPolicy = field(default_factory=RunParticipationPolicy)


def built(name: str, seed: int, codec: str = "") -> Any:
    rules = RoundRules(codec=codec, task=TASK, deadline_s=4.0, seed=seed, max_devices=5 if name == "fedavg" else None)
    return make_strategy(name, NEEDED.get(name, {}), rules)


def gate(*, is_auto: bool = False) -> RunParticipationPolicy:
    codecs = make_codec_selector({spec: 4000 >> place for place, spec in enumerate(CODECS)}) if is_auto else None
    return RunParticipationPolicy(
        selection=DeviceSelection(max_temperature_c=75.0),
        guard=UpdateGuard(has_full_models=True),
        codec_policy=codecs,
    )


def digest(state: Any, course: LoopState, gate: RunParticipationPolicy) -> str:
    return hashlib.sha256(
        encode_state(state) + encode_state(create_run_snapshot(course, FleetSnapshot(), gate))
    ).hexdigest()


def play(
    folder: Path,
    name: str,
    seed: int,
    *,
    rounds: int = 4,
    faults: Mapping[str, str] = FAULTS,
    every: int = 7,
    is_auto: bool = False,
    divergence: DivergenceRule = DivergenceRule(),  # noqa: B008 it is frozen
) -> Played:
    """Runs a strategy on the faulty fleet with a journal; keeps all that a checkpoint has `every` so many turns."""
    strategy, faulty = built(name, seed, CODECS[0] if is_auto else ""), FaultyFleet(seed, faults=faults)
    clock, made = RunClock(), gate(is_auto=is_auto)
    played = Played(gate=made)
    with WalJournal(folder, decode_tensors) as wal:
        fleet = RecordingFleet(LiveFaultyFleet(faulty), wal, JournalReplay(), clock)  # type: ignore[arg-type]
        clock.set_time(0.0, 0.0)  # no time of its own here

        def turn(state: Any, course: LoopState) -> None:
            number = len(played.digests)
            played.digests.append(digest(state, course, made))
            played.records.append(wal.last_record)
            if number % every == 3:
                standing = create_run_snapshot(course, fleet.create_snapshot(), made)
                played.wholes[number] = encode_state(state), encode_state(standing)

        _, played.reason = run_rounds(
            strategy, strategy.init(first_model(seed)), fleet=fleet, journal=LoopJournal(fleet, faulty.journal),
            goal=StoppingCriteria(rounds=rounds, trust_single_evaluation=True), evaluate=EvaluationSchedule(),
            policy=made, on_turn=turn,
            divergence=divergence, on_divergence=played.found.append,
            rounds=RoundCounter(versions_per_round=getattr(strategy, "versions_per_round", 1)),
        )  # fmt: skip
        wal.commit()
    return played


def replay(
    entries: Sequence[Any],
    name: str,
    seed: int,
    whole: tuple[bytes, bytes] | None = None,
    *,
    rounds: int = 4,
    is_auto: bool = False,
    divergence: DivergenceRule = DivergenceRule(),  # noqa: B008 it is frozen
) -> list[str]:
    """Returns how the run stood at every turn up to where the journal ends."""
    strategy, made = built(name, seed, CODECS[0] if is_auto else ""), gate(is_auto=is_auto)
    clock, found = RunClock(), list[str]()
    state, course, before = strategy.init(first_model(seed)), None, None
    count = RoundCounter(versions_per_round=getattr(strategy, "versions_per_round", 1))
    if whole is not None:
        state, standing = decode_state(whole[0], type(state)), decode_state(whole[1], RunSnapshot)
        course, before = standing.restore_loop_state(count), standing.fleet
        standing.restore(made)

    class Checked:
        def record_events(self, events: Sequence[Event]) -> None: ...

    try:
        fleet = RecordingFleet(NoFleet(), NoFleet(), JournalReplay(entries), clock, before)  # type: ignore[arg-type]
        run_rounds(
            strategy, state, fleet=fleet, journal=LoopJournal(fleet, Checked()),
            goal=StoppingCriteria(rounds=rounds, trust_single_evaluation=True),
            evaluate=EvaluationSchedule(), policy=made, rounds=count, loop_state=course, divergence=divergence,
            on_turn=lambda state, course: found.append(digest(state, course, made)),
        )  # fmt: skip
    except ReachedError:
        return found
    raise AssertionError("the run came to its end without asking for anything new")


def entries_after(folder: Path, record: int = 0) -> list[Any]:
    """What the journal has, without what it may have of a turn that never ended."""
    entries = [entry for _, entry in load_journal_entries(folder, decode_tensors, after=record)]
    return entries[: last_turn(entries)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_journal_brings_a_run_to_the_same_state_turn_by_turn_from_its_start_and_from_checkpoints(
    tmp_path: Path, name: str
) -> None:
    rounds = ROUNDS.get(name, 4)
    played = play(tmp_path, name, 2, rounds=rounds)
    assert played.reason.startswith("rounds reached")
    assert replay(entries_after(tmp_path), name, 2, rounds=rounds) == played.digests
    for number, whole in list(played.wholes.items())[:2]:
        entries = entries_after(tmp_path, played.records[number])
        assert replay(entries, name, 2, whole, rounds=rounds) == played.digests[number:]


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "asgd"])
def test_a_learning_rate_is_halved_at_the_same_place_when_the_journal_is_replayed(tmp_path: Path, name: str) -> None:
    rule = DivergenceRule(action="halve", untrained_loss=1e-9)
    played = play(tmp_path, name, 2, rounds=8, divergence=rule)
    assert "the learning rate is halved, 1/2 of what it was at first" in played.found[0].message
    assert replay(entries_after(tmp_path), name, 2, rounds=8, divergence=rule) == played.digests
    for number, whole in list(played.wholes.items())[-2:]:
        entries = entries_after(tmp_path, played.records[number])
        assert replay(entries, name, 2, whole, rounds=8, divergence=rule) == played.digests[number:]
    rates = {
        instruction.plan.learning_rate
        for entry in entries_after(tmp_path)
        if isinstance(entry, Decision)
        for instruction in entry.instructions
        if isinstance(instruction, TrainInstruction)
    }
    usual = TrainConfig().learning_rate
    assert {usual, usual / 2} <= rates
    with pytest.raises(ReplayError):
        replay(entries_after(tmp_path), name, 2, rounds=8)


@pytest.mark.parametrize(
    ("name", "rounds"),
    [("fedavg", 8), ("fedasync", 8), ("esync", 8), pytest.param("admm-isvr", 2, marks=pytest.mark.extended)],
)
def test_who_was_refused_and_how_often_comes_back_from_the_journal(tmp_path: Path, name: str, rounds: int) -> None:
    played = play(tmp_path, name, 4, rounds=rounds, faults={**FAULTS, "h": "diverges"}, every=4)
    assert played.gate.blocked_devices == {"h"}
    strikes = set()
    for number, whole in [(0, None), *list(played.wholes.items())[:4]]:
        entries = entries_after(tmp_path, played.records[number])
        assert replay(entries, name, 4, whole, rounds=rounds) == played.digests[number:]
        strikes.add(decode_state(whole[1], RunSnapshot).guard.refusals.get("h", 0) if whole else 0)
    assert len(strikes) > 1, "some of the refusals lie behind a checkpoint, some before it"


@pytest.mark.parametrize("name", ["fedavg", "fedasync"])
def test_what_auto_has_learnt_of_its_devices_comes_back_with_a_checkpoint(tmp_path: Path, name: str) -> None:
    played = play(tmp_path, name, 2, rounds=8, is_auto=True)
    [*_, (number, whole)] = played.wholes.items()
    learnt = decode_state(whole[1], RunSnapshot).codecs
    assert learnt is not None
    assert {way.rung for way in learnt.ways.values()} == {1, 2}, "those whose assignments were lost are a step harder"
    assert learnt.share != LinkEstimates().share, "scores that stall have moved it"
    found = replay(entries_after(tmp_path, played.records[number]), name, 2, whole, rounds=8, is_auto=True)
    assert len(found) > 1
    assert found == played.digests[number:]


@pytest.mark.parametrize("name", ["fedavg", "fedasync", "esync", "adacomp", "dsgd"])
def test_a_journal_that_ends_anywhere_is_followed_to_its_end(tmp_path: Path, name: str) -> None:
    rounds = ROUNDS.get(name, 4)
    played, entries = play(tmp_path, name, 3, rounds=rounds), entries_after(tmp_path)
    rng = np.random.default_rng(0)
    for length in sorted(rng.permutation(len(entries))[:8].tolist()):
        found = replay(entries[:length], name, 3, rounds=rounds)
        turns = sum(isinstance(entry, TurnStarted) for entry in entries[:length])
        # What came of the last turn may have been cut off: it is as if the rest of it had not come yet.
        assert found[:turns] == played.digests[:turns]
        assert turns <= len(found) <= turns + 1


def last_turn(entries: Sequence[Any]) -> int:
    return max(place for place, entry in enumerate(entries) if isinstance(entry, TurnStarted))


class Noting(LiveFaultyFleet):
    """The boards of another life of the coordinator: notes what they are told, and nothing arrives."""

    def __init__(self) -> None:
        super().__init__(FaultyFleet(1))
        self.adopted: list[str] = []
        self.told: list[Instruction] = []

    def resume_in_flight(self, out: Sequence[DispatchedInstruction], source: object) -> None:
        self.adopted += [given.instruction.assignment_id for given in out]

    def dispatch(self, orders: Sequence[Instruction], source: object) -> None:
        self.told += orders

    def wait(self, until_s: float) -> Sequence[Event]:
        return ()


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_what_was_recalled_before_the_coordinator_ended_is_recalled_again(
    tmp_path: Path, is_checkpointed: bool
) -> None:
    given = [
        TrainInstruction(assignment_id=f"v0-{name}", device_id=name, base_version=0, plan=TrainConfig())
        for name in "ab"
    ]
    recalls = [
        FinishEarlyInstruction(assignment_id="v0-b", device_id="b"),
        FinishEarlyInstruction(assignment_id="v0-gone", device_id="c"),
    ]
    devices = {name: DeviceInfo(device_id=name) for name in "ab"}
    script = [
        TurnStarted(now_s=1.0, at=100.0, devices=devices),
        Decision(instructions=tuple(given)),
        TurnStarted(now_s=2.0, at=101.0),
        Decision(instructions=tuple(recalls)),
    ]
    source: Any = object()
    with WalJournal(tmp_path, decode_tensors) as wal:
        boards = Noting()
        fleet = RecordingFleet(boards, wal, JournalReplay(script), RunClock())  # type: ignore[arg-type] # a view of its own
        for orders in (given, recalls):
            fleet.view()
            fleet.record_decision(Decision(instructions=tuple(orders)))
            fleet.dispatch(orders, source)
            if is_checkpointed and orders is recalls:
                boards, standing = Noting(), decode_state(encode_state(fleet.create_snapshot()), FleetSnapshot)
                fleet = RecordingFleet(boards, wal, JournalReplay(), RunClock(), standing)  # type: ignore[arg-type] # as above
                fleet.dispatch((), source)
            fleet.wait(3.0)
    assert boards.adopted == ["v0-a", "v0-b"]
    assert boards.told == recalls[:1]


def test_a_journal_of_another_strategy_or_without_what_the_loop_saw_is_found_out(tmp_path: Path) -> None:
    play(tmp_path, "fedavg", 1)
    entries = [entry for _, entry in load_journal_entries(tmp_path, decode_tensors)]
    with pytest.raises(ReplayError, match="the journal has"):
        replay(entries, "fedasync", 1)
    with pytest.raises(ReplayError, match="does not say what the loop saw"):
        JournalReplay([entry for entry in entries if not isinstance(entry, TurnStarted)])


def test_a_standing_comes_back_as_it_was_saved() -> None:
    order = TrainInstruction(assignment_id="a", device_id=NAMES[0], base_version=1, plan=built("fedavg", 1).plan)
    fleet = FleetSnapshot(
        now_s=3.5, at=1e9, in_flight={"a": DispatchedInstruction(instruction=order, dispatched_s=3.0)},
        devices={NAMES[0]: DeviceInfo(device_id=NAMES[0], tasks=(TASK,), capabilities={"x": [1]})},
        health={NAMES[0]: HealthMetrics(temperature_c=61.0), NAMES[1]: None},
    )  # fmt: skip
    standing = create_run_snapshot(LoopState(), fleet, made := gate(is_auto=True))
    made.guard.state.refusals["b"] = 2
    made.guard.state.quarantined.add("c")
    made.codec_policy.adapt_instruction(replace(order, codec=CODECS[0]))  # type: ignore[union-attr] # it has one
    assert decode_state(encode_state(standing), RunSnapshot) == standing


def test_a_snapshot_names_an_instruction_in_flight_as_files_of_before_do():
    order = TrainInstruction(assignment_id="a", device_id="pi", base_version=0, plan=TrainConfig(iterations=1))
    dispatched = DispatchedInstruction(instruction=order, dispatched_s=3.0)
    content = encode_state(dispatched)
    assert b'"fields": {"order"' in content.replace(b'\\"', b'"')
    assert decode_state(content, DispatchedInstruction) == dispatched
