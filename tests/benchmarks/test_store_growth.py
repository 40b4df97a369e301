import sqlite3
from contextlib import closing

import pytest

from edgefl.core.protocol import Heartbeat
from edgefl.storage.repositories.records import HeartbeatRow
from edgefl.storage.store import Store

NUM_BEATS = 4000


@pytest.fixture(scope="module")
def growth(harness):
    return harness("store_growth")


def beat(number):
    heartbeat = Heartbeat(
        seq=number, session_no=3, uptime_s=number * 1.5, cpu_fraction=0.25, memory_bytes=80_000_000, throttled="ok",
        run="20260101-000000-aaaaaa",
    )  # fmt: skip
    return HeartbeatRow(device_id=f"device-{number % 5:02}", at=1.7e9 + number + 0.123, heartbeat=heartbeat)


def test_a_store_grows_as_its_rows_say_and_pages_that_are_half_empty_are_noticed(growth, tmp_path):
    path = tmp_path / "edgefl.db"
    Store.open(path).close()
    before = growth.stock(path)
    with pytest.raises(ValueError, match="no rows were written"):
        growth.ratio(before, growth.stock(path))
    with Store.open(path) as store:
        for first in range(0, NUM_BEATS, 40):
            store.record_heartbeats([beat(number) for number in range(first, first + 40)])
    after = growth.stock(path)
    (beats,) = [one for one in growth.grown(before, after) if one.table == "heartbeats"]
    assert beats.num_rows == NUM_BEATS
    assert growth.ratio(before, after) == pytest.approx(1, abs=0.1)
    assert f"{NUM_BEATS}" in growth.table(before, after)
    with closing(sqlite3.connect(path)) as store:
        store.execute("DELETE FROM heartbeats WHERE id % 2")
        store.commit()
    assert growth.ratio(before, growth.stock(path)) > 1.5


def test_a_record_is_as_long_as_sqlite_says(growth, tmp_path):
    with closing(sqlite3.connect(tmp_path / "numbers.db")) as store:
        store.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a, b FLOAT, c TEXT)")
        values = [None, 0, 1, -128, 200, 40_000, 9_000_000, 3_000_000_000, 2**50, 0.5, "x" * 57, "y" * 58, b"z" * 200]
        store.executemany("INSERT INTO t (a, b, c) VALUES (?, ?, ?)", [(each, 55.0, None) for each in values])
        store.commit()
        (payload,) = store.execute("SELECT sum(payload) FROM dbstat WHERE name = 't'").fetchone()
        computed = growth.computed_bytes(store, "t") * growth.TABLE_FILL
        # Beside its record a cell has two bytes that point to it, its number, and its length: 1, or 2 from 128 on.
        assert computed == pytest.approx(payload + len(values) * (2 + 1 + 1) + 1, abs=1e-6)
