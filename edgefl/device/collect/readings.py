"""Readings of sensors: the protocol of sources, and values out of payloads.

Payloads are of strangers: a value is a finite number that a float32 holds, a short text of visible characters, or
missing. Everything else is refused with a `ValueError`, which a source counts.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from edgefl.core.safe_parsing import parse_message
from edgefl.core.safe_text import is_safe_text
from edgefl.system.retries import RateLimitedLog

log = logging.getLogger(__name__)

MAX_TEXT_CHARS = 64
MAX_UNREAD = 10_000
MAX_NUMBER = 3.4e38
"""Tasks read columns as float32."""
MISSING_TEXTS = frozenset({"", "-", "n/a", "na", "nan", "none", "null", "unavailable", "unknown"})
SWITCH_TEXTS = {"on": 1.0, "true": 1.0, "off": 0.0, "false": 0.0}

Value = float | str | None
"""Of a column; None where the sensor says that it has none."""
Counts = Counter[str]
"""What was refused or lost, by source and reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Values of some columns at one time, in seconds since 1970."""

    values: Mapping[str, Value]
    time_s: float


class UnreadReadings:
    """Readings that the collector has not read yet: of more than `MAX_UNREAD` the newest, and the others are counted.

    A source's thread adds to them while the collector takes them.

    Args:
        name: of the source.
        counts: to which `NAME.unread` is added.
    """

    def __init__(self, name: str, counts: Counts) -> None:
        self._name, self._counts = name, counts
        self._readings: deque[Reading] = deque(maxlen=MAX_UNREAD)

    def add(self, reading: Reading) -> None:
        if len(self._readings) == MAX_UNREAD:
            self._counts[f"{self._name}.unread"] += 1
        self._readings.append(reading)

    def take(self) -> list[Reading]:
        """Returns what came since the last call."""
        return [self._readings.popleft() for _ in range(len(self._readings))]


class SourceThread(ABC):
    """Thread of a source, which `start` begins and `close` ends.

    Attributes:
        join_timeout_s: how long `close` waits for it; one that takes longer ends with the process.
    """

    join_timeout_s: ClassVar[float] = 2.0

    def __init__(self, name: str) -> None:
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"source {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(self.join_timeout_s)

    @abstractmethod
    def _run(self) -> None:
        """Reads until `_stopping` is set."""


class Source(Protocol):
    """Source of readings; one of another author inherits from this class.

    Its constructor takes the keys of its table as keywords.

    Attributes:
        columns: names of all columns that it has values of.
    """

    columns: Sequence[str] = ()

    def read(self) -> Iterable[Mapping[str, object]]:
        """Returns what is new since the last call, oldest first, by column; does not wait."""
        ...

    def close(self) -> None:
        """Ends what the source has opened."""


class ReadingSource(Protocol):
    """Source as the collector uses it."""

    @property
    def columns(self) -> Sequence[str]: ...

    def read(self) -> Sequence[Reading]:
        """Returns what is new since the last call; does not wait."""
        ...

    def close(self) -> None: ...


def read_source(name: str, source: ReadingSource, counts: Counts, limited: RateLimitedLog) -> list[Reading]:
    """Returns what is new of a source; nothing, which is counted and logged, where it fails."""
    try:
        return list(source.read())
    except Exception as error:  # a source of another author may raise anything, and the others go on
        counts[f"{name}.errors"] += 1
        if limited.is_due(f"error {name}"):
            log.warning("source %s failed and is asked again: %s", name, error, exc_info=True)
        return []


@runtime_checkable
class ResumableSource(Protocol):
    """Source that goes on where it was: `position` covers all that `read` has returned."""

    @property
    def position(self) -> str: ...

    @property
    def end_s(self) -> float:
        """Time up to which all was read: of the last reading where there is more, else infinite."""
        ...

    def resume(self, position: str) -> None: ...


def parse_payload(payload: bytes) -> object:
    """Returns the value of a JSON payload, or a payload of plain text as text.

    Raises:
        ValueError: neither, or a text of more than `MAX_TEXT_CHARS`.
    """
    try:
        return parse_message(payload)
    except ValueError:
        text = payload.decode()
    if len(text) > MAX_TEXT_CHARS:
        raise ValueError(f"it is no JSON, and a text of {len(text)} characters, at most are {MAX_TEXT_CHARS}")
    return text


def parse_pointer(text: str) -> tuple[str, ...]:
    """Returns the keys of a JSON pointer (RFC 6901) such as `#/ENERGY/Power`; none for an empty one.

    Raises:
        ValueError: it does not begin with a slash.
    """
    text = text.removeprefix("#")
    if not text:
        return ()
    if not text.startswith("/"):
        raise ValueError(f"a JSON pointer begins with a slash, got {text!r:.80}")
    return tuple(key.replace("~1", "/").replace("~0", "~") for key in text[1:].split("/"))


def find_value(document: object, pointer: Sequence[str]) -> object:
    """Returns the value that a pointer leads to.

    Raises:
        KeyError: this document does not have it, as in a message about something else.
    """
    for key in pointer:
        if isinstance(document, dict) and key in document:
            document = document[key]
        elif isinstance(document, list) and key.isascii() and key.isdecimal() and len(key) < 9:
            if int(key) >= len(document):
                raise KeyError(key)
            document = document[int(key)]
        else:
            raise KeyError(key)
    return document


def parse_value(value: object, *, is_text: bool) -> Value:
    """Returns a value of a column; switches (on, off, true, false) are 1 and 0 in one of numbers.

    Raises:
        ValueError: it is none.
    """
    if value is None or (isinstance(value, str) and value.strip().lower() in MISSING_TEXTS):
        return None
    if isinstance(value, bool):
        return str(value).lower() if is_text else float(value)
    if not isinstance(value, str | int | float) or (isinstance(value, str) and len(value) > MAX_TEXT_CHARS):
        raise ValueError(f"a value is a number or a text of at most {MAX_TEXT_CHARS} characters")
    if is_text:
        text = str(value).strip()
        if not is_safe_text(text):
            raise ValueError("a text has characters that are not visible")
        return text
    return _parse_number(value)


def parse_message_values(
    paths: Sequence[tuple[str, tuple[str, ...]]], payload: bytes, texts: set[str]
) -> tuple[dict[str, Value], int]:
    """Returns the values of columns in a message, without those that it does not have, and how many were refused."""
    values, num_refused = dict[str, Value](), 0
    try:
        document = parse_payload(payload)
    except ValueError:
        return values, 1
    for column, pointer in paths:
        try:
            values[column] = parse_value(find_value(document, pointer), is_text=column in texts)
        except KeyError:
            if isinstance(document, dict | list):
                continue  # a message about something else
            if str(document).strip().lower() in MISSING_TEXTS:
                values[column] = None
            else:
                num_refused += 1  # such as half a JSON object, which is a text
        except ValueError:
            num_refused += 1
    return values, num_refused


def _parse_number(value: str | float) -> float:
    text = value.strip().lower() if isinstance(value, str) else ""
    try:
        number = SWITCH_TEXTS[text] if text in SWITCH_TEXTS else float(value)
    except (ValueError, OverflowError):
        # No value goes into the log.
        raise ValueError("it is no number") from None
    if not abs(number) <= MAX_NUMBER:
        raise ValueError("a number must be finite, and no larger than a float32 holds")
    return number
