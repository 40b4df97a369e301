"""`edgefl device set`: settings of a joined device; a running agent applies them to its next work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgefl.cli.device_options import state_option
from edgefl.core.errors import UsageError

NO_LIMIT = "none"


def _parse_limit(_context: click.Context, _option: click.Parameter, value: str | None) -> str | float | None:
    from edgefl.device.hardware.thermal_pacing import LIMIT_RANGE_C  # noqa: PLC0415 fast start

    if value is None or value == NO_LIMIT:
        return value
    lowest, highest = LIMIT_RANGE_C
    try:
        celsius = float(value)
    except ValueError:
        celsius = float("nan")
    if not lowest <= celsius <= highest:
        raise click.BadParameter(
            f"must be degrees Celsius from {lowest:g} to {highest:g}, or {NO_LIMIT}; got {value!r}"
        )
    return celsius


temperature_option = click.option(
    "--max-temperature",
    "max_temperature",
    callback=_parse_limit,
    envvar="EDGEFL_MAX_TEMPERATURE",
    metavar="CELSIUS|none",
    help="Rest between iterations while the board is hotter [default: none].",
)


@click.command("set")
@state_option
@temperature_option
def set_(*, root: Path | None, max_temperature: str | float | None) -> None:
    """Change a setting of this joined board."""
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 fast start

    if max_temperature is None:
        raise UsageError("nothing to set; give --max-temperature CELSIUS, or none for no limit")
    state = DeviceStateDir.load(root)
    save_temperature_limit(state, max_temperature)
    limit = state.settings.max_temperature_c
    click.echo(f"{state.device_id} rests " + ("never" if limit is None else f"between iterations above {limit:g} °C"))


def save_temperature_limit(state: Any, max_temperature: str | float | None) -> None:
    """Saves a given limit; None leaves the present one."""
    if max_temperature is not None:
        state.update(max_temperature_c=None if max_temperature == NO_LIMIT else max_temperature)
