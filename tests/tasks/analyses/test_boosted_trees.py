"""Trees from sums: the same whoever has which example, and those of other boosters on the same bins."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

from edgefl.core.analyses import BoardSums, get_num_rounds
from edgefl.core.errors import ConfigError, DataError, RunFailedError
from edgefl.core.types import Dataset
from edgefl.tasks.analyses.analysis import RESULT
from edgefl.tasks.analyses.registry import make_analysis
from edgefl.tasks.analyses.trees.ensemble import predict
from edgefl.tasks.analyses.trees.growth import LAST_EDGE, Penalties, choose_edges, find_split
from edgefl.tasks.analyses.trees.histograms import LIMIT_BITS, find_level_fault, sum_level
from edgefl.tasks.metrics.exact_sums import sum_exactly

VALUES = SimpleNamespace(name="own", input_shape=(5,), loss="mse")
VALUES_OF_ONE = SimpleNamespace(name="own", input_shape=(1,), loss="mse")
CLASSES = SimpleNamespace(name="own", input_shape=(5,), labels=("no", "yes"), loss="cross-entropy")
SIZE = 400
OPTIONS = {"trees": 6, "depth": 3, "bins": 32, "min_group": 1}


def examples(task):
    """Columns of 20 values each, so that every bin is one value."""
    rng = np.random.default_rng(1)
    inputs = rng.integers(0, 20, (SIZE, 5)).astype(float)
    sums = 0.3 * inputs[:, 0] - np.abs(inputs[:, 1] - 10) + inputs[:, 2] * inputs[:, 3] / 20 + rng.normal(0, 1, SIZE)
    return Dataset(inputs=inputs, targets=sums if task is VALUES else (sums > np.median(sums)).astype(int))


def boost(task, boards, **options):
    analysis = make_analysis(task, "boosted-trees", options)
    model = analysis.make_model()
    for _ in range(get_num_rounds("boosted-trees", options)):
        request = analysis.make_request(model)
        sums = [BoardSums(device_id=name, sums=analysis.measure(request, data)) for name, data in boards.items()]
        assert [analysis.find_fault(board.sums) for board in sums] == [None] * len(sums)
        model = analysis.solve(model, sums)
    return json.loads(model[RESULT].tobytes())


def cut(data):
    return {"a": data.take(slice(0, 50)), "b": data.take(slice(50, 260)), "c": data.take(slice(260, SIZE))}


@pytest.mark.parametrize("task", [VALUES, CLASSES], ids=["values", "classes"])
def test_trees_are_those_of_one_board_with_all_examples_and_learn(task):
    data = examples(task)
    apart, together = boost(task, cut(data), **OPTIONS), boost(task, {"all": data}, **OPTIONS)
    assert apart == together
    assert (apart["num_trees"], apart["count"], len(apart["losses"])) == (6, SIZE, 6)
    assert apart["losses"] == sorted(apart["losses"], reverse=True)
    assert apart["losses"][-1] < 0.7 * apart["losses"][0]


@pytest.mark.parametrize("task", [VALUES, CLASSES], ids=["values", "classes"])
def test_predictions_are_those_of_scikit_learn_on_the_same_bins(task):
    data = examples(task)
    found = predict(boost(task, cut(data), **OPTIONS, min_child_weight=1e-3), data.inputs)
    options = {"max_iter": 6, "learning_rate": 0.3, "max_leaf_nodes": None, "max_depth": 3, "min_samples_leaf": 1}
    more = {"l2_regularization": 1.0, "early_stopping": False}
    if task is VALUES:
        known = HistGradientBoostingRegressor(**options, **more).fit(data.inputs, data.targets).predict(data.inputs)
    else:
        model = HistGradientBoostingClassifier(**options, **more).fit(data.inputs, data.targets)
        known = model.predict_proba(data.inputs)[:, 1]
    assert found == pytest.approx(known, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("task", [VALUES, CLASSES], ids=["values", "classes"])
def test_predictions_are_those_of_xgboost_on_the_same_bins(task):
    xgboost = pytest.importorskip("xgboost", reason="needs xgboost: pip install xgboost-cpu")
    data = examples(task)
    result = boost(task, cut(data), **OPTIONS)
    base = result["base"] if task is VALUES else 1 / (1 + np.exp(-result["base"]))
    objective = "reg:squarederror" if task is VALUES else "binary:logistic"
    settings_ = {"tree_method": "hist", "eta": 0.3, "max_depth": 3, "lambda": 1, "min_child_weight": 1}
    matrix = xgboost.DMatrix(data.inputs, label=data.targets)
    known = xgboost.train({**settings_, "base_score": base, "objective": objective}, matrix, 6).predict(matrix)
    assert predict(result, data.inputs) == pytest.approx(known, rel=1e-6, abs=1e-6)


def test_groups_change_the_trees_little_and_few_examples_say_nothing():
    data = examples(VALUES)
    exact = boost(VALUES, cut(data), **OPTIONS)
    grouped = boost(VALUES, cut(data), **{**OPTIONS, "min_group": 5})
    assert grouped["losses"][-1] < 1.15 * exact["losses"][-1]
    with pytest.raises(RunFailedError, match="min_group = 640"):
        boost(VALUES, {"all": data}, **{**OPTIONS, "min_group": 640})


@given(seed=st.integers(0, 2**32 - 1), min_group=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_no_bin_of_a_node_is_about_fewer_than_a_group_and_all_of_a_told_node_count(seed, min_group):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(0, 40))
    bins, nodes = rng.integers(0, 7, (size, 2)), rng.integers(1, 3, size)
    first, second = rng.integers(-9, 9, size), rng.integers(0, 9, size)
    sums = sum_level(bins, nodes, (first, second), (2, 2, 7), min_group)
    assert find_level_fault(sums, is_squared=False) is None
    for node in range(2):
        rows = nodes == 1 + node
        told = rows.sum() >= min_group and (rows.all() or (~rows).sum() >= min_group)
        expected = [first[rows].sum(), second[rows].sum(), rows.sum()] if told else [0, 0, 0]
        assert sums[node].sum(axis=1).tolist() == [expected] * 2
        counts = sums[node, ..., 2]
        assert ((counts == 0) | (counts >= min_group)).all()
        if min_group == 1:
            exact = [np.bincount(bins[rows, column], minlength=7).tolist() for column in range(2)]
            assert counts.tolist() == exact


def test_no_sums_of_few_examples_are_those_of_a_node_less_those_under_its_other_child():
    def tell(*nodes, depth):
        ones = np.ones(len(nodes), np.int64)
        return sum_level(np.zeros((len(nodes), 1), np.int64), np.array(nodes), (ones, ones), (2**depth, 1, 2), 3)

    def count(*nodes, depth):
        return tell(*nodes, depth=depth)[:, 0, :, 2].sum(axis=1).tolist()

    assert count(1, *[2] * 9, depth=1) == [0, 0]  # told alone, the right child would tell the left one
    assert count(1, *[5] * 4, *[6] * 5, depth=2) == [0, 0, 0, 0]  # and so would its own children together
    assert count(1, 1, 1, *[5] * 4, *[6] * 5, depth=2) == [0, 0, 4, 5]  # beside a leaf of three
    assert count(3, 4, 4, 4, *[5] * 4, *[6] * 5, depth=2) == [0, 0, 4, 5]
    assert count(*[2] * 9, depth=1) == [0, 9]


def test_a_target_of_one_example_does_not_follow_from_the_levels_of_a_tree():
    inputs = np.zeros((30, 1))
    inputs[:5] = 1.0
    data = Dataset(inputs=inputs, targets=np.where(inputs[:, 0] > 0, 9.0, 1.0))
    few = data.take(slice(4, 30))
    analysis = make_analysis(VALUES_OF_ONE, "boosted-trees", {"trees": 1, "depth": 2, "min_group": 5, "bins": 2})
    model = analysis.make_model()
    for level in (-2, -1, 0, 1):
        request = analysis.make_request(model)
        sums = {name: analysis.measure(request, part) for name, part in (("whole", data), ("few", few))}
        if level >= 0:
            told = sums["few"]["histogram"][: 2**level, 0, :, 2].sum()
            assert told == (26 if level == 0 else 0)
        model = analysis.solve(model, [BoardSums(device_id=name, sums=one) for name, one in sums.items()])
    found = json.loads(model[RESULT].tobytes())
    assert found["trees"]["columns"][0][0] == 0
    assert all(analysis.find_fault(one) is None for one in sums.values())


def test_a_split_gains_most_and_keeps_both_sides_heavy_enough():
    penalties = Penalties(l2=1.0, min_gain=0.0, min_child_weight=2.0, learning_rate=1.0)
    sums = np.array([[[-3, 1], [-3, 1], [6, 2], [0, 0]], [[-6, 2], [1, 1], [5, 1], [0, 0]]], float)
    # -6 of weight 2 against 6 of weight 2, by either column; the first counts.
    assert find_split(sums, penalties) == (0, 1)
    assert find_split(sums[::-1], penalties) == (0, 0)
    assert find_split(sums, Penalties(l2=1.0, min_gain=12.0, min_child_weight=2.0, learning_rate=1.0)) is None
    assert find_split(sums, Penalties(l2=1.0, min_gain=11.9, min_child_weight=2.0, learning_rate=1.0)) == (0, 1)
    assert find_split(sums, Penalties(l2=1.0, min_gain=0.0, min_child_weight=3.0, learning_rate=1.0)) is None
    assert penalties.compute_value(-6.0, 2.0) == 2.0


def test_edges_lie_between_values_and_cut_many_of_them_into_equal_parts():
    counts = np.zeros(100, np.int64)
    counts[[0, 10, 99]] = 5, 1, 1
    assert choose_edges(counts, 0.0, 100.0, 4).tolist() == [5.5, 55.0, LAST_EDGE]
    assert choose_edges(counts, 3.0, 3.0, 2).tolist() == [3.0]
    assert choose_edges(np.zeros(8, np.int64), 0.0, 0.0, 3).tolist() == [LAST_EDGE, LAST_EDGE]
    edges = choose_edges(np.arange(1, 101), 0.0, 100.0, 5)
    parts = np.diff([0, *(np.arange(1, 101)[: int(edge)].sum() for edge in edges), 5050])
    assert (np.abs(parts - 1010) <= 100).all()


def lie(place, value):
    return lambda sums: sums.__setitem__(place, value)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lie((0, 0, 0, 2), -1), "must count 0 examples or more"),
        (lie((0, 0, 0, 2), 2**40), "and not too many"),
        (lie((0, 0, 0, 0), 9 << LIMIT_BITS), "derivatives of no examples"),
        (lie((0, 0, 0, 1), -1), "derivatives of no examples"),
        (lie((0, 0, 0, 1), 7), "derivatives of no examples"),
        (lie((0, 1, 0, 0), 5), "not of the same examples"),
    ],
)
def test_a_histogram_of_no_examples_is_a_fault(change, fault):
    bins = np.zeros((3, 2), np.int64)
    sums = sum_level(bins, np.zeros(3, np.int64), (np.ones(3, np.int64), np.ones(3, np.int64)), (1, 2, 2), 1)
    assert find_level_fault(sums, is_squared=True) is None
    change(sums)
    assert fault in find_level_fault(sums, is_squared=True)


@pytest.mark.parametrize(
    ("task", "count", "total", "fault"),
    [
        (VALUES, 7.5, 1.0, "must be whole, 0 or 5 to 10"),
        (VALUES, 2.0**-256, 2.0**290, "must be whole"),
        (VALUES, 4, 1.0, "must be whole, 0 or 5"),
        (VALUES, -8, 0.0, "got -8"),
        (VALUES, 1e13, 0.0, "got 1e+13"),
        (VALUES, 8, -(2.0**153), "no 8 targets have a sum of -1.1"),
        (VALUES, 0, 3.0, "there are none"),
        (CLASSES, 8, 9, "no 8 targets have a sum of 9"),
        (CLASSES, 8, -1, "no 8 targets have a sum of -1"),
        (CLASSES, 8, 2.5, "no 8 targets have a sum of 2.5"),
        (CLASSES, 0, 3, "there are none"),
    ],
)
def test_a_count_and_sum_of_no_targets_are_a_fault(task, count, total, fault):
    analysis = make_analysis(task, "boosted-trees", {})
    sums = analysis.measure(analysis.make_request(analysis.make_model()), examples(task).take(slice(0, 8)))
    assert analysis.find_fault(sums) is None
    sums["targets"] = sum_exactly(np.array([[count, total]], float))
    assert fault in analysis.find_fault(sums)


@pytest.mark.parametrize("name", ["cells", "histogram", "loss"])
def test_targets_beside_sums_of_a_later_round_are_a_fault(name):
    analysis = make_analysis(VALUES, "boosted-trees", {})
    sums = analysis.measure(analysis.make_request(analysis.make_model()), examples(VALUES))
    sums[name].reshape(-1)[0] = 1
    assert "targets are of the first round" in analysis.find_fault(sums)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (SimpleNamespace(name="own", input_shape=(2,), labels=("a", "b", "c")), {}, "that of own has 3 classes"),
        (SimpleNamespace(name="own", input_shape=(2,), loss="mse", num_outputs=2), {}, "that of own has 2 values"),
        (
            SimpleNamespace(name="own", input_shape=(20,), loss="mse"),
            {"depth": 8, "bins": 1024},
            "make 7864320 numbers",
        ),
        (
            VALUES,
            {"trees": 1000, "depth": 8},
            "trees = 1000 and strategy.depth = 8 send each board all trees in 8002",
        ),
        *(
            (SimpleNamespace(name="own", input_shape=(2,), loss=loss), {}, f"loss {loss} of task own has other")
            for loss in ("poisson", "binary-cross-entropy", "reconstruction")
        ),
        (VALUES, {"trees": 0}, "trees must be a whole number at least 1"),
        (VALUES, {"columns": "target"}, "names no input"),
    ],
)
def test_what_cannot_be_asked_is_one_clear_line(task, options, message):
    with pytest.raises(ConfigError) as error:
        make_analysis(task, "boosted-trees", options)
    assert message in str(error.value)


def test_rounds_follow_from_trees_and_depth_and_wrong_options_have_none():
    assert get_num_rounds("boosted-trees", {"trees": 4, "depth": 2}) == 10
    assert get_num_rounds("boosted-trees", {"trees": "4"}) is None
    assert get_num_rounds("boosted-trees", {"tree": 4}) is None
    assert get_num_rounds("fedavg", {}) is None


def test_one_class_alone_and_a_missing_value_are_refused():
    data = examples(CLASSES)
    alone = Dataset(inputs=data.inputs, targets=np.zeros(SIZE, np.int64))
    with pytest.raises(RunFailedError, match="of one class"):
        boost(CLASSES, {"all": alone}, **OPTIONS)
    data.inputs[3, 1] = np.nan
    with pytest.raises(DataError, match="the columns of trees must be finite"):
        boost(CLASSES, {"all": data}, **OPTIONS)
