"""Sources `http` and `files`: values that are asked for again and again, each source by a thread of its own."""

from __future__ import annotations

import base64
import logging
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

from edgefl.core.errors import ConfigError
from edgefl.device.collect.mqtt_source import parse_message_values, read_login
from edgefl.device.collect.readings import MAX_TEXT_CHARS, Counts, Reading, Value, parse_pointer, parse_value
from edgefl.device.collect.settings import FilesSection, HttpSection
from edgefl.system.retries import RateLimitedLog

log = logging.getLogger(__name__)

MAX_UNREAD = 10_000
CHUNK_BYTES = 8192
JOIN_TIMEOUT_S = 1.0
SCHEMES = ("http://", "https://")

Fetch = Callable[[], Mapping[str, Value]]
"""Function that returns the values of now; what fails raises an `OSError` or a `ValueError`."""


class PolledSource:
    """Source that is asked every so many seconds, whatever the last answer was; `start` begins.

    Args:
        name: of the source, for counts and the log.
        columns: that it has values of.
        fetch: returns their values; it may take its time.
        poll_s: seconds from one question to the next.
        counts: questions without an answer are added to it.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        name: str,
        columns: Sequence[str],
        fetch: Fetch,
        *,
        poll_s: float,
        counts: Counts,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.columns = tuple(columns)
        self._name, self._fetch, self._poll_s, self._counts, self._clock = name, fetch, poll_s, counts, clock
        self._unread: deque[Reading] = deque(maxlen=MAX_UNREAD)
        self._stopping, self._log = threading.Event(), RateLimitedLog(log)
        self._thread = threading.Thread(target=self._run, name=f"source {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def read(self) -> list[Reading]:
        """Returns what came since the last call."""
        return [self._unread.popleft() for _ in range(len(self._unread))]

    def close(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)  # one that waits for an answer ends with the process

    def poll(self) -> None:
        """Asks once."""
        try:
            values = self._fetch()
        except (OSError, ValueError, HTTPException) as error:
            self._counts[f"{self._name}.errors"] += 1
            self._log.warning("failed", "source %s has no answer: %s", self._name, _format_error(error))
            return
        if values:
            self._unread.append(Reading(values=values, time_s=self._clock()))

    def _run(self) -> None:
        while True:
            started_s = time.monotonic()
            self.poll()
            if self._stopping.wait(max(0.0, started_s + self._poll_s - time.monotonic())):
                return


def make_http_fetch(name: str, section: HttpSection, texts: Sequence[str], counts: Counts) -> Fetch:
    """Returns what asks a URL for JSON or a plain value; redirections and proxies are not followed.

    Raises:
        ConfigError: the URL, a pointer, the login or the authority is none.
    """
    if not section.url.startswith(SCHEMES):
        raise ConfigError(f"sources.{name}.url must begin with http:// or https://, got {section.url!r:.120}")
    paths, known_texts = _parse_pointers(name, section.columns), set(texts)
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        urllib.request.HTTPSHandler(context=_make_context(name, section.ca_file)),
        _NoRedirects,
    )
    try:
        request = urllib.request.Request(section.url, headers=_make_headers(section.login_file))  # noqa: S310 checked
    except ValueError as error:
        raise ConfigError(f"sources.{name}.url: {error}") from None

    def fetch() -> Mapping[str, Value]:
        deadline_s, content = time.monotonic() + section.timeout_s, b""
        with opener.open(request, timeout=section.timeout_s) as answer:
            while chunk := answer.read1(CHUNK_BYTES):
                content += chunk
                if len(content) > section.max_answer_bytes:
                    raise ValueError(f"it is longer than {section.max_answer_bytes} bytes")
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"it takes more than {section.timeout_s:g} s")
        values, num_refused = parse_message_values(paths, content, known_texts)
        if num_refused:
            counts[f"{name}.refused"] += num_refused
        return values

    return fetch


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
                    # Of a text that goes on, the value is none rather than its beginning.
                    values[column] = parse_value(file.read(MAX_TEXT_CHARS + 1).decode(), is_text=column in texts)
            except OSError as error:
                failure = error
            except ValueError:
                counts[f"{name}.refused"] += 1
        if failure is not None and not values:
            raise failure
        return values

    return fetch


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Takes a redirection as an error: it would get the login, too."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _parse_pointers(name: str, columns: Mapping[str, object]) -> list[tuple[str, tuple[str, ...]]]:
    pointers = []
    for column, pointer in columns.items():
        try:
            pointers.append((column, parse_pointer(str(pointer))))
        except ValueError as error:
            raise ConfigError(f"sources.{name}.columns.{column:.80}: {error}") from None
    return pointers


def _make_context(name: str, ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"sources.{name}.ca_file {ca_file} cannot be used: {error}") from None


def _make_headers(login_file: str) -> dict[str, str]:
    """Returns the header that a login needs: of user and password, or of a token alone."""
    if not login_file:
        return {}
    user, password = read_login(Path(login_file))
    if not password:
        return {"Authorization": f"Bearer {user}"}
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def _format_error(error: Exception) -> str:
    """Returns why there is no answer, without anything that the other side has said."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP status {error.code}"
    if isinstance(error, HTTPException):
        return "it is no HTTP"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error)
