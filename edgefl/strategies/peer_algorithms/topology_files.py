"""Topology and address files: `node_list.json` and `hosts.json` of the ECL-ISVR authors' README.

node_list.json  {"nodes": {NAME: {"device": …, "round": K, "edges": [NAME, …] or {NAME: SLOT, …}}, …}}
hosts.json      {"hosts": [{"name": NAME, "addr": HOST, "port": PORT}, …]}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.core.errors import ConfigError
from edgefl.core.safe_parsing import parse_json
from edgefl.strategies.peer_algorithms.topology import Edge, Topology

_MAX_PORT = 65535
_MAX_PERIOD = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """Listening address of a node."""

    name: str
    address: str
    port: int


def read_topology(path: str | Path) -> Topology:
    """Returns the topology of a `node_list.json`; the "device" entries are ignored.

    Raises:
        ConfigError: no such file, malformed, an edge that only one side lists, a slot outside of the node's round, or
            a graph that is not connected.
    """
    nodes = _get_table(_read_json(path), "nodes", path)
    edges: dict[str, dict[str, int]] = {}
    periods: dict[str, int] = {}
    for name, entry in nodes.items():
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{path}: node {name} must be a table, got {entry!r}")
        periods[name] = _parse_int(entry.get("round", 1), 1, _MAX_PERIOD, f"{path}: round of node {name}")
        edges[name] = _parse_edges(name, entry.get("edges"), periods[name], path)
    for name, neighbour_slots in edges.items():
        for neighbour in neighbour_slots:
            if neighbour not in edges:
                raise ConfigError(f"{path}: node {name} has an edge to {neighbour}, which is no node")
            if name not in edges[neighbour]:
                raise ConfigError(
                    f"{path}: node {name} lists the edge to {neighbour}, but {neighbour} not the one to {name}"
                )
    slots: dict[Edge, int] = {
        (name, neighbour): slot
        for name, neighbour_slots in edges.items()
        for neighbour, slot in neighbour_slots.items()
    }
    try:
        return Topology.from_edges(edges, slots, slots=slots, periods=periods)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_hosts(path: str | Path) -> dict[str, PeerAddress]:
    """Returns the hosts of a `hosts.json` by name.

    Raises:
        ConfigError: no such file, malformed, or a duplicate name or address.
    """
    content = _read_json(path).get("hosts")
    if not isinstance(content, list):
        raise ConfigError(f'{path} must hold a list "hosts"')
    hosts: dict[str, PeerAddress] = {}
    for number, entry in enumerate(content, 1):
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{path}: host {number} must be a table, got {entry!r}")
        name, address = entry.get("name"), entry.get("addr")
        for key, value in (("name", name), ("addr", address)):
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{path}: {key} of host {number} must be a text, got {value!r}")
        host = PeerAddress(
            name=str(name),
            address=str(address),
            port=_parse_int(entry.get("port"), 1, _MAX_PORT, f"{path}: port of host {number}"),
        )
        for other in hosts.values():
            if other.name == host.name or (other.address, other.port) == (host.address, host.port):
                raise ConfigError(
                    f"{path}: host {number} ({host.name}, {host.address}:{host.port}) stands there twice"
                )
        hosts[host.name] = host
    return hosts


def _parse_edges(name: str, entry: Any, period: int, path: str | Path) -> dict[str, int]:
    if isinstance(entry, list) and all(isinstance(neighbour, str) for neighbour in entry):
        if len(set(entry)) != len(entry):
            raise ConfigError(f"{path}: node {name} lists a neighbour twice: {', '.join(entry)}")
        return dict.fromkeys(entry, 0)
    if isinstance(entry, Mapping):
        return {
            str(neighbour): _parse_int(slot, 0, period - 1, f"{path}: slot of the edge from {name} to {neighbour}")
            for neighbour, slot in entry.items()
        }
    raise ConfigError(f"{path}: edges of node {name} must be a list of names or a table of slots, got {entry!r}")


def _parse_int(value: Any, minimum: int, maximum: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ConfigError(f"{what} must be a whole number from {minimum} to {maximum}, got {value!r}")
    return value


def _get_table(content: Mapping[str, Any], key: str, path: str | Path) -> Mapping[str, Any]:
    table = content.get(key)
    if not isinstance(table, Mapping):
        raise ConfigError(f'{path} must hold a table "{key}"')
    return table


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the table; the JSON parser would silently keep the last of two equal keys."""
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands in one table twice")
    return table


def _read_json(path: str | Path) -> Mapping[str, Any]:
    try:
        content = parse_json(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_reject_duplicates)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} must hold a table")
    return content
