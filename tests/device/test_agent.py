"""What the agent does on a card without room and on a slow network; whole fleets are in tests/e2e."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgefl.device.agent import Agent
from edgefl.device.joining.enrolment import JoinWishes, join
from edgefl.device.state import DeviceState
from edgefl.device.trust import Hello
from edgefl.errors import StoreFullError


@pytest.fixture
def state(front_door: Any, tmp_path: Path) -> DeviceState:
    wishes = JoinWishes(name="pi-1", role="trainer", shards={}, examples={}, accelerator="cpu", threads=1, facts={})
    return join(front_door.token(), wishes, root=tmp_path / "device", addresses=[front_door.address])


@pytest.fixture
def full_card() -> Iterator[None]:
    """A limit on file sizes is the nearest thing to a full card that needs no mount."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_broker_that_moved_is_followed_also_when_the_card_is_full(
    state: DeviceState, request: pytest.FixtureRequest
) -> None:
    agent = Agent(state)
    hello = Hello(
        version="1", fleet="lab", addresses=("10.0.0.8:8000",), broker_port=1999, broker_host="10.0.0.9", skew_s=0.0
    )
    request.getfixturevalue("full_card")
    with pytest.raises(StoreFullError):
        state.change(threads=9)
    agent._remember_addresses("10.0.0.7:8000", hello)
    assert agent._brokers() == [("10.0.0.9", 1999)]


class SlowNetwork:
    """Stands for Flower: gives out two pieces of work; the first answer arrives only when the second is trained."""

    def __init__(self) -> None:
        self.work = ["a-1", "a-2"]
        self.trained: list[str] = []
        self.sent: list[str] = []
        self.second_began = threading.Event()

    def pull(self) -> Any:
        return SimpleNamespace(header={"assignment": self.work.pop(0)}) if self.work else None

    def answer(self, instruction: Any) -> str:
        name = instruction.header["assignment"]
        if name == "a-2":
            self.second_began.set()
        self.trained.append(name)
        return f"answer to {name}"

    def push(self, reply: str) -> None:
        assert self.second_began.wait(20), "the device waited for its answer to be sent"
        self.sent.append(reply)


def test_a_device_trains_on_while_its_last_answer_is_sent(state: DeviceState) -> None:
    agent, network = Agent(state), SlowNetwork()
    agent._supernode = network  # type: ignore[assignment]
    serving = threading.Thread(target=agent._serve)
    serving.start()
    for _ in range(2):
        agent._bell.ring()
    deadline_s = time.monotonic() + 20
    while len(network.sent) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    agent.stop()
    serving.join(20)
    agent._outbox.close(20)
    assert network.trained == ["a-1", "a-2"]
    assert network.sent == ["answer to a-1", "answer to a-2"]


def test_a_speed_that_is_measured_later_is_told_with_the_capabilities_once(state: DeviceState) -> None:
    agent, told = Agent(state), list[Any]()
    agent._link = SimpleNamespace(publish_capabilities=told.append)  # type: ignore[assignment]
    for _ in range(2):
        agent._report_capabilities()
    agent._speeds._kept = {"digits": {"steps_per_s": 812.0, "stamp": {}}}
    agent._speeds.version += 1
    for _ in range(2):
        agent._report_capabilities()
    assert [report.facts.get("steps_per_s") for report in told] == [None, {"digits": 812.0}]


def test_an_agent_without_work_has_its_speed_measured_and_one_with_work_does_not(state: DeviceState) -> None:
    agent, asked = Agent(state), list[str]()
    agent._speeds = SimpleNamespace(  # type: ignore[assignment]
        version=0, told=dict, busy=lambda: asked.append("busy"), idle=lambda *_, **__: asked.append("idle")
    )
    agent._link = SimpleNamespace(publish_capabilities=lambda _: None)  # type: ignore[assignment]
    agent._measure_speeds()
    assert asked == [], "the first report comes before"
    agent._report_capabilities()
    agent._measure_speeds()
    agent._trainer._now = "r", "a", 1
    agent._measure_speeds()
    assert asked == ["idle", "busy"]
