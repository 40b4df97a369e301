"""A join without anybody beside the board: it goes on until it succeeds, or until trying again cannot help."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgefl.device.joining.enrolment import JoinWishes, join
from edgefl.device.state import DeviceState
from edgefl.errors import (
    JoinError,
    NetworkError,
    StoreError,
    TokenExpiredError,
    TokenInvalidError,
    TokenUsedError,
    UsageError,
    VersionError,
)
from edgefl.protocol import JoinToken

log = logging.getLogger(__name__)

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
SAY_AGAIN_S = 60.0
TIME_SYNC_S = 30.0
"""Joins do not need the date: the wait only keeps the first log lines and events from lying decades back."""
TIMESYNC = Path("/run/systemd/timesync")
FINAL = (TokenExpiredError, TokenInvalidError, TokenUsedError)
"""What no waiting mends: the board needs another token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """The clock of a patient join, so that tests need not wait."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = lambda: secrets.randbelow(1000) / 1000

    def wait_s(self, attempt: int) -> float:
        """Returns how long to wait after a failed attempt (from 0): doubling up to a minute, a half of it by chance.

        Boards that came back together after a power cut do not come to the coordinator together.
        """
        longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(attempt, 30))
        return longest * (0.5 + 0.5 * self.jitter())


def join_patiently(
    token: JoinToken, wishes: JoinWishes, *, root: Path, patience: Patience | None = None
) -> DeviceState:
    """Returns the state of the device after it joined; again, if it had joined already.

    A silent network, a lost answer, a coordinator of another version, a name that is still taken, and another CA are
    waited out: each can be mended elsewhere, and nothing was sent to another CA.

    Raises:
        UsageError: the token has no address, and none is given.
        TokenInvalidError, TokenExpiredError, TokenUsedError: this token lets nobody in.
        JoinError: what the board asks for is refused, or `root` belongs to another device.
        StoreError: `root` cannot be written.
    """
    if not token.addresses:
        raise UsageError("no address of the coordinator is known; give one: edgefl device join HOST:PORT --token T")
    patience, voice, attempt = patience or Patience(), _Voice(), 0
    while True:
        try:
            return join(_turned(token, attempt), wishes, root=root)
        except (NetworkError, VersionError, JoinError) as error:
            if isinstance(error, FINAL) or type(error) is JoinError:
                raise
            wait_s = patience.wait_s(attempt)
            voice.say(f"not joined yet: {error}; trying again until it works", now_s=patience.clock())
        patience.sleep(wait_s)
        attempt += 1


def wait_for_time(patience: Patience, *, timesync: Path = TIMESYNC) -> bool:
    """Returns whether the clock is set; waits for systemd-timesyncd where it runs, and not for long."""
    if not timesync.is_dir():
        return False
    until_s = patience.clock() + TIME_SYNC_S
    while not (timesync / "synchronized").exists():
        if patience.clock() >= until_s:
            log.warning("the clock is not set after %.0f s; joining all the same", TIME_SYNC_S)
            return False
        patience.sleep(1.0)
    return True


def destroy(path: Path) -> None:
    """Overwrites a file that holds a token and removes it; one that is gone already is fine.

    Raises:
        StoreError: it cannot be removed.
    """
    try:
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
            file.flush()
            os.fsync(file.fileno())
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"{path} holds a token and cannot be removed: {error.strerror or error}") from None


@dataclass(slots=True)
class _Voice:
    """Says what is new at once, and what stays the same once a minute."""

    _last: str = ""
    _said_s: float = field(default=float("-inf"))

    def say(self, text: str, *, now_s: float) -> None:
        if text != self._last or now_s >= self._said_s + SAY_AGAIN_S:
            log.warning("%s", text)
            self._last, self._said_s = text, now_s


def _turned(token: JoinToken, attempt: int) -> JoinToken:
    """Returns the token with another address first: a stranger's CA at the first one ends a search."""
    first = attempt % len(token.addresses) if token.addresses else 0
    return replace(token, addresses=(*token.addresses[first:], *token.addresses[:first]))
