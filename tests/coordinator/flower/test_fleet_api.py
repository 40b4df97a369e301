"""The outside of Flower's Fleet API, with something in Flower's place that says what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest
from noted_calls import NotedCalls
from starlette.requests import Request

from edgefl.coordinator.flower.asgi import FLEET_PREFIX
from edgefl.coordinator.flower.fleet_api import (
    MAX_PUSH_OBJECT_BYTES,
    PULL_MESSAGES,
    PULL_OBJECT,
    PUSH_MESSAGES,
    FleetApi,
    FleetResponse,
    FleetServicer,
)
from edgefl.core.protocol import INSTANCE_HEADER, MAX_REQUEST_BYTES


class Calls:
    """Knows the key `7` of node 7; pushed messages are refused, and foreign where they say `another`."""

    methods = frozenset({PULL_MESSAGES, PULL_OBJECT, PUSH_MESSAGES, "push-object"})

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []

    def authenticate(self, request: Request) -> int | None:
        return 7 if request.headers.get("key") == "7" else None

    def handle(self, _request: Request, name: str, body: bytes) -> FleetResponse:
        self.asked.append((name, body))
        if name == PUSH_MESSAGES:
            return FleetResponse(status=403, content=b"refused")
        return FleetResponse(status=200, content=b"12345", instruction_id="i-1" if name == PULL_MESSAGES else None)

    def is_from_other_device(self, _name: str, body: bytes, _node_id: int) -> bool:
        return body == b"another"


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
        self, name: str, body: bytes = b"", *, key: str = "7", method: str = "POST", size: int | None = None
    ) -> int:
        """Returns the status; the body is only there to be read once."""
        sent: list[Any] = []
        pieces: Iterator[bytes] = iter([body])

        async def receive() -> Any:
            return {"type": "http.request", "body": next(pieces), "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"key", key.encode()), (b"content-length", str(len(body) if size is None else size).encode())]
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
    assert site.refused == [("size", 7)]
    site.ask(name, b"x", size=limit)
    assert site.calls.asked == [(name, b"x")]


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

    assert (site.api.authenticate(request("8")), site.contacts) == (None, [])
    assert (site.api.authenticate(request("7")), site.contacts) == (7, [7])


def test_a_copy_signs_for_nobody_in_another_part_of_the_application_either(site: Site) -> None:
    site.watcher.refused["boot-b"] = "another one was here before"

    def request(instance: str) -> Request:
        return Request({"type": "http", "headers": [(b"key", b"7"), (INSTANCE_HEADER.encode(), instance.encode())]})

    assert (site.api.authenticate(request("boot-b")), site.contacts) == (None, [])
    assert (site.api.authenticate(request("boot-a")), site.contacts) == (7, [7])
