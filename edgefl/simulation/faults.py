"""Fault scripts: kind, time and target of each fault, as data fixed before a run begins.

[[fault]]
device = "device-03"     # a name, or a pattern such as device-* ; all matches. Also coordinator and broker
at_s = 120
kind = "kill"            # see `KINDS`
for_s = 60               # duration; for ever when absent
factor = 4               # slow and link: slowdown factor
amount = 0.3             # loss, delay, rate and clock: amount; see `KINDS`

The tests play the same scripts on real processes (`make chaos`), one fault after another: there the times are
minimum distances between faults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from edgefl.core.errors import ConfigError
from edgefl.core.safe_parsing import parse_toml
from edgefl.core.settings import from_mapping
from edgefl.simulation.profiles import DeviceProfile, StepTrace, add_traces, merge_absences, multiply_traces

FaultKind = Literal[
    "kill", "freeze", "slow", "cut", "link", "loss", "rate", "delay", "clock", "full-disk", "torn-tail", "damage"
]
"""What happens to a target of a fault.

kill: it is gone at once, with all that it had in memory.
freeze: it stands still and forgets nothing.
slow: every iteration takes `factor` times longer.
cut: nothing gets through its cable.
link: every transfer takes `factor` times longer.
loss: the fraction `amount` of the packets to it is lost, in (0, 1).
rate: at most `amount` bytes a second pass in each direction.
delay: every message takes `amount` seconds longer, each way.
clock: its clock is `amount` seconds ahead; a negative number is behind.
full-disk: its disk has no room.
torn-tail: it is killed, and of what it wrote a piece at the end that was not yet synced is missing.
damage: it is killed, and a file that it had written and synced is damaged.
"""
SERVER_NAMES = ("coordinator", "broker")
"""Targets besides the devices; the simulator has neither."""
_AMOUNT_RANGES = {
    "loss": (0.0, 1.0),
    "rate": (0.0, math.inf),
    "delay": (0.0, math.inf),
    "clock": (-math.inf, math.inf),
}
_SIMULATED_KINDS = frozenset({"kill", "freeze", "slow", "cut", "link", "loss", "rate", "delay"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault; see `KINDS` for the effects."""

    device: str
    at_s: float = field(metadata={"at_least": 0})
    kind: FaultKind
    for_s: float | None = field(default=None, metadata={"above": 0})
    factor: float | None = field(default=None, metadata={"above": 0})
    amount: float | None = None

    def __post_init__(self) -> None:
        _check_field("factor", self.factor, self.kind, is_required=self.kind in {"slow", "link"})
        _check_field("amount", self.amount, self.kind, is_required=self.kind in _AMOUNT_RANGES)
        if self.amount is not None:
            low, high = _AMOUNT_RANGES[self.kind]
            if not low < self.amount < high:
                raise ConfigError(
                    f"fault.amount: of {self.kind!r} it lies between {low:g} and {high:g}, got {self.amount:g}"
                )

    @property
    def until_s(self) -> float:
        return math.inf if self.for_s is None else self.at_s + self.for_s

    @property
    def is_simulated(self) -> bool:
        """Whether the simulator supports this kind of fault."""
        return self.kind in _SIMULATED_KINDS and self.device not in SERVER_NAMES


def load_faults(path: str | Path) -> tuple[Fault, ...]:
    """Returns the faults of a TOML file.

    Raises:
        ConfigError: the file is missing, no TOML, or holds an invalid fault.
    """
    try:
        table: dict[str, Any] = parse_toml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"fault script {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"fault script {path}: is not TOML: {error}") from None
    entries = table.pop("fault", [])
    if table or not isinstance(entries, list):
        content = ", ".join(table) or f"fault = {entries!r:.80}"
        raise ConfigError(f"fault script {path}: it must hold [[fault]] tables alone, got {content}")
    try:
        return tuple(from_mapping(Fault, entry, path="fault") for entry in entries)
    except ConfigError as error:
        raise ConfigError(f"fault script {path}: {error}") from None


def apply_faults(device_id: str, profile: DeviceProfile, faults: Sequence[Fault]) -> DeviceProfile:
    """Returns a device's profile with the faults that match it added to its traces."""
    matching = [fault for fault in faults if fault.is_simulated and fnmatchcase(device_id, fault.device)]
    if not matching:
        return profile
    fastest = max(profile.up_bytes_per_s, profile.down_bytes_per_s)
    return replace(
        profile,
        offline=merge_absences([*profile.offline, *((f.at_s, f.until_s) for f in matching if _is_outage(f))]),
        throttling=multiply_traces([profile.throttling, *_make_traces(matching, _compute_slowdown)]),
        congestion=multiply_traces(
            [profile.congestion, *_make_traces(matching, lambda fault: _compute_congestion(fault, fastest))]
        ),
        delays=add_traces([profile.delays, *_make_traces(matching, _compute_delay, default=0.0)]),
    )


def check_targets(faults: Sequence[Fault], device_ids: Sequence[str]) -> None:
    """Rejects a fault that matches no device: most likely a misspelt name.

    Raises:
        ConfigError: there is one.
    """
    for fault in faults:
        if fault.device not in SERVER_NAMES and not any(
            fnmatchcase(device_id, fault.device) for device_id in device_ids
        ):
            raise ConfigError(f"fault.device {fault.device!r} fits none of {len(device_ids)} devices")


def _check_field(name: str, value: float | None, kind: str, *, is_required: bool) -> None:
    if is_required is (value is None):
        raise ConfigError(f"fault.{name}: {kind!r} {'needs one' if is_required else 'takes none'}")


def _is_outage(fault: Fault) -> bool:
    """Whether a fault is an outage: a device hung or cut off for ever."""
    return fault.kind == "kill" or (fault.kind in {"freeze", "cut"} and fault.for_s is None)


def _compute_slowdown(fault: Fault) -> float | None:
    return (
        math.inf
        if fault.kind == "freeze" and not _is_outage(fault)
        else _get_value_for_kind("slow", fault, fault.factor)
    )


def _compute_congestion(fault: Fault, max_bytes_per_s: float) -> float | None:
    """Returns the slowdown factor of transfers; None for a fault that does not affect them."""
    amount = fault.amount or 0.0
    match fault.kind:
        case "cut" if not _is_outage(fault):
            return math.inf
        case "loss":
            return 1.0 / (1.0 - amount)  # lost messages are sent again
        case "rate":
            return max(1.0, max_bytes_per_s / amount)
    return _get_value_for_kind("link", fault, fault.factor)


def _compute_delay(fault: Fault) -> float | None:
    return _get_value_for_kind("delay", fault, fault.amount)


def _get_value_for_kind(kind: FaultKind, fault: Fault, value: float | None) -> float | None:
    return value if fault.kind == kind else None


def _make_traces(
    faults: Sequence[Fault], value: Callable[[Fault], float | None], *, default: float = 1.0
) -> list[StepTrace]:
    """Returns a trace per fault that changes a value; it returns to the default at the fault's end."""
    amounts = [(fault, amount) for fault in faults if (amount := value(fault)) is not None]
    reset_steps = [() if math.isinf(fault.until_s) else ((fault.until_s, default),) for fault, _ in amounts]
    return [((fault.at_s, amount), *end) for (fault, amount), end in zip(amounts, reset_steps, strict=True)]
