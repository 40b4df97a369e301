"""Fault scripts: what goes wrong, when and for whom, as data that is known before a run begins.

[[fault]]
device = "device-03"     # a name, or a pattern such as device-* ; every one that fits. Also coordinator and broker
at_s = 120
kind = "kill"            # see `KINDS`
for_s = 60               # how long; for ever when left out
factor = 4               # slow and link: how many times slower
amount = 0.3             # loss, delay, rate and clock: how much; see `KINDS`

The tests play the same scripts on real processes (`make chaos`), one fault after another: there the times are the
least that lies between two of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from edgefl.config import from_mapping
from edgefl.errors import ConfigError
from edgefl.simulation.profiles import Profile
from edgefl.simulation.traces import Steps, combined, merged, summed
from edgefl.untrusted import parse_toml

Kind = Literal[
    "kill", "freeze", "slow", "cut", "link", "loss", "rate", "delay", "clock", "full-disk", "torn-tail", "damage"
]
KINDS: dict[Kind, str] = {
    "kill": "it is gone at once, with all that it had in memory",
    "freeze": "it stands still and forgets nothing",
    "slow": "every iteration takes `factor` times longer",
    "cut": "nothing gets through its cable",
    "link": "every transfer takes `factor` times longer",
    "loss": "the fraction `amount` of the packets to it is lost, in (0, 1)",
    "rate": "at most `amount` bytes a second pass in each direction",
    "delay": "every message takes `amount` seconds longer, each way",
    "clock": "its clock is `amount` seconds ahead; a negative number is behind",
    "full-disk": "its disk has no room",
    "torn-tail": "it is killed, and of what it wrote a piece at the end that was not yet synced is missing",
    "damage": "it is killed, and a file that it had written and synced is damaged",
}
SERVERS = ("coordinator", "broker")
"""What can be hit beside the devices; virtual time has neither."""
_AMOUNTS = {"loss": (0.0, 1.0), "rate": (0.0, math.inf), "delay": (0.0, math.inf), "clock": (-math.inf, math.inf)}
_SIMULATED = frozenset({"kill", "freeze", "slow", "cut", "link", "loss", "rate", "delay"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong; `KINDS` says what each does."""

    device: str
    at_s: float = field(metadata={"at_least": 0})
    kind: Kind
    for_s: float | None = field(default=None, metadata={"above": 0})
    factor: float | None = field(default=None, metadata={"above": 0})
    amount: float | None = None

    def __post_init__(self) -> None:
        _check_given("factor", self.factor, self.kind, is_needed=self.kind in {"slow", "link"})
        _check_given("amount", self.amount, self.kind, is_needed=self.kind in _AMOUNTS)
        if self.amount is not None:
            above, below = _AMOUNTS[self.kind]
            if not above < self.amount < below:
                raise ConfigError(
                    f"fault.amount: of {self.kind!r} it lies between {above:g} and {below:g}, got {self.amount:g}"
                )

    @property
    def until_s(self) -> float:
        return math.inf if self.for_s is None else self.at_s + self.for_s

    @property
    def is_simulated(self) -> bool:
        """Says whether virtual time has something like it."""
        return self.kind in _SIMULATED and self.device not in SERVERS


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


def script_of(faults: Sequence[Fault]) -> str:
    """Returns the text of a fault script, which `load_faults` reads."""
    return "\n".join(
        "[[fault]]\n"
        # JSON strings and numbers are TOML's too.
        + "".join(
            f"{item.name} = {json.dumps(value)}\n"
            for item in fields(fault)
            if (value := getattr(fault, item.name)) is not None
        )
        for fault in faults
    )


def with_faults(device_id: str, profile: Profile, faults: Sequence[Fault]) -> Profile:
    """Returns the profile of a device, the faults that hit it added to its own traces."""
    hit = [fault for fault in faults if fault.is_simulated and fnmatchcase(device_id, fault.device)]
    if not hit:
        return profile
    fastest = max(profile.up_bytes_per_s, profile.down_bytes_per_s)
    return replace(
        profile,
        offline=merged([*profile.offline, *((f.at_s, f.until_s) for f in hit if _is_gone(f))]),
        throttling=combined([profile.throttling, *_traces(hit, _slowness)]),
        congestion=combined([profile.congestion, *_traces(hit, lambda fault: _congestion(fault, fastest))]),
        delays=summed([profile.delays, *_traces(hit, _delay, usual=0.0)]),
    )


def check_hits(faults: Sequence[Fault], device_ids: Sequence[str]) -> None:
    """Refuses a fault that hits nobody: most likely a name was misspelt.

    Raises:
        ConfigError: there is one.
    """
    for fault in faults:
        if fault.device not in SERVERS and not any(fnmatchcase(device_id, fault.device) for device_id in device_ids):
            raise ConfigError(f"fault.device {fault.device!r} fits none of {len(device_ids)} devices")


def _check_given(name: str, value: float | None, kind: str, *, is_needed: bool) -> None:
    if is_needed is (value is None):
        raise ConfigError(f"fault.{name}: {kind!r} {'needs one' if is_needed else 'takes none'}")


def _is_gone(fault: Fault) -> bool:
    """Says whether a board is as good as dead: what stands still or is cut off for ever brings nothing any more."""
    return fault.kind == "kill" or (fault.kind in {"freeze", "cut"} and fault.for_s is None)


def _slowness(fault: Fault) -> float | None:
    return math.inf if fault.kind == "freeze" and not _is_gone(fault) else _of("slow", fault, fault.factor)


def _congestion(fault: Fault, fastest_bytes_per_s: float) -> float | None:
    """Returns how many times slower transfers are; None for a fault that leaves them alone."""
    amount = fault.amount or 0.0
    match fault.kind:
        case "cut" if not _is_gone(fault):
            return math.inf
        case "loss":
            return 1.0 / (1.0 - amount)  # what is lost is sent again
        case "rate":
            return max(1.0, fastest_bytes_per_s / amount)
    return _of("link", fault, fault.factor)


def _delay(fault: Fault) -> float | None:
    return _of("delay", fault, fault.amount)


def _of(kind: Kind, fault: Fault, value: float | None) -> float | None:
    return value if fault.kind == kind else None


def _traces(faults: Sequence[Fault], value: Callable[[Fault], float | None], *, usual: float = 1.0) -> list[Steps]:
    """Returns a trace for every fault that changes a value, and back to what is usual when it is over."""
    valued = [(fault, found) for fault in faults if (found := value(fault)) is not None]
    ends = [() if math.isinf(fault.until_s) else ((fault.until_s, usual),) for fault, _ in valued]
    return [((fault.at_s, found), *end) for (fault, found), end in zip(valued, ends, strict=True)]
