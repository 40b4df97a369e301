"""Shared parts of the rollout commands (models, releases, packs): wait for one, and print it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.render import print_rows

if TYPE_CHECKING:
    from edgefl.system.api_client import CoordinatorClient

TERMINAL_STATUSES = frozenset({"done", "failed", "superseded"})
POLL_S = 0.5

url_option = click.option("--url", metavar="URL", help="The coordinator [default: the one in operator.toml].")
canary_option = click.option(
    "--canary", type=click.IntRange(0), default=0, show_default=True, help="How many devices get it first."
)


def make_client(url: str | None) -> CoordinatorClient:
    from edgefl.system.api_client import CoordinatorClient  # noqa: PLC0415 fast start

    return CoordinatorClient.from_options(url)


def make_rollout_path(kind: str, rollout: str) -> str:
    """Returns the API path of a rollout in `deployments` or `installations`."""
    from edgefl.system.api_client import format_resource_path  # noqa: PLC0415 fast start

    return format_resource_path(kind, rollout)


def wait_for_rollout(rollout: Any, read: Callable[[], Any]) -> Any:
    """Returns a rollout at its end; prints the progress of its devices on stderr.

    Args:
        rollout: its latest state.
        read: fetches its state.
    """
    printed = None
    while rollout["status"] not in TERMINAL_STATUSES:
        if (rollout["status"], rollout["counts"]) != printed:
            printed = rollout["status"], rollout["counts"]
            counts = ", ".join(f"{number} {state}" for state, number in sorted(rollout["counts"].items()))
            click.echo(f"{rollout['status']}: {counts}", err=True)
        time.sleep(POLL_S)
        rollout = read()
    return rollout


def print_rollout(
    rollout: Any, fmt: str, *, kind: str, columns: Sequence[str], device_columns: Sequence[str]
) -> None:
    """Prints a rollout and its devices; as CSV only the devices."""
    if fmt == "table":
        print_rows([rollout], columns)
        print_rows(rollout["each"], device_columns)
    elif fmt == "csv":
        print_rows(rollout["each"], device_columns, fmt, kind=kind)
    else:
        print_rows([rollout], (*columns, "each"), fmt, kind=kind)
