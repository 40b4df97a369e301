import os
import subprocess
import sys
from pathlib import Path

import pytest
from table_parts import read_table

from edgefl.core.errors import ConfigError, StoreBusyError, StoreError
from edgefl.device.collect.alignment import Row
from edgefl.device.collect.row_store import StoreLimits, count_whole_rows, encode_rows, open_row_store
from edgefl.device.collect.store_state import STATE_NAME, read_store_state

LIMITS = StoreLimits(max_bytes=16_000)
COLUMNS = ("a", "place")


def _rows(first, count, *, span=1):
    return [Row(float(number), (number / 2, "kitchen, left"), span) for number in range(first, first + count)]


def _commit(store, first, count, now_s=0.0):
    store.commit(_rows(first, count), {"tail": str(first + count)}, {"tail.refused": first}, now_s)


def _read(folder):
    """Times of all rows, as a task reads them."""
    return [int(time) for part in read_table(folder, "table", ("time",), ("place",)) for time in part.numbers[:, 0]]


def test_a_task_reads_the_segments_as_one_table(tmp_path):
    with open_row_store(tmp_path / "shard", COLUMNS, LIMITS) as store:
        for first in range(0, 60, 20):
            _commit(store, first, 20)
        assert len(store.state.segments) > 1
    (part, *_) = read_table(tmp_path / "shard", "table", ("a", "span"), ("place",))
    assert part.numbers[3].tolist() == [1.5, 1.0]
    assert part.texts[0][3] == "kitchen, left"
    assert _read(tmp_path / "shard") == list(range(60))


def test_what_was_written_and_not_committed_is_cut_off_at_the_next_start(tmp_path):
    with open_row_store(tmp_path, COLUMNS, LIMITS) as store:
        _commit(store, 0, 3)
        segment = tmp_path / store.state.segments[0].name
    with segment.open("ab") as file:
        file.write(encode_rows(_rows(3, 2)) + b"5.000,2.")
    (tmp_path / "rows-00000007.csv").write_bytes(b"time,a,place,span,check\n")
    (tmp_path / ".x.abcdefgh.tmp").write_bytes(b"half a state")
    with open_row_store(tmp_path, COLUMNS, LIMITS) as store:
        assert store.state.positions == {"tail": "3"}
        _commit(store, 3, 1)
    assert _read(tmp_path) == [0, 1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".collect.json", ".collect.lock", segment.name]


def test_rows_that_the_card_lost_are_no_rows_any_more(tmp_path):
    with open_row_store(tmp_path, COLUMNS, LIMITS) as store:
        _commit(store, 0, 3)
        segment = tmp_path / store.state.segments[0].name
    os.truncate(segment, segment.stat().st_size - 4)
    with open_row_store(tmp_path, COLUMNS, LIMITS) as store:
        assert store.state.num_rows == 2
        _commit(store, 9, 1)
    assert _read(tmp_path) == [0, 1, 9]


def test_a_segment_that_somebody_made_shorter_gets_no_bytes_of_nothing(tmp_path):
    with open_row_store(tmp_path, COLUMNS, LIMITS) as store:
        _commit(store, 0, 3)
        segment = tmp_path / store.state.segments[0].name
        os.truncate(segment, segment.stat().st_size - 4)
        with pytest.raises(StoreError, match="bytes"):
            _commit(store, 3, 1)
        _commit(store, 3, 1)
        segment.unlink()
        with pytest.raises(StoreError, match="bytes"):
            _commit(store, 4, 1)
        _commit(store, 4, 1)
    assert _read(tmp_path) == [4]
    assert b"\0" not in b"".join(path.read_bytes() for path in tmp_path.glob("*.csv"))


def test_a_changed_byte_of_a_row_is_found_by_its_checksum(tmp_path):
    with open_row_store(tmp_path, COLUMNS, LIMITS) as store:
        _commit(store, 0, 3)
        segment = tmp_path / store.state.segments[0].name
    assert count_whole_rows(segment)[0] == 3
    segment.write_bytes(segment.read_bytes().replace(b"1.000,", b"1.001,"))
    assert count_whole_rows(segment)[0] == 1


def test_the_oldest_segments_go_above_the_limits_of_bytes_and_of_days(tmp_path):
    with open_row_store(tmp_path / "bytes", COLUMNS, LIMITS) as store:
        for first in range(0, 1000, 20):
            _commit(store, first, 20)
        assert store.state.num_bytes <= LIMITS.max_bytes
        assert store.state.num_bytes == sum(path.stat().st_size for path in (tmp_path / "bytes").glob("*.csv"))
    times = _read(tmp_path / "bytes")
    assert times == list(range(times[0], 1000))
    with open_row_store(tmp_path / "days", COLUMNS, StoreLimits(max_bytes=10**9, max_age_s=160.0)) as store:
        for first in range(0, 500, 10):
            _commit(store, first, 10, now_s=first + 10.0)
    assert min(_read(tmp_path / "days")) == pytest.approx(340, abs=20)


def test_another_collector_and_other_columns_are_refused(tmp_path):
    with open_row_store(tmp_path, COLUMNS, LIMITS) as store:
        _commit(store, 0, 1)
        with pytest.raises(StoreBusyError, match="another collector"), open_row_store(tmp_path, COLUMNS, LIMITS):
            pass
    with pytest.raises(ConfigError, match="holds rows of a, place"), open_row_store(tmp_path, ("b",), LIMITS):
        pass
    (tmp_path / STATE_NAME).write_bytes(b'{"v":1,"columns":["a"],"segments":[{"name":"rows-../x"}]}')
    with pytest.raises(StoreError, match="damaged"):
        read_store_state(tmp_path)


FULL = """
import resource, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_row_store import COLUMNS, LIMITS, _commit, _read
from edgefl.core.errors import StoreFullError
from edgefl.device.collect.row_store import open_row_store
with open_row_store(Path(sys.argv[1]), COLUMNS, LIMITS) as store:
    _commit(store, 0, 10)
    before = _read(Path(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, resource.RLIM_INFINITY))
    try:
        _commit(store, 10, 40)
    except StoreFullError:
        print(before == _read(Path(sys.argv[1])), dict(store.state.positions))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    _commit(store, 10, 40)
    print(_read(Path(sys.argv[1])) == list(range(50)))
"""


def test_a_full_card_leaves_what_was_there_and_the_same_rows_are_stored_when_it_has_room(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), str(Path(__file__).parent), str(Path(__file__).parents[2])],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["True {'tail': '10'}", "True"]
