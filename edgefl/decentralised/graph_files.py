"""Graphs and addresses as files have them: `node_list.json` and `hosts.json` of the ECL-ISVR authors' README.

node_list.json  {"nodes": {NAME: {"device": …, "round": K, "edges": [NAME, …] or {NAME: SLOT, …}}, …}}
hosts.json      {"hosts": [{"name": NAME, "addr": HOST, "port": PORT}, …]}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.decentralised.graph import Edge, Graph
from edgefl.errors import ConfigError
from edgefl.untrusted import parse_json

_MAX_PORT = 65535
_MAX_PERIOD = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where a node listens."""

    name: str
    address: str
    port: int


def read_graph(path: str | Path) -> Graph:
    """Returns the graph of a `node_list.json`; what "device" says is not ours.

    Raises:
        ConfigError: no such file, not of that form, an edge that only one side lists, a slot outside of the node's
            round, or a graph that is not connected.
    """
    nodes = _table(_json(path), "nodes", path)
    edges: dict[str, dict[str, int]] = {}
    periods: dict[str, int] = {}
    for name, entry in nodes.items():
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{path}: node {name} must be a table, got {entry!r}")
        periods[name] = _whole(entry.get("round", 1), 1, _MAX_PERIOD, f"{path}: round of node {name}")
        edges[name] = _edges(name, entry.get("edges"), periods[name], path)
    for name, found in edges.items():
        for other in found:
            if other not in edges:
                raise ConfigError(f"{path}: node {name} has an edge to {other}, which is no node")
            if name not in edges[other]:
                raise ConfigError(f"{path}: node {name} lists the edge to {other}, but {other} not the one to {name}")
    slots: dict[Edge, int] = {(name, other): slot for name, found in edges.items() for other, slot in found.items()}
    try:
        return Graph.of(edges, slots, slots=slots, periods=periods)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_hosts(path: str | Path) -> dict[str, Host]:
    """Returns the hosts of a `hosts.json` by name.

    Raises:
        ConfigError: no such file, not of that form, or a name or an address that stands twice.
    """
    content = _json(path).get("hosts")
    if not isinstance(content, list):
        raise ConfigError(f'{path} must hold a list "hosts"')
    hosts: dict[str, Host] = {}
    for number, entry in enumerate(content, 1):
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{path}: host {number} must be a table, got {entry!r}")
        name, address = entry.get("name"), entry.get("addr")
        for key, value in (("name", name), ("addr", address)):
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{path}: {key} of host {number} must be a text, got {value!r}")
        host = Host(
            name=str(name),
            address=str(address),
            port=_whole(entry.get("port"), 1, _MAX_PORT, f"{path}: port of host {number}"),
        )
        for other in hosts.values():
            if other.name == host.name or (other.address, other.port) == (host.address, host.port):
                raise ConfigError(
                    f"{path}: host {number} ({host.name}, {host.address}:{host.port}) stands there twice"
                )
        hosts[host.name] = host
    return hosts


def _edges(name: str, entry: Any, period: int, path: str | Path) -> dict[str, int]:
    if isinstance(entry, list) and all(isinstance(other, str) for other in entry):
        if len(set(entry)) != len(entry):
            raise ConfigError(f"{path}: node {name} lists a neighbour twice: {', '.join(entry)}")
        return dict.fromkeys(entry, 0)
    if isinstance(entry, Mapping):
        return {
            str(other): _whole(slot, 0, period - 1, f"{path}: slot of the edge from {name} to {other}")
            for other, slot in entry.items()
        }
    raise ConfigError(f"{path}: edges of node {name} must be a list of names or a table of slots, got {entry!r}")


def _whole(value: Any, lowest: int, highest: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise ConfigError(f"{what} must be a whole number from {lowest} to {highest}, got {value!r}")
    return value


def _table(content: Mapping[str, Any], key: str, path: str | Path) -> Mapping[str, Any]:
    found = content.get(key)
    if not isinstance(found, Mapping):
        raise ConfigError(f'{path} must hold a table "{key}"')
    return found


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the table; JSON would quietly keep the last of two nodes with one name."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands in one table twice")
    return found


def _json(path: str | Path) -> Mapping[str, Any]:
    try:
        content = parse_json(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_each_once)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} must hold a table")
    return content
