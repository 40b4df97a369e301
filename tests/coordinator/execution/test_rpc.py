"""Questions to single devices, with a bell that answers or does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from edgefl.coordinator.execution.rpc import DeviceRpc
from edgefl.coordinator.fleet.presence import PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.core.errors import NetworkError, NotFoundError
from edgefl.core.protocol import Command, CommandKind, CommandReply, StatusMessage


class Bell:
    def __init__(self) -> None:
        self.answer: Callable[[str, Command], None] = lambda _device, _command: None

    def notify(self, device_id: str) -> None: ...

    def send_command(self, device_id: str, command: Command) -> None:
        self.answer(device_id, command)


@pytest.fixture
def bell() -> Bell:
    return Bell()


@pytest.fixture
def questions(bell: Bell) -> DeviceRpc:
    roster = DeviceRegistry(PresenceTracker(), lambda: 0.0)
    roster.record_broker_link(connected=True)
    for node, (name, state) in enumerate([("pi-1", "online"), ("pi-2", "offline")]):
        roster.add(name, node_id=node, role="trainer", groups=(), examples={})
        roster.record_status(name, StatusMessage(state=state, boot_id="b", session_no=1))
    return DeviceRpc(bell, roster, timeout_s=0.05)


def say(questions: DeviceRpc, **answer: Any) -> Callable[[str, Command], None]:
    def answered(device_id: str, command: Command) -> None:
        questions.on_reply(answer.pop("sender", device_id), CommandReply(**{"id": command.id, **answer}).dump())

    return answered


def test_a_device_that_answers_is_heard(questions: DeviceRpc, bell: Bell) -> None:
    asked: list[Command] = []

    def answer(device_id: str, command: Command) -> None:
        asked.append(command)
        questions.on_reply(device_id, CommandReply(id=command.id, content={"lines": [1]}).dump())

    bell.answer = answer
    assert questions.call("pi-1", CommandKind.LOGS, {"run": "r"}) == {"lines": [1]}
    assert (asked[0].kind, json.loads(asked[0].argument or "")) == ("logs", {"run": "r"})


@pytest.mark.parametrize(
    ("device", "error", "text"),
    [
        ("pi-1", NetworkError, "did not answer within 0.05 s"),
        ("pi-2", NetworkError, "pi-2 is offline"),
        ("pi-9", NotFoundError, "no device 'pi-9'"),
    ],
)
def test_who_does_not_answer_is_named(questions: DeviceRpc, device: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        questions.call(device, CommandKind.LOGS, {})


def test_an_answer_of_another_device_or_to_another_question_does_not_count(questions: DeviceRpc, bell: Bell) -> None:
    bell.answer = say(questions, sender="pi-2")
    with pytest.raises(NetworkError, match="did not answer"):
        questions.call("pi-1", CommandKind.LOGS, {})
    bell.answer = say(questions, id="another")
    with pytest.raises(NetworkError, match="did not answer"):
        questions.call("pi-1", CommandKind.LOGS, {})


def test_what_a_device_cannot_do_is_told(questions: DeviceRpc, bell: Bell) -> None:
    bell.answer = say(questions, error="the card is gone")
    with pytest.raises(NetworkError, match="pi-1: the card is gone"):
        questions.call("pi-1", CommandKind.LOGS, {})


def test_a_malformed_answer_is_refused(questions: DeviceRpc) -> None:
    with pytest.raises(NetworkError):
        questions.on_reply("pi-1", b'{"v": 1, "id": 7}')
