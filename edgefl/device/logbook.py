"""The device's own log: JSON lines in its state directory, bounded, each with the run and the assignment it is about.

The coordinator asks for pages of it, also while the board trains. What gives a right to somebody who reads it (join
tokens, access tokens, keys) is crossed out before it is written.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from edgefl.errors import UsageError
from edgefl.types import Json
from edgefl.untrusted import parse_json

MAX_FILE_BYTES = 512 * 1024
KEPT_FILES = 3
"""So many older files are kept beside the newest."""
MAX_MESSAGE_CHARS = 4000
PAGE_BYTES = 48 * 1024
"""What one page holds at the most, so that it fits into a message."""
FILE_NAME = "agent.jsonl"

_SECRETS = (
    re.compile(r"efl1\.[A-Za-z0-9_-]+"),
    re.compile(r"(?i)(?<=bearer )\S+"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"""(?i)(?<=secret)(["']?\s*[=:]\s*["']?)[^\s"',}]+"""),
)
CROSSED_OUT = "[crossed out]"

Now = Callable[[], tuple[str, str] | None]
"""Returns the run and the assignment that are being worked on."""


class Logbook(logging.Handler):
    """Writes the log of this process; numbers of lines grow over restarts too.

    Args:
        folder: where the files lie; made when it is missing.
        now: what the device is at.
        clock: Unix seconds, the coordinator's as well as this board knows them.
    """

    def __init__(self, folder: Path, *, now: Now = lambda: None, clock: Callable[[], float] = time.time) -> None:
        super().__init__()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path, self._now, self._clock = folder / FILE_NAME, now, clock
        self._numbers = itertools.count(1 + max((int(line["n"]) for line in read_lines(folder)), default=0))
        self._file = RotatingFileHandler(
            self._path, maxBytes=MAX_FILE_BYTES, backupCount=KEPT_FILES, encoding="utf-8", delay=True
        )
        self._file.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one line; a card without room does not stop the work."""
        try:
            at = self._now()
            line: Json = {
                "n": next(self._numbers),
                "at": round(self._clock(), 3),
                "level": record.levelname,
                "logger": record.name,
                "message": without_secrets(self._text(record))[:MAX_MESSAGE_CHARS],
                **({"run": at[0], "assignment": at[1]} if at else {}),
            }
            self._file.emit(logging.makeLogRecord({"msg": json.dumps(line, ensure_ascii=False)}))
        except (OSError, TypeError, ValueError, KeyError):  # a line that cannot be made must not end what logs it
            self.handleError(record)

    def _text(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
        return text

    def close(self) -> None:
        self._file.close()
        super().close()


def without_secrets(text: str) -> str:
    """Returns the text with what gives a right crossed out."""
    for pattern in _SECRETS:
        kept = r"\g<1>" if pattern.groups else ""
        text = pattern.sub(kept + CROSSED_OUT, text)
    return text


def page(folder: Path, wanted: Mapping[str, Any]) -> Json:
    """Returns the next lines of a device's log, oldest first, and whether there are more behind them.

    Args:
        folder: where the files lie.
        wanted: `after`, the number of the last line that is known; `run`; `since`, unix seconds. All may be missing.

    Raises:
        UsageError: one of them makes no sense.
    """
    after, since, run = _number(wanted, "after"), _number(wanted, "since"), wanted.get("run")
    lines: list[Json] = []
    size = 0
    for line in read_lines(folder):
        if line["n"] <= after or line.get("at", 0.0) < since or (run is not None and line.get("run") != run):
            continue
        size += len(json.dumps(line).encode()) + 1
        if size > PAGE_BYTES:
            return {"lines": lines, "has_more": True}
        lines.append(line)
    return {"lines": lines, "has_more": False}


def read_lines(folder: Path) -> Iterator[Json]:
    """Yields the lines of the files, oldest first; one that is torn is left out."""
    path = folder / FILE_NAME
    files = [*(path.with_name(f"{FILE_NAME}.{number}") for number in range(KEPT_FILES, 0, -1)), path]
    for file in files:
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for row in text.splitlines():
            try:
                line = parse_json(row)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("n"), int) and _is_time(line.get("at", 0.0)):
                yield line


def _is_time(value: object) -> bool:
    return isinstance(value, int | float)


def _number(wanted: Mapping[str, Any], name: str) -> float:
    value = wanted.get(name)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name} must be a number, got {value!r}")
    return value
