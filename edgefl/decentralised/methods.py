"""The methods by the name that a run file has for them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from edgefl.decentralised.ad_psgd import AdPsgd
from edgefl.decentralised.graph import Graph
from edgefl.decentralised.isvr import AdmmIsvr, PdmmIsvr
from edgefl.decentralised.mixing import D2, Dsgd, GradientTracking, KGradientTracking
from edgefl.decentralised.node import Node
from edgefl.errors import ConfigError

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


def make_node(method: str, name: str, graph: Graph, *, learning_rate: float, period: int) -> Node:
    """Returns a node, which `begin` starts.

    Args:
        method: one of `METHODS`.
        name: which node of the graph.
        graph: who exchanges with whom.
        learning_rate: μ₀, above 0.
        period: K, local iterations between two exchanges of an edge, 1 or more.

    Raises:
        ConfigError: there is no such method, or it cannot work with these numbers.
    """
    if method not in METHODS:
        raise ConfigError(f"decentralised method {method!r} is unknown; known: {', '.join(METHODS)}")
    return METHODS[method](name, graph, learning_rate=learning_rate, period=period)
