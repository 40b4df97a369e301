"""A real HTTP server that takes alerts, answers as it is told, and keeps what it got; a coordinator that sends."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from edgefl.coordinator.directory import StartOptions, init_directory, load_directory
from edgefl.coordinator.service import Coordinator
from edgefl.engine.assembly.build import build_run
from edgefl.simulation.local_fleet import find_free_port
from edgefl.storage.store import Store


class Receiver:
    """Use it as a context manager. `answers` are the statuses of the next requests; then it is 200."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[int] = []
        self.hold = threading.Event()
        self.hold.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.requests.append((dict(self.headers), body))
                receiver.hold.wait(20)
                status = receiver.answers.pop(0) if receiver.answers else 200
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", receiver.url)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/hook/very-secret"

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.requests]

    def told(self) -> list[tuple[str, str, str]]:
        return [(body["alert"], body["subject"], body["state"]) for body in self.bodies]

    def wait(self, condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
        until_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < until_s, f"not within {timeout_s} s; got {self.told()}"
            time.sleep(0.01)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.hold.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def run_that_fails(folder: Path, alerts: str) -> Iterator[None]:
    """Runs a coordinator with these lines under `[alerts]`, whose run `bad` fails."""
    directory = init_directory(folder / "c", hosts=["127.0.0.1"], fleet="lab", port=find_free_port())
    with directory.settings.open("a") as settings:
        settings.write(f"\n[alerts]\n{alerts}")
    directory = load_directory(directory.root)
    with Store.open(directory.database) as store:
        store.add_run(
            run_id="bad", name="n", task="digits", strategy="fedavg", seed=7, submitted_at=1.0,
            config={"run": {"task": "digits", "init": str(folder / "none.safetensors")}},
        )  # fmt: skip
    options = StartOptions(host="127.0.0.1", port=directory.port, broker_port=find_free_port(), broker="embedded")
    with Coordinator(directory, options, build_run):
        yield
