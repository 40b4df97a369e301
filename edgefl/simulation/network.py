"""Bytes on their way between boards and coordinator: a board's own link, the coordinator's, and latency."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgefl.simulation.agenda import Agenda
from edgefl.simulation.boards import Board
from edgefl.simulation.links import SharedLink

Crossing = tuple[Callable[[Any], None], Any, float, float]
"""What is called, with whom, not before this second, and the latency that follows the last byte."""


class Network:
    """Carries models down and updates up; a board's transfers in one direction follow each other.

    Args:
        agenda: virtual time.
        up_bytes_per_s: what the coordinator's link takes in, shared by all boards; None for no limit.
        down_bytes_per_s: what it gives out.
    """

    def __init__(self, agenda: Agenda, *, up_bytes_per_s: float | None, down_bytes_per_s: float | None) -> None:
        self._agenda = agenda
        self._up = None if up_bytes_per_s is None else SharedLink[Crossing](up_bytes_per_s)
        self._down = None if down_bytes_per_s is None else SharedLink[Crossing](down_bytes_per_s)

    def send_down(self, board: Board, num_bytes: int, act: Callable[[Any], None], subject: Any) -> None:
        """Calls `act` with the subject when the board has got it all."""
        board.down_free_s = self._own_end_s(board, board.down_free_s, num_bytes, board.profile.down_bytes_per_s)
        self._carry(self._down, num_bytes, (act, subject, board.down_free_s, board.latency_s(self._agenda.now_s)))

    def send_up(self, board: Board, num_bytes: int, act: Callable[[Any], None], subject: Any) -> None:
        """Calls `act` with the subject when the coordinator has got it all."""
        board.up_free_s = self._own_end_s(board, board.up_free_s, num_bytes, board.profile.up_bytes_per_s)
        self._carry(self._up, num_bytes, (act, subject, board.up_free_s, board.latency_s(self._agenda.now_s)))

    def _own_end_s(self, board: Board, free_s: float, num_bytes: int, bytes_per_s: float) -> float:
        return board.sent_s(max(self._agenda.now_s, free_s), num_bytes / bytes_per_s)

    def _carry(self, link: SharedLink[Crossing] | None, num_bytes: int, crossing: Crossing) -> None:
        if link is None:
            act, subject, end_s, latency_s = crossing
            self._agenda.at(end_s + latency_s, act, subject)
            return
        link.begin(self._agenda.now_s, num_bytes, crossing)
        self._watch(link)

    def _watch(self, link: SharedLink[Crossing]) -> None:
        end_s = link.next_end_s()
        if end_s is not None:
            self._agenda.at(max(end_s, self._agenda.now_s), self._ended, (link, end_s))

    def _ended(self, subject: tuple[SharedLink[Crossing], float]) -> None:
        link, expected_s = subject
        if link.next_end_s() != expected_s:
            return  # a transfer began or ended meanwhile: this was the next end as it looked before
        now_s = self._agenda.now_s
        for act, whose, own_end_s, latency_s in link.end(now_s):
            self._agenda.at(max(now_s, own_end_s) + latency_s, act, whose)
        self._watch(link)
