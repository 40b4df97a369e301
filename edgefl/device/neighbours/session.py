"""A node that goes on by itself: trains, exchanges with its neighbours, and reports when it is asked to.

The coordinator starts it and says now and then who its neighbours are and how far it may go; between that, and while
the coordinator is away, nobody is asked. Everything the node does happens in one thread of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator

from edgefl.decentralised.engine import Engine
from edgefl.decentralised.firing import Schedule, make_firing
from edgefl.errors import EdgeflError, NetworkError, TaskError
from edgefl.types import Array, EdgeMessage, LocalPlan, NodePlan

log = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""In step, a neighbour's message is waited for so long; then its last one stands in."""
IDLE_S = 0.5
SENT_WITHIN_S, SENT_STEP_S = 2.0, 0.002
"""A link that takes longer for a message gets newer ones in its place."""

TrainBurst = Callable[[Engine, LocalPlan, Callable[[], bool]], tuple[int, float]]
"""(node, plan with so many iterations, whether to leave) -> (iterations done, mean loss); none when it is to leave.

May raise whatever ends the session."""

KEPT_STATES, KEPT_ANSWERS = 3, 16
"""So many messages of a neighbour wait for a node that is in the middle of its iterations, the newest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a node tells: its model, its local iterations in all and since the last report, and what it sent since."""

    model: dict[str, Array]
    total: int
    iterations: int
    loss: float | None
    compute_s: float
    num_messages: int
    num_bytes: int
    dropped: int


class NodeSession:
    """Runs from `start` to `stop`.

    Args:
        engine: the node, which has begun.
        plan: what to do; `follow` brings the next one.
        rng: decides when edges fire at random.
        train: makes local steps and tells the node.
        send: hands a message to whoever carries it; returns at once.
        is_clear: says whether what was handed over has left: a node that is faster than its link waits for that.
        save: called after every exchange.
        clock: seconds, monotone.
    """

    def __init__(  # noqa: PLR0913 what a node needs, all by name but the first two
        self,
        engine: Engine,
        plan: LocalPlan,
        *,
        rng: Generator,
        train: TrainBurst,
        send: Callable[[EdgeMessage], None],
        is_clear: Callable[[], bool],
        save: Callable[[Engine], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._plan, self._rng = engine, plan, rng
        self._train, self._send, self._is_clear, self._save, self._clock = train, send, is_clear, save, clock
        self._mail: dict[tuple[str, bool], deque[EdgeMessage]] = {}
        self._has_mail = threading.Condition()
        self._changed = threading.Condition()
        self._wanted: int | None = None
        self._report: Report | None = None
        self._error: Exception | None = None
        self._is_stopping = False
        self._told = engine.node.iterations
        self._loss = self._compute_s = 0.0
        self._num_messages = self._num_bytes = 0
        self._thread = threading.Thread(target=self._run, name="node", daemon=True)

    @property
    def iterations(self) -> int:
        return self._engine.node.iterations

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends after the iterations under way."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def follow(self, plan: LocalPlan) -> None:
        """Goes on with another plan of the same node from the next exchange on."""
        with self._changed:
            self._plan = plan
            self._changed.notify_all()

    def deliver(self, message: EdgeMessage) -> None:
        """Takes a neighbour's message, from any thread; too many that wait push the oldest out."""
        kept = KEPT_ANSWERS if message.is_reply else KEPT_STATES
        with self._has_mail:
            self._mail.setdefault((message.edge[0], message.is_reply), deque(maxlen=kept)).append(message)
            self._has_mail.notify_all()

    def report(self, after: int, is_recalled: Callable[[], bool]) -> Report:
        """Returns what the node tells once it has done so many local iterations, or has been recalled.

        Raises:
            EdgeflError: the node had to give up; it says why.
        """
        with self._changed:
            self._wanted, self._report = after, None
            while (report := self._taken()) is None:
                if is_recalled():
                    self._wanted = 0
                self._changed.wait(0.1)
            return report

    def _taken(self) -> Report | None:
        if isinstance(self._error, EdgeflError):
            raise self._error
        if self._error is not None:
            raise TaskError(f"the node gave up: {type(self._error).__name__}: {self._error}") from self._error
        if self._is_stopping and self._report is None:
            raise NetworkError("the node was stopped")
        return self._report

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                plan = self._plan
                assert plan.node is not None
                self._engine.follow(plan.node.edges)
                if plan.node.limit and self.iterations >= plan.node.limit:
                    self._rest()
                else:
                    self._exchange(plan, plan.node)
                self._tell()
        except Exception as error:  # the boundary of the thread: whoever waits for a report learns why there is none
            ours = isinstance(error, EdgeflError)
            log.warning("the node gave up: %s", error, exc_info=not ours)
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _rest(self) -> None:
        """Does nothing but answer: neighbours that are behind still need what this node has last sent."""
        with self._changed:
            self._changed.wait(IDLE_S)
        self._take()
        self._engine.settle()

    def _exchange(self, plan: LocalPlan, node: NodePlan) -> None:
        self._take()
        iterations, fires = 0, self._engine.node.neighbours
        if self._engine.trains_next():
            firing = make_firing(node.schedule, edges=node.edges, period=node.period, rng=self._rng)
            burst = firing.next(self.iterations, fires)
            iterations, fires = burst.iterations, burst.neighbours
        if iterations:
            began_s = self._clock()
            done, loss = self._train(self._engine, replace(plan, iterations=iterations), lambda: self._is_stopping)
            self._compute_s += self._clock() - began_s
            self._loss += done * loss
            if self._is_stopping:
                return
        self._post(self._engine.post(fires))
        self._wait_until_sent()
        if node.schedule == Schedule.SYNC:
            self._wait_for_neighbours()
        self._engine.settle()
        self._save(self._engine)

    def _wait_until_sent(self) -> None:
        until_s = self._clock() + SENT_WITHIN_S
        while not (self._is_clear() or self._is_stopping) and self._clock() < until_s:
            self._take(wait_s=SENT_STEP_S)

    def _wait_for_neighbours(self) -> None:
        until_s = self._clock() + PATIENCE_S
        while not (self._engine.is_settled() or self._is_stopping) and (left_s := until_s - self._clock()) > 0:
            self._take(wait_s=min(left_s, IDLE_S))

    def _take(self, wait_s: float = 0.0) -> None:
        """Takes the mail that is here, and waits for some if there is none."""
        with self._has_mail:
            if not self._mail and wait_s:
                self._has_mail.wait(wait_s)
            waiting, self._mail = self._mail, {}
        self._post(self._engine.take([message for messages in waiting.values() for message in messages]))

    def _post(self, messages: tuple[EdgeMessage, ...]) -> None:
        for message in messages:
            self._num_messages += 1
            self._num_bytes += len(message.body)
            self._send(message)

    def _tell(self) -> None:
        """Gives whoever waits what the node has now, if that is far enough."""
        with self._changed:
            node = self._plan.node
            is_at_limit = node is not None and 0 < node.limit <= self.iterations
            if self._wanted is None or (self.iterations < self._wanted and not is_at_limit):
                return
            done = self.iterations - self._told
            self._report = Report(
                model={name: np.array(array) for name, array in self._engine.model().items()},
                total=self.iterations,
                iterations=done,
                loss=self._loss / done if done else None,
                compute_s=self._compute_s,
                num_messages=self._num_messages,
                num_bytes=self._num_bytes,
                dropped=self._engine.num_dropped,
            )
            self._wanted, self._told = None, self.iterations
            self._loss = self._compute_s = 0.0
            self._num_messages = self._num_bytes = 0
            self._changed.notify_all()
