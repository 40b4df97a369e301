"""Fleet of an exported app: dispatches work to Flower nodes through the public `Grid` and polls their replies.

Every node is queried for its name first, so that a device keeps its name, and with it its random streams, whenever
its SuperNode starts. A stock node cannot be interrupted, so recalls are not sent.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from flwr.app import ArrayRecord, Message, MessageType
from flwr.serverapp import Grid

from edgefl.core.claims import DEFAULT_WEIGHT_RATIO, BoundedClaim, ClaimLimits, bound_reported_examples
from edgefl.core.errors import CodecError, ConfigError, EdgeflError
from edgefl.core.types import (
    DeviceAvailable,
    DeviceInfo,
    DeviceThroughput,
    EvaluateInstruction,
    EvaluateResult,
    Event,
    FinishEarlyInstruction,
    HealthMetrics,
    Instruction,
    InstructionFailed,
    Json,
    ModelProvider,
    Progress,
    Tensors,
    TrainInstruction,
    Update,
    UpdateMetrics,
    UpdateStatus,
)
from edgefl.flower.app_runtime import decode_content, encode_content, make_body_record

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2
"""Interval of polls for replies; Flower has no notification."""
NODE_SCAN_INTERVAL_S = 3.0
INTRODUCTION_TIMEOUT_S = 120.0
RETRY_INTERVAL_S = 60.0
"""Time after which a node without a name or shard is queried again."""
EVALUATION_TIMEOUT_S = 600.0
APP_ERROR_CODES = frozenset({1, 2, 6, 7, 8})
"""Flower's error codes of a failure of the app on its node; others are of the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingMessage:
    """A message in flight; `instruction` None is the query for a node's name."""

    node_id: int
    instruction: TrainInstruction | EvaluateInstruction | None
    sent_s: float
    until_s: float
    num_bytes: int = 0


@dataclass(slots=True)
class GridFleetView:
    """The present state of the fleet."""

    clock: Callable[[], float]
    devices: dict[str, DeviceInfo] = field(default_factory=dict)
    busy: dict[str, list[str]] = field(default_factory=dict)
    speeds: dict[str, DeviceThroughput] = field(default_factory=dict)
    progress: Mapping[str, Progress] = field(default_factory=dict)
    health: Mapping[str, HealthMetrics] = field(default_factory=dict)
    limited: Collection[str] = ()

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
        header: sent to every node with each instruction, as `build_run` makes it.
        encode: (model, version) -> body.
        decode: body -> displacement.
        clock: seconds, monotone.
        max_weight_ratio: of what one node may weigh to the median; see `ClaimLimits`.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        header: Json,
        encode: Callable[[Tensors, int], bytes],
        decode: Callable[[bytes], Tensors],
        clock: Callable[[], float],
        max_weight_ratio: float = DEFAULT_WEIGHT_RATIO,
    ) -> None:
        self._grid, self._header, self._encode, self._decode = grid, header, encode, decode
        self._clock, self._view = clock, GridFleetView(clock)
        self._limits = ClaimLimits(
            task=str(header["task"]),
            max_weight_ratio=max_weight_ratio,
            test_fraction=float(header["test_fraction"]),
            on_bounded=_log_bounded,
        )
        self._reported: dict[str, dict[str, int]] = {}
        self._pending: dict[str, _PendingMessage] = {}
        self._device_ids: dict[int, str] = {}
        self._next_query_s: dict[int, float] = {}
        self._version = -1
        self._body_cache: dict[str, tuple[ArrayRecord, int]] = {}
        self._failures: list[Event] = []
        self._scanned_s = -math.inf
        self._pause = threading.Event()

    def view(self) -> GridFleetView:
        return self._view

    def dispatch(self, instructions: Sequence[Instruction], source: ModelProvider) -> None:
        """Sends all instructions in one request; every model is encoded once.

        Raises:
            ConfigError: the strategy sends messages beside the model.
        """
        if any(isinstance(i, TrainInstruction) and (i.plan.node or i.plan.messages) for i in instructions):
            raise ConfigError(
                "this strategy sends messages beside the model, which a plain Flower app does not carry; run it with "
                "edgefl coordinator start, or edgefl simulate"
            )
        requests = [i for i in instructions if not isinstance(i, FinishEarlyInstruction)]
        if not requests:
            return
        node_ids = {device_id: node_id for node_id, device_id in self._device_ids.items()}
        messages, pending, now_s = [], [], self._clock()
        for instruction in requests:
            node_id = node_ids.get(instruction.device_id)
            if node_id is None:
                self._failures.append(_make_failure(instruction, UpdateStatus.LOST, "the node is gone"))
                continue
            body, num_bytes = self._encode_model(
                instruction.subject if isinstance(instruction, EvaluateInstruction) else "", source
            )
            self._limits.record_order(instruction.device_id, self._view.devices.get(instruction.device_id))
            kind = MessageType.TRAIN if isinstance(instruction, TrainInstruction) else MessageType.EVALUATE
            messages.append(Message(encode_content(self._make_header(instruction), body), node_id, kind))
            limit_s = instruction.deadline_s if isinstance(instruction, TrainInstruction) else EVALUATION_TIMEOUT_S
            until_s = math.inf if limit_s is None else now_s + limit_s
            pending.append(
                _PendingMessage(
                    node_id=node_id, instruction=instruction, sent_s=now_s, until_s=until_s, num_bytes=num_bytes
                )
            )
        self._send_messages(messages, pending)

    def wait(self, until_s: float) -> Sequence[Event]:
        while True:
            self._poll_nodes()
            events, self._failures = [*self._failures, *self._poll_replies(), *self._expire_overdue()], []
            left_s = until_s - self._clock()
            if events or left_s <= 0:
                return events
            self._pause.wait(min(POLL_INTERVAL_S, left_s))

    def _make_header(self, instruction: TrainInstruction | EvaluateInstruction) -> Json:
        header: Json = {**self._header, "assignment": f"{self._header['run']}/{instruction.assignment_id}"}
        if isinstance(instruction, EvaluateInstruction):
            return {**header, "version": instruction.version}
        plan = {
            name: value
            for name, value in asdict(instruction.plan).items()
            if value is not None and name != "messages"
        }
        used_ids = [f"{self._header['run']}/{assignment_id}" for assignment_id in instruction.used_assignments]
        header |= {
            "version": instruction.base_version,
            "plan": plan,
            "codec": instruction.codec or "dense",
            "used_assignments": used_ids,
        }
        return header if instruction.block is None else {**header, "block": instruction.block}

    def _encode_model(self, subject: str, source: ModelProvider) -> tuple[ArrayRecord, int]:
        """Returns the model of a device, the global one for an empty subject, and its bytes."""
        if self._version != source.version:
            self._version, self._body_cache = source.version, {}
        if subject not in self._body_cache:
            body = self._encode(source.device_model(subject), source.version)
            # A device's own model is sent once, so only the global one and the last are cached.
            self._body_cache = {key: cached for key, cached in self._body_cache.items() if not key}
            self._body_cache[subject] = make_body_record(body), len(body)
        return self._body_cache[subject]

    def _send_messages(self, messages: Sequence[Message], pending: Sequence[_PendingMessage]) -> None:
        accepted_ids = set(self._grid.push_messages(messages)) if messages else set()
        for message, pending_message in zip(messages, pending, strict=True):
            if message.metadata.message_id in accepted_ids:
                self._pending[message.metadata.message_id] = pending_message
                if isinstance(pending_message.instruction, TrainInstruction):
                    self._view.busy.setdefault(pending_message.instruction.device_id, []).append(
                        pending_message.instruction.assignment_id
                    )
            elif pending_message.instruction is not None:
                self._failures.append(
                    _make_failure(
                        pending_message.instruction, UpdateStatus.LOST, "the SuperLink did not take the message"
                    )
                )
            else:
                self._next_query_s.pop(pending_message.node_id, None)

    def _poll_nodes(self) -> None:
        """Queries new nodes for their names; assignments of nodes that left are lost."""
        now_s = self._clock()
        if now_s - self._scanned_s < NODE_SCAN_INTERVAL_S:
            return
        self._scanned_s = now_s
        node_ids = set(self._grid.get_node_ids())
        for node_id in set(self._next_query_s) - node_ids:
            self._remove_node(node_id)
        new_ids = sorted(node_id for node_id in node_ids if self._next_query_s.get(node_id, now_s) <= now_s)
        self._next_query_s |= dict.fromkeys(new_ids, math.inf)
        messages = [Message(encode_content({"v": 1}), node_id, MessageType.QUERY) for node_id in new_ids]
        until_s = now_s + INTRODUCTION_TIMEOUT_S
        self._send_messages(
            messages,
            [
                _PendingMessage(node_id=node_id, instruction=None, sent_s=now_s, until_s=until_s)
                for node_id in new_ids
            ],
        )

    def _remove_node(self, node_id: int) -> None:
        self._next_query_s.pop(node_id, None)
        device_id = self._device_ids.pop(node_id, None)
        if device_id is not None:
            del self._view.devices[device_id]
        for message_id in [key for key, pending in self._pending.items() if pending.node_id == node_id]:
            self._failures += self._fail(message_id, UpdateStatus.LOST, "the node is gone")

    def _poll_replies(self) -> Iterable[Event]:
        if not self._pending:
            return
        for reply in self._grid.pull_messages(list(self._pending)):
            message_id = reply.metadata.reply_to_message_id
            if message_id not in self._pending:
                continue
            if reply.has_error():
                outcome = UpdateStatus.FAILED if reply.error.code in APP_ERROR_CODES else UpdateStatus.LOST
                yield from self._fail(message_id, outcome, f"Flower: {reply.error.reason}")
                continue
            try:
                header, body = decode_content(reply.content)
            except EdgeflError as error:
                header, body = {"error": str(error)}, b""
            if "error" in header:
                yield from self._fail(message_id, UpdateStatus.FAILED, str(header["error"]))
            else:
                yield from self._receive_reply(message_id, header, body)

    def _expire_overdue(self) -> Iterable[Event]:
        now_s = self._clock()
        for message_id in [key for key, pending in self._pending.items() if pending.until_s <= now_s]:
            yield from self._fail(message_id, UpdateStatus.LOST, "its deadline has passed")

    def _receive_reply(self, message_id: str, header: Json, body: bytes) -> Iterable[Event]:
        pending = self._pending[message_id]
        try:
            event = self._parse_event(pending, header, body)
        except (CodecError, KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            yield from self._fail(message_id, UpdateStatus.FAILED, f"its answer makes no sense: {error!r}")
            return
        self._complete(message_id)
        yield event

    def _parse_event(self, pending: _PendingMessage, header: Json, body: bytes) -> Event:
        instruction, now_s = pending.instruction, self._clock()
        if instruction is None:
            return self._add_node(pending.node_id, header)
        metrics = header["metrics"]
        if isinstance(instruction, EvaluateInstruction):
            result = _parse_evaluation(instruction, metrics, len(body), pending.num_bytes)
            return self._limits.bound_evaluation(result, self._view.devices.get(instruction.device_id))
        elapsed_s = now_s - pending.sent_s
        update_metrics = self._limits.bound_metrics(
            _parse_metrics(metrics, elapsed_s, len(body), pending.num_bytes),
            instruction,
            elapsed_s=elapsed_s,
            is_finishing_early=False,
            speeds=self._view.speeds,
        )
        if update_metrics.iterations:
            seconds = update_metrics.compute_s / update_metrics.iterations
            self._view.speeds[instruction.device_id] = DeviceThroughput(seconds_per_iteration=seconds)
        return Update(
            assignment_id=instruction.assignment_id,
            device_id=instruction.device_id,
            base_version=instruction.base_version,
            tensors=self._decode(body),
            metrics=update_metrics,
            received_s=now_s,
        )

    def _add_node(self, node_id: int, header: Json) -> DeviceAvailable:
        device_id = str(header["device"])
        if device_id in self._device_ids.values():
            raise ValueError(f"two nodes are called {device_id}")
        examples = bound_reported_examples(self._reported.get(device_id, {}), dict(header["examples"]))
        self._reported[device_id] = examples
        blocks = {str(task): tuple(map(int, numbers)) for task, numbers in dict(header.get("blocks", {})).items()}
        self._device_ids[node_id] = device_id
        self._view.devices[device_id] = DeviceInfo(
            device_id=device_id, tasks=tuple(examples), examples=examples, blocks=blocks
        )
        return DeviceAvailable(device_id=device_id)

    def _fail(self, message_id: str, outcome: UpdateStatus, reason: str) -> Sequence[Event]:
        pending = self._pending[message_id]
        self._complete(message_id)
        if pending.instruction is not None:
            return [_make_failure(pending.instruction, outcome, reason)]
        if pending.node_id in self._next_query_s:
            self._next_query_s[pending.node_id] = self._clock() + RETRY_INTERVAL_S
        log.warning("node %d takes no part: %s", pending.node_id, reason)
        return []

    def _complete(self, message_id: str) -> None:
        instruction = self._pending.pop(message_id).instruction
        if isinstance(instruction, TrainInstruction) and (outstanding := self._view.busy.get(instruction.device_id)):
            outstanding.remove(instruction.assignment_id)
            if not outstanding:
                del self._view.busy[instruction.device_id]


def _log_bounded(claim: BoundedClaim) -> None:
    log.warning("%s: %s", claim.device_id, claim)


def _make_failure(
    instruction: TrainInstruction | EvaluateInstruction, outcome: UpdateStatus, reason: str
) -> InstructionFailed:
    return InstructionFailed(
        device_id=instruction.device_id, assignment_id=instruction.assignment_id, outcome=outcome, reason=reason
    )


def _parse_metrics(metrics: Json, turnaround_s: float, bytes_up: int, bytes_down: int) -> UpdateMetrics:
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


def _parse_evaluation(
    instruction: EvaluateInstruction, metrics: Json, bytes_up: int, bytes_down: int
) -> EvaluateResult:
    loss, num_examples = float(metrics["loss"]), int(metrics["num_examples"])
    accuracy = None if metrics["accuracy"] is None else float(metrics["accuracy"])
    if not (math.isfinite(loss) and math.isfinite(accuracy or 0.0) and num_examples > 0):
        raise ValueError(f"loss = {loss!r}, accuracy = {accuracy!r} on {num_examples} examples")
    return instruction.make_result(
        source="device",
        num_examples=num_examples,
        loss=loss,
        accuracy=accuracy,
        bytes_up=bytes_up,
        bytes_down=bytes_down,
    )
