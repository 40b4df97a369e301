"""A small HTTP server that runs the deployed model: predictions, health, and which model it is.

It looks at the note of the model store, and takes over a new model between two requests: one that has begun ends with
the model it began with, none is dropped. The standard library serves: three routes need no web framework.
"""

from __future__ import annotations

import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import socket
from typing import Any

import numpy as np

from edgefl import __version__
from edgefl.device.inference.inference_inputs import npy_array
from edgefl.device.inference.model_store import DeployedModel, ModelStore
from edgefl.device.inference.onnx_model import OnnxModel
from edgefl.errors import DataError, EdgeflError, NetworkError, PortInUseError
from edgefl.types import Array, Json
from edgefl.untrusted import parse_json

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_REQUESTS = 16
"""So many are answered at a time; more get 503, since a board that swaps answers nobody."""
IDLE_S = 30.0
LOOK_EVERY_S = 0.5
DRAIN_WITHIN_S = 5.0
EADDRINUSE = 98


class Served:
    """The model that is served now: the deployed one, or a file that never changes."""

    def __init__(self, *, store: ModelStore | None = None, file: Path | None = None, threads: int = 1) -> None:
        self._store, self._threads = store, threads
        self._stamp: object = None
        self._now: tuple[OnnxModel, DeployedModel | None] | None = None
        if file is not None:
            self._now = OnnxModel(file, threads=threads), None
        self.refresh()

    @property
    def now(self) -> tuple[OnnxModel, DeployedModel | None] | None:
        """The model to answer with and its deployment; None while nothing is deployed."""
        return self._now

    def refresh(self) -> None:
        """Takes over what has been deployed since; a model that cannot be loaded leaves the one before in place."""
        if self._store is None or (stamp := self._note_stamp(self._store)) == self._stamp:
            return
        current = self._store.read().current
        before = self._now[1] if self._now else None
        if current is None:
            self._now = None
        elif before is None or before.sha256 != current.sha256:
            try:
                self._now = OnnxModel(self._store.path(current), threads=self._threads), current
                log.info("serves model %s of deployment %s", current.model[:12], current.deployment)
            except EdgeflError as error:
                log.warning("cannot take over a new model: %s", error)
                return  # the stamp stays old: it is tried again
        self._stamp = stamp

    @staticmethod
    def _note_stamp(store: ModelStore) -> object:
        try:
            found = store.note_path.stat()
        except OSError:
            return "none"
        return found.st_ino, found.st_mtime_ns, found.st_size


class InferenceServer:
    """Serves from `start` to `stop`.

    Args:
        served: which model.
        host, port: where to listen; port 0 takes a free one.

    Raises:
        PortInUseError: somebody has the port.
        NetworkError: the address cannot be listened on.
    """

    def __init__(self, served: Served, host: str, port: int) -> None:
        self.served = served
        self._stopping = threading.Event()
        try:
            self._server = _Server((host, port), served)
        except OSError as error:
            if error.errno == EADDRINUSE:
                raise PortInUseError(f"port {port} is in use; choose another --port") from None
            raise NetworkError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
        self._threads = [
            threading.Thread(target=self._server.serve_forever, name="http", args=(0.1,), daemon=True),
            threading.Thread(target=self._watch, name="watch-model", daemon=True),
        ]

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Returns after `stop` was called."""
        self._stopping.wait()

    def stop(self) -> None:
        """Takes no more requests and answers those that have begun."""
        self._stopping.set()
        self._server.shutdown()
        self._server.socket.close()
        self._server.wait_answered(DRAIN_WITHIN_S)

    def _watch(self) -> None:
        while not self._stopping.wait(LOOK_EVERY_S):
            try:
                self.served.refresh()
            except Exception:  # the boundary of the thread: the model that is served stays
                log.exception("looking for a new model failed")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], served: Served) -> None:
        self.served = served
        self.slots = threading.BoundedSemaphore(MAX_REQUESTS)
        self.num_answering, self._changed = 0, threading.Condition()
        super().__init__(address, _Handler)

    def count(self, step: int) -> None:
        """Notes that a request began (1) or was answered (-1)."""
        with self._changed:
            self.num_answering += step
            self._changed.notify_all()

    def wait_answered(self, within_s: float) -> None:
        """Returns when no request is under way, or after so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self.num_answering, within_s)

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:  # noqa: ARG002 the library's interface
        log.debug("a connection from %s broke", client_address)


class _RefusedError(Exception):
    """A request gets this status and line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = f"edgefl/{__version__}"
    timeout = IDLE_S
    # Headers and body in one packet: two of them would wait 40 ms for each other (Nagle and delayed ACKs).
    wbufsize = -1
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        self._answer({"/healthz": self._health, "/model": self._model})

    def do_POST(self) -> None:
        self._answer({"/predict": self._predict})

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 the library's name
        log.debug(format, *args)

    def _answer(self, routes: dict[str, Any]) -> None:
        self.server.count(1)
        try:
            if not self.server.slots.acquire(blocking=False):
                self.close_connection = True
                self._send(503, {"error": f"more than {MAX_REQUESTS} requests at a time"})
                return
            try:
                self._route(routes)
            finally:
                self.server.slots.release()
        finally:
            self.server.count(-1)

    def _route(self, routes: dict[str, Any]) -> None:
        handler = routes.get(self.path.partition("?")[0], self._unknown)
        try:
            self._send(200, handler())
        except _RefusedError as error:
            self._send(error.status, {"error": str(error)})
        except EdgeflError as error:
            self._send(400, {"error": str(error)})
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception:  # the boundary of one request: the next one must still be answered
            log.exception("a request failed")
            self.close_connection = True
            self._send(500, {"error": "internal error; see the log"})

    def _health(self) -> Json:
        return {"status": "ok", "version": __version__, "has_model": self.server.served.now is not None}

    def _model(self) -> Json:
        model, deployed = self._current()
        return {
            "model": deployed.model if deployed else model.model,
            "task": model.task,
            "classes": list(model.classes),
            "input_shape": list(model.input_shape),
            "deployment": deployed.deployment if deployed else None,
            "accuracy": deployed.accuracy if deployed else None,
        }

    def _predict(self) -> Json:
        body = self._body()
        model, deployed = self._current()
        found = model.predict(self._rows(body, model))
        told = (deployed.model, deployed.deployment) if deployed else (model.model, None)
        return {"model": told[0], "deployment": told[1], "rows": [one.to_json() for one in found]}

    def _current(self) -> tuple[OnnxModel, DeployedModel | None]:
        now = self.server.served.now
        if now is None:
            raise _RefusedError(503, "no model is deployed yet; on the coordinator: edgefl model deploy MODEL")
        return now

    def _rows(self, body: bytes, model: OnnxModel) -> Array:
        if body[:6] == b"\x93NUMPY":
            rows = npy_array(body, "the body")
        else:
            try:
                value = parse_json(body)
            except (ValueError, RecursionError) as error:
                raise DataError(f"the body must be JSON rows or a .npy array: {error}") from None
            value = value.get("rows") if isinstance(value, dict) else value
            if not isinstance(value, list) or not value:
                raise DataError('the body must be {"rows": [[…], …]} with at least one row')
            try:
                with np.errstate(over="ignore"):  # what is too large becomes an infinity, and is refused below
                    rows = np.array(value, dtype=np.float32)
            except (ValueError, TypeError) as error:
                raise DataError(f"rows must be lists of numbers, all of one shape: {error}") from None
        if np.issubdtype(rows.dtype, np.inexact) and not np.isfinite(rows).all():
            raise DataError("rows hold a NaN or an infinity")
        return model.batch(rows)

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            self.close_connection = True
            raise _RefusedError(411, "a body needs a Content-Length")
        if int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            raise _RefusedError(413, f"a body of {length} bytes; at most {MAX_BODY_BYTES} are read")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ConnectionError("the client went away")
        return body

    def _unknown(self) -> Json:
        # A body that nobody reads would be taken for the next request.
        self.close_connection = self.headers.get("Content-Length", "0") != "0"
        raise _RefusedError(404, "there are POST /predict, GET /healthz and GET /model")

    def _send(self, status: int, value: Json) -> None:
        content = json.dumps({"v": 1, **value}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()  # before it counts as answered: a server that stops waits for no more than that
