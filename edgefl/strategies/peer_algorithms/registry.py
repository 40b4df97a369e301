"""Registry of gossip algorithms by their name in run files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from edgefl.core.errors import ConfigError
from edgefl.core.types import GossipConfig, PeerLinkConfig
from edgefl.strategies.peer_algorithms.algorithm import GossipAlgorithm
from edgefl.strategies.peer_algorithms.gossip_averaging import D2, AdPsgd, Dsgd, GradientTracking, KGradientTracking
from edgefl.strategies.peer_algorithms.isvr import AdmmIsvr, PdmmIsvr

ALGORITHMS: Mapping[str, type[GossipAlgorithm]] = MappingProxyType(
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


def make_algorithm(
    method: str,
    name: str,
    edges: Sequence[PeerLinkConfig],
    *,
    learning_rate: float,
    period: int,
    incarnation: int = 0,
) -> GossipAlgorithm:
    """Returns an algorithm, not yet started (`start`).

    Args:
        method: one of `ALGORITHMS`.
        name: of the node.
        edges: the node's own, from `Topology.make_link_configs`.
        learning_rate: μ₀, above 0.
        period: K, local iterations between two exchanges of an edge, 1 or more.
        incarnation: grows with every start of its device.

    Raises:
        ConfigError: the method is unknown, or does not support these numbers.
    """
    if method not in ALGORITHMS:
        raise ConfigError(f"decentralised method {method!r} is unknown; known: {', '.join(ALGORITHMS)}")
    node = ALGORITHMS[method](name, edges, learning_rate=learning_rate, period=period)
    node.incarnation = incarnation
    return node


def make_configured_algorithm(plan: GossipConfig, name: str, *, incarnation: int = 0) -> GossipAlgorithm:
    """Returns the algorithm of device `name` under a plan; see `make_algorithm`."""
    return make_algorithm(
        plan.method, name, plan.edges, learning_rate=plan.learning_rate, period=plan.period, incarnation=incarnation
    )
