"""Device profiles: speeds of computing and transfer, capabilities, absences, and values over time.

`profiles.toml` has the built-in ones; `edgefl device probe --profile FILE` writes one of a real device.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.resources import files
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.core.conditions import NO_CONDITIONS, Conditions
from edgefl.core.conditions import TABLE as CONDITIONS_TABLE
from edgefl.core.errors import ConfigError
from edgefl.core.safe_parsing import parse_toml
from edgefl.core.settings import from_mapping, suggest_name
from edgefl.core.types import Array

StepTrace = tuple[tuple[float, float], ...]
"""(from second, value), in the order of time: the value holds until the next entry."""
Absences = tuple[tuple[float, float], ...]
"""(from second, to second), in the order of time and apart from each other; the last may end at infinity."""

BUILT_IN_FILE = "profiles.toml"
SOURCE_KINDS = ("measured", "vendor", "estimated")
MAX_JITTER = 2.0
"""As of `simulation.jitter`: beyond it the times of iterations would overflow."""
MAX_PROFILE_CHARS = 32 * 1024 * 1024
"""Of a profile file: a hundred boards that are seen every half hour of a month have 5 million."""


def value_at(steps: StepTrace, now_s: float) -> float | None:
    """Returns the value at `now_s`; None before the first step."""
    index = bisect.bisect_right(steps, (now_s, math.inf))
    return steps[index - 1][1] if index else None


@dataclass(frozen=True, slots=True)
class SlowdownTrace:
    """Maps nominal seconds of work to real ones: from `starts_s[i]` on, slower by `factors[i]`.

    The first start is 0.
    """

    starts_s: tuple[float, ...]
    factors: tuple[float, ...]

    @classmethod
    def from_steps(cls, steps: Iterable[tuple[float, float]]) -> SlowdownTrace | None:
        """Returns the slowdown of a trace; None for a constant speed."""
        ordered = sorted(steps)
        if all(factor == 1.0 for _, factor in ordered):
            return None
        if not ordered or ordered[0][0] > 0:
            ordered.insert(0, (0.0, 1.0))
        return cls(tuple(start for start, _ in ordered), tuple(factor for _, factor in ordered))

    def factor_at(self, now_s: float) -> float:
        return self.factors[max(0, bisect.bisect_right(self.starts_s, now_s) - 1)]

    def compute_end_s(self, start_s: float, work_s: float) -> float:
        """Returns the end of `work_s` nominal seconds of work that start at `start_s`."""
        index, now_s, remaining_s = max(0, bisect.bisect_right(self.starts_s, start_s) - 1), start_s, work_s
        while index + 1 < len(self.starts_s):
            span_s = (self.starts_s[index + 1] - now_s) / self.factors[index]
            if remaining_s <= span_s:
                break
            remaining_s, index = remaining_s - span_s, index + 1
            now_s = self.starts_s[index]
        return now_s + remaining_s * self.factors[index]

    def compute_work_s(self, start_s: float, now_s: float) -> float:
        """Returns the nominal seconds of work done from `start_s` to `now_s`."""
        edges = [start_s, *(at for at in self.starts_s if start_s < at < now_s), now_s]
        spans = itertools.pairwise(edges)
        return sum((end - start) / self.factor_at(start) for start, end in spans)


def multiply_traces(traces: Sequence[StepTrace]) -> StepTrace:
    """Returns the product of several traces of factors; before its first step each counts as 1."""
    times = sorted({at for trace in traces for at, _ in trace})
    return tuple((at, math.prod(value_at(trace, at) or 1.0 for trace in traces)) for at in times)


def add_traces(traces: Sequence[StepTrace]) -> StepTrace:
    """Returns the sum of several traces; before its first step each counts as 0."""
    times = sorted({at for trace in traces for at, _ in trace})
    return tuple((at, math.fsum(value_at(trace, at) or 0.0 for trace in traces)) for at in times)


def merge_absences(absences: Iterable[tuple[float, float]]) -> Absences:
    """Returns the same absences in order, touching and overlapping ones merged."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(absences):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class IterationTimes:
    """Nominal seconds of work by iteration: `ends_s` [m] cumulative, repeated as often as there are iterations."""

    ends_s: Array

    @classmethod
    def from_constant(cls, iteration_s: float) -> IterationTimes:
        return cls(np.array([iteration_s]))

    @classmethod
    def from_factors(cls, iteration_s: float, factors: Array) -> IterationTimes:
        return cls(np.cumsum(iteration_s * factors))

    def compute_work_s(self, iterations: int) -> float:
        """Returns the nominal seconds of the first `iterations`."""
        num_cycles, remainder = divmod(iterations, len(self.ends_s))
        return num_cycles * float(self.ends_s[-1]) + (float(self.ends_s[remainder - 1]) if remainder else 0.0)

    def count_iterations(self, work_s: float) -> int:
        """Returns the number of iterations finished within `work_s` nominal seconds."""
        num_cycles = int(work_s // float(self.ends_s[-1]))
        remainder_s = work_s - num_cycles * float(self.ends_s[-1])
        return num_cycles * len(self.ends_s) + int(np.searchsorted(self.ends_s, remainder_s, side="right"))


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationCost:
    """Seconds of one iteration: `fixed_s`, plus `example_s` per example of the batch."""

    fixed_s: float = 0.0
    example_s: float = 0.0

    def compute_seconds(self, batch_size: int) -> float:
        return self.fixed_s + batch_size * self.example_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One kind of device.

    Attributes:
        name: its name on the command line.
        model: its hardware model.
        speed: training speed relative to the reference machine.
        iterations: cost of an iteration, by task or by `task/model`; overrides `speed`.
        jitter: deviation of the logarithm of an iteration's time; None leaves it to the run.
        up_bytes_per_s, down_bytes_per_s: its own link.
        latency_s: latency of a message, either way.
        memory_bytes: memory available to training.
        accelerators: kinds, such as cuda.
        groups: as in the run file's `devices.groups`.
        offline: absences: (from second, to second).
        mtbf_s, mttr_s: mean seconds to failure and to recovery, both exponential; None: it does not fail.
        throttling: (from second, factor): slowdown of iterations from then on.
        congestion: likewise for transfers.
        delays: (from second, seconds): added latency of every message from then on.
        temperature_c, battery: (from second, value): values of its heartbeats, which its conditions ask, too.
        mains, charging, metered: (from second, 0 or 1): on external power, battery charged, connection metered.
        other_load: (from second, share): of all its cores that other processes keep.
        power_w: of the board while it works, from which its updates have joules; None where it is not known.
        conditions: of its owner.
        sources: origin of each number, by field: measured, vendor or estimated, and how.
    """

    name: str
    model: str = ""
    speed: float = 1.0
    iterations: Mapping[str, IterationCost] = field(default_factory=dict)
    jitter: float | None = None
    up_bytes_per_s: float = 1e6
    down_bytes_per_s: float = 1e6
    latency_s: float = 0.0
    memory_bytes: int | None = None
    accelerators: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    offline: Absences = ()
    mtbf_s: float | None = None
    mttr_s: float | None = None
    throttling: StepTrace = ()
    congestion: StepTrace = ()
    delays: StepTrace = ()
    temperature_c: StepTrace = ()
    battery: StepTrace = ()
    mains: StepTrace = ()
    charging: StepTrace = ()
    metered: StepTrace = ()
    other_load: StepTrace = ()
    power_w: float | None = None
    conditions: Conditions = NO_CONDITIONS
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCatalogue:
    """Profiles by name, and costs of an iteration on the reference machine, by task or `task/model`."""

    profiles: Mapping[str, DeviceProfile]
    reference_costs: Mapping[str, IterationCost]

    def get(self, name: str) -> DeviceProfile:
        """Returns one profile by name.

        Raises:
            ConfigError: there is no such profile.
        """
        if name not in self.profiles:
            raise ConfigError(f"no profile {name!r}: {suggest_name(name, self.profiles)}")
        return self.profiles[name]

    def assign_profiles(self, specs: Sequence[str], num_devices: int) -> list[DeviceProfile]:
        """Returns `count` profiles for `NAME` or `NAME:COUNT` specs, repeated in turn.

        Raises:
            ConfigError: a name is unknown, or a count is no number above 0.
        """
        if not specs:
            raise ConfigError("simulation.profiles must name at least one profile")
        pack = [profile for spec in specs for profile in self._parse_spec(spec, num_devices)]
        return list(islice(cycle(pack), num_devices))

    def _parse_spec(self, spec: str, max_count: int) -> list[DeviceProfile]:
        name, separator, count = spec.partition(":")
        if separator and not (count.isdecimal() and int(count) > 0):
            raise ConfigError(f"a profile is NAME or NAME:COUNT with a count above 0, got {spec!r}")
        return [self.get(name)] * (min(int(count), max_count) if separator else 1)


def load_catalogue(paths: Sequence[str | Path] = ()) -> ProfileCatalogue:
    """Returns the built-in profiles and those of the files; later ones replace earlier ones of the same name.

    Raises:
        ConfigError: a file is missing, no TOML, or invalid.
    """
    catalogue = _load_built_in()
    for path in paths:
        more = _load_file(Path(path))
        profiles, reference = (
            {**catalogue.profiles, **more.profiles},
            {**catalogue.reference_costs, **more.reference_costs},
        )
        catalogue = ProfileCatalogue(profiles=profiles, reference_costs=reference)
    return catalogue


@cache
def _load_built_in() -> ProfileCatalogue:
    text = (files("edgefl.simulation") / BUILT_IN_FILE).read_text(encoding="utf-8")
    return parse_catalogue(parse_toml(text), BUILT_IN_FILE)


def list_profile_names(path: str | Path) -> list[str]:
    """Returns the names of the profiles in a file; raises as `load_catalogue`."""
    return list(_load_file(Path(path)).profiles)


def parse_catalogue(table: Mapping[str, Any], location: str) -> ProfileCatalogue:
    """Returns the catalogue in a profile file's tables.

    Raises:
        ConfigError: something is invalid; the text names the place and the key.
    """
    if unknown := set(table) - {"profile", "reference", "v"}:
        raise ConfigError(f"{location}: unknown table [{min(unknown)}]; a profile is [profile.NAME]")
    profiles = _require_table(table.get("profile", {}), f"{location}: profile")
    reference = _require_table(table.get("reference", {}), f"{location}: reference")
    return ProfileCatalogue(
        profiles={
            name: _ProfileReader(entry, f"{location}: profile.{name}").read_profile(name)
            for name, entry in profiles.items()
        },
        reference_costs=_ProfileReader({"iterations": reference}, f"{location}: reference").read_iteration_costs()
        if reference
        else {},
    )


class _ProfileReader:
    """Parser of one table of a profile file, field by field."""

    def __init__(self, table: object, location: str) -> None:
        self._table, self._location = _require_table(table, location), location

    def read_profile(self, name: str) -> DeviceProfile:
        known_keys = set(DeviceProfile.__dataclass_fields__) - {"name", "sources"} | {"source"}
        if unknown := sorted(set(self._table) - known_keys):
            hint = suggest_name(unknown[0], known_keys)
            raise ConfigError(f"{self._location}: unknown key {unknown[0]!r}: {hint}")
        optional = {"jitter": 0.0, "mtbf_s": 1e-9, "mttr_s": 1e-9, "power_w": 0.0}
        numbers = {"speed": 1e-12, "up_bytes_per_s": 1e-9, "down_bytes_per_s": 1e-9, "latency_s": 0.0, **optional}
        values: dict[str, Any] = {
            key: self._parse_number(key, self._table[key], at_least)
            for key, at_least in numbers.items()
            if key in self._table
        }
        if values.get("jitter", 0.0) > MAX_JITTER:
            raise ConfigError(
                f"{self._location}: jitter must be a number of 0 or more and at most {MAX_JITTER:g}, "
                f"got {self._table['jitter']!r}"
            )
        if (values.get("mtbf_s") is None) is not (values.get("mttr_s") is None):
            raise ConfigError(f"{self._location}: mtbf_s and mttr_s go together")
        if "memory_bytes" in self._table:
            values["memory_bytes"] = int(self._parse_number("memory_bytes", self._table["memory_bytes"], 0))
        traces = {
            "offline": 0.0,
            "throttling": 1e-9,
            "congestion": 1e-9,
            "delays": 0.0,
            "temperature_c": -273.0,
            "battery": 0.0,
            "mains": 0.0,
            "charging": 0.0,
            "metered": 0.0,
            "other_load": 0.0,
        }
        values |= {key: self._read_pairs(key, minimum) for key, minimum in traces.items() if key in self._table}
        values["offline"] = merge_absences(values.get("offline", ()))
        if "conditions" in self._table:
            values["conditions"] = from_mapping(
                Conditions, self._table["conditions"], f"{self._location}: {CONDITIONS_TABLE}"
            )
        return DeviceProfile(
            name=name,
            model=str(self._table.get("model", "")),
            iterations=self.read_iteration_costs(),
            accelerators=self._read_strings("accelerators"),
            groups=self._read_strings("groups"),
            sources=self._read_sources(),
            **values,
        )

    def read_iteration_costs(self) -> dict[str, IterationCost]:
        """Reads costs: constant seconds, or a table of `fixed_s` and `example_s`."""
        table = _require_table(self._table.get("iterations", {}), f"{self._location}.iterations")
        return {task: self._parse_cost(f"iterations.{task}", cost) for task, cost in table.items()}

    def _parse_cost(self, key: str, cost: object) -> IterationCost:
        if not isinstance(cost, Mapping):
            return IterationCost(fixed_s=self._parse_number(key, cost, 1e-12))
        names = ("fixed_s", "example_s")
        if set(cost) - {*names, "source"} or not any(cost.get(name) for name in names):
            raise ConfigError(f"{self._location}: {key} must be seconds, or fixed_s and example_s, got {dict(cost)}")
        numbers = {name: self._parse_number(f"{key}.{name}", cost[name], 0) for name in names if name in cost}
        return IterationCost(**numbers)

    def _parse_number(self, key: str, value: object, minimum: float) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value < float("inf"):
            limit = "of 0 or more" if minimum == 0 else ("above 0" if minimum > 0 else f"of at least {minimum:g}")
            raise ConfigError(f"{self._location}: {key} must be a number {limit}, got {value!r}")
        return float(value)

    def _read_pairs(self, key: str, minimum: float) -> tuple[tuple[float, float], ...]:
        return tuple(sorted(self._parse_pair(key, pair, minimum) for pair in self._read_list(key)))

    def _parse_pair(self, key: str, pair: object, minimum: float) -> tuple[float, float]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ConfigError(f"{self._location}: {key} must be a list of pairs such as [60, 2], got {pair!r}")
        start_s = self._parse_number(key, pair[0], 0.0)
        if key == "offline" and pair[1] == float("inf"):
            return start_s, float("inf")
        return start_s, self._parse_number(key, pair[1], start_s + 1e-9 if key == "offline" else minimum)

    def _read_strings(self, key: str) -> tuple[str, ...]:
        texts = self._read_list(key)
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"{self._location}: {key} must be a list of texts, got {texts!r}")
        return tuple(texts)

    def _read_list(self, key: str) -> list[Any]:
        value = self._table.get(key, [])
        if not isinstance(value, list):
            raise ConfigError(f"{self._location}: {key} must be a list, got {value!r}")
        return value

    def _read_sources(self) -> dict[str, str]:
        sources = _require_table(self._table.get("source", {}), f"{self._location}.source")
        for key, text in sources.items():
            if not isinstance(text, str) or text.partition(":")[0] not in SOURCE_KINDS:
                raise ConfigError(
                    f"{self._location}: source.{key} must begin with {', '.join(SOURCE_KINDS)}, got {text!r}"
                )
        return dict(sources)


def _require_table(value: object, location: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{location} must be a table, got {value!r}")
    return value


def _load_file(path: Path) -> ProfileCatalogue:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"profile file {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"profile file {path}: is not TOML: {error}") from None
    return _parse_file(text, path)


@lru_cache(maxsize=1)
def _parse_file(text: str, path: Path) -> ProfileCatalogue:
    """Returns the profiles of a text; a sweep checks every combination with the same file."""
    try:
        table = parse_toml(text, max_chars=MAX_PROFILE_CHARS)
    except ValueError as error:
        raise ConfigError(f"profile file {path}: is not TOML: {error}") from None
    return parse_catalogue(table, str(path))
