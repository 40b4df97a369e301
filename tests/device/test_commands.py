"""Every command reaches whom it concerns, and no other."""

import logging
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest
from peer_boards import eventually

from edgefl.core.protocol import Command, CommandKind
from edgefl.device.commands import CapabilityReporter, CommandDispatcher, WakeUpSignal
from edgefl.device.hardware.requirements import read_task_traits
from edgefl.device.state_dir import DeviceStateDir


class Board:
    """Notes what is called, as part.method and its arguments."""

    def __init__(self, root):
        self.calls = []
        parts: Any = {
            "state": SimpleNamespace(root=root),
            "trainer": self._part("trainer", "finish_early", "continue_training", "complete_run", "pause"),
            "gate": self._part("gate", "complete_run", "find_owner_blocker"),
            "models": self._part("models", "apply", "roll_back"),
            "installations": self._part("installations", "apply"),
            "renewal": self._part("renewal", "request"),
            "capability_reporter": self._part("capability_reporter", "invalidate"),
            "heartbeat": self._part("heartbeat", "publish_now"),
            "wake_up": self._part("wake_up", "notify"),
            "connection": self._part("connection", "set_draining", "publish_reply"),
            "on_lockout": lambda told: self.calls.append(("refused", told)),
        }
        self.commands = CommandDispatcher(**parts)

    def obey(self, kind, argument=None):
        self.calls.clear()
        self.commands.dispatch(Command(id="1", kind=kind, argument=argument))
        return list(self.calls)

    def _part(self, name, *methods):
        def noting(method):
            return lambda *args, **named: self.calls.append((f"{name}.{method}", *args, *named.values()))

        return SimpleNamespace(**{method: noting(method) for method in methods})


@pytest.fixture
def board(tmp_path):
    return Board(tmp_path)


DONE = [
    (CommandKind.FINISH_EARLY, "a-1", [("trainer.finish_early", "a-1")]),
    (CommandKind.CONTINUE, "a-1 4", [("trainer.continue_training", "a-1 4")]),
    (CommandKind.END, "r-1", [("gate.complete_run", "r-1"), ("trainer.complete_run", "r-1")]),
    (CommandKind.DEPLOY, "d-1", [("models.apply", "d-1")]),
    (CommandKind.ROLLBACK, "d-1", [("models.roll_back", "d-1")]),
    (CommandKind.INSTALL, "i-1", [("installations.apply", "i-1")]),
    (CommandKind.LOCKOUT, "{}", [("refused", "{}")]),
    (CommandKind.DRAIN, None, [("connection.set_draining", True), ("trainer.pause",)]),
    (CommandKind.RESUME, None, [("connection.set_draining", False)]),
    (CommandKind.RENEW, None, [("renewal.request",), ("wake_up.notify",)]),
    (CommandKind.HEARTBEAT, None, [("heartbeat.publish_now",)]),
    (CommandKind.RELOAD, None, [("capability_reporter.invalidate",), ("wake_up.notify",)]),
    (CommandKind.LOG_LEVEL, "ERROR", []),
]


def test_a_command_is_done_by_whom_it_concerns(board, caplog):
    before = logging.getLogger().level
    try:
        for kind, argument, calls in DONE:
            assert board.obey(kind, argument) == calls, kind
        assert logging.getLogger().level == logging.ERROR
    finally:
        logging.getLogger().setLevel(before)
    assert {kind for kind, *_ in DONE} == {*CommandKind} - {CommandKind.LOGS, CommandKind.CONDITIONS}
    board.obey(CommandKind.LOGS, "{}")  # a thread reads them
    eventually(lambda: [name for name, *_ in board.calls] == ["connection.publish_reply"])
    assert "unknown" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "argument"),
    [("dance", "a-1"), (CommandKind.FINISH_EARLY, None), (CommandKind.DEPLOY, ""), (CommandKind.LOG_LEVEL, "CHATTY")],
)
def test_what_makes_no_sense_is_ignored_and_said(board, caplog, kind, argument):
    assert board.obey(kind, argument) == []
    assert f"ignored an unknown command {kind!r}" in caplog.text


class Site:
    """A report over fakes that say what the test has set, and what it has told and asked."""

    def __init__(self, state):
        self.told = []
        self.asked = []
        self.stamps: Any = ()
        self.address: str | None = None
        self.speed = {}
        self.faults = {}
        self.drift = {}
        self.trainer = SimpleNamespace(
            site_facts={},
            current=None,
            compute_shard_fingerprint=lambda: self.stamps,
            list_blocks=dict,
            count_examples=lambda: {"digits": 9},
            get_shard_errors=lambda: self.faults,
            measure_drift=lambda: self.drift,
            read_task_traits=read_task_traits,
            confinement_gaps=["no Landlock"],
        )
        self.speeds = SimpleNamespace(
            version=0,
            get_facts=lambda: self.speed,
            on_work=lambda: self.asked.append("busy"),
            on_idle=lambda *_, **__: self.asked.append("idle"),
        )
        parts: Any = {"trainer": self.trainer, "step_rates": self.speeds}
        self.report = CapabilityReporter(
            state,
            **parts,
            accelerator="cpu",
            get_software_facts=lambda: {"packs": ["p"]},
            get_address=lambda: self.address,
            publish=self.told.append,
        )


@pytest.fixture
def site(state):
    return Site(state)


def test_it_is_told_once_and_again_when_something_has_changed_or_it_was_forgotten(site, state):
    def tells(**facts):
        """Asked twice, it tells once more, and these facts."""
        before = len(site.told)
        for _ in range(2):
            site.report.publish()
        assert len(site.told) == before + 1
        assert {name: site.told[-1].facts.get(name) for name in facts} == facts

    DeviceStateDir.load(state.root).set_shard("digits", "/data/digits.npz")  # somebody added it meanwhile
    site.faults = {"digits": "late.npz does not exist"}
    tells(packs=["p"], shard_errors={"digits": "late.npz does not exist"}, steps_per_s=None)
    assert site.told[0].shards == {"digits": 9}
    assert site.told[0].facts["conditions"] is True, "runs may have conditions"
    assert site.told[0].facts["slices"] is True, "updates may be asked in parts"
    assert site.told[0].facts["queries"] is True, "it knows `continue`"
    assert state.settings.shards == {"digits": "/data/digits.npz"}
    site.faults, site.stamps = {}, ("another",)
    tells(shard_errors=None, drift=None)
    site.drift, site.stamps = {"digits": {"psi": 0.4}}, ("a third",)
    tells(drift={"digits": {"psi": 0.4}})
    site.speed = {"steps_per_s": {"digits": 812.0}}
    site.speeds.version += 1
    tells(steps_per_s={"digits": 812.0})
    with DeviceStateDir.load(state.root).share_label_page("https://192.0.2.7:8443/"):
        tells(label_page="https://192.0.2.7:8443/")
    tells(label_page=None)
    site.report.invalidate()
    tells()


def test_an_agent_without_work_has_its_speed_measured_and_one_with_work_does_not(site):
    site.report.measure_step_rates()
    assert site.asked == [], "the first report comes before"
    site.report.publish()
    site.report.measure_step_rates()
    site.trainer.current = "r", "a", 1
    site.report.measure_step_rates()
    assert site.asked == ["idle", "busy"]


def test_neighbours_are_told_the_address_that_the_coordinator_is_reached_from(site, state):
    site.report.publish()
    site.report.invalidate()
    with socket.create_server(("127.0.0.1", 0)) as coordinator:
        site.address = f"127.0.0.1:{coordinator.getsockname()[1]}"
        site.report.publish()
    assert [told.facts.get("peer_address") for told in site.told] == [None, f"127.0.0.1:{state.settings.peer_port}"]


def test_each_ring_is_heard_once():
    bell = WakeUpSignal()
    bell.notify()
    bell.notify()
    began_s = time.monotonic()
    bell.wait(30.0)
    bell.wait(30.0)
    assert time.monotonic() - began_s < 10.0
    bell.wait(0.01)


def test_a_doubt_is_taken_once_and_rings_nothing_by_itself():
    bell = WakeUpSignal()
    assert not bell.pop_possible_loss()
    bell.record_possible_loss()
    bell.wait(0.01)
    assert (bell.pop_possible_loss(), bell.pop_possible_loss()) == (True, False)
