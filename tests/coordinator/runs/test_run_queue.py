"""Which queued run begins, by the boards that are there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_fleet import SmallFleet, add_run

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.runs.run_queue import RunQueue
from edgefl.core.config import parse_run
from edgefl.core.types import Json
from edgefl.engine.assembly.normalisation import SCALES_ANALYSIS
from edgefl.storage.journal.record_encoding import TurnStarted
from edgefl.storage.journal.wal_journal import WalJournal
from edgefl.storage.repositories.records import RunStatus
from edgefl.storage.store import Store


class Site:
    """A queue over a store and a fleet."""

    def __init__(self, root: Path, store: Store) -> None:
        self.store, self.fleet = store, SmallFleet()
        self.directory = CoordinatorDirectory(root=root, fleet="lab", hosts=())
        self.queue = RunQueue(store, self.fleet.registry, self.directory)

    def add(self, run_id: str, **devices: Any) -> None:
        add_run(self.store, run_id, config=make_config(devices))

    def explain(self, run_id: str) -> str:
        return self.queue.explain_wait(self.store.get_run(run_id))

    def next_id(self, *recovered: str) -> str | None:
        record = self.queue.get_next(recovered)
        return record.run_id if record is not None else None


def make_config(devices: Json) -> Json:
    return parse_run({"run": {"task": "digits", "rounds": 3}, "devices": devices}).to_json()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Store.open(tmp_path / "edgefl.db") as store:
        yield Site(tmp_path, store)


@pytest.mark.parametrize(
    ("lacking", "comes"),
    [
        ({"min": 2}, "pi-2"),
        ({"require": 2}, "pi-2"),
        ({"groups": ["farm"]}, "pi-2"),
        ({"names": ["pi-2"]}, "pi-2"),
        ({"names": ["pi-gone"]}, "pi-gone"),
        ({"names": ["pi-eval", "pi-words"]}, None),
        ({"require": "all", "names": ["pi-1", "pi-2"]}, "pi-2"),
        ({"require": "all", "names": ["pi-1", "pi-gone"]}, "pi-gone"),
        ({"require": "all"}, None),
    ],
)
def test_a_run_that_lacks_boards_is_passed_over_until_they_come(site: Site, lacking: Json, comes: str | None) -> None:
    site.add("first", **lacking)
    site.fleet.add("pi-1")
    site.fleet.add("pi-gone", state="offline")
    site.fleet.add("pi-eval", role="evaluator")
    site.fleet.add("pi-words", task="text")
    assert site.next_id() == "first", "there is no other"
    site.add("second")
    assert site.next_id() == "second"
    site.fleet.add("pi-2", groups=("farm",), state="online" if comes == "pi-2" else "offline")
    site.fleet.say("pi-gone", "online" if comes == "pi-gone" else "offline")
    assert site.next_id() == ("second" if comes is None else "first")


def test_a_run_that_has_begun_needs_one_board_and_a_recovered_one_goes_first(site: Site) -> None:
    site.add("other")
    site.add("begun", min=3)
    site.fleet.add("pi-1")
    assert site.next_id() == "other"
    assert site.next_id("begun") == "begun"
    site.store.set_run_status("other", RunStatus.STOPPED, at=2.0)
    site.add("new", min=1)
    assert site.next_id() == "new"
    with WalJournal(site.directory.runs / "begun" / "journal", lambda _: {}) as wal:
        wal.record_turn(TurnStarted(now_s=1.0, at=100.0, devices={}))
        assert site.next_id() == "new", "it has only waited"
        wal.record_aggregation(1, ["v0-a1-pi-1"])
    assert site.next_id() == "begun"


def test_the_successor_of_the_active_run_is_one_whose_boards_are_there(site: Site) -> None:
    site.add("first", min=2)
    site.fleet.add("pi-1")
    assert site.queue.find_successor("active") is None
    site.add("second")
    successor = site.queue.find_successor("active")
    assert successor is not None
    assert successor.run_id == "second"


def test_a_run_whose_scales_another_finds_comes_after_it_and_one_that_cannot_be_read_in_its_turn(site: Site) -> None:
    of_table = {**make_config({}), "run": {"task": "table", "rounds": 3}, "task": {"columns": "a"}}
    add_run(site.store, "scales", config={**of_table, "strategy": {"name": SCALES_ANALYSIS}, "devices": {"min": 5}})
    add_run(site.store, "after", config={**of_table, "task": {"columns": "a", "normalise": "run:scales"}})
    site.fleet.add("pi-1", task="table")
    assert site.next_id() == "scales"
    assert site.explain("after") == "it comes after run scales, which finds means and scales of its data"
    assert site.explain("scales") == "fewer of its boards are there than it needs"
    site.store.set_run_status("scales", RunStatus.FINISHED, at=2.0)
    assert site.next_id() == "after"
    add_run(site.store, "odd", config={"run": {"task": "digits", "odd": 1}}, priority=1)
    assert site.next_id() == "odd", "it fails with its reason"
