"""The `edgefl` command: imports a group when it is called, and turns edgefl's errors into one line."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any, NoReturn

import click

from edgefl import __version__
from edgefl.cli.output import FullHelpGroup
from edgefl.core.errors import EXTRAS, EdgeflError, MissingPackageError, format_install_command
from edgefl.core.safe_text import SafeFormatter, escape_text

COMMANDS = {
    "codecs": ("edgefl.cli.catalogue:codecs", "List the codecs, measure them on a gradient"),
    "coordinator": (
        "edgefl.cli.fleet.coordinator:command",
        "Set up and run the coordinator, make join tokens, name its users",
    ),
    "data": ("edgefl.cli.experiments:data", "Cut a data set into shards for experiments"),
    "demo": ("edgefl.cli.experiments:demo", "Run a whole fleet on this machine"),
    "device": ("edgefl.cli.device:command", "Join a board to a fleet and run its agent"),
    "devices": ("edgefl.cli.fleet.devices:command", "List, inspect, drain, update and remove the devices of a fleet"),
    "doctor": ("edgefl.cli.doctor:command", "Look for problems on this machine, with remedies"),
    "export": ("edgefl.cli.run:export", "Take a run elsewhere: a plain Flower app"),
    "field-report": ("edgefl.cli.doctor:field_report", "Bundle what a real board has to tell, to send it back"),
    "fleet": ("edgefl.cli.fleet.fleets:command", "Choose the fleet that commands go to, where there are several"),
    "history": ("edgefl.cli.history:command", "Ask what happened: rounds, updates, devices, heartbeats, events"),
    "model": (
        "edgefl.cli.fleet.models:command",
        "List, export and evaluate the models that runs have kept; deploy them",
    ),
    "provision": (
        "edgefl.cli.provision.commands:command",
        "Make boards into devices: cards, images, hosts that run already",
    ),
    "run": ("edgefl.cli.run:command", "Submit, watch, stop and resume training runs"),
    "signing": ("edgefl.cli.signing:command", "Sign releases and task packs for the boards"),
    "simulate": ("edgefl.cli.experiments:simulate", "Run on a virtual fleet, in virtual time"),
    "user": ("edgefl.cli.fleet.users:remote_command", "Name people who may use a coordinator, from afar"),
    "strategies": ("edgefl.cli.catalogue:strategies", "List the strategies, begin one of your own"),
}
"""Where each command lies, and its line in the help."""
LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class LazyGroup(FullHelpGroup):
    """Command group that imports its commands' modules on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 click's interface
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 click's
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 click's
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in sorted(COMMANDS.items())])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="edgefl")
@click.option("-v", "--verbose", count=True, help="Say more on stderr; twice for debugging.")
@click.option("-q", "--quiet", is_flag=True, help="Only warnings and errors on stderr.")
def edgefl(*, verbose: int, quiet: bool) -> None:
    """Federated learning for fleets of Raspberry Pi, Jetson and other Linux boards."""
    level = logging.WARNING if quiet else (logging.INFO if verbose < 2 else logging.DEBUG)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(SafeFormatter(LOG_FORMAT))
    logging.basicConfig(level=level, handlers=[handler])
    for noisy in ("httpx", "httpcore", "alembic", "fontTools", "matplotlib", "PIL"):
        logging.getLogger(noisy).setLevel(logging.WARNING if verbose < 2 else logging.DEBUG)


def main(arguments: list[str] | None = None) -> Any:
    """Runs one command; an `EdgeflError` becomes a line on stderr and its exit code.

    A bug keeps its traceback.
    """
    try:
        return edgefl.main(args=arguments, prog_name="edgefl", standalone_mode=True)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        _exit_with_error(
            MissingPackageError(
                f"this command needs {module}, which is not installed: {format_install_command(module)}"
            )
        )
    except EdgeflError as error:
        _exit_with_error(error)


def _exit_with_error(error: EdgeflError) -> NoReturn:
    click.echo(f"edgefl: {escape_text(' '.join(str(error).split()))}", err=True)
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
