"""Which of two agents is refused, and what proves that there are two."""

from __future__ import annotations

import pytest

from edgefl.coordinator.fleet.clone_detection import MAX_INSTANCES, WARNING_TTL_S, CloneDetector, CloneRejected


class Fleet:
    """Agents that repeat the newest stamp that they were given, as living ones do."""

    def __init__(self) -> None:
        self.twins, self.now_s = CloneDetector("life"), 0.0
        self.stamps: dict[str, str] = {}

    def call(self, instance: str, *, address: str = "", is_answered: bool = True) -> list[str]:
        found = self.twins.on_request(
            "pi", instance, stamp=self.stamps.get(instance, ""), address=address, now_s=self.now_s
        )
        if is_answered:
            self.stamps[instance] = self.twins.get_stamp("pi")
        return refused(found)

    def connect(self, instance: str, session_no: int, board: str = "") -> list[str]:
        found = self.twins.on_connect("pi", instance, session_no=session_no, board=board, now_s=self.now_s)
        return refused(found)


def refused(events: list[CloneRejected]) -> list[str]:
    return [event.rejected_boot_id for event in events]


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_agents_that_follow_each_other_are_restarts_however_often(fleet: Fleet) -> None:
    for number in range(3 * MAX_INSTANCES):
        assert fleet.call(f"boot-{number}") == fleet.call(f"boot-{number}") == []
        assert fleet.connect(f"boot-{number}", number + 1) == []
    assert fleet.twins.get_warning("pi", 0.0) is None


def test_a_new_session_behind_that_of_a_later_agent_proves_that_there_are_two(fleet: Fleet) -> None:
    fleet.connect("a", 41)
    fleet.connect("b", 41)
    assert fleet.connect("a", 41) == []  # the same session: said again, or late
    assert fleet.connect("a", 42) == ["b"]


def test_a_session_proves_nothing_against_an_agent_that_only_asked_so_far(fleet: Fleet) -> None:
    fleet.connect("a", 1)
    fleet.call("b")
    assert fleet.connect("a", 2) == []  # the broker may have had it before "b" began
    assert fleet.connect("b", 1) == []


def test_stamps_of_another_coordinator_or_of_no_sense_prove_nothing(fleet: Fleet) -> None:
    fleet.call("a")
    fleet.call("b")
    for stamp in ("other.9", "life.", "life.x", "9", "", "life.²", "life." + "9" * 5000):
        fleet.stamps["a"] = stamp
        assert fleet.call("a", is_answered=False) == []


def test_of_three_all_later_ones_are_refused(fleet: Fleet) -> None:
    for name in "abc":
        fleet.call(name)
    fleet.call("a")
    assert fleet.call("a") == ["b", "c"]


def test_a_refused_agent_stays_refused_and_the_other_may_restart(fleet: Fleet) -> None:
    for name in ("a", "b", "a", "a", "b", "b"):
        fleet.call(name)
    assert fleet.call("a2") == fleet.call("a2") == []
    assert fleet.twins.get_rejection_reason("pi", "b") is not None
    assert fleet.twins.get_rejection_reason("pi", "a2") is None
    assert fleet.call("b2") == fleet.call("b2") == []  # "b" switched off and on, while "a2" says nothing more


def test_the_operator_reads_what_differs_for_an_hour_since_the_copy_was_heard(fleet: Fleet) -> None:
    fleet.connect("a" * 32, 1, board="b1")
    fleet.connect("c" * 32, 1, board="b2")
    fleet.call("c" * 32, address="10.0.0.7")
    fleet.connect("a" * 32, 2, board="b1")
    told = "refused the later of two agents (boot cccccccc, board b2, at 10.0.0.7) on another board; kept the other "
    assert fleet.twins.get_warning("pi", WARNING_TTL_S) == told + "(boot aaaaaaaa, board b1)"
    fleet.now_s = 10.0
    fleet.call("c" * 32)
    assert fleet.twins.get_warning("pi", WARNING_TTL_S + 10.0)
    assert fleet.twins.get_warning("pi", WARNING_TTL_S + 11.0) is None


def test_nothing_that_devices_say_makes_it_grow(fleet: Fleet) -> None:
    for number in range(1000):
        fleet.call(f"{number:0>200}")
    device = fleet.twins._devices["pi"]
    assert len(device.instances) <= MAX_INSTANCES
    assert all(len(name) <= 64 for name in device.instances)
