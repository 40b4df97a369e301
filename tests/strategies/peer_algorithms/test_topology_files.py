"""`node_list.json` and `hosts.json`: what is read, and what is refused with the place where it stands."""

import json
from pathlib import Path
from typing import Any

import pytest

from edgefl.core.errors import ConfigError
from edgefl.strategies.peer_algorithms.topology import read_hosts, read_topology

NODES = {
    "north": {"device": "cuda:0", "round": 8, "edges": {"east": 0, "west": 4}},
    "east": {"device": "cpu", "round": 8, "edges": {"north": 0, "west": 2}},
    "west": {"round": 4, "edges": ["north", "east"]},
}


def file_with(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "file.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def changed(name: str, **entry: Any) -> dict[str, Any]:
    return {"nodes": {**NODES, name: {**NODES.get(name, {}), **entry}}}


def test_a_node_list_becomes_a_graph(tmp_path: Path) -> None:
    graph = read_topology(file_with(tmp_path, {"nodes": NODES}))
    assert graph.nodes == ("north", "east", "west")
    assert graph.edges == (("north", "east"), ("north", "west"), ("east", "west"))
    assert graph.periods == {"north": 8, "east": 8, "west": 4}
    assert graph.slots["north", "west"] == 4
    assert graph.slots["west", "north"] == 0
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_topology(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ({}, 'must hold a table "nodes"'),
        ({"nodes": {"a": 3}}, "node a must be a table, got 3"),
        (changed("west", edges=["north"]), "node east lists the edge to west, but west not the one to east"),
        (changed("west", edges=["north", "east", "south"]), "node west has an edge to south, which is no node"),
        (changed("north", edges={"east": 8, "west": 4}), "slot of the edge from north to east .* from 0 to 7, got 8"),
        (changed("north", round=0), "round of node north must be a whole number from 1 to 1000000000, got 0"),
        (
            changed("west", edges="north"),
            "edges of node west must be a list of names or a table of slots, got 'north'",
        ),
        (changed("west", edges=["north", "north", "east"]), "node west lists a neighbour twice"),
        (
            {"nodes": {**NODES, "x": {"edges": ["y"]}, "y": {"edges": ["x"]}}},
            "the graph is not connected: no path from north to x, y",
        ),
        (
            '{"nodes": {"a": {"edges": ["b"]}, "b": {"edges": ["a"]}, "a": {"edges": ["b"]}}}',
            "'a' stands in one table twice",
        ),
    ],
)
def test_a_node_list_that_makes_no_sense_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_topology(file_with(tmp_path, content))


def test_hosts_are_read_by_name(tmp_path: Path) -> None:
    hosts = read_hosts(file_with(tmp_path, {"hosts": [{"name": "north", "addr": "10.0.0.2", "port": 7001}]}))
    assert hosts == {"north": "10.0.0.2:7001"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, 'must hold a list "hosts"'),
        ({"hosts": [{"name": "n", "addr": "a", "port": 0}]}, "port of host 1 must be a whole number from 1 to 65535"),
        ({"hosts": [{"name": "", "addr": "a", "port": 1}]}, "name of host 1 must be a text, got ''"),
        ({"hosts": [{"name": n, "addr": "a", "port": 1} for n in "nm"]}, r"host 2 \(m, a:1\) stands there twice"),
    ],
)
def test_hosts_that_make_no_sense_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_hosts(file_with(tmp_path, content))
