"""What waits for the thread of a run: in portions, and no more than it can have in memory."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from edgefl.coordinator.execution import messaging as module
from edgefl.coordinator.execution.messaging import (
    MAX_BATCH_BYTES,
    MAX_MEMORY_BYTES,
    BoundedEventQueue,
    DeviceRpc,
    LoadItem,
)
from edgefl.coordinator.fleet.presence import PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.core.errors import NetworkError, NotFoundError
from edgefl.core.protocol import Command, CommandKind, CommandReply, StatusMessage


class Shelf:
    """Takes bodies out of memory; `is_full` as a disk is, and `loses` what it was given."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.is_full = self.loses = False

    def lay_aside(self, item: int) -> LoadItem[int] | None:
        if self.is_full:
            return None
        self.taken.append(item)
        return lambda: None if self.loses else item


@pytest.fixture
def patience_s(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(module, "PUT_TIMEOUT_S", 0.2)
    return 0.2


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def inbox(shelf: Shelf, patience_s: float) -> BoundedEventQueue[int]:
    return BoundedEventQueue(shelf.lay_aside)


def _fill(inbox: BoundedEventQueue[int]) -> int:
    """Puts in as much as may wait, and returns how many items that are."""
    number = MAX_MEMORY_BYTES // (MAX_BATCH_BYTES // 4) + 1
    for item in range(number):
        inbox.put(item, MAX_BATCH_BYTES // 4)
    return number


def _all(inbox: BoundedEventQueue[int]) -> list[int]:
    return [item for portion in iter(lambda: inbox.get_batch(0.0), []) for item in portion]


def test_small_items_are_taken_at_once_in_their_order_and_large_ones_in_portions(
    inbox: BoundedEventQueue[int],
) -> None:
    for item in range(1000):
        inbox.put(item)
    assert inbox.get_batch(0.0) == list(range(1000))
    assert inbox.get_batch(0.0) == []
    number = _fill(inbox)
    assert inbox.get_batch(0.0) == [0, 1, 2, 3]
    assert _all(inbox) == list(range(4, number))
    inbox.put(1, 3 * MAX_BATCH_BYTES)
    inbox.put(2, 1)
    assert (inbox.get_batch(0.0), inbox.get_batch(0.0)) == ([1], [2])


def test_it_waits_for_the_first_item_and_no_longer(inbox: BoundedEventQueue[int]) -> None:
    threading.Timer(0.05, inbox.put, [7]).start()
    began_s = time.monotonic()
    assert inbox.get_batch(60.0) == [7]
    assert time.monotonic() - began_s < 30
    assert inbox.get_batch(0.01) == []


def test_who_brings_a_body_waits_until_there_is_room_and_who_brings_none_never(
    inbox: BoundedEventQueue[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PUT_TIMEOUT_S", 60.0)
    number, is_in = _fill(inbox), threading.Event()
    inbox.put(number)
    bringer = threading.Thread(target=lambda: (inbox.put(number + 1, 1), is_in.set()))
    bringer.start()
    assert not is_in.wait(0.1)
    taken = inbox.get_batch(0.0)
    assert is_in.wait(30)
    bringer.join()
    assert [*taken, *_all(inbox)] == list(range(number + 2))


@pytest.mark.parametrize("ends", ["close", "patience"])
def test_nobody_waits_for_a_run_that_is_over_or_for_long(
    inbox: BoundedEventQueue[int], ends: str, patience_s: float
) -> None:
    _fill(inbox)
    if ends == "close":
        inbox.close()
    began_s = time.monotonic()
    inbox.put(-1, 1)
    assert (time.monotonic() - began_s >= patience_s / 2) is (ends == "patience")


@pytest.mark.parametrize("shelf_is", ["free", "full", "lost"])
def test_what_comes_while_a_run_stands_still_is_laid_aside_where_there_is_room_for_it(
    inbox: BoundedEventQueue[int], shelf: Shelf, shelf_is: str
) -> None:
    shelf.is_full = shelf_is == "full"
    bringers = [threading.Thread(target=inbox.put, args=(item, MAX_BATCH_BYTES)) for item in range(20)]
    for bringer in bringers:
        bringer.start()
    for bringer in bringers:
        bringer.join(60)
    if shelf_is != "full":
        assert inbox.num_memory_bytes <= MAX_MEMORY_BYTES + MAX_BATCH_BYTES
        assert len(shelf.taken) >= 20 - (MAX_MEMORY_BYTES // MAX_BATCH_BYTES + 1)
    shelf.loses = shelf_is == "lost"
    inbox.put(-1)
    found = [item for _ in range(30) for item in inbox.get_batch(0.0)]
    assert sorted([*found, *(shelf.taken if shelf.loses else [])]) == list(range(-1, 20))
    assert inbox.num_memory_bytes == 0
    inbox.put(7, MAX_BATCH_BYTES)
    assert (inbox.get_batch(0.0), 7 in shelf.taken[20:]) == ([7], False), "there is room again"


@pytest.mark.parametrize("is_full", [False, True], ids=["laid aside", "no room on disk"])
def test_an_event_loop_never_waits_for_room(
    inbox: BoundedEventQueue[int], shelf: Shelf, monkeypatch: pytest.MonkeyPatch, *, is_full: bool
) -> None:
    monkeypatch.setattr(module, "PUT_TIMEOUT_S", 60.0)
    shelf.is_full, number = is_full, _fill(inbox)

    async def bring() -> None:
        for item in range(number, number + 5):
            inbox.put(item, 1)

    began_s = time.monotonic()
    asyncio.run(bring())
    assert time.monotonic() - began_s < 30
    assert shelf.taken == ([] if is_full else list(range(number, number + 5)))
    assert _all(inbox) == list(range(number + 5))


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
    registry = DeviceRegistry(PresenceTracker(), lambda: 0.0)
    registry.record_broker_link(connected=True)
    for node, (name, state) in enumerate([("pi-1", "online"), ("pi-2", "offline")]):
        registry.add(name, node_id=node, role="trainer", groups=(), examples={})
        registry.record_status(name, StatusMessage(state=state, boot_id="b", session_no=1))
    return DeviceRpc(bell, registry, timeout_s=0.05)


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
