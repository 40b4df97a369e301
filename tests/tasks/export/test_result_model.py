"""Results of analyses as files of ONNX: they say of an example what the analysis, or scikit-learn, says of it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.decomposition import PCA
from sklearn.naive_bayes import GaussianNB

from edgefl.core.analyses import BoardSums
from edgefl.core.errors import TaskError
from edgefl.core.types import Dataset
from edgefl.device.inference import onnx_model
from edgefl.device.inference.onnx_model import ModelCheckRequest, OnnxModel, check_model
from edgefl.tasks.analyses.analysis import pack_result, read_result
from edgefl.tasks.analyses.registry import make_analysis
from edgefl.tasks.analyses.trees.ensemble import predict
from edgefl.tasks.datasets.central import load_central_data
from edgefl.tasks.export.model_export import export_onnx
from edgefl.tasks.export.result_model import QuadraticModel, find_result_model
from edgefl.tasks.registry import make_task

SIZE = 300
DIGITS = make_task("digits", {"model": "logistic"})


def task_of(**facts):
    return SimpleNamespace(**{"name": "own", "input_shape": (2, 2), "loss": "mse", "shapes": lambda: (), **facts})


VALUES = task_of()
CLASSES = task_of(labels=("no", "yes"), loss="cross-entropy")


def examples(task, *, offset=0.0):
    """Whole numbers, of which each is an edge of a bin of trees with as many bins."""
    rng = np.random.default_rng(5)
    inputs = rng.integers(0, 12, (SIZE, 2, 2)).astype(np.float32) + np.float32(offset)
    sums = (inputs[:, 0, 1] - offset) ** 2 - 9.0 * np.abs(inputs[:, 1, 0] - offset - 6.0)
    return Dataset(inputs=inputs, targets=sums if task is VALUES else (sums > np.median(sums)).astype(int))


def ask(task, name, data, rounds, **options):
    """The tensors of a run with one board."""
    analysis = make_analysis(task, name, {"min_group": 1, **options})
    model = analysis.make_model()
    for _ in range(rounds):
        sums = analysis.measure(analysis.make_request(model), data)
        model = analysis.solve(model, [BoardSums(device_id="a", sums=sums)])
    return model


def export(task, model, path, data):
    report = export_onnx(task, model, path, samples=data)
    return report, OnnxModel(path)


@pytest.mark.parametrize("task", [VALUES, CLASSES], ids=["values", "classes"])
def test_trees_answer_as_their_result_does_on_the_very_edges_too(task, tmp_path):
    data = examples(task)
    model = ask(task, "boosted-trees", data, 2 + 5 * 3, trees=5, depth=3, columns="1,2", bins=16)
    result = read_result(model)
    result["edges"] = [[float(round(edge)) for edge in edges] for edges in result["edges"]]
    report, file = export(task, pack_result(result), tmp_path / "trees.onnx", data)
    expected = predict(result, data.inputs)
    assert len(np.unique(expected)) > 8
    if task is VALUES:
        assert [row["values"][0] for row in file.predict(data.inputs)] == pytest.approx(expected, rel=1e-6)
        assert report.accuracy is None
    else:
        answers = file.predict(data.inputs)
        shares = [row["probability"] if row["class"] == "yes" else 1 - row["probability"] for row in answers]
        assert shares == pytest.approx(expected, abs=2e-6)
        assert report.accuracy == pytest.approx(np.mean((expected > 0.5) == data.targets))
    learner = find_result_model(task, pack_result(result))
    loss, accuracy = learner.evaluate(data)
    if task is VALUES:
        assert loss == pytest.approx(np.mean((expected - data.targets) ** 2), rel=1e-5)
    else:
        assert accuracy == report.accuracy


def test_trees_of_a_run_that_is_under_way_are_the_whole_ones(tmp_path):
    data = examples(VALUES)
    model = ask(VALUES, "boosted-trees", data, 2 + 2 * 3 + 1, trees=5, depth=3)
    _, file = export(VALUES, model, tmp_path / "trees.onnx", data)
    assert file.logits(data.inputs)[:, 0] == pytest.approx(predict(read_result(model), data.inputs), rel=1e-6)
    with pytest.raises(TaskError, match="no whole tree yet"):
        find_result_model(VALUES, ask(VALUES, "boosted-trees", data, 3, trees=5, depth=3))


def test_normal_distributions_of_each_class_answer_as_those_of_scikit_learn(tmp_path):
    data = load_central_data("digits").train
    model = ask(DIGITS, "naive-bayes", data, 1, variances="class", smoothing=1e-3)
    test = load_central_data("digits").test
    report, file = export(DIGITS, model, tmp_path / "bayes.onnx", test)
    features = [DIGITS.model.prepare(part.inputs).reshape(len(part), -1).astype(float) for part in (data, test)]
    known = GaussianNB(var_smoothing=1e-3).fit(features[0], data.targets)
    assert file.logits(test.inputs) == pytest.approx(known.predict_log_proba(features[1]), rel=1e-5, abs=1e-5)
    assert file.classes == DIGITS.labels
    assert report.accuracy == known.score(features[1], test.targets) > 0.85
    chances = known.predict_log_proba(features[1])[np.arange(len(test)), test.targets]
    for task in (DIGITS, task_of(loss="mse", labels=DIGITS.labels), task_of(loss=None)):
        loss, accuracy = replace(find_result_model(DIGITS, model), task=task).evaluate(test)
        assert (loss, accuracy) == (pytest.approx(-chances.mean(), rel=1e-5), report.accuracy)


@pytest.mark.parametrize("name", ["naive-bayes", "k-means"])
def test_a_file_whose_classes_are_swapped_is_refused_however_unlikely_they_are(name, tmp_path, monkeypatch):
    data, draw = load_central_data("digits").train, QuadraticModel.draw
    options = {
        "naive-bayes": {"variances": "class", "smoothing": 1e-9},
        "k-means": {"clusters": 3, "columns": ",".join(map(str, range(20, 30)))},
    }
    model = ask(DIGITS, name, data, 1 if name == "naive-bayes" else 5, **options[name])

    def draw_swapped(model, *arguments):
        squares = None if model.squares is None else model.squares[:, ::-1]
        return draw(replace(model, linear=model.linear[:, ::-1], bias=model.bias[::-1], squares=squares), *arguments)

    monkeypatch.setattr(QuadraticModel, "draw", draw_swapped)
    with pytest.raises(TaskError, match="probabilities differ by up to"):
        export_onnx(DIGITS, model, tmp_path / "swapped.onnx", samples=data)


@pytest.mark.parametrize(("name", "rounds", "options"), [
    ("boosted-trees", 2 + 3 * 3, {"trees": 3, "depth": 3}), ("k-means", 6, {"clusters": 3, "columns": "0-3"}),
])  # fmt: skip
def test_samples_that_float32_changes_are_refused_and_smaller_ones_taken(name, rounds, options, tmp_path):
    small = examples(VALUES)
    small = replace(small, inputs=small.inputs.astype(np.int64))
    large = replace(small, inputs=small.inputs + 1_764_000_000)
    export(VALUES, ask(VALUES, name, small, rounds, **options), tmp_path / "small.onnx", small)
    model = ask(VALUES, name, large, rounds, **options)
    with pytest.raises(TaskError, match=r"of 300 inputs have another answer as float32.* up to 1\.764e\+09; give"):
        export(VALUES, model, tmp_path / "large.onnx", large)
    export_onnx(VALUES, model, tmp_path / "unchecked.onnx", samples=None)


def test_clusters_answer_with_the_nearest_centre_however_far_from_zero_and_no_target_judges_them(
    tmp_path, monkeypatch
):
    data = examples(VALUES, offset=1e6)
    model = ask(VALUES, "k-means", data, 8, clusters=3, columns="1-3")
    path = tmp_path / "clusters.onnx"
    report, file = export(VALUES, model, path, data)
    result, columns = read_result(model), data.inputs.reshape(SIZE, 4)[:, 1:].astype(float)
    distances = ((columns[:, None] - np.array(result["centres"])) ** 2).sum(axis=2)
    answers = file.predict(data.inputs)
    assert [row["class"] for row in answers] == [f"cluster-{number}" for number in distances.argmin(axis=1)]
    shares = np.exp(-0.5 * (distances - distances.min(axis=1, keepdims=True)) / (result["inertia"] / SIZE / 3))
    assert [row["probability"] for row in answers] == pytest.approx(1 / shares.sum(axis=1), abs=1e-5)
    assert report.accuracy is None
    with pytest.raises(TaskError, match="no target of task own says how good its clusters"):
        find_result_model(VALUES, model).evaluate(data)

    monkeypatch.setattr(onnx_model, "make_task", lambda _name, _options: VALUES)
    monkeypatch.setattr(VALUES, "read", lambda _path: data, raising=False)
    question = ModelCheckRequest(
        path=str(path), former_path=None, task="own", options={}, shard="-", role="trainer", test_fraction=0.1
    )
    scores = check_model(question)
    assert (scores.accuracy, scores.loss, scores.num_examples > 10) == (None, None, True)
    broken = replace(data, inputs=np.full_like(data.inputs, np.nan))
    monkeypatch.setattr(VALUES, "read", lambda _path: broken)
    with pytest.raises(onnx_model.DataError, match="a NaN"):
        check_model(question)


def test_components_are_the_coordinates_of_an_example(tmp_path):
    data = examples(VALUES, offset=1e4)
    model = ask(VALUES, "pca", data, 1, components=3, columns="0-3")
    _, file = export(VALUES, model, tmp_path / "components.onnx", data)
    columns = data.inputs.reshape(SIZE, 4).astype(float)
    known = PCA(3, svd_solver="full").fit(columns)
    signs = np.sign((np.array(read_result(model)["components"]) * known.components_).sum(axis=1))
    assert file.logits(data.inputs) == pytest.approx(signs * known.transform(columns), abs=1e-4)
    assert not file.has_classes


@pytest.mark.parametrize(
    ("name", "rounds", "options", "words"),
    [
        ("statistics", 2, {}, "the result is of no analysis whose answer is a model"),
        ("k-means", 1, {"clusters": 2, "columns": "0-3"}, "the first round of k-means finds no clusters"),
        ("k-means", 3, {"clusters": 2}, "column 'target' of the result is no input of task own, .* strategy.columns"),
        ("pca", 1, {}, "column 'target' of the result is no input of task own, .* strategy.columns"),
    ],
)
def test_what_answers_for_no_example_is_one_clear_line(name, rounds, options, words, tmp_path):
    model = ask(VALUES, name, examples(VALUES), rounds, **options)
    with pytest.raises(TaskError, match=words):
        export_onnx(VALUES, model, tmp_path / "none.onnx")
    assert not list(tmp_path.iterdir())


def test_a_feature_that_does_not_vary_and_weights_of_8_bits_are_refused(tmp_path):
    data = load_central_data("digits").train  # whose corners are always dark
    model = ask(DIGITS, "naive-bayes", data, 1, variances="class", smoothing=0.0)
    with pytest.raises(TaskError, match=r"does not vary within a class; strategy\.smoothing above 0"):
        find_result_model(DIGITS, model)
    model = ask(VALUES, "pca", examples(VALUES), 1, columns="0-3")
    with pytest.raises(TaskError, match="no weights that 8 bits could hold; leave out --quantise"):
        export_onnx(VALUES, model, tmp_path / "small.onnx", quantise=True)


def test_a_tensor_of_a_task_that_has_the_name_of_a_result_is_none():
    task = task_of(shapes=lambda: (SimpleNamespace(name="result"),))
    assert find_result_model(task, {"result": np.frombuffer(json.dumps({"centres": []}).encode(), np.uint8)}) is None
