"""`edgefl provision`: from a blank card, or a board that runs already, to a device of the fleet."""

from __future__ import annotations

import click

from edgefl.cli import provision_jetson, provision_raspberry_pi
from edgefl.cli.listing import ListedGroup
from edgefl.cli.provision_ssh import ssh
from edgefl.cli.provision_systemd import systemd
from edgefl.cli.provision_wheels import wheels


@click.group(cls=ListedGroup)
def command() -> None:
    """Make boards into devices: cards, images, hosts that run already."""


command.add_command(provision_raspberry_pi.command)
command.add_command(provision_jetson.command)
command.add_command(ssh)
command.add_command(systemd)
command.add_command(wheels)
