"""Means and scales of a fleet's columns: those of all examples, whatever one board says."""

import json
from fractions import Fraction

import numpy as np
import pytest

from edgefl.core.analyses import BoardSums
from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.types import Dataset
from edgefl.tasks.analyses.analysis import RESULT
from edgefl.tasks.analyses.moments import sum_powers
from edgefl.tasks.analyses.registry import make_analysis
from edgefl.tasks.configured.column_scales import MAX_RATIO, BoardColumn, pool_boards
from edgefl.tasks.registry import make_task

TABLE = {"columns": "heat,damp,site", "target": "load"}
SERIES = {"columns": "x,y", "window": 4, "target": "state", "labels": "calm,shaking"}


def ask(task, boards, **options):
    """The columns of the result, of these boards' inputs."""
    analysis = make_analysis(task, "column-scales", options)
    sums = []
    for name, inputs in boards.items():
        data = Dataset(inputs=inputs, targets=np.zeros(len(inputs), np.int64))
        sums.append(BoardSums(device_id=name, sums=analysis.measure({}, data)))
        assert analysis.find_fault(sums[-1].sums) is None
    return json.loads(analysis.solve(analysis.make_model(), sums)[RESULT].tobytes())["columns"]


def board_of(values):
    """What a board says of these values."""
    exact = [Fraction(float(value)) for value in values]
    count = len(exact)
    squares = sum(value * value for value in exact) / count
    return BoardColumn(count=count, mean=sum(exact) / count, mean_square=squares)


def test_means_and_scales_are_those_of_all_examples_and_a_constant_column_is_divided_by_one():
    rng = np.random.default_rng(1)
    boards = {
        f"board-{size}": rng.normal([1e5, -3, 7], [2e4, 1e-3, 0], (size, 3)).astype(np.float32)
        for size in (5, 90, 40)
    }
    pooled = np.concatenate([*boards.values()]).astype(float)
    found = ask(make_task("table", TABLE), boards)
    assert [column["name"] for column in found] == ["heat", "damp", "site"]
    assert [column["mean"] for column in found] == pytest.approx(pooled.mean(axis=0), rel=1e-12)
    assert [column["scale"] for column in found] == pytest.approx([*pooled.std(axis=0)[:2], 1], rel=1e-9)
    assert [(column["count"], column["left_out"]) for column in found] == [(135, [])] * 3


def test_of_a_series_every_number_of_a_window_counts_for_its_channel():
    windows = np.random.default_rng(2).normal([[10], [-2]], [[3], [0.5]], (30, 2, 4)).astype(np.float32)
    found = ask(make_task("series", SERIES), {"one": windows[:10], "two": windows[10:]})
    assert [column["name"] for column in found] == ["x", "y"]
    assert [column["mean"] for column in found] == pytest.approx(windows.mean(axis=(0, 2), dtype=float), rel=1e-12)
    assert [column["scale"] for column in found] == pytest.approx(windows.std(axis=(0, 2), dtype=float), rel=1e-12)


def test_a_board_of_few_examples_says_nothing_and_no_board_at_all_is_no_column():
    rows = np.random.default_rng(3).normal(size=(8, 3)).astype(np.float32)
    task = make_task("table", TABLE)
    assert ask(task, {"one": rows, "two": rows[:4] + 9}) == ask(task, {"one": rows})
    assert ask(task, {"two": rows[:4]}) == []


def test_the_sum_of_a_board_beyond_the_others_is_left_out():
    rng = np.random.default_rng(4)
    honest = {f"board-{number}": board_of(rng.normal(number, 2, 20)) for number in range(4)}
    expected = pool_boards(honest)
    for lie in (1e30, -1e30):
        found = pool_boards(
            {"rogue": BoardColumn(count=10**12, mean=Fraction(lie), mean_square=Fraction(lie) ** 2), **honest}
        )
        assert found == expected | {"left_out": ["rogue"]}


@pytest.mark.parametrize("place", [0.0, 3.0, 15.0, -15.0])
def test_a_board_that_claims_all_examples_moves_mean_and_scale_within_the_bound(place):
    values = np.random.default_rng(5).normal(0, 2, (4, 500))
    honest = {f"board-{number}": board_of(row) for number, row in enumerate(values)}
    rogue = BoardColumn(count=10**12, mean=Fraction(place), mean_square=Fraction(place) ** 2)
    found = pool_boards({**honest, "rogue": rogue})
    assert abs(found["mean"]) <= MAX_RATIO * 2.3
    assert 1.8 / MAX_RATIO <= found["scale"] <= MAX_RATIO * 2.3


@pytest.mark.parametrize("lie", [1e20, 3e38, 1e44])
def test_a_column_that_is_constant_on_most_boards_is_so_whatever_another_says(lie):
    honest = {f"board-{number}": board_of([7] * 20) for number in range(4)}
    rogue = BoardColumn(count=10**12, mean=Fraction(lie), mean_square=Fraction(lie) ** 2)
    found = pool_boards({**honest, "rogue": rogue})
    assert (found["mean"], found["scale"], found["left_out"]) == (7, 1, ["rogue"])


def test_of_two_boards_one_may_be_constant():
    found = pool_boards({"still": board_of([3] * 10), "moving": board_of([3, 5] * 5)})
    assert (found["mean"], found["left_out"]) == (3.5, [])


def test_boards_that_are_constants_of_their_own_have_the_deviation_between_them():
    found = pool_boards({f"board-{height}": board_of([height] * 6) for height in (100, 300, 200)})
    assert (found["mean"], found["left_out"]) == (200, [])
    assert found["scale"] == pytest.approx(np.std([100, 200, 300]), rel=1e-12)


def test_sums_of_no_values_are_a_fault():
    analysis = make_analysis(make_task("table", TABLE), "column-scales", {})
    data = Dataset(inputs=np.arange(60.0).reshape(20, 3), targets=np.zeros(20))
    for name, place, value, said in (
        ("counts", 0, -1, "0 to 1000000000000 values, got -1"),
        ("counts", 1, 0, "column damp are those of no 0 values"),
        ("counts", 1, 10, "column damp are those of no 10 values"),
        ("sums", (2, 0, 18), 1, "none of finite numbers"),
        ("sums", (2, 1), sum_powers(np.array([1e42]))[1], "single precision, the squares of site add up to more"),
    ):
        sums = analysis.measure({}, data)
        sums[name][place] = value
        assert said in analysis.find_fault(sums)


def test_a_task_whose_scales_are_not_found_yet_is_not_trained_and_knows_what_contradicts_them():
    task = make_task("table", TABLE | {"normalise": "fleet"})
    with pytest.raises(TaskError, match="a run of a fleet, or a simulation, finds them"):
        task.learner().prepare(np.ones((1, 3)))
    for options, said in (
        ({"normalise": "fleet", "means": 3}, "leave them out"),
        ({"normalise": "fleets"}, 'must be "fleet", or "run:ID" of an earlier run, got \'fleets\''),
        ({"normalise": "run:"}, "got 'run:'"),
    ):
        with pytest.raises(ConfigError, match=said):
            make_task("table", TABLE | options)
