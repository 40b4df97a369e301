"""Models from sums: equal to scikit-learn's on all examples at once, whoever has which."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.naive_bayes import GaussianNB

from edgefl.core.analyses import ANALYSES, BoardSums
from edgefl.core.errors import ConfigError, DataError, RunFailedError
from edgefl.core.types import Dataset
from edgefl.tasks.analyses.analysis import RESULT
from edgefl.tasks.analyses.k_means import compute_inertia, find_nearest
from edgefl.tasks.analyses.linear_regression import add_products, solve_ridge
from edgefl.tasks.analyses.moments import add_groups, read_matrix, sum_cross_products
from edgefl.tasks.analyses.naive_bayes import compute_gaussians, to_layer
from edgefl.tasks.analyses.registry import make_analysis
from edgefl.tasks.datasets.central import load_central_data
from edgefl.tasks.learners.numpy_learner import DenseModel
from edgefl.tasks.losses.value_losses import Quantile
from edgefl.tasks.metrics.exact_sums import sum_exactly
from edgefl.tasks.registry import make_task

SIZES = (40, 7, 150)
SIZE = sum(SIZES)
DIGITS = make_task("digits", {"model": "logistic"})


def task_of(num_features, num_outputs=1, **more):
    model = DenseModel(sizes=(num_features, num_outputs), prepare=lambda rows: rows)
    facts = {"name": "own", "model": model, "input_shape": (num_features,), "loss": "mse", **more}
    return SimpleNamespace(shapes=model.shapes, init=model.init, **facts)


def cut(data, sizes=SIZES):
    """The examples on boards of these sizes."""
    ends = np.cumsum([0, *sizes])
    return {f"board-{i}": data.take(slice(ends[i], ends[i + 1])) for i in range(len(sizes))}


def ask(analysis, boards, rounds=1):
    """The model after so many rounds, and the boards' sums of the last one."""
    model = analysis.make_model()
    for _ in range(rounds):
        request = analysis.make_request(model)
        sums = [BoardSums(device_id=name, sums=analysis.measure(request, data)) for name, data in boards.items()]
        assert [analysis.find_fault(board.sums) for board in sums] == [None] * len(sums)
        model = analysis.solve(model, sums)
    return model, sums


def result_of(model):
    return json.loads(model[RESULT].tobytes())


def rows(seed, num_columns, *, offset=0.0, scale=1.0):
    """Correlated columns."""
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((num_columns, num_columns))
    return (rng.standard_normal((sum(SIZES), num_columns)) @ mixing) * scale + offset


def test_sums_of_products_are_exact_whatever_cancels():
    rng = np.random.default_rng(1)
    left, right = rng.integers(-(2**20), 2**20, (3000, 2)), rng.integers(-(2**20), 2**20, (3000, 3))
    scale = 2.0 ** np.array([0, -90, 100])
    sums = read_matrix(sum_cross_products(left.astype(float), right * scale))
    exact = left.astype(object).T @ right.astype(object)
    assert [[int(value) for value in row] for row in sums * np.array([1, 2**90, 1])[None, :]] == [
        [int(value) for value in row] for row in exact * np.array([1, 1, 2**100], object)
    ]
    assert read_matrix(sum_cross_products(np.zeros((0, 2)), np.zeros((0, 2)))).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("ridge", [0.0, 3.7])
@pytest.mark.parametrize(("offset", "scale"), [(0.0, 1.0), (1e4, [1e-6, 1.0, 1e6, 1.0, 1.0])])
def test_linear_and_ridge_regression_are_those_of_all_examples(ridge, offset, scale):
    inputs = rows(2, 5, offset=offset, scale=scale)
    targets = np.random.default_rng(3).standard_normal((len(inputs), 2)) + inputs[:, :2] / np.abs(inputs[:, :2]).max(
        0
    )
    boards = cut(Dataset(inputs=inputs, targets=targets))
    analysis = make_analysis(task_of(5, 2), "linear-regression", {"ridge": ridge, "min_group": 1})
    model, sums = ask(analysis, boards)
    weight, bias = solve_ridge(add_products(sums), 5, ridge)
    # Centred and scaled before: scikit-learn's own solvers lose digits to offsets and units.
    means, units = inputs.mean(axis=0), np.ones(5) if ridge else np.array(scale)
    known = (Ridge(alpha=ridge) if ridge else LinearRegression()).fit((inputs - means) / units, targets)
    coefficients = known.coef_ / units
    assert weight == pytest.approx(coefficients, rel=1e-9)
    assert bias == pytest.approx(known.intercept_ - coefficients @ means, rel=1e-9)
    assert model["fc1.weight"].dtype == np.float32
    assert model["fc1.weight"] == pytest.approx(coefficients, rel=1e-6)


def test_weights_of_examples_count_and_features_that_depend_on_each_other_are_shared():
    inputs = rows(4, 3)
    twice = np.hstack([inputs, inputs[:, :1], np.ones((len(inputs), 1))])
    weights = np.random.default_rng(5).uniform(0, 3, len(inputs))
    data = Dataset(inputs=twice, targets=inputs @ [1.0, -2.0, 0.5] + 7.0, weights=weights)
    noisy = Dataset(inputs=data.inputs, targets=data.targets + rows(6, 1)[:, 0], weights=weights)
    analysis = make_analysis(task_of(5), "linear-regression", {})
    weight, bias = solve_ridge(add_products(ask(analysis, cut(data))[1]), 5, 0.0)
    assert weight[0] == pytest.approx([0.5, -2.0, 0.5, 0.5, 0.0], abs=1e-9)
    assert bias == pytest.approx([7.0])
    known = LinearRegression().fit(inputs, noisy.targets, sample_weight=weights)
    weight, _ = solve_ridge(add_products(ask(analysis, cut(noisy))[1]), 5, 0.0)
    assert weight[0, :3] + [weight[0, 3], 0, 0] == pytest.approx(known.coef_, rel=1e-9)


def test_naive_bayes_is_that_of_all_examples_with_variances_of_each_class():
    data = load_central_data("digits").train.take(slice(0, sum(SIZES)))
    analysis = make_analysis(DIGITS, "naive-bayes", {"variances": "class", "min_group": 1})
    found = result_of(ask(analysis, cut(data))[0])
    features = DIGITS.model.prepare(data.inputs).reshape(len(data), -1).astype(float)
    known = GaussianNB(var_smoothing=1e-9).fit(features, data.targets)
    assert found["priors"] == pytest.approx(known.class_prior_, rel=1e-12)
    assert np.array(found["means"]) == pytest.approx(known.theta_, rel=1e-9, abs=1e-15)
    assert np.array(found["variances"]) == pytest.approx(known.var_, rel=1e-9, abs=1e-15)


def test_naive_bayes_with_shared_variances_is_a_layer_that_answers_as_the_distributions_do():
    data = load_central_data("digits").train
    analysis = make_analysis(DIGITS, "naive-bayes", {"smoothing": 1e-3})
    model, sums = ask(analysis, cut(data, (500, 400, len(data) - 900)))
    gaussians = compute_gaussians(*add_groups(sums), is_shared=True, smoothing=1e-3)
    features = DIGITS.model.prepare(data.inputs).reshape(len(data), -1).astype(float)
    within = np.mean([(x - gaussians.means[c]) ** 2 for x, c in zip(features, data.targets, strict=True)], axis=0)
    assert gaussians.variances[0] == pytest.approx(within + 1e-3 * features.var(axis=0).max(), rel=1e-9)
    logits = np.log(gaussians.priors) - 0.5 * ((features[:, None] - gaussians.means) ** 2 / gaussians.variances).sum(
        axis=2
    )
    weight, bias = to_layer(gaussians)
    answers = features @ weight.T + bias
    assert answers - answers[:, :1] == pytest.approx(logits - logits[:, :1], abs=1e-9)
    learner = DIGITS.learner()
    learner.load(model)
    assert learner.evaluate(load_central_data("digits").test)[1] > 0.85


def test_components_are_those_of_all_examples():
    inputs = rows(7, 6, offset=1e5)
    analysis = make_analysis(task_of(6), "pca", {"columns": "0-5", "components": 4, "min_group": 1})
    boards = cut(Dataset(inputs=inputs, targets=np.zeros(len(inputs))))
    found = result_of(ask(analysis, boards)[0])
    known = PCA(4, svd_solver="full").fit(inputs - 1e5)
    signs = np.sign((np.array(found["components"]) * known.components_).sum(axis=1))
    assert np.array(found["components"]) == pytest.approx(signs[:, None] * known.components_, rel=1e-9, abs=1e-9)
    assert found["variances"] == pytest.approx(known.explained_variance_, rel=1e-9)
    assert found["variance_ratios"] == pytest.approx(known.explained_variance_ratio_, rel=1e-9)
    assert found["mean"] == pytest.approx(inputs.mean(axis=0), rel=1e-12)
    assert all(max(component, key=abs) > 0 for component in found["components"])


def test_clusters_are_those_of_lloyd_on_all_examples():
    rng = np.random.default_rng(8)
    inputs = rng.standard_normal((sum(SIZES), 3)) + 8.0 * rng.integers(-1, 2, (sum(SIZES), 3)) + 1e3
    boards = cut(Dataset(inputs=inputs, targets=np.zeros(len(inputs))))
    analysis = make_analysis(task_of(3), "k-means", {"clusters": 4, "columns": "0-2", "min_group": 1})
    first = np.array(result_of(ask(analysis, boards)[0])["centres"])
    deviation = inputs.std(axis=0)
    assert (np.abs(first - inputs.mean(axis=0)) < 5 * deviation).all()
    found = result_of(ask(analysis, boards, rounds=26)[0])
    known = KMeans(4, init=first, n_init=1, max_iter=25, tol=0, algorithm="lloyd").fit(inputs)
    assert np.array(found["centres"]) == pytest.approx(known.cluster_centers_, rel=1e-9)
    assert found["counts"] == np.bincount(known.labels_).tolist()
    assert found["inertia"] == pytest.approx(known.inertia_, rel=1e-9)


def test_a_centre_without_examples_stays_and_distances_are_exact():
    values, centres = np.array([[0.0], [1.0], [5.0]]), np.array([[0.0], [90.0], [4.0]])
    assert find_nearest(values, centres).tolist() == [0, 0, 2]
    analysis = make_analysis(task_of(1), "k-means", {"clusters": 3, "columns": "0", "min_group": 1})
    sums = analysis.measure({"centres": centres}, Dataset(inputs=values, targets=np.zeros(3)))
    counts, powers = add_groups([BoardSums(device_id="a", sums=sums)])
    assert compute_inertia(counts, read_matrix(powers), centres) == 0 + 1 + 1
    text = json.dumps({"centres": centres.tolist()}).encode()
    model = analysis.solve({RESULT: np.frombuffer(text, np.uint8)}, [BoardSums(device_id="a", sums=sums)])
    assert result_of(model)["centres"] == [[0.5], [90.0], [5.0]]


@pytest.mark.parametrize("name", ["linear-regression", "naive-bayes", "pca", "k-means"])
def test_nothing_is_about_fewer_examples_than_the_least_group(name):
    options = {"k-means": {"clusters": 2, "columns": "0-1"}, "pca": {"columns": "0-1"}}.get(name, {})
    is_bayes = name == "naive-bayes"
    task = task_of(2, 2, loss="cross-entropy", labels=("a", "b")) if is_bayes else task_of(2)
    targets = np.array([0, 0, 0, 0, 1, 1, 1, 1, 1, 1])
    data = Dataset(inputs=rows(9, 2)[:10], targets=targets if is_bayes else targets.astype(float))
    analysis = make_analysis(task, name, {**options, "min_group": 20})
    model = analysis.make_model()
    sums = analysis.measure(analysis.make_request(model), data)
    assert not any(array.any() for array in sums.values())
    assert analysis.find_fault(sums) is None
    with pytest.raises(RunFailedError, match="min_group"):
        analysis.solve(model, [BoardSums(device_id="a", sums=sums)])
    if is_bayes:
        told = make_analysis(task, name, {"min_group": 5}).measure({}, data)
        assert told["counts"].tolist() == [0, 0], "the four of one class could be found beside the sum of all"
        even = np.array([0] * 5 + [1] * 5)
        told = make_analysis(task, name, {"min_group": 5}).measure({}, replace(data, targets=even))
        assert told["counts"].tolist() == [5, 5]


def test_what_no_board_can_measure_is_a_fault():
    regression = make_analysis(task_of(2), "linear-regression", {})
    data = Dataset(inputs=rows(10, 2), targets=rows(11, 1)[:, 0])
    for place, value in (((0, 0, 17), -1), ((0, 1, 12), 1), ((3, 3, 18), 1), ((3, 3, slice(None)), 0)):
        sums = regression.measure({}, data)
        sums["products"][place] = value
        assert regression.find_fault(sums), place
    clusters = make_analysis(task_of(2), "k-means", {"clusters": 2, "columns": "0-1"})
    for name, place, value in (
        ("counts", 0, -1),
        ("counts", 0, 0),
        ("sums", (0, 0, 0, 12), 9),
        ("sums", (1, 0, 1, 8), 1),
    ):
        sums = clusters.measure({"centres": np.zeros((2, 2))}, data)
        sums[name][place] = value
        assert clusters.find_fault(sums), (name, place)


def test_products_of_no_examples_are_a_fault():
    data = Dataset(inputs=rows(10, 2), targets=rows(11, 1)[:, 0])
    components = make_analysis(task_of(2), "pca", {"components": 1})

    def find_fault(place, value):
        sums = components.measure({}, data)
        sums["products"][place] = sum_exactly(np.array([[value]], float))[0] if np.ndim(value) == 0 else value
        return components.find_fault(sums)

    assert find_fault((3, 3), SIZE) is None
    assert "whole, 0 to 1000000000000, got 196.5" in find_fault((3, 3), SIZE - 0.5)
    assert "got 1e+13" in find_fault((3, 3), 1e13)
    assert "of no examples" in find_fault((3, 3), 0)
    assert "not symmetric" in find_fault((0, 1), 0.25)
    regression = make_analysis(task_of(2), "linear-regression", {})
    weighted = Dataset(inputs=data.inputs, targets=data.targets, weights=np.linspace(0, 1.3, SIZE))
    sums = regression.measure({}, weighted)
    assert regression.find_fault(sums) is None
    sums["products"][3] = sums["products"][:, 3] = 0
    assert "of no examples" in regression.find_fault(sums)


@pytest.mark.parametrize("name", sorted(ANALYSES))
def test_any_tensors_are_found_to_be_no_sums_and_raise_nothing(name):
    rng = np.random.default_rng(12)
    is_bayes = name == "naive-bayes"
    task = task_of(2, 2, loss="cross-entropy", labels=("a", "b")) if is_bayes else task_of(2)
    analysis = make_analysis(task, name, {"clusters": 2} if name == "k-means" else {})
    for bits in (1, 8, 31, 40, 63):
        for _ in range(20):
            sums = {
                spec.name: rng.integers(-(2**bits), 2**bits, spec.shape).astype(spec.dtype)
                for spec in analysis.sums_spec
            }
            if name == "statistics" and bits == 63:
                sums["extremes"] = rng.integers(0, 2**63, (3, 2)).view(np.float64)
            assert analysis.find_fault(sums)


@pytest.mark.parametrize(
    ("task", "name", "options", "message"),
    [
        (DIGITS, "linear-regression", {}, "needs targets that are values; those of task digits are classes"),
        (make_task("digits"), "naive-bayes", {}, "needs a task whose model is one layer"),
        (task_of(2), "naive-bayes", {}, "needs targets that are classes; those of task own are values"),
        (task_of(300), "linear-regression", {}, "takes at most 256 features, task own has 300"),
        (task_of(1, 300), "linear-regression", {}, "takes at most 256 outputs, task own has 300"),
        (task_of(256, 5), "linear-regression", {}, "at most 262144 features x features x outputs, task own has 256"),
        (task_of(2, 3, loss=Quantile(quantiles=(0.1, 0.5, 0.9))), "linear-regression", {}, "own is quantile, which"),
        (task_of(2, 2, loss="reconstruction"), "linear-regression", {}, "own is reconstruction, which"),
        (task_of(9000, 2, loss="cross-entropy"), "naive-bayes", {}, "has 2 times 9000"),
        (task_of(300), "pca", {}, "at most 256 for pca, got 301"),
        (task_of(2), "pca", {"components": 9}, "components must be at most 3, the columns, got 9"),
        (task_of(1000), "k-means", {"clusters": 20}, "clusters must be at most 16 for 1001 columns, got 20"),
        (task_of(2), "k-means", {}, "clusters"),
        (DIGITS, "naive-bayes", {"variances": "all"}, "one of 'shared', 'class'"),
    ],
)
def test_what_cannot_be_asked_is_one_clear_line(task, name, options, message):
    with pytest.raises(ConfigError) as error:
        make_analysis(task, name, options)
    assert message in str(error.value)


def test_a_missing_value_is_refused_where_examples_must_be_complete():
    data = Dataset(inputs=np.array([[1.0, np.nan]] * 9), targets=np.zeros(9))
    for name, options in (("pca", {}), ("k-means", {"clusters": 1}), ("linear-regression", {})):
        analysis = make_analysis(task_of(2), name, options)
        with pytest.raises(DataError, match="must be finite and below"):
            analysis.measure(analysis.make_request(analysis.make_model()), data)
