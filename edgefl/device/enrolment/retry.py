"""Unattended enrolment: retries until success or a permanent error."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from numpy.random import Generator

from edgefl.core.errors import (
    JoinError,
    NetworkError,
    StoreError,
    TokenExpiredError,
    TokenInvalidError,
    TokenUsedError,
    UsageError,
    VersionError,
)
from edgefl.core.protocol import JoinToken
from edgefl.core.types import derive_rng
from edgefl.device.enrolment.enroll import EnrolmentOptions, enroll
from edgefl.device.state_dir import DeviceStateDir
from edgefl.system.retries import Backoff, RateLimitedLog

log = logging.getLogger(__name__)

INITIAL_WAIT_S = 1.0
MAX_WAIT_S = 60.0
TIME_SYNC_S = 30.0
"""Enrolment does not need the date: the wait only avoids first log lines and events dated decades back."""
TIMESYNC_DIR = Path("/run/systemd/timesync")
PERMANENT_ERRORS = (TokenExpiredError, TokenInvalidError, TokenUsedError)
"""Errors that no retry can fix: the board needs another token."""


def _create_rng() -> Generator:
    return derive_rng("join", secrets.randbits(64))


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Clock, sleep and jitter of enrolment retries; replaceable in tests.

    The jitter spreads boards that boot together after a power cut.
    """

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    rng: Generator | None = field(default_factory=_create_rng)


def enroll_with_retry(
    token: JoinToken, options: EnrolmentOptions, *, root: Path, policy: RetryPolicy | None = None
) -> DeviceStateDir:
    """Returns the state of the device after enrolment; idempotent.

    Network failures, lost replies, version mismatches, taken names and a wrong CA are retried: each can be fixed
    elsewhere, and nothing was sent to another CA.

    Raises:
        UsageError: the token has no address.
        TokenInvalidError, TokenExpiredError, TokenUsedError: the token is not valid.
        JoinError: the request is rejected, or `root` belongs to another device.
        StoreError: `root` cannot be written.
    """
    if not token.addresses:
        raise UsageError(
            "no address of the coordinator is known; give one: edgefl device join HOST:PORT --token-file FILE"
        )
    policy = policy or RetryPolicy()
    backoff = Backoff(initial_s=INITIAL_WAIT_S, max_s=MAX_WAIT_S, rng=policy.rng)
    rate_limited_log = RateLimitedLog(log, clock=policy.clock)
    while True:
        try:
            return enroll(token, options, root=root)
        except (NetworkError, VersionError, JoinError) as error:
            if isinstance(error, PERMANENT_ERRORS) or type(error) is JoinError:
                raise
            rate_limited_log.warning(str(error), "not joined yet: %s; trying again until it works", error)
        policy.sleep(backoff.next_s())
        # Another address first: a wrong CA at the first one ends a search.
        token = replace(token, addresses=(*token.addresses[1:], token.addresses[0]))


def wait_for_clock(policy: RetryPolicy, *, timesync_dir: Path = TIMESYNC_DIR) -> bool:
    """Returns whether the clock is set; waits briefly for systemd-timesyncd where it runs."""
    if not timesync_dir.is_dir():
        return False
    until_s = policy.clock() + TIME_SYNC_S
    while not (timesync_dir / "synchronized").exists():
        if policy.clock() >= until_s:
            log.warning("the clock is not set after %.0f s; joining all the same", TIME_SYNC_S)
            return False
        policy.sleep(1.0)
    return True


def delete_secret_file(path: Path) -> None:
    """Overwrites and removes a file that holds a token; a missing one is ignored.

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
