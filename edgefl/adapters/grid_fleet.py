"""The fleet of an exported app: Flower nodes behind the public `Grid`, given work and asked for what they have done.

Every node introduces itself first, so that a device has the same name, and with it the same random streams, whenever
its SuperNode was started. A stock node cannot be interrupted, so recalls are not sent.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from flwr.app import ArrayRecord, Message, MessageType
from flwr.serverapp import Grid

from edgefl.adapters.app_messages import body_record, pack, unpack
from edgefl.errors import CodecError, ConfigError, EdgeflError
from edgefl.types import (
    Assignment,
    DeviceInfo,
    Evaluated,
    Evaluation,
    Event,
    Joined,
    Json,
    Lost,
    ModelSource,
    Order,
    Outcome,
    Progress,
    Recall,
    Speed,
    Tensors,
    Update,
    UpdateMetrics,
    Vitals,
)

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Between two questions for replies; Flower has no way to be told."""
NODES_EVERY_S = 3.0
INTRODUCTION_S = 120.0
ASK_AGAIN_S = 60.0
"""A node that cannot say who it is, or has no shard, is asked again after so long."""
EVALUATION_S = 600.0
THEIR_FAULT = frozenset({1, 2, 6, 7, 8})
"""Codes of Flower's errors that say that the app itself failed on its node; others are of the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """A message under way; `order` None asks a node who it is."""

    node_id: int
    order: Assignment | Evaluation | None
    sent_s: float
    until_s: float
    num_bytes: int = 0


@dataclass(slots=True)
class GridView:
    """The fleet as it is now."""

    clock: Callable[[], float]
    devices: dict[str, DeviceInfo] = field(default_factory=dict)
    busy: dict[str, list[str]] = field(default_factory=dict)
    speeds: dict[str, Speed] = field(default_factory=dict)
    progress: Mapping[str, Progress] = field(default_factory=dict)
    vitals: Mapping[str, Vitals] = field(default_factory=dict)

    @property
    def now_s(self) -> float:
        return self.clock()

    @property
    def idle(self) -> Sequence[str]:
        return [device_id for device_id in sorted(self.devices) if device_id not in self.busy]


class GridFleet:
    """Implements `Fleet`.

    Args:
        grid: of the ServerApp.
        header: what every node is told with each order, as `assembly.assemble` makes it.
        encode: (model, version) -> body.
        decode: body -> displacement.
        clock: seconds, monotone.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        header: Json,
        encode: Callable[[Tensors, int], bytes],
        decode: Callable[[bytes], Tensors],
        clock: Callable[[], float],
    ) -> None:
        self._grid, self._header, self._encode, self._decode = grid, header, encode, decode
        self._clock, self._view = clock, GridView(clock)
        self._sent: dict[str, _Sent] = {}
        self._nodes: dict[int, str] = {}
        self._asked: dict[int, float] = {}
        self._version = -1
        self._bodies: dict[str, tuple[ArrayRecord, int]] = {}
        self._troubles: list[Event] = []
        self._looked_s = -math.inf
        self._pause = threading.Event()

    def view(self) -> GridView:
        return self._view

    def dispatch(self, orders: Sequence[Order], source: ModelSource) -> None:
        """Sends all of it in one request; every model is encoded once.

        Raises:
            ConfigError: the strategy sends messages beside the model.
        """
        if any(isinstance(order, Assignment) and (order.plan.node or order.plan.inbox) for order in orders):
            raise ConfigError(
                "this strategy sends messages beside the model, which a plain Flower app does not carry; run it with "
                "edgefl coordinator start, or edgefl simulate"
            )
        given = [order for order in orders if not isinstance(order, Recall)]
        if not given:
            return
        node_of = {device_id: node_id for node_id, device_id in self._nodes.items()}
        messages, sent, now_s = [], [], self._clock()
        for order in given:
            node_id = node_of.get(order.device_id)
            if node_id is None:
                self._troubles.append(_lost(order, Outcome.LOST, "the node is gone"))
                continue
            body, num_bytes = self._encoded(order.subject if isinstance(order, Evaluation) else "", source)
            kind = MessageType.TRAIN if isinstance(order, Assignment) else MessageType.EVALUATE
            messages.append(Message(pack(self._header_of(order), body), node_id, kind))
            limit_s = order.deadline_s if isinstance(order, Assignment) else EVALUATION_S
            until_s = math.inf if limit_s is None else now_s + limit_s
            sent.append(_Sent(node_id=node_id, order=order, sent_s=now_s, until_s=until_s, num_bytes=num_bytes))
        self._push(messages, sent)

    def wait(self, until_s: float) -> Sequence[Event]:
        while True:
            self._look_for_nodes()
            events, self._troubles = [*self._troubles, *self._replies(), *self._overdue()], []
            left_s = until_s - self._clock()
            if events or left_s <= 0:
                return events
            self._pause.wait(min(POLL_S, left_s))

    def _header_of(self, order: Assignment | Evaluation) -> Json:
        header: Json = {**self._header, "assignment": f"{self._header['run']}/{order.assignment_id}"}
        if isinstance(order, Evaluation):
            return {**header, "version": order.version}
        plan = {name: value for name, value in asdict(order.plan).items() if value is not None and name != "inbox"}
        settled = [f"{self._header['run']}/{assignment_id}" for assignment_id in order.settled]
        header |= {"version": order.base_version, "plan": plan, "codec": order.codec or "dense", "settled": settled}
        return header if order.block is None else {**header, "block": order.block}

    def _encoded(self, subject: str, source: ModelSource) -> tuple[ArrayRecord, int]:
        """Returns the model of a device, the global one for an empty subject, and its bytes."""
        if self._version != source.version:
            self._version, self._bodies = source.version, {}
        if subject not in self._bodies:
            body = self._encode(source.model_of(subject), source.version)
            # A device's own model is sent once, so beside the global one only the last is kept.
            self._bodies = {key: kept for key, kept in self._bodies.items() if not key}
            self._bodies[subject] = body_record(body), len(body)
        return self._bodies[subject]

    def _push(self, messages: Sequence[Message], sent: Sequence[_Sent]) -> None:
        accepted = set(self._grid.push_messages(messages)) if messages else set()
        for message, each in zip(messages, sent, strict=True):
            if message.metadata.message_id in accepted:
                self._sent[message.metadata.message_id] = each
                if isinstance(each.order, Assignment):
                    self._view.busy.setdefault(each.order.device_id, []).append(each.order.assignment_id)
            elif each.order is not None:
                self._troubles.append(_lost(each.order, Outcome.LOST, "the SuperLink did not take the message"))
            else:
                self._asked.pop(each.node_id, None)

    def _look_for_nodes(self) -> None:
        """Asks new nodes who they are; what nodes that left had to do is lost."""
        now_s = self._clock()
        if now_s - self._looked_s < NODES_EVERY_S:
            return
        self._looked_s = now_s
        present = set(self._grid.get_node_ids())
        for node_id in set(self._asked) - present:
            self._forget(node_id)
        new = sorted(node_id for node_id in present if self._asked.get(node_id, now_s) <= now_s)
        self._asked |= dict.fromkeys(new, math.inf)
        messages = [Message(pack({"v": 1}), node_id, MessageType.QUERY) for node_id in new]
        until_s = now_s + INTRODUCTION_S
        self._push(messages, [_Sent(node_id=node_id, order=None, sent_s=now_s, until_s=until_s) for node_id in new])

    def _forget(self, node_id: int) -> None:
        self._asked.pop(node_id, None)
        device_id = self._nodes.pop(node_id, None)
        if device_id is not None:
            del self._view.devices[device_id]
        for message_id in [key for key, each in self._sent.items() if each.node_id == node_id]:
            self._troubles += self._fail(message_id, Outcome.LOST, "the node is gone")

    def _replies(self) -> Iterable[Event]:
        if not self._sent:
            return
        for reply in self._grid.pull_messages(list(self._sent)):
            message_id = reply.metadata.reply_to_message_id
            if message_id not in self._sent:
                continue
            if reply.has_error():
                outcome = Outcome.FAILED if reply.error.code in THEIR_FAULT else Outcome.LOST
                yield from self._fail(message_id, outcome, f"Flower: {reply.error.reason}")
                continue
            try:
                header, body = unpack(reply.content)
            except EdgeflError as error:
                header, body = {"error": str(error)}, b""
            if "error" in header:
                yield from self._fail(message_id, Outcome.FAILED, str(header["error"]))
            else:
                yield from self._take(message_id, header, body)

    def _overdue(self) -> Iterable[Event]:
        now_s = self._clock()
        for message_id in [key for key, each in self._sent.items() if each.until_s <= now_s]:
            yield from self._fail(message_id, Outcome.LOST, "its deadline has passed")

    def _take(self, message_id: str, header: Json, body: bytes) -> Iterable[Event]:
        sent = self._sent[message_id]
        try:
            event = self._event(sent, header, body)
        except (CodecError, KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            yield from self._fail(message_id, Outcome.FAILED, f"its answer makes no sense: {error!r}")
            return
        self._settle(message_id)
        yield event

    def _event(self, sent: _Sent, header: Json, body: bytes) -> Event:
        order, now_s = sent.order, self._clock()
        if order is None:
            return self._introduced(sent.node_id, header)
        metrics = header["metrics"]
        if isinstance(order, Evaluation):
            return _evaluated(order, metrics, len(body), sent.num_bytes)
        measured = _metrics(metrics, now_s - sent.sent_s, len(body), sent.num_bytes)
        if measured.iterations:
            seconds = measured.compute_s / measured.iterations
            self._view.speeds[order.device_id] = Speed(seconds_per_iteration=seconds)
        return Update(
            assignment_id=order.assignment_id,
            device_id=order.device_id,
            base_version=order.base_version,
            tensors=self._decode(body),
            metrics=measured,
            received_s=now_s,
        )

    def _introduced(self, node_id: int, header: Json) -> Joined:
        device_id, examples = str(header["device"]), dict(header["examples"])
        if device_id in self._nodes.values():
            raise ValueError(f"two nodes are called {device_id}")
        blocks = {str(task): tuple(map(int, held)) for task, held in dict(header.get("blocks", {})).items()}
        self._nodes[node_id] = device_id
        self._view.devices[device_id] = DeviceInfo(
            device_id=device_id, tasks=tuple(examples), examples=examples, blocks=blocks
        )
        return Joined(device_id=device_id)

    def _fail(self, message_id: str, outcome: Outcome, reason: str) -> Sequence[Event]:
        sent = self._sent[message_id]
        self._settle(message_id)
        if sent.order is not None:
            return [_lost(sent.order, outcome, reason)]
        if sent.node_id in self._asked:
            self._asked[sent.node_id] = self._clock() + ASK_AGAIN_S
        log.warning("node %d takes no part: %s", sent.node_id, reason)
        return []

    def _settle(self, message_id: str) -> None:
        order = self._sent.pop(message_id).order
        if isinstance(order, Assignment) and (outstanding := self._view.busy.get(order.device_id)):
            outstanding.remove(order.assignment_id)
            if not outstanding:
                del self._view.busy[order.device_id]


def _lost(order: Assignment | Evaluation, outcome: Outcome, reason: str) -> Lost:
    return Lost(device_id=order.device_id, assignment_id=order.assignment_id, outcome=outcome, reason=reason)


def _metrics(metrics: Json, turnaround_s: float, bytes_up: int, bytes_down: int) -> UpdateMetrics:
    loss, compute_s = metrics.get("loss"), float(metrics["compute_s"])
    if not (math.isfinite(compute_s) and compute_s >= 0):
        raise ValueError(f"compute_s = {compute_s!r}")
    return UpdateMetrics(
        iterations=int(metrics["iterations"]),
        num_examples=int(metrics["num_examples"]),
        loss=None if loss is None else float(loss),
        compute_s=compute_s,
        send_s=max(0.0, turnaround_s - compute_s),
        bytes_up=bytes_up,
        bytes_down=bytes_down,
    )


def _evaluated(order: Evaluation, metrics: Json, bytes_up: int, bytes_down: int) -> Evaluated:
    loss, accuracy, num_examples = float(metrics["loss"]), float(metrics["accuracy"]), int(metrics["num_examples"])
    if not (math.isfinite(loss) and math.isfinite(accuracy) and num_examples > 0):
        raise ValueError(f"loss = {loss!r}, accuracy = {accuracy!r} on {num_examples} examples")
    return Evaluated(
        assignment_id=order.assignment_id,
        device_id=order.device_id,
        version=order.version,
        round=order.round,
        source="device",
        num_examples=num_examples,
        loss=loss,
        accuracy=accuracy,
        subject=order.subject,
        bytes_up=bytes_up,
        bytes_down=bytes_down,
    )
