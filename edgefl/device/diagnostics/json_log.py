"""Device log: bounded JSON lines in the state directory, with run and assignment.

The coordinator requests pages of it, also while the board trains. Credentials (join tokens, access tokens, keys) are
redacted before they are written; reports that leave the board are redacted further, see `Redactor`.
"""

from __future__ import annotations

import hashlib
import ipaddress
import itertools
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from edgefl.core.errors import EdgeflError, NetworkError, UsageError
from edgefl.core.protocol import Command, CommandReply
from edgefl.core.safe_parsing import parse_json
from edgefl.core.safe_text import dump_readable_json
from edgefl.core.types import Json
from edgefl.system.retries import RateLimitedLog

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 512 * 1024
MAX_OLD_FILES = 3
"""Number of older files kept beside the newest."""
MAX_MESSAGE_CHARS = 4000
PAGE_BYTES = 48 * 1024
"""Maximum size of a page, so that it fits into a message."""
FILE_NAME = "agent.jsonl"

_SECRET_PATTERNS = (
    re.compile(r"efl1\.[A-Za-z0-9_-]+"),
    re.compile(r"(?i)(?<=bearer )\S+"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"""(?i)(?<=secret)(["']?\s*[=:]\s*["']?)[^\s"',}]+"""),
)
REDACTED = "[crossed out]"

GetCurrentWork = Callable[[], tuple[str, str] | None]
"""Returns the run and the assignment in progress."""

LOG_FOLDER = "logs"
"""The folder of the log in a device's state directory."""

MIN_SECRET_CHARS = 8
MIN_NAME_CHARS = 3
PSEUDONYM_CHARS = 8

_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]+-----.*?(?:-----END [A-Z0-9 ]+-----|\Z)", re.DOTALL)
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\w)")
_IPV6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f:]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*(?:%\w+)?(?!\w)")
_MAC = re.compile(r"(?<![\w:-])(?:[0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}(?![\w:-])")
_MAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_LONG_HEX = re.compile(r"(?<!\w)[0-9A-Fa-f]{40,}(?!\w)")
"""Fingerprints of keys and certificates: no secrets, but they identify the fleet."""


class JsonLogHandler(logging.Handler):
    """Handler that writes the log of this process; line numbers grow over restarts too.

    Args:
        folder: of the log files; created when it is missing.
        get_current_work: returns the current run and assignment, None when idle.
        clock: Unix seconds, an estimate of the coordinator's.
    """

    def __init__(
        self, folder: Path, *, get_current_work: GetCurrentWork = lambda: None, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path, self._get_current_work, self._clock = folder / FILE_NAME, get_current_work, clock
        self._numbers = itertools.count(1 + max((int(line["n"]) for line in read_lines(folder)), default=0))
        self._file = _LogFile(self._path)
        self._file.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one line; a full card does not stop the work."""
        try:
            work = self._get_current_work()
            line: Json = {
                "n": next(self._numbers),
                "at": round(self._clock(), 3),
                "level": record.levelname,
                "logger": record.name,
                "message": remove_secrets(self._format_text(record))[:MAX_MESSAGE_CHARS],
                **({"run": work[0], "assignment": work[1]} if work else {}),
            }
            self._file.emit(logging.makeLogRecord({"msg": dump_readable_json(line)}))
        except (OSError, TypeError, ValueError, KeyError):  # a failed line must not raise in the code that logs it
            self.handleError(record)

    def _format_text(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
        return text

    def close(self) -> None:
        self._file.close()
        super().close()


class _LogFile(RotatingFileHandler):
    """Log file of which a failure is one warning a minute; the library prints a traceback for every line."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=MAX_FILE_BYTES, backupCount=MAX_OLD_FILES, encoding="utf-8", delay=True)
        self._rate_limited_log = RateLimitedLog(log)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 the library's name
        error = sys.exception()
        reason = (isinstance(error, OSError) and error.strerror) or error
        # This line comes here again, and is then not due.
        self._rate_limited_log.warning("log", "the log of this device cannot be written: %s", reason)


def remove_secrets(text: str) -> str:
    """Returns the text with credentials redacted."""
    for pattern in _SECRET_PATTERNS:
        prefix = r"\g<1>" if pattern.groups else ""
        text = pattern.sub(prefix + REDACTED, text)
    return text


def read_page(folder: Path, query: Mapping[str, Any]) -> Json:
    """Returns the next lines of a device's log, oldest first, and whether more follow.

    Args:
        folder: of the log files.
        query: `after`, the number of the last known line; `run`; `since`, unix seconds. All are optional.

    Raises:
        UsageError: one of them is malformed.
    """
    after, since, run = _parse_number(query, "after"), _parse_number(query, "since"), query.get("run")
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
    """Yields the lines of the files, oldest first; torn lines are skipped."""
    path = folder / FILE_NAME
    files = [*(path.with_name(f"{FILE_NAME}.{number}") for number in range(MAX_OLD_FILES, 0, -1)), path]
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
            if isinstance(line, dict) and isinstance(line.get("n"), int) and _is_timestamp(line.get("at", 0.0)):
                yield line


def _is_timestamp(value: object) -> bool:
    return isinstance(value, int | float)


def _parse_number(query: Mapping[str, Any], name: str) -> float:
    value = query.get(name)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name} must be a number, got {value!r}")
    return value


def publish_logs(state_dir: Path, command: Command, publish: Callable[[CommandReply], bool]) -> None:
    """Sends the log page that a command requests; returns at once."""

    def send() -> None:
        try:
            reply = CommandReply(id=command.id, content=read_page(state_dir / LOG_FOLDER, _parse_query(command)))
        except (EdgeflError, OSError) as error:
            reply = CommandReply(id=command.id, error=str(error))
        if not publish(reply):
            log.info("the link is down: nobody hears the answer to %s", command.id)

    threading.Thread(target=send, name="logs", daemon=True).start()


def _parse_query(command: Command) -> Json:
    try:
        query = parse_json(command.argument or "{}")
    except ValueError:
        query = None
    if not isinstance(query, dict):
        raise NetworkError("the question makes no sense: its argument is no JSON object")
    return query


class Redactor:
    """Redactor of one board's secrets and names.

    Args:
        secrets: texts that are redacted everywhere, such as the lines of a key.
        hosts: host names and addresses to replace by pseudonyms, beside all that look like an address.
        folders: paths and their replacements, such as `~` for the home folder.
        salt: of the pseudonyms; random by default.
    """

    def __init__(
        self,
        *,
        secrets: Iterable[str] = (),
        hosts: Iterable[str] = (),
        folders: Mapping[str, str] | None = None,
        salt: bytes | None = None,
    ) -> None:
        self._salt = os.urandom(16) if salt is None else salt
        self._secrets = sorted({text for text in secrets if len(text) >= MIN_SECRET_CHARS}, key=len, reverse=True)
        names = sorted({text for text in hosts if len(text) >= MIN_NAME_CHARS}, key=len, reverse=True)
        self._hosts = re.compile(rf"(?i)(?<![\w.-])(?:{'|'.join(map(re.escape, names))})(?![\w-])") if names else None
        self._folders = sorted((folders or {}).items(), key=lambda item: -len(item[0]))

    def redact_text(self, value: str) -> str:
        """Returns the redacted text."""
        value = _PEM.sub(REDACTED, remove_secrets(value))
        for secret in self._secrets:
            value = value.replace(secret, REDACTED)
        for folder, replacement in self._folders:
            value = value.replace(folder, replacement)
        value = _MAIL.sub(lambda match: self._make_pseudonym("mail", match[0]), value)
        value = _MAC.sub(lambda match: self._make_pseudonym("mac", match[0].lower()), value)
        value = _LONG_HEX.sub(lambda match: self._make_pseudonym("hash", match[0].lower()), value)
        if self._hosts is not None:
            value = self._hosts.sub(lambda match: self._make_pseudonym("host", match[0].lower()), value)
        return _IPV6.sub(self._redact_address, _IPV4.sub(self._redact_address, value))

    def redact_json(self, value: Any) -> Any:
        """Returns the JSON value with redacted texts and keys."""
        if isinstance(value, str):
            return self.redact_text(value)
        if isinstance(value, Mapping):
            return {self.redact_text(str(key)): self.redact_json(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.redact_json(item) for item in value]
        return value

    def _redact_address(self, match: re.Match[str]) -> str:
        try:
            address = ipaddress.ip_address(match[0].partition("%")[0])
        except ValueError:  # a version number, or a time of day
            return match[0]
        return (
            match[0]
            if address.is_loopback or address.is_unspecified
            else self._make_pseudonym("host", match[0].lower())
        )

    def _make_pseudonym(self, kind: str, name: str) -> str:
        return f"<{kind} {hashlib.sha256(self._salt + name.encode()).hexdigest()[:PSEUDONYM_CHARS]}>"
