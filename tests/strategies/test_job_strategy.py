"""Parts of a job: who is given which, what a lost one becomes, and when the result is made."""

from dataclasses import replace

import numpy as np
import pytest
from strategy_turns import update_of, view_of

from edgefl.core.errors import RunFailedError
from edgefl.core.types import LazyTensors
from edgefl.storage.state_serialisation import decode_state, encode_state
from edgefl.strategies.job_strategy import RESULT, JobState, JobStrategy
from edgefl.strategies.participation import FilteredFleetView


def job(num_parts=3, **settings):
    return JobStrategy(combine=b"|".join, num_parts=num_parts, **settings)


def assign(strategy, state, view):
    """Parts that are given out in a turn, by device; and the orders."""
    _, decision = strategy.assign(state, view)
    return {order.device_id: order.block for order in decision.instructions}, decision


def result_of(order, text):
    return update_of(order, {RESULT: np.frombuffer(text.encode(), np.uint8)})


def test_every_idle_board_gets_one_part_and_the_result_is_in_their_order():
    strategy, state = job(), JobState()
    given, decision = assign(strategy, state, view_of("b", "a"))
    assert given == {"b": 0, "a": 1}
    first, second = decision.instructions
    strategy.receive(state, result_of(second, "one"))
    given, decision = assign(strategy, state, view_of("a", busy={"b": [first.assignment_id]}))
    assert given == {"a": 2}
    strategy.receive(state, result_of(decision.instructions[0], "two"))
    assert not strategy.ready(state, view_of("a"))
    strategy.receive(state, result_of(first, "zero"))
    assert strategy.ready(state, view_of("a", "b"))
    strategy.aggregate(state)
    assert strategy.model(state)[RESULT].tobytes() == b"zero|one|two"
    assert strategy.used(state) == ("p0-t1-b", "p1-t1-a", "p2-t1-a")
    assert not strategy.ready(state, view_of("a", "b"))
    assert assign(strategy, state, view_of("a", "b"))[0] == {}


def test_the_first_part_waits_for_as_many_boards_as_are_wanted():
    strategy, state = job(min_devices=2), JobState()
    assert assign(strategy, state, view_of("a"))[0] == {}
    assert assign(strategy, state, view_of("a", "b"))[0] == {"a": 0, "b": 1}


def test_a_lost_part_goes_to_a_board_that_has_not_tried_it_and_its_late_result_changes_nothing():
    strategy, state = job(2), JobState()
    _, decision = assign(strategy, state, view_of("a", "b"))
    lost, other = decision.instructions
    strategy.receive(state, result_of(other, "one"))
    given, decision = assign(strategy, state, view_of("b"))
    assert given == {"b": 0}
    strategy.receive(state, result_of(lost, "late"))
    assert not strategy.ready(state, view_of("b"))
    strategy.receive(state, result_of(decision.instructions[0], "zero"))
    strategy.aggregate(state)
    assert strategy.model(state)[RESULT].tobytes() == b"zero|one"


def test_a_part_that_a_board_failed_is_given_to_it_again_where_no_other_part_is_left():
    strategy, state = job(2), JobState()
    assign(strategy, state, view_of("a"))
    assert assign(strategy, state, view_of("a"))[0] == {"a": 1}
    assert assign(strategy, state, view_of("a"))[0] == {"a": 0}


def test_a_part_that_was_tried_too_often_ends_the_run():
    strategy, state = job(1, max_tries=2), JobState()
    for _ in range(2):
        assign(strategy, state, view_of("a"))
    with pytest.raises(RunFailedError, match="part 0 was tried 2 times, at last by a"):
        assign(strategy, state, view_of("a"))


def test_boards_with_files_of_their_own_each_do_one_part_also_those_that_come_later():
    strategy, state = job(None), JobState()
    _, decision = assign(strategy, state, view_of("b"))
    given, later = assign(strategy, state, view_of("a", busy={"b": ["p0-t1-b"]}))
    assert given == {"a": 1}
    for order, text in ((decision.instructions[0], "of b"), (later.instructions[0], "of a")):
        strategy.receive(state, result_of(order, text))
    strategy.aggregate(state)
    assert strategy.model(state)[RESULT].tobytes() == b"of a|of b"
    assert strategy.facts(state) == {"parts": 2.0, "skipped": 0.0}


def test_a_named_board_that_is_away_is_waited_for_or_left_out_after_the_time_that_is_set():
    waiting, skipping = job(None, names=("a", "b")), job(None, names=("a", "b"), skip_missing_s=5.0)
    for strategy, is_ready in ((waiting, False), (skipping, True)):
        state = JobState()
        _, decision = assign(strategy, state, view_of("a", now_s=1.0))
        strategy.receive(state, result_of(decision.instructions[0], "of a"))
        _, decision = assign(strategy, state, view_of("a", now_s=4.0))
        assert decision.next_wake_s == (2.0 if is_ready else 60.0)
        assert not strategy.ready(state, view_of("a"))
        assign(strategy, state, view_of("a", now_s=6.0))
        assert strategy.ready(state, view_of("a")) is is_ready
        assert state.skipped == ([1] if is_ready else [])


def test_a_board_that_comes_back_in_time_does_its_part():
    strategy, state = job(None, names=("a", "b"), skip_missing_s=5.0), JobState()
    assign(strategy, state, view_of("a", now_s=1.0))
    given, _ = assign(strategy, state, view_of("b", busy={"a": ["p0-t1-a"]}, now_s=5.0))
    assert given == {"b": 1}
    assign(strategy, state, view_of(busy={"a": ["p0-t1-a"], "b": ["p1-t1-b"]}, now_s=50.0))
    assert state.skipped == []


def test_a_job_without_any_part_fails_and_so_does_one_whose_board_gets_no_more_work():
    state = JobState()
    away = job(None, names=("a",), skip_missing_s=0.0, min_devices=0)
    with pytest.raises(RunFailedError, match="no board has done its part"):
        assign(away, state, view_of())
    view = FilteredFleetView(view_of("a", "b"), ["b"], blocked_devices={"a"})
    with pytest.raises(RunFailedError, match="a failed its own part too often"):
        assign(job(None, names=("a", "b")), JobState(), view)


def test_a_stopped_job_gives_out_no_parts_and_makes_no_result_of_some():
    strategy, state = job(2), JobState()
    _, decision = assign(strategy, state, view_of("a"))
    strategy.finish(state)
    strategy.receive(state, result_of(decision.instructions[0], "zero"))
    assert assign(strategy, state, view_of("a"))[0] == {}
    assert not strategy.ready(state, view_of("a"))
    strategy.resumed(state)
    assert assign(strategy, state, view_of("a"))[0] == {"a": 1}


def test_a_resumed_job_gives_out_again_what_was_in_flight():
    strategy, state = job(2), JobState()
    assign(strategy, state, view_of("a", "b"))
    strategy.resumed(state)
    given, decision = assign(strategy, state, view_of("a", "b"))
    assert given == {"a": 1, "b": 0}
    assert {order.assignment_id for order in decision.instructions} == {"p1-t2-a", "p0-t2-b"}


def test_results_are_read_when_they_are_combined_and_survive_a_checkpoint():
    loaded = []

    def lazy(text):
        return LazyTensors(lambda: loaded.append(text) or {RESULT: np.frombuffer(text, np.uint8)})

    def complete(strategy):
        state = JobState()
        _, decision = assign(strategy, state, view_of("a", "b"))
        for order, text in zip(decision.instructions, (b"zero", b""), strict=True):
            strategy.receive(state, replace(update_of(order, {}), tensors=lazy(text)))
        return state

    strategy = job(2)
    restored = decode_state(encode_state(complete(strategy)), JobState)
    loaded.clear()
    state = complete(strategy)
    assert loaded == []
    for held in (state, restored):
        strategy.aggregate(held)
        assert held.model[RESULT].tobytes() == b"zero|"
    assert loaded == [b"zero", b""]
