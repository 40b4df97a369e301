"""Requests that are cut off, at every kind of byte boundary, on every route of a coordinator that runs here."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from edgefl.coordinator.flower.fleet_api import FLEET_PREFIX
from edgefl.device.enrolment.certificates import create_key, export_public_key
from edgefl.device.flower.supernode import RequestSigner
from edgefl.system.https_client import create_pinned_context

FLEET_METHODS = ("activate-node", "pull-messages", "push-messages", "pull-object", "push-object", "unknown")
Headers = Callable[[str, str], str]
"""Lines of headers of a request, by method and path."""
ENDINGS = ("goodbye", "reset", "half-closed")
BODY = json.dumps({"v": 1, "name": "bö", "toml": "x" * 40}, ensure_ascii=False).encode()
CHUNKED = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:20], BODY[20:])) + b"0\r\n\r\n"


def list_routes(app: Any) -> list[tuple[str, str]]:
    """Every method and path of the application, Flower's too; the feed, which goes on for ever, is left out."""
    todo, routes = [app], [("POST", f"{FLEET_PREFIX}{name}") for name in FLEET_METHODS]
    while todo:
        found = todo.pop()
        if isinstance(found, FastAPI):
            for path, operations in found.openapi()["paths"].items():
                filled = re.sub(r"\{\w+\}", "latest", path)
                routes += [(method.upper(), filled) for method in operations if not path.endswith("/feed")]
        todo += [cell.cell_contents for cell in getattr(found, "__closure__", None) or ()]
    assert len(routes) > 40
    return sorted(routes)


def list_cuts(method: str, path: str, headers: str) -> Iterator[bytes]:
    """The beginnings of a request, one for each kind of boundary; the last one is whole."""
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\n{headers}content-type: application/json\r\n".encode()
    declared = head + b"content-length: %d\r\n\r\n" % len(BODY)
    for end in (0, 1, len(method), len(method) + 1, len(method) + 4, head.index(b"\r\n"), head.index(b"\r\n") + 1):
        yield declared[:end]
    first = head.index(b"\r\n") + 2
    yield from (declared[: first + at] for at in (0, 2, 4, 5, 7, 8, 9))  # in and around the header `host: x`
    yield from (declared[:-at] for at in (4, 3, 2, 1))
    character = BODY.index("ö".encode())
    yield from (declared + BODY[:end] for end in (0, 1, character + 1, len(BODY) // 2, len(BODY) - 1, len(BODY)))
    chunked = head + b"transfer-encoding: chunked\r\n\r\n"
    yield from (chunked + CHUNKED[:end] for end in (0, 1, 2, 3, 4, 10, 24, 25, 26, 27, 28))
    yield from (chunked + CHUNKED[:-at] for at in (5, 4, 3, 2, 1))
    yield chunked + CHUNKED


def _connect(port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    """Connects, as soon as the coordinator takes more connections from here: their rate is limited."""
    deadline_s = time.monotonic() + 30
    while True:
        connection = context.wrap_socket(socket.socket(), server_hostname="127.0.0.1", suppress_ragged_eofs=True)
        connection.settimeout(20)
        try:
            connection.connect(("127.0.0.1", port))
        except (ConnectionResetError, ssl.SSLEOFError):
            connection.close()
            assert time.monotonic() < deadline_s, "it takes no connection any more"
            time.sleep(0.05)
        else:
            return connection


def send_cut(port: int, context: ssl.SSLContext, request: bytes, ending: str) -> int:
    """Sends the beginning of a request and hangs up; returns the status of an answer, 0 for none.

    A whole one is `answered` before.
    """
    with _connect(port, context) as connection:
        connection.sendall(request)
        answer = b""
        if ending == "answered":
            answer = connection.recv(100)
        elif ending == "half-closed":
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_WR)  # SSLSocket's own would end the decryption, too
                answer = connection.recv(100)
        elif ending == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            connection.settimeout(0.02)
            with contextlib.suppress(OSError):
                connection.unwrap()
        connection.close()
    found = re.match(rb"HTTP/1\.\d (\d+)", answer)
    return int(found[1]) if found else 0


def make_bearer_headers(token: str) -> Headers:
    """Returns the headers of an operator's requests, by method and path."""
    return lambda _method, _path: f"authorization: Bearer {token}\r\n"


def make_signed_headers(coordinator: Any) -> Headers:
    """Returns the headers of requests of the device `pi`, whose key is registered here, by method and path."""
    key = create_key()
    node_id = coordinator._superlink.register(export_public_key(key))
    coordinator._registry.add("pi", node_id=node_id, role="trainer", groups=(), examples={"digits": 9})
    signer = RequestSigner(key, time.time)

    def sign(method: str, path: str) -> str:
        return "".join(f"{name}: {value}\r\n" for name, value in signer.sign(method, path, BODY).items())

    return sign


def send_all(
    coordinator: Any, headers: Headers, ca: Path, *, every: int = 1
) -> tuple[int, dict[int, int], list[str]]:
    """Cuts requests off on every route, every n-th boundary each.

    Returns:
        How many; how many were answered with each status, 0 for none; and those that got 5xx.
    """
    web = coordinator._web
    port, context = web._listener.getsockname()[1], create_pinned_context(ca.read_bytes())
    number, statuses, faults = 0, Counter[int](), []
    for method, path in list_routes(web._server.config.app):
        num_cuts = len(list(list_cuts(method, path, "")))
        for cut in range(num_cuts):
            number += 1
            is_last = cut == num_cuts - 1
            if number % every and not is_last:
                continue
            request = list(list_cuts(method, path, headers(method, path)))[cut]
            ending = "answered" if is_last else ENDINGS[(number // every) % len(ENDINGS)]
            status = send_cut(port, context, request, ending)
            statuses[status] += 1
            if status >= 500:
                faults.append(f"{status} for {request[:80]!r}… of {len(request)} bytes, {ending}")
    return sum(statuses.values()), dict(statuses), faults
