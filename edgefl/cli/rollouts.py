"""What the commands that bring models, releases and packs to devices share: watch one to its end, and print it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.render import print_rows

if TYPE_CHECKING:
    from edgefl.client import Operator

FINAL = frozenset({"done", "failed", "superseded"})
POLL_S = 0.5

url_option = click.option("--url", metavar="URL", help="The coordinator [default: the one in operator.toml].")
canary_option = click.option(
    "--canary", type=click.IntRange(0), default=0, show_default=True, help="How many devices get it first."
)


def operator(url: str | None) -> Operator:
    from edgefl.client import Operator  # noqa: PLC0415 fast start

    return Operator.from_options(url)


def path_of(kind: str, rollout: str) -> str:
    """Returns the path of one of the `deployments` or `installations`."""
    from edgefl.client import named_path  # noqa: PLC0415 fast start

    return named_path(kind, rollout)


def watched(found: Any, read: Callable[[], Any]) -> Any:
    """Returns a rollout as it ended; says meanwhile on stderr where its devices stand.

    Args:
        found: as the coordinator has shown it last.
        read: asks for it again.
    """
    said = None
    while found["status"] not in FINAL:
        if (found["status"], found["counts"]) != said:
            said = found["status"], found["counts"]
            counts = ", ".join(f"{number} {state}" for state, number in sorted(found["counts"].items()))
            click.echo(f"{found['status']}: {counts}", err=True)
        time.sleep(POLL_S)
        found = read()
    return found


def print_rollout(found: Any, fmt: str, *, kind: str, columns: Sequence[str], device_columns: Sequence[str]) -> None:
    """Prints a rollout and its devices; as CSV the devices alone."""
    if fmt == "table":
        print_rows([found], columns)
        print_rows(found["each"], device_columns)
    elif fmt == "csv":
        print_rows(found["each"], device_columns, fmt, kind=kind)
    else:
        print_rows([found], (*columns, "each"), fmt, kind=kind)
