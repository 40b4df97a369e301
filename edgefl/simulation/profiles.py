"""What kinds of board there are: how fast they compute and talk, what they have, and when they are away.

`profiles.toml` has those that ship; `edgefl device probe --profile FILE` writes one of a real board.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from edgefl.errors import ConfigError
from edgefl.simulation.traces import Absences, Steps, merged
from edgefl.untrusted import parse_toml

BUILT_IN_FILE = "profiles.toml"
SOURCES = ("measured", "vendor", "estimated")
MAX_JITTER = 2.0
"""As of `simulation.jitter`: the times of iterations would be too large for numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationCost:
    """Seconds of one iteration: `fixed_s` and, for each example of the batch, `example_s`."""

    fixed_s: float = 0.0
    example_s: float = 0.0

    def seconds(self, batch_size: int) -> float:
        return self.fixed_s + batch_size * self.example_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One kind of board.

    Attributes:
        name: what it is called on the command line.
        model: what it is.
        speed: how fast it trains, the reference machine being 1.
        iterations: what an iteration costs, by task or by `task/model`; goes before what `speed` says.
        jitter: deviation of the logarithm of an iteration's time; None leaves it to the run.
        up_bytes_per_s, down_bytes_per_s: its own link.
        latency_s: what a message takes besides its bytes, either way.
        memory_bytes: what training may use.
        accelerators: kinds, such as cuda.
        groups: as in the run file's `devices.groups`.
        offline: when it is away: (from second, to second).
        mtbf_s, mttr_s: mean seconds until it fails and until it is back, both exponential; None: it does not fail.
        throttling: (from second, factor): iterations take so many times longer from then on.
        congestion: likewise for transfers.
        delays: (from second, seconds): every message takes so much longer from then on.
        temperature_c, battery: (from second, value): what its heartbeats would say.
        sources: by field, where a number is from: measured, vendor or estimated, and how.
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
    throttling: Steps = ()
    congestion: Steps = ()
    delays: Steps = ()
    temperature_c: Steps = ()
    battery: Steps = ()
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Profiles by name, and what an iteration costs on the reference machine, by task or `task/model`."""

    profiles: Mapping[str, Profile]
    reference: Mapping[str, IterationCost]

    def named(self, name: str) -> Profile:
        """Returns one profile.

        Raises:
            ConfigError: there is none of this name.
        """
        if name not in self.profiles:
            close = get_close_matches(name, self.profiles, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(self.profiles)}"
            raise ConfigError(f"no profile {name!r}: {hint}")
        return self.profiles[name]

    def fleet(self, specs: Sequence[str], num_devices: int) -> list[Profile]:
        """Returns so many profiles: `NAME` or `NAME:COUNT` each, given round and round.

        Raises:
            ConfigError: a name is unknown, or a count is no number above 0.
        """
        if not specs:
            raise ConfigError("simulation.profiles must name at least one profile")
        pack = [profile for spec in specs for profile in self._counted(spec, num_devices)]
        return list(islice(cycle(pack), num_devices))

    def _counted(self, spec: str, at_most: int) -> list[Profile]:
        name, mark, count = spec.partition(":")
        if mark and not (count.isdecimal() and int(count) > 0):
            raise ConfigError(f"a profile is NAME or NAME:COUNT with a count above 0, got {spec!r}")
        return [self.named(name)] * (min(int(count), at_most) if mark else 1)


def load_catalogue(paths: Sequence[str | Path] = ()) -> Catalogue:
    """Returns the built-in profiles and those of the files; a later one of the same name replaces the earlier.

    Raises:
        ConfigError: a file is missing, no TOML, or holds what makes no sense.
    """
    catalogue = _built_in()
    for path in paths:
        more = parse_catalogue(_table_of(Path(path)), str(path))
        profiles, reference = {**catalogue.profiles, **more.profiles}, {**catalogue.reference, **more.reference}
        catalogue = Catalogue(profiles=profiles, reference=reference)
    return catalogue


@cache
def _built_in() -> Catalogue:
    text = (files("edgefl.simulation") / BUILT_IN_FILE).read_text(encoding="utf-8")
    return parse_catalogue(parse_toml(text), BUILT_IN_FILE)


def profile_names(path: str | Path) -> list[str]:
    """Returns the names of the profiles in a file; raises as `load_catalogue`."""
    return list(parse_catalogue(_table_of(Path(path)), str(path)).profiles)


def parse_catalogue(table: Mapping[str, Any], where: str) -> Catalogue:
    """Returns what a profile file's tables say.

    Raises:
        ConfigError: something makes no sense; the text names the place and the key.
    """
    if unknown := set(table) - {"profile", "reference", "v"}:
        raise ConfigError(f"{where}: unknown table [{min(unknown)}]; a profile is [profile.NAME]")
    profiles = _checked_table(table.get("profile", {}), f"{where}: profile")
    reference = _checked_table(table.get("reference", {}), f"{where}: reference")
    return Catalogue(
        profiles={name: _Fields(entry, f"{where}: profile.{name}").profile(name) for name, entry in profiles.items()},
        reference=_Fields({"iterations": reference}, f"{where}: reference").iterations() if reference else {},
    )


class _Fields:
    """One table of a profile file, taken apart field by field."""

    def __init__(self, table: object, where: str) -> None:
        self._table, self._where = _checked_table(table, where), where

    def profile(self, name: str) -> Profile:
        known = set(Profile.__dataclass_fields__) - {"name", "sources"} | {"source"}
        if unknown := sorted(set(self._table) - known):
            close = get_close_matches(unknown[0], known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
            raise ConfigError(f"{self._where}: unknown key {unknown[0]!r}: {hint}")
        optional = {"jitter": 0.0, "mtbf_s": 1e-9, "mttr_s": 1e-9}
        numbers = {"speed": 1e-12, "up_bytes_per_s": 1e-9, "down_bytes_per_s": 1e-9, "latency_s": 0.0, **optional}
        values: dict[str, Any] = {
            key: self._number(key, self._table[key], at_least)
            for key, at_least in numbers.items()
            if key in self._table
        }
        if values.get("jitter", 0.0) > MAX_JITTER:
            raise ConfigError(
                f"{self._where}: jitter must be a number of 0 or more and at most {MAX_JITTER:g}, "
                f"got {self._table['jitter']!r}"
            )
        if (values.get("mtbf_s") is None) is not (values.get("mttr_s") is None):
            raise ConfigError(f"{self._where}: mtbf_s and mttr_s go together")
        if "memory_bytes" in self._table:
            values["memory_bytes"] = int(self._number("memory_bytes", self._table["memory_bytes"], 0))
        traces = {
            "offline": 0.0,
            "throttling": 1e-9,
            "congestion": 1e-9,
            "delays": 0.0,
            "temperature_c": -273.0,
            "battery": 0.0,
        }
        values |= {key: self._pairs(key, least) for key, least in traces.items() if key in self._table}
        values["offline"] = merged(values.get("offline", ()))
        return Profile(
            name=name,
            model=str(self._table.get("model", "")),
            iterations=self.iterations(),
            accelerators=self._texts("accelerators"),
            groups=self._texts("groups"),
            sources=self._sources(),
            **values,
        )

    def iterations(self) -> dict[str, IterationCost]:
        """Reads costs: a number of seconds whatever the batch, or a table of `fixed_s` and `example_s`."""
        table = _checked_table(self._table.get("iterations", {}), f"{self._where}.iterations")
        return {task: self._cost(f"iterations.{task}", cost) for task, cost in table.items()}

    def _cost(self, key: str, cost: object) -> IterationCost:
        if not isinstance(cost, Mapping):
            return IterationCost(fixed_s=self._number(key, cost, 1e-12))
        names = ("fixed_s", "example_s")
        if set(cost) - {*names, "source"} or not any(cost.get(name) for name in names):
            raise ConfigError(f"{self._where}: {key} must be seconds, or fixed_s and example_s, got {dict(cost)}")
        numbers = {name: self._number(f"{key}.{name}", cost[name], 0) for name in names if name in cost}
        return IterationCost(**numbers)

    def _number(self, key: str, value: object, at_least: float) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not at_least <= value < float("inf"):
            limit = "of 0 or more" if at_least == 0 else ("above 0" if at_least > 0 else f"of at least {at_least:g}")
            raise ConfigError(f"{self._where}: {key} must be a number {limit}, got {value!r}")
        return float(value)

    def _pairs(self, key: str, at_least: float) -> tuple[tuple[float, float], ...]:
        return tuple(sorted(self._pair(key, pair, at_least) for pair in self._list(key)))

    def _pair(self, key: str, pair: object, at_least: float) -> tuple[float, float]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ConfigError(f"{self._where}: {key} must be a list of pairs such as [60, 2], got {pair!r}")
        start_s = self._number(key, pair[0], 0.0)
        if key == "offline" and pair[1] == float("inf"):
            return start_s, float("inf")
        return start_s, self._number(key, pair[1], start_s + 1e-9 if key == "offline" else at_least)

    def _texts(self, key: str) -> tuple[str, ...]:
        texts = self._list(key)
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"{self._where}: {key} must be a list of texts, got {texts!r}")
        return tuple(texts)

    def _list(self, key: str) -> list[Any]:
        value = self._table.get(key, [])
        if not isinstance(value, list):
            raise ConfigError(f"{self._where}: {key} must be a list, got {value!r}")
        return value

    def _sources(self) -> dict[str, str]:
        sources = _checked_table(self._table.get("source", {}), f"{self._where}.source")
        for key, text in sources.items():
            if not isinstance(text, str) or text.partition(":")[0] not in SOURCES:
                raise ConfigError(f"{self._where}: source.{key} must begin with {', '.join(SOURCES)}, got {text!r}")
        return dict(sources)


def _checked_table(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be a table, got {value!r}")
    return value


def _table_of(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"profile file {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"profile file {path}: is not TOML: {error}") from None
