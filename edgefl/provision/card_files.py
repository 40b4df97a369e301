"""All files of a Raspberry Pi's card: the payload, and those its system reads at the first boot.

These are cloud-init's NoCloud (Raspberry Pi OS from Trixie on, and Debian with a seed on its card), Bookworm's
`firstrun.sh`, which the kernel's command line starts before there is a network, and `rpi-preseed.toml`, announced
successor of cloud-init: experimental, like the format itself.
"""

from __future__ import annotations

import ipaddress
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from edgefl.core.errors import ConfigError, UsageError
from edgefl.core.safe_parsing import MAX_NESTING, check_nesting, format_toml, is_int64, parse_toml
from edgefl.provision import provisioning_files
from edgefl.provision.payload import PAYLOAD_FOLDER
from edgefl.provision.provisioning_files import FileContents, ReadFile
from edgefl.provision.sd_card import (
    BACKUP_SUFFIX,
    GENERATED_MARK,
    MEMORY_CGROUP_ARGUMENT,
    CardNetwork,
    CardOptions,
    OsFlavour,
    edit_cmdline,
)

_BASE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML can be built without libyaml
_MAX_ENTRIES = 10_000
HEADER = "#cloud-config"
FIRSTBOOT_COMMAND = ["sh", "/boot/firmware/edgefl/firstboot.sh"]
START_SSH_COMMAND = ["systemctl", "enable", "--now", "ssh"]
FIRSTRUN_CMDLINE_WORDS = (
    "systemd.run=/boot/firmware/firstrun.sh",
    "systemd.run_success_action=reboot",
    "systemd.unit=kernel-command-line.target",
)
PRESEED_NAME = "rpi-preseed.toml"
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")
_TABLES = ("runcmd", "system", "user", "ssh", "wlan", "ethernet")
_OUR_CMDLINE_WORDS = frozenset(word.encode() for word in FIRSTRUN_CMDLINE_WORDS)


def render_card_files(
    system: OsFlavour, options: CardOptions, payload: Mapping[str, bytes | Path], read: ReadFile
) -> FileContents:
    """Returns all files of the card, the payload first.

    Raises:
        ConfigError: existing files of the card cannot be kept; see the messages.
    """
    render = {
        OsFlavour.TRIXIE: render_cloud_init_files,
        OsFlavour.BOOKWORM: render_firstrun_files,
        OsFlavour.PRESEED: render_preseed_files,
    }[system]
    files: FileContents = {f"{PAYLOAD_FOLDER}/{name}": content for name, content in payload.items()}
    system_files = render(options, lambda name: _read_original(name, read))
    files |= {
        f"{name}{BACKUP_SUFFIX}": old
        for name in system_files
        if (old := _read_backup_content(name, read)) is not None
    }
    return files | system_files


def _read_original(name: str, read: ReadFile) -> bytes | None:
    """Returns a file as it was before edgefl; two of them as they are now.

    These are the network, which an earlier call may have set, and the kernel's command line, without our words.
    """
    present, backup = read(name), read(f"{name}{BACKUP_SUFFIX}")
    if name == "network-config":
        return present
    if name != "cmdline.txt":
        return backup or present
    if present is None or backup is None:
        return present
    # The first boot gives the disk another id, used by root=: with the earlier line the device no longer boots.
    backup_words = backup.split()
    return b" ".join(word for word in present.split() if word in backup_words or word not in _OUR_CMDLINE_WORDS)


def _read_backup_content(name: str, read: ReadFile) -> bytes | None:
    """Returns a file's backup to keep beside its replacement: the user's own, once, without tokens."""
    old = read(name)
    if old is None or read(f"{name}{BACKUP_SUFFIX}") is not None or GENERATED_MARK.encode() in old or b"efl1." in old:
        return None
    return old


def render_cloud_init_files(options: CardOptions, read: ReadFile) -> FileContents:
    """Returns `user-data`, `network-config`, `meta-data` and changes of `cmdline.txt`.

    Settings by Raspberry Pi Imager or the user stay unless the options override them: accounts, Wi-Fi, host name. So
    does the network of an earlier call.

    Raises:
        ConfigError: the card's own user-data cannot be parsed.
    """
    files: FileContents = {
        "user-data": render_user_data(options, _decode_text(read("user-data"))),
        "meta-data": render_meta_data(options),
    }
    network = _parse_network(_decode_text(read("network-config")))
    if not network or not options.network.is_default:
        files["network-config"] = render_network_config(options.network, network.get("wifis"))
    cmdline = read("cmdline.txt")
    if cmdline is not None:
        files["cmdline.txt"] = _edit_cmdline(_decode_text(cmdline), options.instance_id)
    return files


def render_user_data(options: CardOptions, known_text: str = "") -> bytes:
    """Returns a cloud-config that starts the payload; it contains no token."""
    existing, defaults = (
        _parse_cloud_config(known_text),
        yaml.safe_load(provisioning_files.load_text("raspberry-pi/user-data")),
    )
    value = {**defaults, **existing}
    if options.hostname or "hostname" not in existing:
        value["hostname"] = options.hostname or options.name
    if options.user or options.ssh_keys or "users" not in existing:
        account = dict(defaults["users"][0])
        account["name"] = options.user or account["name"]
        if options.ssh_keys:
            account["ssh_authorized_keys"] = list(options.ssh_keys)
        value["users"] = [account]
    commands = [
        command for command in existing.get("runcmd", []) if command not in (FIRSTBOOT_COMMAND, START_SSH_COMMAND)
    ]
    value["runcmd"] = [*([START_SSH_COMMAND] if options.ssh_keys else []), *commands, *defaults["runcmd"]]
    return _dump_yaml(value, HEADER)


def render_network_config(network: CardNetwork, known_wifis: object = None) -> bytes:
    """Returns netplan's version 2 for cloud-init; a known Wi-Fi stays unless another is requested."""
    addresses: dict[str, Any] = {"dhcp4": True}
    if network.address:
        addresses = {
            "dhcp4": False,
            "addresses": [network.address],
            "routes": [{"to": "default", "via": network.gateway}],
            "nameservers": {"addresses": list(network.dns)},
        }
    value: dict[str, Any] = {"version": 2}
    if network.ssid is None:
        value["ethernets"] = {network.interface: {**addresses, "optional": False}}
        value |= {"wifis": known_wifis} if known_wifis else {}
        return _dump_yaml({"network": value})
    point: dict[str, Any] = {"password": network.psk} if network.psk else {}
    point |= {"hidden": True} if network.is_hidden else {}
    country = {"regulatory-domain": network.country} if network.country else {}
    # A cable plugged in for repairs works as well, and nothing waits for it.
    value["ethernets"] = {network.interface: {"dhcp4": True, "optional": True}}
    value["wifis"] = {"wlan0": {**addresses, **country, "optional": False, "access-points": {network.ssid: point}}}
    return _dump_yaml({"network": value})


def render_meta_data(options: CardOptions) -> bytes:
    """Returns the identity of this first boot; another one on the same card makes it run again."""
    hostname = options.hostname or options.name
    return _dump_yaml({"dsmode": "local", "instance-id": options.instance_id, "local-hostname": hostname})


def _edit_cmdline(text: str, instance_id: str) -> bytes:
    # Imager names an instance here, which for cloud-init overrides meta-data: a new purpose needs the new name.
    text = re.sub(r"(?<=\bds=nocloud)((?:;[a-hj-z]=[^;\s]*)*);i=[^;\s]*", rf"\1;i={instance_id}", text)
    return edit_cmdline(text, add=[MEMORY_CGROUP_ARGUMENT], should_drop=lambda _: False)


def _parse_cloud_config(text: str) -> dict[str, Any]:
    if not text.strip() or GENERATED_MARK in text:
        return {}
    try:
        value = _parse_yaml(text)
    except ValueError:
        value = "no YAML"
    if not text.startswith(HEADER) or not isinstance(value, dict | None):
        raise ConfigError(
            "the card's user-data is no cloud-config, so it cannot be kept; put it elsewhere or remove it"
        )
    value = value or {}
    if not isinstance(value.get("runcmd", []), list) or not isinstance(value.get("users", []), list):
        raise ConfigError("the card's user-data has a runcmd or users that is no list; mend it or remove the file")
    return value


def _parse_network(text: str) -> dict[str, Any]:
    """Returns the configured network; the stock file only allows an optional cable."""
    try:
        value = _parse_yaml(text)
    except ValueError:
        return {}
    network = value.get("network", value) if isinstance(value, dict) else {}
    if not isinstance(network, dict) or not network.get("wifis"):
        wired = network.get("ethernets") if isinstance(network, dict) else None
        default_wired = {"eth0": {"dhcp4": True, "optional": True}}
        return network if wired and wired != default_wired else {}
    return network


def _parse_yaml(text: str) -> Any:
    """Returns the value of a YAML text; raises `ValueError` for any fault in it."""
    try:
        _check_depth(text)
        value = _SafeYamlLoader(text).get_single_data()
    # Raised by yaml for values that do not fit their tags.
    except (yaml.YAMLError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(str(error)) from None
    check_nesting(value)
    return value


def _check_depth(text: str) -> None:
    """Rejects deep nesting at the first bracket too many: building the values would take minutes."""
    depth = 0
    for event in yaml.parse(text, _BASE_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_NESTING:
            raise ValueError(f"it is nested deeper than {MAX_NESTING} levels")


class _SafeYamlLoader(_BASE_LOADER):  # type: ignore[misc, valid-type]  # which of two it is shows at run time
    """Safe loader for text that is written again: 64-bit integers only, and no nested merges."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        # `<<: [*a, *a]` doubles the merged mapping, in every line of a short text.
        if len(node.value) > _MAX_ENTRIES:
            raise ValueError(f"a table has more than {_MAX_ENTRIES} entries")

    def construct_int64(self, node: yaml.Node) -> int:
        value: int = self.construct_yaml_int(node)
        if not is_int64(value):
            raise ValueError("a whole number has at most 64 bits")
        return value


_SafeYamlLoader.add_constructor("tag:yaml.org,2002:int", _SafeYamlLoader.construct_int64)


def _dump_yaml(value: dict[str, Any], *header: str) -> bytes:
    body = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=1000)
    return "\n".join([*header, f"# {GENERATED_MARK}; the join token is not in here.", body]).encode()


def _decode_text(content: bytes | None) -> str:
    return (content or b"").decode("utf-8", errors="replace")


def render_firstrun_files(options: CardOptions, read: ReadFile) -> FileContents:
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
        _decode_text(cmdline),
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


def render_preseed_files(options: CardOptions, read: ReadFile) -> FileContents:
    """Returns the settings, merged with the card's own, and `cmdline.txt`.

    Raises:
        ConfigError: the card's own settings are no TOML.
        UsageError: a Wi-Fi is to have a fixed address.
    """
    files: FileContents = {PRESEED_NAME: render_preseed(options, _decode_text(read(PRESEED_NAME)))}
    cmdline = read("cmdline.txt")
    if cmdline is not None:
        files["cmdline.txt"] = edit_cmdline(
            _decode_text(cmdline), add=[MEMORY_CGROUP_ARGUMENT], should_drop=lambda _: False
        )
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
    return f"# {GENERATED_MARK}; the join token is not in here.\n{format_toml(value)}".encode()


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
