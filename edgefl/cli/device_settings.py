"""`edgefl device set`: what may be said of a board after its join; a running agent takes it up with its next work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgefl.cli.device_options import state_option
from edgefl.errors import UsageError

NO_LIMIT = "none"


def _limit(_context: click.Context, _option: click.Parameter, value: str | None) -> str | float | None:
    from edgefl.device.board.pacing import LIMIT_RANGE_C  # noqa: PLC0415 fast start

    if value is None or value == NO_LIMIT:
        return value
    least, most = LIMIT_RANGE_C
    try:
        celsius = float(value)
    except ValueError:
        celsius = float("nan")
    if not least <= celsius <= most:
        raise click.BadParameter(f"must be degrees Celsius from {least:g} to {most:g}, or {NO_LIMIT}; got {value!r}")
    return celsius


temperature_option = click.option(
    "--max-temperature",
    "max_temperature",
    callback=_limit,
    envvar="EDGEFL_MAX_TEMPERATURE",
    metavar="CELSIUS|none",
    help="Rest between iterations while the board is hotter [default: none].",
)


@click.command("set")
@state_option
@temperature_option
def set_(*, root: Path | None, max_temperature: str | float | None) -> None:
    """Change a setting of this joined board."""
    from edgefl.device.state import DeviceState  # noqa: PLC0415 fast start

    if max_temperature is None:
        raise UsageError("nothing to set; give --max-temperature CELSIUS, or none for no limit")
    state = DeviceState.load(root)
    keep_limit(state, max_temperature)
    limit = state.device.max_temperature_c
    click.echo(f"{state.device_id} rests " + ("never" if limit is None else f"between iterations above {limit:g} °C"))


def keep_limit(state: Any, max_temperature: str | float | None) -> None:
    """Remembers a limit that was given; None leaves the one that is there."""
    if max_temperature is not None:
        state.change(max_temperature_c=None if max_temperature == NO_LIMIT else max_temperature)
