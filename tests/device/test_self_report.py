"""What a board tells of itself, and when it tells it again."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from edgefl.device.self_report import SelfReport
from edgefl.device.state import DeviceState


class Site:
    """A report over fakes that say what the test has set, and what it has told and asked."""

    def __init__(self, state):
        self.told = []
        self.asked = []
        self.stamps: Any = ()
        self.address: str | None = None
        self.speed = {}
        self.faults = {}
        self.trainer = SimpleNamespace(
            now=None,
            shard_stamps=lambda: self.stamps,
            blocks=dict,
            examples=lambda: {"digits": 9},
            shard_faults=lambda: self.faults,
        )
        self.speeds = SimpleNamespace(
            version=0,
            told=lambda: self.speed,
            busy=lambda: self.asked.append("busy"),
            idle=lambda *_, **__: self.asked.append("idle"),
        )
        parts: Any = {"trainer": self.trainer, "speeds": self.speeds}
        self.report = SelfReport(
            state,
            **parts,
            accelerator="cpu",
            software=lambda: {"packs": ["p"]},
            address=lambda: self.address,
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
            site.report.tell()
        assert len(site.told) == before + 1
        assert {name: site.told[-1].facts.get(name) for name in facts} == facts

    DeviceState.load(state.root).set_shard("digits", "/data/digits.npz")  # somebody added it meanwhile
    site.faults = {"digits": "late.npz does not exist"}
    tells(packs=["p"], shard_errors={"digits": "late.npz does not exist"}, steps_per_s=None)
    assert site.told[0].shards == {"digits": 9}
    assert state.device.shards == {"digits": "/data/digits.npz"}
    site.faults, site.stamps = {}, ("another",)
    tells(shard_errors=None)
    site.speed = {"steps_per_s": {"digits": 812.0}}
    site.speeds.version += 1
    tells(steps_per_s={"digits": 812.0})
    site.report.forget()
    tells()


def test_an_agent_without_work_has_its_speed_measured_and_one_with_work_does_not(site):
    site.report.measure_speeds()
    assert site.asked == [], "the first report comes before"
    site.report.tell()
    site.report.measure_speeds()
    site.trainer.now = "r", "a", 1
    site.report.measure_speeds()
    assert site.asked == ["idle", "busy"]


def test_neighbours_are_told_the_address_that_the_coordinator_is_reached_from(site, state):
    site.report.tell()
    site.report.forget()
    with socket.create_server(("127.0.0.1", 0)) as coordinator:
        site.address = f"127.0.0.1:{coordinator.getsockname()[1]}"
        site.report.tell()
    assert [told.facts.get("peer_address") for told in site.told] == [None, f"127.0.0.1:{state.device.peer_port}"]
