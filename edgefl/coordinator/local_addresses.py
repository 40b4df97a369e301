"""Addresses of this machine, from the system, without sending a packet."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct

SIOCGIFADDR = 0x8915
# Documentation addresses: connecting a datagram socket only picks a route.
PROBE_ADDRESSES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def list_local_addresses() -> tuple[str, ...]:
    """Returns this machine's reachable addresses, that of the default route first."""
    addresses = [*_list_routed(), *_list_interface_addresses(), *_list_resolved()]
    usable = (address for address in addresses if _is_reachable(address))
    return tuple(dict.fromkeys(usable))


def _list_routed() -> list[str]:
    addresses: list[str] = []
    for family, target in PROBE_ADDRESSES:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            addresses.append(str(probe.getsockname()[0]))
    return addresses


def _list_interface_addresses() -> list[str]:
    try:
        import fcntl  # noqa: PLC0415 not on every system
    except ImportError:
        return []
    addresses: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses.append(socket.inet_ntoa(reply[20:24]))
    return addresses


def _list_resolved() -> list[str]:
    try:
        return [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)]
    except OSError:
        return []


def _is_reachable(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified or parsed.is_multicast)
