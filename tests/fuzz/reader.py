"""What a fuzzed reader is: a function that is fed bytes, valid ones to begin with, and what it may do to them."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any, Self

from edgefl.core.errors import EdgeflError

MIB = 1 << 20
MEASURED_EVERY = 512
"""Measuring memory takes longer than most readers do, and CPython 3.11 keeps up to 30 kB of the places that it has
measured, each time. So an input is measured once, and one that makes the process larger is measured as well."""
GROWN_BYTES = MIB
HANGS_AFTER_S = 10.0
HANG_TICKS = 10
"""A hang is noticed by so many ticks of a timer, of which a process that is stopped for a while misses most."""
MOST_INPUT_BYTES = 1 << 20


def as_it_is(content: bytes) -> bytes:
    return content


class Form(StrEnum):
    """How content is taken apart to be changed."""

    BYTES = "bytes"
    JSON = "json"
    TOML = "toml"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """Valid content; `close` makes of changed content what gets behind the checksums and lengths around it."""

    content: bytes
    form: Form = Form.BYTES
    close: Callable[[bytes], bytes] = as_it_is


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One way in.

    Attributes:
        feed: reads bytes; may raise what is in `refuses` and nothing else.
        seeds: each is read without a complaint, unless `takes_seeds` is false.
        is_guided: else it is fed blindly, whatever the run asks for.
        most_bytes: of memory that Python and NumPy may take for one input; what the input itself has is not counted.
        most_s: of processor time for one input.
        close: ends what was opened to feed.
    """

    feed: Callable[[bytes], object]
    seeds: tuple[Seed, ...]
    words: tuple[bytes, ...] = ()
    refuses: tuple[type[BaseException], ...] = (EdgeflError,)
    most_bytes: int = 8 * MIB
    most_s: float = 2.0
    takes_seeds: bool = True
    is_guided: bool = True
    close: Callable[[], object] = lambda: None


class TooSlowError(Exception):
    """One input took more processor time than its reader may take."""


class TooLargeError(Exception):
    """One input took more memory than its reader may take."""


class HangError(BaseException):
    """One input was given up after `HANGS_AFTER_S`."""


@dataclass(slots=True)
class Finding:
    """What a reader did that it must not do, with the first input that made it."""

    what: str
    where: str
    content: bytes
    count: int = 1

    @classmethod
    def of(cls, error: BaseException, content: bytes) -> Self:
        return cls(f"{type(error).__name__}: {error}"[:300], _place_of(error), content)


@dataclass(slots=True)
class Trial:
    """Feeds one reader and keeps count; inputs that made the same error at the same place are one finding."""

    reader: Reader
    num_cases: int = 0
    num_read: int = 0
    most_measured_bytes: int = 0
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)
    measured: set[int] = field(default_factory=set)
    ticks: int = 0

    @contextmanager
    def alarmed(self) -> Iterator[None]:
        """Makes an input that never ends raise `HangError` in its reader."""

        def ring(_number: int, _frame: FrameType | None) -> None:
            self.ticks += 1
            if self.ticks >= HANG_TICKS:
                raise HangError(f"not done after {HANGS_AFTER_S:g} s")

        former: Any = signal.signal(signal.SIGALRM, ring)
        try:
            yield
        finally:
            signal.signal(signal.SIGALRM, former)

    def run(self, content: bytes) -> None:
        """Feeds one input. Which inputs are measured follows from the input, so that a finding comes again."""
        self.num_cases += 1
        try:
            self._feed(content)
            self.num_read += 1
        except self.reader.refuses:
            pass
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 whatever it is, it is the finding; some parsers panic
            found = Finding.of(error, content)
            key = found.what.partition(":")[0], found.where
            if key in self.findings:
                self.findings[key].count += 1
            else:
                self.findings[key] = found

    def _feed(self, content: bytes) -> None:
        self.ticks = 0
        signal.setitimer(signal.ITIMER_REAL, HANGS_AFTER_S / HANG_TICKS, HANGS_AFTER_S / HANG_TICKS)
        started_s = time.process_time()
        try:
            checksum = zlib.crc32(content)
            if checksum % MEASURED_EVERY or checksum in self.measured:
                self._watched(content)
            else:
                self.measured.add(checksum)
                self._measured(content)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        took_s = time.process_time() - started_s
        if took_s > self.reader.most_s:
            raise TooSlowError(f"{took_s:.1f} s of processor time, at most {self.reader.most_s:g}")

    def _watched(self, content: bytes) -> None:
        """Feeds an input, and once more to measure it if it made the process larger than it ever was."""
        before = peak_bytes()
        try:
            self.reader.feed(content)
        finally:
            if peak_bytes() - before >= GROWN_BYTES:
                self._measured(content)

    def _measured(self, content: bytes) -> None:
        tracemalloc.start()
        try:
            self.reader.feed(content)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            self.most_measured_bytes = max(self.most_measured_bytes, peak)
            if peak > self.reader.most_bytes:  # also of an input that was refused
                raise TooLargeError(f"{peak} bytes of memory, at most {self.reader.most_bytes}")


def peak_bytes() -> int:
    """Returns how much of this process has been resident at once."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def scratch() -> Path | None:
    """Returns where files cost no disk; None where there is no such place."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else None


def _place_of(error: BaseException) -> str:
    """The innermost line of edgefl that the error came through, else of anything."""
    lines, trace = [], error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        lines.append((code.co_filename, f"{Path(code.co_filename).name}:{trace.tb_lineno} {code.co_name}"))
        trace = trace.tb_next
    ours = [place for file, place in lines if "/edgefl/" in file and "/tests/" not in file]
    return (ours or [place for _, place in lines] or ["nowhere"])[-1]
