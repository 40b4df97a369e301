from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pytest
from fastapi import APIRouter, Body

from edgefl.coordinator.api.server import MAX_REQUEST_BYTES, WebServer, make_app, open_listener
from edgefl.coordinator.directory import CoordinatorDirectory, init_directory
from edgefl.core.errors import NetworkError, PortInUseError


class Site:
    """A web server with one slow path."""

    def __init__(self, root: Path) -> None:
        self.directory: CoordinatorDirectory = init_directory(root, hosts=["127.0.0.1"], fleet="lab", port=8000)
        self.asked, self.go, self.echoed = threading.Event(), threading.Event(), 0
        listener = open_listener("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.web = WebServer(make_app(_no_fleet, [self._routes()]), self.directory, listener)

    def _routes(self) -> APIRouter:
        router = APIRouter()

        @router.get("/slow")
        def slow() -> dict[str, int]:
            self.asked.set()
            assert self.go.wait(60)
            return {"v": 1}

        @router.get("/fast")
        def fast() -> dict[str, int]:
            return {"v": 1}

        @router.post("/echo")
        def echo(text: Annotated[str, Body(embed=True)]) -> dict[str, int]:
            self.echoed += 1
            return {"length": len(text)}

        return router

    def client(self) -> http.client.HTTPSConnection:
        context = ssl.create_default_context(cafile=str(self.directory.ca_cert))
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=10, context=context)


async def _no_fleet(_scope: object, _receive: object, _send: object) -> None:
    raise AssertionError("not asked")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "c")
    site.web.start()
    yield site
    site.web.stop()


def _get(client: http.client.HTTPSConnection, path: str) -> int:
    client.request("GET", path)
    response = client.getresponse()
    response.read()
    return response.status


def test_stopping_does_not_wait_for_idle_connections(site: Site) -> None:
    client = site.client()
    assert _get(client, "/fast") == 200
    started_s = time.monotonic()
    site.web.stop()
    assert time.monotonic() - started_s < 2
    client.close()


def test_stopping_waits_for_a_request_under_way(site: Site) -> None:
    client, status = site.client(), list[int]()
    asking = threading.Thread(target=lambda: status.append(_get(client, "/slow")))
    asking.start()
    assert site.asked.wait(60)
    stopping = threading.Thread(target=site.web.stop)
    stopping.start()
    stopping.join(0.5)
    assert stopping.is_alive()
    site.go.set()
    stopping.join(60)
    asking.join(60)
    client.close()
    assert status == [200]


def test_a_port_has_one_listener() -> None:
    with open_listener("127.0.0.1", 0) as first, pytest.raises(PortInUseError, match="--port"):
        open_listener("127.0.0.1", first.getsockname()[1])


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(NetworkError, match=r"192\.0\.2\.1"):
        open_listener("192.0.2.1", 0)


def test_it_listens_on_ipv6_too() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here: sudo sysctl net.ipv6.conf.lo.disable_ipv6=0")
    try:
        with open_listener("::1", 0) as listener:
            assert listener.family is socket.AF_INET6
    except NetworkError:
        pytest.skip("no IPv6 address here: sudo sysctl net.ipv6.conf.lo.disable_ipv6=0")


def test_a_body_over_the_limit_is_refused_before_anything_reads_it(site: Site) -> None:
    small = json.dumps({"text": "x" * 1000}).encode()
    assert _post(site, [small], declared=True) == 200
    large = json.dumps({"text": "x" * MAX_REQUEST_BYTES}).encode()
    assert _post(site, [large], declared=True) == 413
    pieces = [large[i : i + 65536] for i in range(0, len(large), 65536)]
    assert _post(site, pieces, declared=False) >= 400
    assert site.echoed == 1


def _post(site: Site, pieces: list[bytes], *, declared: bool) -> int:
    client = site.client()
    headers = {"Content-Type": "application/json"}
    body = b"".join(pieces) if declared else iter(pieces)
    try:
        client.request("POST", "/echo", body=body, headers=headers, encode_chunked=not declared)
        return client.getresponse().status
    except (BrokenPipeError, ConnectionResetError, ssl.SSLError):
        return 413  # the server answered and hung up while we were still sending
    finally:
        client.close()
