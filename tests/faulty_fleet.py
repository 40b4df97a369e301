"""A fleet with a clock of its own whose boards are slow, die, come back, fail, diverge, answer twice and too late.

It also holds a strategy to its side of the bargain: `dispatch` looks at every order.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from types import SimpleNamespace

import numpy as np

from edgefl.core.protocol import EVALUATOR_NAME
from edgefl.core.types import (
    DeviceAvailable,
    DeviceInfo,
    EvaluateInstruction,
    EvaluateResult,
    FinishEarlyInstruction,
    InstructionFailed,
    LazyTensors,
    PeerMessage,
    Progress,
    Role,
    SparseTensor,
    TrainInstruction,
    Update,
    UpdateMetrics,
    UpdateStatus,
    derive_rng,
)

FAULTS = {"b": "slow", "c": "dies", "d": "returns", "e": "fails", "f": "twice", "g": "late"}
NAMES = ("a", *FAULTS, "h")
TASK = "digits"
FAILS_EVERY = 3


def first_model(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "weight": rng.standard_normal((4, 3)).astype(np.float32),
        "half": rng.standard_normal(5).astype(np.float16),
        "double": rng.standard_normal(2),
        "scale": np.array(rng.standard_normal(), np.float32),
        "mean": rng.standard_normal(3).astype(np.float32),
        "steps": np.array(7, np.int64),
    }


def displacement(seed, order, *, is_sparse=True):
    """What decoding an update gives: read-only, some of it sparse; a pure function of who began with what."""
    who = order.device_id if order.block is None else f"block {order.block}"
    rng = derive_rng(seed, order.base_version, who)
    weight = (0.1 * rng.standard_normal((4, 3))).astype(np.float32)
    kept = np.sort(rng.permutation(12)[:4])
    tensors = {
        "weight": SparseTensor(indices=kept, values=weight.reshape(-1)[kept], shape=(4, 3)) if is_sparse else weight,
        "half": (0.1 * rng.standard_normal(5)).astype(np.float16),
        "double": SparseTensor(indices=np.array([1]), values=0.1 * rng.standard_normal(1), shape=(2,)),
        "scale": np.array(0.1 * rng.standard_normal(), np.float32),
        "mean": (0.1 * rng.standard_normal(3)).astype(np.float32),
        "steps": np.array(rng.integers(1, 9), np.int64),
    }
    for tensor in tensors.values():
        (tensor.values if isinstance(tensor, SparseTensor) else tensor).flags.writeable = False
    return LazyTensors(lambda: tensors)


def told(seed, order):
    """What a node of a graph sends: its model when it is to report, and something along each edge that fires."""
    node = order.plan.node
    messages = tuple(
        PeerMessage(edge=(order.device_id, other), step=int(order.assignment_id[1:].split("-")[0]), body=b"y")
        for other in node.fires
    )
    return (displacement(seed, order, is_sparse=False) if node.reports else {}), messages


class Journal:
    """Notes what the loop says, and that no update is used twice or before it is here."""

    def __init__(self):
        self.arrived, self.used, self.versions = set(), [], [0]

    def record_events(self, events):
        self.arrived |= {event.assignment_id for event in events if isinstance(event, Update)}
        return events

    def record_decision(self, decision):
        pass

    def record_aggregation(self, version, assignment_ids, state):
        assert version == self.versions[-1] + 1
        assert assignment_ids, "a version that nobody moved"
        assert set(assignment_ids) <= self.arrived
        assert not set(assignment_ids) & set(self.used), "used twice"
        self.versions.append(version)
        self.used += assignment_ids

    def commit(self):
        pass


class FaultyFleet:
    """Implements `Fleet`; `deadline_s` of an assignment is kept, and an answer after it is given all the same."""

    def __init__(self, seed=0, *, faults=FAULTS, names=NAMES, max_turns=6000):
        self.seed, self.faults, self.max_turns = seed, faults, max_turns
        self.now_s, self.turns, self.given, self.heap = 0.0, 0, [], []
        self.out, self.count, self.order = {}, Counter(), itertools.count()
        self.journal, self.progress = Journal(), {}
        self.info = {
            name: DeviceInfo(device_id=name, tasks=(TASK,), examples={TASK: 10 * (i + 1)}, blocks={TASK: (i, i + 1)})
            for i, name in enumerate(names)
        }
        # The coordinator's own evaluator is always there, and trains for those strategies that ask it to.
        self.info[EVALUATOR_NAME] = DeviceInfo(
            device_id=EVALUATOR_NAME, role=Role.EVALUATOR, tasks=(TASK,), examples={TASK: 100}, source="coordinator"
        )
        self.present = {*names, EVALUATOR_NAME}
        for name, fault in faults.items():
            if fault in {"dies", "returns"}:
                self.at(2.5, lambda name=name: self.leave(name))
            if fault == "returns":
                self.at(6.0, lambda name=name: self.join(name))

    def at(self, time_s, action):
        heapq.heappush(self.heap, (time_s, next(self.order), action))

    def leave(self, name):
        self.present.discard(name)
        return [self.lose(key, UpdateStatus.LOST) for key, order in list(self.out.items()) if order.device_id == name]

    def join(self, name):
        self.present.add(name)
        return [DeviceAvailable(device_id=name)]

    def lose(self, key, outcome):
        order = self.out.pop(key)
        return InstructionFailed(device_id=order.device_id, assignment_id=key, outcome=outcome, reason=str(outcome))

    def view(self):
        busy = {}
        for key, order in self.out.items():
            if isinstance(order, TrainInstruction):
                busy.setdefault(order.device_id, []).append(key)
        present = [name for name in self.info if name in self.present]
        return SimpleNamespace(
            now_s=self.now_s,
            devices={name: self.info[name] for name in present},
            idle=[name for name in present if name not in busy and name != EVALUATOR_NAME],
            busy=busy,
            speeds={},
            progress=self.progress,
            health={},
        )

    def dispatch(self, orders, source):
        for order in orders:
            if isinstance(order, FinishEarlyInstruction):
                self.recall(order)
                continue
            assert order.device_id in self.present, "work for somebody who is not there"
            if isinstance(order, TrainInstruction):
                self.check(order, source)
                self.given.append(order)
                self.begin(order)
            self.out[order.assignment_id] = order
            if isinstance(order, EvaluateInstruction):
                self.at(self.now_s + 0.1, lambda order=order: self.evaluated(order))

    def check(self, order, source):
        outstanding = [
            o for o in self.out.values() if isinstance(o, TrainInstruction) and o.device_id == order.device_id
        ]
        assert len(outstanding) < 2, f"{order.device_id} has two assignments already"
        assert order.base_version == source.version
        assert order.assignment_id not in {other.assignment_id for other in self.given}, "an id given twice"
        assert set(order.used_assignments) <= set(self.journal.arrived)

    def begin(self, order):
        pace_s = 0.2 * (
            8 if self.faults.get(order.device_id) == "slow" else 1 + list(self.info).index(order.device_id) / 20
        )
        iterations = 3 if order.plan.iterations is None else order.plan.iterations
        if order.plan.report_progress:
            self.at(self.now_s + pace_s, lambda: self.step(order, 1, iterations, pace_s))
        else:
            self.at(self.now_s + iterations * pace_s + 0.05, lambda: self.answer(order, iterations, pace_s))
        if order.deadline_s is not None:
            self.at(self.now_s + order.deadline_s, lambda: self.expire(order))

    def step(self, order, done, iterations, pace_s):
        if order.assignment_id not in self.out:
            return []
        if done == iterations or order.assignment_id in self.count:
            return self.answer(order, done, pace_s)
        self.at(self.now_s + pace_s, lambda: self.step(order, done + 1, iterations, pace_s))
        self.progress[order.device_id] = Progress(
            device_id=order.device_id, assignment_id=order.assignment_id, iteration=done,
            seconds_per_iteration=pace_s, age_s=0.0,
        )  # fmt: skip
        return [self.progress[order.device_id]]

    def recall(self, recall):
        order = self.out.get(recall.assignment_id)
        if order is None or self.count[recall.assignment_id]:
            return
        self.count[recall.assignment_id] += 1
        if not order.plan.report_progress:
            self.at(self.now_s + 0.05, lambda: self.answer(order, 1, 0.2))

    def expire(self, order):
        return [self.lose(order.assignment_id, UpdateStatus.LOST)] if order.assignment_id in self.out else []

    def answer(self, order, iterations, pace_s):
        key, fault = order.assignment_id, self.faults.get(order.device_id)
        if key not in self.out:
            return [self.update(order, iterations, pace_s)] if fault == "late" else []
        self.count[order.device_id] += 1
        if fault == "fails" and self.count[order.device_id] % FAILS_EVERY:
            return [self.lose(key, UpdateStatus.FAILED)]
        if fault == "late" and self.count[order.device_id] % 2:
            self.at(self.now_s + 1.0, lambda: self.answer(order, iterations, pace_s))
            return [self.lose(key, UpdateStatus.LOST)]
        del self.out[key]
        return [self.update(order, iterations, pace_s)] * (2 if fault == "twice" else 1)

    def update(self, order, iterations, pace_s):
        place = list(self.info).index(order.device_id) if order.block is None else order.block
        tensors, messages = (
            (displacement(self.seed, order), ()) if order.plan.node is None else told(self.seed, order)
        )
        fault = self.faults.get(order.device_id)
        if fault in {"long", "opposed"} and tensors:
            factor = 50 if fault == "long" else -1
            tensors = {
                name: tensor.dense() if isinstance(tensor, SparseTensor) else tensor
                for name, tensor in tensors.items()
            }
            tensors = {name: (factor * tensor).astype(tensor.dtype) for name, tensor in tensors.items()}
        if fault == "diverges":
            tensors = {**tensors, "mean": np.full(3, np.nan, np.float32)}
        return Update(
            assignment_id=order.assignment_id,
            device_id=order.device_id,
            base_version=order.base_version,
            tensors=tensors,
            messages=messages,
            metrics=UpdateMetrics(
                num_examples=10 * (place + 1), iterations=iterations, compute_s=iterations * pace_s, send_s=0.05
            ),
            received_s=self.now_s,
        )

    def evaluated(self, order):
        if self.out.pop(order.assignment_id, None) is None:
            return []
        return [
            EvaluateResult(
                assignment_id=order.assignment_id, device_id=order.device_id, version=order.version,
                round=order.round, source="device", num_examples=10, loss=1.0, accuracy=0.5,
            )
        ]  # fmt: skip

    def wait(self, until_s):
        self.turns += 1
        assert self.turns < self.max_turns, "the run does not end"
        events = []
        while not events and self.heap and self.heap[0][0] <= until_s:
            self.now_s = max(self.now_s, self.heap[0][0])
            while self.heap and self.heap[0][0] <= self.now_s:  # all that happens at once comes in one batch
                events += heapq.heappop(self.heap)[2]()
        self.now_s = self.now_s if events else until_s
        return events
