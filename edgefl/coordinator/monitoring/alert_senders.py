"""Delivery of alerts to a webhook, and the queue with a thread that every receiver of alerts has.

The URL is a secret for many services: only its host is ever logged.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from edgefl import __version__
from edgefl.core.errors import NetworkError
from edgefl.core.safe_text import escape_values
from edgefl.core.types import Json
from edgefl.system.retries import Backoff

log = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_S = 10.0
INITIAL_BACKOFF_S, MAX_BACKOFF_S = 1.0, 300.0
MAX_QUEUED = 1000
FLUSH_TIMEOUT_S = 3.0
"""How long `stop` tries to deliver queued alerts."""
SIGNATURE_HEADER = "X-Edgefl-Signature"
TRANSIENT_STATUSES = frozenset({408, 425, 429})


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookConfig:
    """URL of the webhook; with a secret every body is signed."""

    url: str = field(repr=False)
    secret: str | None = field(default=None, repr=False)

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "?"


class AlertRejectedError(NetworkError):
    """Raised when a receiver permanently rejects a message."""


def send_alert(config: WebhookConfig, body: Json, timeout_s: float = TIMEOUT_S) -> None:
    """Sends one message.

    Raises:
        AlertRejectedError: a permanent error, such as 404.
        NetworkError: no answer, or a temporary error.
    """
    # Chat services show the texts as they come: a board's name or reason must not reorder or forge a line there.
    content = json.dumps(escape_values(body), ensure_ascii=False).encode()
    headers = {"Content-Type": "application/json", "User-Agent": f"edgefl/{__version__}"}
    if config.secret is not None:
        headers[SIGNATURE_HEADER] = compute_signature(config.secret, content)
    request = urllib.request.Request(config.url, data=content, headers=headers, method="POST")  # noqa: S310 http or https
    try:
        with _make_opener().open(request, timeout=timeout_s) as response:
            response.read(1024)
    except urllib.error.HTTPError as error:
        error.close()
        is_temporary = error.code >= 500 or error.code in TRANSIENT_STATUSES
        raise (NetworkError if is_temporary else AlertRejectedError)(f"{config.host} answered {error.code}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise NetworkError(f"{config.host} cannot be reached: {reason}") from None


def compute_signature(secret: str, content: bytes) -> str:
    """Returns the header's value: `sha256=` and the HMAC of the body in hexadecimal."""
    return "sha256=" + hmac.new(secret.encode(), content, hashlib.sha256).hexdigest()


class QueuedSender(Generic[T]):
    """Delivers messages in order, in a thread of its own, and retries; `num_queued` are not delivered yet.

    Args:
        name: of the receiver, for the log; no secret.
        deliver: sends one message within so many seconds; raises `AlertRejectedError` where another try is of no
            use, `NetworkError` where it is.
        initial_backoff_s: pause before the second try.
    """

    def __init__(
        self, name: str, deliver: Callable[[T, float], None], *, initial_backoff_s: float = INITIAL_BACKOFF_S
    ) -> None:
        self._name, self._deliver = name, deliver
        self._backoff = Backoff(initial_s=initial_backoff_s, max_s=MAX_BACKOFF_S)
        self._queue: deque[T] = deque()
        self._num_dropped, self._is_failing = 0, False
        self._changed = threading.Condition()
        self._stop_deadline_s: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"alerts to {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: T) -> None:
        """Queues a message; drops the oldest beyond `MAX_QUEUED`."""
        with self._changed:
            if len(self._queue) >= MAX_QUEUED:
                self._queue.popleft()
                self._num_dropped += 1
                if self._num_dropped == 1:
                    log.warning("alerts for %s are dropped: %d wait already", self._name, MAX_QUEUED)
            self._queue.append(message)
            self._changed.notify_all()

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def request_stop(self) -> None:
        """Lets the thread end; queued messages are tried once."""
        with self._changed:
            self._stop_deadline_s = time.monotonic() + FLUSH_TIMEOUT_S
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends the thread; queued messages are tried once."""
        self.request_stop()
        self._thread.join(FLUSH_TIMEOUT_S + TIMEOUT_S)

    def _run(self) -> None:
        while (message := self._wait_next()) is not None:
            if self._try(message):
                with self._changed:
                    if self._queue and self._queue[0] is message:
                        self._queue.popleft()
                self._backoff.reset()
            elif self._stop_deadline_s is None:
                with self._changed:
                    self._changed.wait_for(lambda: self._stop_deadline_s is not None, self._backoff.next_s())
            else:
                break
        if self._queue:
            log.warning("%d alerts never reached %s", len(self._queue), self._name)

    def _wait_next(self) -> T | None:
        """Returns the oldest message; None when the thread has to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stop_deadline_s is not None)
            is_late = self._stop_deadline_s is not None and time.monotonic() > self._stop_deadline_s
            return self._queue[0] if self._queue and not is_late else None

    def _try(self, message: T) -> bool:
        """Sends a message; returns whether it is done, delivered or rejected."""
        timeout_s = TIMEOUT_S
        if self._stop_deadline_s is not None:
            timeout_s = max(0.1, self._stop_deadline_s - time.monotonic())
        try:
            self._deliver(message, timeout_s)
        except AlertRejectedError as error:
            self._record_failure("an alert is not taken: %s", error)
        except NetworkError as error:
            self._record_failure("an alert is tried again: %s", error)
            return False
        except Exception:  # the boundary of the thread: the next alert must still be sent
            log.exception("an alert could not be sent")
        else:
            if self._is_failing:
                log.info("%s takes alerts again; dropped meanwhile: %d", self._name, self._num_dropped)
            self._is_failing, self._num_dropped = False, 0
        return True

    def _record_failure(self, text: str, error: NetworkError) -> None:
        """Logs the first failure since a message was taken, so that a receiver that is away fills no log."""
        log.log(logging.DEBUG if self._is_failing else logging.WARNING, text, error)
        self._is_failing = True


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: a redirected POST would become a GET without its body."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _make_opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirects)
