"""Conditions of training: the hours, power, heat, load and network in which a board may train, and its budgets.

They stand in the board's own file, and in a run file; both must hold. They are data, and `find_blocker` is a function
of them and of what is known of the board. A value that is not known holds for none of them.
"""

from __future__ import annotations

import heapq
import re
import zoneinfo
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import date, datetime, timedelta, tzinfo
from functools import lru_cache
from pathlib import PurePath
from typing import Any, Literal, cast

from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.safe_parsing import parse_toml
from edgefl.core.settings import BrokerSection, Faults, from_mapping, suggest_name

TABLE = "conditions"
WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
MAX_SPANS, MAX_INTERFACES = 24, 16
MAX_REASON_CHARS, MAX_RUN_CHARS = 200, 120
MAX_LINE_CHARS = 32
"""Of a GPIO line's name, as the kernel has it."""
CHARGING_STATES = frozenset({"Charging", "Full", "Not charging"})
"""Of a battery beside external power; `Not charging` is full enough."""
DOWN, UP, BASES = "down", "up", "bases"
DIRECTIONS = (DOWN, UP, BASES)
"""What `unmetered` may name: instructions with their models, updates, and files of bases and compiled tasks."""
NETWORK, DOWNLOAD = "network", "download"
"""Kinds of blockers by the network; `download` keeps new work from a board, but ends none."""
USE_KINDS = ("traffic", "processor", "energy", "written")
"""What budgets count: bytes, processor seconds, joules, and bytes."""
USE_UNITS: Mapping[str, tuple[float, str]] = {"traffic": (1e6, "MB"), "processor": (1.0, "processor seconds"),
                                              "energy": (1.0, "joules"), "written": (1e6, "MB written")}  # fmt: skip
"""Of each of them: the unit that people read, and its name."""
_SPAN = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)\s*-\s*(?:([01]?\d|2[0-3]):([0-5]\d)|(24):(00))", re.ASCII)
_INTERFACE = re.compile(r"[!-~]{1,15}", re.ASCII)
_SEARCH_DAYS, _SEARCH_STEP_S, _DAY_S = 9, 900, 86_400


class ConditionsEndedError(TaskError):
    """Work that was handed back: the board may not train now.

    Attributes:
        blocker: why, and until when.
    """

    def __init__(self, message: str, blocker: Blocker | None = None) -> None:
        super().__init__(message)
        self.blocker = blocker or Blocker(kind="file", reason=message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """`[conditions.day]` and `[conditions.month]`: what training may use in a day or month of the zone.

    Attributes:
        traffic_mb: megabytes of models, updates and bases, both ways.
        processor_s: processor seconds, of all cores together.
        energy_j: joules of the whole board while it works.
        written_mb: megabytes that the agent writes to the card, models and bases included.
    """

    traffic_mb: float | None = field(default=None, metadata={"at_least": 1, "at_most": 1e8})
    processor_s: float | None = field(default=None, metadata={"at_least": 1, "at_most": 1e9})
    energy_j: float | None = field(default=None, metadata={"at_least": 1, "at_most": 1e12})
    written_mb: float | None = field(default=None, metadata={"at_least": 1, "at_most": 1e8})

    @property
    def limits(self) -> dict[str, float]:
        """Returns the limits that are set, by `USE_KINDS`, in bytes, seconds and joules."""
        limits = {
            "traffic": None if self.traffic_mb is None else self.traffic_mb * 1e6,
            "processor": self.processor_s,
            "energy": self.energy_j,
            "written": None if self.written_mb is None else self.written_mb * 1e6,
        }
        return {kind: limit for kind, limit in limits.items() if limit is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch(BrokerSection):
    """`[conditions.switch]`: a switch that must be on: a topic of a broker, a file, or a GPIO line.

    Attributes:
        host: of the broker, which need not be the fleet's and speaks MQTT 5.
        topic: whose payload is the state, or TOPIC#/KEY/KEY for a value of a JSON object; kept messages count.
        file: absolute path of a file that holds the state, in place of a topic.
        gpio: CHIP:LINE in place of a topic: path of a GPIO character device, and the line's offset or name.
        bias: of the GPIO line.
        inverted: whether it may train while the switch is off.
    """

    host: str = ""
    topic: str = ""
    file: str = ""
    gpio: str = ""
    bias: Literal["as-is", "pull-up", "pull-down", "disabled"] = "as-is"
    inverted: bool = False

    @property
    def gpio_line(self) -> tuple[str, int | str]:
        """Returns the path of the chip, and the offset or name of its line."""
        chip, _, line = self.gpio.rpartition(":")
        return chip, int(line) if line.isdecimal() and len(line) <= MAX_LINE_CHARS else line

    def __post_init__(self) -> None:
        """Checks that it is one switch.

        Raises:
            ConfigError: it is a half of one, or two.
        """
        is_topic = bool(self.host and self.topic)
        if is_topic + bool(self.file) + bool(self.gpio) != 1 or (bool(self.host or self.topic) and not is_topic):
            raise ConfigError("conditions.switch must have host and topic, or a file, or gpio")
        of_broker = {"port": self.port, "login_file": self.login_file, "tls": self.tls, "ca_file": self.ca_file}
        usual = {item.name: item.default for item in fields(BrokerSection)}
        found = [name for name, value in of_broker.items() if value != usual[name]]
        if found and not is_topic:
            raise ConfigError(
                f"conditions.switch.{'file' if self.file else 'gpio'} has no broker, so leave out {', '.join(found)}"
            )
        if self.bias != "as-is" and not self.gpio:
            raise ConfigError("conditions.switch.bias is of a GPIO line, so leave it out")
        if self.file and not PurePath(self.file).is_absolute():
            raise ConfigError(f"conditions.switch.file must be an absolute path, got {self.file!r:.80}")
        chip, line = self.gpio_line
        if self.gpio and (not PurePath(chip).is_absolute() or not line or len(str(line)) > MAX_LINE_CHARS):
            raise ConfigError(
                "conditions.switch.gpio must be the path of a chip, a colon, and the offset or name of a line, "
                f"such as /dev/gpiochip0:17, got {self.gpio!r:.80}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConditions:
    """`[conditions]`: when boards may work for a run, beside what their owners allow; all that is set must hold.

    Attributes:
        zone: IANA name of the time zone of hours and days; each board's own at first.
        hours: spans of local time such as 22:00-06:00; any hour without one.
        weekdays: on which spans begin: mon to sun; any day without one.
        mains: the board is on external power.
        min_battery: it is on external power, or its battery is at least so full, in 0-1.
        charging: its battery is being charged, or is full.
        max_temperature_c: its processor is no hotter, in degrees Celsius.
        max_other_load: share of all its cores that other processes may keep, in 0-1.
        unmetered: its way to the internet is not metered, for all that travels; or only for those of `DIRECTIONS`
            that it names.
        interfaces: its way to the internet is one of these network interfaces.
    """

    zone: str = ""
    hours: tuple[str, ...] = ()
    weekdays: tuple[str, ...] = ()
    mains: bool = False
    min_battery: float | None = field(default=None, metadata={"at_least": 0, "at_most": 1})
    charging: bool = False
    max_temperature_c: float | None = field(default=None, metadata={"at_least": 20, "at_most": 110})
    max_other_load: float | None = field(default=None, metadata={"at_least": 0, "at_most": 1})
    unmetered: bool | tuple[str, ...] = False
    interfaces: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        faults = Faults()
        with faults:
            find_zone(self.zone)
        if len(self.hours) > MAX_SPANS:
            faults.messages.append(f"conditions.hours must be at most {MAX_SPANS} spans, got {len(self.hours)}")
        for span in self.hours[:MAX_SPANS]:
            with faults:
                parse_span(span)
        if len(self.weekdays) > len(WEEKDAYS):
            faults.messages.append(f"conditions.weekdays must be at most 7 days, got {len(self.weekdays)}")
        faults.messages += [
            f"conditions.weekdays must be of {', '.join(WEEKDAYS)}, got {name!r:.40}"
            f" ({suggest_name(name.lower()[:3], WEEKDAYS)})"
            for name in self.weekdays[: len(WEEKDAYS)]
            if name not in WEEKDAYS
        ]
        named = () if isinstance(self.unmetered, bool) else self.unmetered
        if not set(named) <= set(DIRECTIONS) or len(named) > len(DIRECTIONS):
            faults.messages.append(
                f"conditions.unmetered must be true, false or a list of {', '.join(DIRECTIONS)}, "
                f"got {list(named)!r:.80}"
            )
        if len(self.interfaces) > MAX_INTERFACES or not all(map(_INTERFACE.fullmatch, self.interfaces)):
            faults.messages.append(
                f"conditions.interfaces must be at most {MAX_INTERFACES} names of interfaces such as eth0, "
                f"got {list(self.interfaces)!r:.80}"
            )
        faults.check()

    @property
    def unmetered_directions(self) -> frozenset[str]:
        """Returns those of `DIRECTIONS` in which nothing goes over a metered connection."""
        if isinstance(self.unmetered, bool):
            return frozenset(DIRECTIONS if self.unmetered else ())
        return frozenset(self.unmetered)

    def to_json(self) -> dict[str, Any]:
        """Returns what is set, as it stands in a file."""
        values = {item.name: (getattr(self, item.name), item.default) for item in fields(self)}
        return {name: _to_plain(value) for name, (value, default) in values.items() if value != default}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions(RunConditions):
    """`[conditions]` of a board's own file, which has budgets, too.

    Attributes:
        yields: what trains has the lowest priority, so that other processes lose hardly anything to it.
        switch: that somebody has set to on.
        day: budgets of a day.
        month: budgets of a month.
    """

    yields: bool = False
    switch: Switch | None = None
    day: Budget = Budget()
    month: Budget = Budget()

    @property
    def budgets(self) -> dict[str, dict[str, float]]:
        """Returns the limits by period, `day` and `month`; those without one are missing."""
        return {name: limits for name, limits in (("day", self.day.limits), ("month", self.month.limits)) if limits}


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardFacts:
    """What conditions ask of a board; None where it is not known.

    `battery_status` is the kernel's word; `other_load` is the share of all cores, in 0-1; `interface` is that of the
    default route, empty without one; `switch_is_on` is what the owner's switch says.
    """

    on_mains: bool | None = None
    battery_fraction: float | None = None
    battery_status: str | None = None
    temperature_c: float | None = None
    other_load: float | None = None
    interface: str | None = None
    is_metered: bool | None = None
    switch_is_on: bool | None = None

    @property
    def has_external_power(self) -> bool | None:
        """Whether it is on external power; a board that knows of no supply and no battery is."""
        if self.on_mains is not None:
            return self.on_mains
        if self.battery_status is None:
            return True if self.battery_fraction is None else None
        return self.battery_status in CHARGING_STATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocker:
    """Why a board may not train now.

    Attributes:
        kind: hours, switch, power, heat, load, network, download, budget, pause or file.
        reason: one line.
        free_at_s: when it may next, in Unix seconds of its clock; None where that is not known.
        run: whose condition it is: that of this run; of the board's owner where it is empty.
    """

    kind: str
    reason: str
    free_at_s: float | None = None
    run: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns it as a heartbeat and a reply carry it."""
        return {name: value for name, value in asdict(self).items() if value not in {None, ""}}


def parse_conditions(text: str | bytes) -> Conditions:
    """Returns the conditions in a TOML text with the one table `[conditions]`.

    Raises:
        ConfigError: it is none; the message names every wrong setting.
    """
    try:
        tables = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"conditions cannot be read: {error}") from None
    for name in tables:
        if name != TABLE:
            raise ConfigError(
                f"unknown table {name!r:.60} ({suggest_name(name, [TABLE])}); a board has [{TABLE}] only"
            )
    if TABLE not in tables:
        raise ConfigError(f"there is no table [{TABLE}]")
    return from_mapping(Conditions, tables[TABLE], TABLE)


def parse_run_conditions(value: object) -> RunConditions:
    """Returns the conditions of a run, as an instruction has them, bounded; none for None.

    Raises:
        ConfigError: they are none; the message names every wrong setting.
    """
    return RunConditions() if value is None else from_mapping(RunConditions, cast("Any", value), TABLE)


def find_blocker(
    conditions: RunConditions, facts: BoardFacts, now_s: float, *, step_s: float = 0.0
) -> Blocker | None:
    """Returns why conditions do not hold, budgets aside; None where they do.

    Args:
        conditions: of the board or of a run.
        facts: of the board.
        now_s: Unix seconds.
        step_s: seconds of the next step, which must end within the hours.
    """
    if not is_open(conditions, now_s):
        return Blocker(kind="hours", reason="outside its hours", free_at_s=find_next_open_s(conditions, now_s))
    if step_s and not is_open(conditions, now_s + step_s):
        free_at_s = find_next_open_s(conditions, now_s + step_s)
        return Blocker(kind="hours", reason="its hours end", free_at_s=free_at_s)
    for kind, reason in _list_failures(conditions, facts):
        return Blocker(kind=kind, reason=reason)
    return None


def _list_failures(conditions: RunConditions, facts: BoardFacts) -> Iterator[tuple[str, str]]:
    """Yields kind and reason of each condition that does not hold."""
    power, battery = facts.has_external_power, facts.battery_fraction
    switch = conditions.switch if isinstance(conditions, Conditions) else None
    if switch is not None and facts.switch_is_on is not (not switch.inverted):
        state = {True: "on", False: "off", None: "not known"}[facts.switch_is_on]
        yield "switch", f"its switch is {state}"
    if conditions.mains and not power:
        yield "power", "it is not on external power"
    if conditions.charging and not (power if facts.battery_status is None else _is_charging(facts)):
        yield "power", "its battery is not being charged"
    least = conditions.min_battery
    if least is not None and not power and (battery is None or battery < least):
        yield "power", f"its battery is at {_format(battery, '.0%')}, it trains from {least:.0%} on"
    hottest = conditions.max_temperature_c
    if hottest is not None and (facts.temperature_c is None or facts.temperature_c > hottest):
        yield "heat", f"it is at {_format(facts.temperature_c, '.0f')} °C, it trains up to {hottest:g} °C"
    most = conditions.max_other_load
    if most is not None and (facts.other_load is None or facts.other_load > most):
        yield "load", f"other processes keep {_format(facts.other_load, '.0%')} of it, it trains up to {most:.0%}"
    if conditions.interfaces and facts.interface not in conditions.interfaces:
        yield (
            NETWORK,
            f"it is connected by {facts.interface or 'nothing'}, not by {', '.join(conditions.interfaces)}",
        )
    directions = conditions.unmetered_directions
    if facts.is_metered is not False and not directions.isdisjoint({UP, DOWN}):
        reason = "its connection is metered" if facts.is_metered else "it is not known to be unmetered"
        yield NETWORK if UP in directions else DOWNLOAD, reason


def _is_charging(facts: BoardFacts) -> bool:
    return facts.battery_status in CHARGING_STATES


def _format(value: float | None, spec: str) -> str:
    return "an unknown value" if value is None else format(value, spec)


def find_zone(name: str) -> tzinfo | None:
    """Returns a zone by its IANA name; None, the machine's own, for an empty one.

    Raises:
        ConfigError: there is no such zone here.
    """
    if not name:
        return None
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):  # OSError: such as a folder of zones
        known = zoneinfo.available_timezones()
        hint = suggest_name(name, known) if known else "this machine has no zones; install tzdata"
        hint = hint if len(hint) <= MAX_REASON_CHARS else "such as Europe/Oslo"
        raise ConfigError(f"conditions.zone must be an IANA time zone, got {name!r:.60} ({hint})") from None


@lru_cache(maxsize=64)
def parse_span(text: str) -> tuple[int, int]:
    """Returns start and end of a span such as 22:00-06:00, in seconds of the day; it may pass midnight.

    Raises:
        ConfigError: it is none, or empty.
    """
    match = _SPAN.fullmatch(text.strip()) if len(text) <= MAX_REASON_CHARS else None
    if match is None:
        raise ConfigError(f"conditions.hours must be spans such as '22:00-06:00', got {text!r:.40}")
    hour, minute, end_hour, end_minute = (int(group) for group in match.groups() if group is not None)
    start_s, end_s = hour * 3600 + minute * 60, end_hour * 3600 + end_minute * 60
    if start_s == end_s:
        raise ConfigError(f"conditions.hours: {text!r:.40} is an empty span; 00:00-24:00 is a whole day")
    return start_s, end_s


def is_open(conditions: RunConditions, now_s: float) -> bool:
    """Returns whether the local time is within the hours and weekdays.

    A span that passes midnight belongs to the day on which it begins. An hour that a change of the clock repeats
    counts twice, one that it leaves out not at all.
    """
    if not conditions.hours and not conditions.weekdays:
        return True
    local = datetime.fromtimestamp(now_s, find_zone(conditions.zone))
    second, today = local.hour * 3600 + local.minute * 60 + local.second, local.weekday()
    for start_s, end_s in map(parse_span, conditions.hours or ("00:00-24:00",)):
        if start_s < end_s:
            is_within = start_s <= second < end_s and _is_allowed(conditions, today)
        else:
            begins_today, began_yesterday = second >= start_s, second < end_s
            is_within = (begins_today and _is_allowed(conditions, today)) or (
                began_yesterday and _is_allowed(conditions, today - 1)
            )
        if is_within:
            return True
    return False


def _is_allowed(conditions: RunConditions, weekday: int) -> bool:
    return not conditions.weekdays or WEEKDAYS[weekday % 7] in conditions.weekdays


def find_next_open_s(conditions: RunConditions, now_s: float) -> float | None:
    """Returns when hours and weekdays next hold, in Unix seconds; None where they never do, as far as nine days."""
    return next((moment for moment in _list_moments(conditions, now_s, 0) if is_open(conditions, moment)), None)


def find_close_s(conditions: RunConditions, now_s: float) -> float | None:
    """Returns when hours and weekdays that hold now end, in Unix seconds; None where they do not, in nine days."""
    if not conditions.hours and not conditions.weekdays:
        return None
    return next((moment for moment in _list_moments(conditions, now_s, 1) if not is_open(conditions, moment)), None)


def _list_moments(conditions: RunConditions, now_s: float, side: int) -> Iterator[float]:
    """Yields, in order, the moments after `now_s` at which hours may begin (`side` 0) or end (1)."""
    zone = find_zone(conditions.zone)
    today = datetime.fromtimestamp(now_s, zone).date()
    seconds = [parse_span(span)[side] for span in conditions.hours or ("00:00-24:00",)]
    days = [today + timedelta(days=number) for number in range(_SEARCH_DAYS)]
    candidates = sorted(_to_instant(day, second, zone, fold) for day in days for second in seconds for fold in (0, 1))
    # Clocks change at a quarter of an hour: a span whose start is left out begins with the change.
    first = int(now_s // _SEARCH_STEP_S + 1) * _SEARCH_STEP_S
    changes = (float(first + step) for step in range(0, _SEARCH_DAYS * _DAY_S, _SEARCH_STEP_S))
    return (moment for moment in heapq.merge(candidates, changes) if moment > now_s)


def _to_instant(day: date, second: int, zone: tzinfo | None, fold: int) -> float:
    day, second = day + timedelta(days=second // _DAY_S), second % _DAY_S
    local = datetime(day.year, day.month, day.day, tzinfo=zone, fold=fold)
    return local.replace(hour=second // 3600, minute=second % 3600 // 60).timestamp()


def find_period(name: str, moment_s: float, zone: tzinfo | None) -> str:
    """Returns the day (2026-11-28) or month (2026-11) of a moment: texts that sort by time."""
    local = datetime.fromtimestamp(moment_s, zone)
    return f"{local:%Y-%m-%d}" if name == "day" else f"{local:%Y-%m}"


def find_period_end_s(name: str, moment_s: float, zone: tzinfo | None) -> float:
    """Returns the end of the day or month of a moment, in Unix seconds."""
    today = datetime.fromtimestamp(moment_s, zone).date()
    if name == "day":
        return _to_instant(today + timedelta(days=1), 0, zone, 0)
    return _to_instant((today.replace(day=1) + timedelta(days=32)).replace(day=1), 0, zone, 0)


def parse_blocker(value: object) -> Blocker | None:
    """Returns the blocker that another machine reports, bounded; None where it reports none that makes sense."""
    if not isinstance(value, Mapping) or not isinstance(value.get("reason"), str):
        return None
    free_at_s, run = value.get("free_at_s"), value.get("run", "")
    is_time = isinstance(free_at_s, int | float) and not isinstance(free_at_s, bool) and 0 <= free_at_s < 1e11
    return Blocker(
        kind=str(value.get("kind"))[:20],
        reason=_to_line(value["reason"], MAX_REASON_CHARS),
        free_at_s=float(free_at_s) if is_time and isinstance(free_at_s, int | float) else None,
        run=_to_line(run, MAX_RUN_CHARS) if isinstance(run, str) else "",
    )


def format_blocker(blocker: Blocker) -> str:
    """Returns a blocker in one line, with the run whose condition it is, and the time in UTC."""
    reason = f"by run {blocker.run}: {blocker.reason}" if blocker.run else blocker.reason
    if blocker.free_at_s is None:
        return reason
    moment = datetime.fromtimestamp(blocker.free_at_s, zoneinfo.ZoneInfo("UTC"))
    return f"{reason}, free at {moment:%Y-%m-%d %H:%M} UTC"


def _to_line(text: str, at_most: int) -> str:
    return "".join(character for character in text if character.isprintable())[:at_most]


def _to_plain(value: Any) -> Any:
    if is_dataclass(value):
        parts = {item.name: (getattr(value, item.name), item.default) for item in fields(value)}
        return {name: part for name, (part, default) in parts.items() if part != default}
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


NO_CONDITIONS = Conditions()
