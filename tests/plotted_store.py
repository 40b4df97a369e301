"""Runs whose every number is known, written by the recording functions of the store, for what is drawn from them.

Imported by tests of several rooms: pytest's importlib mode lets them take nothing from their neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

from edgefl.core.types import Json, UpdateStatus
from edgefl.history.series import RunInfo
from edgefl.storage.queries.columns import HistoryFilters
from edgefl.storage.queries.history import find_run_id, read_history
from edgefl.storage.repositories.records import AssignmentRow, EvaluationRow, RunStatus, UpdateRow
from edgefl.storage.store import Store

PACES_S = {"pi-1": 1.0, "pi-2": 3.0}
"""Seconds that the devices of `add_synchronous` compute in a round."""
SEND_S = 0.4
ROUND_S = 5.0
BETWEEN_S = 1.0
BYTES_UP, BYTES_DOWN = 100, 300
ITERATIONS = 20
BEGIN = 1000.0


class StoreReader:
    """The history reader of an open store; all runs have one batch size."""

    def __init__(self, store: Store, batch_size: int | None = None) -> None:
        self._store, self._batch_size = store, batch_size

    def find_run(self, text: str) -> RunInfo:
        run = self._store.get_run(find_run_id(self._store, text))
        return RunInfo(run_id=run.run_id, name=run.name, strategy=run.strategy, batch_size=self._batch_size)

    def read_rows(self, kind: str, **filters: Unpack[HistoryFilters]) -> list[Json]:
        return read_history(self._store, kind, **filters)


def add_run(store: Store, name: str, *, strategy: str = "fedavg", run_id: str = "") -> str:
    """A run without rounds; its id is its name, unless it is given."""
    made = run_id or name
    store.add_run(
        run_id=made, name=name, task="digits", strategy=strategy, config={}, seed=7,
        submitted_at=BEGIN + len(store.list_runs()),
    )  # fmt: skip
    store.set_run_status(made, RunStatus.FINISHED, at=BEGIN)
    return made


def add_synchronous(
    store: Store,
    name: str,
    *,
    rounds: int = 3,
    accuracies: Mapping[int, float] | None = None,
    paces_s: Mapping[str, float] | None = None,
    run_id: str = "",
) -> str:
    """Rounds of `ROUND_S`, `BETWEEN_S` apart; accuracy is a tenth of the round's number unless said otherwise."""
    made = add_run(store, name, run_id=run_id)
    known = {number: number / 10 for number in range(1, rounds + 1)} if accuracies is None else accuracies
    for number in range(1, rounds + 1):
        at = BEGIN + (number - 1) * (ROUND_S + BETWEEN_S)
        add_round(store, made, number, at, PACES_S if paces_s is None else paces_s)
        if number in known:
            evaluate(store, made, number, known[number], at=at + ROUND_S)
    return made


def add_round(store: Store, run_id: str, number: int, at: float, paces_s: Mapping[str, float]) -> None:
    store.open_round(run_id, number, started_at=at)
    ids = {device: f"{number}-{device}" for device in paces_s}
    store.record_assignments(
        run_id,
        [AssignmentRow(assignment_id=ids[name], device_id=name, round=number, base_version=number - 1,
                       dispatched_at=at)
         for name in paces_s],
    )  # fmt: skip
    store.record_updates(
        run_id,
        [
            UpdateRow(
                assignment_id=ids[name], device_id=name, round=number, base_version=number - 1,
                iterations=ITERATIONS, num_examples=10, bytes_up=BYTES_UP, bytes_down=BYTES_DOWN, compute_s=pace_s,
                send_s=SEND_S, wait_s=ROUND_S - pace_s - SEND_S, loss=1.0 / number, received_at=at + pace_s + SEND_S,
            )
            for name, pace_s in paces_s.items()
        ],
    )  # fmt: skip
    store.mark_applied(run_id, list(ids.values()), applied_version=number - 1)
    store.close_round(run_id, number, version=number, closed_at=at + ROUND_S)


def add_lost(store: Store, run_id: str, number: int, device: str, *, at: float) -> None:
    """An assignment that brought nothing."""
    made = f"{number}-{device}-lost"
    row = AssignmentRow(assignment_id=made, device_id=device, round=number, base_version=0, dispatched_at=at)
    store.record_assignments(run_id, [row])
    lost = UpdateRow(assignment_id=made, device_id=device, round=number, base_version=0, outcome=UpdateStatus.LOST)
    store.record_updates(run_id, [lost])


def add_late(store: Store, run_id: str, number: int, device: str, *, at: float) -> None:
    """An update that came too late to be applied."""
    made = f"{number}-{device}-late"
    row = AssignmentRow(assignment_id=made, device_id=device, round=number, base_version=0, dispatched_at=at)
    store.record_assignments(run_id, [row])
    late = UpdateRow(
        assignment_id=made, device_id=device, round=number, base_version=0, outcome=UpdateStatus.LATE,
        iterations=ITERATIONS, compute_s=1.0, send_s=0.1, received_at=at + 1.1,
    )  # fmt: skip
    store.record_updates(run_id, [late])


def evaluate(store: Store, run_id: str, number: int, accuracy: float, *, at: float = BEGIN) -> None:
    row = EvaluationRow(
        assignment_id=f"e{number}", round=number, version=number, device_id="c", source="coordinator",
        loss=2.0 - accuracy, accuracy=accuracy, num_examples=100, at=at,
    )  # fmt: skip
    store.record_evaluations(run_id, [row])


def add_nodes(store: Store, run_id: str, disagreements: Sequence[float]) -> None:
    """Models of the devices' own: a hundredth less accurate than the average, the worst a tenth."""
    for number, value in enumerate(disagreements, 1):
        store.set_round_metrics(
            run_id,
            number,
            {
                "node_accuracy": number / 10 - 0.01,
                "worst_node_accuracy": number / 10 - 0.1,
                "facts": {"disagreement": value},
            },
        )


def add_asynchronous(store: Store, name: str, staleness: Sequence[int]) -> str:
    """One update a second, each a round of its own, as stale as said; it went out in the round of its base."""
    made = add_run(store, name, strategy="asgd")
    for place, stale in enumerate(staleness):
        number, base = place + 1, place - stale
        assert base >= 0
        at = BEGIN + place
        store.open_round(made, number, started_at=at)
        sent = AssignmentRow(
            assignment_id=f"a{place}", device_id=f"pi-{stale}", round=base + 1, base_version=base,
            dispatched_at=BEGIN + base,
        )  # fmt: skip
        store.record_assignments(made, [sent])
        update = UpdateRow(
            assignment_id=f"a{place}", device_id=f"pi-{stale}", round=base + 1, base_version=base, iterations=1,
            num_examples=10, bytes_up=BYTES_UP, bytes_down=BYTES_DOWN, compute_s=0.5, send_s=0.1, wait_s=0.0,
            received_at=at + 0.9,
        )  # fmt: skip
        store.record_updates(made, [update])
        store.mark_applied(made, [f"a{place}"], applied_version=place, round_number=number)
        store.close_round(made, number, version=number, closed_at=at + 1.0)
    return made


def head(run_id: str, batch_size: int | None = None) -> RunInfo:
    return RunInfo(run_id=run_id, name=run_id, strategy="fedavg", batch_size=batch_size)
