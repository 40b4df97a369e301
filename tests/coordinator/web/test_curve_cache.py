from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgefl.coordinator.web import curve_cache
from edgefl.coordinator.web.curve_cache import CurveCache
from edgefl.core.errors import NotFoundError
from edgefl.storage.repositories.records import RunStatus
from edgefl.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "edgefl.db") as opened:
        opened.add_run(run_id="r", name="n", task="t", strategy="s", config={}, seed=1, submitted_at=0.0)
        close_round(opened, 1)
        yield opened


def close_round(store: Store, number: int) -> None:
    store.open_round("r", number, started_at=float(number), num_devices=1)
    store.close_round("r", number, version=number, closed_at=number + 0.5)


def test_the_curve_of_a_run_that_goes_on_is_read_anew(store: Store) -> None:
    book = CurveCache(store)
    assert book.get("r", 100)[0] == 1
    close_round(store, 2)
    assert book.get("r", 100)[0] == 2


def test_the_curve_of_a_run_that_is_over_is_kept_until_it_ends_a_second_time(store: Store) -> None:
    book = CurveCache(store)
    store.set_run_status("r", RunStatus.STOPPED, at=9.0)
    assert book.get("r", 100) is book.get("r", 100)
    store.set_run_status("r", RunStatus.RUNNING, at=10.0)
    close_round(store, 2)
    assert book.get("r", 100)[0] == 2
    store.set_run_status("r", RunStatus.FINISHED, at=11.0)
    assert book.get("r", 100)[0] == 2


def test_only_so_many_curves_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve_cache, "MAX_CACHED_CURVES", 2)
    book = CurveCache(store)
    store.set_run_status("r", RunStatus.STOPPED, at=9.0)
    for points in (10, 20, 30):
        book.get("r", points)
    assert [key[1] for key in book._cache] == [20, 30]


def test_a_run_that_is_none_has_no_curve(store: Store) -> None:
    with pytest.raises(NotFoundError):
        CurveCache(store).get("none", 10)
