from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
from small_fleet import SmallFleet, beat

from edgefl.coordinator.fleet.allotments import BoardClaim
from edgefl.coordinator.fleet.presence import CloneRejected, DevicePresence, PresenceChanged
from edgefl.coordinator.fleet.registry import (
    ASK_AGAIN_S,
    MAX_BLOCKED_S,
    MAX_RUN_BLOCKERS,
    DataDrifted,
    DeviceAdded,
    DeviceChanged,
    DeviceRemoved,
    DeviceRestarted,
    EventBus,
    ExamplesChanged,
    HeldInstructions,
)
from edgefl.core.claims import GROWTH_PERIOD_S
from edgefl.core.conditions import Blocker
from edgefl.core.errors import NetworkError
from edgefl.core.protocol import EVALUATOR_NAME, Capabilities
from edgefl.core.types import Role
from edgefl.engine.fleet_state import SMOOTHING_FACTOR


class Fleet(SmallFleet):
    """Also keeps all that its listeners hear."""

    def __init__(self):
        super().__init__()
        self.heard = []
        self.registry.subscribe(self.heard.append)

    def take(self):
        """All that was heard since, but for who was added."""
        heard, self.heard[:] = list(self.heard), []
        return [event for event in heard if not isinstance(event, DeviceAdded)]

    def call(self, instance, *, node_id=7, stamp=""):
        return self.registry.record_request(node_id, instance, stamp=stamp, address="10.0.0.7")


@pytest.fixture
def fleet():
    made = Fleet()
    made.add("pi", node_id=7, groups=("lab",), state=None)
    return made


def speed_of(fleet, name="pi"):
    return next(row["seconds_per_iteration"] for row in fleet.registry.list_status_rows() if row["device_id"] == name)


def names(fleet):
    return [info.device_id for info in fleet.registry.list_schedulable()]


def test_a_device_is_found_by_its_name_and_by_its_node_and_says_what_it_is_good_for(fleet):
    assert (fleet.registry.get_node_id("pi"), fleet.registry.get_device_id(7)) == (7, "pi")
    info = fleet.registry.get_device("pi")
    assert (info.role, info.groups, info.tasks, info.examples) == (Role.TRAINER, ("lab",), ("digits",), {"digits": 5})
    assert (fleet.registry.get_node_id("x"), fleet.registry.get_device_id(8), fleet.registry.get_device("x")) == (
        None,
        None,
        None,
    )
    for name in (EVALUATOR_NAME, "judge"):
        fleet.add(name, role="evaluator", state=None)
    sources = [fleet.registry.get_device(name).source for name in (EVALUATOR_NAME, "judge", "pi")]
    assert sources == ["coordinator", "evaluator", "device"]


def test_who_is_online_or_late_can_work_and_nobody_else_can(fleet):
    for name in ("gone", "left"):
        fleet.add(name)
    fleet.say("pi")
    fleet.say("left", "offline")
    fleet.add("draining", state="draining")
    fleet.now_s = 12.0
    fleet.say("draining", "draining")
    fleet.beat("pi")
    fleet.registry.tick()
    assert names(fleet) == ["gone", "pi"]
    assert fleet.registry.get_state("gone") == DevicePresence.LATE
    fleet.registry.record_broker_link(connected=False)
    fleet.now_s = 500.0
    fleet.registry.tick()
    assert names(fleet) == ["gone", "pi"], "nobody is judged while the broker is away"
    fleet.registry.record_broker_link(connected=True)
    fleet.now_s = 515.0
    fleet.registry.record_contact(7)
    fleet.now_s = 517.0
    fleet.registry.tick()
    assert names(fleet) == ["pi"], "it was in contact over HTTPS"


def test_messages_of_devices_that_never_joined_are_ignored_and_those_that_make_no_sense_refused(fleet):
    fleet.say("stranger")
    fleet.beat("stranger")
    fleet.registry.record_capabilities("stranger", Capabilities(facts={}, shards={"digits": 5}))
    fleet.registry.record_contact(99)
    fleet.registry.record_speed("stranger", 1.0)
    assert (fleet.take(), names(fleet), fleet.registry.remove("stranger")) == ([], [], None)
    assert [row["device_id"] for row in fleet.registry.list_status_rows()] == ["pi"]
    with pytest.raises(NetworkError, match="state is 'sleepy'"):
        fleet.say("pi", "sleepy")


def test_a_new_boot_is_a_restart_and_neither_the_first_one_nor_the_goodbye_of_a_former(fleet):
    fleet.say("pi")
    fleet.say("pi", session=2)
    fleet.say("pi", "offline", session=2)
    heard = fleet.take()
    assert [(event.before, event.after) for event in heard] == [
        (None, DevicePresence.ONLINE), (DevicePresence.ONLINE, DevicePresence.OFFLINE),
    ]  # fmt: skip
    fleet.say("pi", boot="boot-2", session=3)
    restarted, transition = fleet.take()
    assert (restarted, type(transition)) == (DeviceRestarted(device_id="pi"), PresenceChanged)
    fleet.say("pi", "offline", session=1)
    assert (fleet.take(), names(fleet)) == ([], ["pi"])


def test_a_heartbeat_says_what_the_device_holds_and_when(fleet):
    fleet.now_s = 3.0
    fleet.beat("pi", holding=["r/a", "r/b"])
    assert fleet.take()[-1] == HeldInstructions(device_id="pi", assignment_ids=("r/a", "r/b"), at_s=3.0)


def test_capabilities_replace_the_counts_of_all_shards_and_those_told_at_the_join(fleet):
    fleet.registry.record_capabilities("pi", Capabilities(facts={"cores": 4}, shards={"mnist": 9, "broken": "many"}))
    info = fleet.registry.get_device("pi")
    assert (info.tasks, info.examples, info.capabilities) == (("mnist",), {"mnist": 9}, {"cores": 4})
    assert (info.groups, fleet.take()) == (("lab",), [DeviceChanged(device_id="pi")])
    fleet.add("pi-2", node_id=9, facts={"memory_bytes": 512, "blocks": {"digits": [0, 1]}})
    info = fleet.registry.get_device("pi-2")
    assert (info.capabilities["memory_bytes"], info.blocks) == (512, {"digits": (0, 1)})
    fleet.add("pi-2", node_id=9)
    assert fleet.registry.get_device("pi-2").blocks == {"digits": (0, 1)}
    fleet.add("pi-2", node_id=9, facts={})
    assert fleet.registry.get_device("pi-2").blocks == {}


def test_speeds_are_smoothed_and_begin_with_the_first_measurement(fleet):
    assert speed_of(fleet) is None
    fleet.registry.record_speed("pi", 2.0)
    assert speed_of(fleet) == 2.0
    fleet.registry.record_speed("pi", 4.0)
    assert speed_of(fleet) == pytest.approx(2.0 + SMOOTHING_FACTOR * 2.0)


def test_a_removed_device_is_forgotten_and_those_who_wait_for_it_are_told(fleet):
    for boot, session in (("a", 1), ("b", 1), ("a", 2)):
        fleet.say("pi", boot=boot, session=session)
    assert fleet.registry.get_clone_warning("pi")
    fleet.take()
    assert fleet.registry.remove("pi") == 7
    assert fleet.take() == [DeviceRemoved(device_id="pi")]
    assert (fleet.registry.get_device_id(7), fleet.registry.get_device("pi"), names(fleet)) == (None, None, [])
    assert fleet.registry.get_state("pi") is None
    fleet.add("pi", node_id=9)
    assert fleet.registry.get_clone_warning("pi") is None, "it has no twin any more"
    assert fleet.call("b", node_id=9) is None


def test_a_device_that_joins_anew_is_heard_of_and_one_that_asks_twice_for_its_place_keeps_what_is_known_of_it(fleet):
    fleet.registry.record_speed("pi", 2.0)
    fleet.say("pi")
    fleet.heard.clear()
    fleet.add("pi", node_id=7, groups=("field",), state=None)
    assert fleet.heard == [DeviceAdded(device_id="pi")]
    fleet.say("pi", boot="boot-2", session=2)
    assert DeviceRestarted(device_id="pi") in fleet.take()
    assert (speed_of(fleet), fleet.registry.get_device("pi").groups) == (2.0, ("field",))
    fleet.add("pi", node_id=8, state=None)
    assert fleet.heard == [DeviceAdded(device_id="pi")]
    assert (
        fleet.registry.get_device_id(7),
        fleet.registry.get_device_id(8),
        fleet.registry.get_device("pi").groups,
    ) == (
        None,
        "pi",
        (),
    )
    assert speed_of(fleet) is None


def test_the_later_of_two_agents_that_take_turns_at_the_broker_is_refused_and_heard_no_more(fleet):
    fleet.say("pi", boot="a", session=5)
    fleet.say("pi", boot="b", session=5)
    fleet.take()
    fleet.say("pi", boot="a", session=6)
    cloned = [event for event in fleet.take() if isinstance(event, CloneRejected) and event.detected]
    assert [(event.device_id, event.rejected_boot_id) for event in cloned] == [("pi", "b")]
    fleet.say("pi", "draining", boot="b", session=6)
    fleet.beat("pi", 9, session=6, boot_id="b")
    heard = fleet.take()
    assert [(event.detected, event.rejected_boot_id) for event in heard] == [(False, "b")]
    assert (fleet.registry.get_state("pi"), fleet.registry.get_heartbeat("pi")) == (DevicePresence.ONLINE, None)
    fleet.beat("pi", 1, session=6, boot_id="a")
    assert fleet.registry.get_heartbeat("pi").seq == 1
    [row] = fleet.registry.list_status_rows()
    assert "refused the later of two agents (boot b)" in row["cloned"]


def test_a_copy_that_only_asks_over_https_is_refused_and_what_it_took_is_given_again(fleet):
    def call(instance):
        refusal = fleet.call(instance, stamp=stamps.get(instance, ""))
        stamps[instance] = fleet.registry.get_stamp(7)
        return refusal

    stamps = {}
    assert [call("a"), call("b"), call("a")] == [None, None, None]
    assert fleet.take() == [DeviceRestarted(device_id="pi")], "as yet b may be what a has become"
    assert call("a") is None
    cloned, restarted = fleet.take()
    assert (cloned.rejected_boot_id, restarted) == ("b", DeviceRestarted(device_id="pi"))
    assert "(boot b, at 10.0.0.7)" in call("b")
    assert call("a") is None


def test_a_restart_that_only_https_shows_is_told_once_and_late_requests_of_the_dead_are_none(fleet):
    told = []
    for instance in ("a", "a", "b", "b", "a", "b"):
        fleet.call(instance)
        told.append(fleet.take())
    assert told == [[], [], [DeviceRestarted(device_id="pi")], [], [], []]


@pytest.mark.parametrize("is_mqtt_first", [True, False])
def test_a_restart_that_mqtt_and_https_both_show_is_told_once(fleet, is_mqtt_first):
    def hear(boot, session):
        tell = [lambda: fleet.say("pi", boot=boot, session=session), lambda: fleet.call(boot)]
        for way in tell if is_mqtt_first else reversed(tell):
            way()
        return [event for event in fleet.take() if isinstance(event, DeviceRestarted)]

    assert hear("a", 1) == []
    assert hear("b", 2) == [DeviceRestarted(device_id="pi")]
    assert hear("b", 3) == []
    assert hear("c", 4) == [DeviceRestarted(device_id="pi")]
    assert fleet.registry.get_clone_warning("pi") is None


def test_the_operators_facts_are_one_row_per_device_seen_or_not(fleet):
    fleet.add("new", state=None)
    fleet.say("pi")
    fleet.beat("pi", temperature_c=55.5, run="r")
    fleet.now_s = 2.0
    new, pi = fleet.registry.list_status_rows()
    assert (new["device_id"], new["presence"], new["silent_s"]) == ("new", "never seen", None)
    assert (pi["presence"], pi["silent_s"], pi["temperature_c"], pi["run"]) == ("online", 2.0, 55.5, "r")
    assert (new["problem"], fleet.registry.explain_absence("new")) == (None, "it was never seen")


def test_a_device_that_an_earlier_coordinator_has_seen_is_offline_and_not_never_seen(fleet):
    fleet.registry.add("pi", node_id=5, role="trainer", groups=(), examples={}, was_seen=True)
    (row,) = fleet.registry.list_status_rows()
    assert (row["presence"], row["silent_s"]) == ("offline", None)
    assert fleet.registry.explain_absence("pi") == "it is offline"
    fleet.say("pi")
    assert fleet.registry.format_presence("pi") == "online"


def test_a_shard_that_a_device_cannot_read_is_its_problem(fleet):
    fleet.add("pi")
    facts = {"shard_errors": {"cifar:Cifar": "No module named 'cifar'"}}
    fleet.registry.record_capabilities("pi", Capabilities(facts=facts, shards={}))
    (row,) = fleet.registry.list_status_rows()
    assert row["problem"] == "shard of cifar:Cifar: No module named 'cifar'"


def test_a_drift_is_told_when_it_becomes_large_and_not_at_every_report(fleet):
    fleet.add("pi")
    fleet.take()

    def report(psi):
        claim = {"column": "3", "psi": psi, "ks": 0.5, "num_reference": 200, "num_newer": 100}
        facts = {} if psi is None else {"drift": {"digits": claim}}
        fleet.registry.record_capabilities("pi", Capabilities(facts=facts, shards={}))
        return [event.reason for event in fleet.take() if isinstance(event, DataDrifted)]

    told = "digits: psi 0.31, ks 0.5 of 3, 100 examples against 200"
    assert [report(psi) for psi in (0.2, 0.31, 0.4, None, 0.31)] == [[], [told], [], [], [told]]
    (row,) = fleet.registry.list_status_rows()
    assert row["drift"] == told


def test_many_threads_may_use_it_at_once():
    fleet, failures = Fleet(), []
    for number in range(8):
        fleet.add(f"pi-{number}", node_id=number + 1)

    def busy(number):
        name = f"pi-{number}"
        try:
            for turn in range(1, 100):
                fleet.say(name, session=turn)
                fleet.beat(name, seq=turn)
                fleet.registry.record_contact(number + 1)
                fleet.registry.record_speed(name, 1.0)
                fleet.registry.list_schedulable()
                fleet.registry.list_status_rows()
                end = fleet.registry.subscribe(lambda _event: None)
                fleet.registry.tick()
                end()
            fleet.say(name, "offline", session=100)
        except Exception as error:  # noqa: BLE001 told to the thread of the test
            failures.append(error)

    threads = [threading.Thread(target=busy, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (failures, names(fleet)) == ([], [])
    assert len(fleet.registry._event_bus._subscribers) == 1
    gone = [
        event.device_id for event in fleet.heard if isinstance(event, PresenceChanged) and event.after == "offline"
    ]
    assert sorted(gone) == [f"pi-{number}" for number in range(8)]


def test_a_drained_device_is_no_worker_and_its_change_is_told_once(fleet):
    fleet.say("pi")
    fleet.take()
    for name in ("pi", "pi", "nobody"):
        fleet.registry.set_drained(name, drained=True)
    assert fleet.take() == [DeviceChanged(device_id="pi")]
    assert (names(fleet), fleet.registry.is_drained("pi"), fleet.registry.is_drained("nobody")) == ([], True, False)
    fleet.add("pi", node_id=7)
    assert fleet.registry.is_drained("pi"), "joining again with the same key changes nothing"


def test_a_device_that_may_not_train_now_is_there_but_no_worker_until_a_heartbeat_says_otherwise(fleet):
    fleet.say("pi")
    fleet.take()
    night = {"kind": "hours", "reason": "outside its hours", "free_at_s": 1_800_000_000.0}
    for seq, (told, changes) in enumerate([(night, 1), (night, 0), ({"reason": 3}, 1), (None, 0)], 1):
        fleet.registry.record_heartbeat("pi", beat(seq, blocked=told))
        assert fleet.take().count(DeviceChanged(device_id="pi")) == changes, told
        assert names(fleet) == ([] if told == night else ["pi"])
        assert fleet.registry.is_reachable("pi")
    fleet.registry.record_blocker("pi", night)
    fleet.registry.record_blocker("nobody", night)
    said = "outside its hours, free at 2027-01-15 08:00 UTC"
    assert fleet.registry.explain_absence("pi") == f"it may not train now: {said}"
    assert fleet.registry.list_status_rows()[0]["blocked"] == said
    fleet.registry.set_drained("pi", drained=True)
    assert fleet.registry.explain_absence("pi") == "it is draining"
    assert not fleet.registry.is_reachable("pi")


def test_the_conditions_of_a_run_keep_a_device_from_its_work_and_from_no_other(fleet):
    fleet.say("pi")
    fleet.take()
    by_run, by_owner = ({"kind": "hours", "reason": "outside its hours", "run": run} for run in ("r-1", ""))
    changes = []
    for seq, told in enumerate([by_run, by_run, by_owner, by_run, None], 1):
        fleet.registry.record_heartbeat("pi", beat(seq, blocked=told, run=None if told else "r-1"))
        changes.append(fleet.take().count(DeviceChanged(device_id="pi")))
        able = [run for run in (None, "r-1", "r-2") if fleet.registry.list_schedulable(run)]
        assert able == {"r-1": [None, "r-2"], "": [], None: [None, "r-1", "r-2"]}[told and told["run"]]
    assert changes == [1, 0, 1, 1, 1]
    fleet.registry.record_blocker("pi", by_run)
    fleet.registry.record_blocker("pi", {**by_run, "run": "r-2"})
    assert fleet.registry.explain_absence("pi", "r-1") == "it may not train now: by run r-1: outside its hours"
    fleet.registry.record_blocker("pi", by_run)
    assert fleet.registry.explain_absence("pi") == "it may not train now: by run r-1: outside its hours"
    assert fleet.registry.list_status_rows()[0]["blocked"] == "by run r-1: outside its hours"


@pytest.mark.parametrize(
    ("free_in_s", "kept_s"), [(None, ASK_AGAIN_S), (-500.0, ASK_AGAIN_S), (900.0, 900.0), (1e9, MAX_BLOCKED_S)]
)
def test_the_conditions_of_a_run_count_until_they_are_over_whatever_the_device_tells_of_others(
    fleet, free_in_s, kept_s
):
    fleet.say("pi")
    free_at_s = None if free_in_s is None else time.time() + free_in_s
    night = {"kind": "hours", "reason": "outside its hours", "free_at_s": free_at_s, "run": "r-1"}
    fleet.registry.record_blocker("pi", night)
    for seq, (elapsed_s, able) in enumerate([(0.0, ["r-2"]), (kept_s - 5.0, ["r-2"]), (kept_s, ["r-1", "r-2"])], 1):
        fleet.now_s = elapsed_s
        fleet.registry.record_heartbeat("pi", beat(seq, run="r-2"))
        fleet.take()
        fleet.registry.tick()
        assert [run for run in ("r-1", "r-2") if fleet.registry.list_schedulable(run)] == able
    assert DeviceChanged(device_id="pi") in fleet.take()


def test_the_conditions_of_so_many_runs_are_remembered(fleet):
    fleet.say("pi")
    for number in range(MAX_RUN_BLOCKERS + 1):
        fleet.registry.record_blocker("pi", {"kind": "load", "reason": "busy", "run": f"r-{number}"})
    able = [number for number in range(MAX_RUN_BLOCKERS + 1) if fleet.registry.list_schedulable(f"r-{number}")]
    assert able == [0]


def test_more_that_a_device_allows_is_told_and_less_is_known_all_the_same(fleet):
    def report(seq, left, ends_s=3600, **others):
        budgets = {"renews_s": 7200, "traffic": [left, 10_000_000, None]}
        told = {"window": [ends_s, 50_000], "day": budgets}
        fleet.registry.record_heartbeat("pi", beat(seq, allowance=told, **others))
        return fleet.take().count(DeviceChanged(device_id="pi"))

    fleet.say("pi")
    fleet.take()
    assert [report(1, 5_000_000), report(2, 5_000_000), report(3, 4_000_000), report(4, 4_100_001)] == [1, 0, 0, 1]
    fleet.now_s = 1000.0
    assert [report(5, 4_000_000, 2600), report(6, 4_000_000, 3600)] == [0, 1]
    allowance = fleet.registry.get_allowance("pi", "r-1", 77.0)
    assert (allowance.window.ends_s, allowance.budgets[0].renews_s, allowance.budgets[0].left) == (3677, 7277, 4e6)
    assert fleet.registry.list_status_rows()[0]["allowance"] == "1 h of its hours, 4 of 10 MB of this day"
    for seq, nonsense in enumerate(({"window": [-1, None]}, None), 7):
        fleet.registry.record_heartbeat("pi", beat(seq, allowance=nonsense))
        assert fleet.registry.get_allowance("pi", "r-1", 0.0) is None
    assert fleet.take().count(DeviceChanged(device_id="pi")) == 1
    assert names(fleet) == ["pi"]
    assert fleet.registry.get_allowance("nobody", "r-1", 0.0) is None
    fleet.registry.record_allowance("nobody", {"window": [1, 2]})


def test_a_device_that_no_work_of_its_run_fits_into_goes_to_another_run_that_can_use_it(fleet):
    fleet.say("pi")
    for run in ("r-1", "r-2"):
        fleet.registry.open_run(BoardClaim(run_id=run, selects=lambda _: True))
    assert fleet.registry.get_allotted_run("pi") == "r-1"
    short = Blocker(kind="budget", reason="it has too little left", free_at_s=60.0)
    said = fleet.registry.record_shortage("pi", "r-1", short)
    assert said.startswith("it has too little left, free at 20")
    assert fleet.registry.get_allotted_run("pi") == "r-2"
    assert fleet.registry.list_status_rows()[0]["blocked"] == f"run r-1: {said}"
    assert fleet.registry.record_shortage("pi", "r-1", None) == ""
    fleet.registry.close_run("r-2")
    assert fleet.registry.get_allotted_run("pi") == "r-1"
    fleet.registry.record_shortage("pi", "r-1", short)
    assert fleet.registry.explain_absence("pi", "r-1") == said
    fleet.registry.close_run("r-1")
    assert fleet.registry.list_status_rows()[0]["blocked"] is None
    assert fleet.registry.record_shortage("nobody", "r-1", None) == ""


def test_a_heartbeat_that_blocks_a_device_is_told_outside_the_lock(fleet):
    fleet.say("pi")
    others = []

    def read_elsewhere(_event):
        other = threading.Thread(target=fleet.registry.get_heartbeat, args=("pi",), daemon=True)
        other.start()
        other.join(5)
        others.append(other.is_alive())

    fleet.registry.subscribe(read_elsewhere)
    fleet.registry.record_heartbeat("pi", beat(1, blocked={"kind": "pause", "reason": "paused on the board"}))
    assert others
    assert not any(others)


def test_what_happens_to_a_device_is_heard_in_its_order_whichever_threads_tell_it(fleet):
    fleet.add("pi-2", node_id=8, state=None)
    for name in ("pi", "pi-2"):
        fleet.beat(name)
    fleet.take()
    is_told, is_back = threading.Event(), threading.Event()

    def linger(event):
        if isinstance(event, PresenceChanged) and event.after is DevicePresence.GONE and not is_told.is_set():
            is_told.set()
            assert is_back.wait(30)

    fleet.registry.subscribe(linger)
    fleet.now_s = 17.0
    ticking = threading.Thread(target=fleet.registry.tick)
    ticking.start()
    assert is_told.wait(30)
    for node_id in (7, 8):  # both are back before the second one's silence is told
        fleet.registry.record_contact(node_id)
    is_back.set()
    ticking.join(30)
    assert not ticking.is_alive()
    heard = [(event.device_id, event.after) for event in fleet.take()]
    for name in ("pi", "pi-2"):
        assert [after for device_id, after in heard if device_id == name] == [
            DevicePresence.GONE,
            DevicePresence.ONLINE,
        ]
        assert fleet.registry.get_state(name) is DevicePresence.ONLINE


@pytest.fixture
def listeners() -> EventBus[int]:
    return EventBus()


def happen(listeners: EventBus[int], events: Sequence[int]) -> None:
    listeners.enqueue(events)
    listeners.publish()


def test_everybody_hears_everything_in_its_order_until_that_is_ended(listeners: EventBus[int]) -> None:
    first: list[int] = []
    second: list[int] = []
    end = listeners.subscribe(first.append)
    listeners.subscribe(second.append)
    happen(listeners, [1, 2])
    end()
    end()
    happen(listeners, [3])
    assert (first, second) == ([1, 2], [1, 2, 3])


def test_what_a_listener_causes_is_told_after_what_it_hears_and_to_everybody(listeners: EventBus[int]) -> None:
    first: list[int] = []
    second: list[int] = []

    def cause_more(event: int) -> None:
        first.append(event)
        if event < 10:
            happen(listeners, [event + 10])

    listeners.subscribe(cause_more)
    listeners.subscribe(second.append)
    happen(listeners, [1, 2])
    assert first == second == [1, 2, 11, 12]


class LateLock:
    """A lock before whose release something more happens, once."""

    def __init__(self, before_release: Callable[[], None]) -> None:
        self._lock, self._late = threading.Lock(), [before_release]

    def acquire(self, *, blocking: bool) -> bool:
        return self._lock.acquire(blocking=blocking)

    def release(self) -> None:
        if self._late:
            self._late.pop()()
        self._lock.release()


def test_what_comes_when_all_was_told_and_the_teller_has_not_let_go_is_told(listeners: EventBus[int]) -> None:
    heard: list[int] = []
    listeners.subscribe(heard.append)
    listeners._publish_lock = LateLock(lambda: happen(listeners, [2]))  # type: ignore[assignment]
    happen(listeners, [1])
    assert heard == [1, 2]


def test_what_a_listener_raises_comes_out_and_the_other_events_are_told_next(listeners: EventBus[int]) -> None:
    heard: list[int] = []

    def stumble(event: int) -> None:
        if event == 1:
            raise ZeroDivisionError("odd")
        heard.append(event)

    listeners.subscribe(stumble)
    with pytest.raises(ZeroDivisionError):
        happen(listeners, [1, 2])
    listeners.publish()
    assert heard == [2]


def test_no_event_of_many_threads_is_left_behind_or_overtaken(listeners: EventBus[int]) -> None:
    noted: list[int] = []
    heard: list[int] = []
    listeners.subscribe(heard.append)
    lock = threading.Lock()

    def work(number: int) -> None:
        for turn in range(500):
            with lock:
                noted.append(number * 1000 + turn)
                listeners.enqueue(noted[-1:])
            listeners.publish()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert heard == noted
    assert len(heard) == 8 * 500


def test_examples_that_a_device_reports_again_and_again_double_once_a_day(fleet):
    def report(count):
        fleet.registry.record_capabilities("pi", Capabilities(facts={}, shards={"mnist": count}))
        return fleet.registry.get_device("pi").examples["mnist"]

    assert report(50_000) == 50_000
    assert [report(2**53) for _ in range(5)] == [100_000] * 5
    changes = [event.reason for event in fleet.take() if isinstance(event, ExamplesChanged)]
    assert changes == [f"mnist: 50000 before, reported {2**53}, counted 100000"]
    fleet.now_s += GROWTH_PERIOD_S
    assert [report(2**53) for _ in range(5)] == [200_000] * 5
    assert (report(7), report(2**53)) == (7, 200_000)
