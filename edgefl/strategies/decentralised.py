"""Training without a server: every device is a node of a graph with a model of its own, and neighbours exchange.

The coordinator starts the nodes, says who is whose neighbour, carries the messages where devices cannot reach each
other, and watches: what it calls the model is the mean of the nodes' models as they last told them. It is in nobody's
way: nodes that told go on at once. The mathematics of the methods is in `edgefl.decentralised`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from edgefl.decentralised.firing import Schedule, make_firing
from edgefl.decentralised.graph import Graph, check_spec, make_graph
from edgefl.decentralised.graph_files import Host, read_graph, read_hosts
from edgefl.decentralised.methods import METHODS
from edgefl.errors import ConfigError
from edgefl.strategies.arrivals import owned
from edgefl.strategies.gate import is_flagged
from edgefl.strategies.graph_members import (
    DecentralisedState,
    NodeState,
    bridge,
    edge_degree,
    edge_key,
    edges_told,
    graph_of,
    join,
    members,
    rest_s,
)
from edgefl.strategies.rounds import WAIT_S, RoundRules
from edgefl.strategies.schedules import Schedule as RateSchedule
from edgefl.strategies.settings import TrainingSettings
from edgefl.types import (
    Algorithm,
    Array,
    Assignment,
    Decision,
    EdgeMessage,
    FleetView,
    Indices,
    LocalPlan,
    NodePlan,
    Order,
    Recall,
    Tensors,
    Update,
    derived_rng,
)

LEAST_NODES = 2
CARRIERS = ("relay", "peer", "direct")
MOST_LOSSES = 3
"""A node that loses so many assignments in a row leaves the graph for a while, so that nobody waits for it."""
COMES_BACK_S = 60.0
"""When a coordinator was away, so long nobody is taken for gone who has not been heard of yet."""
MOST_AHEAD = 2
"""So many rounds a node that goes on alone may report before the others; its training does not wait."""
KEPT_OF_ALL = 3
"""So many messages of an edge wait where a node needs those of every exchange; else only the newest does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSettings(TrainingSettings):
    """Settings of all decentralised strategies, beside those of local training.

    Attributes:
        iterations: K, local ones between two exchanges of an edge.
        graph: one of `decentralised.graph.SPECS`, or the path of a `node_list.json`.
        schedule: learning rates by round, as everywhere.
        exchange: when edges fire: `sync`, `slots` or `poisson`.
        carrier: who brings messages to neighbours: the coordinator (`relay`), the broker (`peer`), or the devices
            themselves over TLS (`direct`); with the last two the devices go on while the coordinator is away.
        hosts: path of a `hosts.json` that says where devices listen, for `direct`; without it they say so themselves.
        exchanges_per_round: after so many for each node on average they report, and the history has a round.
    """

    iterations: int | None = 8
    graph: str = "ring"
    exchange: str = Schedule.SYNC
    exchanges_per_round: int = 10
    carrier: str = "relay"
    hosts: str | None = None

    kind: ClassVar[str] = "decentralised"
    method: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    is_in_step: ClassVar[bool] = False
    takes_one_iteration: ClassVar[bool] = False

    def build(self, rules: RoundRules) -> Decentralised:
        """Returns the strategy.

        Raises:
            ConfigError: a setting makes no sense, or does not go with another one.
        """
        self._check(rules)
        self._check_method()
        return Decentralised(
            settings=self,
            rules=rules,
            plan=self.plan(),
            rate=self.rate(),
            file_graph=_file_graph(self.graph),
            hosts={} if self.hosts is None else read_hosts(self.hosts),
        )

    def _check(self, rules: RoundRules) -> None:
        if self.exchange not in set(Schedule):
            raise ConfigError(f"strategy.exchange must be one of {', '.join(Schedule)}, got {self.exchange!r}")
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
        if self.carrier not in CARRIERS:
            raise ConfigError(f"strategy.carrier must be one of {', '.join(CARRIERS)}, got {self.carrier!r}")
        if self.hosts is not None and self.carrier != "direct":
            raise ConfigError(f"strategy.hosts is for strategy.carrier = 'direct', got {self.carrier!r}")
        if rules.server.kind != "none":
            raise ConfigError("server.optimizer: a decentralised run has no server that could take a step")

    def _check_method(self) -> None:
        if self.is_in_step and self.exchange != Schedule.SYNC:
            raise ConfigError(
                f"strategy.exchange of {self.method} must be sync, got {self.exchange!r}: "
                "its nodes average with all neighbours at once"
            )
        if self.takes_one_iteration and self.iterations != 1:
            raise ConfigError(
                f"strategy.iterations of {self.method} must be 1, got {self.iterations}: "
                "it exchanges after every local iteration"
            )
        if self.takes_one_iteration and self.momentum:
            raise ConfigError(
                f"strategy.momentum of {self.method} must be 0, got {self.momentum}: it is of local iterations "
                "between exchanges, and there is one"
            )


def _file_graph(text: str) -> Graph | None:
    if text.endswith(".json") or Path(text).is_file():
        return read_graph(text)
    check_spec(text)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decentralised:
    """One method on one graph. An assignment is an exchange; of devices that go on by themselves, a report."""

    settings: GraphSettings
    rules: RoundRules
    plan: LocalPlan
    rate: RateSchedule
    file_graph: Graph | None = None
    hosts: Mapping[str, Host] = field(default_factory=dict)

    has_nodes: ClassVar[bool] = True

    @property
    def goes_on_alone(self) -> bool:
        """Says whether devices train on while the coordinator is away: then its run is taken up again by itself."""
        return self.settings.carrier != "relay"

    @property
    def method(self) -> str:
        return self.settings.method

    def init(self, model: Tensors) -> DecentralisedState:
        return DecentralisedState(model={name: np.array(tensor) for name, tensor in model.items()})

    def bytes_per_device(self, model_bytes: int) -> int:
        """Returns what the state keeps for each device: its model, and the mail of its neighbours."""
        return model_bytes * (1 + 2 * len(METHODS[self.method].parts))

    def bytes_per_message(self, model_bytes: int) -> int:
        """Returns the size of a whole message along an edge, which a new edge begins with in any codec.

        0 where the coordinator carries it, which takes messages of any size.
        """
        return model_bytes * len(METHODS[self.method].parts) if self.goes_on_alone else 0

    def assign(self, state: DecentralisedState, view: FleetView) -> tuple[DecentralisedState, Decision]:
        if not state.order and not self._begin(state, view):
            return state, Decision(next_wake_s=WAIT_S)
        has_changed = self._look_around(state, view)
        idle = set(view.idle)
        for name, member in state.nodes.items():
            member.is_resting = name in view.devices and name not in idle and name not in view.busy
        orders: list[Order] = []
        if has_changed and self.goes_on_alone:
            # What a device goes on with by itself, it hears of with its next assignment: that is to be now.
            orders += [
                Recall(assignment_id=assignment_id, device_id=name)
                for name, outstanding in view.busy.items()
                for assignment_id in outstanding
                if name in state.nodes
            ]
        graph, is_round_done = graph_of(state, self.file_graph), self._is_round_done(state)
        for device_id in view.idle:
            node = state.nodes.get(device_id)
            if node is None or not node.is_member or node.rests_until_s > view.now_s:
                continue
            if self._may_go_on(state, graph, device_id):
                node.is_report = self.goes_on_alone or (
                    is_round_done and node.has_begun and node.reported <= state.version
                )
                orders.append(self._order(state, graph, device_id, view))
        waits = [node.rests_until_s for node in state.nodes.values() if node.rests_until_s > view.now_s]
        wake_s = min([WAIT_S, *(until_s - view.now_s for until_s in waits)])
        return state, Decision(orders=tuple(orders), next_wake_s=wake_s)

    def receive(self, state: DecentralisedState, update: Update) -> DecentralisedState:
        node = state.nodes.get(update.device_id)
        if node is None or not node.assignment_id or node.assignment_id != update.assignment_id:
            return state
        node.assignment_id, node.losses, node.has_begun, node.sent = "", 0, True, ()
        state.pending.append(update.assignment_id)
        told = update.metrics.extra.get("iterations_in_all")
        node.iterations = node.iterations + update.metrics.iterations if told is None else int(told)
        if node.is_report:
            if told is None or node.iterations >= node.until or self._is_at_limit(node):
                node.reported = max(node.reported, state.version) + 1
            state.models[update.device_id] = {
                name: owned(update.tensors[name]).astype(array.dtype) for name, array in state.model.items()
            }
        else:
            node.exchanges += 1
        for message in update.outbox:
            self._deliver(state, message)
        state.edge_bytes += int(update.metrics.extra.get("message_bytes", 0))
        state.num_messages += int(update.metrics.extra.get("messages", 0))
        return state

    def _deliver(self, state: DecentralisedState, message: EdgeMessage) -> None:
        """Puts a message into its receiver's inbox, in the place of what is older than the method needs."""
        node = state.nodes.get(message.edge[1])
        if node is None or not node.is_member:
            return
        alike = [each for each in node.inbox if (each.edge, each.is_reply) == (message.edge, message.is_reply)]
        kept = KEPT_OF_ALL if METHODS[self.method].needs_all else 1
        for old in alike[: max(0, len(alike) + 1 - kept)]:
            node.inbox.remove(old)
        node.inbox.append(message)

    def ready(self, state: DecentralisedState, view: FleetView) -> bool:
        nodes = state.nodes
        present = [
            name
            for name in members(state)
            if nodes[name].is_awaited or (name in view.devices and not nodes[name].is_resting)
        ]
        return bool(present) and all(state.nodes[name].reported > state.version for name in present)

    def aggregate(self, state: DecentralisedState) -> DecentralisedState:
        told = [name for name in members(state) if state.nodes[name].reported > state.version]
        models = [state.models[name] for name in told]
        for name, array in state.model.items():
            mean = sum(model[name].astype(np.float64) for model in models) / len(models)
            state.model[name] = np.asarray(np.rint(mean) if array.dtype.kind in "iu" else mean, dtype=array.dtype)
        state.figures = {
            "disagreement": _disagreement(state.model, models),
            "nodes": float(len(told)),
            "bytes_per_message": state.edge_bytes / max(1, state.num_messages),
            "messages": float(state.num_messages),
        }
        state.edge_bytes = state.num_messages = 0
        state.told = tuple(told)
        state.version += 1
        state.used, state.pending = tuple(state.pending), []
        return state

    def resumed(self, state: DecentralisedState) -> DecentralisedState:
        """Returns the state after the coordinator was away: nothing is out, and nobody has been lost over it."""
        state.lives += 1
        state.pending, state.awaits_until_s = [], None
        for node in state.nodes.values():
            node.assignment_id, node.losses, node.rests_until_s = "", 0, 0.0
            node.is_awaited = node.is_member
        return state

    def model(self, state: DecentralisedState) -> Tensors:
        return state.model

    def node_models(self, state: DecentralisedState) -> Mapping[str, Tensors]:
        """Returns the models that the newest version is the mean of, as their nodes last told them."""
        return {name: state.models[name] for name in state.told}

    def facts(self, state: DecentralisedState) -> Mapping[str, float]:
        """Returns how far the nodes lie apart (root mean square, by the length of their mean), and what travelled."""
        return state.figures

    def version(self, state: DecentralisedState) -> int:
        return state.version

    def used(self, state: DecentralisedState) -> Sequence[str]:
        return state.used

    def changed(self, state: DecentralisedState, since: int) -> Indices | None:  # noqa: ARG002 nobody is sent it again
        return None

    def _begin(self, state: DecentralisedState, view: FleetView) -> bool:
        """Makes the graph once enough devices are there."""
        wanted = self.file_graph.nodes if self.file_graph is not None else ()
        there = [name for name in view.idle if not wanted or name in wanted]
        if self.settings.carrier == "direct" and (hidden := [n for n in there if not self._address(n, view)]):
            said = self.settings.hosts or "no hosts.json was given, and the device"
            raise ConfigError(f"{said} does not say where {hidden[0]} listens: nobody could reach it")
        if len(there) < max(LEAST_NODES, self.rules.min_devices):
            return False
        if self.rules.max_devices is not None:
            there = there[: max(LEAST_NODES, self.rules.max_devices)]
        graph = self.file_graph or make_graph(self.settings.graph, there, self.rules.seed)
        state.order, state.edges = graph.nodes, graph.edges
        for name in there:
            state.nodes[name] = NodeState()
        bridge(state)
        return True

    def _look_around(self, state: DecentralisedState, view: FleetView) -> bool:
        """Takes note of who has lost its work, who has left and who has come; says whether the graph has changed."""
        changed = False
        if state.awaits_until_s is None:
            state.awaits_until_s = view.now_s + COMES_BACK_S
        for name, node in state.nodes.items():
            node.is_awaited = node.is_awaited and name not in view.devices and view.now_s < state.awaits_until_s
            if node.is_awaited:
                continue
            if node.assignment_id and node.assignment_id not in view.busy.get(name, ()):
                node.assignment_id = ""
                node.inbox = [*node.sent, *node.inbox]
                node.sent = ()
                node.losses += 1
                node.rests_until_s = view.now_s + rest_s(node.losses)
            is_away = name not in view.devices or is_flagged(name, view)
            if node.is_member and (is_away or node.losses >= MOST_LOSSES):
                node.is_member, node.assignment_id, node.inbox, node.sent = False, "", [], ()
                changed = True
        for name in view.idle:
            if self._may_join(state, name, view.now_s):
                join(state, name, is_counted_together=not self.goes_on_alone)
                changed = True
        if changed:
            bridge(state)
        return changed

    def _may_join(self, state: DecentralisedState, name: str, now_s: float) -> bool:
        node = state.nodes.get(name)
        if node is not None:
            return not node.is_member and node.rests_until_s <= now_s
        if self.file_graph is not None:
            return name in self.file_graph.nodes
        limit = self.rules.max_devices
        return limit is None or len(members(state)) < limit

    def _may_go_on(self, state: DecentralisedState, graph: Graph, name: str) -> bool:
        """Says whether what a node needs for its next work is here: in step, the mail of all its neighbours.

        One that goes on alone is asked for a report if it is not far ahead of the others, and to hear of its edges.
        """
        node = state.nodes[name]
        if self.goes_on_alone:
            is_over = self.rules.rounds is not None and node.reported >= self.rules.rounds
            return node.edges_told != edges_told(state, graph, name) or (
                not is_over and node.reported <= state.version + MOST_AHEAD
            )
        if self.settings.exchange != Schedule.SYNC:
            return True
        neighbours = [state.nodes[other] for other in graph.neighbours(name)]
        return all(other.exchanges >= node.exchanges or other.is_resting for other in neighbours)

    def _is_at_limit(self, node: NodeState) -> bool:
        return self.rules.rounds is not None and node.iterations >= self.rules.rounds * self._iterations_per_round

    def _order(self, state: DecentralisedState, graph: Graph, name: str, view: FleetView) -> Assignment:
        node = state.nodes[name]
        state.num_given += 1
        life = f"r{state.lives}" if state.lives else ""
        node.assignment_id = f"{life}n{state.num_given}-{name}"
        period = graph.periods.get(name, self.plan.iterations or 1)
        is_damped = self.method == "d2" and graph.needs_damping()
        edges = tuple(
            replace(
                side,
                epoch=state.edge_epochs.get(edge_key(state, name, side.neighbour), 0),
                degree=edge_degree(state, edge_key(state, name, side.neighbour), side.degree),
                address=self._address(side.neighbour, view),
            )
            for side in graph.sides(name, self.plan.iterations or 1, is_damped=is_damped)
        )
        iterations, fires = 0, tuple[str, ...]()
        if not node.is_report:
            fires = graph.neighbours(name)
            if METHODS[self.method].trains_before(node.exchanges + 1):
                rng = derived_rng(self.rules.seed, "firing", name, node.iterations)
                firing = make_firing(self.settings.exchange, edges=edges, period=period, rng=rng)
                burst = firing.next(node.iterations, fires)
                iterations, fires = burst.iterations, burst.neighbours
        inbox = node.sent = tuple(node.inbox)
        node.inbox, node.edges_told = [], edges_told(state, graph, name)
        node.until = node.iterations + self._iterations_per_round
        state.edge_bytes += sum(len(message.body) for message in inbox)
        state.num_messages += len(inbox)
        factor = self.rate(state.version)
        return Assignment(
            assignment_id=node.assignment_id,
            device_id=name,
            base_version=state.version,
            plan=replace(
                self.plan,
                iterations=iterations,
                learning_rate=self.plan.learning_rate * factor,
                inbox=inbox,
                node=NodePlan(
                    method=self.method,
                    edges=edges,
                    learning_rate=self.plan.learning_rate,
                    period=period,
                    codec=self.rules.codec or "",
                    carrier=self.settings.carrier,
                    schedule=self.settings.exchange,
                    fires=fires,
                    listen=self._address(name, view),
                    until=node.until,
                    limit=(self.rules.rounds or 0) * self._iterations_per_round,
                    reports=node.is_report,
                ),
            ),
            codec="dense",
            deadline_s=None if self.goes_on_alone else self.rules.deadline_s,
            sends_model=not node.has_begun,
        )

    def _address(self, name: str, view: FleetView) -> str:
        """Returns where a device listens: by the file, else by what it says of itself; empty for nobody knows."""
        if self.settings.carrier != "direct":
            return ""
        host = self.hosts.get(name)
        if host is not None:
            return f"{host.address}:{host.port}"
        info = view.devices.get(name)
        return "" if info is None or self.hosts else str(info.capabilities.get("peer_address", ""))

    @property
    def _iterations_per_round(self) -> int:
        return self.settings.exchanges_per_round * (self.plan.iterations or 1)

    def _is_round_done(self, state: DecentralisedState) -> bool:
        """Says whether the nodes have done the round's local iterations between them: then they are to report."""
        nodes = [state.nodes[name] for name in members(state)]
        wanted = (state.version + 1) * self._iterations_per_round
        return bool(nodes) and sum(node.iterations for node in nodes) >= wanted * len(nodes)


def _disagreement(mean: Mapping[str, Array], models: Sequence[Mapping[str, Array]]) -> float:
    """Returns the root mean square distance of the models to their mean, by the mean's length."""
    apart, length = 0.0, 0.0
    for name, array in mean.items():
        if array.dtype.kind == "f":
            centre = array.astype(np.float64)
            length += float(np.sum(centre**2))
            apart += sum(float(np.sum((model[name] - centre) ** 2)) for model in models) / len(models)
    return math.sqrt(apart / length) if length else 0.0
