"""The virtual fleet: an event heap in virtual time in place of boards and networks.

Who is there, who evaluates, and what the loop is told; `journeys` takes assignments there and back. All times follow
from profiles and seeds; what is learnt is real. Every event costs O(log n), however many boards there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edgefl.errors import RunFailedError
from edgefl.simulation.agenda import Agenda
from edgefl.simulation.boards import Board
from edgefl.simulation.downlink import Downlink
from edgefl.simulation.journeys import Journeys, lost
from edgefl.simulation.network import Network
from edgefl.simulation.presence import Presence
from edgefl.simulation.training import FailedJobError, Sent, Training
from edgefl.simulation.view import VirtualView
from edgefl.types import (
    Assignment,
    DeviceInfo,
    Evaluated,
    Evaluation,
    Event,
    Joined,
    Lost,
    ModelSource,
    Order,
    Outcome,
    Recall,
    Role,
    Update,
)

QUIET_WAITS = 10_000
"""After so many waits in which nothing happened, and nothing can happen any more, the run fails."""
LOST_IN_A_ROW = 1000
"""After so many assignments lost in a row, and 20 for each board, the run fails: nobody can do the work in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What holds for all boards.

    Attributes:
        up_bytes_per_s, down_bytes_per_s: of the coordinator's link, as the boards see it; None for no limit.
        detect_s: how long it takes to notice that a board is gone.
        evaluation_s: how long an evaluation takes; it keeps no board from work.
        join_at_start: boards that were not there when the first work was given out stay out.
    """

    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    detect_s: float = 15.0
    evaluation_s: float = 0.0
    join_at_start: bool = False


class VirtualFleet:
    """Implements `Fleet` in virtual time.

    Args:
        boards: in the order in which they are shown.
        training: what the boards learn.
        downlink: how models travel.
        world: what holds for all of them.
        evaluators: who evaluates besides the boards: on the coordinator's own data, without traffic.
    """

    def __init__(
        self,
        boards: Sequence[Board],
        *,
        training: Training,
        downlink: Downlink,
        world: World | None = None,
        evaluators: Sequence[DeviceInfo] = (),
    ) -> None:
        self._training, self._downlink, self._world = training, downlink, world or World()
        self._agenda, self._events = Agenda(), list[Event]()
        self._view = VirtualView(self._agenda, boards, evaluators)
        self._journeys = Journeys(
            agenda=self._agenda,
            network=Network(
                self._agenda,
                up_bytes_per_s=self._world.up_bytes_per_s,
                down_bytes_per_s=self._world.down_bytes_per_s,
            ),
            training=training,
            view=self._view,
            emit=self._emit,
        )
        self._quiet = self._num_lost = 0
        presence = Presence(
            self._agenda,
            detect_s=self._world.detect_s,
            on_gone=self._journeys.break_off,
            on_noticed=self._forget,
            on_back=self._welcome,
        )
        for board in boards:
            presence.follow(board)
            if board.is_present:
                self._view.enter(board)

    @property
    def now_s(self) -> float:
        return self._agenda.now_s

    def view(self) -> VirtualView:
        return self._view

    def dispatch(self, orders: Sequence[Order], source: ModelSource) -> None:
        """Gives out work now; what cannot be given comes back as `Lost`."""
        for order in orders:
            match order:
                case Assignment():
                    self._assign(order, source)
                case Evaluation():
                    at_s = self.now_s + self._world.evaluation_s
                    self._agenda.at(at_s, self._evaluate, (order, self._downlink.of(order.subject, source)))
                case Recall():
                    self._journeys.recall(order.assignment_id)

    def wait(self, until_s: float) -> Sequence[Event]:
        """Returns everything that happens in the next instant in which something does, up to `until_s`.

        Raises:
            RunFailedError: nobody works and nobody will ever come back, or nobody is ever back in time.
        """
        while not self._events and self._agenda.advance(until_s):
            pass
        events, self._events = self._events, []
        if not events and math.isfinite(until_s):
            self._agenda.now_s = max(self.now_s, until_s)
        self._quiet = 0 if events or not self._agenda.is_empty else self._quiet + 1
        if self._quiet > QUIET_WAITS:
            num_trainers = sum(info.role == Role.TRAINER for info in self._view.devices.values())
            raise RunFailedError(
                f"nothing happens any more at {self.now_s:.0f} virtual seconds: {num_trainers} of "
                f"{len(self._view.boards)} devices are there, none of them is given work, and nobody will come back: "
                "look at [devices] min_memory_bytes, accelerator and unwell, and at whom the strategy itself asks"
            )
        return events

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        if isinstance(event, Update):
            self._num_lost = 0
        elif isinstance(event, Lost) and event.outcome == Outcome.LOST:
            self._num_lost += 1
            if self._num_lost > max(LOST_IN_A_ROW, 20 * len(self._view.boards)):
                raise RunFailedError(
                    f"no device is ever back in time: {self._num_lost} assignments in a row were lost, the last at "
                    f"{self.now_s:.3g} virtual seconds; {event.device_id}: {event.reason}"
                )

    def _assign(self, order: Assignment, source: ModelSource) -> None:
        if self._world.join_at_start:
            self._view.close_doors()
        board = self._view.boards.get(order.device_id)
        if board is None or order.device_id not in self._view.devices:
            self._agenda.at(self.now_s, self._refuse, order)
            return
        if order.plan.node is None and not order.plan.inbox:
            num_bytes = self._downlink.num_bytes(board, source)
        else:
            num_bytes = self._downlink.num_bytes_for_node(order, source)
        self._journeys.give(order, board, self._downlink.newest(source), num_bytes)

    def _refuse(self, order: Assignment | Evaluation) -> None:
        self._emit(lost(order, Outcome.FAILED, f"{order.device_id} is not there"))

    def _evaluate(self, given: tuple[Evaluation, Sent]) -> None:
        order, sent = given
        info = self._view.devices.get(order.device_id)
        if info is None:
            self._refuse(order)
            return
        is_board = info.role == Role.TRAINER
        try:
            scores = self._training.evaluate(order.device_id if is_board else None, sent)
        except FailedJobError as error:
            self._emit(lost(order, Outcome.FAILED, str(error)))
            return
        self._emit(
            Evaluated(
                assignment_id=order.assignment_id,
                device_id=order.device_id,
                version=order.version,
                round=order.round,
                source=info.source,
                num_examples=scores.num_examples,
                loss=scores.loss,
                accuracy=scores.accuracy,
                bytes_down=len(sent.body) if is_board else 0,
                subject=order.subject,
            )
        )

    def _forget(self, board: Board) -> None:
        self._journeys.lose_all(board, "device gone: it fell silent")
        self._view.leave(board)

    def _welcome(self, board: Board) -> None:
        # Back before anybody noticed: what it had in memory is gone all the same.
        self._journeys.lose_all(board, "its agent restarted")
        if self._view.enter(board):
            self._emit(Joined(device_id=board.device_id))
