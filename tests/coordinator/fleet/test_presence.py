from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.coordinator.fleet.presence import DeviceState, Flapping, Presence, Transition
from edgefl.errors import NetworkError
from edgefl.protocol import Heartbeat, Status

ONLINE, LATE, GONE = DeviceState.ONLINE, DeviceState.LATE, DeviceState.GONE
OFFLINE, DRAINING = DeviceState.OFFLINE, DeviceState.DRAINING
LONGEST_S = 5.0 * 1.1


def connected_presence(now_s=0.0):
    presence = Presence()
    presence.bus(connected=True, now_s=now_s)
    return presence


def online(session_no=1, boot_id="a", state="online"):
    return Status(state=state, boot_id=boot_id, session_no=session_no)


def goodbye(session_no=1, boot_id="a"):
    return Status(state="offline", boot_id=boot_id, session_no=session_no)


def will(session_no=1, boot_id="a"):
    return Status(state="offline", boot_id=boot_id, session_no=session_no, will=True)


def beat(seq, session_no=1):
    return Heartbeat(seq=seq, session_no=session_no, uptime_s=1.0)


def states(events):
    return [event.after for event in events if isinstance(event, Transition)]


def test_a_first_status_brings_a_device_online():
    presence = connected_presence()
    assert presence.status("pi", online(), 0.0) == [
        Transition(device_id="pi", before=None, after=ONLINE, reason="status online")
    ]
    assert presence.is_present("pi")
    assert presence.present() == ["pi"]


def test_silence_makes_late_after_two_heartbeats_and_gone_after_three():
    presence = connected_presence()
    presence.status("pi", online(), 0.0)
    assert presence.tick(2 * LONGEST_S - 0.01) == []
    assert states(presence.tick(2 * LONGEST_S + 0.01)) == [LATE]
    assert presence.is_present("pi")
    assert presence.tick(3 * LONGEST_S - 0.01) == []
    assert states(presence.tick(3 * LONGEST_S + 0.01)) == [GONE]
    assert not presence.is_present("pi")


def test_gone_by_silence_takes_no_more_than_20_seconds_with_a_check_a_second():
    presence = connected_presence()
    presence.status("pi", online(), 0.0)
    presence.heartbeat("pi", beat(1), 100.0)
    gone_s = next(t for t in range(100, 200) if presence.tick(float(t)) and presence.state("pi") is GONE)
    assert gone_s - 100 <= 20


@pytest.mark.parametrize("sign_of_life", ["heartbeat", "status", "contact"])
def test_any_sign_of_life_brings_a_gone_device_back(sign_of_life):
    presence = connected_presence()
    presence.status("pi", online(), 0.0)
    presence.tick(100.0)
    assert presence.state("pi") is GONE
    if sign_of_life == "heartbeat":
        events = presence.heartbeat("pi", beat(1), 101.0)
    elif sign_of_life == "status":
        events = presence.status("pi", online(2), 101.0)
    else:
        events = presence.seen("pi", 101.0)
    assert states(events) == [ONLINE]
    assert presence.tick(101.0 + 2 * LONGEST_S - 0.1) == []


def test_a_will_makes_late_at_once_and_gone_after_one_more_heartbeat():
    presence = connected_presence()
    presence.status("pi", online(), 0.0)
    assert states(presence.status("pi", will(), 1.0)) == [LATE]
    assert presence.tick(1.0 + LONGEST_S - 0.01) == []
    assert states(presence.tick(1.0 + LONGEST_S + 0.01)) == [GONE]


def test_a_device_that_reconnects_after_its_will_is_never_gone():
    presence = connected_presence()
    presence.status("pi", online(1), 0.0)
    presence.status("pi", will(1), 1.0)
    assert states(presence.status("pi", online(2), 3.0)) == [ONLINE]
    assert presence.tick(8.0) == []


def test_an_offline_of_an_older_session_is_ignored():
    presence = connected_presence()
    presence.status("pi", online(2), 0.0)
    assert presence.status("pi", will(1), 1.0) == []
    assert presence.status("pi", goodbye(1), 1.0) == []
    assert presence.state("pi") is ONLINE


def test_a_heartbeat_newer_than_the_will_overrides_it():
    presence = connected_presence()
    presence.status("pi", online(), 0.0)
    presence.heartbeat("pi", beat(1), 1.0)
    presence.status("pi", will(), 2.0)
    assert states(presence.heartbeat("pi", beat(2), 3.0)) == [ONLINE]
    assert presence.tick(9.0) == []


def test_a_heartbeat_that_was_sent_before_the_will_does_not_override_it():
    presence = connected_presence()
    presence.status("pi", online(), 0.0)
    presence.heartbeat("pi", beat(5), 1.0)
    presence.status("pi", will(), 2.0)
    assert presence.heartbeat("pi", beat(4), 3.0) == []
    assert presence.state("pi") is LATE


def test_a_goodbye_is_offline_at_once_and_stays_so_through_other_contact():
    presence = connected_presence()
    presence.status("pi", online(), 0.0)
    assert states(presence.status("pi", goodbye(), 1.0)) == [OFFLINE]
    assert presence.seen("pi", 2.0) == []
    assert presence.tick(100.0) == []
    assert presence.state("pi") is OFFLINE


def test_contact_after_a_will_shows_that_the_device_lives():
    presence = connected_presence()
    presence.status("pi", online(), 0.0)
    presence.status("pi", will(), 1.0)
    assert states(presence.seen("pi", 2.0)) == [ONLINE]


def test_a_retained_will_of_a_device_that_died_before_we_came_is_gone_at_once():
    presence = connected_presence()
    assert states(presence.status("pi", will(7), 0.0)) == [GONE]


def test_a_draining_device_stays_draining_through_heartbeats_and_is_gone_by_silence():
    presence = connected_presence()
    presence.status("pi", online(), 0.0)
    assert states(presence.status("pi", online(state="draining"), 1.0)) == [DRAINING]
    assert presence.heartbeat("pi", beat(1), 2.0) == []
    assert presence.is_present("pi")
    assert states(presence.tick(2.0 + 3 * LONGEST_S)) == [GONE]
    assert states(presence.heartbeat("pi", beat(2), 30.0)) == [DRAINING]


def test_nobody_is_judged_while_our_own_link_is_down():
    presence = connected_presence()
    presence.status("pi", online(), 0.0)
    presence.bus(connected=False, now_s=1.0)
    assert presence.tick(1000.0) == []
    assert presence.next_check_s() is None


def test_everybody_gets_the_full_time_after_our_link_is_back():
    presence = connected_presence()
    presence.status("pi", online(), 0.0)
    presence.status("quick", online(), 0.0)
    presence.status("quick", will(), 1.0)
    presence.bus(connected=False, now_s=1.0)
    presence.bus(connected=True, now_s=1000.0)
    assert presence.tick(1000.0 + LONGEST_S - 0.01) == []
    assert [event.device_id for event in presence.tick(1000.0 + LONGEST_S + 0.01)] == ["quick"]
    assert presence.tick(1000.0 + 2 * LONGEST_S - 0.01) == []
    assert states(presence.tick(1000.0 + 3 * LONGEST_S)) == [GONE]


def test_presence_starts_without_judging():
    presence = Presence()
    presence.status("pi", online(), 0.0)
    assert presence.tick(1000.0) == []


def test_the_next_check_is_when_something_can_change():
    presence = connected_presence()
    assert presence.next_check_s() is None
    presence.status("pi", online(), 0.0)
    assert presence.next_check_s() == pytest.approx(2 * LONGEST_S)
    presence.status("pi", will(), 1.0)
    assert presence.next_check_s() == pytest.approx(1 + LONGEST_S)
    presence.tick(1 + LONGEST_S)
    assert presence.next_check_s() is None


def test_a_new_card_that_counts_its_sessions_from_one_again_is_accepted():
    presence = connected_presence()
    presence.status("pi", online(57, "old"), 0.0)
    assert presence.status("pi", online(1, "new"), 1.0) == []
    assert states(presence.status("pi", will(1, "new"), 2.0)) == [LATE]


def test_the_late_will_of_a_former_boot_is_ignored_whatever_its_number():
    presence = connected_presence()
    presence.status("pi", online(57, "old"), 0.0)
    presence.status("pi", online(1, "new"), 1.0)
    assert presence.status("pi", will(57, "old"), 2.0) == []
    assert presence.state("pi") is ONLINE


def test_two_boards_that_take_turns_under_one_name_are_reported():
    presence = connected_presence()
    events = []
    for turn in range(6):
        events += presence.status("pi", online(10 + turn, "ab"[turn % 2]), float(turn))
    assert [event for event in events if isinstance(event, Flapping)] == [Flapping(device_id="pi")]


def test_two_sessions_whose_heartbeats_alternate_are_reported():
    presence = connected_presence()
    events = presence.status("pi", online(2), 0.0)
    for turn in range(1, 4):
        events += presence.heartbeat("pi", beat(turn, 1), float(turn))
        events += presence.heartbeat("pi", beat(turn, 2), float(turn))
    assert [event for event in events if isinstance(event, Flapping)] == [Flapping(device_id="pi")]


def test_a_board_that_reboots_often_is_no_twin():
    presence = connected_presence()
    events = []
    for turn in range(20):
        events += presence.status("pi", online(turn, f"boot-{turn}"), float(turn))
    assert not [event for event in events if isinstance(event, Flapping)]


def test_a_few_late_messages_of_an_old_session_are_no_twin():
    presence = connected_presence()
    events = presence.status("pi", online(2), 0.0)
    for seq in range(5):
        events += presence.heartbeat("pi", beat(seq, 1), 1.0)
    assert not [event for event in events if isinstance(event, Flapping)]


def test_a_state_that_we_do_not_know_is_malformed():
    with pytest.raises(NetworkError, match="state is 'asleep'"):
        Presence().status("pi", online(state="asleep"), 0.0)


def test_a_forgotten_device_starts_over():
    presence = connected_presence()
    presence.status("pi", online(57), 0.0)
    presence.forget("pi")
    assert presence.state("pi") is None
    assert states(presence.status("pi", online(1), 1.0)) == [ONLINE]


def test_records_tell_what_is_known():
    presence = connected_presence()
    presence.status("pi", online(3, "boot"), 0.0)
    presence.heartbeat("pi", beat(9, 3), 1.0)
    (record,) = presence.records(5.0)
    assert (record.state, record.session_no, record.boot_id, record.silent_s) == (ONLINE, 3, "boot", 4.0)
    assert record.heartbeat.seq == 9


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from(["will", "goodbye"])), max_size=12), st.integers(0, 12))
def test_wills_of_older_sessions_never_end_the_newest_wherever_they_arrive(old, position):
    presence = connected_presence()
    for at, (session_no, kind) in enumerate(old):
        if at == min(position, len(old)):
            break
        presence.status("pi", will(session_no) if kind == "will" else goodbye(session_no), float(at) / 100)
    presence.status("pi", online(6), 1.0)
    for session_no, kind in old[position:]:
        presence.status("pi", will(session_no) if kind == "will" else goodbye(session_no), 1.1)
    assert presence.state("pi") is ONLINE
    assert presence.tick(1.1 + LONGEST_S) == []
