"""Forgetting with real stores: alone, beside a running collector, and through kill -9 in the middle of it."""

import math
import signal
import subprocess
import sys

import pytest
from table_parts import read_table

from edgefl.core.errors import StoreBusyError, StoreError
from edgefl.device.collect.alignment import Row
from edgefl.device.collect.file_store import open_file_store
from edgefl.device.collect.forgetting import (
    FORGET_NAME,
    ForgetRequest,
    forget_here,
    iterate_rows,
    read_forget_request,
    write_forget_request,
)
from edgefl.device.collect.row_store import StoreLimits, count_whole_rows, encode_rows, open_row_store
from edgefl.device.collect.shard_contents import count_forgotten, read_contents
from edgefl.device.collect.store_state import lock_folder, read_store_state
from edgefl.system.row_labels import LabelKind, LabelLine, append_row_labels, read_row_labels

LIMITS = StoreLimits(max_bytes=16_000)


def _fill(folder, count=60, *, at_once=20, limits=LIMITS):
    with open_row_store(folder, ("a", "who"), limits) as store:
        for first in range(0, count, at_once):
            numbers = range(first, first + at_once)
            rows = [Row(float(number), (number / 2, ("ada", "bo, b")[number % 2]), 1) for number in numbers]
            store.commit(rows, {}, {}, 0.0)


def _forget(folder, since_s=0.0, until_s=1e9, **where):
    with lock_folder(folder):
        write_forget_request(folder, ForgetRequest(since_s=since_s, until_s=until_s, where=where))
        forget_here(folder, read_store_state(folder))
    assert not (folder / FORGET_NAME).exists()


def _read(folder, *columns):
    parts = read_table(folder, "table", columns or ("time",))
    return [row if columns else int(row[0]) for part in parts for row in part.numbers.tolist()]


def _is_sound(folder):
    state = read_store_state(folder)
    wholes = [count_whole_rows(folder / segment.name) for segment in state.segments]
    return wholes == [(segment.num_rows, segment.num_bytes) for segment in state.segments]


def test_rows_of_a_time_go_and_no_window_lies_over_the_gap(tmp_path):
    _fill(tmp_path, 60, limits=StoreLimits(max_bytes=10**6))
    _forget(tmp_path, 20.0, 29.0)
    _forget(tmp_path, 50.0, 99.0)
    assert _read(tmp_path) == [*range(20), *range(30, 50)]
    assert [span for (span,) in _read(tmp_path, "span")] == [1.0] * 20 + [2.0] * 20
    assert _is_sound(tmp_path)
    with open_row_store(tmp_path, ("a", "who"), LIMITS) as store:
        assert store.state.span == 2
        assert store.state.last_row_s == 49.0


def test_rows_of_one_person_go_in_all_segments_and_what_is_emptied_is_removed(tmp_path):
    _fill(tmp_path)
    assert len(list(tmp_path.glob("*.csv"))) > 1
    assert count_forgotten(tmp_path, ForgetRequest(since_s=0, until_s=99, where={"who": "bo, b"})).num == 30
    _forget(tmp_path, who="bo, b")
    assert _read(tmp_path) == list(range(0, 60, 2))
    _forget(tmp_path)
    assert not list(tmp_path.glob("*.csv"))
    assert read_store_state(tmp_path).segments == ()
    _fill(tmp_path)
    assert len(_read(tmp_path)) == 60


def test_a_damaged_row_goes_where_it_may_be_of_that_time(tmp_path):
    _fill(tmp_path, 20, limits=StoreLimits(max_bytes=10**6))
    (segment,) = tmp_path.glob("*.csv")
    segment.write_bytes(segment.read_bytes().replace(b"\n5.000,", b"\n?.000,").replace(b"\n9.000,", b"\n3.000,"))
    _forget(tmp_path, 0.0, 4.0)
    assert _read(tmp_path) == [6, 7, 8, *range(10, 20)]
    segment.write_bytes(segment.read_bytes().replace(b"\n15.000,7.5", b"\n15.000,8.5"))
    _forget(tmp_path, 12.0, 12.0)
    assert _read(tmp_path) == [6, 7, 8, 10, 11, 13, 14, *range(16, 20)]
    assert _is_sound(tmp_path)


def test_rows_go_also_where_longer_numbers_of_spans_make_a_segment_longer(tmp_path):
    with open_row_store(tmp_path, ("a", "who"), StoreLimits(max_bytes=10**6)) as store:
        store.commit([Row(float(number), (0.5, "ada"), 9) for number in range(100, 200)], {}, {}, 0.0)
    _forget(tmp_path, 105.0, 105.0)
    assert _read(tmp_path) == [*range(100, 105), *range(106, 200)]
    assert _is_sound(tmp_path)


def test_files_of_a_class_a_group_and_a_time_go(tmp_path):
    with open_file_store(tmp_path, LIMITS, "oldest") as store:
        for number in range(6):
            store.add(bytes([number]), ("robin", "wren")[number % 2], ".png", 60.0 * number)
        store.commit(store.state, 0.0)
    names = sorted(path.name for path in tmp_path.glob("*/*.png"))
    _forget(tmp_path, 0.0, 120.0, label="robin")
    assert sorted(path.name for path in tmp_path.glob("*/*.png")) == [names[1], *names[3:]]
    _forget(tmp_path, group=names[3][:15])
    assert sorted(path.name for path in tmp_path.glob("*/*.png")) == [names[1], *names[4:]]
    assert read_contents(tmp_path).classes == {"label": {"robin": 1, "wren": 2}}


def test_rows_of_a_label_go_and_the_labels_of_a_time_go_with_its_rows_or_files(tmp_path):
    lines = [LabelLine(since_s=10.0, until_s=19.0, label="away", kind=LabelKind.PERSON)]
    _fill(tmp_path / "rows", 40, limits=StoreLimits(max_bytes=10**6))
    append_row_labels(tmp_path / "rows", lines)
    _forget(tmp_path / "rows", 0.0, 14.0, label="away")
    assert _read(tmp_path / "rows") == [*range(10), *range(15, 40)]
    with open_file_store(tmp_path / "files", LIMITS, "oldest") as store:
        store.add(b"1", "robin", ".png", 15.0)
        store.commit(store.state, 0.0)
    append_row_labels(tmp_path / "files", lines)
    for name in ("rows", "files"):
        _forget(tmp_path / name, 12.0, 99.0)
        (line,) = read_row_labels(tmp_path / name).lines
        assert (line.since_s, line.until_s) == (10.0, math.nextafter(12.0, 0.0))


def test_a_file_whose_name_has_an_impossible_time_is_no_file_of_a_collector(tmp_path):
    with open_file_store(tmp_path, LIMITS, "oldest") as store:
        store.add(b"1", "robin", ".png", 60.0)
        store.commit(store.state, 0.0)
    (path,) = tmp_path.glob("*/*.png")
    other = path.with_name("20261399T000100.000" + path.name[19:])
    other.write_bytes(b"2")
    assert read_contents(tmp_path).total.num == 1
    assert count_forgotten(tmp_path, ForgetRequest(since_s=0, until_s=1e11)).num == 1
    _forget(tmp_path, 0.0, 1e11)
    assert list(tmp_path.glob("*/*.png")) == [other]


def test_a_second_request_waits_and_a_damaged_one_removes_nothing(tmp_path):
    _fill(tmp_path)
    request = ForgetRequest(since_s=0.0, until_s=5.0)
    write_forget_request(tmp_path, request)
    assert read_forget_request(tmp_path) == request
    with pytest.raises(StoreBusyError, match="not done yet"):
        write_forget_request(tmp_path, request)
    for content in (b"{", b"[]", b'{"v":1,"since_s":"x","until_s":1,"where":{}}', b'{"v":1,"since_s":0,"until_s":9}'):
        (tmp_path / FORGET_NAME).write_bytes(content)
        with pytest.raises(StoreError, match="nothing is forgotten"):
            read_forget_request(tmp_path)


def test_contents_are_counted_by_text_and_span(tmp_path):
    _fill(tmp_path)
    found = read_contents(tmp_path)
    assert found.classes == {"who": {"ada": 30, "bo, b": 30}}
    assert (found.total.num, found.total.last_s, found.num_spans) == (60, 59.0, 1)
    assert found.examples[-1] == "time 59.000, a 29.5, who bo, b"


def test_what_a_killed_collector_has_not_committed_is_gone_after_forgetting(tmp_path):
    _fill(tmp_path, 20, limits=StoreLimits(max_bytes=10**6))
    (segment,) = tmp_path.glob("*.csv")
    segment.write_bytes(segment.read_bytes() + encode_rows([Row(20.0, (10.0, "ada"), 1)]))
    _forget(tmp_path, 20.0, 20.0)
    assert _read(tmp_path) == list(range(20))


KILLED = """
import os, sys
from pathlib import Path
from edgefl.device.collect import forgetting
from edgefl.device.collect.store_state import lock_folder, read_store_state
folder, left = Path(sys.argv[1]), int(sys.argv[2])
def counted(call):
    def wrapped(*arguments, **options):
        global left
        if left == 0:
            os.kill(os.getpid(), 9)
        left -= 1
        return call(*arguments, **options)
    return wrapped
for name in ("write_atomic", "save_store_state", "remove_forget_request"):
    setattr(forgetting, name, counted(getattr(forgetting, name)))
Path.unlink = counted(Path.unlink)
with lock_folder(folder):
    forgetting.forget_here(folder, read_store_state(folder))
"""


@pytest.mark.parametrize("is_collecting", [True, False])
def test_a_kill_at_every_step_leaves_whole_rows_and_the_next_one_does_the_rest(tmp_path, is_collecting):
    gone, num_kills = {5, *range(40, 80), 100}, 0
    while True:
        folder = tmp_path / str(num_kills)
        with open_row_store(folder, ("a", "who"), LIMITS) as store:
            for first in (0, 40, 80):  # a segment each, of which the second goes and the others get longer
                rows = [
                    Row(float(number), (number / 2, "ada" if number in gone else "bo, b"), 9)
                    for number in range(first, first + 40)
                ]
                store.commit(rows, {}, {}, 0.0)
        write_forget_request(folder, ForgetRequest(since_s=5.0, until_s=110.0, where={"who": "ada"}))
        done = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(num_kills)], check=False)
        assert {*range(120)} - gone <= {*_read(folder)}
        with open_row_store(folder, ("a", "who"), LIMITS) if is_collecting else lock_folder(folder) as store:
            assert {*range(120)} - gone <= {*_read(folder)}
            if store is not None:
                assert store.state.span >= max(span for (span,) in _read(folder, "span"))
            forget_here(folder, read_store_state(folder) if store is None else store.state)
        assert _read(folder) == sorted({*range(120)} - gone)
        assert all(value == time_s / 2 for time_s, value in _read(folder, "time", "a"))
        assert _is_sound(folder)
        assert [time_s for time_s, _ in iterate_rows(folder, read_store_state(folder))] == _read(folder)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        num_kills += 1
    assert num_kills >= 7
