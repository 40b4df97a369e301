from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_fleet import beat, status

from edgefl.coordinator.fleet.presence import DevicePresence, PresenceChanged, PresenceTracker, SessionConflict
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
