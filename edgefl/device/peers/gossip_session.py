"""Gossip session: an autonomous node that trains, exchanges with neighbours, and reports on request.

The coordinator starts it and occasionally updates its neighbours and iteration limit; in between, and while the
coordinator is unreachable, it is independent. The node runs in one thread of its own.
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

from edgefl.core.errors import EdgeflError, NetworkError, TaskError
from edgefl.core.types import Array, GossipConfig, PeerMessage, TrainConfig
from edgefl.strategies.peer_algorithms.gossip_node import GossipNode
from edgefl.strategies.peer_algorithms.topology import EdgeScheduleKind, make_edge_schedule

log = logging.getLogger(__name__)

PEER_MESSAGE_TIMEOUT_S = 5.0
"""How long a node in step waits for a neighbour's message before it uses the last one, or in pairs for a reply."""
IDLE_POLL_S = 0.5
SEND_TIMEOUT_S, SEND_POLL_S = 2.0, 0.002
"""A link that takes longer for a message gets newer ones instead."""

TrainLocally = Callable[[GossipNode, TrainConfig, Callable[[], bool]], tuple[int, float]]
"""(node, plan with so many iterations, whether to leave) -> (iterations done, mean loss); none when it is to leave.

May raise whatever ends the session."""

MAX_PENDING_STATES, MAX_PENDING_REPLIES = 3, 16
"""Maximum queued messages of a neighbour, the newest ones, while a node is in its iterations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipReport:
    """Report of a node: model, local iterations in total and since the last report, and traffic since."""

    model: dict[str, Array]
    total_iterations: int
    iterations: int
    loss: float | None
    compute_s: float
    num_messages: int
    num_bytes: int
    num_dropped: int


class GossipSession:
    """Gossip session, running from `start` to `stop`.

    Args:
        node: a started node.
        plan: of the training; replaced by `update_config`.
        rng: for random edge schedules.
        train: makes local steps and applies them to the node.
        send: passes a message to the transport; returns at once.
        is_drained: returns whether all messages have been sent: a node that is faster than its link waits for that.
        save: called after every exchange.
        clock: seconds, monotone.
    """

    def __init__(  # noqa: PLR0913 all by name but the first two
        self,
        node: GossipNode,
        plan: TrainConfig,
        *,
        rng: Generator,
        train: TrainLocally,
        send: Callable[[PeerMessage], None],
        is_drained: Callable[[], bool],
        save: Callable[[GossipNode], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node, self._plan, self._rng = node, plan, rng
        self._train, self._send, self._is_drained, self._save, self._clock = train, send, is_drained, save, clock
        self._received: dict[tuple[str, bool], deque[PeerMessage]] = {}
        self._received_changed = threading.Condition()
        self._state_changed = threading.Condition()
        self._report_after: int | None = None
        self._report: GossipReport | None = None
        self._error: Exception | None = None
        self._is_stopping = False
        self._reported_iterations = node.algorithm.iterations
        self._loss_sum = self._compute_s = 0.0
        self._num_messages = self._num_bytes = 0
        self._thread = threading.Thread(target=self._run, name="node", daemon=True)

    @property
    def iterations(self) -> int:
        return self._node.algorithm.iterations

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stops after the current iterations."""
        with self._state_changed:
            self._is_stopping = True
            self._state_changed.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def update_config(self, plan: TrainConfig) -> None:
        """Replaces the plan of the node from the next exchange on."""
        with self._state_changed:
            self._plan = plan
            self._state_changed.notify_all()

    def receive(self, message: PeerMessage) -> None:
        """Queues a neighbour's message, from any thread; a full queue drops the oldest."""
        max_queued = MAX_PENDING_REPLIES if message.is_reply else MAX_PENDING_STATES
        with self._received_changed:
            self._received.setdefault((message.edge[0], message.is_reply), deque(maxlen=max_queued)).append(message)
            self._received_changed.notify_all()

    def wait_for_report(self, min_iterations: int, should_finish_early: Callable[[], bool]) -> GossipReport:
        """Returns the node's report after `min_iterations`, or early when `should_finish_early`.

        Raises:
            EdgeflError: the node failed.
        """
        with self._state_changed:
            self._report_after, self._report = min_iterations, None
            while (report := self._get_report()) is None:
                if should_finish_early():
                    self._report_after = 0
                self._state_changed.wait(0.1)
            return report

    def _get_report(self) -> GossipReport | None:
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
                self._node.update_links(plan.node.edges)
                if plan.node.limit and self.iterations >= plan.node.limit:
                    self._idle()
                else:
                    self._exchange(plan, plan.node)
                self._publish_report()
        except Exception as error:  # the boundary of the thread: `wait_for_report` raises the error
            is_known = isinstance(error, EdgeflError)
            log.warning("the node gave up: %s", error, exc_info=not is_known)
            with self._state_changed:
                self._error = error
                self._state_changed.notify_all()

    def _idle(self) -> None:
        """Only processes messages: slower neighbours still need this node's last ones."""
        with self._state_changed:
            self._state_changed.wait(IDLE_POLL_S)
        self._process_received()
        self._node.finish_exchange()

    def _exchange(self, plan: TrainConfig, gossip: GossipConfig) -> None:
        self._process_received()
        iterations, neighbours = 0, self._node.algorithm.neighbours
        if self._node.should_train_next():
            schedule = make_edge_schedule(gossip.schedule, edges=gossip.edges, period=gossip.period, rng=self._rng)
            iterations, neighbours = schedule(self.iterations, neighbours)
        self._train_iterations(plan, iterations, is_pairwise=gossip.schedule == EdgeScheduleKind.PAIR)
        if self._is_stopping:
            return
        self._send_messages(self._node.start_exchange(neighbours))
        self._wait_until_sent()
        if gossip.schedule in {EdgeScheduleKind.SYNC, EdgeScheduleKind.PAIR}:
            self._wait_for_peers()
        self._node.finish_exchange()
        self._save(self._node)

    def _train_iterations(self, plan: TrainConfig, iterations: int, *, is_pairwise: bool) -> None:
        """Makes the local iterations; in pairs messages are processed, and replied to, between any two of them."""
        while iterations > 0 and not self._is_stopping:
            started_s = self._clock()
            num_done, loss = self._train(
                self._node,
                replace(plan, iterations=iterations),
                lambda: self._is_stopping or (is_pairwise and bool(self._received)),
            )
            self._compute_s += self._clock() - started_s
            self._loss_sum += num_done * loss
            iterations -= num_done
            if is_pairwise:
                self._process_received()

    def _wait_until_sent(self) -> None:
        until_s = self._clock() + SEND_TIMEOUT_S
        while not (self._is_drained() or self._is_stopping) and self._clock() < until_s:
            self._process_received(wait_s=SEND_POLL_S)

    def _wait_for_peers(self) -> None:
        until_s = self._clock() + PEER_MESSAGE_TIMEOUT_S
        while (
            not (self._node.can_finish_exchange() or self._is_stopping)
            and (remaining_s := until_s - self._clock()) > 0
        ):
            self._process_received(wait_s=min(remaining_s, IDLE_POLL_S))

    def _process_received(self, wait_s: float = 0.0) -> None:
        """Processes queued messages, waiting up to `wait_s` if there are none."""
        with self._received_changed:
            if not self._received and wait_s:
                self._received_changed.wait(wait_s)
            queues, self._received = self._received, {}
        self._send_messages(self._node.receive([message for messages in queues.values() for message in messages]))

    def _send_messages(self, messages: tuple[PeerMessage, ...]) -> None:
        for message in messages:
            self._num_messages += 1
            self._num_bytes += len(message.body)
            self._send(message)

    def _publish_report(self) -> None:
        """Publishes a requested report once the node has reached the iterations."""
        with self._state_changed:
            node = self._plan.node
            is_at_limit = node is not None and 0 < node.limit <= self.iterations
            if self._report_after is None or (self.iterations < self._report_after and not is_at_limit):
                return
            num_iterations = self.iterations - self._reported_iterations
            self._report = GossipReport(
                model={name: np.array(array) for name, array in self._node.model().items()},
                total_iterations=self.iterations,
                iterations=num_iterations,
                loss=self._loss_sum / num_iterations if num_iterations else None,
                compute_s=self._compute_s,
                num_messages=self._num_messages,
                num_bytes=self._num_bytes,
                num_dropped=self._node.num_dropped,
            )
            self._report_after, self._reported_iterations = None, self.iterations
            self._loss_sum = self._compute_s = 0.0
            self._num_messages = self._num_bytes = 0
            self._state_changed.notify_all()
