"""`edgefl devices`: the devices of a fleet, as the coordinator sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from edgefl.cli.device_installs import install, uninstall, update, updates
from edgefl.cli.listing import ListedGroup
from edgefl.cli.render import format_option, human, print_rows

if TYPE_CHECKING:
    from edgefl.types import Json

COLUMNS = (
    "device_id",
    "presence",
    "drained",
    "cloned",
    "silent_s",
    "role",
    "groups",
    "examples",
    "run",
    "iteration",
    "temperature_c",
    "seconds_per_iteration",
    "model",
    "version",
    "joined_at",
)

SHOWN_DIGITS = 12
_OPTIONAL = ("drained", "cloned", "groups", "run", "iteration", "temperature_c", "model")
_ONLY_SHOWN = ("seconds_per_iteration", "joined_at")

url_option = click.option("--url", metavar="URL", help="The coordinator [default: the one in operator.toml].")


@click.group("devices", cls=ListedGroup)
def command() -> None:
    """List and inspect the devices of a fleet, let them rest, take them out."""


@command.command("list")
@url_option
@format_option
def list_(*, url: str | None, fmt: str) -> None:
    """List the devices with presence, shards, what they are at and the model they run; `show` and JSON say more."""
    rows, columns = _get("/edgefl/v1/devices", url)["rows"], list(COLUMNS)
    if fmt == "table":
        rows = [
            {**row, "model": (row.get("model") or "")[:SHOWN_DIGITS], "cloned": "yes" if row.get("cloned") else ""}
            for row in rows
        ]
        unused = {name for name in _OPTIONAL if not any(row.get(name) for row in rows)}
        columns = [name for name in COLUMNS if name not in unused and name not in _ONLY_SHOWN]
    print_rows(rows, columns, fmt, kind="devices")


@command.command()
@click.argument("device")
@url_option
@format_option
def show(*, device: str, url: str | None, fmt: str) -> None:
    """Show one device and its capabilities."""
    from edgefl.client import named_path  # noqa: PLC0415 fast start

    found = _get(named_path("devices", device), url)
    if fmt != "table":
        print_rows([found], (*COLUMNS, "capabilities"), fmt, kind="devices")
        return
    # The name of a fact says its unit, so a time is printed as a time here.
    facts = [{"fact": name, "value": human(name, found.get(name))} for name in COLUMNS]
    capabilities = [{"fact": name, "value": human(name, value)} for name, value in found["capabilities"].items()]
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
    from edgefl.cli.device_logs import print_logs  # noqa: PLC0415 fast start

    print_logs(device, run=run, since=since, follows=follows, url=url, fmt=fmt)


@command.command()
@click.argument("device")
@url_option
def drain(*, device: str, url: str | None) -> None:
    """Let DEVICE finish what it has and give it no more, until it is resumed; restarts change nothing."""
    _post(device, "drain", url)
    click.echo(f"{device} gets no more work; to change that: edgefl devices resume {device}")


@command.command()
@click.argument("device")
@url_option
def resume(*, device: str, url: str | None) -> None:
    """Give DEVICE, which was drained, work again."""
    _post(device, "resume", url)
    click.echo(f"{device} gets work again")


@command.command()
@click.argument("device")
@url_option
def remove(*, device: str, url: str | None) -> None:
    """Take DEVICE out of the fleet: its key and certificate count no more, its history stays, its name is free."""
    _post(device, "remove", url)
    click.echo(f"{device} is out; to let it in again: edgefl coordinator token, and join anew on the board")


command.add_command(update)
command.add_command(install)
command.add_command(uninstall)
command.add_command(updates)


def _post(device: str, action: str, url: str | None) -> None:
    from edgefl.client import Operator, named_path  # noqa: PLC0415 fast start

    Operator.from_options(url).post(f"{named_path('devices', device)}/{action}")


def _get(path: str, url: str | None) -> Json:
    from edgefl.client import Operator  # noqa: PLC0415 fast start

    return Operator.from_options(url).get(path)
