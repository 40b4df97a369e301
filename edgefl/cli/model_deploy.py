"""`edgefl model deploy` and `deployments`: deploys a model to the devices, and lists deployments."""

from __future__ import annotations

from typing import Any

import click

from edgefl.cli.render import format_option, print_rows
from edgefl.cli.rollouts import (
    canary_option,
    make_client,
    make_rollout_path,
    print_rollout,
    url_option,
    wait_for_rollout,
)
from edgefl.core.errors import RunFailedError

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
SHORT_HASH_DIGITS = 12


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
    request = {
        "model": model,
        "canary": canary,
        "devices": list(devices) or None,
        "canary_s": canary_s,
        "tolerance": tolerance,
        "min_accuracy": min_accuracy,
    }
    fields = {name: value for name, value in request.items() if value is not None}
    deployment = make_client(url).post("/edgefl/v1/deployments", fields)
    if watches:
        path = make_rollout_path("deployments", deployment["deployment_id"])
        reader = make_client(url)
        deployment = wait_for_rollout(deployment, lambda: reader.get(path))
    if fmt == "table":
        click.echo(deployment["deployment_id"])
    if watches or fmt != "table":
        _print_deployment(deployment, fmt)
    if deployment["status"] == "failed":
        raise RunFailedError(f"deployment {deployment['deployment_id']} failed: {deployment['reason']}")


@click.command()
@click.argument("deployment", required=False)
@url_option
@format_option
def deployments(*, deployment: str | None, url: str | None, fmt: str) -> None:
    """List the deployments, oldest first, or the devices of one with what they report."""
    if deployment is None:
        rows = make_client(url).get("/edgefl/v1/deployments")["rows"]
        print_rows([_shorten_hash(row, fmt) for row in rows], COLUMNS, fmt, kind="deployments")
        return
    _print_deployment(make_client(url).get(make_rollout_path("deployments", deployment)), fmt)


def _print_deployment(deployment: Any, fmt: str) -> None:
    print_rollout(
        _shorten_hash(deployment, fmt), fmt, kind="deployments", columns=COLUMNS, device_columns=DEVICE_COLUMNS
    )


def _shorten_hash(row: Any, fmt: str) -> Any:
    return {**row, "model": row["model"][:SHORT_HASH_DIGITS]} if fmt == "table" else row
