"""Statistics of columns: against NumPy on all examples, what a small group hides, and what no board can say."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.core.analyses import BoardSums
from edgefl.core.errors import ConfigError, DataError
from edgefl.core.types import Dataset
from edgefl.tasks.analyses.analysis import RESULT
from edgefl.tasks.analyses.grouping import count_cells, hide_small_counts
from edgefl.tasks.analyses.registry import make_analysis, parse_analysis
from edgefl.tasks.learners.numpy_learner import DenseModel

CLASSES = SimpleNamespace(name="soil", input_shape=(3,), columns=("heat", "salt", "depth"), labels=("dry", "wet"))
VALUES = SimpleNamespace(name="wear", input_shape=(2,), model=DenseModel(sizes=(2, 1)), loss="mse")


def ask(task, boards, **options):
    """The result after both rounds; what a board says must be something that a board can say."""
    analysis = make_analysis(task, "statistics", options)
    model = analysis.make_model()
    for _ in range(2):
        request = analysis.make_request(model)
        sums = {name: analysis.measure(request, data) for name, data in boards.items()}
        assert {name: analysis.find_fault(each) for name, each in sums.items()} == dict.fromkeys(boards)
        model = analysis.solve(model, [BoardSums(device_id=name, sums=each) for name, each in sums.items()])
    assert list(model) == [RESULT]
    return json.loads(model[RESULT].tobytes())


def soil(seed, size):
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((size, 3)) * [1.0, 1e-3, 1e6] + [1e9, 0.0, -5.0]
    inputs[::7, 1], inputs[3, 2] = np.nan, np.inf
    return Dataset(inputs=inputs, targets=rng.integers(0, 2, size))


def test_figures_are_those_of_all_examples_together_however_far_from_zero_they_lie():
    boards = {"a": soil(1, 100), "b": soil(2, 300), "c": soil(3, 41)}
    result = ask(CLASSES, boards, min_group=1)
    pooled = Dataset.concatenate([*boards.values()])
    assert (result["rows"], [column["name"] for column in result["columns"]]) == (441, ["heat", "salt", "depth"])
    for number, column in enumerate(result["columns"]):
        values = pooled.inputs[:, number]
        there = values[np.isfinite(values)]
        assert (column["count"], column["missing"], column["boards"]) == (len(there), len(values) - len(there), 3)
        assert (column["min"], column["max"]) == (there.min(), there.max())
        assert column["mean"] == pytest.approx(there.mean(), rel=1e-12)
        assert column["std"] == pytest.approx((there - there.mean()).std(), rel=1e-12)
        assert sum(column["histogram"]["counts"]) == len(there)
    assert result["classes"] == {"dry": int((pooled.targets == 0).sum()), "wet": int((pooled.targets == 1).sum())}
    assert [board["device_id"] for board in result["boards"]] == ["a", "b", "c"]
    assert result["boards"][1]["columns"][0]["mean"] == pytest.approx(boards["b"].inputs[:, 0].mean(), rel=1e-12)
    assert sum(board["classes"]["wet"] for board in result["boards"]) == result["classes"]["wet"]


@given(seed=st.integers(0, 2**32 - 1), min_group=st.sampled_from([1, 5, 10]), cells=st.sampled_from([2, 33, 256]))
@settings(max_examples=40, deadline=None)
def test_a_quantile_lies_in_the_cell_of_a_value_whose_rank_is_as_near_as_it_says(seed, min_group, cells):
    rng = np.random.default_rng(seed)
    boards = {
        name: Dataset(inputs=rng.lognormal(0, 2, (size, 2)), targets=rng.integers(-3, 3, size).astype(float))
        for name, size in (("a", 12), ("b", int(rng.integers(20, 200))), ("c", 60))
    }
    result = ask(VALUES, boards, min_group=min_group, cells=cells)
    pooled = Dataset.concatenate([*boards.values()])
    for number, values in enumerate([*pooled.inputs.T, pooled.targets]):
        column, ordered = result["columns"][number], np.sort(values)
        error = column["quantile_error"]
        assert error["rank"] == 3 * (min_group - 1)
        low, high = column["min"], column["max"]
        assert error["value"] == pytest.approx((high - low) / cells)
        for part, found in column["quantiles"].items():
            rank = float(part) * (len(values) - 1)
            # What lies beyond the ends counts in the cells there.
            below = found - error["value"] * 1.000001 if found - error["value"] > low else -np.inf
            above = found + error["value"] * 1.000001 if found + error["value"] < high else np.inf
            assert np.searchsorted(ordered, below, "left") <= rank + error["rank"] + 1
            assert np.searchsorted(ordered, above, "right") >= rank - error["rank"]


@given(
    values=st.lists(st.floats(-100, 100), max_size=60),
    min_group=st.integers(1, 9),
    cells=st.integers(2, 20),
)
@settings(max_examples=200, deadline=None)
def test_a_cell_has_no_value_or_a_whole_group_and_no_edge_is_off_by_a_group(values, min_group, cells):
    ordered = np.sort(values) if len(values) >= min_group else np.zeros(0)
    low, high = (float(ordered[0]), float(ordered[-1])) if len(ordered) else (0.0, 0.0)
    counts = count_cells(ordered, low, high, cells, min_group)
    assert counts.sum() == len(ordered)
    assert all(count == 0 or count >= min_group for count in counts)
    exact = count_cells(ordered, low, high, cells, 1)
    assert np.abs(np.cumsum(counts) - np.cumsum(exact)).max() < min_group


def test_nothing_is_about_fewer_examples_than_the_least_group():
    few, some = soil(4, 4), soil(5, 12)
    some.inputs[:9, 0] = np.nan  # three values are left
    result = ask(CLASSES, {"few": few, "some": some}, min_group=5)
    board, alone = result["boards"][1], result["boards"][0]
    nothing = dict.fromkeys(("mean", "std", "min", "max"))
    assert alone["rows"] == 0
    assert all(column == {"name": column["name"], "count": 0, "missing": 0, **nothing} for column in alone["columns"])
    assert alone["classes"] == {"dry": 0, "wet": 0}
    assert board["columns"][0] == {"name": "heat", "count": 0, "missing": 0, **nothing}
    depth, values = board["columns"][2], np.sort(some.inputs[:, 2][np.isfinite(some.inputs[:, 2])])
    assert (depth["count"], depth["missing"]) == (11, 1)
    assert (depth["min"], depth["max"]) == pytest.approx((values[:5].mean(), values[-5:].mean()))
    assert result["columns"][2]["boards"] == 1


@pytest.mark.parametrize(
    ("counts", "kept"),
    [
        ([9, 8, 7], [9, 8, 7]),
        ([9, 0, 7], [9, 0, 7]),
        ([9, 4, 7], [9, 0, 0]),  # by subtraction from all examples the 4 would be told
        ([9, 4, 3, 7], [9, 0, 0, 7]),
        ([4, 0], [0, 0]),
    ],
)
def test_a_small_class_is_not_told_and_cannot_be_found_by_subtraction(counts, kept):
    assert hide_small_counts(np.array(counts), 5).tolist() == kept


def lie(name, place, value):
    return lambda sums: sums[name].__setitem__(place, value)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lie("rows", 0, -1), "less than 0"),
        (lie("rows", 0, 2**60), "more than"),
        (lie("rows", 0, 41), "of 41 examples"),
        (lie("counts", (0, 0), 30), "of 40 examples"),
        (lie("histogram", (0, 3), 50), "the histogram of column heat is not of its 40 values"),
        (lie("classes", 0, 41), "its classes have"),
        (lie("sums", (0, 0, 3), 2**33), "none of finite numbers"),
        (lie("sums", (0, 0, 18), 1), "none of finite numbers"),
        (lie("sums", (0, 0, 9), 7), "those of no 40 values"),  # a mean beyond the extremes
        (lie("sums", (0, 1, slice(None)), 0), "those of no 40 values"),  # less than the mean's own square
        (lie("extremes", (0, 0), np.nan), "those of no 40 values"),
        (lie("extremes", (0, 1), 1e300), "those of no 40 values"),
        (lie("extremes", (0, 0), 2e9), "those of no 40 values"),
    ],
)
def test_what_no_board_can_measure_is_a_fault(change, fault):
    analysis = make_analysis(CLASSES, "statistics", {"columns": "heat"})
    sums = analysis.measure(analysis.make_request(analysis.make_model()), soil(6, 40))
    assert analysis.find_fault(sums) is None
    change(sums)
    assert fault in analysis.find_fault(sums)


def test_columns_are_named_by_name_number_and_range():
    def names(text, task=CLASSES):
        return make_analysis(task, "statistics", {"columns": text}).columns.names

    assert names("") == ("heat", "salt", "depth")
    assert names("depth, 0") == ("depth", "heat")
    assert names("1-2,salt") == ("salt", "depth")
    assert names("target,0", VALUES) == ("target", "0")
    own = {"name": "own", "input_shape": (2,), "num_outputs": 2}
    assert names("", SimpleNamespace(**own, loss="mse")) == ("0", "1", "target-0", "target-1")
    assert names("", SimpleNamespace(**own, loss="quantile:0.1,0.9")) == ("0", "1", "target")
    assert names("", SimpleNamespace(**own, loss="reconstruction")) == ("0", "1")


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (CLASSES, {"columns": "haet"}, "no column 'haet'; did you mean heat?"),
        (CLASSES, {"columns": "1-7"}, "there are 3, heat to depth"),
        (CLASSES, {"columns": " , "}, "must be 1 to 1024 columns"),
        (CLASSES, {"min_group": 0}, "min_group must be a whole number at least 1"),
        (CLASSES, {"min_group": 6}, "min_group must be 1, or 5 times a power of two (5, 10, 20, 40, …), got 6"),
        (CLASSES, {"cels": 9}, "did you mean cells?"),
        (SimpleNamespace(name="big", input_shape=(40, 40), labels=("a",)), {}, "has 1600; name some"),
        (SimpleNamespace(name="big", input_shape=(1000,), labels=("a",)), {"cells": 65536}, "at most 4194 for 1000"),
        (SimpleNamespace(name="own", labels=("a",)), {}, "task own must say the shape of one example"),
        (SimpleNamespace(name="own", input_shape=(2,), columns=("a", "a")), {}, "must be 2 different names"),
    ],
)
def test_what_cannot_be_asked_is_one_clear_line(task, options, message):
    with pytest.raises(ConfigError) as error:
        make_analysis(task, "statistics", options)
    assert message in str(error.value)


def test_examples_of_another_shape_than_the_task_says_are_refused():
    analysis = make_analysis(CLASSES, "statistics", {})
    request = analysis.make_request(analysis.make_model())
    with pytest.raises(DataError, match="must have 3 inputs, as its task says, the shard has 4"):
        analysis.measure(request, Dataset(inputs=np.zeros((9, 4)), targets=np.zeros(9, np.int64)))
    with pytest.raises(DataError, match="below 2, the number of classes, got 2"):
        analysis.measure(request, Dataset(inputs=np.zeros((9, 3)), targets=np.full(9, 2)))


def test_a_header_without_an_analysis_is_of_a_training():
    assert parse_analysis({"task": "soil"}) is None
    assert parse_analysis({"analysis": {"name": "statistics", "options": {"cells": 9}}}) == (
        "statistics",
        {"cells": 9},
    )
