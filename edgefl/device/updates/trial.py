"""Trial of a new version: its agent must reach coordinator and broker, and stay up.

An agent that never starts, starts anew again and again, or cannot reach a coordinator or a broker that the version
before does reach has failed: it needs the first for its work, and the second to be notified of a fixed release. Where
neither version reaches the coordinator, the network is down: then the wait is repeated, for an hour at most. After
that the board is rolled back as well: an unproven version is not kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.utils import canonicalize_version

from edgefl.core.errors import BundleError
from edgefl.core.safe_parsing import parse_json
from edgefl.device.updates.build import SubprocessRunner
from edgefl.device.updates.protocol import AgentHealth, read_health
from edgefl.device.updates.slots import Slots
from edgefl.system.atomic_files import is_locked

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTimeouts:
    """Timeouts of a trial.

    `health_s` until the agent has reached the coordinator, else the updater checks whether the former version can;
    `settle_s` it must stay up then; `away_s` the network may be down for both.
    """

    health_s: float = 300.0
    settle_s: float = 10.0
    away_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedHealth:
    """Health that the agent must report."""

    token: str
    slot: str
    previous_slot: str
    version: str
    packs: Mapping[str, str] = field(default_factory=dict)


def wait_until_healthy(
    expected: ExpectedHealth, slots: Slots, state_dir: Path, runner: SubprocessRunner, timeouts: TrialTimeouts
) -> None:
    """Returns when the new version is healthy.

    Raises:
        BundleError: it is not.
    """
    end_s = time.monotonic() + timeouts.away_s
    while True:
        until_s = min(time.monotonic() + timeouts.health_s, end_s)
        health = _poll_health(expected, state_dir, until_s, lambda health: health.connected)
        if health is not None and health.connected:
            _check_stays_up(health, state_dir, timeouts.settle_s)
            if health.linked is not None and can_reach(slots, expected.previous_slot, state_dir, runner, "broker"):
                _check_reaches_broker(expected, state_dir, until_s, timeouts)
            return
        if health is None:
            raise BundleError(f"its agent did not come up within {timeouts.health_s:g} s")
        if can_reach(slots, expected.previous_slot, state_dir, runner, "coordinator"):
            raise BundleError(
                f"its agent does not reach the coordinator within {timeouts.health_s:g} s, "
                "and the version before does"
            )
        if time.monotonic() >= end_s:
            raise BundleError(f"no version reached the coordinator for {timeouts.away_s:g} s; it is not proven")
        log.info("neither version reaches the coordinator; waiting for the network")


def can_reach(slots: Slots, slot: str, state_dir: Path, runner: SubprocessRunner, target: str) -> bool:
    """Returns whether a slot's edgefl reaches the target (`coordinator` or `broker`) now."""
    command = [
        str(slots.python(slot)), "-I", "-m", "edgefl", "-q", "device", "status", "--state", str(state_dir),
        "--format", "json",
    ]  # fmt: skip
    process = runner.run_as_device(command, timeout_s=120.0)
    try:
        return process.returncode == 0 and parse_json(process.stdout).get(target) is not None
    except ValueError:
        return False


def _poll_health(
    expected: ExpectedHealth, state_dir: Path, until_s: float, is_sufficient: Callable[[AgentHealth], bool]
) -> AgentHealth | None:
    """Returns the new agent's health once sufficient, else its last one at the deadline, or None."""
    last_health = None
    while time.monotonic() < until_s:
        health = read_health(state_dir)
        if health is not None and _is_expected(health, expected):
            last_health = health
            if is_sufficient(health):
                break
        time.sleep(POLL_INTERVAL_S)
    return last_health


def _is_expected(health: AgentHealth, expected: ExpectedHealth) -> bool:
    return (
        health.token == expected.token
        and health.slot == expected.slot
        and canonicalize_version(health.version) == canonicalize_version(expected.version)
        and health.packs == expected.packs
    )


def _check_stays_up(health: AgentHealth, state_dir: Path, settle_s: float) -> None:
    """Raises unless the same agent process is still up after `settle_s`."""
    time.sleep(settle_s)
    current = read_health(state_dir)
    if current is None or current.boot_id != health.boot_id or not is_locked(state_dir / "lock"):
        raise BundleError(f"its agent reached the coordinator and was gone again within {settle_s:g} s")


def _check_reaches_broker(expected: ExpectedHealth, state_dir: Path, until_s: float, timeouts: TrialTimeouts) -> None:
    """Raises unless the agent reaches the broker within its time."""
    until_s = max(until_s, time.monotonic() + timeouts.settle_s)
    health = _poll_health(expected, state_dir, until_s, lambda health: health.linked is True)
    if health is None or not health.linked:
        raise BundleError(
            f"its agent does not reach the broker within {timeouts.health_s:g} s, and the version before does"
        )
