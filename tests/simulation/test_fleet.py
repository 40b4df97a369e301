"""The virtual fleet: every time and every loss can be worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl.core.conditions import Conditions, RunConditions
from edgefl.core.errors import RunFailedError
from edgefl.core.protocol import ANSWER_TIMEOUT_S
from edgefl.core.types import (
    DeviceAvailable,
    DeviceInfo,
    EvaluateInstruction,
    EvaluateResult,
    Event,
    FinishEarlyInstruction,
    Indices,
    InstructionFailed,
    Progress,
    Role,
    Tensors,
    TrainConfig,
    TrainInstruction,
    Update,
    UpdateStatus,
)
from edgefl.simulation.backends.trainer import (
    EncodedModel,
    EvaluationMetrics,
    TrainingFailedError,
    TrainingJob,
    TrainingResult,
)
from edgefl.simulation.conditions import ConditionSettings
from edgefl.simulation.device import SimulatedDevice
from edgefl.simulation.faults import Fault, apply_faults
from edgefl.simulation.fleet import MAX_CONSECUTIVE_LOSSES, MAX_IDLE_WAITS, SimulatedFleet, SimulationSettings
from edgefl.simulation.network import SimulatedDownlink
from edgefl.simulation.profiles import DeviceProfile

MODEL: Tensors = {"w": np.zeros(1, np.float32)}
BOARD = DeviceProfile(name="board", up_bytes_per_s=100.0, down_bytes_per_s=200.0, latency_s=0.5)
"""A model of 200 bytes takes 1.5 s down; an update of 100 bytes takes 1.5 s up."""


@dataclass
class Source:
    """A model source whose version the test sets."""

    version: int = 0
    changes: dict[int, Indices] = field(default_factory=dict)

    def model(self) -> Tensors:
        return MODEL

    def device_model(self, subject: str) -> Tensors:
        return {"w": np.full(1, float(subject[1:]), np.float32)} if subject else MODEL

    def changed(self, since: int) -> Indices | None:
        return self.changes.get(since)


@dataclass
class Script:
    """A training that notes what it is asked; devices in `broken` cannot do it."""

    broken: frozenset[str] = frozenset()
    begun: list[tuple[str, int]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    finished: list[tuple[str, int]] = field(default_factory=list)

    def start(self, job: TrainingJob) -> None:
        self.begun.append((job.instruction.assignment_id, job.iterations))

    def get_result(self, job: TrainingJob) -> TrainingResult:
        if job.instruction.device_id in self.broken:
            raise TrainingFailedError("DataError: no examples")
        self.finished.append((job.instruction.assignment_id, job.iterations))
        return TrainingResult(tensors=MODEL, num_bytes=100, num_examples=10, loss=0.5)

    def cancel(self, job: TrainingJob) -> None:
        self.cancelled.append(job.instruction.assignment_id)

    def evaluate(self, device_id: str | None, sent: EncodedModel) -> EvaluationMetrics:
        if device_id in self.broken:
            raise TrainingFailedError("DataError: no examples")
        return EvaluationMetrics(num_examples=5, loss=1.0, accuracy=0.25 if device_id else 0.75)

    def close(self) -> None: ...


def board(
    index: int = 0, profile: DeviceProfile = BOARD, *, iteration_s: float = 1.0, **more: Any
) -> SimulatedDevice:
    info = DeviceInfo(device_id=f"d{index}", tasks=("t",), examples={"t": 10})
    values = {"iteration_s": lambda _batch: iteration_s, "num_examples": 10, **more}
    return SimulatedDevice(info=info, profile=profile, **values)


def fleet(boards: Sequence[SimulatedDevice], training: Script | None = None, **more: Any) -> SimulatedFleet:
    more.setdefault("downlink", SimulatedDownlink(lambda _model, _version: bytes(200)))
    return SimulatedFleet(boards, backend=training or Script(), **more)


def order(name: str, device: str = "d0", iterations: int | None = 3, **more: Any) -> TrainInstruction:
    plan = more.pop("plan", None) or TrainConfig(iterations=iterations)
    return TrainInstruction(assignment_id=name, device_id=device, base_version=0, plan=plan, **more)


def until(virtual: SimulatedFleet, end_s: float) -> list[tuple[float, Event]]:
    """All events up to a second, each with when it was told."""
    told: list[tuple[float, Event]] = []
    while True:
        events = virtual.wait(end_s)
        if not events and virtual.now_s >= end_s:
            return told
        told += [(virtual.now_s, event) for event in events]


def times(told: list[tuple[float, Event]], kind: type) -> list[tuple[float, str]]:
    return [(round(at_s, 9), event.assignment_id) for at_s, event in told if isinstance(event, kind)]


def test_an_assignment_goes_down_is_computed_and_goes_up() -> None:
    virtual = fleet([board()])
    virtual.dispatch([order("a")], Source())
    assert virtual.view().busy == {"d0": ["a"]}
    assert list(virtual.view().idle) == []
    ((at_s, update),) = until(virtual, 100.0)
    assert at_s == 1.5 + 3.0 + 1.5
    assert isinstance(update, Update)
    metrics = update.metrics
    assert (metrics.iterations, metrics.compute_s, metrics.send_s) == (3, 3.0, 3.0)
    assert (metrics.bytes_down, metrics.bytes_up, metrics.num_examples, metrics.loss) == (200, 100, 10, 0.5)
    assert update.received_s == at_s
    assert virtual.view().busy == {}
    assert list(virtual.view().idle) == ["d0"]


def test_speeds_are_known_once_something_was_brought() -> None:
    virtual = fleet([board(), board(1)])
    assert "d0" not in virtual.view().speeds
    virtual.dispatch([order("a")], Source())
    until(virtual, 50.0)
    speed = virtual.view().speeds["d0"]
    assert speed.seconds_per_iteration == 1.0
    assert speed.up_bytes_per_s == pytest.approx(100 / 1.5)
    assert speed.down_bytes_per_s == pytest.approx(200 / 1.5)
    assert list(virtual.view().speeds) == ["d0"]


def with_fault(kind: str, at_s: float, for_s: float, amount: float | None = None) -> DeviceProfile:
    return apply_faults("d0", BOARD, [Fault(device="d*", at_s=at_s, kind=kind, for_s=for_s, amount=amount)])


@pytest.mark.parametrize(
    ("profile", "plan", "at_s"),
    [
        (BOARD, TrainConfig(epochs=2.0, batch_size=4), 1.5 + 6.0 + 1.5),
        (BOARD, TrainConfig(seconds=2.5), 1.5 + 3.0 + 1.5),
        (replace(BOARD, throttling=((2.5, 3.0),)), None, 1.5 + 1.0 + 6.0 + 1.5),
        # Down, three quarters of a second's bytes take 3 s and the rest a quarter; 0.5 s later they are there.
        (replace(BOARD, congestion=((0.0, 4.0), (3.0, 1.0))), None, 3.75 + 3.0 + 1.5),
        (with_fault("cut", 0.5, 10.0), None, 1.5 + 10.0 + 3.0 + 1.5),
        (with_fault("freeze", 2.0, 10.0), None, 1.5 + 3.0 + 10.0 + 1.5),
        (with_fault("delay", 0.0, 2.0, 0.3), None, 1.5 + 0.3 + 3.0 + 1.5),
    ],
)
def test_budgets_throttling_and_faults_move_the_end(
    profile: DeviceProfile, plan: TrainConfig | None, at_s: float
) -> None:
    virtual = fleet([board(profile=profile)])
    virtual.dispatch([order("a", plan=plan)], Source())
    assert times(until(virtual, 50.0), Update) == [(at_s, "a")]


def test_a_second_assignment_is_loaded_meanwhile_and_computed_next() -> None:
    virtual = fleet([board()])
    virtual.dispatch([order("a"), order("b")], Source())
    # b is there at 2.5, waits for a until 4.5, computes until 7.5; a's 1.5 s upload runs beside it.
    assert times(until(virtual, 50.0), Update) == [(6.0, "a"), (9.0, "b")]


def test_an_update_tells_how_its_board_was_as_far_as_its_profile_says() -> None:
    hot = replace(BOARD, throttling=((2.5, 3.0),), temperature_c=((0.0, 50.0), (3.0, 83.0), (8.0, 60.0)))
    virtual = fleet([board(profile=hot), board(1)])
    virtual.dispatch([order("a"), order("b", "d1")], Source())
    told = {event.device_id: event.metrics for _, event in until(virtual, 50.0) if isinstance(event, Update)}
    assert (told["d0"].max_temperature_c, told["d0"].throttled) == (60.0, "throttled")
    assert (told["d1"].max_temperature_c, told["d1"].throttled, told["d1"].energy_j) == (None, None, None)


def test_a_recall_ends_after_the_present_iteration() -> None:
    training = Script()
    virtual = fleet([board()], training)
    virtual.dispatch([order("a", iterations=100)], Source())
    virtual.wait(4.0)
    virtual.dispatch([FinishEarlyInstruction(assignment_id="a", device_id="d0")], Source())
    # The recall is there at 4.5, when the third iteration has just ended: the fourth is the last.
    ((at_s, update),) = until(virtual, 200.0)
    assert isinstance(update, Update)
    assert (at_s, update.metrics.iterations) == (1.5 + 4.0 + 1.5, 4)
    assert training.begun == [("a", 100), ("a", 4)]
    assert training.cancelled == ["a"]
    assert training.finished == [("a", 4)]


def test_a_recall_before_the_start_leaves_one_iteration_and_one_of_what_is_on_its_way_back_changes_nothing() -> None:
    virtual = fleet([board()])
    recall = FinishEarlyInstruction(assignment_id="a", device_id="d0")
    virtual.dispatch([order("a"), recall], Source())
    virtual.wait(2.8)
    virtual.dispatch([recall, FinishEarlyInstruction(assignment_id="b", device_id="d0")], Source())
    ((at_s, update),) = until(virtual, 50.0)
    assert isinstance(update, Update)
    assert (at_s, update.metrics.iterations) == (1.5 + 1.0 + 1.5, 1)


def test_a_deadline_loses_the_work_and_frees_the_board() -> None:
    training = Script()
    virtual = fleet([board()], training)
    virtual.dispatch([order("a", iterations=100, deadline_s=4.2)], Source())
    (lost,) = virtual.wait(50.0)
    assert (virtual.now_s, lost.assignment_id, lost.outcome) == (4.2, "a", UpdateStatus.LOST)
    assert lost.reason == "not back within 4.2 s"
    assert list(virtual.view().idle) == ["d0"]
    virtual.dispatch([order("b")], Source())
    assert times(until(virtual, 50.0), Update) == [(4.2 + 1.5 + 3.0 + 1.5, "b")]
    assert [name for name, _ in training.finished] == ["b"]
    assert training.cancelled == ["a"]


def test_a_board_that_dies_is_noticed_later_and_comes_back() -> None:
    away = replace(BOARD, offline=((3.0, 60.0),))
    training = Script()
    virtual = fleet([board(profile=away), board(1)], training, settings=SimulationSettings(failure_detection_s=10.0))
    virtual.dispatch([order("a", iterations=100), order("b", "d1", 20)], Source())
    assert virtual.wait(12.0) == []
    assert "a" in virtual.view().busy["d0"], "nobody knows yet"
    (lost,) = virtual.wait(20.0)
    assert isinstance(lost, InstructionFailed)
    assert (virtual.now_s, lost.device_id, lost.outcome) == (13.0, "d0", UpdateStatus.LOST)
    assert list(virtual.view().devices) == ["d1"]
    assert training.cancelled == ["a"]
    told = until(virtual, 100.0)
    assert times(told, Update) == [(23.0, "b")]
    assert [(at_s, event) for at_s, event in told if isinstance(event, DeviceAvailable)] == [
        (60.0, DeviceAvailable(device_id="d0"))
    ]
    assert list(virtual.view().devices) == ["d0", "d1"], "in the fleet's order, whoever came last"
    assert list(virtual.view().idle) == ["d0", "d1"]


def test_work_for_a_board_whose_death_is_not_noticed_is_lost_with_the_rest() -> None:
    virtual = fleet(
        [board(profile=replace(BOARD, offline=((3.0, math.inf),)))],
        settings=SimulationSettings(failure_detection_s=10.0),
    )
    virtual.wait(5.0)
    virtual.dispatch([order("a")], Source())
    assert times(until(virtual, 50.0), InstructionFailed) == [(13.0, "a")]
    assert virtual.view().busy == {}
    assert list(virtual.view().idle) == []


def test_a_board_that_is_back_before_anybody_noticed_has_lost_its_work_all_the_same() -> None:
    virtual = fleet(
        [board(profile=replace(BOARD, offline=((3.0, 5.0),)))], settings=SimulationSettings(failure_detection_s=10.0)
    )
    virtual.dispatch([order("a", iterations=100)], Source())
    (lost,) = virtual.wait(50.0)
    assert isinstance(lost, InstructionFailed)
    assert (virtual.now_s, lost.reason) == (5.0, "its agent restarted")
    assert list(virtual.view().idle) == ["d0"]
    assert until(virtual, 50.0) == []


def test_an_update_on_its_way_up_is_lost_with_its_board() -> None:
    virtual = fleet(
        [board(profile=replace(BOARD, offline=((5.0, math.inf),)))],
        settings=SimulationSettings(failure_detection_s=1.0),
    )
    virtual.dispatch([order("a")], Source())
    told = until(virtual, 50.0)
    assert times(told, Update) == []
    assert times(told, InstructionFailed) == [(6.0, "a")]


def test_boards_fail_and_return_at_random_but_always_alike() -> None:
    shaky = replace(BOARD, mtbf_s=20.0, mttr_s=5.0)

    def story(seed: int) -> list[float]:
        virtual = fleet([board(profile=shaky, seed=seed)], settings=SimulationSettings(failure_detection_s=0.0))
        return [at_s for at_s, event in until(virtual, 500.0) if isinstance(event, DeviceAvailable)]

    assert story(1) == story(1) != story(2)
    assert 8 < len(story(1)) < 40, "about one in 25 seconds"


def test_who_comes_late_stays_out_of_a_run_that_is_closed_when_it_starts() -> None:
    late = replace(BOARD, offline=((0.0, 5.0),))
    closed = fleet([board(), board(1, late)], settings=SimulationSettings(join_at_start=True))
    open_to_all = fleet([board(), board(1, late)])
    for virtual in (closed, open_to_all):
        assert list(virtual.view().devices) == ["d0"]
        virtual.dispatch([order("a")], Source())
        until(virtual, 20.0)
    assert list(closed.view().devices) == ["d0"]
    assert list(open_to_all.view().devices) == ["d0", "d1"]


def test_what_happens_in_one_instant_is_told_at_once_on_links_of_their_own() -> None:
    virtual = fleet(
        [board(0), board(1), board(2)], settings=SimulationSettings(up_bytes_per_s=1e9, down_bytes_per_s=1e9)
    )
    virtual.dispatch([order("a"), order("b", "d1"), order("c", "d2"), order("x", "d7")], Source())
    (lost,) = virtual.wait(1.0)
    assert isinstance(lost, InstructionFailed)
    assert (lost.outcome, lost.reason) == (UpdateStatus.FAILED, "d7 is not there")
    assert [event.assignment_id for event in virtual.wait(50.0)] == ["a", "b", "c"]
    assert virtual.now_s == pytest.approx(6.0)


def test_a_board_that_cannot_do_it_says_why_and_takes_the_next() -> None:
    virtual = fleet([board()], Script(broken=frozenset({"d0"})))
    virtual.dispatch([order("a"), order("b")], Source())
    assert times(until(virtual, 50.0), InstructionFailed) == [(4.5, "a"), (7.5, "b")]
    assert list(virtual.view().idle) == ["d0"]


def test_progress_is_told_no_more_than_ten_times_a_second_and_only_when_asked() -> None:
    virtual = fleet([board(iteration_s=0.04)])
    virtual.dispatch([order("a", plan=TrainConfig(iterations=8, report_progress=True))], Source())
    told = until(virtual, 50.0)
    reports = [event for _, event in told if isinstance(event, Progress)]
    assert [report.iteration for report in reports] == [1, 4, 7]
    assert [round(at_s, 9) for at_s, event in told if isinstance(event, Progress)] == [2.04, 2.16, 2.28]
    assert reports[-1].seconds_per_iteration == pytest.approx(0.04)
    virtual.dispatch([order("b", iterations=8)], Source())
    assert not any(isinstance(event, Progress) for _, event in until(virtual, 100.0))


@pytest.mark.parametrize(("fallback", "iterations"), [(None, 3), (2, 2)], ids=["report", "query"])
def test_a_board_that_asks_stands_still_until_the_answer_is_there(fallback: int | None, iterations: int) -> None:
    virtual = fleet([board(profile=replace(BOARD, latency_s=0.4))])
    plan = TrainConfig(iterations=10**9, report_progress=True, fallback_iterations=fallback)
    virtual.dispatch([order("a", plan=plan)], Source())
    told = []
    while not told or told[-1].iteration < 2:
        told += [event for event in virtual.wait(50.0) if isinstance(event, Progress)]
    virtual.dispatch([FinishEarlyInstruction(assignment_id="a", device_id="d0")], Source())
    (update,) = [event for _, event in until(virtual, 50.0) if isinstance(event, Update)]
    assert update.metrics.iterations == iterations
    # Each query costs a round trip.
    round_trips_s = 0.0 if fallback is None else 2 * iterations * 0.4
    assert update.metrics.compute_s == pytest.approx(iterations * 1.0 + round_trips_s)


@pytest.mark.parametrize(("is_recalled", "iterations"), [(False, 3), (True, 2)], ids=["fallback", "recall"])
def test_a_board_whose_answers_come_after_a_second_waits_once_and_ends_after_its_fallback(
    is_recalled: bool, iterations: int
) -> None:
    virtual = fleet([board(profile=replace(BOARD, latency_s=0.8))])
    plan = TrainConfig(iterations=10**9, report_progress=True, fallback_iterations=3)
    virtual.dispatch([order("a", plan=plan)], Source())
    if is_recalled:
        while not any(isinstance(event, Progress) for event in virtual.wait(50.0)):
            pass
        virtual.dispatch([FinishEarlyInstruction(assignment_id="a", device_id="d0")], Source())
    (update,) = [event for _, event in until(virtual, 50.0) if isinstance(event, Update)]
    assert update.metrics.iterations == iterations
    assert update.metrics.compute_s == pytest.approx(iterations * (1.0 + ANSWER_TIMEOUT_S / 3))


def test_open_ended_work_is_trained_once_its_length_is_known() -> None:
    training = Script()
    virtual = fleet([board()], training)
    virtual.dispatch([order("a", plan=TrainConfig(iterations=10**9, report_progress=True))], Source())
    virtual.wait(3.0)
    assert training.begun == []
    virtual.dispatch([FinishEarlyInstruction(assignment_id="a", device_id="d0")], Source())
    told = until(virtual, 50.0)
    assert training.begun == training.finished == [("a", 3)]
    assert training.cancelled == []
    assert times(told, Update) == [(1.5 + 3.0 + 1.5, "a")]


def test_the_coordinator_s_link_is_shared() -> None:
    fast = replace(BOARD, up_bytes_per_s=1e9, down_bytes_per_s=1e9, latency_s=0.0)
    virtual = fleet(
        [board(0, fast), board(1, fast)], settings=SimulationSettings(up_bytes_per_s=50.0, down_bytes_per_s=100.0)
    )
    virtual.dispatch([order("a"), order("b", "d1", 7)], Source())
    # 400 bytes go down in 4 s; a's 100 up take 2 s alone, and so do b's, 4 s later.
    assert times(until(virtual, 60.0), Update) == [(4.0 + 3.0 + 2.0, "a"), (4.0 + 7.0 + 2.0, "b")]


def test_evaluations_keep_nobody_from_work() -> None:
    evaluator = DeviceInfo(device_id="server", role=Role.EVALUATOR, source="coordinator")
    virtual = fleet([board(), board(1)], Script(broken=frozenset({"d1"})), evaluators=[evaluator])
    orders = [
        EvaluateInstruction(assignment_id=name, device_id=name, version=0, round=1)
        for name in ("server", "d0", "d1", "d9")
    ]
    virtual.dispatch(orders, Source())
    assert "server" not in virtual.view().idle
    assert list(virtual.view().devices) == ["d0", "d1", "server"]
    own, boards, broken, gone = virtual.wait(1.0)
    assert isinstance(own, EvaluateResult)
    assert isinstance(boards, EvaluateResult)
    assert (own.accuracy, own.source, own.bytes_down) == (0.75, "coordinator", 0)
    assert (boards.accuracy, boards.source, boards.bytes_down) == (0.25, "device", 200)
    assert isinstance(broken, InstructionFailed)
    assert isinstance(gone, InstructionFailed)
    assert (virtual.now_s, virtual.view().busy) == (0.0, {})


def test_a_board_that_holds_a_model_is_sent_what_changed() -> None:
    downlink = SimulatedDownlink(
        lambda _model, _version: bytes(200),
        lambda _model, changed, _version: bytes(10 * len(changed["w"])) if len(changed["w"]) < 5 else None,
    )
    source, virtual = Source(), fleet([board()], downlink=downlink)
    sizes = []
    for version, changes in enumerate([{}, {0: {"w": np.arange(3)}}, {1: {"w": np.arange(9)}}]):
        source.version, source.changes = version, changes
        virtual.dispatch([order(f"a{version}")], source)
        (update,) = virtual.wait(virtual.now_s + 100)
        assert isinstance(update, Update)
        sizes.append(update.metrics.bytes_down)
    assert sizes == [200, 30, 200]


def sizes_after_a_loss(
    profile: DeviceProfile, first: TrainInstruction, second_at_s: float
) -> tuple[list[str], int | None]:
    """What was lost, and the bytes of the model for the work that is given to the board after that."""
    downlink = SimulatedDownlink(lambda _model, _version: bytes(200), lambda _model, _changed, _version: bytes(10))
    source, virtual = (
        Source(),
        fleet([board(profile=profile)], downlink=downlink, settings=SimulationSettings(failure_detection_s=100.0)),
    )
    virtual.dispatch([order("a")], source)
    until(virtual, 11.0)
    source.version = 1
    source.changes = {0: {"w": np.arange(1)}, 1: {"w": np.arange(1)}}
    virtual.dispatch([first], source)
    lost = [name for _, name in times(until(virtual, second_at_s), InstructionFailed)]
    source.version = 2
    virtual.dispatch([order("c")], source)
    (update,) = virtual.wait(second_at_s + 100.0)
    assert isinstance(update, Update)
    return lost, update.metrics.bytes_down


def test_a_board_that_was_given_work_while_it_was_away_is_sent_a_whole_model_when_it_is_back() -> None:
    away = replace(BOARD, offline=((10.0, 20.0),))
    assert sizes_after_a_loss(away, order("b"), 21.0) == (["b"], 200)


def test_after_a_loss_nobody_knows_what_a_board_holds() -> None:
    assert sizes_after_a_loss(BOARD, order("b", iterations=5, deadline_s=2.0), 30.0) == (["b"], 200)


def test_work_in_vain_is_cancelled_before_the_next_is_begun() -> None:
    @dataclass
    class Diary(Script):
        told: list[str] = field(default_factory=list)

        def start(self, job: TrainingJob) -> None:
            self.told.append(f"begin {job.instruction.assignment_id}")

        def cancel(self, job: TrainingJob) -> None:
            self.told.append(f"cancel {job.instruction.assignment_id}")

    training = Diary()
    virtual = fleet([board()], training)
    # The deadline passes in the last iteration, which the board ends before it looks at anything else.
    virtual.dispatch([order("a", deadline_s=4.0)], Source())
    assert times(until(virtual, 4.0), InstructionFailed) == [(4.0, "a")]
    virtual.dispatch([order("b")], Source())
    assert times(until(virtual, 50.0), Update) == [(4.0 + 1.5 + 3.0 + 1.5, "b")]
    assert training.told == ["begin a", "cancel a", "begin b"], "only a board's newest work can be undone"


def test_jitter_changes_times_but_neither_their_mean_nor_from_run_to_run() -> None:
    def compute_s(seed: int) -> float:
        virtual = fleet([board(jitter=0.3, seed=seed)])
        virtual.dispatch([order("a", iterations=2000)], Source())
        ((_, update),) = until(virtual, 1e5)
        assert isinstance(update, Update)
        return update.metrics.compute_s

    assert compute_s(1) == compute_s(1) != compute_s(2)
    assert compute_s(1) == pytest.approx(2000, rel=0.03)


def test_a_deadline_that_nobody_can_meet_ends_the_run_and_not_only_time() -> None:
    virtual = fleet([board()])
    for number in range(MAX_CONSECUTIVE_LOSSES):
        virtual.dispatch([order(f"a{number}", deadline_s=2.0)], Source())
        assert times(until(virtual, virtual.now_s + 3.0), InstructionFailed)
    virtual.dispatch([order("last", deadline_s=2.0)], Source())
    with pytest.raises(RunFailedError, match=r"no device is ever back in time: .*; d0: not back within 2 s"):
        virtual.wait(math.inf)


def test_one_update_between_many_losses_keeps_a_run_going() -> None:
    virtual = fleet([board()])
    for number in range(MAX_CONSECUTIVE_LOSSES + 2):
        is_short = number != MAX_CONSECUTIVE_LOSSES // 2
        virtual.dispatch([order(f"a{number}", deadline_s=2.0 if is_short else None)], Source())
        kind = InstructionFailed if is_short else Update
        assert any(isinstance(event, kind) for _, event in until(virtual, virtual.now_s + 10.0))


def test_a_run_in_which_nothing_can_happen_any_more_fails() -> None:
    virtual = fleet([board(profile=replace(BOARD, offline=((0.0, math.inf),)))])
    for _ in range(MAX_IDLE_WAITS):
        assert virtual.wait(virtual.now_s + 60.0) == []
    with pytest.raises(RunFailedError, match="nothing happens any more"):
        virtual.wait(virtual.now_s + 60.0)


def test_vitals_are_those_of_boards_that_say_something() -> None:
    warm = replace(BOARD, temperature_c=((0.0, 50.0), (10.0, 85.0)), battery=((0.0, 0.1),))
    virtual = fleet([board(0, warm), board(1)])
    vitals = virtual.view().health
    assert (vitals["d0"].temperature_c, vitals["d0"].battery_fraction, vitals["d0"].is_throttled) == (
        50.0,
        0.1,
        False,
    )
    virtual.wait(11.0)
    assert vitals["d0"].temperature_c == 85.0
    assert vitals.get("d1") is None
    assert list(vitals) == ["d0"]


def test_idle_is_in_the_fleet_s_order_whoever_is_through_first() -> None:
    virtual = fleet([board(place) for place in range(4)])
    idle = virtual.view().idle
    virtual.dispatch([order("c", "d2", 1), order("a", "d0", 9)], Source())
    assert list(idle) == ["d1", "d3"]
    virtual.wait(7.0)
    assert (list(idle), idle[1], idle[1:], len(idle)) == (["d1", "d2", "d3"], "d2", ["d2", "d3"], 3)


@dataclass
class Reading(Script):
    """Finds an accuracy of a hundredth of what it is sent."""

    def evaluate(self, device_id: str | None, sent: EncodedModel) -> EvaluationMetrics:
        value = float(np.frombuffer(sent.body, np.float32)[0])
        return EvaluationMetrics(num_examples=5, loss=1.0, accuracy=value / 100)


def test_every_evaluation_is_of_the_model_that_it_names() -> None:
    judge = DeviceInfo(device_id="server", role=Role.EVALUATOR, source="coordinator")
    downlink = SimulatedDownlink(lambda model, _version: np.asarray(model["w"]).tobytes())
    virtual = fleet([board(3), board(7)], Reading(), evaluators=[judge], downlink=downlink)
    asked = [("server", ""), ("server", "d3"), ("server", "d7"), ("d7", "d7"), ("d3", ""), ("d3", "d3")]
    orders = [
        EvaluateInstruction(assignment_id=f"{name}:{subject}", device_id=name, version=0, round=1, subject=subject)
        for name, subject in asked
    ]
    virtual.dispatch(orders, Source())
    found = [event for event in virtual.wait(1.0) if isinstance(event, EvaluateResult)]
    assert [(event.device_id, event.subject) for event in found] == asked
    assert [event.accuracy for event in found] == [0.0, 0.03, 0.07, 0.07, 0.0, 0.03]
    assert [event.bytes_down for event in found] == [0, 0, 0, 4, 4, 4]


def test_a_run_whose_boards_are_all_free_and_not_chosen_does_not_blame_their_conditions(tmp_path: Path) -> None:
    profile = replace(BOARD, conditions=Conditions(mains=True))
    settings = ConditionSettings(folder=tmp_path, starts_at_s=0.0, run=RunConditions())
    virtual = fleet([board(profile=profile)], conditions=settings)
    with pytest.raises(RunFailedError, match="1 of 1 devices are there, none of them is given work"):
        until(virtual, math.inf)
