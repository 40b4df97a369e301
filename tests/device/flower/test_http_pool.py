"""A server that does to connections what servers and networks do, and the client that has to live with it."""

import contextlib
import queue
import socket
import ssl
import threading
from collections.abc import Callable
from types import SimpleNamespace

import httpx
import pytest

from edgefl.coordinator.directory import init_directory
from edgefl.device.flower.http_pool import PooledHttpTransport, _send
from edgefl.system.https_client import create_pinned_context

HOST = "127.0.0.1"
Answerer = Callable[[ssl.SSLSocket], bool]
"""Serves one request of a connection; returns whether the connection stays open."""


class Server:
    """Accepts any number of connections, each in a thread; `answer` says what happens to their requests."""

    def __init__(self, context):
        self.answer: Answerer = whole
        self.num_connections = 0
        self.closed: queue.Queue[None] = queue.Queue()
        self._context = context
        self._listener = socket.create_server((HOST, 0))
        self.url = f"https://{HOST}:{self._listener.getsockname()[1]}/v1/x"
        threading.Thread(target=self._run, daemon=True).start()

    def close(self):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._listener.close()

    def _run(self):
        with contextlib.suppress(OSError):
            while True:
                raw, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(raw,), daemon=True).start()

    def _serve(self, raw):
        with contextlib.suppress(OSError), self._context.wrap_socket(raw, server_side=True) as wire:
            self.num_connections += 1
            while self.answer(wire):
                pass
        self.closed.put(None)


def read_head(wire):
    """Returns the headers of a request and what of its body came with them; raises OSError at the end."""
    head = b""
    while b"\r\n\r\n" not in head:
        piece = wire.recv(4096)
        if not piece:
            raise ConnectionResetError
        head += piece
    lines, _, rest = head.partition(b"\r\n\r\n")
    pairs = (line.decode().split(": ", 1) for line in lines.split(b"\r\n")[1:])
    return {name.lower(): value for name, value in pairs}, rest


def read_request(wire):
    """Returns the body."""
    headers, body = read_head(wire)
    while len(body) < int(headers["content-length"]):
        body += wire.recv(65536)
    return body


def said(body, status="200 OK", more=""):
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{more}\r\n".encode() + body


def whole(wire):
    wire.sendall(said(read_request(wire)[::-1]))
    return True


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Returns the contexts of server and client."""
    directory = init_directory(tmp_path_factory.mktemp("site") / "c", hosts=[HOST], fleet="lab", port=8000)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory.server_cert, directory.server_key)
    return context, create_pinned_context(directory.ca_cert.read_bytes())


@pytest.fixture
def server(site):
    with contextlib.closing(Server(site[0])) as server:
        yield server


@pytest.fixture
def client(site):
    with httpx.Client(transport=PooledHttpTransport(site[1], timeout_s=5.0), trust_env=False) as client:
        yield client


def test_bodies_arrive_as_they_were_over_one_connection_that_ends_with_the_client(server, client):
    for size in (0, 1, 5_000_000, 2):
        body = (bytes(range(256)) * (size // 256 + 1))[:size]
        answer = client.post(server.url, content=body, headers={"x-own": "1"})
        assert (answer.status_code, answer.content) == (200, body[::-1])
    assert server.num_connections == 1
    client.close()
    server.closed.get(timeout=5)


def test_requests_at_the_same_time_do_not_wait_for_each_other(server, client):
    both = threading.Barrier(2, timeout=5)

    def together(wire):
        body = read_request(wire)
        both.wait()
        wire.sendall(said(body))
        return True

    server.answer = together
    answers: queue.Queue[bytes] = queue.Queue()
    for _ in range(2):
        threads = [
            threading.Thread(target=lambda name=name: answers.put(client.post(server.url, content=name).content))
            for name in (b"one", b"two")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {answers.get(timeout=1), answers.get(timeout=1)} == {b"one", b"two"}
    assert server.num_connections == 2


@pytest.mark.parametrize("is_told", [False, True])
def test_a_connection_that_the_server_closes_is_not_used_again(server, client, is_told):
    def once(wire):
        wire.sendall(said(read_request(wire), more="connection: close\r\n" if is_told else ""))
        return is_told and bool(wire.recv(1))

    server.answer = once
    for _ in range(3):
        assert client.post(server.url, content=b"x").content == b"x"
        server.closed.get(timeout=5)
    assert server.num_connections == 3


def test_an_answer_before_the_end_of_the_body_is_heard(server, client):
    def refuses(wire):
        read_head(wire)
        wire.sendall(said(b"too large", "413 Content Too Large", "connection: close\r\n"))
        # It is read on without a look at it: a connection closed over unread bytes may take the answer along.
        while wire.recv(65536):
            pass
        return False

    server.answer = refuses
    answer = client.post(server.url, content=bytes(20_000_000))
    assert (answer.status_code, answer.content) == (413, b"too large")


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), BrokenPipeError("pipe"), ssl.SSLEOFError("eof")])
def test_sending_that_breaks_off_is_no_error_if_there_is_an_answer(error):
    near, far = socket.socketpair()

    def endheaders(_body):
        raise error

    connection = SimpleNamespace(
        sock=near, putrequest=lambda *_, **__: None, putheader=lambda *_: None, endheaders=endheaders
    )
    request = httpx.Request("POST", "https://127.0.0.1/x", content=b"body")
    with near, far:
        with pytest.raises(OSError, match=str(error.args[0])):
            _send(connection, request)
        far.sendall(b"HTTP/1.1 413")
        _send(connection, request)


@pytest.mark.parametrize(
    "told",
    [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf of it", b"no answer at all\r\n\r\n"],
    ids=["nothing", "half", "nonsense"],
)
def test_an_answer_that_breaks_off_is_an_error_and_the_next_request_is_served(server, client, told):
    def breaks_off(wire):
        read_request(wire)
        wire.sendall(told)
        return False

    server.answer = breaks_off
    with pytest.raises(httpx.ReadError):
        client.post(server.url, content=b"x")
    server.answer = whole
    assert client.post(server.url, content=b"ab").content == b"ba"


def test_a_server_that_stands_still_is_given_up(server, site):
    stands = threading.Event()
    server.answer = lambda _wire: not stands.wait(30)
    with httpx.Client(transport=PooledHttpTransport(site[1], timeout_s=0.2), trust_env=False) as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post(server.url, content=b"x")
        with pytest.raises(httpx.WriteTimeout):
            client.post(server.url, content=bytes(50_000_000))
    stands.set()


def test_a_server_that_is_not_trusted_is_sent_nothing_and_one_that_is_gone_is_no_connection(server, client, tmp_path):
    other = init_directory(tmp_path / "other", hosts=[HOST], fleet="lab", port=8000)
    trust = create_pinned_context(other.ca_cert.read_bytes())
    heard = []
    server.answer = lambda wire: bool(heard.append(wire.recv(100)))
    with (
        httpx.Client(transport=PooledHttpTransport(trust, timeout_s=5.0), trust_env=False) as stranger,
        pytest.raises(httpx.ConnectError, match="certificate verify failed"),
    ):
        stranger.post(server.url, content=b"secret")
    assert heard == []
    server.close()
    with pytest.raises(httpx.ConnectError):
        client.post(server.url, content=b"x")
