"""A Flower app as a strategy: its assignments are the messages of the ServerApp, its only version is what that wrote.

The ServerApp's process and the round loop take turns: a request is answered from what the loop saw in this turn, and
one that has to wait ends the turn. So a coordinator that starts again follows its journal with a new process of the
same ServerApp, up to the message where it was; an assignment's name has a hash of its message, so that a ServerApp
that does something else the second time is noticed, and begins anew.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from edgefl.core.errors import RunFailedError
from edgefl.core.metrics import ReplyMetrics
from edgefl.core.safe_text import escape_text
from edgefl.core.types import (
    Array,
    Decision,
    FleetView,
    Instruction,
    Json,
    Role,
    Strategy,
    Tensors,
    TrainConfig,
    TrainInstruction,
    Update,
)
from edgefl.flower.app_inputs import MessageInputs
from edgefl.flower.app_job import CRASHED_ERROR, MAX_REASON_CHARS, UNAVAILABLE_ERROR
from edgefl.flower.app_messages import EVALUATE, QUERY, TRAIN, read_metrics
from edgefl.flower.server_link import ServerLink, make_size_reason
from edgefl.flower.strategy import compute_node_id
from edgefl.strategies.aggregation import unload_tensors
from edgefl.strategies.job_strategy import DELIVERY_S, RESULT, WAKE_S, CompletePart
from edgefl.strategies.participation import can_receive_work

TURN_S = 1.0
"""How long a ServerApp that asks again for nodes, or for replies that are not there, is kept waiting."""
SENT_S = 0.001
"""From the turn that sends messages to the next, from which on their replies are waited for."""
MAX_LISTS = 3
"""How often a ServerApp may ask for nodes in a turn without sending a message: they are the same until the next."""
MAX_MESSAGES = 1_000_000
KINDS = {"m": TRAIN, "e": EVALUATE, "q": QUERY}
"""Kind of a message by the first letter of the name of its assignment."""


@dataclass(slots=True, kw_only=True)
class AppState:
    """State of a Flower app's run.

    Attributes:
        model: the files of the ServerApp as one archive, empty until it has ended.
        version: 1 once it has.
        used: assignments whose replies it was given.
        nodes: boards in the order of their partitions.
        num_partitions: boards at the start.
        targets: of each message, its board.
        rounds: of each message, from 1 on; it never falls.
        letters: of each message, that of its kind.
        pending: messages to be given out, in order.
        in_flight: assignment -> its message.
        complete: replies.
        failed: message -> Flower's error code, and the reason.
        delivered: messages whose replies the ServerApp has.
        reply_bytes: of all replies.
        attempt: how often the ServerApp was started anew.
        has_ended: the ServerApp has.
        is_over: the run is stopping.
    """

    model: dict[str, Array] = field(default_factory=lambda: {RESULT: np.zeros(0, np.uint8)})
    version: int = 0
    used: tuple[str, ...] = ()
    nodes: list[str] = field(default_factory=list)
    num_partitions: int = 0
    targets: list[str] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    letters: list[str] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    in_flight: dict[str, int] = field(default_factory=dict)
    complete: dict[int, CompletePart] = field(default_factory=dict)
    failed: dict[int, tuple[int, str]] = field(default_factory=dict)
    delivered: set[int] = field(default_factory=set)
    reply_bytes: int = 0
    attempt: int = 0
    has_ended: bool = False
    is_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AppStrategy(Strategy[AppState]):
    """Gives out the messages of a ServerApp until it ends.

    Attributes:
        link: to the ServerApp's process.
        header: of every message: `run`, `run_id`.
        inputs: of the messages without a reply.
        min_devices: idle boards that it is started with.
        deadline_s: of a ClientApp's work on a message.
        max_part_bytes: most bytes of a message.
        max_state_bytes: most bytes of all replies, and of the messages without one.
        max_result_bytes: most bytes of the files that the ServerApp leaves.
    """

    link: ServerLink
    header: Json
    inputs: MessageInputs = field(default_factory=MessageInputs)
    min_devices: int = 1
    deadline_s: float = 600.0
    max_part_bytes: int = 0
    max_state_bytes: int = 0
    max_result_bytes: int = 0

    def make_input(self, part: int) -> bytes:
        """Returns the body of a message; empty for one that is only planned."""
        return self.inputs.make_body(part)

    def init(self, model: Tensors) -> AppState:  # noqa: ARG002 an app has its own
        return AppState()

    def preview(self, state: AppState, view: FleetView) -> Decision:
        """Returns a message for each board; what the ServerApp would send is not known before it runs."""
        if len(view.idle) < self.min_devices:
            return Decision()
        return Decision(instructions=tuple(self._make_instruction(state, 0, device_id) for device_id in view.idle))

    def assign(self, state: AppState, view: FleetView) -> tuple[AppState, Decision]:
        """Answers the ServerApp until it waits, and gives idle boards their next messages."""
        if state.is_over or state.has_ended or not self._start(state, view):
            return state, Decision(next_wake_s=WAKE_S)
        self._fail_lost(state, view)
        next_s = self._serve(state, view)
        instructions: list[Instruction] = []
        for device_id in view.idle:
            part = next((part for part in state.pending if state.targets[part] == device_id), None)
            if part is not None:
                state.pending.remove(part)
                instruction = self._make_instruction(state, part, device_id)
                state.in_flight[instruction.assignment_id] = part
                instructions.append(instruction)
        return state, Decision(instructions=tuple(instructions), next_wake_s=next_s)

    def receive(self, state: AppState, update: Update) -> AppState:
        """Takes over a reply; one that is not waited for changes nothing."""
        part = state.in_flight.get(update.assignment_id)
        if part is None or state.targets[part] != update.device_id:
            return state
        del state.in_flight[update.assignment_id]
        state.reply_bytes += int(np.asarray(update.tensors[RESULT]).size)
        unload_tensors(update.tensors)
        state.complete[part] = CompletePart(
            assignment_id=update.assignment_id, device_id=update.device_id, tensors=update.tensors
        )
        self.inputs.remove(part)
        if state.reply_bytes > self.max_state_bytes:
            raise RunFailedError(
                f"the boards' replies are more than run.max_state_bytes = {self.max_state_bytes}: raise it, or send "
                "less in a message"
            )
        return state

    def ready(self, state: AppState, view: FleetView) -> bool:  # noqa: ARG002 all is in the state
        return state.has_ended and state.version == 0

    def aggregate(self, state: AppState) -> AppState:
        result = self.link.collect(self.max_result_bytes)
        self.link.close()
        state.model = {RESULT: np.frombuffer(result, np.uint8).copy()}
        state.version = 1
        state.used = tuple(
            part.assignment_id for number, part in sorted(state.complete.items()) if number in state.delivered
        )
        state.complete = {}
        return state

    def finish(self, state: AppState) -> AppState:
        """Marks the run as over, and ends the ServerApp; replies are kept only where it had ended by itself."""
        state.is_over = True
        if not state.has_ended:
            self.link.close()
            for part in state.pending:  # a board that has its message may ask for it again
                self.inputs.remove(part)
            state.complete, state.pending, state.in_flight = {}, [], {}
        return state

    def resumed(self, state: AppState) -> AppState:  # noqa: ARG002 a process cannot be restored
        """Returns the state of a new run: the app begins anew."""
        return AppState()

    def facts(self, state: AppState) -> Mapping[str, float]:
        """Returns how many messages were answered, and how many were not."""
        return {"messages": float(len(state.used)), "errors": float(len(state.failed))}

    def _start(self, state: AppState, view: FleetView) -> bool:
        """Gives boards their partitions; returns whether the run has begun."""
        if state.nodes and not self.link.is_started:
            # Of a checkpoint, which there is only before the first reply: nothing is lost.
            state.attempt += 1
            state.targets, state.rounds, state.pending, state.in_flight = [], [], [], {}
            state.failed, state.letters, state.delivered = {}, [], set()
        if not state.nodes:
            if len(view.idle) < self.min_devices:
                return False
            state.num_partitions = len(view.idle)
        present = filter(partial(_is_node, view=view), view.devices) if state.nodes else view.idle
        state.nodes += sorted(set(present) - set(state.nodes))
        return True

    def _fail_lost(self, state: AppState, view: FleetView) -> None:
        """Fails messages whose boards are gone, or have failed them."""
        busy = view.busy
        for assignment_id, part in list(state.in_flight.items()):
            device_id = state.targets[part]
            if assignment_id not in busy.get(device_id, ()):
                del state.in_flight[assignment_id]
                self._fail(state, part, is_away=device_id not in view.devices)
        for part in list(state.pending):
            if state.targets[part] not in _list_nodes(state, view):
                state.pending.remove(part)
                self._fail(state, part, is_away=True)

    def _fail(self, state: AppState, part: int, *, is_away: bool) -> None:
        device_id = state.targets[part]
        self.inputs.remove(part)
        if is_away:
            state.failed[part] = UNAVAILABLE_ERROR, f"{device_id or 'the node'} is away"
        else:
            state.failed[part] = CRASHED_ERROR, f"{device_id} could not do it; edgefl history events says why"

    def _serve(self, state: AppState, view: FleetView) -> float:
        """Answers requests until one has to wait; returns for how many seconds it may."""
        num_lists = 0
        while True:
            request, body = self.link.get_request()
            match request.get("do"):
                case "nodes" if num_lists >= MAX_LISTS:
                    return TURN_S
                case "nodes":
                    num_lists += 1
                    self.link.answer(
                        {"nodes": [compute_node_id(device_id) for device_id in _list_nodes(state, view)]}
                    )
                case "push":
                    num_lists = 0
                    self.link.answer({"message": str(self._add_message(state, view, request, body))})
                case "wait":
                    left_s = self._answer_wait(state, view, request)
                    if left_s > 0:
                        return left_s
                case "end":
                    state.has_ended = True
                    return 0.0
                case "fail":
                    reason = escape_text(str(request.get("reason"))[:MAX_REASON_CHARS])
                    raise self.link.fail(f"the ServerApp raised {reason}")
                case other:
                    raise RunFailedError(f"the ServerApp's process asked for {other!r:.40}")

    def _add_message(self, state: AppState, view: FleetView, request: Json, body: bytes) -> int:
        """Adds a message for a node, and returns its number."""
        part, node_id = len(state.targets), request.get("node")
        if part >= MAX_MESSAGES:
            raise RunFailedError(f"the ServerApp sent {MAX_MESSAGES} messages")
        device_id = next((name for name in _list_nodes(state, view) if compute_node_id(name) == node_id), "")
        state.targets.append(device_id)
        newest, number = state.rounds[-1] if state.rounds else 1, request.get("round")
        state.rounds.append(max(newest, min(number, MAX_MESSAGES)) if isinstance(number, int) else newest)
        state.letters.append(next((letter for letter, kind in KINDS.items() if kind == request.get("type")), "q"))
        if not device_id:
            self._fail(state, part, is_away=True)
            return part
        number = state.nodes.index(device_id)
        config = {"partition-id": number, "num-partitions": max(state.num_partitions, number + 1)}
        envelope = {**self.header, "node_id": node_id, "node_config": config}
        # An app that begins anew does so on the boards, too.
        envelope["run"] = f"{self.header['run']}/{state.attempt}"
        size = self.inputs.add(part, envelope, body)
        if size > self.max_part_bytes:
            raise RunFailedError(make_size_reason(size, self.max_part_bytes))
        if self.inputs.num_bytes > self.max_state_bytes:
            raise RunFailedError(
                f"the ServerApp's messages without a reply have {self.inputs.num_bytes} bytes, more than "
                f"run.max_state_bytes = {self.max_state_bytes}: raise it, or wait for replies before sending more"
            )
        state.pending.append(part)
        return part

    def _answer_wait(self, state: AppState, view: FleetView, request: Json) -> float:
        """Answers a request for replies if it need not wait longer; returns for how long it has to, in seconds."""
        requested = [int(name) for name in request["messages"]]
        ready = [
            part
            for part in requested
            if part not in state.delivered and (part in state.complete or part in state.failed)
        ]
        is_done = len(ready) == len(requested) if request.get("all") else bool(ready)
        if not is_done and not request.get("is_sent"):
            # A turn has the time of its beginning, and the ServerApp computed since: it waits from the next turn on.
            request["is_sent"] = True
            return SENT_S
        timeout_s = request.get("timeout_s")
        limit_s = math.inf if timeout_s is None else max(TURN_S, float(timeout_s))
        left_s = float(request.setdefault("until_s", view.now_s + limit_s)) - view.now_s
        if not is_done and left_s > 0:
            return min(WAKE_S, left_s)
        self.link.answer({"count": len(ready)}, is_last=not ready)
        for index, part in enumerate(ready, 1):
            state.delivered.add(part)
            header: Json = {"message": str(part)}
            if part in state.failed:
                header |= dict(zip(("error", "reason"), state.failed[part], strict=True))
            self.link.answer(header, self._read_reply(state, part), is_last=index == len(ready))
        return 0.0

    def _read_reply(self, state: AppState, part: int) -> bytes:
        if part not in state.complete:
            return b""
        tensors = state.complete[part].tensors
        body = np.asarray(tensors[RESULT]).tobytes()
        unload_tensors(tensors)
        return body

    def _make_instruction(self, state: AppState, part: int, device_id: str) -> TrainInstruction:
        digest = hashlib.sha256(self.make_input(part)).hexdigest()[:12]
        letter = state.letters[part] if state.letters else "m"
        return TrainInstruction(
            assignment_id=f"{letter}{part}-t{state.attempt + 1}-{digest}-{device_id}",
            device_id=device_id,
            base_version=state.rounds[part] - 1 if state.rounds else 0,
            plan=TrainConfig(iterations=1),
            deadline_s=self.deadline_s + DELIVERY_S,
            block=part,
        )


def read_reply(update: Update) -> ReplyMetrics:
    """Returns the metrics of a reply."""
    body = np.asarray(update.tensors[RESULT]).tobytes()
    unload_tensors(update.tensors)
    return read_metrics(body, kind=KINDS.get(update.assignment_id[:1], QUERY))


def _list_nodes(state: AppState, view: FleetView) -> Sequence[str]:
    """Returns the boards that may be sent messages now, in the order of their partitions."""
    return [name for name in state.nodes if _is_node(name, view)]


def _is_node(device_id: str, view: FleetView) -> bool:
    """Returns whether a board becomes idle, so that a message to it does not wait for ever."""
    return can_receive_work(device_id, view) and view.devices[device_id].role == Role.TRAINER
