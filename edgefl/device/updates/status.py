"""Updater status: the current attempt and the last result in one file, replaced atomically, readable by all.

A power cut at any instant leaves the former or the next step; the updater resumes from either. Root writes it in its
own folder; the agent reads it there, so that root writes nothing into a folder of another user.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, TypeVar

from edgefl.core.safe_parsing import parse_json
from edgefl.device.updates.slots import Slots
from edgefl.system.atomic_files import open_atomic

log = logging.getLogger(__name__)

STATUS_FILE = "status.json"
STATUS_FORMAT = 1

T = TypeVar("T")


class InstallPhase(StrEnum):
    """Phase of an installation: the new slot is built, activated by `current`, in trial, or rolled back."""

    BUILDING = "building"
    ACTIVATING = "flipping"
    TRIAL = "trial"
    ROLLING_BACK = "leaving"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallAttempt:
    """Installation in progress.

    An agent that starts in the new slot repeats `token`, which excludes older ones; every attempt has a new one.
    """

    id: str
    sha256: str
    step: InstallPhase
    old: str
    new: str
    token: str = ""
    attempts: int = 1
    kind: str = ""
    name: str = ""
    version: str = ""
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallResult:
    """Result of a request; `state` is running, refused, failed or rolled-back."""

    id: str
    state: str
    reason: str | None = None
    name: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdaterStatus:
    trial: InstallAttempt | None = None
    outcome: InstallResult | None = None


def read_status(slots: Slots) -> UpdaterStatus:
    """Returns the updater's status; empty when it never ran, or the file is damaged."""
    path = slots.work_dir / STATUS_FILE
    try:
        value = parse_json(path.read_bytes())
        trial = _parse_record(InstallAttempt, value.get("trial"))
        if trial is not None:
            trial = InstallAttempt(**{**asdict(trial), "step": InstallPhase(trial.step)})
        return UpdaterStatus(trial=trial, outcome=_parse_record(InstallResult, value.get("outcome")))
    except FileNotFoundError:
        return UpdaterStatus()
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("%s is damaged and left aside: %s", path, error)
        return UpdaterStatus()


def write_status(slots: Slots, status: UpdaterStatus) -> None:
    with open_atomic(slots.work_dir / STATUS_FILE, mode=0o644) as file:
        file.write(json.dumps({"v": STATUS_FORMAT, **asdict(status)}).encode())


def _parse_record(cls: type[T], value: Mapping[str, Any] | None) -> T | None:
    if value is None:
        return None
    field_names = {item.name for item in fields(cls)}  # type: ignore[arg-type]  # both are dataclasses
    if nested := [name for name in field_names if isinstance(value.get(name), dict | list)]:
        raise TypeError(f"{nested[0]} must be a plain value")
    return cls(**{name: item for name, item in value.items() if name in field_names})
