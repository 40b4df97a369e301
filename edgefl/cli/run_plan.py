"""Output of `edgefl run submit --dry-run`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from edgefl.cli.render import JSON_VERSION, format_value, print_rows, select_known_columns

if TYPE_CHECKING:
    from edgefl.core.types import Json

COLUMNS = (
    "device_id", "takes_part", "examples", "iterations", "seconds", "codec", "bytes_up", "bytes_down", "measured_in",
    "reason",
)  # fmt: skip
_GOAL_FORMATS = {
    "rounds": "{} rounds", "updates": "{} updates", "seconds": "{} s", "bytes": "{} bytes", "accuracy": "accuracy {}",
}  # fmt: skip
_OPTIONAL_COLUMNS = ("codec", "measured_in", "reason")


def print_plan(plan: Json, fmt: str) -> None:
    """Prints a plan: for people with sums and assumptions; as JSON complete; as CSV its rows."""
    if fmt == "json":
        click.echo(json.dumps({**plan, "v": JSON_VERSION, "kind": "plan"}, indent=2, ensure_ascii=False))
        return
    if fmt == "csv":
        print_rows(plan["rows"], COLUMNS, fmt)
        return
    goal = " or ".join(
        _GOAL_FORMATS.get(name, f"{name} {{}}").format(f"{value:g}") for name, value in plan["goal"].items()
    )
    click.echo(
        f"{plan['task']} with {plan['strategy']} until {goal}; "
        f"a model of {format_value('bytes_', plan['model_bytes'])}"
    )
    print_rows(plan["rows"], select_known_columns(plan["rows"], COLUMNS, _OPTIONAL_COLUMNS))
    seconds = "not known" if plan["seconds"] is None else f"{format_value('', plan['seconds'])} s"
    devices = "1 device" if plan["num_devices"] == 1 else f"{plan['num_devices']} devices"
    click.echo(
        f"a round: {devices}, {format_value('bytes_', plan['bytes_up'])} up, "
        f"{format_value('bytes_', plan['bytes_down'])} down, computing {seconds}"
    )
    for line in plan["assumed"]:
        click.echo(f"assumed: {line}")
