"""A coordinator that offers one model over real TLS, and does to it what a test wants: slow, broken, wrong."""

from __future__ import annotations

import json
import re
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from edgefl.coordinator.directory import init_directory
from edgefl.device.rollouts.download import DownloadSource
from edgefl.system.https_client import create_pinned_context


class ModelSource:
    """Serves `body` for every deployment; knobs are plain attributes.

    Attributes:
        offer: what it says of the model; `body` is what it really sends.
        cut_after: bytes after which a connection breaks, while `cuts` are left.
        pause_s: between pieces of 1 KiB.
        ranges: the ranges that were asked for.
        gone: what is not for this device any more.
    """

    def __init__(self, root: Path, body: bytes, sha256: str) -> None:
        directory = init_directory(root, hosts=["127.0.0.1"], fleet="lab", port=1)
        self.body, self.ca = body, directory.ca_cert
        self.offer: dict[str, Any] = {
            "deployment": "d1", "model": "ab" * 32, "sha256": sha256, "bytes": len(body), "task": "digits",
            "options": {}, "tolerance": 0.02, "min_accuracy": 0.0, "test_fraction": 0.1,
        }  # fmt: skip
        self.cut_after, self.cuts, self.pause_s = 0, 0, 0.0
        self.ranges: list[str] = []
        self.gone: set[str] = set()
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.ignores_ranges = False
        self.go_on = threading.Event()
        source = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                source.headers.append(dict(self.headers))
                if self.path.split("/")[-2] in source.gone:
                    self.reply(404, source.error(404))
                elif source.status != 200:
                    self.reply(source.status, source.error())
                elif self.path.endswith("/offer"):
                    deployment = self.path.split("/")[-2]
                    self.reply(200, json.dumps({"v": 1, **source.offer, "deployment": deployment}).encode())
                else:
                    self.send_model()

            def reply(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def send_model(self) -> None:
                asked = self.headers.get("Range", "")
                source.ranges.append(asked)
                start = int(re.sub(r"\D", "", asked) or 0) if not source.ignores_ranges else 0
                self.send_response(200 if source.ignores_ranges else 206)
                self.send_header("Content-Range", f"bytes {start}-{len(source.body) - 1}/{len(source.body)}")
                self.send_header("Content-Length", str(len(source.body) - start))
                self.end_headers()
                for place in range(start, len(source.body), 1024):
                    if source.cuts and place - start >= source.cut_after:
                        source.cuts -= 1
                        self.connection.close()
                        return
                    self.wfile.write(source.body[place : place + 1024])
                    self.wfile.flush()
                    source.go_on.wait(source.pause_s)

            def log_message(self, *_: Any) -> None:
                pass

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(directory.server_cert, directory.server_key)
        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    def error(self, status: int | None = None) -> bytes:
        code = {404: "not-found", 401: "not-allowed"}.get(status or self.status, "store")
        return json.dumps({"v": 1, "error": code, "message": "no"}).encode()

    def source(self) -> DownloadSource:
        return DownloadSource(
            address=self.address,
            tls_context=create_pinned_context(self.ca.read_bytes()),
            sign=lambda method, target, _body: {"who": f"pi {method} {target}"},
        )

    def close(self) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Connections break on purpose."""
