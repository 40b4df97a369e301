"""`edgefl provision jetson`: an overlay for the root file system to flash."""

from __future__ import annotations

from pathlib import Path

import click

from edgefl.cli.provision_options import ProvisionOptions, board_options


@click.command("jetson")
@board_options
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="The tar to write, such as overlay.tar.gz; it holds a token.",
)
def command(out: Path) -> None:
    """Make the overlay of a Jetson: unpacked over Linux_for_Tegra/rootfs before flashing, its first boot joins.

    JetPack 7.2 (Python 3.12). JetPack 6 has Python 3.10, which edgefl does not run on: use the container there.
    """
    from edgefl.provision.jetson_overlay import write_overlay  # noqa: PLC0415 fast start
    from edgefl.provision.payload import make_payload  # noqa: PLC0415 likewise

    options = ProvisionOptions.from_context()
    name, extras = options.get_single_name(), options.load_extras()
    options.make_join_file(name, options.make_placeholder_token().token)  # rejects before a token is made
    token = options.get_tokens(1)[0]
    write_overlay(out, make_payload(options.make_join_file(name, token.token).to_text(), extras))
    expiry = f"; its token lets one board in until {token.expires}" if token.expires else ""
    click.echo(f"{name}: {out}, {out.stat().st_size / 1e6:.1f} MB{expiry}")
    click.echo(f"next, in Linux_for_Tegra: sudo tar -xpzf {out} -C rootfs --numeric-owner; then flash")
