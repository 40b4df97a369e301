"""Raspberry Pi OS Bookworm: `firstrun.sh`, which the kernel's command line starts before there is a network."""

from __future__ import annotations

import ipaddress
import re
import shlex

from edgefl.errors import ConfigError
from edgefl.provision import sources
from edgefl.provision.card import CGROUP, Files, Network, Read, Wishes, edited_cmdline

RUN = (
    "systemd.run=/boot/firmware/firstrun.sh",
    "systemd.run_success_action=reboot",
    "systemd.unit=kernel-command-line.target",
)


def files(wishes: Wishes, read: Read) -> Files:
    """Returns `firstrun.sh` and `cmdline.txt`.

    Raises:
        ConfigError: the card has no cmdline.txt, or a firstrun.sh of its own.
    """
    cmdline = read("cmdline.txt")
    if cmdline is None:
        raise ConfigError("Bookworm's first boot begins in cmdline.txt, and this partition has none")
    known = read("firstrun.sh")
    if known is not None and b"edgefl" not in known:
        raise ConfigError(
            "the card has a firstrun.sh already, written by Raspberry Pi Imager: write the card without Imager's "
            "settings and say them here (--user, --ssh-key, --wifi-ssid), or remove firstrun.sh"
        )
    edited = edited_cmdline(
        cmdline.decode("utf-8", errors="replace"),
        add=[CGROUP, *RUN],
        drop=lambda word: word.startswith("systemd.run"),
    )
    return {"firstrun.sh": firstrun(wishes), "cmdline.txt": edited}


def firstrun(wishes: Wishes) -> bytes:
    """Returns the script, with the wishes as quoted words."""
    network = wishes.network
    words = {
        "HOSTNAME": wishes.hostname or wishes.name,
        "USER": wishes.user or ("pi" if wishes.ssh_keys else ""),
        "SSH_KEY": "\n".join(wishes.ssh_keys),
        "SSID": network.ssid or "",
        # A profile of NetworkManager's takes a name as bytes as well, whatever it holds.
        "SSID_BYTES": "".join(f"{byte};" for byte in (network.ssid or "").encode()),
        "PSK": network.psk or "",
        "COUNTRY": network.country or "",
        "HIDDEN": "true" if network.hidden else "",
        "INTERFACE": network.interface,
        "ADDRESSES": _addresses(network),
    }
    template = sources.text("raspberry-pi/firstrun.sh")
    return re.sub(r"@([A-Z_]+)@", lambda found: shlex.quote(words[found[1]]), template).encode()


def _addresses(network: Network) -> str:
    """Returns a fixed address and its name servers as sections of a profile of NetworkManager's, one per family."""
    if network.address is None:
        return ""
    fixed = ipaddress.ip_interface(network.address).version
    sections = []
    for version in (4, 6):
        lines = [f"[ipv{version}]", "method=auto"]
        if version == fixed:
            lines[1:] = ["method=manual", f"address1={network.address},{network.gateway}"]
        servers = [server for server in network.dns if ipaddress.ip_address(server).version == version]
        lines += [f"dns={''.join(f'{server};' for server in servers)}"] if servers else []
        sections += lines
    return "\n".join(sections)
