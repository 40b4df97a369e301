"""The fleet as a run sees it, over a real registry."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from small_fleet import beat, status

from edgefl.coordinator.execution.fleet_view import (
    REPORT_AFTER_S,
    RUN_WAITING,
    SHOW_AFTER_S,
    UPDATE_INTERVAL_S,
    IdleRunReporter,
    LiveFleetView,
    RunSpec,
)
from edgefl.coordinator.fleet.allotments import BoardClaim
from edgefl.coordinator.fleet.presence import PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.core.protocol import Capabilities
from edgefl.core.types import TrainConfig, TrainInstruction, UpdateMetrics
from edgefl.engine.fleet_state import SMOOTHING_FACTOR


class CountingRoster(DeviceRegistry):
    """Counts how often a device is looked at."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.num_looks = 0

    def get_schedulable(self, device_id, run_id=None):
        self.num_looks += 1
        return super().get_schedulable(device_id)


class Site:
    def __init__(self, **options):
        self.now_s, self.nodes = 0.0, itertools.count(1)
        self.registry = CountingRoster(PresenceTracker(), lambda: self.now_s)
        self.registry.record_broker_link(connected=True)
        settings = {"groups": (), "names": (), "join_at_start": False, **options}
        self.run = RunSpec(run_id="r", task="digits", header={}, encode=None, decode=None, **settings)
        self.view = LiveFleetView(self.run, self.registry, lambda: self.now_s)

    def add(self, *names, role="trainer", groups=()):
        for name in names:
            self.registry.add(name, node_id=next(self.nodes), role=role, groups=groups, examples={"digits": 3})
            self.say(name)

    def say(self, name, state="online", session=1):
        self.registry.record_status(name, status(state, boot=f"boot-{session}", session=session))

    def give(self, device, key):
        order = TrainInstruction(assignment_id=key, device_id=device, base_version=0, plan=TrainConfig(iterations=1))
        self.view.assign(order)
        return order


@pytest.fixture
def site():
    made = Site()
    made.add("pi-2", "pi-1")
    made.add("judge", role="evaluator")
    made.view.refresh()
    return made


def test_whom_a_run_excludes_it_neither_trains_nor_evaluates_on():
    made = Site(excluded=("pi-1", "judge"))
    made.add("pi-2", "pi-1")
    made.add("judge", "other", role="evaluator")
    made.view.refresh()
    assert sorted(made.view.devices) == ["other", "pi-2"]


def test_what_it_gives_stays_as_it_is_until_it_is_refreshed(site):
    idle = site.view.idle
    site.add("pi-3")
    site.say("pi-1", "offline")
    assert (list(idle), sorted(site.view.devices)) == (["pi-1", "pi-2"], ["judge", "pi-1", "pi-2"])
    site.view.refresh()
    assert (list(site.view.idle), sorted(site.view.devices)) == (["pi-2", "pi-3"], ["judge", "pi-2", "pi-3"])


def test_a_device_is_busy_until_all_its_work_is_settled(site):
    first, second = site.give("pi-1", "a"), site.give("pi-1", "b")
    assert (list(site.view.idle), site.view.busy) == (["pi-2"], {"pi-1": ["a", "b"]})
    site.view.complete(first)
    assert (list(site.view.idle), site.view.busy) == (["pi-2"], {"pi-1": ["b"]})
    site.view.complete(second)
    assert (list(site.view.idle), site.view.busy) == (["pi-1", "pi-2"], {})


def test_a_device_that_left_while_it_worked_is_not_idle_when_its_work_is_settled(site):
    order = site.give("pi-1", "a")
    site.say("pi-1", "offline")
    site.view.refresh().complete(order)
    assert list(site.view.idle) == ["pi-2"]
    site.say("pi-1", session=2)
    assert list(site.view.refresh().idle) == ["pi-1", "pi-2"]


def test_a_device_that_joins_again_in_another_group_leaves_a_run_of_its_old_group():
    site = Site(groups=("lab",))
    site.add("pi", groups=("lab",))
    assert list(site.view.refresh().idle) == ["pi"]
    site.add("pi", groups=("home",))
    assert list(site.view.refresh().idle) == []


def test_a_run_declines_the_boards_alone_that_are_allotted_to_it(site, monkeypatch):
    declined = []
    monkeypatch.setattr(site.registry, "decline_board", lambda *board: declined.append(board))
    site.registry.add("pi-1", node_id=2, role="trainer", groups=(), examples={})
    site.view.refresh()
    assert declined == []
    site.registry.open_run(BoardClaim(run_id="r", selects=lambda info: info.device_id == "pi-1"))
    site.view.admit("pi-1")
    site.view.refresh()
    assert declined == [("pi-1", "r")]


def test_blocks_that_a_device_reports_are_seen_and_nonsense_is_not(site):
    blocks = {"digits": [0, 2, "x", True], "other": "no list"}
    site.registry.record_capabilities("pi-1", Capabilities(facts={"blocks": blocks}, shards={"digits": 3}))
    site.registry.record_capabilities("pi-2", Capabilities(facts={"blocks": [1]}, shards={"digits": 3}))
    devices = site.view.refresh().devices
    assert (devices["pi-1"].blocks, devices["pi-2"].blocks) == ({"digits": (0, 2)}, {})
    site.registry.add(
        "pi-1", node_id=site.registry.get_node_id("pi-1"), role="trainer", groups=(), examples={"digits": 3}
    )
    assert site.view.refresh().devices["pi-1"].blocks == {"digits": (0, 2)}
    site.add("pi-1")  # under another node: it has joined anew
    assert site.registry.get_device("pi-1").blocks == {}


def test_speeds_are_those_measured_in_this_run(site):
    site.registry.record_speed("pi-1", 99.0)
    assert site.view.speeds == {}
    for seconds in (2.0, 4.0):
        site.view.record_speed("pi-1", UpdateMetrics(iterations=2, compute_s=2 * seconds))
    site.view.record_speed("pi-2", UpdateMetrics(iterations=0))
    assert {name: speed.seconds_per_iteration for name, speed in site.view.speeds.items()} == {
        "pi-1": pytest.approx(2.0 + SMOOTHING_FACTOR * 2.0)
    }


def test_vitals_are_those_of_the_last_heartbeat(site):
    assert (len(site.view.health), site.view.health.get("pi-1")) == (0, None)
    told = {"temperature_c": 71.5, "throttled": "under-voltage", "battery_fraction": 0.4}
    site.registry.record_heartbeat("pi-1", beat(1, **told))
    assert site.view.health.get("pi-1") is None, "all through a turn it stays as it was seen"
    vitals = site.view.refresh().health["pi-1"]
    assert (vitals.temperature_c, vitals.is_throttled, vitals.battery_fraction) == (71.5, True, 0.4)
    assert [site.view.health.get(name) for name in ("pi-2", "nobody")] == [None, None]
    assert list(site.view.health) == ["pi-1"]


def test_reading_and_giving_work_looks_at_no_device_and_a_change_only_at_the_one():
    site = Site()
    site.add(*(f"pi-{number:03}" for number in range(200)))
    site.view.refresh()
    site.registry.num_looks = 0
    for number in range(200):
        view = site.view.refresh()
        order = site.give(view.idle[number // 2], f"a-{number}")
        assert (len(view.idle), len(view.busy), len(view.devices)) == (199, 1, 200)
        assert view.health.get("pi-199") is None
        site.registry.record_heartbeat(order.device_id, beat(number + 1))
        site.view.complete(order)
    assert site.registry.num_looks == 0
    site.say("pi-007", "offline")
    site.view.refresh()
    assert site.registry.num_looks == 1


class Desk:
    """A run at a time that a test sets."""

    def __init__(self, **options: Any) -> None:
        self.now_s, self.told = 0.0, list[tuple[str, str]]()
        run = RunSpec(
            run_id="r", task="digits", header={}, groups=(), names=(), join_at_start=False,
            encode=lambda _model, _version: b"", decode=lambda _body: {}, **options,
        )  # fmt: skip
        self.absent, self.shown = dict[str, str](), list[str]()
        self.waiting = IdleRunReporter(
            run,
            lambda: self.now_s,
            lambda kind, said: self.told.append((kind, said)),
            get_not_ready=lambda: self.absent,
            on_waiting=self.shown.append,
        )

    def at(self, now_s: float, *ready: str, has_work: bool = False) -> list[str]:
        self.now_s = now_s
        self.waiting.poll(ready, has_work=has_work)
        return [said for kind, said in self.told if kind == RUN_WAITING]


def test_a_long_wait_is_told_once_with_what_is_missing() -> None:
    desk = Desk()
    assert desk.at(0.0) == desk.at(REPORT_AFTER_S - 1) == []
    assert desk.waiting.next_poll_s() == REPORT_AFTER_S
    assert desk.at(REPORT_AFTER_S) == ["waiting for a board with a shard for digits: none is ready"]
    assert len(desk.at(10 * REPORT_AFTER_S)) == 1


def test_a_run_that_waits_names_the_boards_it_has_and_those_it_lacks() -> None:
    desk = Desk(min_devices=10)
    desk.absent = {"pi-3": "it is offline", "pi-4": "it has no shard for task 'digits'; on the board: add one"}
    desk.at(0.0, "pi-1", "pi-2")
    assert desk.waiting.next_poll_s() == SHOW_AFTER_S
    desk.at(SHOW_AFTER_S, "pi-1", "pi-2")
    assert desk.shown == [
        (
            "waiting for 8 more boards with a shard for digits: 2 ready (pi-1, pi-2), pi-3 is offline, "
            "pi-4 has no shard for task 'digits'"
        )
    ]
    desk.at(SHOW_AFTER_S + UPDATE_INTERVAL_S / 2, "pi-1")
    assert len(desk.shown) == 1, "not more than once a second"
    desk.absent |= {f"x-{number}": "there is no such device in the fleet" for number in range(9)}
    desk.at(SHOW_AFTER_S + UPDATE_INTERVAL_S, *(f"pi-{number}" for number in range(9)))
    assert desk.shown[1].startswith(
        "waiting for 1 more board with a shard for digits: 9 ready (pi-0, pi-1, pi-2, pi-3"
    )
    assert desk.shown[1].endswith(
        ", x-0: there is no such device in the fleet, x-1: there is no such device in the "
        "fleet, x-2: there is no such device in the fleet, and 6 more that are not"
    )
    desk.at(10.0, "pi-1", has_work=True)
    assert (desk.shown[-1], desk.waiting.next_poll_s()) == ("", None)


def test_a_run_that_has_started_waits_for_one_board_and_none_may_have_nothing_to_do() -> None:
    desk = Desk(min_devices=10)
    desk.waiting.has_started = True
    for now_s, ready in ((0.0, ()), (SHOW_AFTER_S, ()), (SHOW_AFTER_S + UPDATE_INTERVAL_S, ("pi-1",))):
        desk.at(now_s, *ready)
    assert desk.shown[0].startswith("waiting for a board")
    assert desk.shown[1].startswith("waiting: 1 ready (pi-1), and they get no work")


def test_a_wait_is_over_at_the_limit_of_the_run_file() -> None:
    desk = Desk(wait_s=7.0)
    assert desk.waiting.find_overdue_reason() is None
    desk.at(0.0)
    desk.at(6.0)
    assert (desk.waiting.next_poll_s(), desk.waiting.find_overdue_reason()) == (7.0, None)
    desk.now_s = 7.0
    assert desk.waiting.find_overdue_reason() == (
        "gave up after devices.wait_s = 7 s: waiting for a board with a shard for digits: none is ready"
    )
    desk.at(8.0, has_work=True)
    assert desk.waiting.find_overdue_reason() is None


def test_a_run_that_had_work_meanwhile_waits_anew() -> None:
    desk = Desk()
    desk.at(0.0)
    assert not desk.at(REPORT_AFTER_S - 1, has_work=True)
    assert not desk.at(REPORT_AFTER_S)
    assert len(desk.at(2 * REPORT_AFTER_S)) == 1
    desk.at(3 * REPORT_AFTER_S, has_work=True)
    desk.at(4 * REPORT_AFTER_S)
    assert len(desk.at(5 * REPORT_AFTER_S)) == 2
