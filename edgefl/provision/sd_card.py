"""A Raspberry Pi's card: options of its boot partition for each kind of system, and its Wi-Fi."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from edgefl.core.errors import UsageError
from edgefl.provision.provisioning_files import ReadFile

MAX_SSID_BYTES = 32
_KEY = re.compile(r"[0-9a-fA-F]{64}\Z")
_PASSPHRASE = re.compile(r"[ -~]{8,63}\Z")
_COUNTRY = re.compile(r"[A-Z]{2}\Z")
BACKUP_SUFFIX = ".before-edgefl"
GENERATED_MARK = "Written by edgefl provision"
MEMORY_CGROUP_ARGUMENT = "cgroup_enable=memory"
"""Raspberry Pi's firmware disables memory limits; without this, those of the units have no effect."""
_HOSTNAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\Z")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}\Z")
_SSH_KEY = re.compile(r"(?:ssh-(?:ed25519|rsa)|ecdsa-sha2-nistp\d+|sk-[a-z0-9@.-]+) [A-Za-z0-9+/=]+(?: [ -~]*)?\Z")
_INTERFACE = re.compile(r"[A-Za-z0-9_.-]{1,15}\Z")


def compute_pre_shared_key(ssid: str, passphrase: str) -> str:
    """Returns WPA2's 64 hexadecimal digits of a passphrase; a key passes unchanged.

    Raises:
        UsageError: it is neither; the message does not show it.

    Source: IEEE 802.11i, annex H.4 (PBKDF2, HMAC-SHA1, 4096 rounds).
    """
    if _KEY.match(passphrase):
        return passphrase.lower()
    if not _PASSPHRASE.match(passphrase):
        raise UsageError(
            f"a Wi-Fi password has 8 to 63 plain characters, or is a key of 64 hexadecimal digits; "
            f"got {len(passphrase)} characters"
        )
    return hashlib.pbkdf2_hmac("sha1", passphrase.encode(), ssid.encode(), 4096, 32).hex()


def validate_ssid(ssid: str) -> str:
    """Returns a valid network name; raises `UsageError`."""
    if not 1 <= len(ssid.encode()) <= MAX_SSID_BYTES or not ssid.isprintable():
        raise UsageError(f"a Wi-Fi name has 1 to {MAX_SSID_BYTES} printable bytes, got {ssid!r}")
    return ssid


def validate_country(country: str) -> str:
    """Returns a valid country code, for the radio's rules; raises `UsageError`."""
    if not _COUNTRY.match(country.upper()):
        raise UsageError(f"a Wi-Fi country has two letters, such as DE or GB, got {country!r}")
    return country.upper()


class OsFlavour(StrEnum):
    """System that reads the card at the first boot."""

    TRIXIE = "trixie"
    BOOKWORM = "bookworm"
    PRESEED = "preseed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardNetwork:
    """Network of the device: Wi-Fi with an `ssid`, else the cable; DHCP without an `address`."""

    ssid: str | None = None
    psk: str | None = field(default=None, repr=False)
    country: str | None = None
    is_hidden: bool = False
    address: str | None = None
    gateway: str | None = None
    dns: tuple[str, ...] = ()
    interface: str = "eth0"

    @property
    def is_default(self) -> bool:
        return self == CardNetwork()


@dataclass(frozen=True, slots=True, kw_only=True)
class CardOptions:
    """Settings of a card's system; None and empty leave the card's own or the default."""

    name: str
    hostname: str | None = None
    user: str | None = None
    ssh_keys: tuple[str, ...] = ()
    network: CardNetwork = field(default_factory=CardNetwork)
    instance_id: str = "edgefl"


def detect_system(read: ReadFile) -> tuple[OsFlavour, str]:
    """Returns the system that will read this boot partition, and the evidence for it."""
    if read("rpi-preseed.toml") is not None:
        return OsFlavour.PRESEED, "it has an rpi-preseed.toml"
    if any(read(name) is not None for name in ("user-data", "meta-data")):
        return OsFlavour.TRIXIE, "it has cloud-init's files"
    issued = re.search(rb"(20\d\d-\d\d)-\d\d", read("issue.txt") or b"")
    if issued and issued[1].decode() < "2025-11":
        return OsFlavour.BOOKWORM, f"its system is of {issued[1].decode()}"
    if b"raspberrypi-sys-mods/firstboot" in (read("cmdline.txt") or b""):
        return OsFlavour.BOOKWORM, "its cmdline.txt starts sys-mods/firstboot"
    return OsFlavour.TRIXIE, "nothing speaks against it"


def edit_cmdline(text: str, *, add: Iterable[str], should_drop: Callable[[str], bool]) -> bytes:
    """Returns the edited kernel command line; it is always one line."""
    words = [word for word in text.split() if not should_drop(word)]
    words += [word for word in add if word not in words]
    return (" ".join(words) + "\n").encode()


def validate_hostname(text: str) -> str:
    """Returns a valid host name; raises `UsageError`."""
    if not _HOSTNAME.match(text):
        raise UsageError(f"a host name has letters, digits and hyphens, up to 63, got {text!r}")
    return text


def validate_user(text: str) -> str:
    """Returns a valid account name; raises `UsageError`."""
    if not _USER.match(text) or text == "root":
        raise UsageError(f"a user name has small letters, digits, _ and -, up to 32, and is not root, got {text!r}")
    return text


def parse_ssh_keys(text: str, origin: str) -> tuple[str, ...]:
    """Returns the public keys of an OpenSSH file, one a line.

    Raises:
        UsageError: there is none, or it is a private one; the message does not show it.
    """
    if "PRIVATE KEY" in text:
        raise UsageError(f"{origin} is a private key: it stays where it is; give the file that ends in .pub")
    keys = tuple(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))
    if not keys or not all(map(_SSH_KEY.match, keys)):
        raise UsageError(
            f"{origin} holds no public SSH key; make one with ssh-keygen and give the file ending in .pub"
        )
    return keys


def validate_static_address(
    address: str, gateway: str | None, dns: Iterable[str]
) -> tuple[str, str, tuple[str, ...]]:
    """Returns address with prefix, gateway and name servers of a static configuration.

    Raises:
        UsageError: one of them is invalid, or the gateway is not in the address's network.
    """
    try:
        interface = ipaddress.ip_interface(address)
        if "/" not in address or gateway is None:
            raise UsageError(
                "a static address has its prefix and a gateway: --address 10.0.0.7/24 --gateway 10.0.0.1"
            )
        if ipaddress.ip_address(gateway) not in interface.network:
            raise UsageError(f"the gateway {gateway} is not in the network of {address}")
        servers = tuple(str(ipaddress.ip_address(server)) for server in dns)
    except ValueError as error:
        raise UsageError(f"{error}; an address is written as 10.0.0.7/24") from None
    return str(interface), str(ipaddress.ip_address(gateway)), servers or (str(ipaddress.ip_address(gateway)),)


def validate_interface(text: str) -> str:
    """Returns a valid interface name; raises `UsageError`."""
    if not _INTERFACE.match(text):
        raise UsageError(f"an interface is named as eth0 or end0, got {text!r}")
    return text
