"""`rpi-preseed.toml`, announced successor of cloud-init on Raspberry Pi OS: experimental, like the format itself."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from edgefl.core.errors import ConfigError, UsageError
from edgefl.core.safe_parsing import parse_toml
from edgefl.provision import provisioning_files
from edgefl.provision.sd_card import (
    GENERATED_MARK,
    MEMORY_CGROUP_ARGUMENT,
    CardOptions,
    FileContents,
    ReadFile,
    edit_cmdline,
)

PRESEED_NAME = "rpi-preseed.toml"
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")
_TABLES = ("runcmd", "system", "user", "ssh", "wlan", "ethernet")


def render_files(options: CardOptions, read: ReadFile) -> FileContents:
    """Returns the settings, merged with the card's own, and `cmdline.txt`.

    Raises:
        ConfigError: the card's own settings are no TOML.
        UsageError: a Wi-Fi is to have a fixed address.
    """
    files: FileContents = {
        PRESEED_NAME: render_preseed(options, (read(PRESEED_NAME) or b"").decode("utf-8", errors="replace"))
    }
    cmdline = read("cmdline.txt")
    if cmdline is not None:
        text = cmdline.decode("utf-8", errors="replace")
        files["cmdline.txt"] = edit_cmdline(text, add=[MEMORY_CGROUP_ARGUMENT], should_drop=lambda _: False)
    return files


def render_preseed(options: CardOptions, known_text: str = "") -> bytes:
    """Returns the settings of a device that runs the payload's script at its first boot."""
    defaults = parse_toml(provisioning_files.load_text(f"raspberry-pi/{PRESEED_NAME}"))
    try:
        existing = {} if GENERATED_MARK in known_text else parse_toml(known_text)
    except ValueError as error:
        raise ConfigError(f"the card's {PRESEED_NAME} is no TOML: {error}; mend or remove it") from None
    _check_existing(existing)
    value: dict[str, Any] = {**defaults, **existing, "runcmd": {**existing.get("runcmd", {}), **defaults["runcmd"]}}
    commands = [*existing.get("runcmd", {}).get("early", []), *defaults["runcmd"]["early"]]
    value["runcmd"]["early"] = list(dict.fromkeys(commands))
    for section, settings in _make_sections(options, existing).items():
        value[section] = {**existing.get(section, {}), **settings}
    return f"# {GENERATED_MARK}; the join token is not in here.\n{_render_checked_toml(value)}".encode()


def _check_existing(known: dict[str, Any]) -> None:
    """Checks that a card's settings can be written back: scalars and one level of tables."""
    tables = {name: table for name, table in known.items() if isinstance(table, dict)}
    top_level = {name: value for name, value in known.items() if name not in tables}
    for section, settings in {"": top_level, **tables}.items():
        for name, value in settings.items():
            if not (_BARE_KEY.match(name) and all(map(_is_scalar, value if isinstance(value, list) else [value]))):
                raise ConfigError(
                    f"the card's {PRESEED_NAME} holds {section}.{name}, which cannot be kept; mend or remove it"
                )
    is_table = all(isinstance(known.get(name, {}), dict) for name in _TABLES)
    commands = known.get("runcmd", {}).get("early", []) if is_table else None
    if not all(map(_BARE_KEY.match, tables)) or not isinstance(commands, list):
        raise ConfigError(f"the card's {PRESEED_NAME} has no tables where they are due; mend or remove it")


def _is_scalar(value: object) -> bool:
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _make_sections(options: CardOptions, known: dict[str, Any]) -> dict[str, dict[str, Any]]:
    network, sections = options.network, dict[str, dict[str, Any]]()
    if options.hostname or "hostname" not in known.get("system", {}):
        sections["system"] = {"hostname": options.hostname or options.name}
    if options.user:
        sections["user"] = {"name": options.user}
    if options.ssh_keys:
        keys = list(options.ssh_keys)
        sections["ssh"] = {"enabled": True, "password_authentication": False, "authorized_keys": keys}
    if network.ssid and network.address:
        raise UsageError(
            f"rpi-preseed knows no fixed address of a Wi-Fi, got {network.address}: leave --ip out (DHCP) or "
            "--wifi-ssid (the wire); systems with --os trixie and bookworm can"
        )
    if network.ssid:
        security: dict[str, Any] = {"key_mgmt": "none"}
        if network.psk:
            security = {"password": network.psk, "password_encrypted": True, "key_mgmt": "wpa-psk"}
        country = {"country": network.country} if network.country else {}
        sections["wlan"] = {"ssid": network.ssid, **security, **country, "hidden": network.is_hidden}
    elif network.address:
        static = {"method": "static", "address": network.address, "gateway": network.gateway}
        sections["ethernet"] = {"interface": network.interface, **static, "dns": list(network.dns)}
    return sections


def _render_checked_toml(value: dict[str, Any]) -> str:
    try:
        text = _render_toml(value)
        is_kept = parse_toml(text) == value
    except (TypeError, ValueError):
        is_kept = False
    if not is_kept:
        raise ConfigError(
            f"the card's {PRESEED_NAME} holds more than plain values in one level of tables (dates, tables in "
            "tables, odd keys), which cannot be kept; mend or remove it"
        )
    return text


def _render_toml(value: dict[str, Any]) -> str:
    """Renders scalars and one level of tables, all that rpi-preseed reads; JSON literals are valid TOML."""
    lines = [f"{key} = {_render_value(item)}" for key, item in value.items() if not isinstance(item, dict)]
    for section, settings in value.items():
        if isinstance(settings, dict):
            lines += ["", f"[{section}]", *(f"{key} = {_render_value(item)}" for key, item in settings.items())]
    return "\n".join(lines) + "\n"


def _render_value(value: object) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
