"""What a fleet is at, as strategies see it, and what is in flight behind it."""

from __future__ import annotations

from edgefl.core.types import (
    DeviceInfo,
    EvaluateInstruction,
    Progress,
    Role,
    TrainConfig,
    TrainInstruction,
    UpdateMetrics,
)
from edgefl.engine.fleet_state import FleetState


def train(name: str, device: str) -> TrainInstruction:
    return TrainInstruction(assignment_id=name, device_id=device, base_version=0, plan=TrainConfig(iterations=1))


def state_of(*names: str) -> FleetState:
    state = FleetState()
    for name in names:
        state.update_device(name, DeviceInfo(device_id=name))
    return state


def test_only_training_makes_a_trainer_busy_until_its_last_instruction_is_complete() -> None:
    state = state_of("b", "a")
    state.update_device("judge", DeviceInfo(device_id="judge", role=Role.EVALUATOR))
    evaluation = EvaluateInstruction(assignment_id="e", device_id="b", version=0, round=0)
    first, second = train("1", "a"), train("2", "a")
    for instruction in (first, second, evaluation):
        state.assign(instruction)
    assert (list(state.devices), state.idle, state.busy) == (["a", "b", "judge"], ["b"], {"a": ["1", "2"]})
    assert list(state.in_flight) == ["1", "2", "e"]
    state.complete(first)
    assert (state.idle, state.busy) == (["b"], {"a": ["2"]})
    state.complete(second)
    state.complete(evaluation)
    assert (state.idle, state.busy, dict(state.in_flight)) == (["a", "b"], {}, {})


def test_an_instruction_is_asked_to_finish_early_only_while_it_is_in_flight() -> None:
    state, instruction = state_of("a"), train("1", "a")
    state.finish_early("1")
    state.assign(instruction)
    assert not state.finishing_early
    state.finish_early("1")
    assert state.finishing_early == {"1"}
    state.complete(instruction)
    assert not state.finishing_early


def test_work_and_measurements_come_back_from_a_snapshot_and_pass_on_to_the_fleet_that_follows() -> None:
    state = state_of("a", "b")
    state.start_turn(3.0)
    state.assign(train("1", "a"))
    state.finish_early("1")
    report = Progress(device_id="a", assignment_id="1", iteration=2, seconds_per_iteration=0.5, age_s=0.0)
    state.record_progress(report)
    restored, following = state_of("a", "b"), state_of("b", "a", "late")
    restored.restore(state.in_flight, state.finishing_early, state.speeds, state.progress)
    following.restore_from(restored)
    for other in (restored, following):
        assert (other.in_flight, other.finishing_early) == (state.in_flight, {"1"})
        assert (other.busy, other.progress) == ({"a": ["1"]}, {"a": report})
        assert other.in_flight["1"].dispatched_s == 3.0
    assert (restored.idle, following.idle) == (["b"], ["b", "late"])


def test_bytes_that_no_later_update_has_are_none_of_its_size() -> None:
    state = state_of("a")
    once = {"bytes_up_ahead": 5.0, "bytes_down_ahead": 30.0, "bytes_down_base": 1000.0}
    state.record_speed("a", UpdateMetrics(iterations=1, bytes_up=25, bytes_down=1070, extra=once))
    assert (state.speeds["a"].bytes_up, state.speeds["a"].bytes_down) == (20.0, 40.0)
