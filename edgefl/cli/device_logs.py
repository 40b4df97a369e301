"""`edgefl devices logs`: a device's own log, page by page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.history import parse_time
from edgefl.cli.render import format_value, print_rows
from edgefl.core.errors import UsageError

if TYPE_CHECKING:
    from edgefl.core.types import Json

COLUMNS = ("device_id", "n", "at", "level", "logger", "run", "assignment", "message")
FOLLOW_INTERVAL_S = 1.0


def print_logs(
    device: str, *, run: str | None, since: str | None, should_follow: bool, url: str | None, fmt: str
) -> None:
    """Prints matching lines, oldest first; with `should_follow` continues with new ones.

    Raises:
        UsageError: a format that cannot be followed.
    """
    if should_follow and fmt != "table":
        raise UsageError(f"--follow prints lines for people; --format {fmt} needs an end")
    lines = _read_lines(device, run=run, since=since, should_follow=should_follow, url=url)
    if fmt != "table":
        print_rows(list(lines), COLUMNS, fmt, kind="logs")
        return
    for line in lines:
        click.echo(_format_line(line))


def _read_lines(
    device: str, *, run: str | None, since: str | None, should_follow: bool, url: str | None
) -> Iterator[Json]:
    from edgefl.system.api_client import CoordinatorClient, format_resource_path  # noqa: PLC0415 fast start

    operator, path, last_line = (
        CoordinatorClient.from_options(url),
        f"{format_resource_path('devices', device)}/logs",
        None,
    )
    at = None if since is None else parse_time(since, now=time.time())
    while True:
        page = operator.get(path, {"run": run, "since": at, "after": last_line})
        yield from page["rows"]
        last_line = page["rows"][-1]["n"] if page["rows"] else last_line
        if not page["has_more"]:
            if not should_follow:
                return
            time.sleep(FOLLOW_INTERVAL_S)


def _format_line(line: Json) -> str:
    about: Any = line.get("assignment") or line.get("run")
    message = "\n".join(format_value("message", part) for part in str(line.get("message", "")).splitlines())
    return " ".join(
        [
            format_value("at", line.get("at")),
            f"{format_value('', line.get('level')):<7}",
            f"{format_value('', line.get('logger'))}:",
        ]
        + ([f"[{format_value('', about)}]"] if about and not message.startswith(str(about)) else [])
        + [message]
    )
