"""`edgefl fleet`: the fleets that this user's commands may go to, one operator file each."""

from __future__ import annotations

import click

from edgefl.cli.output import FullHelpGroup, echo, format_option, print_rows
from edgefl.core.errors import UsageError
from edgefl.system.api_client import find_fleet, get_operator_path, list_operator_files, load_operator_file

COLUMNS = ("fleet", "in_use", "url", "name", "file")


@click.group("fleet", cls=FullHelpGroup)
def command() -> None:
    """Choose the fleet that commands go to, where there are several."""


@command.command("list")
@format_option
def list_(*, fmt: str) -> None:
    """List the fleets: each has an operator file in ~/.config/edgefl."""
    rows = [
        {
            "fleet": content.fleet,
            "in_use": path == get_operator_path(),
            "url": content.url,
            "name": content.label,
            "file": str(path),
        }
        for path, content in list_operator_files().items()
    ]
    print_rows(rows, COLUMNS, fmt, kind="fleets")


@command.command()
@click.argument("fleet")
def use(fleet: str) -> None:
    """Let commands go to FLEET from now on; --fleet and EDGEFL_FLEET choose one for a single command."""
    chosen, in_use = find_fleet(fleet), get_operator_path()
    if chosen != in_use:
        if in_use.exists():
            in_use.replace(in_use.with_name(f"operator.{load_operator_file(in_use).label}.toml"))
        chosen.replace(in_use)
    content = load_operator_file(in_use)
    echo(f"commands go to fleet {content.fleet} at {content.url}")


@command.command()
@click.argument("fleet")
@click.option("--yes", is_flag=True, help="Do not ask.")
def remove(fleet: str, *, yes: bool) -> None:
    """Forget FLEET on this machine: its operator file goes, the coordinator and its boards stay."""
    path = find_fleet(fleet)
    confirm(f"remove {path}? Without another copy nobody here can use fleet {fleet}", is_confirmed=yes)
    path.unlink()
    echo(f"{path} is removed; to get another: edgefl coordinator init, on the coordinator's machine")


def confirm(question: str, *, is_confirmed: bool) -> None:
    """Asks before something that cannot be undone.

    Raises:
        UsageError: there is nobody to ask.
    """
    if is_confirmed:
        return
    if not click.get_text_stream("stdin").isatty():
        raise UsageError(f"{question}. Say --yes to do it without a terminal")
    click.confirm(question, abort=True)
