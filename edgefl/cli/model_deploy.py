"""`edgefl model deploy` and `deployments`: bring a model to the devices, and see what became of it."""

from __future__ import annotations

from typing import Any

import click

from edgefl.cli.render import format_option, print_rows
from edgefl.cli.rollouts import canary_option, operator, path_of, print_rollout, url_option, watched
from edgefl.errors import RunFailedError

COLUMNS = ("deployment_id", "model", "task", "status", "counts", "created_at", "reason")
DEVICE_COLUMNS = (
    "device_id",
    "part",
    "state",
    "accuracy",
    "former_accuracy",
    "num_examples",
    "reported_at",
    "reason",
)
SHOWN_DIGITS = 12


@click.command()
@click.argument("model")
@canary_option
@click.option("--to", "devices", multiple=True, metavar="DEVICE", help="Only this device; may be repeated.")
@click.option("--within", "canary_s", type=float, metavar="SECONDS", help="Time of the canaries [default: 600].")
@click.option("--tolerance", type=float, help="How much lower the accuracy may be than before [default: 0.02].")
@click.option("--min-accuracy", type=float, help="What it must reach on a device's own data [default: 0].")
@click.option("--watch", "watches", is_flag=True, help="Stay until it is over; exit code 41 when it failed.")
@url_option
@format_option
def deploy(  # noqa: PLR0913 one argument per option
    *,
    model: str,
    canary: int,
    devices: tuple[str, ...],
    canary_s: float | None,
    tolerance: float | None,
    min_accuracy: float | None,
    watches: bool,
    url: str | None,
    fmt: str,
) -> None:
    """Bring MODEL to the devices: a model's SHA-256 or its beginning, RUN, RUN:ROUND, RUN:best, best or latest.

    Each device fetches it, compares it with the model before on its own data, and switches or keeps that one.
    """
    asked = {
        "model": model,
        "canary": canary,
        "devices": list(devices) or None,
        "canary_s": canary_s,
        "tolerance": tolerance,
        "min_accuracy": min_accuracy,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    found = operator(url).post("/edgefl/v1/deployments", given)
    if watches:
        path = path_of("deployments", found["deployment_id"])
        reader = operator(url)
        found = watched(found, lambda: reader.get(path))
    if fmt == "table":
        click.echo(found["deployment_id"])
    if watches or fmt != "table":
        _print(found, fmt)
    if found["status"] == "failed":
        raise RunFailedError(f"deployment {found['deployment_id']} failed: {found['reason']}")


@click.command()
@click.argument("deployment", required=False)
@url_option
@format_option
def deployments(*, deployment: str | None, url: str | None, fmt: str) -> None:
    """List the deployments, oldest first, or the devices of one with what they report."""
    if deployment is None:
        rows = operator(url).get("/edgefl/v1/deployments")["rows"]
        print_rows([_short(row, fmt) for row in rows], COLUMNS, fmt, kind="deployments")
        return
    _print(operator(url).get(path_of("deployments", deployment)), fmt)


def _print(found: Any, fmt: str) -> None:
    print_rollout(_short(found, fmt), fmt, kind="deployments", columns=COLUMNS, device_columns=DEVICE_COLUMNS)


def _short(row: Any, fmt: str) -> Any:
    return {**row, "model": row["model"][:SHOWN_DIGITS]} if fmt == "table" else row
