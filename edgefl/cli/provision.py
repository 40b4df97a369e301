"""`edgefl provision`: makes devices of blank cards or running hosts."""

from __future__ import annotations

import click

from edgefl.cli import provision_jetson, provision_raspberry_pi, provision_wheels
from edgefl.cli.command_group import FullHelpGroup
from edgefl.cli.provision_ssh import ssh
from edgefl.cli.provision_systemd import systemd


@click.group(cls=FullHelpGroup)
def command() -> None:
    """Make boards into devices: cards, images, hosts that run already."""


command.add_command(provision_raspberry_pi.command)
command.add_command(provision_jetson.command)
command.add_command(ssh)
command.add_command(provision_wheels.command)
command.add_command(systemd)
