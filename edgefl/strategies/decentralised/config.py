"""Settings of decentralised strategies; the methods are in `edgefl.strategies.peer_algorithms`."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import ClassVar

from edgefl.core.errors import ConfigError
from edgefl.core.types import Algorithm
from edgefl.strategies.decentralised.strategy import DecentralisedStrategy
from edgefl.strategies.peer_algorithms.registry import ALGORITHMS
from edgefl.strategies.peer_algorithms.topology import EdgeScheduleKind, Topology, parse_topology_spec
from edgefl.strategies.peer_algorithms.topology_files import read_hosts, read_topology
from edgefl.strategies.strategy_config import RoundRules, StrategyConfig, check_choice

CARRIERS = ("relay", "peer", "direct")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecentralisedConfig(StrategyConfig):
    """Settings of all decentralised strategies, beside those of local training.

    Attributes:
        iterations: K, local ones between two exchanges of an edge.
        graph: one of `peer_algorithms.topology.TOPOLOGY_SPECS`, or the path of a `node_list.json`.
        schedule: of the learning rate by round, as in other strategies.
        exchange: when edges fire: `sync`, `slots` or `poisson`.
        carrier: transport of messages to neighbours: the coordinator (`relay`), the broker (`peer`), or the devices
            themselves over TLS (`direct`); with the last two the devices train on while the coordinator is away.
        hosts: path of a `hosts.json` with the devices' listening addresses, for `direct`; without it they report
            them.
        exchanges_per_round: exchanges per node on average until the nodes report, which closes a round.
    """

    iterations: int | None = 8
    graph: str = "ring"
    exchange: str = EdgeScheduleKind.SYNC
    exchanges_per_round: int = 10
    carrier: str = "relay"
    hosts: str | None = None

    kind: ClassVar[str] = "decentralised"
    method: ClassVar[str] = ""

    def build(self, rules: RoundRules) -> DecentralisedStrategy:
        """Returns the strategy.

        Raises:
            ConfigError: an invalid setting, or one incompatible with another.
        """
        self._check(rules)
        self._check_method()
        return self.make(
            DecentralisedStrategy,
            rules,
            config=self,
            file_graph=_load_graph(self.graph),
            hosts={} if self.hosts is None else read_hosts(self.hosts),
        )

    def _check(self, rules: RoundRules) -> None:
        check_choice("exchange", self.exchange, EdgeScheduleKind)
        if self.exchanges_per_round < 1:
            raise ConfigError(f"strategy.exchanges_per_round must be 1 or more, got {self.exchanges_per_round}")
        if self.iterations is None or self.iterations < 1 or self.seconds is not None:
            raise ConfigError("strategy.iterations of a decentralised run must be 1 or more, and is its only budget")
        if self.optimizer != Algorithm.SGD or self.keep_optimizer:
            raise ConfigError("strategy.optimizer of a decentralised run must be sgd, and nothing of it is kept")
        if self.learning_rate <= 0:
            raise ConfigError(
                f"strategy.learning_rate of a decentralised run must be above 0, got {self.learning_rate}"
            )
        check_choice("carrier", self.carrier, CARRIERS)
        if self.hosts is not None and self.carrier != "direct":
            raise ConfigError(f"strategy.hosts is for strategy.carrier = 'direct', got {self.carrier!r}")
        if rules.server.kind != "none":
            raise ConfigError("server.optimizer: a decentralised run has no server that could take a step")

    def _check_method(self) -> None:
        algorithm = ALGORITHMS[self.method]
        if algorithm.is_lockstep and self.exchange != EdgeScheduleKind.SYNC:
            raise ConfigError(
                f"strategy.exchange of {self.method} must be sync, got {self.exchange!r}: "
                "its nodes average with all neighbours at once"
            )
        if algorithm.has_single_iteration and self.iterations != 1:
            raise ConfigError(
                f"strategy.iterations of {self.method} must be 1, got {self.iterations}: "
                "it exchanges after every local iteration"
            )
        if algorithm.has_single_iteration and self.momentum:
            raise ConfigError(
                f"strategy.momentum of {self.method} must be 0, got {self.momentum}: it is of local iterations "
                "between exchanges, and there is one"
            )


def _load_graph(spec: str) -> Topology | None:
    if spec.endswith(".json") or Path(spec).is_file():
        return read_topology(spec)
    parse_topology_spec(spec)
    return None


def _make_config_class(method: str) -> type[DecentralisedConfig]:
    """Returns the settings of a run with `method`, with the defaults that its algorithm needs."""
    algorithm = ALGORITHMS[method]
    defaults: list[tuple[str, str, object]] = []
    if not algorithm.is_synchronous:
        defaults.append(("exchange", "str", field(default=EdgeScheduleKind.POISSON)))
    if algorithm.has_single_iteration:
        defaults.append(("iterations", "int | None", field(default=1)))
    namespace = {
        "__module__": __name__,
        "__doc__": f"Settings of a run with `{method}`.",
        "method": method,
        "summary": algorithm.summary,
    }
    return make_dataclass(
        f"{algorithm.__name__}Config",
        defaults,
        bases=(DecentralisedConfig,),
        namespace=namespace,
        frozen=True,
        slots=True,
        kw_only=True,
    )


PdmmIsvrConfig = _make_config_class("pdmm-isvr")
AdmmIsvrConfig = _make_config_class("admm-isvr")
DsgdConfig = _make_config_class("dsgd")
AdPsgdConfig = _make_config_class("ad-psgd")
GradientTrackingConfig = _make_config_class("gradient-tracking")
KGradientTrackingConfig = _make_config_class("k-gt")
D2Config = _make_config_class("d2")
