"""`edgefl devices`: the devices of a fleet, as the coordinator sees them, and their logs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.fleet.rollouts import install, uninstall, update, updates
from edgefl.cli.history import parse_time
from edgefl.cli.output import SHORT_HASH_DIGITS, FullHelpGroup, echo, format_option, format_value, print_rows
from edgefl.cli.sources import make_client, make_path, url_option
from edgefl.core.errors import UsageError

if TYPE_CHECKING:
    from edgefl.core.types import Json

COLUMNS = (
    "device_id", "presence", "drained", "cloned", "silent_s", "role", "groups", "examples", "run", "iteration",
    "temperature_c", "seconds_per_iteration", "model", "version", "joined_at",
)  # fmt: skip
LOG_COLUMNS = ("device_id", "n", "at", "level", "logger", "run", "assignment", "message")
FOLLOW_INTERVAL_S = 1.0
_OPTIONAL_COLUMNS = ("drained", "cloned", "groups", "run", "iteration", "temperature_c", "model")
_DETAIL_COLUMNS = ("seconds_per_iteration", "joined_at")


@click.group("devices", cls=FullHelpGroup)
def command() -> None:
    """List and inspect the devices of a fleet, let them rest, take them out."""


@command.command("list")
@url_option
@format_option
def list_(*, url: str | None, fmt: str) -> None:
    """List the devices with presence, shards, what they are at and the model they run; `show` and JSON say more."""
    rows, columns = make_client(url).get("/edgefl/v1/devices")["rows"], list(COLUMNS)
    if fmt == "table":
        rows = [
            {
                **row,
                "model": (row.get("model") or "")[:SHORT_HASH_DIGITS],
                "cloned": "yes" if row.get("cloned") else "",
            }
            for row in rows
        ]
        unused = {name for name in _OPTIONAL_COLUMNS if not any(row.get(name) for row in rows)}
        columns = [name for name in COLUMNS if name not in unused and name not in _DETAIL_COLUMNS]
    print_rows(rows, columns, fmt, kind="devices")


@command.command()
@click.argument("device")
@url_option
@format_option
def show(*, device: str, url: str | None, fmt: str) -> None:
    """Show one device and its capabilities."""
    device_row = make_client(url).get(make_path("devices", device))
    if fmt != "table":
        print_rows([device_row], (*COLUMNS, "capabilities"), fmt, kind="devices")
        return
    # The name of a fact implies its unit, so a time is printed as a time here.
    facts = [{"fact": name, "value": format_value(name, device_row.get(name))} for name in COLUMNS]
    capabilities = [
        {"fact": name, "value": format_value(name, value)} for name, value in device_row["capabilities"].items()
    ]
    print_rows([*facts, *capabilities], ("fact", "value"), fmt)


@command.command()
@click.argument("device")
@click.option("--run", "run", metavar="RUN", help="Only what was logged while it worked for this run.")
@click.option("--since", metavar="WHEN", help="An age such as 2h, or a date and time (UTC).")
@click.option("--follow", "follows", is_flag=True, help="Go on printing what comes, until Ctrl-C.")
@url_option
@format_option
def logs(*, device: str, run: str | None, since: str | None, follows: bool, url: str | None, fmt: str) -> None:
    """Print what a device has logged: its own bounded log, fetched from the board."""
    if follows and fmt != "table":
        raise UsageError(f"--follow prints lines for people; --format {fmt} needs an end")
    lines = _read_lines(device, run=run, since=since, should_follow=follows, url=url)
    if fmt != "table":
        print_rows(list(lines), LOG_COLUMNS, fmt, kind="logs")
        return
    for line in lines:
        echo(_format_line(line))


@command.command()
@click.argument("device")
@url_option
def drain(*, device: str, url: str | None) -> None:
    """Let DEVICE finish what it has and give it no more, until it is resumed; restarts change nothing."""
    _post_action(device, "drain", url)
    click.echo(f"{device} gets no more work; to change that: edgefl devices resume {device}")


@command.command()
@click.argument("device")
@url_option
def resume(*, device: str, url: str | None) -> None:
    """Give DEVICE, which was drained, work again."""
    _post_action(device, "resume", url)
    click.echo(f"{device} gets work again")


@command.command()
@click.argument("device")
@url_option
def remove(*, device: str, url: str | None) -> None:
    """Take DEVICE out of the fleet: its key and certificate count no more, its history stays, its name is free."""
    _post_action(device, "remove", url)
    click.echo(f"{device} is out; to let it in again: edgefl coordinator token, and join anew on the board")


command.add_command(update)
command.add_command(install)
command.add_command(uninstall)
command.add_command(updates)


def _post_action(device: str, action: str, url: str | None) -> None:
    make_client(url).post(f"{make_path('devices', device)}/{action}")


def _read_lines(
    device: str, *, run: str | None, since: str | None, should_follow: bool, url: str | None
) -> Iterator[Json]:
    operator, path, last_line = make_client(url), f"{make_path('devices', device)}/logs", None
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
