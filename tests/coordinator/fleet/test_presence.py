from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_fleet import beat, status

from edgefl.coordinator.fleet.presence import (
    MAX_INSTANCES,
    WARNING_TTL_S,
    CloneDetector,
    CloneRejected,
    DevicePresence,
    PresenceChanged,
    PresenceTracker,
    SessionConflict,
)
from edgefl.core.errors import NetworkError

ONLINE, LATE, GONE = DevicePresence.ONLINE, DevicePresence.LATE, DevicePresence.GONE
OFFLINE, DRAINING = DevicePresence.OFFLINE, DevicePresence.DRAINING
LONGEST_S = 5.0 * 1.1
TICK, SEEN, UP, DOWN = "tick", "seen", "bus up", "bus down"


def will(session=1, boot="boot-1"):
    return status("offline", session=session, boot=boot, will=True)


def connected_presence():
    presence = PresenceTracker()
    presence.on_broker_link(connected=True, now_s=0.0)
    return presence


def tell(presence, now_s, what, name="pi"):
    if what in (UP, DOWN):
        presence.on_broker_link(connected=what is UP, now_s=now_s)
        return []
    if what is TICK:
        return presence.tick(now_s)
    if what is SEEN:
        return presence.on_contact(name, now_s)
    return (presence.on_heartbeat if hasattr(what, "seq") else presence.on_status)(name, what, now_s)


def states(events):
    return [event.after for event in events if isinstance(event, PresenceChanged)]


BORN = (0.0, status(), [ONLINE])
STORIES = {
    "silence makes late after two heartbeats and gone after three": (
        BORN, (2 * LONGEST_S - 0.01, TICK, []), (2 * LONGEST_S + 0.01, TICK, [LATE]),
        (3 * LONGEST_S - 0.01, TICK, []), (3 * LONGEST_S + 0.01, TICK, [GONE]),
    ),
    **{
        f"a gone device comes back by {way}": (
            BORN, (100.0, TICK, [GONE]), (101.0, sign, [ONLINE]), (101.0 + 2 * LONGEST_S - 0.1, TICK, []),
        )
        for way, sign in {"heartbeat": beat(1), "status": status(session=2), "contact": SEEN}.items()
    },
    "a will makes late at once and gone after one more heartbeat": (
        BORN, (1.0, will(), [LATE]), (1.0 + LONGEST_S - 0.01, TICK, []), (1.0 + LONGEST_S + 0.01, TICK, [GONE]),
    ),
    "a device that reconnects after its will is never gone": (
        BORN, (1.0, will(), [LATE]), (3.0, status(session=2), [ONLINE]), (8.0, TICK, []),
    ),
    "an offline of an older session is ignored": (
        (0.0, status(session=2), [ONLINE]), (1.0, will(1), []), (1.0, status("offline"), []),
    ),
    "a heartbeat newer than the will overrides it": (
        BORN, (1.0, beat(1), []), (2.0, will(), [LATE]), (3.0, beat(2), [ONLINE]), (9.0, TICK, []),
    ),
    "a heartbeat that was sent before the will does not": (
        BORN, (1.0, beat(5), []), (2.0, will(), [LATE]), (3.0, beat(4), []),
    ),
    "contact after a will shows that the device lives": (BORN, (1.0, will(), [LATE]), (2.0, SEEN, [ONLINE])),
    "a goodbye is offline at once and stays so through other contact": (
        BORN, (1.0, status("offline"), [OFFLINE]), (2.0, SEEN, []), (100.0, TICK, []),
    ),
    "a retained will of a device that died before we came is gone at once": ((0.0, will(7), [GONE]),),
    "a draining device stays so through heartbeats and is gone by silence": (
        BORN, (1.0, status("draining"), [DRAINING]), (2.0, beat(1), []), (2.0 + 3 * LONGEST_S, TICK, [GONE]),
        (30.0, beat(2), [DRAINING]),
    ),
    "nobody is judged while our own link is down, and everybody gets the full time after that": (
        BORN, (1.0, DOWN, []), (1000.0, TICK, []), (1000.0, UP, []), (1000.0 + 2 * LONGEST_S - 0.01, TICK, []),
        (1000.0 + 3 * LONGEST_S, TICK, [GONE]),
    ),
    "so does one that left a will before": (
        BORN, (1.0, will(), [LATE]), (1.0, DOWN, []), (1000.0, UP, []), (1000.0 + LONGEST_S - 0.01, TICK, []),
        (1000.0 + LONGEST_S + 0.01, TICK, [GONE]),
    ),
    "a new card that counts its sessions from one again is accepted, and no late will of its former boot": (
        (0.0, status(session=57), [ONLINE]), (1.0, status(boot="new"), []), (2.0, will(57), []),
        (3.0, will(boot="new"), [LATE]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_presence_follows_from_what_devices_say_and_when(story):
    presence = connected_presence()
    for now_s, what, expected in story:
        assert states(tell(presence, now_s, what)) == expected, (now_s, what)


def test_gone_by_silence_takes_no_more_than_20_seconds_with_a_check_a_second():
    presence = connected_presence()
    presence.on_status("pi", status(), 0.0)
    presence.on_heartbeat("pi", beat(1), 100.0)
    gone_s = next(t for t in range(100, 200) if presence.tick(float(t)) and presence.get_state("pi") is GONE)
    assert gone_s - 100 <= 20


def test_it_judges_nobody_before_the_link_to_the_broker_is_up():
    presence = PresenceTracker()
    presence.on_status("pi", status(), 0.0)
    assert presence.tick(1000.0) == []
    presence.on_broker_link(connected=True, now_s=1000.0)
    assert presence.tick(1000.0 + 2 * LONGEST_S)


def test_a_will_counts_after_one_heartbeat_without_a_sign_of_life():
    presence = connected_presence()
    presence.on_status("pi", status(), 0.0)
    presence.on_status("pi", will(), 1.0)
    assert presence.tick(0.99 + LONGEST_S) == []
    assert presence.tick(1 + LONGEST_S)
    assert presence.get_state("pi") is GONE


@pytest.mark.parametrize(
    ("said", "is_twin"),
    [
        ([status(session=10 + turn, boot="ab"[turn % 2]) for turn in range(6)], True),
        ([status(session=2), *(beat(turn // 2, session=1 + turn % 2) for turn in range(2, 8))], True),
        ([status(session=turn, boot=f"boot-{turn}") for turn in range(20)], False),
        ([status(session=2), *(beat(seq) for seq in range(5))], False),
    ],
    ids=["two boards take turns", "two sessions take turns", "it reboots often", "late messages of an old session"],
)
def test_two_boards_under_one_name_are_reported_once_and_what_only_looks_so_is_not(said, is_twin):
    presence = connected_presence()
    events = [event for now_s, what in enumerate(said) for event in tell(presence, float(now_s), what)]
    assert [event for event in events if isinstance(event, SessionConflict)] == [
        SessionConflict(device_id="pi")
    ] * is_twin


def test_a_state_that_we_do_not_know_is_malformed():
    with pytest.raises(NetworkError, match="state is 'asleep'"):
        PresenceTracker().on_status("pi", status("asleep"), 0.0)


def test_records_tell_what_is_known_until_a_device_is_forgotten():
    presence = connected_presence()
    presence.on_status("pi", status(session=57, boot="boot"), 0.0)
    presence.on_heartbeat("pi", beat(9, session=57), 1.0)
    (record,) = presence.list_records(5.0)
    assert (record.state, record.session_no, record.boot_id, record.silent_s) == (ONLINE, 57, "boot", 4.0)
    assert (record.heartbeat.seq, presence.get_state("pi")) == (9, ONLINE)
    presence.remove("pi")
    assert presence.get_state("pi") is None
    assert states(presence.on_status("pi", status(), 1.0)) == [ONLINE]


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=12), st.integers(0, 12))
def test_wills_of_older_sessions_never_end_the_newest_wherever_they_arrive(old, position):
    presence = connected_presence()
    offline = [will(session) if is_will else status("offline", session=session) for session, is_will in old]
    for at, said in enumerate(offline[:position]):
        presence.on_status("pi", said, float(at) / 100)
    presence.on_status("pi", status(session=6), 1.0)
    for said in offline[position:]:
        presence.on_status("pi", said, 1.1)
    assert presence.get_state("pi") is ONLINE
    assert presence.tick(1.1 + LONGEST_S) == []


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
