"""Requests that are cut off, at every kind of byte boundary, on every route of a coordinator that runs here."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from edgefl.coordinator.flower.fleet_api import FLEET_PREFIX
from edgefl.system.https_client import create_pinned_context

FLEET_METHODS = ("activate-node", "pull-messages", "push-messages", "pull-object", "push-object", "unknown")
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


def send_cut(port: int, context: ssl.SSLContext, request: bytes, ending: str) -> int:
    """Sends the beginning of a request and hangs up; returns the status of an answer, 0 for none."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
        connection = context.wrap_socket(plain, server_hostname="127.0.0.1", suppress_ragged_eofs=True)
        connection.sendall(request)
        answer = b""
        if ending == "half-closed":
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
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


def send_all(coordinator: Any, token: str, ca: Path, *, every: int = 1) -> tuple[int, list[str]]:
    """Cuts requests off on every route, every n-th boundary each; returns how many, and the answers that are 5xx."""
    web = coordinator._web
    port, context = web._listener.getsockname()[1], create_pinned_context(ca.read_bytes())
    headers, number, faults = f"authorization: Bearer {token}\r\n", 0, []
    for method, path in list_routes(web._server.config.app):
        for cut in list_cuts(method, path, headers):
            number += 1
            if number % every:
                continue
            ending = ENDINGS[(number // every) % len(ENDINGS)]
            status = send_cut(port, context, cut, ending)
            if status >= 500:
                faults.append(f"{status} for {cut[:80]!r}… of {len(cut)} bytes, {ending}")
    return number // every, faults
