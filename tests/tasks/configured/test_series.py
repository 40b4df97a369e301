"""`series`: rows of CSV files are cut into windows, within files and groups, and say what comes after them."""

from itertools import pairwise

import numpy as np
import pytest

import edgefl
from edgefl.core.errors import ConfigError, DataError
from edgefl.core.types import TrainConfig
from edgefl.tasks.configured import series as series_module
from edgefl.tasks.datasets import table_files
from edgefl.tasks.datasets.shards import inspect_shard
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.registry import make_task
from edgefl.tasks.stored_arrays import RowBuffer, is_stored

TREMOR = """
[run]
task = "series"
rounds = 15
[task]
columns = ["x", "y"]
window = 20
target = "state"
labels = ["calm", "shaking"]
group = "patient"
"""
STATES = {"columns": "x,y", "window": 20, "target": "state", "labels": "calm,shaking"}
COUNTING = {"columns": "x", "window": 4, "target": "t"}


def write_rows(path, rows, header="x,t,g"):
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def write_tremor(path, num_patients=6, seed=1):
    """Two axes of every patient, calm and shaking in turn: the deviation differs, the mean does not."""
    rng, rows = np.random.default_rng(seed), []
    for patient in range(num_patients):
        for state in range(12):
            scale = (0.2, 1.5)[state % 2]
            phase = np.arange(40) * rng.uniform(0.8, 1.2) + rng.uniform(0, 6)
            axes = scale * np.stack([np.sin(phase), np.cos(phase)], axis=1) + rng.normal(0, 0.1, (40, 2))
            rows += [(f"{x:.3f}", f"{y:.3f}", ("calm", "shaking")[state % 2], f"p{patient}") for x, y in axes]
    return write_rows(path, rows, "x,y,state,patient")


def cut(tmp_path, rows, **options):
    """The first rows of the windows and their targets; x and t of row i are i and 100 + i."""
    path = write_rows(tmp_path / "a.csv", [(i, 100 + i, group) for i, group in enumerate(rows)])
    data = make_task("series", COUNTING | options).read(str(path))
    assert (data.inputs[:, 0] == data.inputs[:, 0, :1] + np.arange(data.inputs.shape[2])).all()
    return list(zip(data.inputs[:, 0, 0].tolist(), data.targets.tolist(), strict=True))


def test_windows_follow_each_other_and_have_the_target_of_their_last_row(tmp_path):
    assert cut(tmp_path, "a" * 10) == [(0, 103), (4, 107)]
    assert cut(tmp_path, "a" * 10, step=3) == [(0, 103), (3, 106), (6, 109)]


def cut_by_hand(rows, *, step, ahead, horizon, group):
    """First row and targets of each window of rows (x, t, g), of one file."""
    found, starts = [], [0, *(i for i in range(1, len(rows)) if group and rows[i][2] != rows[i - 1][2]), len(rows)]
    for start, stop in pairwise(starts):
        for first in range(start, stop - (3 + ahead + horizon) + 1, step):
            target = [row[1] for row in rows[first + 3 + ahead :][:horizon]]
            found.append((rows[first][0], target))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"step": 1, "ahead": 0, "horizon": 1},
        {"step": 3, "ahead": 2, "horizon": 1},
        {"step": 9, "ahead": 0, "horizon": 2},
        {"step": 40, "ahead": 1, "horizon": 3},
    ],
)
@pytest.mark.parametrize("group", ["", "g"])
@pytest.mark.parametrize("chunk_rows", [1, 2, 5, 64])
def test_windows_are_the_same_however_many_rows_are_read_at_once(tmp_path, monkeypatch, options, group, chunk_rows):
    monkeypatch.setattr(table_files, "CHUNK_ROWS", chunk_rows)
    rng, expected, folder = np.random.default_rng(5), [], tmp_path / "board"
    folder.mkdir()
    for name in "ab":
        sizes = rng.integers(1, 30, 8)
        rows = [(float(i), 500.0 + i, f"g{k % 3}") for i, k in enumerate(np.repeat(np.arange(8), sizes))]
        write_rows(folder / f"{name}.csv", rows)
        expected += cut_by_hand(rows, group=group, **options)
    data = make_task("series", {**COUNTING, **options, "group": group}).read(str(folder))
    assert data.inputs[:, 0, 0].tolist() == [first for first, _ in expected]
    assert data.targets.reshape(len(data), -1).tolist() == [target for _, target in expected]
    assert (data.inputs == data.inputs[:, :, :1] + np.arange(4)).all()
    assert (data.groups is not None) == bool(group)


def test_a_file_larger_than_what_is_held_leaves_its_windows_in_a_temporary_file(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "a.csv", [(i, i % 2, "a") for i in range(3000)])
    held = make_task("series", COUNTING | {"step": 1}).read(str(path))
    monkeypatch.setattr(table_files, "CHUNK_ROWS", 100)
    monkeypatch.setattr(series_module, "RowBuffer", lambda: RowBuffer(4096))
    monkeypatch.setattr(series_module, "BLOCK_BYTES", 40)
    stored = make_task("series", COUNTING | {"step": 1}).read(str(path))
    assert is_stored(stored.inputs)
    np.testing.assert_array_equal(stored.inputs[:], held.inputs)
    np.testing.assert_array_equal(stored.targets, held.targets)


def test_a_forecast_has_the_target_of_a_later_row_which_may_be_an_input(tmp_path):
    assert cut(tmp_path, "a" * 10, ahead=3) == [(0, 106)]
    assert cut(tmp_path, "a" * 10, ahead=2, target="x") == [(0, 5), (4, 9)]


def read_targets(tmp_path, num_rows, **options):
    """Targets of the windows of rows i with x = i, t = 100 + i."""
    path = write_rows(tmp_path / "a.csv", [(i, 100 + i, "ab"[i >= 12]) for i in range(num_rows)])
    return make_task("series", COUNTING | options).read(str(path)).targets.tolist()


def test_a_horizon_has_the_rows_that_follow_a_column_after_the_other(tmp_path):
    assert read_targets(tmp_path, 10, ahead=1, horizon=3) == [[104, 105, 106]]
    assert read_targets(tmp_path, 10, ahead=2, horizon=1) == [105, 109]
    both = {"target": "x,t", "ahead": 1, "horizon": 2, "target_mean": 4.0, "target_scale": 2.0}
    assert read_targets(tmp_path, 10, **both) == [[0, 0.5, 50, 50.5], [2, 2.5, 52, 52.5]]


def test_a_file_too_short_for_a_horizon_has_no_window_beside_one_that_has(tmp_path):
    folder = tmp_path / "board"
    folder.mkdir()
    for name, num_rows in (("a", 10), ("b", 5)):
        write_rows(folder / f"{name}.csv", [(i, 100 + i, "a") for i in range(num_rows)])
    task = make_task("series", COUNTING | {"ahead": 1, "horizon": 3})
    assert task.read(str(folder)).targets.tolist() == [[104, 105, 106]]
    with pytest.raises(DataError, match="holds no 7 rows of one group for a window"):
        task.read(str(folder / "b.csv"))


def test_no_horizon_reaches_into_another_group(tmp_path):
    assert read_targets(tmp_path, 20, ahead=1, horizon=4, group="g") == [
        [104, 105, 106, 107],
        [108, 109, 110, 111],
        [116, 117, 118, 119],
    ]
    assert read_targets(tmp_path, 20, ahead=1, horizon=5, group="g") == [[104, 105, 106, 107, 108]]


def test_a_model_of_a_horizon_has_an_output_for_each_value_of_it():
    task = make_task("series", COUNTING | {"target": "x,t", "ahead": 1, "horizon": 6, "model": "linear"})
    assert (task.num_outputs, task.shapes()[-1].shape, task.shard_options["horizon"]) == (12, (12,), "6")


def test_no_window_spans_two_groups_or_two_files(tmp_path):
    assert cut(tmp_path, "a" * 5 + "b" * 9 + "a" * 3, group="g") == [(0, 103), (5, 108), (9, 112)]
    assert cut(tmp_path, "a" * 6 + "b" * 5, group="g", ahead=1) == [(0, 104), (6, 110)]
    folder = tmp_path / "days"
    folder.mkdir()
    for day in range(2):
        write_rows(folder / f"{day}.csv", [(10 * day + i, i, "a") for i in range(6)])
    found = make_task("series", COUNTING | {"group": "g"}).read(str(folder))
    assert (found.inputs[:, 0, 0].tolist(), found.groups.tolist()) == ([0, 10], ["a", "a"])


def test_an_example_is_columns_by_rows_and_scaled_by_column(tmp_path):
    task = make_task(
        "series", COUNTING | {"columns": "x,t", "target": "", "loss": "reconstruction", "means": "0,100"}
    )
    path = write_rows(tmp_path / "a.csv", [(i, 100 + 2 * i, "a") for i in range(4)])
    data = task.read(str(path))
    assert (task.input_shape, data.inputs.shape) == ((2, 4), (1, 2, 4))
    np.testing.assert_array_equal(task.model.prepare(data.inputs)[0], [[0, 1, 2, 3], [0, 2, 4, 6]])


@pytest.mark.parametrize("model", ["mlp", "linear", "cnn", "gru"])
def test_shapes_are_known_without_data_and_every_model_learns_what_its_shapes_say(tmp_path, model):
    if model in {"cnn", "gru"}:
        pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
    task = make_task("series", STATES | {"model": model})
    data = task.read(str(write_tremor(tmp_path / "a.csv", 2)))
    learner = task.learner()
    learner.load(task.init(7))
    assert [(spec.name, spec.shape) for spec in task.shapes()] == [(n, v.shape) for n, v in learner.read().items()]
    before = learner.evaluate(data)[0]
    plan = TrainConfig(epochs=20.0, batch_size=8, learning_rate=0.1)
    result = train(learner, data, plan, np.random.default_rng(1), clock=lambda: 0.0, on_iteration=lambda *_: False)
    learner.load({name: task.init(7)[name] + step for name, step in result.displacement.items()})
    assert learner.evaluate(data)[0] < (0.98 if model == "linear" else 0.8) * before


def test_the_first_weights_of_gated_units_lie_where_torch_draws_them():
    first = make_task("series", STATES | {"model": "gru", "hidden": 16}).init(7)
    assert {name: value.shape for name, value in first.items()} == {
        "gru.weight_ih_l0": (48, 2), "gru.weight_hh_l0": (48, 16), "gru.bias_ih_l0": (48,), "gru.bias_hh_l0": (48,),
        "fc1.weight": (2, 16), "fc1.bias": (2,),
    }  # fmt: skip
    for name, value in first.items():
        assert 0.15 < abs(value).max() <= 0.25, name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "task.columns is missing: series cannot do without"),
        ({"columns": "a", "target": "t"}, "task.window is missing: series cannot do without"),
        ({"columns": "a", "window": 3, "target": "t"}, "task.window must be from 4 to 4096, got 3"),
        ({"columns": "a", "window": 4.5, "target": "t"}, "task.window must be a whole number, got 4.5"),
        ({"columns": "a_0..999", "window": 2000, "target": "t"}, "are 2,000,000 numbers, at most are 1,000,000"),
        ({"columns": "a", "window": 8, "target": "t", "step": -1}, "task.step must be from 0 to 4096, got -1"),
        ({"columns": "a", "window": 8, "target": "t", "ahead": 100_001}, "task.ahead must be from 0 to 100000"),
        ({"columns": "a", "window": 8, "target": "t", "horizon": 0}, "task.horizon must be from 1 to 1024, got 0"),
        (
            {"columns": "a", "window": 8, "target": "t,u", "horizon": 513},
            "task.horizon = 513 of 2 target columns are 1,026 values, at most are 1,024",
        ),
        (
            {"columns": "a", "window": 8, "target": "t", "horizon": 2, "loss": "quantile:0.1,0.9"},
            "'quantile:0.1,0.9' has 2 quantiles, which are for one target value, got 2",
        ),
        (
            {**STATES, "horizon": 2},
            "task.horizon of several rows is for targets of values without labels and with one loss, got 2",
        ),
        ({"columns": "a", "window": 8, "target": "a"}, "task.columns must not name 'a'"),
        (
            {"columns": "a", "window": 8, "target": "t", "model": "lstm"},
            "linear or logistic or cnn or gru, got 'lstm'",
        ),
        ({"columns": "a", "window": 8, "target": "t", "model": "gru", "hidden": "8,8"}, "gru must be one number"),
        ({"columns": "a", "window": 8, "target": "t", "model": "cnn", "hidden": 8}, "for the models mlp and gru"),
        ({"columns": "a", "window": 8, "loss": "reconstruction", "model": "cnn"}, "needs model = mlp or linear"),
    ],
)
def test_options_that_make_no_sense_are_one_clear_line(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        make_task("series", options)
    assert "\n" not in str(error.value)


def test_a_board_with_too_few_rows_says_so_and_counts_rows_without_a_run_file(tmp_path):
    path = write_rows(tmp_path / "a.csv", [(1, 2, "a"), (1, 2, "a"), (1, 2, "b"), (1, 2, "b")])
    assert inspect_shard("series", str(path)).num_examples == 4
    assert len(make_task("series", COUNTING).read(str(path))) == 1
    with pytest.raises(DataError, match="holds no 4 rows of one group for a window"):
        make_task("series", COUNTING | {"group": "g"}).read(str(path))


def test_windows_that_do_not_fit_into_memory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("edgefl.tasks.configured.series.MAX_CELLS", 15)
    with pytest.raises(DataError, match="makes windows of more than 15 numbers; take a larger step"):
        cut(tmp_path, "a" * 10, step=1)
    with pytest.raises(DataError, match="makes windows of more than 15 numbers; take a larger step"):
        read_targets(tmp_path, 20, ahead=1, horizon=12)


def test_a_csv_file_of_sensors_and_a_run_file_of_ten_lines_train_a_model(tmp_path):
    assert len(TREMOR.split("\n")) <= 15
    (tmp_path / "run.toml").write_text(TREMOR)
    data = write_tremor(tmp_path / "tremor.csv")
    result = edgefl.simulate(tmp_path / "run.toml", devices=3, data=data, scheme="natural", root=tmp_path / "history")
    assert (result.status, result.metrics["accuracy"] > 0.9) == ("finished", True), result.metrics


def test_boards_forecast_several_rows_at_once_better_than_the_last_value_does(tmp_path):
    rng, rows = np.random.default_rng(1), []
    for board in "abc":
        waves = np.sin(np.arange(1500) * 0.25 + rng.uniform(0, 6)) + rng.normal(0, 0.05, 1500)
        rows += [(f"{x:.3f}", 0, board) for x in waves]
    data = write_rows(tmp_path / "waves.csv", rows)
    options = {"columns": ["x"], "target": ["x"], "group": "g", "window": 20, "ahead": 1, "horizon": 8, "step": 7}
    plan = {"name": "fedavg", "learning_rate": 0.2, "epochs": 3.0}
    found = edgefl.simulate(
        {"run": {"task": "series", "rounds": 8}, "task": options, "strategy": plan},
        devices=3, data=data, scheme="natural", root=tmp_path / "history",
    )  # fmt: skip
    windows = make_task("series", options).read(str(data))
    stays = np.sqrt(np.mean(np.square(windows.inputs[:, :, -1] - windows.targets)))
    assert windows.targets.shape[1] == 8
    assert found.metrics["rmse"] < 0.3 * stays, (found.metrics, stays)


@pytest.mark.extended
def test_three_devices_train_live_each_on_a_csv_file_of_its_own(tmp_path):
    (tmp_path / "run.toml").write_text(TREMOR + "[devices]\nmin = 3\n")
    shards = [write_tremor(tmp_path / f"board-{seed}.csv", 2, seed) for seed in range(3)]
    result = edgefl.run(tmp_path / "run.toml", devices=shards, root=tmp_path / "fleet")
    assert (result.status, len({row["device_id"] for row in result.updates})) == ("finished", 3)
    assert result.metrics["accuracy"] > 0.8
