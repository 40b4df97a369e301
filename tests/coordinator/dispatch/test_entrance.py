"""Who is brought to the door of a run and when, with a door that notes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edgefl.coordinator.dispatch.entrance import Entrance
from edgefl.coordinator.fleet.presence import DeviceState, Transition
from edgefl.coordinator.fleet.roster import Added, Changed, Holding, Removed, Restarted
from edgefl.types import Joined


class Door:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.ready: list[str] = []

    def turn(self) -> list[str]:
        ready, self.ready = self.ready, []
        return ready

    def answered(self, device_id: str, _reply: Any) -> bool:
        return device_id == "pi-1"

    def take_bytes(self, _device_id: str) -> tuple[int, int]:
        return 3, 4

    def next_deadline_s(self) -> float:
        return 7.0

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))


class Site:
    """A run that means all devices but `other`; `drained` is drained."""

    def __init__(self, *, has_door: bool = True) -> None:
        self.door = Door()
        self.let_in: list[str] = []
        view: Any = SimpleNamespace(accepts=lambda device_id: device_id != "other", let_in=self.let_in.append)
        workers = [SimpleNamespace(device_id=name) for name in ("pi-1", "other")]
        roster: Any = SimpleNamespace(workers=lambda: workers, is_drained=lambda device_id: device_id == "drained")
        door: Any = self.door if has_door else None
        self.entrance = Entrance(door, view, roster)

    def noticed(self, event: Any) -> list[tuple[Any, ...]]:
        self.door.calls.clear()
        self.entrance.noticed(event)
        return list(self.door.calls)


@pytest.fixture
def site() -> Site:
    made = Site()
    made.entrance.turn()
    return made


def moved(after: DeviceState, before: DeviceState | None = None, device_id: str = "pi-2") -> Transition:
    return Transition(device_id=device_id, before=before, after=after, reason="")


def test_those_who_are_there_are_met_when_the_run_first_waits_and_not_again() -> None:
    site = Site()
    assert site.noticed(Added(device_id="pi-2")) == [], "nobody hears an answer yet"
    site.entrance.turn()
    site.entrance.turn()
    assert site.door.calls == [("meet", "pi-1")]


def test_who_is_ready_is_let_in_and_announced(site: Site) -> None:
    site.door.ready = ["pi-1"]
    assert site.entrance.turn() == [Joined(device_id="pi-1")]
    assert site.let_in == ["pi-1"]
    assert site.entrance.turn() == []


@pytest.mark.parametrize(
    "event",
    [Added(device_id="pi-2"), Changed(device_id="pi-2"), moved(DeviceState.ONLINE, DeviceState.OFFLINE)],
    ids=["added", "changed", "online"],
)
def test_who_comes_is_met(site: Site, event: Any) -> None:
    assert site.noticed(event) == [("meet", "pi-2")]


@pytest.mark.parametrize(
    "event",
    [
        Added(device_id="other"),
        moved(DeviceState.ONLINE, DeviceState.LATE),
        moved(DeviceState.LATE, DeviceState.ONLINE),
    ],
    ids=["not meant", "was only late", "is only late"],
)
def test_whom_the_run_does_not_mean_and_who_was_only_late_is_not_met(site: Site, event: Any) -> None:
    assert site.noticed(event) == []


@pytest.mark.parametrize(
    "event",
    [
        moved(DeviceState.GONE),
        moved(DeviceState.OFFLINE),
        moved(DeviceState.DRAINING),
        Removed(device_id="pi-2"),
        Changed(device_id="drained"),
    ],
    ids=["gone", "offline", "draining", "removed", "drained"],
)
def test_who_leaves_or_takes_no_more_work_is_waited_for_no_longer(site: Site, event: Any) -> None:
    assert site.noticed(event) == [("leave", event.device_id)]


def test_the_door_hears_of_restarts_and_of_what_devices_hold(site: Site) -> None:
    assert site.noticed(Restarted(device_id="pi-2")) == [("restarted", "pi-2")]
    held = Holding(device_id="pi-2", assignment_ids=("a",), at_s=5.0)
    assert site.noticed(held) == [("heard", "pi-2", ("a",), 5.0)]
    reply: Any = None
    assert (site.entrance.answered("pi-1", reply), site.entrance.answered("pi-2", reply)) == (True, False)
    assert (site.entrance.take_bytes("pi-1"), site.entrance.next_deadline_s()) == ((3, 4), 7.0)


def test_without_a_door_everybody_is_in_and_nothing_is_asked() -> None:
    site = Site(has_door=False)
    reply: Any = None
    assert site.entrance.turn() == []
    assert site.noticed(Added(device_id="pi-2")) == []
    assert not site.entrance.answered("pi-1", reply)
    assert (site.entrance.take_bytes("pi-1"), site.entrance.next_deadline_s()) == ((0, 0), None)
    site.entrance.close()
    assert site.door.calls == []
