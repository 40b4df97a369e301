"""Delivers alerts to a webhook, in order, in a thread of its own; retries until they are delivered.

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
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from edgefl import __version__
from edgefl.core.errors import NetworkError
from edgefl.core.safe_text import escape_values
from edgefl.core.types import Json
from edgefl.system.retries import Backoff

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
INITIAL_BACKOFF_S, MAX_BACKOFF_S = 1.0, 300.0
MAX_QUEUED = 1000
FLUSH_TIMEOUT_S = 3.0
"""How long `stop` tries to deliver queued alerts."""
SIGNATURE_HEADER = "X-Edgefl-Signature"
_TRANSIENT_STATUSES = frozenset({408, 425, 429})


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookConfig:
    """URL of the webhook; with a secret every body is signed."""

    url: str = field(repr=False)
    secret: str | None = field(default=None, repr=False)

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "?"


class WebhookRejectedError(NetworkError):
    """Raised when the webhook permanently rejects a message."""


def send_alert(config: WebhookConfig, body: Json, *, timeout_s: float = TIMEOUT_S) -> None:
    """Sends one message.

    Raises:
        WebhookRejectedError: a permanent error, such as 404.
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
        is_temporary = error.code >= 500 or error.code in _TRANSIENT_STATUSES
        raise (NetworkError if is_temporary else WebhookRejectedError)(
            f"{config.host} answered {error.code}"
        ) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise NetworkError(f"{config.host} cannot be reached: {reason}") from None


def compute_signature(secret: str, content: bytes) -> str:
    """Returns the header's value: `sha256=` and the HMAC of the body in hexadecimal."""
    return "sha256=" + hmac.new(secret.encode(), content, hashlib.sha256).hexdigest()


class WebhookSender:
    """Queues messages without blocking; `num_queued` are not delivered yet."""

    def __init__(self, config: WebhookConfig, *, initial_backoff_s: float = INITIAL_BACKOFF_S) -> None:
        self._config, self._backoff = config, Backoff(initial_s=initial_backoff_s, max_s=MAX_BACKOFF_S)
        self._queue: deque[Json] = deque()
        self._changed = threading.Condition()
        self._stop_deadline_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, body: Json) -> None:
        """Queues a message; drops the oldest beyond `MAX_QUEUED`."""
        with self._changed:
            if len(self._queue) >= MAX_QUEUED:
                self._queue.popleft()
                log.warning("an alert for %s is dropped: %d wait already", self._config.host, MAX_QUEUED)
            self._queue.append(body)
            self._changed.notify_all()

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def stop(self) -> None:
        """Ends the thread; queued messages are tried once."""
        with self._changed:
            self._stop_deadline_s = time.monotonic() + FLUSH_TIMEOUT_S
            self._changed.notify_all()
        self._thread.join(FLUSH_TIMEOUT_S + TIMEOUT_S)

    def _run(self) -> None:
        while (body := self._wait_next()) is not None:
            if self._deliver(body):
                with self._changed:
                    if self._queue and self._queue[0] is body:
                        self._queue.popleft()
                self._backoff.reset()
            elif self._stop_deadline_s is None:
                with self._changed:
                    self._changed.wait_for(lambda: self._stop_deadline_s is not None, self._backoff.next_s())
            else:
                log.warning("%d alerts never reached %s", len(self._queue), self._config.host)
                return

    def _wait_next(self) -> Json | None:
        """Returns the oldest message; None when the thread has to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stop_deadline_s is not None)
            is_late = self._stop_deadline_s is not None and time.monotonic() > self._stop_deadline_s
            return self._queue[0] if self._queue and not is_late else None

    def _deliver(self, body: Json) -> bool:
        """Sends a message; returns whether it is done, delivered or rejected."""
        timeout_s = TIMEOUT_S
        if self._stop_deadline_s is not None:
            timeout_s = max(0.1, self._stop_deadline_s - time.monotonic())
        try:
            send_alert(self._config, body, timeout_s=timeout_s)
        except WebhookRejectedError as error:
            log.warning("the webhook does not take an alert: %s", error)
        except NetworkError as error:
            log.warning("an alert is tried again: %s", error)
            return False
        except Exception:  # the boundary of the thread: the next alert must still be sent
            log.exception("an alert could not be sent")
        return True


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: a redirected POST would become a GET without its body."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _make_opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirects)
