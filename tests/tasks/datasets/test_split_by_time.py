"""Whole periods of time are kept for testing, for ever; what reaches over their edge is on neither side."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgefl
from edgefl.cli.main import main
from edgefl.core.errors import ConfigError, DataError
from edgefl.core.types import Dataset
from edgefl.device.inference.onnx_model import ModelCheckRequest, select_check_data
from edgefl.device.training.task_cache import TaskCache
from edgefl.simulation.backends.partitioned_data import read_shards
from edgefl.tasks.datasets.central import create_shards
from edgefl.tasks.datasets.shards import find_sides, load_task_data, read_metadata, split_train_test, write_shard
from edgefl.tasks.registry import make_task

DAY_S = 86_400.0
HOURS = {"columns": "c", "target": "t", "time": "when", "split_period": "1d"}
TEST_DAYS = [7, 12, 21, 26, 33, 37]
"""Of the first 40 since 1970, by a fraction of a tenth."""
RUN_FILE = """
[run]
task = "series"
rounds = 2
local_test_fraction = 0.1
[task]
columns = ["c"]
target = "t"
window = 6
step = 1
time = "when"
split_period = "1d"
means = 700
scales = 400
[devices]
min = 2
[simulation]
devices = 2
scheme = "iid"
"""


def of_times(times, weak=None):
    times = np.asarray(times, float)
    rows = np.arange(len(times))
    return Dataset(inputs=rows[:, None], targets=rows, times=times, weak=weak)


def write_hours(path, num_days, form=lambda hour: str(3600 * hour)):
    """A row an hour; c is its number, and t the sine of it."""
    rows = [f"{form(hour)},{hour},{np.sin(hour):.4f}" for hour in range(24 * num_days)]
    path.write_text("\n".join(["when,c,t", *rows]) + "\n")
    return path


def write_date(hour):
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(hours=hour)).strftime("%Y-%m-%d %H:%M:%S")


def test_the_periods_of_each_side_are_the_same_on_every_machine():
    in_train, in_test = find_sides(of_times(DAY_S * np.arange(40) + 7.0), 0.1, period_s=DAY_S)
    assert np.flatnonzero(in_test).tolist() == TEST_DAYS
    assert (in_train == ~in_test).all()
    assert (find_sides(of_times(DAY_S * np.arange(40)), 0.1, "salt", period_s=DAY_S)[1] != in_test).any()


def test_a_period_goes_to_one_side_and_about_the_asked_fraction_to_the_test():
    times = np.random.default_rng(1).uniform(0, 4000 * 60, 20_000)
    train, test = split_train_test(of_times(times), 0.1, period_s=60.0)
    assert len(train) + len(test) == 20_000
    assert not {*(train.times // 60)} & {*(test.times // 60)}
    assert 0.08 < len(test) / 20_000 < 0.12
    assert [len(part) for part in split_train_test(of_times(times), 0.0, period_s=60.0)] == [20_000, 0]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-1e9, 1e9), max_size=40), st.integers(0, 40), st.floats(0, 0.9))
def test_data_that_grows_never_moves_an_example(times, num_first, fraction):
    whole = find_sides(of_times(times), fraction, period_s=3600.0)
    first = find_sides(of_times(times[:num_first]), fraction, period_s=3600.0)
    for small, large in zip(first, whole, strict=True):
        assert small.tolist() == large[:num_first].tolist()


def test_an_example_that_reaches_into_the_other_side_or_over_more_than_two_periods_is_on_neither():
    spans = [[0, 0], [0, 1], [1, 2], [2, 2], [2, 3], [11, 12], [12, 14], [8, 10]]  # 2, 11, 12 and 14 are tested on
    in_train, in_test = find_sides(of_times(DAY_S * np.array(spans)), 0.25, period_s=DAY_S)
    assert [spans[row] for row in np.flatnonzero(in_train)] == [[0, 0], [0, 1]]
    assert [spans[row] for row in np.flatnonzero(in_test)] == [[2, 2], [11, 12]]
    with pytest.raises(DataError, match="they last longer than split_period, 86400 s"):
        find_sides(of_times([[0, 3 * DAY_S]]), 0.1, period_s=DAY_S)


def test_a_weak_example_of_a_period_for_testing_is_on_neither_side():
    data = of_times(DAY_S * np.array([6, 7, 6, 7]), weak=np.array([True, True, False, False]))
    in_train, in_test = find_sides(data, 0.1, period_s=DAY_S)
    assert (in_train.tolist(), in_test.tolist()) == ([True, False, True, False], [False, False, False, True])


def test_times_follow_their_examples_and_a_cut_shard_keeps_them(tmp_path):
    data = of_times([3.0, 1.0, 2.0])
    assert data.take(np.array([2, 0])).times.tolist() == [2.0, 3.0]
    assert Dataset.concatenate([data, data]).times.tolist() == [3.0, 1.0, 2.0] * 2
    assert Dataset.concatenate([data, replace(data, times=None)]).times is None
    task = make_task("table", HOURS)
    paths = create_shards("table", "iid", 2, tmp_path / "shards", write_hours(tmp_path / "a.csv", 40), options=HOURS)
    parts = [load_task_data(task, path) for path in paths]
    assert all((part.times == 3600 * part.inputs[:, 0]).all() for part in parts)
    days = {int(time // DAY_S) for part in parts for time in split_train_test(part, 0.1, period_s=DAY_S)[1].times}
    assert days
    assert days <= {*TEST_DAYS}
    card = replace(read_metadata(paths[0]), groups=())
    write_shard(tmp_path / "b.npz", replace(parts[0], times=None), card)
    with pytest.raises(DataError, match="nothing says when its examples were taken; let read return times"):
        read_shards(task, [tmp_path / "b.npz"], test_fraction=0.1)


@pytest.mark.parametrize(
    "form", [lambda hour: f"{3600.0 * hour}", write_date, lambda hour: f"{write_date(hour)}+00:00"]
)
def test_a_column_has_seconds_or_dates_and_times_of_utc(tmp_path, form):
    data = make_task("table", HOURS).read(str(write_hours(tmp_path / "a.csv", 2, form)))
    assert data.times.tolist() == (3600.0 * np.arange(48)).tolist()
    path = write_hours(tmp_path / "days.csv", 2, lambda hour: f"1970010{1 + hour // 24}")
    assert make_task("table", HOURS).read(str(path)).times.tolist() == [0.0] * 24 + [DAY_S] * 24


def test_a_column_of_parquet_may_hold_times_of_its_own_kind(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install '.[parquet]'")
    from pyarrow import parquet  # noqa: PLC0415 an optional package

    seconds = arrow.array([1_800_000_000_123, 5], arrow.timestamp("ms"))
    table = arrow.table({"when": seconds, "c": [1.0, 2.0], "t": [0.5, 0.5]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert make_task("table", HOURS).read(str(tmp_path)).times.tolist() == [1_800_000_000.123, 0.005]


@pytest.mark.parametrize("cell", ["noon", "nan", "1e999", "2026-13-01", "1764460800000", "20261301"])
def test_a_cell_that_is_no_time_is_refused_without_its_content(tmp_path, cell):
    path = write_hours(tmp_path / "a.csv", 1, lambda hour: cell if hour == 5 else str(hour))
    with pytest.raises(DataError, match="column 'when' must hold seconds since 1970, or dates") as error:
        make_task("table", HOURS).read(str(path))
    assert cell not in str(error.value)


def test_a_window_lasts_from_its_first_row_to_its_target_and_none_shares_a_row_of_the_other_side(tmp_path):
    options = HOURS | {"window": 6, "step": 1, "ahead": 2, "horizon": 3}
    task = make_task("series", options)
    data = load_task_data(task, write_hours(tmp_path / "a.csv", 40))
    assert (data.times == 3600 * (data.inputs[:, 0, :1] + [0, 9])).all()
    train, test = split_train_test(data, 0.1, period_s=DAY_S)
    rows = [{int(hour) + ahead for hour in part.inputs[:, 0, 0] for ahead in range(10)} for part in (train, test)]
    assert not rows[0] & rows[1]
    assert {hour // 24 for hour in rows[1]} == {*TEST_DAYS}
    assert len(train) + len(test) < len(data)


def test_a_window_over_a_clock_that_ran_backwards_lasts_over_all_its_rows(tmp_path):
    path = write_hours(tmp_path / "a.csv", 2, lambda hour: str(DAY_S * 7 if hour == 10 else 3600 * hour))
    data = make_task("series", HOURS | {"window": 6, "step": 1}).read(str(path))
    over = (data.inputs[:, 0, 0] <= 10) & (data.inputs[:, 0, -1] >= 10)
    assert set(data.times[over, 1]) == {7 * DAY_S}
    assert data.times[~over, 1].max() == 47 * 3600


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"time": ""}, "task.split_period = '1d' needs task.time, the column of when a row was taken"),
        ({"split_period": ""}, "task.time = 'when' is for a split by time: say split_period"),
        ({"split_period": "0s"}, "split_period of task table must be a time of 1s to 366d, such as 6h, got '0s'"),
        ({"split_period": "367d"}, "must be a time of 1s to 366d, such as 6h, got '367d'"),
        ({"split_period": "daily"}, "must be a time of 1s to 366d, such as 6h, got 'daily'"),
        ({"time": "c"}, "task.time must name a column of its own, and 'c' is an input, a target or the group"),
        ({"time": "t"}, "'t' is an input, a target or the group"),
        ({"group": "when"}, "'when' is an input, a target or the group"),
    ],
)
def test_options_that_do_not_fit_together_are_one_clear_line(change, message):
    with pytest.raises(ConfigError, match=message):
        make_task("table", HOURS | change)


@pytest.mark.parametrize(
    "times",
    [np.zeros((3, 3)), np.array([1.0, np.nan, 2.0]), np.array([[2, 1], [1, 1], [1, 1]]), np.array(list("abc"))],
)
def test_times_that_are_none_are_refused(tmp_path, times):
    task = make_task("table", HOURS)
    data = task.read(str(write_hours(tmp_path / "a.csv", 1))).take(slice(0, 3))
    object.__setattr__(task, "reader", lambda path: replace(data, times=times))
    with pytest.raises(
        DataError, match=r"times of task table must be seconds since 1970, \[n\], or \[n, 2\] from when"
    ):
        load_task_data(task, tmp_path / "a.csv")


def test_boards_roll_outs_and_the_simulator_split_by_the_same_periods(tmp_path):
    path = write_hours(tmp_path / "a.csv", 40)
    task = make_task("table", HOURS)
    cache = TaskCache(lambda: {"table": str(path)}, accelerator="cpu", threads=1)
    train, test = cache.load_split(cache.get("table", HOURS), 0.1)
    assert [time // DAY_S for time in test.times[::24]] == TEST_DAYS
    assert len(train) + len(test) == 24 * 40
    simulated = read_shards(task, [path], test_fraction=0.1).shards[0]
    assert (simulated.test.tolist(), simulated.train.tolist()) == (
        test.inputs[:, 0].tolist(),
        train.inputs[:, 0].tolist(),
    )
    request = ModelCheckRequest(
        path="", former_path=None, task="table", options=HOURS, shard=str(path), role="trainer", test_fraction=0.1
    )
    checked = select_check_data(task.read(str(path)), request, period_s=DAY_S)
    assert checked.times.tolist() == test.times.tolist()
    root = cache.load_root_split(cache.get("table", HOURS), 50)[1]
    assert 30 < len(root) < 70
    assert len({time // DAY_S for time in root.times}) > len(TEST_DAYS), "so few are no whole periods"


def test_a_run_file_splits_by_time(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_hours(tmp_path / "a.csv", 60)
    (tmp_path / "run.toml").write_text(RUN_FILE)
    result = edgefl.simulate("run.toml", data="a.csv", root=tmp_path / "history")
    assert result.metrics["rmse"] < 0.9
    (tmp_path / "run.toml").write_text(RUN_FILE.replace('time = "when"', ""))
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "run.toml", "--data", "a.csv", "--dir", "history"])
    assert ended.value.code == 3
    assert "task.split_period = '1d' needs task.time" in capsys.readouterr().err
