"""The history as files: complete, by device, and nothing of anybody else's is overwritten."""

import csv
import json

import pytest

from edgefl.core.errors import DataError, StoreError, UsageError
from edgefl.core.protocol import Heartbeat
from edgefl.core.types import UpdateStatus
from edgefl.history import export as export_module
from edgefl.history.export import DEVICE_FILE_COLUMNS, export_history
from edgefl.storage.queries.columns import COLUMNS
from edgefl.storage.queries.history import read_history, read_history_pages
from edgefl.storage.repositories.records import HeartbeatRow, UpdateRow
from edgefl.storage.store import Store


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "edgefl.db") as opened, opened.batch():
        for number, run_id in enumerate(("run-1", "run-2"), start=1):
            facts = {"name": "n", "task": "digits", "strategy": "fedavg", "config": {}, "seed": 7}
            opened.add_run(run_id=run_id, submitted_at=float(number), **facts)
            for round_number in range(1, 4):
                at = 1000.0 * number + round_number
                opened.open_round(run_id, round_number, started_at=at)
                rows = [
                    UpdateRow(
                        assignment_id=f"{round_number}-{device}", device_id=device, round=round_number,
                        base_version=0, outcome=UpdateStatus.USED, applied_version=0, staleness=0,
                        bytes_up=10 * number, compute_s=0.5, received_at=at, metrics={"norm": 1.5},
                    )
                    for device in ("pi-1", "pi-2")
                ]  # fmt: skip
                opened.record_updates(run_id, rows)
                opened.close_round(run_id, round_number, version=1, closed_at=at + 0.5)
            opened.record_event("run-finished", 'said "done"', at=1010.0 * number, run_id=run_id)
            beat = HeartbeatRow(
                device_id="pi-1",
                at=1000.0 * number,
                heartbeat=Heartbeat(seq=1, session_no=1, uptime_s=1.0, run=run_id),
            )
            opened.record_heartbeats([beat])
    with Store.open(tmp_path / "edgefl.db") as opened:
        yield opened


@pytest.fixture
def pages(store):
    return lambda kind, filters: read_history_pages(store, kind, **filters)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_device_of_a_run_has_a_file_with_a_row_per_assignment(store, pages, out, monkeypatch):
    assert export_history(pages, out) == ["run-1", "run-2"]
    for run_id in ("run-1", "run-2"):
        devices = out / run_id / "devices"
        assert sorted(path.name for path in devices.iterdir()) == ["pi-1.csv", "pi-2.csv"]
        for device in ("pi-1", "pi-2"):
            rows = read(devices / f"{device}.csv")
            assert tuple(rows[0]) == DEVICE_FILE_COLUMNS
            kept = read_history(store, "updates", run=run_id, device=device)
            assert [(row["round"], float(row["compute_s"]), json.loads(row["metrics"])) for row in rows] == [
                (str(row["round"]), row["compute_s"], row["metrics"]) for row in kept
            ]
    monkeypatch.setattr(export_module, "MAX_BUFFERED_ROWS", 2)
    single = lambda kind, filters: ([row] for page in pages(kind, filters) for row in page)  # noqa: E731
    export_history(single, out, run="run-1", replace=True)
    assert [row["round"] for row in read(out / "run-1/devices/pi-2.csv")] == ["1", "2", "3"], "of many pages"


def test_a_run_has_its_sums_rounds_events_and_heartbeats_and_the_fleet_those_of_all(pages, out):
    export_history(pages, out)
    summary = json.loads((out / "run-2/summary.json").read_text())
    assert (summary["v"], summary["run_id"], summary["bytes_up"], summary["num_used"]) == (1, "run-2", 120, 6)
    assert [(row["device_id"], row["bytes_up"]) for row in summary["devices"]] == [("pi-1", 60), ("pi-2", 60)]
    assert [row["round"] for row in read(out / "run-1/rounds.csv")] == ["1", "2", "3"]
    assert [row["bytes_up"] for row in read(out / "run-1/accuracy.csv")] == ["20", "40", "60"]
    assert [row["message"] for row in read(out / "run-1/events.csv")] == ['said "done"']
    sizes = {name: len(read(out / name)) for name in ("run-2/heartbeats.csv", "heartbeats.csv", "events.csv")}
    assert sizes == {"run-2/heartbeats.csv": 1, "heartbeats.csv": 2, "events.csv": 2}


def test_parquet_has_the_same_rows_and_the_updates_of_a_run_in_one_file(store, pages, out):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install '.[tables]'")
    export_history(pages, out, suffix=".parquet")
    assert sorted(path.name for path in (out / "run-1").iterdir()) == [
        "accuracy.parquet", "evaluations.parquet", "events.parquet", "heartbeats.parquet", "rounds.parquet",
        "summary.json", "updates.parquet",
    ]  # fmt: skip
    for kind in ("rounds", "updates", "events"):
        kept = read_history(store, kind, run="run-2")
        written = parquet.read_table(out / f"run-2/{kind}.parquet").to_pylist()
        assert tuple(written[0]) == COLUMNS[kind]
        objects = {"facts", "metrics", "data"}
        for row in written:
            row.update({name: json.loads(row[name]) for name in objects & row.keys() if row[name] is not None})
        assert written == [{name: row[name] for name in COLUMNS[kind]} for row in kept]


def test_an_earlier_export_is_replaced_only_when_told_to_and_by_a_whole_one(pages, out):
    def broken(kind, filters):
        if kind == "evaluations":
            raise StoreError("gone")
        return pages(kind, filters)

    export_history(pages, out)
    with pytest.raises(UsageError, match="holds an export already; --force replaces it"):
        export_history(pages, out, run="run-1")
    with pytest.raises(StoreError, match="gone"):
        export_history(broken, out, replace=True)
    assert (out / "run-2/summary.json").is_file()
    export_history(pages, out, run="run-1", replace=True)
    assert sorted(path.name for path in out.iterdir()) == ["export.json", "run-1"]
    assert not out.with_name("out.partial").exists()


@pytest.mark.parametrize("replace", [False, True])
def test_a_folder_of_somebody_else_stays_as_it_is(pages, out, replace):
    out.mkdir()
    (out / "letter.txt").write_text("dear aunt")
    with pytest.raises(UsageError, match="is no export of the history; name a new folder"):
        export_history(pages, out, replace=replace)
    assert (out / "letter.txt").read_text() == "dear aunt"


def test_a_folder_that_cannot_be_written_and_a_name_that_would_be_a_path_are_refused(store, pages, out):
    out.write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        export_history(pages, out / "deeper")
    out.unlink()
    row = UpdateRow(assignment_id="x", device_id="../../evil", round=1, base_version=0, received_at=1.0)
    store.record_updates("run-1", [row])
    with pytest.raises(DataError, match="is no name of a run or device"):
        export_history(pages, out)
    assert not out.exists()
