"""Files of cloud-init's NoCloud: Raspberry Pi OS from Trixie on, and Debian with a seed on its card."""

from __future__ import annotations

import re
from typing import Any

import yaml

from edgefl.core.errors import ConfigError
from edgefl.core.safe_parsing import MAX_NESTING, check_nesting, is_int64
from edgefl.provision import provisioning_files
from edgefl.provision.sd_card import (
    GENERATED_MARK,
    MEMORY_CGROUP_ARGUMENT,
    CardNetwork,
    CardOptions,
    FileContents,
    ReadFile,
    edit_cmdline,
)

_BASE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML can be built without libyaml
_MAX_ENTRIES = 10_000
HEADER = "#cloud-config"
FIRSTBOOT_COMMAND = ["sh", "/boot/firmware/edgefl/firstboot.sh"]
START_SSH_COMMAND = ["systemctl", "enable", "--now", "ssh"]


def render_files(options: CardOptions, read: ReadFile) -> FileContents:
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
