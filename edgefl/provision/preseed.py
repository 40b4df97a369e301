"""`rpi-preseed.toml`, the announced successor of cloud-init on Raspberry Pi OS: experimental, as it is itself."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from edgefl.errors import ConfigError, UsageError
from edgefl.provision import sources
from edgefl.provision.card import CGROUP, MARK, Files, Read, Wishes, edited_cmdline
from edgefl.untrusted import parse_toml

NAME = "rpi-preseed.toml"
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")
_TABLES = ("runcmd", "system", "user", "ssh", "wlan", "ethernet")


def files(wishes: Wishes, read: Read) -> Files:
    """Returns the settings, with what the card's own say beside, and `cmdline.txt`.

    Raises:
        ConfigError: the card's own settings are no TOML.
        UsageError: a Wi-Fi is to have a fixed address.
    """
    made: Files = {NAME: preseed(wishes, (read(NAME) or b"").decode("utf-8", errors="replace"))}
    cmdline = read("cmdline.txt")
    if cmdline is not None:
        text = cmdline.decode("utf-8", errors="replace")
        made["cmdline.txt"] = edited_cmdline(text, add=[CGROUP], drop=lambda _: False)
    return made


def preseed(wishes: Wishes, known_text: str = "") -> bytes:
    """Returns the settings of a board that runs the payload's script at its first boot."""
    ours = parse_toml(sources.text(f"raspberry-pi/{NAME}"))
    try:
        known = {} if MARK in known_text else parse_toml(known_text)
    except ValueError as error:
        raise ConfigError(f"the card's {NAME} is no TOML: {error}; mend or remove it") from None
    _check(known)
    value: dict[str, Any] = {**ours, **known, "runcmd": {**known.get("runcmd", {}), **ours["runcmd"]}}
    commands = [*known.get("runcmd", {}).get("early", []), *ours["runcmd"]["early"]]
    value["runcmd"]["early"] = list(dict.fromkeys(commands))
    for section, settings in _sections(wishes, known).items():
        value[section] = {**known.get(section, {}), **settings}
    return f"# {MARK}; the join token is not in here.\n{_checked_toml(value)}".encode()


def _check(known: dict[str, Any]) -> None:
    """Checks that a card's settings are of the kind that is written back: plain values and one level of tables."""
    tables = {name: table for name, table in known.items() if isinstance(table, dict)}
    loose = {name: value for name, value in known.items() if name not in tables}
    for section, settings in {"": loose, **tables}.items():
        for name, value in settings.items():
            if not (_BARE_KEY.match(name) and all(map(_is_plain, value if isinstance(value, list) else [value]))):
                raise ConfigError(
                    f"the card's {NAME} holds {section}.{name}, which cannot be kept; mend or remove it"
                )
    is_table = all(isinstance(known.get(name, {}), dict) for name in _TABLES)
    commands = known.get("runcmd", {}).get("early", []) if is_table else None
    if not all(map(_BARE_KEY.match, tables)) or not isinstance(commands, list):
        raise ConfigError(f"the card's {NAME} has no tables where they are due; mend or remove it")


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _sections(wishes: Wishes, known: dict[str, Any]) -> dict[str, dict[str, Any]]:
    network, made = wishes.network, dict[str, dict[str, Any]]()
    if wishes.hostname or "hostname" not in known.get("system", {}):
        made["system"] = {"hostname": wishes.hostname or wishes.name}
    if wishes.user:
        made["user"] = {"name": wishes.user}
    if wishes.ssh_keys:
        keys = list(wishes.ssh_keys)
        made["ssh"] = {"enabled": True, "password_authentication": False, "authorized_keys": keys}
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
        made["wlan"] = {"ssid": network.ssid, **security, **country, "hidden": network.hidden}
    elif network.address:
        static = {"method": "static", "address": network.address, "gateway": network.gateway}
        made["ethernet"] = {"interface": network.interface, **static, "dns": list(network.dns)}
    return made


def _checked_toml(value: dict[str, Any]) -> str:
    try:
        text = _toml(value)
        is_kept = parse_toml(text) == value
    except (TypeError, ValueError):
        is_kept = False
    if not is_kept:
        raise ConfigError(
            f"the card's {NAME} holds more than plain values in one level of tables (dates, tables in tables, odd "
            "keys), which cannot be kept; mend or remove it"
        )
    return text


def _toml(value: dict[str, Any]) -> str:
    """Plain values and one level of tables, which is all that rpi-preseed reads; JSON's are TOML's."""
    lines = [f"{key} = {_word(item)}" for key, item in value.items() if not isinstance(item, dict)]
    for section, settings in value.items():
        if isinstance(settings, dict):
            lines += ["", f"[{section}]", *(f"{key} = {_word(item)}" for key, item in settings.items())]
    return "\n".join(lines) + "\n"


def _word(value: object) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
