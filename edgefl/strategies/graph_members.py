"""Who is in the graph of a decentralised run: nodes that come, go and come back, and the edges between them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from edgefl.decentralised.graph import Edge, Graph, connected_parts
from edgefl.types import Array, EdgeMessage

RETRY_S = 2.0
MAX_RETRY_S = 60.0


@dataclass(slots=True)
class NodeState:
    """What is known of one node.

    `exchanges` are those that it has begun, `iterations` its local ones; `assignment_id` is what it works on, "" for
    nothing. `inbox` is the mail that waits for it, `sent` what is out with its assignment. Of one that goes on alone
    `iterations` are those that it has told, and its report counts when there are `until` of them. One that rests is
    there, but may not be asked.
    """

    is_member: bool = True
    is_awaited: bool = False
    has_begun: bool = False
    exchanges: int = 0
    iterations: int = 0
    assignment_id: str = ""
    is_report: bool = False
    is_resting: bool = False
    until: int = 0
    reported: int = 0
    losses: int = 0
    rests_until_s: float = 0.0
    inbox: list[EdgeMessage] = field(default_factory=list)
    sent: tuple[EdgeMessage, ...] = ()
    edges_told: str = ""


@dataclass(slots=True)
class DecentralisedState:
    """`model` is the mean of the members' `models`; `lives` counts how often the run was taken up again.

    `bridges` join what would be apart without those that are away. `edge_epochs` says how often an edge began, so
    that both ends begin it anew when one of them was away, and `edge_degrees` what its step size follows from, which
    both ends have to be told the same for as long as it lasts.
    """

    model: dict[str, Array]
    version: int = 0
    num_given: int = 0
    lives: int = 0
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
    told: tuple[str, ...] = ()
    edge_bytes: int = 0
    num_messages: int = 0
    figures: dict[str, float] = field(default_factory=dict)


def join(state: DecentralisedState, name: str, *, is_counted_together: bool) -> None:
    """Takes a device in, at the exchange that its neighbours are at; whoever comes back has its old edges."""
    if name not in state.order:
        degrees = {other: sum(other in edge for edge in state.edges) for other in members(state)}
        nearest = sorted(degrees, key=lambda other: (degrees[other], state.order.index(other)))[:2]
        state.order = (*state.order, name)
        state.edges = (*state.edges, *((other, name) for other in nearest))
    known = state.nodes.get(name)
    for edge in state.edges:
        if name in edge:
            _begin_anew(state, edge)
    others = [node for other, node in state.nodes.items() if node.is_member and other != name]
    node = known or NodeState()
    node.is_member, node.exchanges = True, max((other.exchanges for other in others), default=0)
    if is_counted_together and others:  # as if it had done its share: rounds count what all have done together
        node.iterations = round(sum(other.iterations for other in others) / len(others))
    node.reported, node.edges_told = 0, ""
    state.nodes[name] = node


def bridge(state: DecentralisedState) -> None:
    """Joins parts that a node's leaving has cut off from each other, each to the next, while they are."""
    there = members(state)
    parts = connected_parts(there, [edge for edge in state.edges if set(edge) <= set(there)])
    before, state.bridges = state.bridges, tuple((one[0], other[0]) for one, other in itertools.pairwise(parts))
    for edge in set(state.bridges) - set(before):
        _begin_anew(state, edge)


def _begin_anew(state: DecentralisedState, edge: Edge) -> None:
    key = " ".join(edge)
    epoch = state.edge_epochs.get(key, 0)
    state.edge_degrees.pop(f"{key} {epoch}", None)
    state.edge_epochs[key] = epoch + 1


def edges_told(state: DecentralisedState, graph: Graph, name: str) -> str:
    """Returns a text that changes when the edges of a node do."""
    return " ".join(
        f"{other}/{state.edge_epochs.get(edge_key(state, name, other), 0)}" for other in graph.neighbours(name)
    )


def rest_s(losses: int) -> float:
    """Returns how long a node rests after so many assignments lost in a row."""
    return min(MAX_RETRY_S, RETRY_S * 2.0 ** min(losses, 6)) if losses > 1 else 0.0


def members(state: DecentralisedState) -> list[str]:
    return [name for name in state.order if name in state.nodes and state.nodes[name].is_member]


def graph_of(state: DecentralisedState, named: Graph | None) -> Graph:
    """Returns the graph of those that are there."""
    there = members(state)
    among = set(there)
    return Graph(
        nodes=tuple(there),
        edges=tuple(edge for edge in (*state.edges, *state.bridges) if set(edge) <= among),
        slots=named.slots if named is not None else {},
        periods=named.periods if named is not None else {},
    )


def edge_degree(state: DecentralisedState, edge: str, degree: int) -> int:
    """Returns the degree that an edge began with; at its beginning that is the present one."""
    return state.edge_degrees.setdefault(f"{edge} {state.edge_epochs.get(edge, 0)}", degree)


def edge_key(state: DecentralisedState, one: str, other: str) -> str:
    is_forth = (one, other) in state.edges or (one, other) in state.bridges
    return " ".join((one, other) if is_forth else (other, one))
