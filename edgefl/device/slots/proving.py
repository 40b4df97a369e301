"""Whether a new version works: its agent must reach the coordinator and the broker, and stay up.

An agent that never starts, starts anew again and again, or cannot reach a coordinator or a broker that the version
before does reach has failed: by the one it works, by the other it would hear of the release that mends it. Where
neither reaches the coordinator, the network is away and nobody is to blame: then the wait begins anew, for an hour at
most. After that the board goes back as well: what was not proven is not kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.utils import canonicalize_version

from edgefl.device.slots.children import Children
from edgefl.device.slots.health import Health, read_health
from edgefl.device.slots.layout import Slots
from edgefl.errors import BundleError
from edgefl.files import is_held
from edgefl.untrusted import parse_json

log = logging.getLogger(__name__)

LOOK_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long things may take.

    `health_s` until the agent has reached the coordinator, else the updater asks the version before whether it could;
    `settle_s` it must stay up then; `away_s` the network may be away for both.
    """

    health_s: float = 300.0
    settle_s: float = 10.0
    away_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the agent has to say of itself."""

    token: str
    slot: str
    old: str
    version: str
    packs: Mapping[str, str] = field(default_factory=dict)


def prove(expected: Expected, slots: Slots, state_dir: Path, children: Children, pace: Pace) -> None:
    """Returns when the new version has proven itself.

    Raises:
        BundleError: it has not.
    """
    end_s = time.monotonic() + pace.away_s
    while True:
        until_s = min(time.monotonic() + pace.health_s, end_s)
        health = _heard(expected, state_dir, until_s, lambda health: health.connected)
        if health is not None and health.connected:
            _check_settled(health, state_dir, pace.settle_s)
            if health.linked is not None and reaches(slots, expected.old, state_dir, children, "broker"):
                _check_linked(expected, state_dir, until_s, pace)
            return
        if health is None:
            raise BundleError(f"its agent did not come up within {pace.health_s:g} s")
        if reaches(slots, expected.old, state_dir, children, "coordinator"):
            raise BundleError(
                f"its agent does not reach the coordinator within {pace.health_s:g} s, and the version before does"
            )
        if time.monotonic() >= end_s:
            raise BundleError(f"no version reached the coordinator for {pace.away_s:g} s; it is not proven")
        log.info("neither version reaches the coordinator; waiting for the network")


def reaches(slots: Slots, slot: str, state_dir: Path, children: Children, whom: str) -> bool:
    """Returns whether the edgefl of a slot gets an answer from the `coordinator`, or the `broker`, now."""
    command = [
        str(slots.python(slot)), "-I", "-m", "edgefl", "-q", "device", "status", "--state", str(state_dir),
        "--format", "json",
    ]  # fmt: skip
    told = children.as_device(command, within_s=120.0)
    try:
        return told.returncode == 0 and parse_json(told.stdout).get(whom) is not None
    except ValueError:
        return False


def _heard(expected: Expected, state_dir: Path, until_s: float, is_enough: Callable[[Health], bool]) -> Health | None:
    """Returns what the new agent says once that is enough, or at the end of the time; None when it says nothing."""
    found = None
    while time.monotonic() < until_s:
        health = read_health(state_dir)
        if health is not None and _is_meant(health, expected):
            found = health
            if is_enough(health):
                break
        time.sleep(LOOK_S)
    return found


def _is_meant(health: Health, expected: Expected) -> bool:
    return (
        health.token == expected.token
        and health.slot == expected.slot
        and canonicalize_version(health.version) == canonicalize_version(expected.version)
        and health.packs == expected.packs
    )


def _check_settled(health: Health, state_dir: Path, settle_s: float) -> None:
    """Raises unless the same life of the agent is still there after a while."""
    time.sleep(settle_s)
    now = read_health(state_dir)
    if now is None or now.boot_id != health.boot_id or not is_held(state_dir / "lock"):
        raise BundleError(f"its agent reached the coordinator and was gone again within {settle_s:g} s")


def _check_linked(expected: Expected, state_dir: Path, until_s: float, pace: Pace) -> None:
    """Raises unless it gets to the broker, too, within its time."""
    until_s = max(until_s, time.monotonic() + pace.settle_s)
    health = _heard(expected, state_dir, until_s, lambda health: health.linked is True)
    if health is None or not health.linked:
        raise BundleError(
            f"its agent does not reach the broker within {pace.health_s:g} s, and the version before does"
        )
