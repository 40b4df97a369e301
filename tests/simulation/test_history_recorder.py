"""The history of a simulated run: rows in virtual time, ids that follow from what is run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgefl.core.config import RunConfig, parse_run
from edgefl.core.errors import RunFailedError
from edgefl.core.types import Decision, DeviceInfo, Json, TrainConfig, TrainInstruction, Update, UpdateMetrics
from edgefl.engine.progress import RoundCounter
from edgefl.simulation.history_recorder import BETWEEN_RUNS_S, FLUSH_EVERY_TURNS, SIMULATION_EPOCH, SimulationHistory
from edgefl.storage.queries.history import read_history
from edgefl.storage.store import Store
from edgefl.strategies.participation import RunParticipationPolicy

DEVICES = [
    DeviceInfo(
        device_id=f"device-{number:02}", groups=("shed",), examples={"digits": 9}, capabilities={"model": "Pi"}
    )
    for number in (1, 2)
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "edgefl.db") as opened:
        yield opened


def config(seed: int = 7, workers: int = 0) -> RunConfig:
    return parse_run({"run": {"task": "digits", "seed": seed}, "simulation": {"workers": workers}})


def played(store: Store, book_config: RunConfig, told: list[Json] | None = None) -> SimulationHistory:
    """A run of one round with one update, which lasts ten virtual seconds."""
    now = [0.0]
    on_change = None if told is None else told.append
    book = SimulationHistory(store, book_config, DEVICES, clock=lambda: now[0], on_change=on_change)
    log = book.create_log(RoundCounter(), RunParticipationPolicy())
    order = TrainInstruction(assignment_id="a", device_id="device-01", base_version=0, plan=TrainConfig(iterations=1))
    log.record_decision(Decision(instructions=(order,)))
    now[0] = 10.0
    update = Update(
        assignment_id="a", device_id="device-01", base_version=0, tensors={}, received_s=10.0,
        metrics=UpdateMetrics(iterations=1, bytes_up=5),
    )  # fmt: skip
    assert log.record_events([update]) == [update]
    log.record_aggregation(1, ["a"], object())
    return book


def test_rows_are_in_virtual_time(store: Store, tmp_path: Path) -> None:
    told: list[Json] = []
    book = played(store, config(), told)
    book.finish("enough", tmp_path / "models", {"w": np.zeros(2, np.float32)}, 1, 1)
    (row,) = read_history(store, "rounds", run=book.run_id)
    assert (row["started_at"], row["closed_at"], row["bytes_up"]) == (SIMULATION_EPOCH, SIMULATION_EPOCH + 10, 5)
    record = store.get_run(book.run_id)
    assert (record.status, record.reason, record.finished_at) == ("finished", "enough", SIMULATION_EPOCH + 10)
    (kept,) = store.list_saved_models(book.run_id)
    assert (tmp_path / "models" / f"{kept.sha256}.safetensors").exists()
    assert [(one["status"], one["rounds"]) for one in told] == [("running", 1), ("finished", 1)]


def test_boards_are_devices_that_never_joined(store: Store) -> None:
    played(store, config()).finish("enough", Path(), None, 1, 1)
    devices = store.list_devices()
    assert [(d.device_id, d.presence, d.groups, d.examples) for d in devices] == [
        (name, "simulated", ("shed",), {"digits": 9}) for name in ("device-01", "device-02")
    ]
    assert store.get_all_capabilities()["device-01"].facts == {"model": "Pi"}


def test_the_same_run_has_the_same_id_and_comes_later_in_the_same_store(store: Store) -> None:
    books = []
    for _ in range(3):
        books.append(played(store, config()))
        books[-1].finish("enough", Path(), None, 1, 1)
    first = books[0].run_id
    assert [book.run_id for book in books] == [first, f"{first}-2", f"{first}-3"]
    assert store.get_run(books[1].run_id).submitted_at == SIMULATION_EPOCH + 10 + BETWEEN_RUNS_S


def test_an_id_follows_from_what_is_run_and_not_from_who_trains(tmp_path: Path) -> None:
    ids = []
    for number, each in enumerate((config(), config(workers=2), config(seed=8))):
        with Store.open(tmp_path / f"{number}.db") as store:
            ids.append(played(store, each).run_id)
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (RunFailedError("all were gone"), "failed", "all were gone"),
        (MemoryError(), "failed", "MemoryError"),
        (KeyboardInterrupt(), "interrupted", "Ctrl-C"),
    ],
)
def test_a_run_that_failed_keeps_its_rows_and_says_why(
    store: Store, error: BaseException, status: str, reason: str
) -> None:
    book = played(store, config())
    book.fail(error)
    assert len(read_history(store, "updates", run=book.run_id)) == 1
    record = store.get_run(book.run_id)
    assert (record.status, record.reason) == (status, reason)


def test_rows_are_written_while_the_run_goes_on(store: Store) -> None:
    book = played(store, config())
    log = book.create_log(RoundCounter(), RunParticipationPolicy())
    for _ in range(FLUSH_EVERY_TURNS - 1):
        log.commit()
    assert read_history(store, "updates", run=book.run_id) == []
    log.commit()
    assert len(read_history(store, "updates", run=book.run_id)) == 1
