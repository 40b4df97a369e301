"""Sources `http` and `files`: values that are asked for again and again, each source by a thread of its own."""

from __future__ import annotations

import base64
import contextlib
import logging
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from edgefl.core.errors import ConfigError
from edgefl.device.collect.readings import (
    MAX_TEXT_CHARS,
    Counts,
    Reading,
    SourceThread,
    UnreadReadings,
    Value,
    parse_message_values,
    parse_pointer,
    parse_value,
)
from edgefl.device.collect.settings import FilesSection, HttpSection
from edgefl.system.retries import RateLimitedLog
from edgefl.system.server_access import make_tls_context, read_login

log = logging.getLogger(__name__)

MAX_TEXT_BYTES = 4 * MAX_TEXT_CHARS
_PORTS = {"http": 80, "https": 443}

Fetch = Callable[[], Mapping[str, Value]]
"""Function that returns the values of now, by column; it raises where it cannot."""


class PolledSource(SourceThread):
    """Source that is asked every so many seconds, whatever the last answer was; `start` begins.

    Args:
        name: of the source, for counts and the log.
        columns: that it has values of.
        fetch: returns their values; it may take its time.
        poll_s: seconds from one question to the next.
        counts: questions without an answer, and columns that an answer lacks, are added to it.
        clock: seconds since 1970; it may jump.
        monotonic: seconds; it does not.
    """

    join_timeout_s = 1.0

    def __init__(  # noqa: PLR0913 one keyword for each collaborator
        self,
        name: str,
        columns: Sequence[str],
        fetch: Fetch,
        *,
        poll_s: float,
        counts: Counts,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name)
        self.columns = tuple(columns)
        self._name, self._fetch, self._poll_s, self._counts = name, fetch, poll_s, counts
        self._clock, self._monotonic = clock, monotonic
        self._unread = UnreadReadings(name, counts)
        self._answered = (math.inf, -math.inf)
        self._log = RateLimitedLog(log)

    @property
    def received_since_s(self) -> float:
        """Returns since when each question has had a whole answer, by the clock of now; else infinity."""
        return self._clock() - self._monotonic() + self._answered[0]

    @property
    def received_until_s(self) -> float:
        """Returns when the last question was asked that had a whole answer, by the clock of now."""
        return self._clock() - self._monotonic() + self._answered[1]

    def read(self) -> list[Reading]:
        """Returns what came since the last call."""
        return self._unread.take()

    def poll(self) -> None:
        """Asks once."""
        asked_s = self._monotonic()
        try:
            values = self._fetch()
        except Exception as error:  # noqa: BLE001 the boundary of the thread: the next question may have an answer
            values = {}
            self._counts[f"{self._name}.errors"] += 1
            self._log.warning("failed", "source %s has no answer: %s", self._name, _format_error(error))
        else:
            if missing := [column for column in self.columns if column not in values]:
                self._counts[f"{self._name}.missing"] += len(missing)
                self._log.warning("missing", "source %s has no value of %s", self._name, ", ".join(missing)[:200])
        is_whole = all(column in values for column in self.columns)
        self._answered = (min(self._answered[0], asked_s), asked_s) if is_whole else (math.inf, -math.inf)
        if values:
            self._unread.add(Reading(values=values, time_s=self._clock()))

    def _run(self) -> None:
        while True:
            started_s = time.monotonic()
            self.poll()
            if self._stopping.wait(max(0.0, started_s + self._poll_s - time.monotonic())):
                return


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A question to a server, with the bounds of its answer; `tls` is None for http, `body` None for a GET."""

    host: str
    port: int
    path: str
    headers: Mapping[str, str]
    tls: ssl.SSLContext | None
    timeout_s: float
    max_bytes: int
    body: bytes | None = None

    def send(self) -> bytes:
        """Returns the body of the answer.

        Raises:
            OSError: no answer, or not all of it in time.
            ValueError: it is longer than it may be, or has another status than 200.
            HTTPException: it is no HTTP, or cut.
        """
        end_s = time.monotonic() + self.timeout_s
        with self._connect(end_s) as raw, contextlib.ExitStack() as stack:
            sock = raw
            if self.tls is not None:
                wrapped = self.tls.wrap_socket(
                    raw, server_hostname=self.host, do_handshake_on_connect=False, suppress_ragged_eofs=False
                )
                sock = stack.enter_context(wrapped)
            # A timeout of the socket begins again with each byte; this one is of the whole answer.
            is_late = threading.Event()
            deadline = threading.Timer(max(0.0, end_s - time.monotonic()), _cut_off, (sock, is_late))
            deadline.daemon = True
            deadline.start()
            content = b""
            try:
                content = self._exchange(sock)
            except (OSError, ValueError, HTTPException):
                if not is_late.is_set():
                    raise
            finally:
                deadline.cancel()
            if is_late.is_set():  # also where the end of the connection is that of the body
                raise TimeoutError(f"it takes more than {self.timeout_s:g} s")
            return content

    def _connect(self, end_s: float) -> socket.socket:
        """Returns a connection to the first of the host's addresses that takes one until `end_s`."""
        failure = OSError("the host has no address")
        for *_, (host, *_) in socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM):
            if (left_s := end_s - time.monotonic()) <= 0:
                break
            try:
                sock = socket.create_connection((str(host), self.port), left_s)
            except OSError as error:
                failure = error
                continue
            sock.settimeout(self.timeout_s)
            return sock
        raise failure

    def _exchange(self, sock: socket.socket) -> bytes:
        if isinstance(sock, ssl.SSLSocket):
            sock.do_handshake()
        connection = HTTPConnection(self.host, self.port)
        connection.sock = sock
        method = "GET" if self.body is None else "POST"
        connection.request(method, self.path, self.body, headers=dict(self.headers))
        answer = connection.getresponse()
        if answer.status != HTTPStatus.OK:
            raise ValueError(f"HTTP status {answer.status}")
        content = answer.read(self.max_bytes + 1)
        if len(content) > self.max_bytes:
            raise ValueError(f"it is longer than {self.max_bytes} bytes")
        # Without a length only a JSON object shows where it ends: a number may be cut.
        has_end = answer.length is not None or answer.chunked or content.rstrip().endswith((b"}", b"]"))
        if answer.length or not has_end:
            raise HTTPException("it is cut, or may be")
        return content


def _cut_off(sock: socket.socket, is_late: threading.Event) -> None:
    is_late.set()
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def make_http_fetch(name: str, section: HttpSection, texts: Sequence[str], counts: Counts) -> Fetch:
    """Returns what asks a URL for JSON or a plain value; redirections and proxies are not followed.

    Raises:
        ConfigError: the URL, a pointer, the login or the authority is none.
    """
    request, known_texts = _make_request(name, section), set(texts)
    paths = parse_pointers(name, section.columns)

    def fetch() -> Mapping[str, Value]:
        values, num_refused = parse_message_values(paths, request.send(), known_texts)
        if num_refused:
            counts[f"{name}.refused"] += num_refused
        return values

    return fetch


def _make_request(name: str, section: HttpSection) -> HttpRequest:
    setting = f"sources.{name}.url"
    try:
        url = urlsplit(section.url)
        port = url.port
    except ValueError as error:
        raise ConfigError(f"{setting}: {error}, got {section.url!r:.120}") from None
    if url.scheme not in _PORTS or not url.hostname:
        raise ConfigError(f"{setting} must begin with http:// or https:// and a host, got {section.url!r:.120}")
    if not section.url.isascii() or not section.url.isprintable() or " " in section.url:
        raise ConfigError(f"{setting} must be ASCII without blanks (write %20), got {section.url!r:.120}")
    if url.username is not None:
        raise ConfigError(f"{setting} must hold no login; write it into login_file")
    tls = make_tls_context(f"sources.{name}", section.ca_file) if url.scheme == "https" else None
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    return HttpRequest(
        host=url.hostname,
        port=port or _PORTS[url.scheme],
        path=path,
        headers=_make_headers(section.login_file),
        tls=tls,
        timeout_s=section.timeout_s,
        max_bytes=section.max_answer_bytes,
    )


def make_files_fetch(name: str, section: FilesSection, texts: Sequence[str], counts: Counts) -> Fetch:
    """Returns what reads a value from each file, as the kernel's sensors have them.

    Raises:
        ConfigError: a path is not absolute.
    """
    paths = {column: Path(str(path)) for column, path in section.columns.items()}
    for column, path in paths.items():
        if not path.is_absolute():
            raise ConfigError(f"sources.{name}.columns.{column:.80} must be an absolute path, got {str(path)!r:.120}")

    def fetch() -> Mapping[str, Value]:
        values, failure = dict[str, Value](), None
        for column, path in paths.items():
            try:
                with path.open("rb") as file:
                    content = file.read(MAX_TEXT_BYTES + 1)
                # Of a text that goes on, the value is none rather than its beginning.
                values[column] = parse_value(content.decode(), is_text=column in texts)
            except OSError as error:
                failure = error
            except ValueError:
                counts[f"{name}.refused"] += 1
        if failure is not None and not values:
            raise failure
        return values

    return fetch


def parse_pointers(name: str, columns: Mapping[str, object]) -> list[tuple[str, tuple[str, ...]]]:
    """Returns column and keys of each column's JSON pointer; raises a `ConfigError` where one is none."""
    pointers = []
    for column, pointer in columns.items():
        try:
            pointers.append((column, parse_pointer(str(pointer))))
        except ValueError as error:
            raise ConfigError(f"sources.{name}.columns.{column:.80}: {error}") from None
    return pointers


def _make_headers(login_file: str) -> dict[str, str]:
    """Returns the headers of a question, with a login: of user and password, or of a token alone."""
    headers = {"Connection": "close", "Accept-Encoding": "identity"}
    if login_file:
        user, password = read_login(Path(login_file))
        login = f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}" if password else f"Bearer {user}"
        headers["Authorization"] = login
    return headers


def _format_error(error: Exception) -> str:
    """Returns why there is no answer, without anything that the other side has said."""
    if isinstance(error, HTTPException):
        return "it is no HTTP, or cut"
    if isinstance(error, OSError | ValueError) and not isinstance(error, UnicodeError):
        return str(error)
    return type(error).__name__
