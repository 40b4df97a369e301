"""Assignments on their way: down, computed, up; and what can come between."""

from __future__ import annotations

from collections.abc import Callable

from edgefl.simulation.agenda import Agenda
from edgefl.simulation.boards import REPORT_EVERY_S, Board, Work
from edgefl.simulation.network import Network
from edgefl.simulation.training import FailedJobError, Job, Sent, Trained, Training
from edgefl.simulation.view import VirtualView
from edgefl.types import (
    Assignment,
    Evaluation,
    Event,
    Lost,
    Outcome,
    Progress,
    Update,
    UpdateMetrics,
)


def lost(order: Assignment | Evaluation, outcome: Outcome, reason: str) -> Lost:
    return Lost(device_id=order.device_id, assignment_id=order.assignment_id, outcome=outcome, reason=reason)


class Journeys:
    """Takes assignments to their boards and brings updates back.

    Args:
        agenda: virtual time.
        network: how bytes travel.
        training: what comes of computing.
        view: told who has what to do.
        emit: told of updates, losses and progress.
    """

    def __init__(
        self,
        *,
        agenda: Agenda,
        network: Network,
        training: Training,
        view: VirtualView,
        emit: Callable[[Event], None],
    ) -> None:
        self._agenda, self._network, self._training = agenda, network, training
        self._view, self._emit = view, emit
        self._works: dict[str, Work] = {}

    def give(self, order: Assignment, board: Board, sent: Sent, num_bytes: int) -> None:
        """Sends an assignment and a model, which takes so many bytes, to a board."""
        now_s = self._agenda.now_s
        work = Work(
            order=order,
            board=board,
            life=board.life,
            job=Job(order=order, sent=sent),
            given_s=now_s,
            sent_bytes=num_bytes,
        )
        self._works[order.assignment_id] = work
        self._view.occupy(board, order.assignment_id)
        if order.deadline_s is not None:
            self._agenda.at(now_s + order.deadline_s, self._overdue, work)
        if not board.is_up:
            return  # nobody knows yet that it is gone; this is noticed with the rest
        board.plan_work(work)
        is_next = len(board.outstanding) == 1 and board.current is None
        if is_next and work.limit is not None and not work.is_open_ended and order.plan.node is None:
            # Whoever trains can begin while others still download: the result is wanted in any case. Only a board's
            # newest work can be undone, so what it still computes in vain is cancelled first.
            work.job.iterations = work.limit
            self._begin(work)
        self._network.send_down(board, num_bytes, self._downloaded, work)

    def recall(self, assignment_id: str) -> None:
        """Asks a board to finish an assignment now; nothing happens when it has."""
        work = self._works.get(assignment_id)
        if work is not None and not work.is_recalled:
            self._agenda.at(self._agenda.now_s + work.board.latency_s(self._agenda.now_s), self._recalled, work)

    def break_off(self, board: Board) -> None:
        """A board has died: what it held is gone, though nobody knows yet."""
        held = [*board.queue, *([board.current] if board.current else [])]
        for work in [*held, *(self._works[assignment_id] for assignment_id in board.outstanding)]:
            self._cancel(work)
        board.queue.clear()
        board.current = None
        board.down_free_s = board.up_free_s = 0.0
        board.held_version = None

    def lose_all(self, board: Board, reason: str) -> None:
        """Gives up all that a board was asked."""
        for assignment_id in list(board.outstanding):
            self._lose(self._works[assignment_id], Outcome.LOST, reason)

    def _downloaded(self, work: Work) -> None:
        if work.is_void or work.is_settled:
            return
        work.received_s = self._agenda.now_s
        work.board.queue.append(work)
        self._compute(work.board)

    def _compute(self, board: Board) -> None:
        """Begins with what has waited longest, if the board has nothing else to do."""
        while board.queue and board.current is None:
            work = board.queue.popleft()
            if work.is_settled:
                continue
            board.begin(work, self._agenda.now_s)
            self._agenda.at(work.due_s, self._computed, (work, work.due_s))
            if work.is_open_ended:
                self._report_after(work, 0)
            elif work.order.plan.node is None:  # what a node does cannot be undone, so it is done when it is due
                self._begin(work)

    def _begin(self, work: Work) -> None:
        if not work.job.has_begun:
            work.job.has_begun = True
            self._training.begin(work.job)

    def _cancel(self, work: Work) -> None:
        if work.job.has_begun and work.trained is None:
            work.job.has_begun = False
            self._training.cancel(work.job)

    def _computed(self, subject: tuple[Work, float]) -> None:
        work, due_s = subject
        board = work.board
        if work.is_void or work.due_s != due_s or board.current is not work:
            return  # it was recalled meanwhile, or its board died
        board.current = None
        if work.is_settled:
            self._cancel(work)
        else:
            self._send(work)
        self._compute(board)

    def _send(self, work: Work) -> None:
        self._begin(work)
        try:
            work.trained = self._training.finish(work.job)
        except FailedJobError as error:
            self._lose(work, Outcome.FAILED, str(error))
            return
        work.finished_s = self._agenda.now_s
        self._network.send_up(work.board, work.trained.num_bytes, self._uploaded, work)

    def _uploaded(self, work: Work) -> None:
        if work.is_void or work.is_settled or work.trained is None:
            return
        self._settle(work)
        now_s, trained = self._agenda.now_s, work.trained
        metrics = self._metrics(work, trained, now_s)
        work.board.note_speed(
            iteration_s=metrics.compute_s / metrics.iterations if metrics.iterations else None,
            up=metrics.bytes_up / max(1e-9, now_s - work.finished_s),
            down=metrics.bytes_down / max(1e-9, work.received_s - work.given_s),
        )
        update = Update(
            assignment_id=work.order.assignment_id,
            device_id=work.order.device_id,
            base_version=work.order.base_version,
            tensors=trained.tensors,
            metrics=metrics,
            received_s=now_s,
            outbox=trained.outbox,
        )
        self._emit(update)

    @staticmethod
    def _metrics(work: Work, trained: Trained, now_s: float) -> UpdateMetrics:
        compute_s = work.due_s - work.started_s
        return UpdateMetrics(
            iterations=work.job.iterations,
            num_examples=trained.num_examples,
            loss=trained.loss,
            compute_s=compute_s,
            send_s=max(0.0, now_s - work.given_s - compute_s),
            bytes_up=trained.num_bytes,
            bytes_down=work.sent_bytes,
            **work.board.felt(work.started_s, work.due_s),
        )

    def _recalled(self, work: Work) -> None:
        if work.is_recalled or work.is_void or work.is_settled or work.trained is not None:
            return
        self._shorten(work)
        if work.board.current is work:
            self._begin(work)

    def _shorten(self, work: Work) -> None:
        """Ends an assignment after its present iteration; one that has not begun takes a single one."""
        is_running = work.board.current is work
        work.is_recalled = True
        iterations = work.done(self._agenda.now_s) + 1 if is_running else 1
        if work.limit is not None and iterations > work.limit:
            return
        if work.job.iterations and iterations >= work.job.iterations:
            return
        self._cancel(work)
        work.job.iterations = iterations
        if is_running:
            # Not before now: an iteration that ends in this very instant may by rounding lie behind us.
            work.due_s = max(self._agenda.now_s, work.end_s(iterations))
            self._agenda.at(work.due_s, self._computed, (work, work.due_s))

    def _overdue(self, work: Work) -> None:
        if work.is_settled:
            return
        if not work.is_void and work.trained is None:
            self._shorten(work)
        self._lose(work, Outcome.LOST, f"not back within {work.order.deadline_s or 0:g} s")

    def _report_after(self, work: Work, iteration: int) -> None:
        """Reports when the first iteration is done, and then no more often than a board does."""
        following = max(iteration, work.done(work.reported_s + REPORT_EVERY_S) if iteration else 0) + 1
        if following <= work.job.iterations:
            self._agenda.at(work.end_s(following), self._reported, (work, following))

    def _reported(self, subject: tuple[Work, int]) -> None:
        work, iteration = subject
        if work.is_void or work.is_settled or work.board.current is not work:
            return
        work.reported_s = self._agenda.now_s
        report = Progress(
            device_id=work.order.device_id,
            assignment_id=work.order.assignment_id,
            iteration=iteration,
            seconds_per_iteration=(self._agenda.now_s - work.started_s) / iteration,
            age_s=0.0,
        )
        self._agenda.at(self._agenda.now_s + work.board.latency_s(self._agenda.now_s), self._heard, (work, report))
        self._report_after(work, iteration)

    def _heard(self, subject: tuple[Work, Progress]) -> None:
        work, report = subject
        if not work.is_settled:
            self._view.reports[report.device_id] = report
            self._emit(report)

    def _lose(self, work: Work, outcome: Outcome, reason: str) -> None:
        if work.board.current is not work:
            self._cancel(work)
        work.board.held_version = None  # as live: nobody knows now which model it holds
        self._settle(work)
        self._emit(lost(work.order, outcome, reason))

    def _settle(self, work: Work) -> None:
        work.is_settled = True
        del self._works[work.order.assignment_id]
        self._view.release(work.board, work.order.assignment_id)
