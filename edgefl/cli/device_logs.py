"""`edgefl devices logs`: a board's own log, page by page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.history import parse_time
from edgefl.cli.render import human, print_rows
from edgefl.errors import UsageError

if TYPE_CHECKING:
    from edgefl.types import Json

COLUMNS = ("device_id", "n", "at", "level", "logger", "run", "assignment", "message")
FOLLOW_EVERY_S = 1.0


def print_logs(device: str, *, run: str | None, since: str | None, follows: bool, url: str | None, fmt: str) -> None:
    """Prints the lines that fit, oldest first; with `follows` goes on with what comes.

    Raises:
        UsageError: a format that cannot go on.
    """
    if follows and fmt != "table":
        raise UsageError(f"--follow prints lines for people; --format {fmt} needs an end")
    lines = _lines(device, run=run, since=since, follows=follows, url=url)
    if fmt != "table":
        print_rows(list(lines), COLUMNS, fmt, kind="logs")
        return
    for line in lines:
        click.echo(_text(line))


def _lines(device: str, *, run: str | None, since: str | None, follows: bool, url: str | None) -> Iterator[Json]:
    from edgefl.client import Operator, named_path  # noqa: PLC0415 fast start

    operator, path, after = Operator.from_options(url), f"{named_path('devices', device)}/logs", None
    at = None if since is None else parse_time(since, now=time.time())
    while True:
        page = operator.get(path, {"run": run, "since": at, "after": after})
        yield from page["rows"]
        after = page["rows"][-1]["n"] if page["rows"] else after
        if not page["has_more"]:
            if not follows:
                return
            time.sleep(FOLLOW_EVERY_S)


def _text(line: Json) -> str:
    about: Any = line.get("assignment") or line.get("run")
    message = "\n".join(human("message", part) for part in str(line.get("message", "")).splitlines())
    return " ".join(
        [human("at", line.get("at")), f"{human('', line.get('level')):<7}", f"{human('', line.get('logger'))}:"]
        + ([f"[{human('', about)}]"] if about and not message.startswith(str(about)) else [])
        + [message]
    )
