"""When boards go and come back: what their profiles and fault scripts say, and failures at random."""

from __future__ import annotations

import math
from collections.abc import Callable

from numpy.random import Generator

from edgefl.simulation.agenda import Agenda
from edgefl.simulation.boards import Board
from edgefl.types import derived_rng


class Presence:
    """Takes boards away and brings them back.

    Args:
        agenda: virtual time.
        detect_s: how long a board is gone before the coordinator notices.
        on_gone: called when a board dies.
        on_noticed: called when the coordinator knows, unless the board is back by then.
        on_back: called when it is running again.
    """

    def __init__(
        self,
        agenda: Agenda,
        *,
        detect_s: float,
        on_gone: Callable[[Board], None],
        on_noticed: Callable[[Board], None],
        on_back: Callable[[Board], None],
    ) -> None:
        self._agenda, self._detect_s = agenda, detect_s
        self._on_gone, self._on_noticed, self._on_back = on_gone, on_noticed, on_back
        self._rngs: dict[str, Generator] = {}

    def follow(self, board: Board) -> None:
        """Begins with a board; one that is away from the start is marked as such."""
        begin_s, end_s = self._next_absence(board)
        if begin_s > 0:
            self._plan(board, begin_s, end_s)
            return
        board.is_up = board.is_present = False
        if math.isfinite(end_s):
            self._agenda.at(end_s, self._come, board)

    def _plan(self, board: Board, begin_s: float, end_s: float) -> None:
        if math.isfinite(begin_s):
            self._agenda.at(begin_s, self._go, (board, end_s))

    def _go(self, subject: tuple[Board, float]) -> None:
        board, end_s = subject
        board.is_up = False
        board.life += 1
        self._on_gone(board)
        self._agenda.at(self._agenda.now_s + self._detect_s, self._notice, (board, board.life))
        if math.isfinite(end_s):
            self._agenda.at(end_s, self._come, board)

    def _notice(self, subject: tuple[Board, int]) -> None:
        board, life = subject
        if board.life == life and not board.is_up and board.is_present:
            board.is_present = False
            self._on_noticed(board)

    def _come(self, board: Board) -> None:
        board.is_up = board.is_present = True
        self._on_back(board)
        self._plan(board, *self._next_absence(board))

    def _next_absence(self, board: Board) -> tuple[float, float]:
        now_s = self._agenda.now_s
        planned = next((absence for absence in board.profile.offline if absence[1] > now_s), (math.inf, math.inf))
        return min((max(planned[0], now_s), planned[1]), self._random_absence(board))

    def _random_absence(self, board: Board) -> tuple[float, float]:
        profile = board.profile
        if profile.mtbf_s is None or profile.mttr_s is None:
            return math.inf, math.inf
        # A stream of its own: the same boards fail at the same times whatever they are asked to do.
        if board.device_id not in self._rngs:
            self._rngs[board.device_id] = derived_rng(board.seed, "absence", board.device_id)
        rng = self._rngs[board.device_id]
        begin_s = self._agenda.now_s + float(rng.exponential(profile.mtbf_s))
        return begin_s, begin_s + float(rng.exponential(profile.mttr_s))
