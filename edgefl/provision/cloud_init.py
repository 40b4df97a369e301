"""The files of cloud-init's NoCloud: Raspberry Pi OS Trixie and later, and any Debian with a seed on its card."""

from __future__ import annotations

import re
from typing import Any

import yaml

from edgefl.errors import ConfigError
from edgefl.provision import sources
from edgefl.provision.card import CGROUP, MARK, Files, Network, Read, Wishes, edited_cmdline
from edgefl.untrusted import MOST_NESTED, check_nesting, is_int64

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML can be built without libyaml
_MOST_ENTRIES = 10_000
HEADER = "#cloud-config"
FIRSTBOOT = ["sh", "/boot/firmware/edgefl/firstboot.sh"]
START_SSH = ["systemctl", "enable", "--now", "ssh"]


def files(wishes: Wishes, read: Read) -> Files:
    """Returns `user-data`, `network-config`, `meta-data` and what changes in `cmdline.txt`.

    What Raspberry Pi Imager or the user wrote stays where the wishes say nothing else: accounts, Wi-Fi, host name. So
    does the network of an earlier call.

    Raises:
        ConfigError: the card's own user-data cannot be understood.
    """
    made: Files = {
        "user-data": user_data(wishes, _text(read("user-data"))),
        "meta-data": meta_data(wishes),
    }
    known = _network(_text(read("network-config")))
    if not known or not wishes.network.is_default:
        made["network-config"] = network_config(wishes.network, known.get("wifis"))
    cmdline = read("cmdline.txt")
    if cmdline is not None:
        made["cmdline.txt"] = _cmdline(_text(cmdline), wishes.instance_id)
    return made


def user_data(wishes: Wishes, known_text: str = "") -> bytes:
    """Returns a cloud-config that starts the payload; no token is in it."""
    known, ours = _cloud_config(known_text), yaml.safe_load(sources.text("raspberry-pi/user-data"))
    value = {**ours, **known}
    if wishes.hostname or "hostname" not in known:
        value["hostname"] = wishes.hostname or wishes.name
    if wishes.user or wishes.ssh_keys or "users" not in known:
        account = dict(ours["users"][0])
        account["name"] = wishes.user or account["name"]
        if wishes.ssh_keys:
            account["ssh_authorized_keys"] = list(wishes.ssh_keys)
        value["users"] = [account]
    commands = [command for command in known.get("runcmd", []) if command not in (FIRSTBOOT, START_SSH)]
    value["runcmd"] = [*([START_SSH] if wishes.ssh_keys else []), *commands, *ours["runcmd"]]
    return _dumped(value, HEADER)


def network_config(network: Network, known_wifis: object = None) -> bytes:
    """Returns netplan's version 2, as cloud-init takes it; a Wi-Fi that is known stays where no other is wished."""
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
        return _dumped({"network": value})
    point: dict[str, Any] = {"password": network.psk} if network.psk else {}
    point |= {"hidden": True} if network.hidden else {}
    country = {"regulatory-domain": network.country} if network.country else {}
    # A wire that is plugged in for repairs works as well, and nothing waits for it.
    value["ethernets"] = {network.interface: {"dhcp4": True, "optional": True}}
    value["wifis"] = {"wlan0": {**addresses, **country, "optional": False, "access-points": {network.ssid: point}}}
    return _dumped({"network": value})


def meta_data(wishes: Wishes) -> bytes:
    """Returns the identity of this first boot; another one on the same card makes it happen again."""
    hostname = wishes.hostname or wishes.name
    return _dumped({"dsmode": "local", "instance-id": wishes.instance_id, "local-hostname": hostname})


def _cmdline(text: str, instance_id: str) -> bytes:
    # Imager names an instance here, which cloud-init believes before meta-data: a new purpose needs the new name.
    text = re.sub(r"(?<=\bds=nocloud)((?:;[a-hj-z]=[^;\s]*)*);i=[^;\s]*", rf"\1;i={instance_id}", text)
    return edited_cmdline(text, add=[CGROUP], drop=lambda _: False)


def _cloud_config(text: str) -> dict[str, Any]:
    if not text.strip() or MARK in text:
        return {}
    try:
        value = _parsed(text)
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


def _network(text: str) -> dict[str, Any]:
    """Returns what somebody configured; the stock file says no more than that a wire may be plugged in."""
    try:
        value = _parsed(text)
    except ValueError:
        return {}
    network = value.get("network", value) if isinstance(value, dict) else {}
    if not isinstance(network, dict) or not network.get("wifis"):
        wired = network.get("ethernets") if isinstance(network, dict) else None
        stock = {"eth0": {"dhcp4": True, "optional": True}}
        return network if wired and wired != stock else {}
    return network


def _parsed(text: str) -> Any:
    """Returns the value in a YAML text; whatever is wrong with it is a `ValueError`."""
    try:
        _check_depth(text)
        value = _Loader(text).get_single_data()
    # What yaml makes of values that do not fit their tags.
    except (yaml.YAMLError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(str(error)) from None
    check_nesting(value)
    return value


def _check_depth(text: str) -> None:
    """Stops at the first bracket too many: where they are without end, making values of them takes minutes."""
    depth = 0
    for event in yaml.parse(text, _LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_NESTED:
            raise ValueError(f"it is nested deeper than {MOST_NESTED} levels")


class _Loader(_LOADER):  # type: ignore[misc, valid-type]  # which of two it is shows at run time
    """A safe loader for what is written again: of whole numbers of 64 bits, and without merges of merges."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        # `<<: [*a, *a]` doubles what it merges, in every line of a short text.
        if len(node.value) > _MOST_ENTRIES:
            raise ValueError(f"a table has more than {_MOST_ENTRIES} entries")

    def whole(self, node: yaml.Node) -> int:
        value: int = self.construct_yaml_int(node)
        if not is_int64(value):
            raise ValueError("a whole number has at most 64 bits")
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.whole)


def _dumped(value: dict[str, Any], *header: str) -> bytes:
    body = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=1000)
    return "\n".join([*header, f"# {MARK}; the join token is not in here.", body]).encode()


def _text(content: bytes | None) -> str:
    return (content or b"").decode("utf-8", errors="replace")
