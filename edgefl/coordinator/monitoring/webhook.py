"""Delivers alerts to a webhook, in order, from a thread of its own; tries again until they have arrived.

The URL is a secret with many services: only its host is ever logged.
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
from edgefl.errors import NetworkError
from edgefl.types import Json

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 300.0
MAX_WAITING = 1000
LEAVE_WITHIN_S = 3.0
"""At the end, what waits is tried once more, for so long."""
SIGNATURE_HEADER = "X-Edgefl-Signature"
_PASSING = frozenset({408, 425, 429})


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """Where alerts go; with a secret every body is signed."""

    url: str = field(repr=False)
    secret: str | None = field(default=None, repr=False)

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "?"


class RejectedError(NetworkError):
    """The webhook does not want this message; asking again would change nothing."""


def post(hook: Hook, body: Json, *, timeout_s: float = TIMEOUT_S) -> None:
    """Sends one message.

    Raises:
        RejectedError: an answer that stays what it is, such as 404.
        NetworkError: no answer, or one that may be another next time.
    """
    content = json.dumps(body, ensure_ascii=False).encode()
    headers = {"Content-Type": "application/json", "User-Agent": f"edgefl/{__version__}"}
    if hook.secret is not None:
        headers[SIGNATURE_HEADER] = signature(hook.secret, content)
    request = urllib.request.Request(hook.url, data=content, headers=headers, method="POST")  # noqa: S310 http or https
    try:
        with _opener().open(request, timeout=timeout_s) as answer:
            answer.read(1024)
    except urllib.error.HTTPError as error:
        error.close()
        passing = error.code >= 500 or error.code in _PASSING
        raise (NetworkError if passing else RejectedError)(f"{hook.host} answered {error.code}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise NetworkError(f"{hook.host} cannot be reached: {reason}") from None


def signature(secret: str, content: bytes) -> str:
    """Returns the header's value: `sha256=` and the HMAC of the body in hexadecimal."""
    return "sha256=" + hmac.new(secret.encode(), content, hashlib.sha256).hexdigest()


class WebhookSender:
    """Takes messages without ever waiting; `num_waiting` have not arrived yet."""

    def __init__(self, hook: Hook, *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self._hook, self._first_pause_s = hook, first_pause_s
        self._waiting: deque[Json] = deque()
        self._changed = threading.Condition()
        self._leave_at_s: float | None = None
        self._thread = threading.Thread(target=self._work, name="webhook", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, body: Json) -> None:
        """Queues a message; the oldest goes when too many wait."""
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                self._waiting.popleft()
                log.warning("an alert for %s is dropped: %d wait already", self._hook.host, MAX_WAITING)
            self._waiting.append(body)
            self._changed.notify_all()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def stop(self) -> None:
        """Ends the thread soon; what still waits is tried once."""
        with self._changed:
            self._leave_at_s = time.monotonic() + LEAVE_WITHIN_S
            self._changed.notify_all()
        self._thread.join(LEAVE_WITHIN_S + TIMEOUT_S)

    def _work(self) -> None:
        pause_s = self._first_pause_s
        while (body := self._next()) is not None:
            if self._deliver(body):
                with self._changed:
                    if self._waiting and self._waiting[0] is body:
                        self._waiting.popleft()
                pause_s = self._first_pause_s
            elif self._leave_at_s is None:
                with self._changed:
                    self._changed.wait_for(lambda: self._leave_at_s is not None, pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            else:
                log.warning("%d alerts never reached %s", len(self._waiting), self._hook.host)
                return

    def _next(self) -> Json | None:
        """Returns the message that has waited longest; None when it is time to leave."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._leave_at_s is not None)
            is_late = self._leave_at_s is not None and time.monotonic() > self._leave_at_s
            return self._waiting[0] if self._waiting and not is_late else None

    def _deliver(self, body: Json) -> bool:
        """Returns whether there is nothing more to do for this message."""
        timeout_s = TIMEOUT_S
        if self._leave_at_s is not None:
            timeout_s = max(0.1, self._leave_at_s - time.monotonic())
        try:
            post(self._hook, body, timeout_s=timeout_s)
        except RejectedError as error:
            log.warning("the webhook does not take an alert: %s", error)
        except NetworkError as error:
            log.warning("an alert is tried again: %s", error)
            return False
        except Exception:  # the boundary of the thread: the next alert must still go out
            log.exception("an alert could not be sent")
        return True


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows nobody: a redirected POST would become a GET without its body."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirects)
