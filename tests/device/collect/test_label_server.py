"""What the label page's server bears from those who do not know the PIN."""

import contextlib
import errno
import http.client
import socket
import threading
import time
from http import HTTPStatus
from types import SimpleNamespace

import pytest

from edgefl.device.collect import label_server
from edgefl.device.collect.label_server import (
    MAX_CONNECTIONS,
    MAX_OF_ADDRESS,
    MAX_REQUEST_BYTES,
    POLL_S,
    BoundedHandler,
    BoundedHttpServer,
    find_own_address,
    list_own_names,
    make_server_context,
)

pytestmark = pytest.mark.timeout(60)


class _Hello(BoundedHandler):
    def do_GET(self):  # noqa: N802 the library's name
        self.send_response(HTTPStatus.OK)
        self.end_headers()
        self.wfile.write(b"hello")


@contextlib.contextmanager
def _serve(host="127.0.0.1", tls=None):
    server = BoundedHttpServer((host, 0), _Hello, tls)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def _connect(server, source):
    return socket.create_connection(server.server_address[:2], 10, (source, 0))


def _ask(server, source="127.0.0.9"):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=20, source_address=(source, 0))
    with contextlib.closing(connection):
        connection.request("GET", "/")
        return connection.getresponse().status


def test_more_connections_than_there_may_be_wait_until_others_end(monkeypatch):
    monkeypatch.setattr(label_server, "REQUEST_S", 60.0)
    before = threading.active_count()
    with _serve() as server, contextlib.ExitStack() as stack:
        for number in range(MAX_CONNECTIONS):
            stack.enter_context(_connect(server, f"127.0.0.{2 + number // MAX_OF_ADDRESS}"))
        with _connect(server, "127.0.0.9") as waiting:
            waiting.sendall(b"GET / HTTP/1.0\r\n\r\n")
            waiting.settimeout(1.0)
            with pytest.raises(TimeoutError):
                waiting.recv(1)
            assert threading.active_count() - before <= MAX_CONNECTIONS + 1
            stack.close()
            waiting.settimeout(20.0)
            assert b" 200 " in waiting.recv(100)


def test_a_connection_that_says_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr(label_server, "REQUEST_S", 0.5)
    with _serve() as server, _connect(server, "127.0.0.2") as silent:
        assert silent.recv(1) == b""


def test_one_address_leaves_connections_to_others():
    with _serve() as server, contextlib.ExitStack() as stack:
        for _ in range(MAX_OF_ADDRESS):
            stack.enter_context(_connect(server, "127.0.0.2"))
        one_more = stack.enter_context(_connect(server, "127.0.0.2"))
        assert one_more.recv(1) == b""
        assert _ask(server) == 200


def test_a_request_that_comes_in_drops_is_cut_off(monkeypatch):
    monkeypatch.setattr(label_server, "REQUEST_S", 0.6)
    with _serve() as server, _connect(server, "127.0.0.2") as slow:
        begun_s = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - begun_s < 10:
                slow.sendall(b"G")
                time.sleep(0.1)
        assert time.monotonic() - begun_s < 5


def test_the_head_of_a_request_is_bounded():
    with _serve() as server, _connect(server, "127.0.0.2") as wordy:
        head = b"GET / HTTP/1.0\r\n" + b"".join(b"x-%d: %s\r\n" % (number, b"y" * 900) for number in range(30))
        wordy.sendall(head[:MAX_REQUEST_BYTES])
        assert b" 431 " in wordy.recv(100)
        assert _ask(server) == 200


def test_a_server_without_descriptors_waits_before_it_asks_for_one_again(monkeypatch):
    def fail():
        raise OSError(errno.EMFILE, "too many open files")

    server = BoundedHttpServer(("127.0.0.1", 0), _Hello, None)
    with contextlib.closing(server.socket):
        monkeypatch.setattr(server, "socket", SimpleNamespace(accept=fail))
        begun_s = time.monotonic()
        with pytest.raises(OSError, match="too many"):
            server.get_request()
        assert time.monotonic() - begun_s >= POLL_S


def test_no_name_is_looked_up_when_the_server_starts(monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda _host: pytest.fail("a look-up"))
    with _serve() as server:
        assert _ask(server) == 200


def test_browsers_leave_out_the_port_that_is_the_scheme_s_own():
    assert list_own_names("192.168.1.4", 8090, "http") == {"192.168.1.4:8090", "localhost:8090"}
    assert "192.168.1.4" in list_own_names("192.168.1.4", 443, "https")
    assert "192.168.1.4" not in list_own_names("192.168.1.4", 443, "http")
    assert "[fd00::4]" in list_own_names("fd00:0::4", 80, "http")
    assert "192.168.1.4:8090" in list_own_names("::ffff:192.168.1.4", 8090, "https")


def test_the_address_of_all_interfaces_is_printed_as_one_that_leads_here():
    with _serve("0.0.0.0") as server:
        host = server.url.removeprefix("http://").rpartition(":")[0]
        assert host not in {"0.0.0.0", ""}
        with socket.create_connection((host, server.server_address[1]), 10):
            pass
    assert find_own_address("::") != "::"


def test_an_ipv6_address_is_served_and_in_the_certificate():
    tls, _ = make_server_context("::1")
    try:
        serving = _serve("::1", tls)
        server = serving.__enter__()
    except OSError:
        pytest.skip("no IPv6 here: sudo sysctl net.ipv6.conf.lo.disable_ipv6=0")
    try:
        assert server.url.startswith("https://[::1]:")
        with socket.create_connection(("::1", server.server_address[1]), 10):
            pass
    finally:
        serving.__exit__(None, None, None)
