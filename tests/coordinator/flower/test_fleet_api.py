"""The outside of Flower's Fleet API, with something in Flower's place that says what it was asked."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from noted_calls import NotedCalls
from starlette.requests import Request

from edgefl.coordinator.flower.fleet_api import (
    FLEET_PREFIX,
    MAX_COUNTED_INSTRUCTIONS,
    MAX_MEMORY_BYTES,
    MAX_PUSH_OBJECT_BYTES,
    PULL_MESSAGES,
    PULL_OBJECT,
    PUSH_MESSAGES,
    SEND_CHUNK_BYTES,
    ByteCounters,
    FleetApi,
    FleetResponse,
    FleetServicer,
    SpooledBody,
    send_response,
)
from edgefl.core.errors import NotAllowedError
from edgefl.core.protocol import BODY_HASH_HEADER, INSTANCE_HEADER, MAX_REQUEST_BYTES

NODE, OTHER = 1, 2


class Calls:
    """Knows the key `7` of node 7; pushed messages are refused, and foreign where they say `another`."""

    methods = frozenset({PULL_MESSAGES, PULL_OBJECT, PUSH_MESSAGES, "push-object"})

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self.larger: list[str] = []

    def authenticate(self, request: Request) -> int:
        if request.headers.get("key") != "7":
            raise NotAllowedError("nobody knows it")
        return 7

    def signs_bodies(self, _node_id: int) -> bool:
        return True

    def handle(self, _request: Request, name: str, body: bytes) -> FleetResponse:
        self.asked.append((name, body))
        if name == PUSH_MESSAGES:
            return FleetResponse(status=403, content=b"refused")
        return FleetResponse(status=200, content=b"12345", instruction_id="i-1" if name == PULL_MESSAGES else None)

    def is_from_other_device(self, _name: str, body: bytes, _node_id: int) -> bool:
        return body == b"another"

    def refuse_body(self, name: str, _node_id: int, _limit_bytes: int) -> None:
        self.larger.append(name)


class Site:
    def __init__(self) -> None:
        self.calls, self.watcher = Calls(), NotedCalls()
        self.contacts = self.watcher.contacts
        self.refused: list[tuple[str, int | None]] = []
        self.api = FleetApi(
            cast("FleetServicer", self.calls), self.watcher, lambda what, _r, node, _d: self.note(what, node)
        )

    def note(self, what: str, node_id: int | None) -> None:
        self.refused.append((what, node_id))

    def ask(
        self,
        name: str,
        body: bytes = b"",
        *,
        key: str = "7",
        method: str = "POST",
        size: int | None = None,
        signed: bytes | None = None,
    ) -> int:
        """Returns the status; the body is only there to be read once, and `signed` was signed in its place."""
        sent: list[Any] = []
        pieces: Iterator[bytes] = iter([body])

        async def receive() -> Any:
            return {"type": "http.request", "body": next(pieces), "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        digest = hashlib.sha256(body if signed is None else signed).hexdigest()
        headers = [
            (b"key", key.encode()),
            (b"content-length", str(len(body) if size is None else size).encode()),
            (BODY_HASH_HEADER.encode(), digest.encode()),
        ]
        scope = {
            "type": "http",
            "method": method,
            "path": FLEET_PREFIX + name,
            "headers": headers,
            "query_string": b"",
        }
        asyncio.run(self.api(scope, receive, send))
        self.was_read = next(pieces, None) is None
        return int(sent[0]["status"])


@pytest.fixture
def site() -> Site:
    return Site()


def test_whoever_is_not_known_is_refused_unread_and_is_no_sign_of_life(site: Site) -> None:
    assert site.ask(PULL_MESSAGES, b"body", key="8") == 401
    assert (site.was_read, site.calls.asked, site.contacts) == (False, [], [])
    assert site.refused == [("signature", None)]


@pytest.mark.parametrize(("name", "method"), [("register-node", "POST"), (PULL_MESSAGES, "GET"), ("", "POST")])
def test_what_is_not_served_is_not_found_by_a_device_that_is_known(site: Site, name: str, method: str) -> None:
    assert site.ask(name, method=method) == 404
    assert (site.calls.asked, site.contacts, site.refused) == ([], [], [])


@pytest.mark.parametrize(
    ("name", "limit"), [(PUSH_MESSAGES, MAX_REQUEST_BYTES), ("push-object", MAX_PUSH_OBJECT_BYTES)]
)
def test_a_body_over_the_limit_of_its_request_is_noted_and_not_passed_on(site: Site, name: str, limit: int) -> None:
    assert site.ask(name, size=limit + 1) == 413
    assert (site.was_read, site.calls.asked, site.contacts) == (False, [], [])
    assert (site.refused, site.calls.larger) == ([("size", 7)], [name])
    site.ask(name, b"x", size=limit)
    assert (site.calls.asked, site.calls.larger) == ([(name, b"x")], [name])


@pytest.mark.parametrize("size", [3, MAX_MEMORY_BYTES + 1])
def test_a_body_that_was_changed_on_its_way_is_noted_and_not_passed_on(site: Site, size: int) -> None:
    body = bytes(size)
    assert site.ask(PUSH_MESSAGES, body, signed=bytes(size - 1) + b"1") == 401
    assert (site.calls.asked, site.contacts, site.refused) == ([], [], [("signature", 7)])
    site.ask(PUSH_MESSAGES, body)
    assert site.calls.asked == [(PUSH_MESSAGES, body)]


def test_what_a_device_fetches_is_counted_for_its_instruction_and_small_talk_for_the_next_reply(site: Site) -> None:
    site.ask(PULL_MESSAGES, b"abc")
    site.ask(PULL_OBJECT, b"d")
    site.ask("push-object", b"ef")
    assert site.api.byte_counters.pop_reply_bytes(7, "i-0") == (6, 5)
    assert site.api.byte_counters.pop_reply_bytes(7, "i-1") == (0, 10)
    assert site.contacts == [7, 7, 7]


def test_only_a_refusal_of_what_is_another_s_is_noted(site: Site) -> None:
    assert site.ask(PUSH_MESSAGES, b"late") == 403
    assert site.refused == []
    assert site.ask(PUSH_MESSAGES, b"another") == 403
    assert site.refused == [("reply", 7)]


def test_a_signature_under_another_part_of_the_application_is_a_sign_of_life_too(site: Site) -> None:
    def request(key: str) -> Request:
        return Request({"type": "http", "headers": [(b"key", key.encode())]})

    with pytest.raises(NotAllowedError, match="nobody knows it"):
        site.api.authenticate(request("8"))
    assert site.contacts == []
    assert (site.api.authenticate(request("7")), site.contacts) == (7, [7])


def test_a_copy_signs_for_nobody_in_another_part_of_the_application_either(site: Site) -> None:
    site.watcher.refused["boot-b"] = "another one was here before"

    def request(instance: str) -> Request:
        return Request({"type": "http", "headers": [(b"key", b"7"), (INSTANCE_HEADER.encode(), instance.encode())]})

    with pytest.raises(NotAllowedError, match="another one was here before"):
        site.api.authenticate(request("boot-b"))
    assert site.contacts == []
    assert (site.api.authenticate(request("boot-a")), site.contacts) == (7, [7])


def test_what_is_fetched_while_the_answer_before_is_still_sent_counts_for_the_newer_instruction():
    traffic = ByteCounters()
    traffic.add_instruction_downlink(NODE, 1000, "first")
    traffic.add_instruction_downlink(NODE, 5000)
    traffic.add_uplink(NODE, 70)
    traffic.add_instruction_downlink(NODE, 2000, "second")
    traffic.add_other_downlink(NODE, 9)
    assert traffic.pop_reply_bytes(NODE, "first") == (70, 6009)
    traffic.add_uplink(NODE, 80)
    assert traffic.pop_reply_bytes(NODE, "second") == (80, 2000)
    assert traffic.pop_reply_bytes(NODE, "second") == (0, 0)


def test_nodes_are_counted_apart():
    traffic = ByteCounters()
    traffic.add_instruction_downlink(NODE, 1000, "a")
    traffic.add_instruction_downlink(OTHER, 1, "b")
    assert traffic.pop_reply_bytes(OTHER, "b") == (0, 1)
    assert traffic.pop_reply_bytes(NODE, "a") == (0, 1000)


def test_instructions_that_nobody_answers_do_not_gather():
    traffic = ByteCounters()
    for number in range(3 * MAX_COUNTED_INSTRUCTIONS):
        traffic.add_instruction_downlink(NODE, 1, str(number))
    assert traffic.pop_reply_bytes(NODE, "0") == (0, 0)
    assert traffic.pop_reply_bytes(NODE, str(3 * MAX_COUNTED_INSTRUCTIONS - 1)) == (0, 1)
    assert len(traffic._downlink[NODE]) < MAX_COUNTED_INSTRUCTIONS


@pytest.mark.parametrize("size", [0, 1, SEND_CHUNK_BYTES, SEND_CHUNK_BYTES + 1, 3 * SEND_CHUNK_BYTES])
def test_an_answer_leaves_slice_by_slice_and_says_which_is_the_last(size):
    content, sent = os.urandom(size), []

    async def send(message):
        sent.append(message)

    asyncio.run(send_response(send, 200, content))
    start, *slices = sent
    assert dict(start["headers"])[b"content-length"] == str(size).encode()
    assert b"".join(message["body"] for message in slices) == content
    assert all(len(message["body"]) <= SEND_CHUNK_BYTES for message in slices)
    assert [message["more_body"] for message in slices] == [True] * (len(slices) - 1) + [False]


PIECE_BYTES = 64 * 1024


@pytest.mark.parametrize("size", [0, 1, MAX_MEMORY_BYTES, MAX_MEMORY_BYTES + 1, 10 * MAX_MEMORY_BYTES + 7])
def test_a_body_is_whole_whatever_its_size_and_can_be_asked_for_twice(tmp_path: Path, size: int) -> None:
    sent = os.urandom(size)
    with SpooledBody(tmp_path) as body:
        for start in range(0, size, PIECE_BYTES):
            body.append(sent[start : start + PIECE_BYTES])
        assert body.num_bytes == size
        assert body.read() == sent
        assert body.read() == sent


def test_a_large_body_is_not_in_memory_and_leaves_no_file(tmp_path: Path) -> None:
    with SpooledBody(tmp_path) as body:
        for _ in range(100):
            body.append(bytes(PIECE_BYTES))
            assert sum(map(len, body._chunks)) <= MAX_MEMORY_BYTES
        assert list(tmp_path.iterdir()) == []
        assert body._file is not None
        file = body._file
    assert file.closed
    assert body._chunks == []


def test_a_small_body_opens_no_file(tmp_path: Path) -> None:
    with SpooledBody(tmp_path) as body:
        body.append(bytes(MAX_MEMORY_BYTES))
        assert body._file is None


@pytest.mark.parametrize("room", [0, MAX_MEMORY_BYTES + PIECE_BYTES, 3 * MAX_MEMORY_BYTES + 5])
def test_a_body_stays_whole_where_the_disk_has_no_room_for_it(tmp_path: Path, room: int) -> None:
    """`room` bytes fit; /dev/full would take none, and a file of its own can be limited anywhere."""
    sent = os.urandom(5 * MAX_MEMORY_BYTES)
    with _SmallDisk(tmp_path, room) as body:
        for start in range(0, len(sent), PIECE_BYTES):
            body.append(sent[start : start + PIECE_BYTES])
        assert body.read() == sent


def test_a_body_stays_in_memory_where_no_file_can_be_made(tmp_path: Path) -> None:
    sent = os.urandom(2 * MAX_MEMORY_BYTES)
    with SpooledBody(tmp_path / "missing") as body:
        body.append(sent)
        assert body.read() == sent


class _SmallDisk(SpooledBody):
    """Writes as a disk does on which so many bytes are left: some of a piece, then an error."""

    def __init__(self, folder: Path, room: int) -> None:
        super().__init__(folder)
        self._left = room

    def _write(self, piece: memoryview) -> int:
        if not self._left:
            raise OSError(28, "No space left on device")
        written = super()._write(piece[: self._left])
        self._left -= written
        return written
