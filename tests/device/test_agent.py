"""What the agent does on a slow network; whole fleets are in tests/e2e."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from edgefl.device.agent import Agent
from edgefl.device.state import DeviceState
from edgefl.errors import NetworkError


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
        assert self.second_began.wait(60), "the device waited for its answer to be sent"
        self.sent.append(reply)


def test_a_device_trains_on_while_its_last_answer_is_sent(state: DeviceState) -> None:
    agent, network = Agent(state), SlowNetwork()
    agent._bench.supernode = network  # type: ignore[assignment]
    serving = threading.Thread(target=agent._serve)
    serving.start()
    for _ in range(2):
        agent._bell.ring()
    deadline_s = time.monotonic() + 60
    while len(network.sent) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    agent.stop()
    serving.join(60)
    agent._bench.outbox.close(20)
    assert network.trained == ["a-1", "a-2"]
    assert network.sent == ["answer to a-1", "answer to a-2"]


def test_a_device_that_waits_to_try_again_tries_at_once_when_the_bell_rings(state: DeviceState) -> None:
    agent, tries, changed = Agent(state), list[float](), threading.Condition()

    def no_coordinator() -> None:
        with changed:
            tries.append(time.monotonic())
            changed.notify_all()
        raise NetworkError("no coordinator")

    agent._line.connect = no_coordinator  # type: ignore[method-assign]
    running = threading.Thread(target=agent.run)
    running.start()
    with changed:
        assert changed.wait_for(lambda: len(tries) == 5, 30)
        rung_s = time.monotonic()  # the next comes by itself in 2 s at the earliest
        agent._bell.ring()
        assert changed.wait_for(lambda: len(tries) == 6, 30)
    agent.stop()
    running.join(30)
    assert not running.is_alive()
    assert tries[5] - rung_s < 1.0


def test_a_coordinator_that_greets_and_then_fails_is_asked_ever_more_seldom(
    state: DeviceState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgefl.device.agent.FIRST_BACKOFF_S", 0.01)
    agent, pulls, changed = Agent(state), list[float](), threading.Condition()

    def pull() -> None:
        with changed:
            pulls.append(time.monotonic())
            changed.notify_all()
        raise NetworkError("the coordinator answered 500")

    agent._line._enter = lambda _address: None  # type: ignore[method-assign]
    agent._bench.supernode = SimpleNamespace(pull=pull, close=lambda: None, arriving=None)  # type: ignore[assignment]
    running = threading.Thread(target=agent.run)
    running.start()
    with changed:
        assert changed.wait_for(lambda: len(pulls) == 8, 60)
    agent.stop()
    running.join(30)
    assert pulls[7] - pulls[6] > 0.3, "at least half of 0.64 s"


def test_a_coordinator_that_takes_no_answer_is_sent_it_ever_more_seldom(
    state: DeviceState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgefl.device.agent.FIRST_BACKOFF_S", 0.01)
    agent, pushes, work, changed = Agent(state), list[float](), ["a-1"], threading.Condition()

    def push(_reply: str) -> None:
        with changed:
            pushes.append(time.monotonic())
            changed.notify_all()
        raise NetworkError("the coordinator has not kept a piece of the answer")

    def pull() -> Any:
        return SimpleNamespace(header={"assignment": work.pop()}) if work else None

    agent._line._enter = lambda _address: None  # type: ignore[method-assign]
    agent._bench.supernode = SimpleNamespace(  # type: ignore[assignment]
        pull=pull, answer=lambda _instruction: "44 MB", push=push, close=lambda: None, arriving=None
    )
    running = threading.Thread(target=agent.run)
    running.start()
    with changed:
        assert changed.wait_for(lambda: len(pushes) == 9, 60)
    agent.stop()
    running.join(30)
    assert pushes[8] - pushes[7] > 0.3


def test_an_answer_that_takes_minutes_is_no_dead_loop_for_the_watchdog(state: DeviceState) -> None:
    agent, began, may_end = Agent(state), threading.Event(), threading.Event()

    def push(_reply: str) -> None:
        began.set()
        assert may_end.wait(60)

    agent._bench.supernode = SimpleNamespace(push=push)  # type: ignore[assignment]
    agent._line.connect = lambda: None  # type: ignore[method-assign]
    agent._bench.outbox.open()
    agent._bench.outbox.put(("a-1", "44 MB"))
    assert began.wait(30)
    connecting = threading.Thread(target=agent._connect)
    connecting.start()
    deadline_s = time.monotonic() + 30
    while not agent.life._works:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    agent.life.clock = lambda: time.monotonic() + 300
    assert agent.life.is_alive(within_s=90)
    may_end.set()
    connecting.join(30)
    assert not agent.life._works
    agent._bench.outbox.close(20)
