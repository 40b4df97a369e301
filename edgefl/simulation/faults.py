"""Fault scripts: what goes wrong, when and for whom, as data that is known before a run begins.

[[fault]]
device = "device-03"     # a name, or a pattern such as device-* ; every one that fits
at_s = 120
kind = "kill"            # kill | slow | link
for_s = 60               # how long; for ever when left out
factor = 4               # how many times slower; kill needs none
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from edgefl.config import from_mapping
from edgefl.errors import ConfigError
from edgefl.simulation.profiles import Profile
from edgefl.simulation.traces import Steps, combined, merged
from edgefl.untrusted import parse_toml

Kind = Literal["kill", "slow", "link"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong.

    `kill` takes the device away, with all it had in memory; `slow` makes every iteration `factor` times longer,
    `link` every transfer.
    """

    device: str
    at_s: float = field(metadata={"at_least": 0})
    kind: Kind
    for_s: float | None = field(default=None, metadata={"above": 0})
    factor: float | None = field(default=None, metadata={"above": 0})

    def __post_init__(self) -> None:
        if (self.kind == "kill") is not (self.factor is None):
            raise ConfigError(f"fault.factor: {self.kind!r} {'takes none' if self.kind == 'kill' else 'needs one'}")

    @property
    def until_s(self) -> float:
        return math.inf if self.for_s is None else self.at_s + self.for_s


def load_faults(path: str | Path) -> tuple[Fault, ...]:
    """Returns the faults of a TOML file.

    Raises:
        ConfigError: the file is missing, no TOML, or holds what makes no sense.
    """
    try:
        table: dict[str, Any] = parse_toml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"fault script {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"fault script {path}: is not TOML: {error}") from None
    entries = table.pop("fault", [])
    if table or not isinstance(entries, list):
        found = ", ".join(table) or f"fault = {entries!r:.80}"
        raise ConfigError(f"fault script {path}: it must hold [[fault]] tables alone, got {found}")
    try:
        return tuple(from_mapping(Fault, entry, path="fault") for entry in entries)
    except ConfigError as error:
        raise ConfigError(f"fault script {path}: {error}") from None


def with_faults(device_id: str, profile: Profile, faults: Sequence[Fault]) -> Profile:
    """Returns the profile of a device, the faults that hit it added to its own traces."""
    hit = [fault for fault in faults if fnmatchcase(device_id, fault.device)]
    if not hit:
        return profile
    kills = ((fault.at_s, fault.until_s) for fault in hit if fault.kind == "kill")
    slow = [_factor(fault) for fault in hit if fault.kind == "slow"]
    link = [_factor(fault) for fault in hit if fault.kind == "link"]
    return replace(
        profile,
        offline=merged([*profile.offline, *kills]),
        throttling=combined([profile.throttling, *slow]),
        congestion=combined([profile.congestion, *link]),
    )


def check_hits(faults: Sequence[Fault], device_ids: Sequence[str]) -> None:
    """Refuses a fault that hits nobody: most likely a name was misspelt.

    Raises:
        ConfigError: there is one.
    """
    for fault in faults:
        if not any(fnmatchcase(device_id, fault.device) for device_id in device_ids):
            raise ConfigError(f"fault.device {fault.device!r} fits none of {len(device_ids)} devices")


def _factor(fault: Fault) -> Steps:
    end = () if math.isinf(fault.until_s) else ((fault.until_s, 1.0),)
    return ((fault.at_s, fault.factor or 1.0), *end)
