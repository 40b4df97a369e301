"""Decentralised training: every device is a node of a graph with its own model, exchanged with neighbours.

The coordinator starts the nodes, assigns neighbours, relays messages where devices cannot reach each other, and
monitors: its model is the mean of the nodes' last reported models. It never blocks: nodes continue right after a
report. The mathematics of the methods is in `edgefl.strategies.peer_algorithms`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.settings import check_settings
from edgefl.core.types import (
    Algorithm,
    Decision,
    FinishEarlyInstruction,
    FleetView,
    GossipConfig,
    Instruction,
    PeerMessage,
    Strategy,
    Tensors,
    TrainConfig,
    TrainInstruction,
    Update,
    derive_rng,
)
from edgefl.strategies.aggregation import to_writable
from edgefl.strategies.decentralised.membership import (
    DecentralisedState,
    NodeState,
    add_member,
    compute_backoff_s,
    compute_disagreement,
    format_edge_key,
    format_edges,
    get_edge_degree,
    list_members,
    list_requests,
    make_member_graph,
    update_bridges,
)
from edgefl.strategies.participation import is_blocked
from edgefl.strategies.peer_algorithms.gossip_node import ALGORITHMS
from edgefl.strategies.peer_algorithms.topology import (
    EdgeScheduleKind,
    Topology,
    make_edge_schedule,
    make_topology,
    parse_topology_spec,
    read_hosts,
    read_topology,
)
from edgefl.strategies.strategy_config import (
    MAX_WAIT_S,
    LearningRateSchedule,
    RoundRules,
    StrategyConfig,
    compute_rate_factor,
)

MIN_NODES = 2
MAX_CONSECUTIVE_FAILURES = 3
"""Assignments lost in a row after which a node leaves the graph for a while, so that no node waits for it."""
RECONNECT_GRACE_S = 60.0
"""Time after a coordinator restart in which unseen devices still count as present."""
MAX_ROUNDS_AHEAD = 2
"""Rounds that an autonomous node may report ahead of the others; its training does not wait."""
MAX_QUEUED_MESSAGES = 3
"""Queue length per edge where a node needs the messages of every exchange; else only the newest is queued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecentralisedConfig(StrategyConfig):
    """Settings of all decentralised strategies, beside those of local training.

    Attributes:
        iterations: K, local ones between two exchanges of an edge.
        graph: one of `peer_algorithms.topology.TOPOLOGY_SPECS`, or the path of a `node_list.json`.
        schedule: of the learning rate by round, as in other strategies.
        exchange: when edges fire: `sync`, `slots`, `poisson`, or `pair`, where both ends exchange when either fires.
        carrier: transport of messages to neighbours: the coordinator (`relay`), the broker (`peer`), or the devices
            themselves over TLS (`direct`); with the last two the devices train on while the coordinator is away.
        hosts: path of a `hosts.json` with the devices' listening addresses, for `direct`; without it they report
            them.
        exchanges_per_round: exchanges per node on average until the nodes report, which closes a round.
    """

    iterations: int | None = 8
    graph: str = "ring"
    exchange: EdgeScheduleKind = EdgeScheduleKind.SYNC
    exchanges_per_round: int = field(default=10, metadata={"at_least": 1})
    carrier: Literal["relay", "peer", "direct"] = "relay"
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
        check_settings(self, "strategy")
        if self.iterations is None or self.iterations < 1 or self.seconds is not None:
            raise ConfigError("strategy.iterations of a decentralised run must be 1 or more, and is its only budget")
        if self.optimizer != Algorithm.SGD or self.keep_optimizer:
            raise ConfigError("strategy.optimizer of a decentralised run must be sgd, and nothing of it is kept")
        if self.learning_rate <= 0:
            raise ConfigError(
                f"strategy.learning_rate of a decentralised run must be above 0, got {self.learning_rate}"
            )
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
        num_rogues: int = getattr(self, "num_rogues", 0)
        if num_rogues and self.exchange == EdgeScheduleKind.PAIR:
            raise ConfigError(
                "strategy.num_rogues compares neighbours, and with exchange = 'pair' there is one a time"
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


_METHOD_SETTINGS: Mapping[str, tuple[Any, Any]] = {
    "num_rogues": (int, field(default=0, metadata={"at_least": 0})),
    "step_size": (Literal["edge", "node"], field(default="edge")),
    "k_eta": (float | None, field(default=None, metadata={"above": 1})),
}
"""Settings that not all methods have: annotation, and default with bounds."""


def _make_config_class(method: str) -> type[DecentralisedConfig]:
    """Returns the settings of a run with `method`, with the defaults that its algorithm needs."""
    algorithm = ALGORITHMS[method]
    defaults: list[tuple[str, Any, object]] = []
    if not algorithm.is_synchronous:
        defaults.append(("exchange", EdgeScheduleKind, field(default=EdgeScheduleKind.POISSON)))
    if algorithm.has_single_iteration:
        defaults.append(("iterations", int | None, field(default=1)))
    defaults += [(name, *_METHOD_SETTINGS[name]) for name in algorithm.settings]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DecentralisedStrategy(Strategy[DecentralisedState]):
    """One method on one graph; an assignment is an exchange, or a report of an autonomous device."""

    config: DecentralisedConfig
    rules: RoundRules
    plan: TrainConfig
    lr_schedule: LearningRateSchedule
    file_graph: Topology | None = None
    hosts: Mapping[str, str] = field(default_factory=dict)

    has_nodes: ClassVar[bool] = True

    @property
    def is_autonomous(self) -> bool:
        """Whether devices train on while the coordinator is away, so that the run resumes by itself."""
        return self.config.carrier != "relay"

    @property
    def method(self) -> str:
        return self.config.method

    def init(self, model: Tensors) -> DecentralisedState:
        return DecentralisedState(model={name: np.array(tensor) for name, tensor in model.items()})

    def bytes_per_device(self, model_bytes: int) -> int:
        """Returns the bytes of state per device: its model, and its neighbours' messages."""
        return model_bytes * (1 + 2 * len(ALGORITHMS[self.method].parts))

    def bytes_per_message(self, model_bytes: int) -> int:
        """Returns the bytes of an uncompressed edge message, which a new edge begins with in any codec.

        0 where the coordinator relays it, which accepts messages of any size.
        """
        return model_bytes * len(ALGORITHMS[self.method].parts) if self.is_autonomous else 0

    def assign(self, state: DecentralisedState, view: FleetView) -> tuple[DecentralisedState, Decision]:
        if not state.order and not self._create_graph(state, view):
            return state, Decision(next_wake_s=MAX_WAIT_S)
        has_changed = self._update_members(state, view)
        idle = set(view.idle)
        for name, member in state.nodes.items():
            member.is_resting = name in view.devices and name not in idle and name not in view.busy
        instructions: list[Instruction] = []
        if has_changed and self.is_autonomous:
            # An autonomous device gets its new edges with its next assignment, so that one is due now.
            instructions += [
                FinishEarlyInstruction(assignment_id=assignment_id, device_id=name)
                for name, outstanding in view.busy.items()
                for assignment_id in outstanding
                if name in state.nodes
            ]
        instructions += self._interrupt_for_replies(state, view)
        graph, is_round_done = make_member_graph(state, self.file_graph), self._is_round_done(state)
        for device_id in view.idle:
            node = state.nodes.get(device_id)
            if node is None or not node.is_member or node.rests_until_s > view.now_s:
                continue
            if self._can_continue(state, graph, device_id):
                node.is_report = self.is_autonomous or (
                    is_round_done and node.has_started and node.reported <= state.version
                )
                instructions.append(self._make_instruction(state, graph, device_id, view))
        waits = [node.rests_until_s for node in state.nodes.values() if node.rests_until_s > view.now_s]
        wake_s = min([MAX_WAIT_S, *(until_s - view.now_s for until_s in waits)])
        return state, Decision(instructions=tuple(instructions), next_wake_s=wake_s)

    def receive(self, state: DecentralisedState, update: Update) -> DecentralisedState:
        node = state.nodes.get(update.device_id)
        if node is None or not node.assignment_id or node.assignment_id != update.assignment_id:
            return state
        node.assignment_id, node.losses, node.has_started, node.sent = "", 0, True, ()
        state.pending.append(update.assignment_id)
        total_iterations = update.metrics.extra.get("iterations_in_all")
        node.iterations = (
            node.iterations + update.metrics.iterations if total_iterations is None else int(total_iterations)
        )
        if node.is_report:
            if total_iterations is None or node.iterations >= node.until or self._is_at_limit(node):
                node.reported = max(node.reported, state.version) + 1
            state.models[update.device_id] = {
                name: to_writable(update.tensors[name]).astype(array.dtype) for name, array in state.model.items()
            }
        else:
            node.exchanges += 1
        for message in update.messages:
            self._queue_message(state, message)
        state.edge_bytes += int(update.metrics.extra.get("message_bytes", 0))
        state.num_messages += int(update.metrics.extra.get("messages", 0))
        return state

    def _queue_message(self, state: DecentralisedState, message: PeerMessage) -> None:
        """Adds a message to its receiver's queue, replacing messages older than the method needs."""
        node = state.nodes.get(message.edge[1])
        if node is None or not node.is_member:
            return
        same_kind = [
            queued for queued in node.queue if (queued.edge, queued.is_reply) == (message.edge, message.is_reply)
        ]
        max_queued = MAX_QUEUED_MESSAGES if ALGORITHMS[self.method].is_synchronous else 1
        for outdated in same_kind[: max(0, len(same_kind) + 1 - max_queued)]:
            node.queue.remove(outdated)
        node.queue.append(message)

    def ready(self, state: DecentralisedState, view: FleetView) -> bool:
        nodes = state.nodes
        present = [
            name
            for name in list_members(state)
            if nodes[name].is_awaited or (name in view.devices and not nodes[name].is_resting)
        ]
        return bool(present) and all(state.nodes[name].reported > state.version for name in present)

    def aggregate(self, state: DecentralisedState) -> DecentralisedState:
        reporters = [name for name in list_members(state) if state.nodes[name].reported > state.version]
        models = [state.models[name] for name in reporters]
        for name, array in state.model.items():
            mean = sum(model[name].astype(np.float64) for model in models) / len(models)
            state.model[name] = np.asarray(np.rint(mean) if array.dtype.kind in "iu" else mean, dtype=array.dtype)
        state.figures = {
            "disagreement": compute_disagreement(state.model, models),
            "nodes": float(len(reporters)),
            "bytes_per_message": state.edge_bytes / max(1, state.num_messages),
            "messages": float(state.num_messages),
        }
        state.edge_bytes = state.num_messages = 0
        state.reporters = tuple(reporters)
        state.version += 1
        state.used, state.pending = tuple(state.pending), []
        return state

    def halve_learning_rate(self, state: DecentralisedState) -> DecentralisedState | None:
        if self.is_autonomous:  # a node has its learning rate for the whole run
            return None
        state.halvings = (*state.halvings, state.version)
        return state

    def resumed(self, state: DecentralisedState) -> DecentralisedState:
        """Returns the state after a coordinator restart: no assignments in flight, and no losses counted for it."""
        state.num_resumes += 1
        state.pending, state.awaits_until_s = [], None
        for node in state.nodes.values():
            node.assignment_id, node.losses, node.rests_until_s = "", 0, 0.0
            node.is_awaited = node.is_member
        return state

    def node_models(self, state: DecentralisedState) -> Mapping[str, Tensors]:
        """Returns the last reported models whose mean is the newest version."""
        return {name: state.models[name] for name in state.reporters}

    def facts(self, state: DecentralisedState) -> Mapping[str, float]:
        """Returns the disagreement of the nodes (root mean square, relative to their mean), and the traffic."""
        return state.figures

    def _create_graph(self, state: DecentralisedState, view: FleetView) -> bool:
        """Creates the graph once enough devices are present; returns whether it did."""
        file_nodes = self.file_graph.nodes if self.file_graph is not None else ()
        present = [name for name in view.idle if not file_nodes or name in file_nodes]
        if self.config.carrier == "direct" and (
            unreachable := [n for n in present if not self._get_address(n, view)]
        ):
            source = self.config.hosts or "no hosts.json was given, and the device"
            raise ConfigError(f"{source} does not say where {unreachable[0]} listens: nobody could reach it")
        if len(present) < max(MIN_NODES, self.rules.min_devices):
            return False
        if self.rules.max_devices is not None:
            present = present[: max(MIN_NODES, self.rules.max_devices)]
        graph = self.file_graph or make_topology(self.config.graph, present, self.rules.seed)
        state.order, state.edges = graph.nodes, graph.edges
        for name in present:
            state.nodes[name] = NodeState()
        update_bridges(state)
        return True

    def _update_members(self, state: DecentralisedState, view: FleetView) -> bool:
        """Updates lost work, leavers and joiners; returns whether the graph has changed."""
        has_changed = False
        if state.awaits_until_s is None:
            state.awaits_until_s = view.now_s + RECONNECT_GRACE_S
        for name, node in state.nodes.items():
            node.is_awaited = node.is_awaited and name not in view.devices and view.now_s < state.awaits_until_s
            if node.is_awaited:
                continue
            if node.assignment_id and node.assignment_id not in view.busy.get(name, ()):
                node.assignment_id = ""
                node.queue = [*node.sent, *node.queue]
                node.sent = ()
                node.losses += 1
                node.rests_until_s = view.now_s + compute_backoff_s(node.losses)
            is_away = name not in view.devices or is_blocked(name, view)
            if node.is_member and (is_away or node.losses >= MAX_CONSECUTIVE_FAILURES):
                node.is_member, node.assignment_id, node.queue, node.sent = False, "", [], ()
                has_changed = True
        for name in view.idle:
            if self._can_join(state, name, view.now_s):
                add_member(state, name, has_shared_rounds=not self.is_autonomous)
                has_changed = True
        if has_changed:
            update_bridges(state)
        return has_changed

    def _can_join(self, state: DecentralisedState, name: str, now_s: float) -> bool:
        node = state.nodes.get(name)
        if node is not None:
            return not node.is_member and node.rests_until_s <= now_s
        if self.file_graph is not None:
            return name in self.file_graph.nodes
        limit = self.rules.max_devices
        return limit is None or len(list_members(state)) < limit

    def _can_continue(self, state: DecentralisedState, graph: Topology, name: str) -> bool:
        """Returns whether a node's inputs are complete: with `sync`, messages of all its neighbours.

        An autonomous node is asked for a report if it is not far ahead of the others, or when its edges changed.
        """
        node = state.nodes[name]
        if self.is_autonomous:
            is_over = self.rules.rounds is not None and node.reported >= self.rules.rounds
            return node.edges_sent != format_edges(state, graph, name) or (
                not is_over and node.reported <= state.version + MAX_ROUNDS_AHEAD
            )
        if self.config.exchange == EdgeScheduleKind.PAIR:
            return bool(list_requests(node.queue)) or not any(
                name in list_requests((*other.queue, *other.sent))
                for other in state.nodes.values()
                if other.is_member and not (other.is_resting or other.losses)
            )
        if self.config.exchange != EdgeScheduleKind.SYNC:
            return True
        neighbours = [state.nodes[other] for other in graph.neighbours(name)]
        return all(other.exchanges >= node.exchanges or other.is_resting for other in neighbours)

    def _interrupt_for_replies(self, state: DecentralisedState, view: FleetView) -> list[Instruction]:
        """Returns, in pairs, instructions that end the iterations of nodes whose reply a neighbour waits for."""
        if self.is_autonomous or self.config.exchange != EdgeScheduleKind.PAIR:
            return []
        ended: list[Instruction] = []
        for name, node in state.nodes.items():
            is_training = name in view.busy and not (node.is_report or list_requests(node.sent))
            if is_training and list_requests(node.queue) and node.interrupted_id != node.assignment_id:
                node.interrupted_id = node.assignment_id
                ended.append(FinishEarlyInstruction(assignment_id=node.assignment_id, device_id=name))
        return ended

    def _is_at_limit(self, node: NodeState) -> bool:
        return self.rules.rounds is not None and node.iterations >= self.rules.rounds * self._iterations_per_round

    def _make_instruction(
        self, state: DecentralisedState, graph: Topology, name: str, view: FleetView
    ) -> TrainInstruction:
        node = state.nodes[name]
        state.num_assigned += 1
        prefix = f"r{state.num_resumes}" if state.num_resumes else ""
        node.assignment_id = f"{prefix}n{state.num_assigned}-{name}"
        period = graph.periods.get(name, self.plan.iterations or 1)
        is_damped = self.method == "d2" and graph.should_damp()
        edges = tuple(
            replace(
                link,
                epoch=state.edge_epochs.get(format_edge_key(state, name, link.neighbour), 0),
                degree=get_edge_degree(state, format_edge_key(state, name, link.neighbour), link.degree),
                address=self._get_address(link.neighbour, view),
            )
            for link in graph.make_link_configs(name, self.plan.iterations or 1, is_damped=is_damped)
        )
        iterations, fires = 0, tuple[str, ...]()
        if not (node.is_report or (self.config.exchange == EdgeScheduleKind.PAIR and list_requests(node.queue))):
            fires = graph.neighbours(name)
            if ALGORITHMS[self.method].should_train_before(node.exchanges + 1):
                rng = derive_rng(self.rules.seed, "firing", name, node.iterations)
                schedule = make_edge_schedule(self.config.exchange, edges=edges, period=period, rng=rng)
                iterations, fires = schedule(node.iterations, fires)
        messages = node.sent = tuple(node.queue)
        node.queue, node.edges_sent = [], format_edges(state, graph, name)
        node.until = node.iterations + self._iterations_per_round
        state.edge_bytes += sum(len(message.body) for message in messages)
        state.num_messages += len(messages)
        factor = compute_rate_factor(self.lr_schedule(state.version), state.halvings, state.version)
        return TrainInstruction(
            assignment_id=node.assignment_id,
            device_id=name,
            base_version=state.version,
            plan=replace(
                self.plan,
                iterations=iterations,
                learning_rate=self.plan.learning_rate * factor,
                messages=messages,
                node=GossipConfig(
                    method=self.method,
                    edges=edges,
                    learning_rate=self.plan.learning_rate,
                    period=period,
                    codec=self.rules.codec or "",
                    carrier=self.config.carrier,
                    schedule=self.config.exchange,
                    fires=fires,
                    listen=self._get_address(name, view),
                    until=node.until,
                    limit=(self.rules.rounds or 0) * self._iterations_per_round,
                    reports=node.is_report,
                    **{name: getattr(self.config, name) for name in ALGORITHMS[self.method].settings},
                ),
            ),
            codec="dense",
            deadline_s=None if self.is_autonomous else self.rules.deadline_s,
            sends_model=not node.has_started,
        )

    def _get_address(self, name: str, view: FleetView) -> str:
        """Returns a device's listening address, by the file or its own report; empty when unknown."""
        if self.config.carrier != "direct":
            return ""
        if name in self.hosts:
            return self.hosts[name]
        info = view.devices.get(name)
        return "" if info is None or self.hosts else str(info.capabilities.get("peer_address", ""))

    @property
    def _iterations_per_round(self) -> int:
        return self.config.exchanges_per_round * (self.plan.iterations or 1)

    def _is_round_done(self, state: DecentralisedState) -> bool:
        """Returns whether the nodes have done the round's local iterations on average, so that reports are due.

        A node counts for twice its part at most, whatever it claims.
        """
        nodes = [state.nodes[name] for name in list_members(state)]
        min_iterations = (state.version + 1) * self._iterations_per_round
        counted = sum(min(node.iterations, 2 * min_iterations) for node in nodes)
        return bool(nodes) and counted >= min_iterations * len(nodes)
