"""What the updater is at, and what became of the last request: one file, replaced as a whole, that all may read.

A power cut at any instant leaves the step before or the one after; from either the updater goes on. Root writes it,
in its own folder; the agent reads it there, so that root writes nothing into a folder of another user.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, TypeVar

from edgefl.device.slots.layout import Slots
from edgefl.files import open_whole
from edgefl.untrusted import parse_json

log = logging.getLogger(__name__)

NAME = "status.json"
FORMAT = 1

T = TypeVar("T")


class Step(StrEnum):
    """How far a trial is: the new slot is BUILDING, `current` is FLIPPING to it, it is in TRIAL, or LEFT again."""

    BUILDING = "building"
    FLIPPING = "flipping"
    TRIAL = "trial"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A request under way.

    An agent that starts in the new slot repeats `token`, so it cannot be an older one; every try has a new one.
    """

    id: str
    sha256: str
    step: Step
    old: str
    new: str
    token: str = ""
    attempts: int = 1
    kind: str = ""
    name: str = ""
    version: str = ""
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a request; `state` is running, refused, failed or rolled-back."""

    id: str
    state: str
    reason: str | None = None
    name: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdaterStatus:
    trial: Trial | None = None
    outcome: Outcome | None = None


def read_status(slots: Slots) -> UpdaterStatus:
    """Returns what the updater has written; nothing when it never ran, or when the file is damaged."""
    path = slots.work / NAME
    try:
        value = parse_json(path.read_bytes())
        trial = _made(Trial, value.get("trial"))
        if trial is not None:
            trial = Trial(**{**asdict(trial), "step": Step(trial.step)})
        return UpdaterStatus(trial=trial, outcome=_made(Outcome, value.get("outcome")))
    except FileNotFoundError:
        return UpdaterStatus()
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("%s is damaged and left aside: %s", path, error)
        return UpdaterStatus()


def write_status(slots: Slots, status: UpdaterStatus) -> None:
    with open_whole(slots.work / NAME, mode=0o644) as file:
        file.write(json.dumps({"v": FORMAT, **asdict(status)}).encode())


def _made(cls: type[T], value: Mapping[str, Any] | None) -> T | None:
    if value is None:
        return None
    known = {item.name for item in fields(cls)}  # type: ignore[arg-type]  # both are dataclasses
    if nested := [name for name in known if isinstance(value.get(name), dict | list)]:
        raise TypeError(f"{nested[0]} must be a plain value")
    return cls(**{name: item for name, item in value.items() if name in known})
