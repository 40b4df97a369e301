"""HTTP server for the deployed model: predictions, health, and model information.

It watches the state of the model store, and switches models between two requests: a started request keeps its model,
none is dropped. The standard library is enough: three routes need no web framework.

`run_confined` replaces this process by one without the device's key, files and right to connect: it keeps the open
port, and costs neither a second process nor a message for each request.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import sys
import tempfile
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseServer
from typing import Any, NoReturn

import numpy as np

from edgefl import __version__
from edgefl.core.errors import BundleError, DataError, EdgeflError, NetworkError, PortInUseError
from edgefl.core.safe_parsing import parse_json
from edgefl.core.safe_text import LOG_FORMAT, SafeFormatter, escape_text
from edgefl.core.types import Array, Json
from edgefl.device.hardware.requirements import make_confinement
from edgefl.device.inference.deployments import DeployedModel, ModelStore
from edgefl.device.inference.onnx_model import OnnxModel, convert_texts, parse_npy, prepare_features
from edgefl.device.inference.table_rows import parse_lines, read_unlabelled, write_rows
from edgefl.device.updates.slots import load_update_config
from edgefl.system.atomic_files import make_private_directory
from edgefl.system.confinement import make_command, make_environment
from edgefl.system.processes import on_stop_signal
from edgefl.system.row_labels import MEDIA_TYPES
from edgefl.tasks.configured.options import ConfiguredTask

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_CONCURRENT_REQUESTS = 16
"""Maximum concurrent requests; more get 503, since a swapping board would answer none."""
IDLE_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.5
DRAIN_TIMEOUT_S = 5.0
BACKLOG = 64
CSV_TYPE = "text/csv"
SETUP_VARIABLE = "EDGEFL_SERVE"
MODULE = "edgefl.device.inference.server"


class ServedModel:
    """Model being served: the deployed one, or a fixed file."""

    def __init__(self, *, store: ModelStore | None = None, file: Path | None = None, threads: int = 1) -> None:
        self._store, self._threads = store, threads
        self._state_stamp: object = None
        self._current: tuple[OnnxModel, DeployedModel | None] | None = None
        if file is not None:
            self._current = OnnxModel(file, threads=threads), None
        self.refresh()

    @property
    def current(self) -> tuple[OnnxModel, DeployedModel | None] | None:
        """Returns the model and its deployment; None while nothing is deployed."""
        return self._current

    def refresh(self) -> None:
        """Loads a newly deployed model; the former one stays if that fails."""
        if self._store is None or (stamp := self._read_state_stamp(self._store)) == self._state_stamp:
            return
        deployed = self._store.load().current
        former = self._current[1] if self._current else None
        if deployed is None:
            self._current = None
        elif former is None or former.sha256 != deployed.sha256:
            try:
                self._current = OnnxModel(self._store.get_permitted_path(deployed), threads=self._threads), deployed
                log.info("serves model %s of deployment %s", deployed.model[:12], deployed.deployment)
            except BundleError as error:
                log.warning(
                    "model %s of deployment %s is not run: %s", deployed.model[:12], deployed.deployment, error
                )
            except EdgeflError as error:
                log.warning("cannot take over a new model: %s", error)
                return  # the old stamp stays, so that it is retried
        self._state_stamp = stamp

    @staticmethod
    def _read_state_stamp(store: ModelStore) -> object:
        try:
            status = store.state_path.stat()
        except OSError:
            return "none"
        return status.st_ino, status.st_mtime_ns, status.st_size


class InferenceServer:
    """HTTP inference server, active from `start` to `stop`.

    Args:
        served_model: the model.
        listener: of `open_listener`.
    """

    def __init__(self, served_model: ServedModel, listener: socket.socket) -> None:
        self.served_model = served_model
        self._stopping = threading.Event()
        self._server = _InferenceHttpServer(listener, served_model)
        self._threads = [
            threading.Thread(target=self._server.serve_forever, name="http", args=(0.1,), daemon=True),
            threading.Thread(target=self._poll_deployments, name="watch-model", daemon=True),
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
        """Accepts no more requests and finishes started ones."""
        self._stopping.set()
        self._server.shutdown()
        self._server.socket.close()
        self._server.wait_idle(DRAIN_TIMEOUT_S)

    def _poll_deployments(self) -> None:
        while not self._stopping.wait(POLL_INTERVAL_S):
            try:
                self.served_model.refresh()
            except Exception:  # the boundary of the thread: the served model stays
                log.exception("looking for a new model failed")


def open_listener(host: str, port: int) -> socket.socket:
    """Returns a socket that listens there; port 0 selects a free one.

    Raises:
        PortInUseError: the port is taken.
        NetworkError: the address cannot be listened on.
    """
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(f"port {port} is in use; choose another --port") from None
        raise NetworkError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


def run_server(served_model: ServedModel, listener: socket.socket) -> None:
    """Serves until a stop signal."""
    server = InferenceServer(served_model, listener)
    with on_stop_signal(server.stop):
        server.start()
        sys.stdout.write(f"serving on http://{listener.getsockname()[0]}:{server.port}\n")
        sys.stdout.flush()
        if served_model.current is None:
            log.warning("no model is deployed yet; requests get 503 until one is")
        server.wait()


def run_confined(
    listener: socket.socket, state_dir: Path, signers: Path, file: Path | None, threads: int
) -> NoReturn:
    """Replaces this process by one that serves without the device's key.

    Args:
        listener: its port.
        state_dir: of the device; nothing of it but the models is readable.
        signers: folder of the keys that this board trusts.
        file: served in place of the deployed model.
        threads: of the model.
    """
    config = load_update_config(signers)
    readable = [str(signers.absolute())] + ([str(config.slots.work_dir)] if config.slots is not None else [])
    if file is not None:
        readable.append(str(file.absolute()))
        state_dir = state_dir if state_dir.is_dir() else Path(tempfile.mkdtemp(prefix="edgefl-serve-"))
    else:
        make_private_directory(ModelStore(state_dir, config).folder)
        readable.append(str(ModelStore(state_dir.absolute(), config).folder))
    confinement = replace(make_confinement(state_dir.absolute(), "serve", readable, "cpu"), has_connections=True)
    setup: Json = {
        "listener": listener.fileno(), "state_dir": str(state_dir.absolute()), "signers": str(signers.absolute()),
        "file": None if file is None else str(file.absolute()), "threads": threads,
        "level": logging.getLogger().getEffectiveLevel(),
    }  # fmt: skip
    os.set_inheritable(listener.fileno(), True)
    command = make_command(MODULE, confinement)
    os.execve(command[0], command, {**make_environment(confinement), SETUP_VARIABLE: json.dumps(setup)})  # noqa: S606 no shell is wanted


def main() -> None:
    """Serves as `run_confined` says, in the process that it made."""
    setup = json.loads(os.environ.pop(SETUP_VARIABLE))
    handler = logging.StreamHandler()
    handler.setFormatter(SafeFormatter(LOG_FORMAT))
    logging.basicConfig(level=setup["level"], handlers=[handler])
    listener = socket.socket(fileno=setup["listener"])
    try:
        store = ModelStore(Path(setup["state_dir"]), load_update_config(Path(setup["signers"])))
        file = None if setup["file"] is None else Path(setup["file"])
        run_server(ServedModel(store=None if file else store, file=file, threads=setup["threads"]), listener)
    except EdgeflError as error:
        sys.stderr.write(f"edgefl: {escape_text(' '.join(str(error).split()))}\n")
        sys.exit(error.exit_code)


class _InferenceHttpServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, served_model: ServedModel) -> None:
        self.served_model = served_model
        self.request_slots = threading.BoundedSemaphore(MAX_CONCURRENT_REQUESTS)
        self.num_active_requests, self._changed = 0, threading.Condition()
        # Not `HTTPServer.__init__`: it makes a socket of its own, and asks the name server who it is.
        BaseServer.__init__(self, listener.getsockname(), _RequestHandler)
        self.socket = listener

    def add_active_requests(self, change: int) -> None:
        """Counts a started (1) or answered (-1) request."""
        with self._changed:
            self.num_active_requests += change
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> None:
        """Returns when no request is under way, or after the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: not self.num_active_requests, timeout_s)

    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any) -> None:  # noqa: ARG002 the library's interface
        log.debug("a connection from %s broke", client_address)


def _read_csv_rows(body: bytes, model: OnnxModel) -> Array:
    """Returns the inputs of rows with names, as the model's task makes them of a shard."""
    task = model.configured_task
    if task is None or not task.example_rows:
        raise DataError(f"the model's task {model.task or 'unknown'!r} makes no examples of rows with names")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        write_rows(path, parse_lines(body), task)
        return prepare_features(model, read_unlabelled(task, path))


def _list_suffixes(task: ConfiguredTask | None) -> tuple[str, ...]:
    """Returns those of the files of which a task makes an example each."""
    return () if task is None else tuple(suffix for suffix in task.input_suffixes if suffix in MEDIA_TYPES)


def _read_file(body: bytes, suffix: str, model: OnnxModel) -> Array:
    """Returns the input of a picture or sound, as the model's task makes it of a shard's file."""
    task = model.configured_task
    if task is None or suffix not in _list_suffixes(task):
        raise DataError(f"the model's task {model.task or 'unknown'!r} reads no {suffix} files")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"example{suffix}"
        path.write_bytes(body)
        return prepare_features(model, read_unlabelled(task, path))


class _HttpError(Exception):
    """HTTP error response with status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _RequestHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = f"edgefl/{__version__}"
    timeout = IDLE_TIMEOUT_S
    # Headers and body in one packet: two of them would wait 40 ms for each other (Nagle and delayed ACKs).
    wbufsize = -1
    disable_nagle_algorithm = True
    server: _InferenceHttpServer

    def do_GET(self) -> None:
        self._dispatch({"/healthz": self._get_health, "/model": self._get_model})

    def do_POST(self) -> None:
        self._dispatch({"/predict": self._predict})

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 the library's name
        log.debug(format, *args)

    def _dispatch(self, routes: dict[str, Any]) -> None:
        self.server.add_active_requests(1)
        try:
            if not self.server.request_slots.acquire(blocking=False):
                self.close_connection = True
                self._send_json(503, {"error": f"more than {MAX_CONCURRENT_REQUESTS} requests at a time"})
                return
            try:
                self._route(routes)
            finally:
                self.server.request_slots.release()
        finally:
            self.server.add_active_requests(-1)

    def _route(self, routes: dict[str, Any]) -> None:
        handler = routes.get(self.path.partition("?")[0], self._reject_unknown_route)
        try:
            self._send_json(200, handler())
        except _HttpError as error:
            self._send_json(error.status, {"error": str(error)})
        except EdgeflError as error:
            self._send_json(400, {"error": str(error)})
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception:  # the boundary of one request: the next one must still be answered
            log.exception("a request failed")
            self.close_connection = True
            self._send_json(500, {"error": "internal error; see the log"})

    def _get_health(self) -> Json:
        return {"status": "ok", "version": __version__, "has_model": self.server.served_model.current is not None}

    def _get_model(self) -> Json:
        model, deployed = self._require_model()
        try:
            task = model.configured_task
        except EdgeflError:
            task = None  # its module may be missing here: it serves rows of numbers all the same
        return {
            "model": deployed.model if deployed else model.model,
            "task": model.task,
            "classes": list(model.classes),
            "input_shape": list(model.input_shape),
            "rows": task.example_rows or None if task is not None else None,
            "files": list(_list_suffixes(task)) or None,
            "deployment": deployed.deployment if deployed else None,
            "accuracy": deployed.accuracy if deployed else None,
        }

    def _predict(self) -> Json:
        body = self._read_body()
        model, deployed = self._require_model()
        predictions = model.predict(self._read_inputs(body, model))
        model_ids = (deployed.model, deployed.deployment) if deployed else (model.model, None)
        return {
            "model": model_ids[0],
            "deployment": model_ids[1],
            "rows": predictions,
        }

    def _require_model(self) -> tuple[OnnxModel, DeployedModel | None]:
        current = self.server.served_model.current
        if current is None:
            raise _HttpError(503, "no model is deployed yet; on the coordinator: edgefl model deploy MODEL")
        return current

    def _read_inputs(self, body: bytes, model: OnnxModel) -> Array:
        media_type = self.headers.get_content_type()
        if media_type == CSV_TYPE:
            return _read_csv_rows(body, model)
        suffix = next((suffix for suffix, one in MEDIA_TYPES.items() if one == media_type), None)
        return self._parse_rows(body, model) if suffix is None else _read_file(body, suffix, model)

    def _parse_rows(self, body: bytes, model: OnnxModel) -> Array:
        if body[:6] == b"\x93NUMPY":
            rows = parse_npy(body, "the body")
        else:
            try:
                value = parse_json(body)
            except (ValueError, RecursionError) as error:
                raise DataError(f"the body must be JSON rows or a .npy array: {error}") from None
            if isinstance(value, dict) and isinstance(value.get("texts"), list):
                return convert_texts(model, value["texts"])
            value = value.get("rows") if isinstance(value, dict) else value
            if not isinstance(value, list) or not value:
                raise DataError('the body must be {"rows": [[…], …]} with at least one row')
            try:
                with np.errstate(over="ignore"):  # overflows become infinities, which are rejected below
                    rows = np.array(value, dtype=np.float32)
            except (ValueError, TypeError) as error:
                raise DataError(f"rows must be lists of numbers, all of one shape: {error}") from None
        if np.issubdtype(rows.dtype, np.inexact) and not np.isfinite(rows).all():
            raise DataError("rows hold a NaN or an infinity")
        return model.to_batch(rows)

    def _read_body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            self.close_connection = True
            raise _HttpError(411, "a body needs a Content-Length")
        if int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            raise _HttpError(413, f"a body of {length} bytes; at most {MAX_BODY_BYTES} are read")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ConnectionError("the client went away")
        return body

    def _reject_unknown_route(self) -> Json:
        # An unread body would be parsed as the next request.
        self.close_connection = self.headers.get("Content-Length", "0") != "0"
        raise _HttpError(404, "there are POST /predict, GET /healthz and GET /model")

    def _send_json(self, status: int, value: Json) -> None:
        content = json.dumps({"v": 1, **value}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()  # before it counts as answered: a server that stops waits for no more than that


if __name__ == "__main__":
    main()
