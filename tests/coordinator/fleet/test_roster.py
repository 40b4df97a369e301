import threading

import pytest

from edgefl.coordinator.fleet.presence import DeviceState, Flapping, Presence, Transition
from edgefl.coordinator.fleet.roster import SMOOTHING, Added, Changed, Holding, Removed, Restarted, Roster
from edgefl.coordinator.fleet.twins import Cloned, TwinTried
from edgefl.errors import NetworkError
from edgefl.protocol import EVALUATOR_NAME, Capabilities, Heartbeat, Status
from edgefl.types import Role


class Fleet:
    """A roster with a clock that is set by hand, and all that its listeners hear."""

    def __init__(self):
        self.now_s, self.heard = 0.0, []
        self.roster = Roster(Presence(), lambda: self.now_s)
        self.roster.listen(self.heard.append)
        self.roster.note_bus(connected=True)

    def add(self, name, node_id, *, role="trainer", groups=(), examples=None):
        self.roster.add(name, node_id=node_id, role=role, groups=groups, examples=examples or {"digits": 5})

    def say(self, name, state="online", *, boot="boot-1", session=1):
        self.roster.note_status(name, Status(state=state, boot_id=boot, session_no=session))

    def beat(self, name, seq=1, holding=()):
        self.roster.note_heartbeat(name, Heartbeat(seq=seq, session_no=1, uptime_s=1.0, holding=list(holding)))

    def take(self):
        """All that was heard since, but for who was added."""
        heard, self.heard[:] = list(self.heard), []
        return [event for event in heard if not isinstance(event, Added)]


@pytest.fixture
def fleet():
    made = Fleet()
    made.add("pi", 7, groups=("lab",))
    return made


def speed_of(fleet, name="pi"):
    return next(row["seconds_per_iteration"] for row in fleet.roster.facts() if row["device_id"] == name)


def names(fleet):
    return [info.device_id for info in fleet.roster.workers()]


def test_a_device_is_found_by_its_name_and_by_its_node(fleet):
    assert (fleet.roster.node_of("pi"), fleet.roster.device_of(7)) == (7, "pi")
    info = fleet.roster.info("pi")
    assert (info.role, info.groups, info.tasks, dict(info.examples)) == (
        Role.TRAINER,
        ("lab",),
        ("digits",),
        {"digits": 5},
    )
    assert (fleet.roster.node_of("x"), fleet.roster.device_of(8), fleet.roster.info("x")) == (None, None, None)


def test_sources_tell_the_coordinators_own_evaluator_from_others(fleet):
    fleet.add(EVALUATOR_NAME, 1, role="evaluator")
    fleet.add("judge", 2, role="evaluator")
    assert [fleet.roster.info(name).source for name in (EVALUATOR_NAME, "judge", "pi")] == [
        "coordinator",
        "evaluator",
        "device",
    ]


def test_who_is_online_or_late_can_work_and_nobody_else_can(fleet):
    for number, name in enumerate(["gone", "left", "draining", "silent"]):
        fleet.add(name, 20 + number)
    for name in ("pi", "gone", "left"):
        fleet.say(name)
    fleet.say("left", "offline")
    fleet.say("draining", "draining")
    fleet.now_s = 12.0
    fleet.say("draining", "draining")
    fleet.beat("pi")
    fleet.roster.tick()
    assert names(fleet) == ["gone", "pi"]
    assert fleet.roster.state("gone") == DeviceState.LATE
    fleet.now_s = 17.0
    fleet.roster.tick()
    assert names(fleet) == ["pi"]


def test_messages_of_devices_that_never_joined_are_ignored(fleet):
    fleet.say("stranger")
    fleet.beat("stranger")
    fleet.roster.note_capabilities("stranger", Capabilities(facts={}, shards={"digits": 5}))
    fleet.roster.note_contact(99)
    fleet.roster.note_speed("stranger", 1.0)
    assert fleet.take() == []
    assert names(fleet) == []
    assert fleet.roster.remove("stranger") is None
    assert [row["device_id"] for row in fleet.roster.facts()] == ["pi"]


def test_listeners_hear_changes_until_they_end_it(fleet):
    also = []
    end = fleet.roster.listen(also.append)
    fleet.say("pi")
    end()
    end()
    fleet.say("pi", "offline")
    assert [(event.before, event.after) for event in fleet.take()] == [
        (None, DeviceState.ONLINE),
        (DeviceState.ONLINE, DeviceState.OFFLINE),
    ]
    assert len(also) == 1


def test_a_new_boot_is_a_restart_and_the_first_one_is_not(fleet):
    fleet.say("pi")
    fleet.say("pi", session=2)
    fleet.say("pi", "offline", session=2)
    assert not [event for event in fleet.take() if isinstance(event, Restarted)]
    fleet.say("pi", boot="boot-2", session=3)
    restarted, transition = fleet.take()
    assert restarted == Restarted(device_id="pi")
    assert isinstance(transition, Transition)


def test_the_goodbye_of_a_former_agent_is_no_restart(fleet):
    fleet.say("pi", boot="boot-2", session=2)
    fleet.say("pi", "offline", boot="boot-1", session=1)
    assert [type(event) for event in fleet.take()] == [Transition]
    assert names(fleet) == ["pi"]


def test_a_heartbeat_says_what_the_device_holds_and_when(fleet):
    fleet.now_s = 3.0
    fleet.beat("pi", holding=["r/a", "r/b"])
    assert fleet.take()[-1] == Holding(device_id="pi", assignment_ids=("r/a", "r/b"), at_s=3.0)


def test_capabilities_replace_the_counts_of_all_shards(fleet):
    fleet.roster.note_capabilities("pi", Capabilities(facts={"cores": 4}, shards={"mnist": 9, "broken": "many"}))
    info = fleet.roster.info("pi")
    assert (info.tasks, dict(info.examples), info.capabilities, info.groups) == (
        ("mnist",),
        {"mnist": 9},
        {"cores": 4},
        ("lab",),
    )
    assert fleet.take() == [Changed(device_id="pi")]


def test_speeds_are_smoothed_and_begin_with_the_first_measurement(fleet):
    assert speed_of(fleet) is None
    fleet.roster.note_speed("pi", 2.0)
    assert speed_of(fleet) == 2.0
    fleet.roster.note_speed("pi", 4.0)
    assert speed_of(fleet) == pytest.approx(2.0 + SMOOTHING * 2.0)


def test_contact_over_https_keeps_a_silent_device_present(fleet):
    fleet.say("pi")
    for fleet.now_s in (10.0, 20.0, 30.0):
        fleet.roster.note_contact(7)
        fleet.roster.tick()
    assert names(fleet) == ["pi"]


def test_nobody_is_judged_while_the_broker_is_away(fleet):
    fleet.say("pi")
    fleet.roster.note_bus(connected=False)
    fleet.now_s = 500.0
    fleet.roster.tick()
    assert names(fleet) == ["pi"]


def test_a_removed_device_is_forgotten_and_those_who_wait_for_it_are_told(fleet):
    fleet.say("pi")
    fleet.take()
    assert fleet.roster.remove("pi") == 7
    assert fleet.take() == [Removed(device_id="pi")]
    assert (fleet.roster.device_of(7), fleet.roster.info("pi"), names(fleet)) == (None, None, [])
    assert fleet.roster.state("pi") is None


def test_a_device_that_joins_anew_leaves_its_old_node_behind(fleet):
    fleet.roster.note_speed("pi", 2.0)
    fleet.add("pi", 8)
    assert (fleet.roster.device_of(7), fleet.roster.device_of(8)) == (None, "pi")
    assert speed_of(fleet) is None


def test_a_device_that_asks_twice_for_its_place_keeps_what_is_known_of_it(fleet):
    fleet.roster.note_speed("pi", 2.0)
    fleet.say("pi")
    fleet.add("pi", 7, groups=("field",))
    fleet.take()
    fleet.say("pi", boot="boot-2", session=2)
    assert Restarted(device_id="pi") in fleet.take()
    assert speed_of(fleet) == 2.0
    assert fleet.roster.info("pi").groups == ("field",)


def test_a_status_that_makes_no_sense_is_refused(fleet):
    with pytest.raises(NetworkError, match="state is 'sleepy'"):
        fleet.say("pi", "sleepy")


def test_the_later_of_two_agents_that_take_turns_at_the_broker_is_refused_and_heard_no_more(fleet):
    fleet.say("pi", boot="a", session=5)
    fleet.say("pi", boot="b", session=5)
    fleet.take()
    fleet.say("pi", boot="a", session=6)
    cloned = [event for event in fleet.take() if isinstance(event, Cloned)]
    assert [(event.device_id, event.refused) for event in cloned] == [("pi", "b")]
    fleet.say("pi", "draining", boot="b", session=6)
    fleet.roster.note_heartbeat("pi", Heartbeat(seq=9, session_no=6, uptime_s=1.0, boot_id="b"))
    heard = fleet.take()
    assert [(type(event), event.refused) for event in heard] == [(TwinTried, "b")]
    assert fleet.roster.state("pi") is DeviceState.ONLINE
    assert fleet.roster.heartbeat("pi") is None
    fleet.roster.note_heartbeat("pi", Heartbeat(seq=1, session_no=6, uptime_s=1.0, boot_id="a"))
    assert fleet.roster.heartbeat("pi").seq == 1
    [row] = fleet.roster.facts()
    assert "refused the later of two agents (boot b)" in row["cloned"]


def test_a_copy_that_only_asks_over_https_is_refused_and_what_it_took_is_given_again(fleet):
    def call(instance):
        refusal = fleet.roster.note_call(7, instance, stamp=stamps.get(instance, ""), address="10.0.0.7")
        stamps[instance] = fleet.roster.stamp(7)
        return refusal

    stamps = {}
    assert [call("a"), call("b"), call("a")] == [None, None, None]
    assert fleet.take() == [Restarted(device_id="pi")], "as yet b may be what a has become"
    assert call("a") is None
    cloned, restarted = fleet.take()
    assert (cloned.refused, restarted) == ("b", Restarted(device_id="pi"))
    assert "(boot b, at 10.0.0.7)" in call("b")
    assert call("a") is None


def test_a_restart_that_only_https_shows_is_told_once_and_late_requests_of_the_dead_are_none(fleet):
    told = []
    for instance in ("a", "a", "b", "b", "a", "b"):
        fleet.roster.note_call(7, instance, stamp="", address="10.0.0.7")
        told.append(fleet.take())
    assert told == [[], [], [Restarted(device_id="pi")], [], [], []]


@pytest.mark.parametrize("is_mqtt_first", [True, False])
def test_a_restart_that_mqtt_and_https_both_show_is_told_once(fleet, is_mqtt_first):
    def hear(boot, session):
        tell = [
            lambda: fleet.say("pi", boot=boot, session=session),
            lambda: fleet.roster.note_call(7, boot, stamp="", address="10.0.0.7"),
        ]
        for way in tell if is_mqtt_first else reversed(tell):
            way()
        return [event for event in fleet.take() if isinstance(event, Restarted)]

    assert hear("a", 1) == []
    assert hear("b", 2) == [Restarted(device_id="pi")]
    assert hear("b", 3) == []
    assert hear("c", 4) == [Restarted(device_id="pi")]
    assert fleet.roster.cloned("pi") is None


def test_a_device_that_was_removed_and_joins_again_has_no_twin_any_more(fleet):
    for boot, session in (("a", 1), ("b", 1), ("a", 2)):
        fleet.say("pi", boot=boot, session=session)
    assert fleet.roster.cloned("pi")
    fleet.roster.remove("pi")
    fleet.add("pi", 9)
    assert fleet.roster.cloned("pi") is None
    assert fleet.roster.note_call(9, "b", stamp="", address="") is None


def test_two_sessions_of_one_agent_that_take_turns_are_reported(fleet):
    fleet.say("pi", session=2)
    for seq in range(1, 4):
        for session in (1, 2):
            fleet.roster.note_heartbeat("pi", Heartbeat(seq=seq, session_no=session, uptime_s=1.0))
    assert Flapping(device_id="pi") in fleet.take()


def test_the_operators_facts_are_one_row_per_device_seen_or_not(fleet):
    fleet.add("new", 9)
    fleet.say("pi")
    fleet.roster.note_heartbeat("pi", Heartbeat(seq=1, session_no=1, uptime_s=1.0, temperature_c=55.5, run="r"))
    fleet.now_s = 2.0
    new, pi = fleet.roster.facts()
    assert (new["device_id"], new["presence"], new["silent_s"]) == ("new", "never seen", None)
    assert (pi["presence"], pi["silent_s"], pi["temperature_c"], pi["run"]) == ("online", 2.0, 55.5, "r")


def test_many_threads_may_use_it_at_once():
    fleet = Fleet()
    for number in range(8):
        fleet.add(f"pi-{number}", number + 1)
    failures = []

    def busy(number):
        name = f"pi-{number}"
        try:
            for turn in range(1, 100):
                fleet.say(name, session=turn)
                fleet.beat(name, seq=turn)
                fleet.roster.note_contact(number + 1)
                fleet.roster.note_speed(name, 1.0)
                fleet.roster.workers()
                fleet.roster.facts()
                end = fleet.roster.listen(lambda _event: None)
                fleet.roster.tick()
                end()
            fleet.say(name, "offline", session=100)
        except Exception as error:  # noqa: BLE001 told to the thread of the test
            failures.append(error)

    threads = [threading.Thread(target=busy, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert names(fleet) == []
    assert len(fleet.roster._listeners._heard_by) == 1
    gone = [event.device_id for event in fleet.heard if isinstance(event, Transition) and event.after == "offline"]
    assert sorted(gone) == [f"pi-{number}" for number in range(8)]


def test_a_device_that_joins_again_is_heard_of(fleet):
    fleet.heard.clear()
    fleet.add("pi", 7, groups=("home",))
    fleet.add("pi", 8)
    assert fleet.heard == [Added(device_id="pi")] * 2
    assert (fleet.roster.info("pi").groups, fleet.roster.device_of(7)) == ((), None)


def test_what_was_told_at_the_join_is_known_before_the_device_speaks(fleet):
    facts = {"memory_bytes": 512, "blocks": {"digits": [0, 1]}}
    fleet.roster.add("pi-2", node_id=9, role="trainer", groups=(), examples={"digits": 5}, facts=facts)
    info = fleet.roster.info("pi-2")
    assert (info.capabilities["memory_bytes"], info.blocks) == (512, {"digits": (0, 1)})
    fleet.add("pi-2", 9)
    assert fleet.roster.info("pi-2").blocks == {"digits": (0, 1)}
    fleet.roster.add("pi-2", node_id=9, role="trainer", groups=(), examples={"digits": 5}, facts={})
    assert fleet.roster.info("pi-2").blocks == {}


def test_a_drained_device_is_no_worker_and_its_change_is_told_once(fleet):
    fleet.say("pi")
    fleet.take()
    fleet.roster.set_drained("pi", drained=True)
    fleet.roster.set_drained("pi", drained=True)
    fleet.roster.set_drained("nobody", drained=True)
    assert fleet.take() == [Changed(device_id="pi")]
    assert (names(fleet), fleet.roster.is_drained("pi"), fleet.roster.is_drained("nobody")) == ([], True, False)
    fleet.add("pi", 7)
    assert fleet.roster.is_drained("pi"), "joining again with the same key changes nothing"


def test_what_happens_to_a_device_is_heard_in_its_order_whichever_threads_tell_it(fleet):
    fleet.add("pi-2", 8)
    for name in ("pi", "pi-2"):
        fleet.beat(name)
    fleet.take()
    is_told, is_back = threading.Event(), threading.Event()

    def linger(event):
        if isinstance(event, Transition) and event.after is DeviceState.GONE and not is_told.is_set():
            is_told.set()
            assert is_back.wait(30)

    fleet.roster.listen(linger)
    fleet.now_s = 17.0
    ticking = threading.Thread(target=fleet.roster.tick)
    ticking.start()
    assert is_told.wait(30)
    for node_id in (7, 8):  # both are back before the second one's silence is told
        fleet.roster.note_contact(node_id)
    is_back.set()
    ticking.join(30)
    assert not ticking.is_alive()
    heard = [(event.device_id, event.after) for event in fleet.take()]
    for name in ("pi", "pi-2"):
        assert [after for device_id, after in heard if device_id == name] == [DeviceState.GONE, DeviceState.ONLINE]
        assert fleet.roster.state(name) is DeviceState.ONLINE
