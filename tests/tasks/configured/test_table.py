"""`table`: options of a run file become a model, and rows of CSV files its examples."""

import numpy as np
import pytest

import edgefl
from edgefl.core.errors import ConfigError, DataError
from edgefl.device.inference.table_rows import read_unlabelled, write_rows
from edgefl.tasks.datasets.central import create_shards
from edgefl.tasks.datasets.shards import inspect_shard, load_task_data, read_metadata
from edgefl.tasks.metrics.evaluation import make_task_metrics
from edgefl.tasks.registry import make_task

WINDOW = {"columns": "indoor,outdoor", "target": "is_open", "labels": "closed,open"}
LOAD = {"columns": ["indoor", "outdoor"], "target": "load", "target_mean": 10, "target_scale": 5}
GREENHOUSE = """
[run]
task = "table"
rounds = 30
[task]
columns = ["indoor", "outdoor"]
target = "is_open"
labels = ["closed", "open"]
means = [22, 15]
scales = [6, 8]
"""


@pytest.fixture
def readings(tmp_path):
    return write_readings(tmp_path / "readings.csv", 900)


def write_readings(path, num_rows, seed=3):
    """A window is open where it is warm inside and not cold outside, and the load is a linear function."""
    rng = np.random.default_rng(seed)
    indoor, outdoor = rng.normal(22.0, 6.0, num_rows), rng.normal(15.0, 8.0, num_rows)
    is_open = np.where((indoor > 22.0) & (outdoor > 10.0), "open", "closed")
    lines = [
        f"{row},{a:.3f},{b:.3f},{word},{0.5 * a - 0.25 * b + 3:.4f},h{row % 3}"
        for row, (a, b, word) in enumerate(zip(indoor, outdoor, is_open, strict=True))
    ]
    path.write_text("\n".join(["id,indoor,outdoor,is_open,load,house", *lines]) + "\n")
    return path


def test_columns_become_inputs_in_the_order_of_the_run_file_and_labels_classes(readings):
    task = make_task("table", WINDOW | {"columns": "outdoor,indoor"})
    data = task.read(str(readings))
    rows = [line.split(",") for line in readings.read_text().splitlines()[1:]]
    np.testing.assert_allclose(data.inputs, [[float(row[2]), float(row[1])] for row in rows], rtol=1e-6)
    assert data.targets.tolist() == [int(row[3] == "open") for row in rows]
    assert (data.inputs.dtype, task.input_shape, task.labels) == (np.float32, (2,), ("closed", "open"))


def test_each_target_has_a_mean_and_a_scale_of_its_own_or_all_have_one(readings):
    two = {"columns": "outdoor", "target": ["indoor", "load"]}
    rows = [line.split(",") for line in readings.read_text().splitlines()[1:]]
    values = np.array([[float(row[1]), float(row[4])] for row in rows])
    own = make_task("table", two | {"target_mean": (22, 10), "target_scale": "6,2"})
    np.testing.assert_allclose(own.read(str(readings)).targets, (values - [22, 10]) / [6, 2], atol=1e-5)
    assert (own.shard_options["target_mean"], own.shard_options["target_scale"]) == ("22.0,10.0", "6.0,2.0")
    same = make_task("table", two | {"target_mean": 10, "target_scale": (2, 2)})
    np.testing.assert_allclose(same.read(str(readings)).targets, (values - 10) / 2, atol=1e-5)
    assert (same.shard_options["target_mean"], same.shard_options["target_scale"]) == ("10.0", "2.0")


def test_values_and_inputs_are_shifted_and_scaled_as_the_run_file_says(readings):
    task = make_task("table", LOAD | {"means": (20, 10), "scales": 4})
    data = task.read(str(readings))
    load = np.array([float(line.split(",")[4]) for line in readings.read_text().splitlines()[1:]])
    np.testing.assert_allclose(data.targets, (load - 10) / 5, atol=1e-5)
    np.testing.assert_allclose(task.learner().prepare(np.array([[24.0, 6.0]])), [[1.0, -1.0]])


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"model": "linear"}, [(2, 2), (2,)]),
        ({"model": "logistic"}, [(2, 2), (2,)]),
        ({}, [(32, 2), (32,), (2, 32), (2,)]),
        ({"hidden": [8, 4]}, [(8, 2), (8,), (4, 8), (4,), (2, 4), (2,)]),
    ],
)
def test_shapes_are_known_without_data(options, sizes):
    assert [spec.shape for spec in make_task("table", WINDOW | options).shapes()] == sizes


def test_several_values_quantiles_and_a_reconstruction_have_as_many_outputs_as_they_need(readings):
    two = make_task("table", {"columns": "indoor", "target": "load,outdoor"})
    assert (two.shapes()[-1].shape, two.read(str(readings)).targets.shape) == ((2,), (900, 2))
    band = make_task("table", LOAD | {"loss": "quantile:0.1,0.9"})
    assert (band.shapes()[-1].shape, band.metrics) == ((2,), None)
    copy = make_task("table", {"columns": "indoor,outdoor", "loss": "reconstruction", "hidden": 1})
    assert copy.shapes()[-1].shape == (2,)
    assert copy.learner().evaluate(copy.read(str(readings)))[0] > 0


def test_values_have_metrics_by_default_and_classes_the_accuracy():
    assert make_task("table", LOAD).metrics == {"rmse": "min", "r2": "max"}
    assert make_task("table", WINDOW).metrics is None
    assert make_task("table", WINDOW | {"metrics": ["auroc", "f1:open"]}).metrics == {
        "auroc": "max",
        "f1:open": "max",
    }


def test_quantiles_have_metrics_and_one_that_is_of_single_values_is_refused_before_the_run():
    named = ["pinball:0.1+0.9", "coverage"]
    band = make_task("table", LOAD | {"loss": "quantile:0.1,0.9", "metrics": named})
    assert list(make_task_metrics(band).metrics) == named
    for loss, wrong in (("quantile:0.1,0.9", "pinball:0.9"), ("quantile:0.1,0.5,0.9", named[0]), ("mse", named[1])):
        with pytest.raises(ConfigError, match=r"(targets of a reg|a metric of quant)"):
            make_task_metrics(make_task("table", LOAD | {"loss": loss, "metrics": wrong}))


def test_the_metrics_of_a_reconstruction_are_of_the_standardised_input(readings, tmp_path):
    names = ["mae", "error-quantile:0.5"]
    options = {"columns": ["indoor", "outdoor"], "means": 15, "scales": 4, "loss": "reconstruction:mae", "hidden": 1}
    tables = {"run": {"task": "table", "rounds": 2}, "task": options | {"metrics": names}}
    result = edgefl.simulate(tables, devices=2, data=readings, scheme="iid", root=tmp_path / "d")
    assert result.metrics["mae"] == pytest.approx(result.metrics["loss"], abs=1e-6)
    assert result.metrics["error-quantile:0.5"] > 0


def test_columns_with_numbers_are_named_by_a_range():
    task = make_task("table", {"columns": "age,pixel_0..63", "target": "t"})
    assert task.shard_options["columns"].split(",")[:3] == ["age", "pixel_0", "pixel_1"]
    assert task.input_shape == (65,)
    assert (
        make_task("table", {"columns": "c_08..11", "target": "t"}).shard_options["columns"] == "c_08,c_09,c_10,c_11"
    )


@pytest.mark.parametrize(
    ("labels", "cells", "classes"),
    [
        ("closed,open", ["open", "0", "1.0", "closed"], [1, 0, 1, 0]),
        ("3,1", ["3", "1.00", "3.0"], [0, 1, 0]),
        ("0..9", ["9", "0"], [9, 0]),
    ],
)
def test_a_class_is_its_name_or_its_number_where_no_name_is_a_number(tmp_path, labels, cells, classes):
    path = tmp_path / "a.csv"
    path.write_text("x,y\n" + "".join(f"1,{cell}\n" for cell in cells))
    task = make_task("table", {"columns": "x", "target": "y", "labels": labels})
    assert task.read(str(path)).targets.tolist() == classes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "y"}, "task.columns is missing: table cannot do without"),
        ({"columns": ""}, "task.columns must name at least 1, got none"),
        ({"columns": "a,,b", "target": "y"}, "task.columns must hold names of 1 to 100 characters, got ''"),
        ({"columns": "a,a", "target": "y"}, "task.columns names 'a' twice"),
        ({"columns": "a_0..4096", "target": "y"}, "'a_0..4096' are 4097 more; task table takes not so many"),
        ({"columns": "a_9..1", "target": "y"}, "must count upwards"),
        ({"columns": "a"}, "task.target must name the column that task table predicts"),
        ({"columns": "a", "target": "a"}, "task.columns must not name 'a'"),
        ({"columns": "a", "target": "y", "labels": "x"}, "task.labels must name at least 2, got x"),
        (
            {"columns": "a", "target": "y,z", "labels": "u,v"},
            "task.labels must say of which target it is, such as y/u, got",
        ),
        ({"columns": "a", "target": "y,z", "labels": "y/u"}, "task.labels must name at least 2 classes of y, got u"),
        (
            {"columns": "a", "target": "y,z", "loss": "x/mae"},
            "task.loss must say of which target it is, such as y/mae",
        ),
        ({"columns": "a", "target": "y,z", "loss": "y/cross-entropy"}, "task.loss of y must be a loss of values"),
        ({"columns": "a", "target": "y,z", "loss": "y/mae", "loss_weights": "z/b"}, "loss_weights must be numbers"),
        ({"columns": "a", "target": "y,z", "loss": "y/mae", "loss_weights": "z/-1"}, "must be finite and at least 0"),
        (
            {"columns": "a", "target": "y,z", "loss": "y/mae", "metrics": "rmse"},
            "task.metrics must say of which target",
        ),
        (
            {"columns": "a", "target": "y,z v", "loss": "y/mae"},
            "loss of 'z v': a target needs the name of a parameter",
        ),
        (
            {"columns": "a", "target": "y", "loss": "mae", "loss_weights": "y/2"},
            "loss_weights are of several targets",
        ),
        ({"columns": "a", "target": "y", "labels": "u,v", "loss": "mae"}, "cross-entropy or mse where there are lab"),
        ({"columns": "a", "target": "y", "labels": "u,v", "target_mean": 3}, "mean nothing with labels"),
        ({"columns": "a", "target": "y,z", "target_mean": (1, 2, 3)}, "takes one number, or 2, got 3"),
        ({"columns": "a", "target": "y,z", "target_scale": (1, 0)}, "above 0, got 0"),
        ({"columns": "a", "target": "y", "loss": "cross-entropy"}, "task.labels must name the classes"),
        (
            {"columns": "a", "target": "y", "loss": "reconstruction"},
            "task.target means nothing with a reconstruction",
        ),
        ({"columns": "a", "target": "y", "loss": "hinge"}, "there is no loss 'hinge'"),
        ({"columns": "a", "target": "y", "metrics": "rsme"}, "unknown metric 'rsme'"),
        ({"columns": "a", "target": "y", "model": "tree"}, "must be mlp or linear or logistic, got 'tree'"),
        ({"columns": "a", "target": "y", "model": "linear", "hidden": 4}, "task.hidden is for the model mlp"),
        ({"columns": "a", "target": "y", "hidden": 4097}, "whole numbers from 1 to 4096, got '4097'"),
        ({"columns": "a", "target": "y", "hidden": "1,2,3,4,5"}, "task.hidden must be 1 to 4 whole numbers"),
        ({"columns": "a_0..4000", "target": "y", "hidden": "4096,4096"}, "33,177,601 parameters, at most are 20,000"),
        ({"columns": "a,b", "target": "y", "means": "1,2,3"}, "takes one number, or 2, got 3"),
        ({"columns": "a", "target": "y", "scales": 0}, "task.scales must be finite and above 0, got 0"),
        ({"columns": "a", "target": "y", "means": "warm"}, "task.means must be numbers, got 'warm'"),
        ({"columns": "a", "target": "y", "missing": "guess"}, "task.missing must be one of 'refuse', 'drop'"),
        ({"columns": "a", "target": "y", "window": 3}, "table has no such setting"),
    ],
)
def test_options_that_make_no_sense_are_one_clear_line(options, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")) as error:
        make_task("table", options)
    assert "\n" not in str(error.value)


def test_a_shard_is_counted_without_a_run_file_and_described_in_detail(readings):
    assert inspect_shard("table", str(readings)).num_examples == 900
    details = inspect_shard("table", str(readings), is_detailed=True).details
    indoor = np.array([float(line.split(",")[1]) for line in readings.read_text().splitlines()[1:]])
    assert f"indoor: mean {indoor.mean():.6g}, deviation {indoor.std():.6g}" in details
    assert "is_open: texts" in details


def test_shards_are_cut_with_the_options_of_a_run_file_and_taken_by_those_alone(readings, tmp_path):
    options = LOAD | {"group": "house"}
    paths = create_shards("table", "natural", 3, tmp_path / "shards", readings, options=options)
    assert sorted(read_metadata(path).groups for path in paths) == [("h0",), ("h1",), ("h2",)]
    assert sum(inspect_shard("table", str(path)).num_examples for path in paths) < 900, "a part is the test's"
    assert len(load_task_data(make_task("table", options), paths[0])) == read_metadata(paths[0]).num_examples
    with pytest.raises(DataError, match="was cut with columns = 'indoor,outdoor', the run file has 'outdoor'"):
        load_task_data(make_task("table", {"columns": "outdoor", "target": "load"}), paths[0])
    card = paths[0].with_suffix(".json")
    card.write_text(card.read_text().replace('"options": {', '"options": {"horizon": "3", '))
    with pytest.raises(DataError, match="was cut with horizon = '3', the run file has 'none'; cut it again"):
        load_task_data(make_task("table", options), paths[0])


@pytest.mark.parametrize(("columns", "message"), [("indoor,attic", "no column 'attic'"), ("house", "must hold num")])
def test_a_board_whose_table_is_another_one_says_so(readings, columns, message):
    with pytest.raises(DataError, match=message):
        make_task("table", WINDOW | {"columns": columns}).read(str(readings))


def test_a_cell_that_is_no_label_is_refused(readings):
    with pytest.raises(DataError, match=r"column 'is_open' must hold one of shut, ajar; row 1 holds something else$"):
        make_task("table", WINDOW | {"labels": "shut,ajar"}).read(str(readings))


def test_a_csv_file_and_a_run_file_of_ten_lines_train_a_model(readings, tmp_path):
    run_file = tmp_path / "run.toml"
    run_file.write_text(GREENHOUSE)
    assert len(GREENHOUSE.split("\n")) <= 15
    result = edgefl.simulate(run_file, devices=4, data=readings, root=tmp_path / "history")
    assert result.status == "finished"
    assert result.metrics["accuracy"] > 0.85, "three of four windows are closed"


def write_houses(tmp_path):
    return [write_readings(tmp_path / f"house-{seed}.csv", 120, seed) for seed in range(3)]


@pytest.mark.extended
def test_three_devices_train_live_each_on_a_csv_file_of_its_own(tmp_path):
    run_file = tmp_path / "run.toml"
    run_file.write_text(GREENHOUSE + "[devices]\nmin = 3\n")
    result = edgefl.run(run_file, devices=write_houses(tmp_path), root=tmp_path / "fleet")
    assert (result.status, len({row["device_id"] for row in result.updates})) == ("finished", 3)
    assert result.metrics["accuracy"] > 0.85


@pytest.mark.extended
def test_real_values_are_predicted_as_well_as_by_least_squares_on_all_data(tmp_path):
    datasets = pytest.importorskip("sklearn.datasets", reason="needs scikit-learn: pip install '.[demo]'")
    inputs, progression = datasets.load_diabetes(return_X_y=True)
    path = tmp_path / "patients.csv"
    header = ",".join([*(f"x_{index}" for index in range(10)), "progression"])
    np.savetxt(path, np.column_stack([inputs, progression]), "%.6f", delimiter=",", header=header, comments="")
    task = {"columns": "x_0..9", "target": "progression", "model": "linear", "scales": 0.05}
    task |= {"target_mean": 150.0, "target_scale": 75.0}
    config = {"run": {"task": "table", "rounds": 40}, "task": task}
    result = edgefl.simulate(config, devices=3, data=path, root=tmp_path / "history")
    parsed = make_task("table", task)
    train, test = split_as_central(parsed.read(str(path)))
    design = np.column_stack([train.inputs, np.ones(len(train))])
    weights = np.linalg.lstsq(design, train.targets, rcond=None)[0]
    least = float(np.mean((np.column_stack([test.inputs, np.ones(len(test))]) @ weights - test.targets) ** 2))
    assert result.metrics["loss"] < 1.03 * least


def split_as_central(data):
    from edgefl.tasks.datasets.shards import split_train_test  # noqa: PLC0415 beside its use

    return split_train_test(data, 0.2, salt="central")


def test_a_group_of_a_long_name_is_refused_since_each_row_would_take_its_room(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(f"a,b,g\n1,2,x\n1,2,{'x' * 257}\n")
    with pytest.raises(DataError, match="column 'g' must name groups in at most 256 characters, one has 257"):
        make_task("table", {"columns": "a", "target": "b", "group": "g"}).read(str(path))


SEVERAL = {
    "columns": ["indoor", "outdoor"], "target": ["is_open", "load"], "labels": ["is_open/closed", "is_open/open"],
    "loss": ["load/quantile:0.1", "0.9"], "loss_weights": ["load/0.5"], "target_mean": 10, "target_scale": 5,
    "means": [22, 15], "scales": [6, 8],
}  # fmt: skip


def test_several_targets_have_a_loss_each_and_are_read_by_name(readings):
    task = make_task("table", SEVERAL)
    data, rows = task.read(str(readings)), [line.split(",") for line in readings.read_text().splitlines()[1:]]
    np.testing.assert_allclose(data.targets["load"], [(float(row[4]) - 10) / 5 for row in rows], atol=1e-5)
    assert data.targets["is_open"].tolist() == [int(row[3] == "open") for row in rows]
    assert dict(task.loss) == {"is_open": "cross-entropy", "load": "quantile:0.1,0.9"}
    assert (dict(task.loss_weights), dict(task.num_outputs)) == ({"load": 0.5}, {"is_open": 2, "load": 2})
    assert (dict(task.metrics), task.model.sizes[-1]) == ({"is_open/accuracy": "max"}, 4)
    assert make_task_metrics(make_task("table", SEVERAL | {"metrics": "load/coverage"}))
    plain = make_task("table", SEVERAL | {"loss": "", "labels": ["is_open/closed", "is_open/open"]})
    assert dict(plain.metrics) == {"is_open/accuracy": "max", "load/rmse": "min"}


@pytest.mark.parametrize("name", ["table", "series"])
def test_a_run_file_trains_a_class_and_a_value_at_once(readings, tmp_path, name):
    options = SEVERAL | {"loss": "load/huber", "metrics": ["load/mae", "is_open/accuracy"]}
    if name == "series":
        options |= {"window": 4, "step": 1}
    tables = {"run": {"task": name, "rounds": 30}, "task": options, "strategy": {"name": "fedavg", "epochs": 2}}
    result = edgefl.simulate(tables | {"simulation": {"devices": 3}}, data=str(readings), root=tmp_path / "root")
    assert result.metrics["load/mae"] < 0.15
    assert result.metrics["is_open/accuracy"] > 0.9


def test_rows_without_targets_are_filled_with_a_class_of_each(tmp_path):
    task = make_task("table", SEVERAL | {"labels": ["is_open/1", "is_open/2"]})
    write_rows(tmp_path / "rows.csv", [["indoor", "outdoor"], ["20", "10"]], task)
    assert read_unlabelled(task, tmp_path / "rows.csv").tolist() == [[20.0, 10.0]]
