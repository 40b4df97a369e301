"""Membership of a decentralised run: joining, leaving and returning nodes, and the edges between them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgefl.core.types import Array, PeerMessage
from edgefl.strategies.peer_algorithms.topology import Edge, Topology, connected_components

RETRY_S = 2.0
MAX_RETRY_S = 60.0


@dataclass(slots=True)
class NodeState:
    """State of one node.

    `exchanges` are those started, `iterations` the local ones; `assignment_id` is in flight, "" for none. `queue`
    holds queued messages, `sent` those in flight with its assignment. Of an autonomous node `iterations` are those
    reported, and its report counts when there are `until` of them. A resting node is present, but may not be asked.
    `interrupted_id` is the last assignment that was ended for a neighbour's request.
    """

    is_member: bool = True
    is_awaited: bool = False
    has_started: bool = False
    exchanges: int = 0
    iterations: int = 0
    assignment_id: str = ""
    is_report: bool = False
    is_resting: bool = False
    until: int = 0
    reported: int = 0
    losses: int = 0
    rests_until_s: float = 0.0
    queue: list[PeerMessage] = field(default_factory=list)
    sent: tuple[PeerMessage, ...] = ()
    edges_sent: str = ""
    interrupted_id: str = ""


@dataclass(slots=True)
class DecentralisedState:
    """State of a decentralised run: `model` is the mean of `models`, `num_resumes` the number of resumes.

    `bridges` connect components that absent nodes would leave disconnected. `edge_epochs` counts the starts of an
    edge, so that both ends restart it when one of them was away, and `edge_degrees` fixes the degree of its step
    size, which must be the same at both ends throughout an epoch. `halvings` are the versions from which on the
    learning rate is half of what it was.
    """

    model: dict[str, Array]
    version: int = 0
    num_assigned: int = 0
    num_resumes: int = 0
    awaits_until_s: float | None = None
    order: tuple[str, ...] = ()
    edges: tuple[Edge, ...] = ()
    bridges: tuple[Edge, ...] = ()
    edge_epochs: dict[str, int] = field(default_factory=dict)
    edge_degrees: dict[str, int] = field(default_factory=dict)
    nodes: dict[str, NodeState] = field(default_factory=dict)
    models: dict[str, dict[str, Array]] = field(default_factory=dict)
    pending: list[str] = field(default_factory=list)
    used: tuple[str, ...] = ()
    reporters: tuple[str, ...] = ()
    edge_bytes: int = 0
    num_messages: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    halvings: tuple[int, ...] = ()


def add_member(state: DecentralisedState, name: str, *, has_shared_rounds: bool) -> None:
    """Adds a device at its neighbours' exchange; a returning node has its old edges."""
    if name not in state.order:
        degrees = {other: sum(other in edge for edge in state.edges) for other in list_members(state)}
        nearest = sorted(degrees, key=lambda other: (degrees[other], state.order.index(other)))[:2]
        state.order = (*state.order, name)
        state.edges = (*state.edges, *((other, name) for other in nearest))
    existing = state.nodes.get(name)
    for edge in state.edges:
        if name in edge:
            _restart_edge(state, edge)
    others = [node for other, node in state.nodes.items() if node.is_member and other != name]
    node = existing or NodeState()
    node.is_member, node.exchanges = True, max((other.exchanges for other in others), default=0)
    if has_shared_rounds and others:  # credited with the mean: rounds count the iterations of all nodes together
        node.iterations = round(sum(other.iterations for other in others) / len(others))
    node.reported, node.edges_sent = 0, ""
    state.nodes[name] = node


def update_bridges(state: DecentralisedState) -> None:
    """Connects components that are disconnected without absent nodes, each to the next."""
    members = list_members(state)
    components = connected_components(members, [edge for edge in state.edges if set(edge) <= set(members)])
    old_bridges, state.bridges = (
        state.bridges,
        tuple((component[0], next_component[0]) for component, next_component in itertools.pairwise(components)),
    )
    for edge in set(state.bridges) - set(old_bridges):
        _restart_edge(state, edge)


def _restart_edge(state: DecentralisedState, edge: Edge) -> None:
    key = " ".join(edge)
    epoch = state.edge_epochs.get(key, 0)
    state.edge_degrees.pop(f"{key} {epoch}", None)
    state.edge_epochs[key] = epoch + 1


def format_edges(state: DecentralisedState, graph: Topology, name: str) -> str:
    """Returns a text that identifies the edges of a node and their epochs."""
    return " ".join(
        f"{other}/{state.edge_epochs.get(format_edge_key(state, name, other), 0)}" for other in graph.neighbours(name)
    )


def compute_backoff_s(losses: int) -> float:
    """Returns the back-off of a node after consecutive losses, in seconds."""
    return min(MAX_RETRY_S, RETRY_S * 2.0 ** min(losses, 6)) if losses > 1 else 0.0


def list_members(state: DecentralisedState) -> list[str]:
    return [name for name in state.order if name in state.nodes and state.nodes[name].is_member]


def list_requests(messages: Iterable[PeerMessage]) -> set[str]:
    """Returns the senders of those messages that are no replies."""
    return {message.edge[0] for message in messages if not message.is_reply}


def make_member_graph(state: DecentralisedState, file_graph: Topology | None) -> Topology:
    """Returns the graph of the present members."""
    members = list_members(state)
    member_set = set(members)
    return Topology(
        nodes=tuple(members),
        edges=tuple(edge for edge in (*state.edges, *state.bridges) if set(edge) <= member_set),
        slots=file_graph.slots if file_graph is not None else {},
        periods=file_graph.periods if file_graph is not None else {},
    )


def get_edge_degree(state: DecentralisedState, edge: str, degree: int) -> int:
    """Returns the degree at the start of an edge's epoch; at its start, the present one."""
    return state.edge_degrees.setdefault(f"{edge} {state.edge_epochs.get(edge, 0)}", degree)


def format_edge_key(state: DecentralisedState, one: str, other: str) -> str:
    is_stored_order = (one, other) in state.edges or (one, other) in state.bridges
    return " ".join((one, other) if is_stored_order else (other, one))


def compute_disagreement(mean: Mapping[str, Array], models: Sequence[Mapping[str, Array]]) -> float:
    """Returns the root mean square distance of the models to their mean, relative to the mean's norm."""
    squared_distance, squared_norm = 0.0, 0.0
    for name, array in mean.items():
        if array.dtype.kind == "f":
            centre = array.astype(np.float64)
            squared_norm += float(np.sum(centre**2))
            squared_distance += sum(float(np.sum((model[name] - centre) ** 2)) for model in models) / len(models)
    return math.sqrt(squared_distance / squared_norm) if squared_norm else 0.0
