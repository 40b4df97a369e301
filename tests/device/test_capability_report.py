"""What a board tells of itself, and when it tells it again."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from edgefl.device.capability_report import CapabilityReporter
from edgefl.device.state_dir import DeviceStateDir


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
            current=None,
            compute_shard_fingerprint=lambda: self.stamps,
            list_blocks=dict,
            count_examples=lambda: {"digits": 9},
            get_shard_errors=lambda: self.faults,
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
    assert state.settings.shards == {"digits": "/data/digits.npz"}
    site.faults, site.stamps = {}, ("another",)
    tells(shard_errors=None)
    site.speed = {"steps_per_s": {"digits": 812.0}}
    site.speeds.version += 1
    tells(steps_per_s={"digits": 812.0})
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
