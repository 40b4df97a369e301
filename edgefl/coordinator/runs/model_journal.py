"""A journal that also shows the evaluated models of a run to their keeper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from edgefl.coordinator.runs.kept_models import ModelKeeper
from edgefl.node_scores import mean_accuracy
from edgefl.tally import Scoreboard
from edgefl.types import Decision, Evaluated, Evaluation, Event, Journal, Lost, Tensors


class ModelJournal:
    """Implements `Journal` over another one.

    Args:
        journal: what really keeps the run.
        keeper: is given the global model of every version that somebody evaluates, and its accuracy.
        model_of: a strategy's state -> its model.
        last_record: of the journal.
    """

    def __init__(
        self,
        journal: Journal,
        keeper: ModelKeeper,
        model_of: Callable[[Any], Tensors],
        last_record: Callable[[], int],
    ) -> None:
        self._journal, self._keeper = journal, keeper
        self._model_of, self._last_record = model_of, last_record
        self._version, self._state = -1, None
        self._asked: dict[str, int] = {}
        self._results: dict[int, list[Evaluated]] = {}

    def go_on(self, scores: Scoreboard) -> None:
        """Takes up which evaluations are out, and what has come of them."""
        self._asked = dict(scores.outstanding)
        self._results = {version: list(results) for version, results in scores.results.items()}

    def received(self, events: Sequence[Event]) -> Sequence[Event]:
        kept = self._journal.received(events)
        for event in events:
            if isinstance(event, Evaluated | Lost):
                self._note(event)
        return kept

    def decided(self, decision: Decision) -> None:
        self._journal.decided(decision)
        asked = [order for order in decision.orders if isinstance(order, Evaluation) and not order.subject]
        taken = {order.version for order in asked} - {*self._asked.values(), *self._results}
        self._asked |= {order.assignment_id: order.version for order in asked}
        for version in taken & {self._version}:
            number = next(order.round for order in asked if order.version == version)
            # The state is that of the newest version until the loop folds something into it, which comes after this.
            self._keeper.take(version, number, self._last_record(), self._model_of(self._state))

    def aggregated(self, version: int, assignment_ids: Sequence[str], state: object) -> None:
        self._version, self._state = version, state  # type: ignore[assignment] # whatever the strategy has made
        self._journal.aggregated(version, assignment_ids, state)

    def commit(self) -> None:
        self._journal.commit()

    def _note(self, event: Evaluated | Lost) -> None:
        version = self._asked.pop(event.assignment_id, None)
        if version is None:
            return
        if isinstance(event, Evaluated):
            self._results.setdefault(version, []).append(event)
        if version not in self._asked.values():
            self._keeper.score(version, mean_accuracy(self._results.pop(version, [])))
