"""Presence of stock SuperNodes, told by their requests."""

from __future__ import annotations

import pytest

from edgefl.coordinator.fleet.presence import DevicePresence, PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry, DeviceRestarted, HeldInstructions, RegistryEvent
from edgefl.coordinator.fleet.supernode_presence import BUSY_S, SuperNodePresence

NODE = 7


class Site:
    """A registry with one SuperNode, at a time that the test sets."""

    def __init__(self, *, is_present: bool = False) -> None:
        self.now_s, self.events = 100.0, list[RegistryEvent]()
        self.registry = DeviceRegistry(PresenceTracker(), lambda: self.now_s)
        self.registry.add("node", node_id=NODE, role="trainer", groups=(), examples={})
        self.registry.record_broker_link(connected=True)
        self.registry.subscribe(self.events.append)
        self.presence = SuperNodePresence(self.registry, lambda: self.now_s)
        self.presence.add(NODE, "node", is_present=is_present)

    def ask(self, method: str = "pull-messages", held: tuple[str, ...] | None = ()) -> None:
        """A request, as the Fleet API handles it."""
        self.registry.record_contact(NODE)
        self.presence.on_request(NODE, method, held if method == "pull-messages" else None)

    def wait(self, seconds: float) -> DevicePresence | None:
        for _ in range(int(seconds * 2)):
            self.now_s += 0.5
            self.presence.tick()
            self.registry.tick()
        return self.registry.get_state("node")

    def held(self) -> list[tuple[str, ...]]:
        return [event.assignment_ids for event in self.events if isinstance(event, HeldInstructions)]


def test_an_idle_supernode_that_asks_no_more_is_gone_within_half_a_minute() -> None:
    site = Site()
    site.ask("activate-node")
    for _ in range(20):
        site.ask()
        assert site.wait(3.0) is DevicePresence.ONLINE
    assert site.wait(25.0) is DevicePresence.GONE


def test_one_at_work_holds_its_message_and_has_the_time_of_flower_s_heartbeat() -> None:
    site = Site()
    site.ask("activate-node")
    site.ask(held=("run/1",))
    assert site.wait(30.0) is DevicePresence.ONLINE
    site.ask("send-node-heartbeat")
    assert site.wait(BUSY_S) is DevicePresence.ONLINE
    assert set(site.held()) == {("run/1",)}
    assert site.wait(20.0) is DevicePresence.GONE


def test_one_that_asks_again_holds_nothing_any_more() -> None:
    site = Site()
    site.ask("activate-node")
    site.ask(held=("run/1",))
    site.wait(5.0)
    site.ask()
    site.wait(1.0)
    assert site.held()[-1] == ()


def test_a_goodbye_counts_at_once_and_a_new_process_is_a_restart() -> None:
    site = Site()
    site.ask("activate-node")
    site.ask("deactivate-node")
    assert site.wait(0.5) is DevicePresence.OFFLINE
    assert not any(isinstance(event, DeviceRestarted) for event in site.events)
    site.ask("activate-node")
    site.ask(held=("run/1",))
    site.ask("activate-node")
    assert site.wait(0.5) is DevicePresence.ONLINE
    assert site.held()[-1] == ()
    assert any(isinstance(event, DeviceRestarted) for event in site.events)


@pytest.mark.parametrize(("is_present", "state"), [(True, DevicePresence.ONLINE), (False, None)])
def test_one_that_an_earlier_coordinator_saw_last_may_be_at_work(
    is_present: bool,
    state: DevicePresence | None,
) -> None:
    site = Site(is_present=is_present)
    assert site.wait(BUSY_S - 1) is state
    if is_present:
        assert site.held()[0] == ()
        assert site.wait(20.0) is DevicePresence.GONE


def test_one_at_work_while_its_coordinator_starts_again_stays_present_by_its_heartbeats() -> None:
    site = Site(is_present=True)
    site.wait(10.0)
    for _ in range(4):
        site.ask("send-node-heartbeat")
        assert site.wait(30.0) is DevicePresence.ONLINE
    site.ask()
    assert site.wait(25.0) is DevicePresence.GONE


def test_a_second_process_with_its_key_is_told_of_and_takes_nothing_from_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    site = Site()
    site.ask("activate-node")
    for number in (1, 2):
        num_before = len(site.held())
        site.ask(held=(f"run/{number}",))
        site.ask("confirm-message-received")
        for _ in range(3):
            site.ask()
            site.wait(3.0)
        assert set(site.held()[num_before:]) == {(f"run/{number}",)}
    assert [record.getMessage().partition(":")[0] for record in caplog.records if record.levelname == "WARNING"] == [
        "the SuperNode of node asks for messages while it works on one"
    ]
    site.ask("push-messages")
    site.ask()
    site.wait(1.0)
    assert site.held()[-1] == ()


def test_a_removed_supernode_is_told_of_no_more() -> None:
    site = Site(is_present=True)
    site.presence.remove(NODE)
    site.ask()
    site.wait(10.0)
    assert site.held() == []
