"""Deadlines and limits of HTTPS connections, with real sockets on a server in this process."""

from __future__ import annotations

import contextlib
import json
import logging
import select
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Body, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from edgefl.coordinator.api.server import WebServer, make_app, open_listener
from edgefl.coordinator.connections import EVICTION_AGE_S, ConnectionLimiter
from edgefl.coordinator.directory import CoordinatorDirectory, init_directory
from edgefl.core.config import ConnectionSettings

KEY = {"authorization": "Bearer secret"}


class Site:
    """A server with short deadlines, and clients that are late."""

    def __init__(self, directory: CoordinatorDirectory, **settings: Any) -> None:
        # A client's hand-shake is over before the server's is: on a busy machine that takes longer than 0.3 s.
        short = {"handshake_s": 10, "header_s": 0.3, "idle_s": 0.3, "stall_s": 0.3, "write_s": 0.3}
        chosen = ConnectionSettings(**{**short, **settings})
        self.limiter = ConnectionLimiter("https", chosen, 300)
        self.context = ssl.create_default_context(cafile=str(directory.ca_cert))
        listener = open_listener("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        app = make_app(_no_fleet, [_routes()], is_operator=_has_key)
        self.web = WebServer(app, directory, listener, self.limiter)
        self.web.start()

    def connect(self) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        return self.context.wrap_socket(plain, server_hostname="127.0.0.1")

    def wait_refused(self, **expected: int) -> None:
        deadline_s = time.monotonic() + 10
        while self.limiter.refused != expected and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert self.limiter.refused == expected

    def ask(self, connection: ssl.SSLSocket, path: str = "/fast", **headers: str) -> int:
        connection.sendall(_encode("GET", path, headers))
        return _read_answer(connection)[0]


def _encode(method: str, path: str, headers: dict[str, str] | None = None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: x", *(f"{name}: {value}" for name, value in (headers or {}).items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _read_answer(connection: ssl.SSLSocket) -> tuple[int, dict[str, str], bytes]:
    """Reads one answer with a length."""
    data = b""
    while b"\r\n\r\n" not in data:
        received = connection.recv(4096)
        assert received, f"closed after {data!r}"
        data += received
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    while len(body) < int(headers["content-length"]):
        body += connection.recv(4096)
    return int(first.split()[1]), headers, body


def _is_closed(connection: socket.socket, within_s: float = 5.0) -> bool:
    connection.settimeout(within_s)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def _routes() -> APIRouter:
    router = APIRouter()

    @router.get("/fast")
    def fast() -> dict[str, int]:
        return {"v": 1}

    @router.post("/read")
    async def read(request: Request) -> dict[str, int]:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
        return {"size": size}

    @router.post("/echo")
    def echo(text: Annotated[str, Body(embed=True)]) -> dict[str, int]:
        return {"size": len(text)}

    @router.get("/late")
    async def late() -> dict[str, int]:
        await run_in_threadpool(time.sleep, 1.2)
        return {"v": 1}

    @router.get("/large")
    def large() -> StreamingResponse:
        return StreamingResponse(b"x" * 65536 for _ in range(1000))

    return router


def _has_key(request: Request) -> bool:
    return request.headers.get("authorization") == KEY["authorization"]


async def _no_fleet(_scope: object, _receive: object, _send: object) -> None:
    raise AssertionError("not asked")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> CoordinatorDirectory:
    return init_directory(tmp_path_factory.mktemp("c") / "c", hosts=["127.0.0.1"], fleet="lab", port=8000)


@pytest.fixture(scope="module")
def shared_site(directory: CoordinatorDirectory) -> Iterator[Site]:
    site = Site(directory)
    yield site
    site.web.stop()


@pytest.fixture
def site(shared_site: Site) -> Site:
    shared_site.limiter.refused.clear()
    return shared_site


@contextlib.contextmanager
def _open_site(directory: CoordinatorDirectory, **settings: Any) -> Iterator[Site]:
    site = Site(directory, **settings)
    try:
        yield site
    finally:
        site.web.stop()


def test_a_hand_shake_that_never_comes_is_closed(directory: CoordinatorDirectory) -> None:
    with _open_site(directory, handshake_s=0.3) as site:
        with socket.create_connection(("127.0.0.1", site.port)) as plain:
            assert _is_closed(plain)
        site.wait_refused(handshake=1)


@pytest.mark.parametrize("sent", [b"", b"GET /fast HTTP/1.1\r\nhost: x\r\n", b"\r\n"])
def test_a_late_header_gets_408(site: Site, sent: bytes) -> None:
    with site.connect() as connection:
        connection.sendall(sent)
        status, headers, body = _read_answer(connection)
        assert (status, headers["connection"]) == (408, "close")
        assert json.loads(body)["v"] == 1
        assert _is_closed(connection)
    site.wait_refused(header=1)


def test_a_header_that_comes_byte_by_byte_has_one_deadline_for_all_of_it(site: Site) -> None:
    with site.connect() as connection:
        # One thread: two may not use one TLS connection at the same time.
        for byte in _encode("GET", "/fast", {"x": "y" * 1000}):
            connection.sendall(bytes([byte]))
            if select.select([connection], [], [], 0.05)[0]:
                break
        assert _read_answer(connection)[0] == 408


@pytest.mark.parametrize("path", ["/read", "/echo"])
def test_a_body_that_stalls_gets_408(site: Site, path: str) -> None:
    with site.connect() as connection:
        connection.sendall(_encode("POST", path, {"content-length": "1000"}) + b"{")
        assert _read_answer(connection)[0] == 408
        assert _is_closed(connection)
    site.wait_refused(body=1)


def test_a_slow_body_at_more_than_the_least_rate_arrives(directory: CoordinatorDirectory) -> None:
    with _open_site(directory, stall_s=0.6) as site, site.connect() as connection:
        connection.sendall(_encode("POST", "/read", {"content-length": "3000"}))
        for piece in (b'"', *[b"x" * 100] * 29, b"x" * 98 + b'"'):
            time.sleep(0.05)
            connection.sendall(piece)
        status, _, body = _read_answer(connection)
        assert (status, json.loads(body)) == (200, {"size": 3000})


def test_an_idle_connection_is_closed_and_one_with_a_key_is_not(site: Site) -> None:
    with site.connect() as stranger, site.connect() as operator:
        assert site.ask(stranger) == 200
        assert site.ask(operator, **KEY) == 200
        assert _is_closed(stranger)
        assert not _is_closed(operator, within_s=0.5)
        operator.settimeout(10)
        assert site.ask(operator) == 200
    assert not site.limiter.refused, "idleness is no fault"


def test_a_request_that_takes_long_to_answer_has_no_deadline(site: Site) -> None:
    with site.connect() as connection:
        assert site.ask(connection, "/late") == 200


def test_a_reader_that_does_not_read_is_let_go(site: Site) -> None:
    with site.connect() as connection:
        connection.sendall(_encode("GET", "/large"))  # more than the buffers of both ends hold
        site.wait_refused(write=1)
        assert _is_closed(connection)


def test_an_endless_header_gets_431(site: Site) -> None:
    with site.connect() as connection:
        connection.sendall(b"GET /fast HTTP/1.1\r\nx: " + b"y" * 400_000)
        with contextlib.suppress(OSError):  # the answer may be lost, for the rest is never read
            assert _read_answer(connection)[0] == 431
        assert _is_closed(connection)


def test_what_is_no_http_gets_400_and_no_line_in_the_log(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with site.connect() as connection:
        connection.sendall(b"\x00\x01\x02\r\n\r\n")
        assert _read_answer(connection)[0] == 400
    assert not caplog.messages


def test_a_newcomer_takes_the_place_of_a_connection_without_a_key_which_gets_429(
    directory: CoordinatorDirectory,
) -> None:
    limits = {"max_pending_per_address": 4, "header_s": 20, "idle_s": 20}
    with _open_site(directory, **limits) as site, contextlib.ExitStack() as stack:
        operator = stack.enter_context(site.connect())
        assert site.ask(operator, **KEY) == 200
        crowd = [stack.enter_context(site.connect()) for _ in range(4)]
        time.sleep(EVICTION_AGE_S)
        newcomer = stack.enter_context(site.connect())
        assert site.ask(newcomer) == 200
        answers = []
        for connection in crowd:
            connection.settimeout(0.5)
            with contextlib.suppress(TimeoutError):
                answers.append(_read_answer(connection)[0])
        assert answers == [429]
        assert site.ask(operator) == 200


def test_idle_connections_beyond_the_limit_are_refused_before_any_hand_shake(directory: CoordinatorDirectory) -> None:
    with _open_site(directory, max_pending_per_address=4) as site, contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(socket.create_connection(("127.0.0.1", site.port))) for _ in range(50)]
        site.wait_refused(address=46)
        assert sum(_is_closed(one, within_s=0.1) for one in crowd) == 46


@pytest.mark.parametrize("path", ["/read", "/echo"])
@pytest.mark.parametrize("length", [0, 1, 5])
def test_a_client_that_hangs_up_in_the_middle_of_a_body_leaves_no_traceback(
    site: Site, path: str, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        with site.connect() as connection:
            connection.sendall(_encode("POST", path, {"content-length": "10"}) + b"x" * length)
        deadline_s = time.monotonic() + 10
        while site.limiter.num_pending and time.monotonic() < deadline_s:
            time.sleep(0.02)
        with site.connect() as connection:
            assert site.ask(connection) == 200
    assert not [record for record in caplog.records if record.exc_info]


def test_certificates_can_change_while_connections_come(site: Site) -> None:
    for _ in range(3):
        site.web.reload()
        with site.connect() as connection:
            assert site.ask(connection) == 200
