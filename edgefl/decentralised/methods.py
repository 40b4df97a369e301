"""The methods by the name that a run file has for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from edgefl.decentralised.ad_psgd import AdPsgd
from edgefl.decentralised.isvr import AdmmIsvr, PdmmIsvr
from edgefl.decentralised.mixing import D2, Dsgd, GradientTracking, KGradientTracking
from edgefl.decentralised.node import Node
from edgefl.errors import ConfigError
from edgefl.types import EdgeSide, NodePlan

METHODS: Mapping[str, type[Node]] = MappingProxyType(
    {
        "pdmm-isvr": PdmmIsvr,
        "admm-isvr": AdmmIsvr,
        "dsgd": Dsgd,
        "ad-psgd": AdPsgd,
        "gradient-tracking": GradientTracking,
        "k-gt": KGradientTracking,
        "d2": D2,
    }
)


def make_node(
    method: str, name: str, edges: Sequence[EdgeSide], *, learning_rate: float, period: int, life: int = 0
) -> Node:
    """Returns a node, which `begin` starts.

    Args:
        method: one of `METHODS`.
        name: which node of the graph.
        edges: its own, as `Graph.sides` gives them.
        learning_rate: μ₀, above 0.
        period: K, local iterations between two exchanges of an edge, 1 or more.
        life: grows with every start of its device.

    Raises:
        ConfigError: there is no such method, or it cannot work with these numbers.
    """
    if method not in METHODS:
        raise ConfigError(f"decentralised method {method!r} is unknown; known: {', '.join(METHODS)}")
    node = METHODS[method](name, edges, learning_rate=learning_rate, period=period)
    node.life = life
    return node


def node_of(plan: NodePlan, name: str, *, life: int = 0) -> Node:
    """Returns the node that a plan makes of the device `name`; see `make_node`."""
    return make_node(plan.method, name, plan.edges, learning_rate=plan.learning_rate, period=plan.period, life=life)
