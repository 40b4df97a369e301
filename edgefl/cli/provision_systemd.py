"""`edgefl provision systemd`: units of this machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from edgefl.core.errors import UsageError


@click.command("systemd")
@click.option("--device", "kind", flag_value="device", default="device", help="Units of a device (the default).")
@click.option("--coordinator", "kind", flag_value="coordinator", help="Units of a coordinator.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Write them into this folder.")
@click.option("--install", "installs", is_flag=True, help="As root: put them in place, make the user, enable them.")
@click.option("--python", help="The interpreter that has edgefl [default: that of /opt/edgefl, else this one].")
@click.option("--shard", "shards", multiple=True, metavar="TASK=PATH", help="Data that the device is to see; repeat.")
@click.option("--gpu", "has_gpu", is_flag=True, help="Let the device use the GPU.")
@click.option("--broker", "has_broker", is_flag=True, help="Run the coordinator's broker as a unit of its own.")
def systemd(  # noqa: PLR0913 one argument per option
    *,
    kind: str,
    out: Path | None,
    installs: bool,
    python: str | None,
    shards: tuple[str, ...],
    has_gpu: bool,
    has_broker: bool,
) -> None:
    """Print, write or install hardened units for this machine, with the paths of this installation."""
    from edgefl.provision import systemd_units as units  # noqa: PLC0415 fast start

    if kind == units.MachineKind.COORDINATOR and (has_gpu or shards):
        raise UsageError("--gpu and --shard are for devices; a coordinator's test shard stands in its own options")
    if kind == units.MachineKind.DEVICE and has_broker:
        raise UsageError("--broker is for a coordinator: edgefl provision systemd --coordinator --broker")
    installation = units.SystemdInstallation(
        python=python or (units.DEFAULT_PYTHON if Path(units.DEFAULT_PYTHON).exists() else sys.executable),
        kind=units.MachineKind(kind),
        shards=dict(_parse_shard(text) for text in shards),
        has_gpu=has_gpu,
        has_broker=has_broker,
    )
    if installs:
        for path in units.install_units(installation):
            click.echo(f"wrote {path}")
        click.echo(f"enabled {', '.join(installation.enabled_units)}")
    elif out is not None:
        for path in units.write_units(units.render_units(installation), out):
            click.echo(f"wrote {path}")
        click.echo(f"next: sudo cp -r {shlex.quote(str(out))}/. {units.UNITS_FOLDER}/")
        for command in units.list_commands(installation):
            click.echo(f"next: sudo {shlex.join(command)}")
    else:
        for name, text in units.render_units(installation).items():
            click.echo(f"# {units.UNITS_FOLDER / name}\n{text}")
    if (installs or out is not None) and (step := units.get_next_step(installation)):
        click.echo(f"next: {step}")


def _parse_shard(text: str) -> tuple[str, str]:
    task, separator, path = text.partition("=")
    if not (separator and task and path):
        raise UsageError(f"--shard must be TASK=PATH, got {text!r}")
    return task, path
