"""A fleet with a clock of its own whose boards train quadratics at their own pace, over links that take time.

A device minimises (w - target)²/2 from the model it was given, so that what every round does can be computed by hand.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from edgefl.compression.codec import decode_body, make_codec
from edgefl.core.types import (
    DeviceAvailable,
    DeviceInfo,
    FinishEarlyInstruction,
    HealthMetrics,
    InstructionFailed,
    Progress,
    TensorSpec,
    TrainInstruction,
    Update,
    UpdateMetrics,
    UpdateStatus,
)
from edgefl.engine.progress import StoppingCriteria
from edgefl.engine.round_loop import run_rounds


@dataclass
class Board:
    seconds_per_iteration: float
    exchange_s: float = 0.0
    target: float = 1.0
    num_examples: int = 10
    blocks: tuple[int, ...] = ()
    answers: bool = True


@dataclass
class Work:
    order: TrainInstruction
    start: np.ndarray
    done: int = 0
    compute_s: float = 0.0
    is_stuck: bool = False
    is_recalled: bool = False
    is_gone: bool = False


class Journal:
    """Keeps what was made of which updates."""

    def __init__(self):
        self.aggregates, self.orders = [], []

    def record_events(self, events):
        return events

    def record_decision(self, decision):
        self.orders += decision.instructions

    def record_aggregation(self, version, assignment_ids, state):
        self.aggregates.append(tuple(assignment_ids))

    def commit(self): ...


@dataclass
class PacedFleet:
    boards: dict[str, Board]
    task: str = ""
    now_s: float = 0.0
    turns: int = 0
    heap: list = field(default_factory=list)
    ticket: itertools.count = field(default_factory=itertools.count)
    queues: dict[str, list[Work]] = field(default_factory=dict)
    present: set[str] = field(default_factory=set)
    progress: dict[str, Progress] = field(default_factory=dict)
    speeds: dict[str, object] = field(default_factory=dict)
    given: list[tuple[float, object]] = field(default_factory=list)
    arrived: list[tuple[float, Update]] = field(default_factory=list)
    resting: set[str] = field(default_factory=set)
    used_ids: set[str] = field(default_factory=set)
    journal: Journal = field(default_factory=Journal)

    def __post_init__(self):
        self.present = set(self.boards)
        self.queues = {name: [] for name in self.boards}

    def at(self, time_s, action):
        heapq.heappush(self.heap, (time_s, next(self.ticket), action))

    def after(self, seconds, action):
        self.at(self.now_s + seconds, action)

    def leave(self, name):
        self.present.discard(name)
        return [self.lose(name, work, UpdateStatus.LOST) for work in list(self.queues[name])]

    def join(self, name):
        self.present.add(name)
        return [DeviceAvailable(device_id=name)]

    def lose(self, name, work, outcome):
        work.is_gone = True
        self.queues[name].remove(work)
        return InstructionFailed(
            device_id=name, assignment_id=work.order.assignment_id, outcome=outcome, reason="lost"
        )

    def view(self):
        present = sorted(self.present)
        busy = {name: [w.order.assignment_id for w in queue] for name, queue in self.queues.items() if queue}
        return SimpleNamespace(
            now_s=self.now_s,
            devices={
                name: DeviceInfo(device_id=name, blocks={self.task: self.boards[name].blocks}) for name in present
            },
            idle=[name for name in present if name not in busy],
            busy=busy,
            speeds=self.speeds,
            progress=self.progress,
            health={name: HealthMetrics(is_throttled=True) for name in self.resting},
        )

    def dispatch(self, orders, source):
        for order in orders:
            self.given.append((self.now_s, order))
            queue = self.queues[order.device_id]
            if isinstance(order, FinishEarlyInstruction):
                for work in queue:
                    work.is_recalled |= work.order.assignment_id == order.assignment_id
                continue
            assert order.assignment_id not in self.used_ids, f"{order.assignment_id} was given before"
            self.used_ids.add(order.assignment_id)
            work = Work(order=order, start=np.array(source.model()["w"]))
            queue.append(work)
            assert len(queue) <= 2, f"{order.device_id} has more than two assignments"
            if all(other.is_stuck for other in queue[:-1]):
                self.begin(order.device_id, work)
            if order.deadline_s is not None:
                self.after(order.deadline_s, lambda name=order.device_id, work=work: self.expire(name, work))

    def expire(self, name, work):
        return [] if work.is_gone else [self.lose(name, work, UpdateStatus.LOST)]

    def begin(self, name, work):
        work.is_stuck = not self.boards[name].answers
        if not work.is_stuck:
            self.after(self.boards[name].exchange_s / 2, lambda: self.iterate(name, work))

    def iterate(self, name, work):
        if not work.is_gone:
            spent_s = self.boards[name].seconds_per_iteration
            self.after(spent_s, lambda: self.step(name, work, spent_s))
        return []

    def step(self, name, work, spent_s):
        if work.is_gone:
            return []
        work.done, work.compute_s = work.done + 1, work.compute_s + spent_s
        plan = work.order.plan
        if work.is_recalled or work.done >= (plan.iterations or 1):
            self.after(self.boards[name].exchange_s / 2, lambda: self.answer(name, work))
            return []
        if plan.fallback_iterations is None:
            self.iterate(name, work)
        else:  # it stands still until the strategy has answered
            self.after(0.0, lambda: self.go_on(name, work))
        if not plan.report_progress:
            return []
        self.progress[name] = Progress(
            device_id=name, assignment_id=work.order.assignment_id, iteration=work.done,
            seconds_per_iteration=work.compute_s / work.done, age_s=0.0,
        )  # fmt: skip
        return [self.progress[name]]

    def go_on(self, name, work):
        if not work.is_recalled:
            return self.iterate(name, work)
        self.after(self.boards[name].exchange_s / 2, lambda: self.answer(name, work))
        return []

    def answer(self, name, work):
        if work.is_gone:
            return []
        work.is_gone = True
        self.queues[name].remove(work)
        if self.queues[name]:
            self.begin(name, self.queues[name][0])
        update = self.update(name, work)
        self.arrived.append((self.now_s, update))
        return [update]

    def update(self, name, work):
        board, order = self.boards[name], work.order
        target = board.target if order.block is None else float(order.block)
        moved = trained(work.start, target, order.plan.learning_rate, work.done) - work.start
        return Update(
            assignment_id=order.assignment_id,
            device_id=name,
            base_version=order.base_version,
            tensors={"w": encode_part(moved, order.codec or "")},
            metrics=UpdateMetrics(
                num_examples=board.num_examples, iterations=work.done,
                compute_s=work.compute_s, send_s=board.exchange_s,
            ),
            received_s=self.now_s,
        )  # fmt: skip

    def wait(self, until_s):
        self.turns += 1
        assert self.turns < 20_000, "the run does not end"
        events = []
        while not events and self.heap and self.heap[0][0] <= until_s:
            self.now_s = max(self.now_s, self.heap[0][0])
            events = heapq.heappop(self.heap)[2]()
        self.now_s = self.now_s if events else max(self.now_s, until_s)
        return events

    def assignments(self):
        return [order for _, order in self.given if isinstance(order, TrainInstruction)]

    def recalls(self):
        return [(at, order.device_id) for at, order in self.given if isinstance(order, FinishEarlyInstruction)]


def encode_part(moved, codec):
    """What the codec of a part makes of an update in float32; the update itself where the codec is another."""
    if not codec.startswith("slice:"):
        return moved
    shapes = (TensorSpec(name="w", shape=moved.shape),)
    body = make_codec(codec, shapes).encode({"w": moved.astype(np.float32)}, np.random.default_rng(0))
    return decode_body(body, shapes)["w"]


def trained(w, target, learning_rate, iterations):
    """What `iterations` steps of gradient descent make of `w`."""
    w = np.array(w)
    for _ in range(iterations):
        w = w - np.asarray(learning_rate, w.dtype) * (w - np.asarray(target, w.dtype))
    return w


def run(fleet, strategy, *, gate=None, goal=None, start=0.0, rounds=3, size=2):
    """Drives a strategy and returns the last state."""
    state, _ = run_rounds(
        strategy,
        strategy.init({"w": np.full(size, start)}),
        fleet=fleet,
        journal=fleet.journal,
        goal=goal or StoppingCriteria(rounds=rounds),
        evaluate=lambda *_: (),
        policy=gate,
    )
    return state
