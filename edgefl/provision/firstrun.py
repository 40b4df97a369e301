"""Raspberry Pi OS Bookworm: `firstrun.sh`, started by the kernel's command line before there is a network."""

from __future__ import annotations

import ipaddress
import re
import shlex

from edgefl.core.errors import ConfigError
from edgefl.provision import provisioning_files
from edgefl.provision.sd_card import (
    MEMORY_CGROUP_ARGUMENT,
    CardNetwork,
    CardOptions,
    FileContents,
    ReadFile,
    edit_cmdline,
)

FIRSTRUN_CMDLINE_WORDS = (
    "systemd.run=/boot/firmware/firstrun.sh",
    "systemd.run_success_action=reboot",
    "systemd.unit=kernel-command-line.target",
)


def render_files(options: CardOptions, read: ReadFile) -> FileContents:
    """Returns `firstrun.sh` and `cmdline.txt`.

    Raises:
        ConfigError: the card has no cmdline.txt, or a firstrun.sh of its own.
    """
    cmdline = read("cmdline.txt")
    if cmdline is None:
        raise ConfigError("Bookworm's first boot begins in cmdline.txt, and this partition has none")
    existing = read("firstrun.sh")
    if existing is not None and b"edgefl" not in existing:
        raise ConfigError(
            "the card has a firstrun.sh already, written by Raspberry Pi Imager: write the card without Imager's "
            "settings and say them here (--user, --ssh-key, --wifi-ssid), or remove firstrun.sh"
        )
    edited_cmdline = edit_cmdline(
        cmdline.decode("utf-8", errors="replace"),
        add=[MEMORY_CGROUP_ARGUMENT, *FIRSTRUN_CMDLINE_WORDS],
        should_drop=lambda word: word.startswith("systemd.run"),
    )
    return {"firstrun.sh": render_script(options), "cmdline.txt": edited_cmdline}


def render_script(options: CardOptions) -> bytes:
    """Returns the script with the options as quoted words."""
    network = options.network
    words = {
        "HOSTNAME": options.hostname or options.name,
        "USER": options.user or ("pi" if options.ssh_keys else ""),
        "SSH_KEY": "\n".join(options.ssh_keys),
        "SSID": network.ssid or "",
        # NetworkManager's profiles accept a name as bytes, whatever it contains.
        "SSID_BYTES": "".join(f"{byte};" for byte in (network.ssid or "").encode()),
        "PSK": network.psk or "",
        "COUNTRY": network.country or "",
        "HIDDEN": "true" if network.is_hidden else "",
        "INTERFACE": network.interface,
        "ADDRESSES": _render_addresses(network),
    }
    template = provisioning_files.load_text("raspberry-pi/firstrun.sh")
    return re.sub(r"@([A-Z_]+)@", lambda match: shlex.quote(words[match[1]]), template).encode()


def _render_addresses(network: CardNetwork) -> str:
    """Returns a fixed address and its name servers as NetworkManager sections, one per address family."""
    if network.address is None:
        return ""
    fixed_version = ipaddress.ip_interface(network.address).version
    sections = []
    for version in (4, 6):
        lines = [f"[ipv{version}]", "method=auto"]
        if version == fixed_version:
            lines[1:] = ["method=manual", f"address1={network.address},{network.gateway}"]
        servers = [server for server in network.dns if ipaddress.ip_address(server).version == version]
        lines += [f"dns={''.join(f'{server};' for server in servers)}"] if servers else []
        sections += lines
    return "\n".join(sections)
