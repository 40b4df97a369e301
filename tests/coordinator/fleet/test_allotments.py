"""Which run a board works for: kept among equals, given by priority, and passed on where a run cannot use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from small_fleet import SmallFleet

from edgefl.coordinator.fleet.allotments import BoardClaim
from edgefl.coordinator.fleet.registry import DeviceChanged, DeviceRegistry
from edgefl.core.protocol import Capabilities
from edgefl.core.types import DeviceInfo

BLOCKED = {"kind": "hours", "reason": "outside its hours", "free_at": None, "run": "low"}


def naming(*names: str) -> Callable[[DeviceInfo], bool]:
    return lambda info: info.device_id in names


def open_run(registry: DeviceRegistry, run_id: str, *names: str, **more: Any) -> None:
    registry.open_run(BoardClaim(run_id=run_id, selects=naming(*names), **more))


def holders(registry: DeviceRegistry) -> dict[str, str | None]:
    return {info.device_id: registry.get_allotted_run(info.device_id) for info in registry.list_devices()}


@pytest.fixture
def registry() -> DeviceRegistry:
    return SmallFleet("a", "b", "c").registry


def test_a_board_stays_with_its_run_and_comes_to_the_next_when_that_is_over(registry: DeviceRegistry) -> None:
    open_run(registry, "r1", "a", "b")
    open_run(registry, "r2", "b", "c")
    assert holders(registry) == {"a": "r1", "b": "r1", "c": "r2"}
    assert [info.device_id for info in registry.list_schedulable("r2")] == ["c"]
    assert [info.device_id for info in registry.list_schedulable()] == ["a", "b", "c"], "of no run"
    assert registry.explain_absence("b", "r2") == "it works for run r1"
    changed: list[Any] = []
    registry.subscribe(changed.append)
    registry.close_run("r1")
    assert holders(registry) == {"a": None, "b": "r2", "c": "r2"}
    assert changed == [DeviceChanged(device_id="b")], "its new run is told"


def test_a_run_of_higher_priority_takes_boards_except_those_that_train_by_themselves(
    registry: DeviceRegistry,
) -> None:
    open_run(registry, "low", "a", "b")
    open_run(registry, "alone", "c", is_kept=True)
    changed: list[Any] = []
    registry.subscribe(changed.append)
    open_run(registry, "high", "b", "c", priority=1)
    assert holders(registry) == {"a": "low", "b": "high", "c": "alone"}
    assert changed == [DeviceChanged(device_id="b")]
    registry.close_run("high")
    assert registry.get_allotted_run("b") == "low"


def test_a_board_that_its_run_declines_or_has_conditions_against_goes_to_a_run_that_can_use_it(
    registry: DeviceRegistry,
) -> None:
    open_run(registry, "low", "a", "b")
    registry.decline_board("a", "low")
    assert registry.get_allotted_run("a") == "low", "no other could use it"
    open_run(registry, "other", "a", "b", priority=-5)
    assert holders(registry) == {"a": "other", "b": "low", "c": None}
    registry.record_blocker("b", BLOCKED)
    assert registry.get_allotted_run("b") == "other"
    open_run(registry, "low", "a", "b")
    assert registry.get_allotted_run("a") == "other", "what it declined stays declined"


@pytest.mark.parametrize("how", ["it accepts it", "new capabilities", "joined again", "removed and added"])
def test_a_board_that_was_declined_comes_back_once_that_may_have_changed(how: str) -> None:
    fleet = SmallFleet("a")
    registry = fleet.registry
    open_run(registry, "high", "a", priority=1)
    open_run(registry, "low", "a")
    registry.decline_board("a", "high")
    registry.decline_board("a", "low")
    registry.accept_board("a", "low")
    assert registry.get_allotted_run("a") == "low", "of the one that accepts it"
    if how == "it accepts it":
        registry.accept_board("a", "high")
    elif how == "new capabilities":
        registry.record_capabilities("a", Capabilities(facts={}, shards={"digits": 5}))
    else:
        if how == "removed and added":
            registry.remove("a")
        registry.add("a", node_id=1, role="trainer", groups=(), examples={"digits": 5})
    assert registry.get_allotted_run("a") == "high"


def test_a_restarted_coordinator_gives_each_board_to_the_run_that_had_it(registry: DeviceRegistry) -> None:
    open_run(registry, "r1", "a", "b")
    open_run(registry, "r2", "a", "b")
    open_run(registry, "r1", "a", "b", preferred_ids=frozenset({"a"}))
    open_run(registry, "r2", "a", "b", preferred_ids=frozenset({"b"}))
    assert holders(registry) == {"a": "r1", "b": "r2", "c": None}


def test_what_a_queued_run_could_have_is_free_of_lower_priority_or_not_wanted(registry: DeviceRegistry) -> None:
    open_run(registry, "r1", "a", "b", priority=1)
    open_run(registry, "alone", "c", is_kept=True)

    def obtainable(priority: int, **more: Any) -> list[str]:
        return [info.device_id for info in registry.list_obtainable("next", priority, **more)]

    assert (obtainable(1), obtainable(2), obtainable(0, without="alone")) == ([], ["a", "b"], ["c"])
    registry.decline_board("a", "r1")
    assert obtainable(0) == ["a"]
    registry.record_blocker("a", {**BLOCKED, "run": "next"})
    assert obtainable(2) == ["b"]
    assert [info.device_id for info in registry.list_obtainable("r1", 1)] == ["b"], "it has declined the other itself"


def test_boards_that_join_change_or_leave_are_allotted_as_all_others(registry: DeviceRegistry) -> None:
    registry.open_run(BoardClaim(run_id="r", selects=lambda info: "farm" in info.groups))
    registry.add("d", node_id=99, role="trainer", groups=("farm",), examples={"digits": 5})
    assert registry.get_allotted_run("d") == "r"
    registry.add("d", node_id=99, role="trainer", groups=(), examples={"digits": 5})
    assert registry.get_allotted_run("d") is None
    open_run(registry, "later", "d")
    registry.add("d", node_id=99, role="trainer", groups=("farm",), examples={"digits": 5})
    assert registry.get_allotted_run("d") == "later", "it stays where it is"
    registry.remove("d")
    assert registry.get_allotted_run("d") is None
