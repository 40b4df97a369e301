"""The history as files: complete, by device, and nothing of anybody else's is overwritten."""

import csv
import json

import pytest

from edgefl.errors import DataError, StoreError, UsageError
from edgefl.history import export as export_module
from edgefl.history.export import OF_DEVICE, export_history
from edgefl.storage.queries import history, history_pages
from edgefl.storage.records import HeartbeatRow, UpdateRow
from edgefl.storage.store import Store
from edgefl.types import Outcome


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "edgefl.db") as opened:
        for number, run_id in enumerate(("run-1", "run-2"), start=1):
            opened.add_run(
                run_id=run_id, name="n", task="digits", strategy="fedavg", config={}, seed=7,
                submitted_at=float(number),
            )  # fmt: skip
            for round_number in range(1, 4):
                opened.open_round(run_id, round_number, started_at=1000.0 * number + round_number)
                rows = [
                    UpdateRow(
                        assignment_id=f"{round_number}-{device}", device_id=device, round=round_number,
                        base_version=0, outcome=Outcome.USED, applied_version=0, staleness=0, bytes_up=10 * number,
                        compute_s=0.5, received_at=1000.0 * number + round_number, metrics={"norm": 1.5},
                    )
                    for device in ("pi-1", "pi-2")
                ]  # fmt: skip
                opened.record_updates(run_id, rows)
                opened.close_round(run_id, round_number, version=1, closed_at=1000.0 * number + round_number + 0.5)
            opened.record_event("run-finished", 'said "done"', at=1010.0 * number, run_id=run_id)
            opened.record_heartbeats(
                [HeartbeatRow(device_id="pi-1", at=1000.0 * number, seq=1, session_no=1, uptime_s=1.0, run=run_id)]
            )
        yield opened


@pytest.fixture
def pages(store):
    return lambda kind, filters: history_pages(store, kind, **filters)


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_device_of_a_run_has_a_file_with_a_row_per_assignment(store, pages, tmp_path):
    assert export_history(pages, tmp_path / "out") == ["run-1", "run-2"]
    for run_id in ("run-1", "run-2"):
        devices = tmp_path / "out" / run_id / "devices"
        assert sorted(path.name for path in devices.iterdir()) == ["pi-1.csv", "pi-2.csv"]
        for device in ("pi-1", "pi-2"):
            rows = read(devices / f"{device}.csv")
            assert tuple(rows[0]) == OF_DEVICE
            kept = history(store, "updates", run=run_id, device=device)
            assert [(row["round"], float(row["compute_s"]), json.loads(row["metrics"])) for row in rows] == [
                (str(row["round"]), row["compute_s"], row["metrics"]) for row in kept
            ]


def test_a_run_has_a_summary_with_its_devices_sums(pages, tmp_path):
    export_history(pages, tmp_path / "out", run="run-2")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["export.json", "run-2"]
    summary = json.loads((tmp_path / "out/run-2/summary.json").read_text())
    assert (summary["v"], summary["run_id"], summary["bytes_up"], summary["num_used"]) == (1, "run-2", 120, 6)
    assert [(row["device_id"], row["bytes_up"]) for row in summary["devices"]] == [("pi-1", 60), ("pi-2", 60)]


def test_rounds_events_and_heartbeats_are_files_of_the_run_and_of_the_fleet(pages, tmp_path):
    export_history(pages, tmp_path / "out")
    assert [row["round"] for row in read(tmp_path / "out/run-1/rounds.csv")] == ["1", "2", "3"]
    assert [row["bytes_up"] for row in read(tmp_path / "out/run-1/accuracy.csv")] == ["20", "40", "60"]
    assert [row["message"] for row in read(tmp_path / "out/run-1/events.csv")] == ['said "done"']
    assert len(read(tmp_path / "out/run-2/heartbeats.csv")) == 1
    assert len(read(tmp_path / "out/heartbeats.csv")) == 2
    assert len(read(tmp_path / "out/events.csv")) == 2


def test_many_pages_become_one_file(store, monkeypatch, tmp_path):
    monkeypatch.setattr(export_module, "BUFFERED_ROWS", 2)
    pages = lambda kind, filters: ([row] for page in history_pages(store, kind, **filters) for row in page)  # noqa: E731
    export_history(pages, tmp_path / "out", run="run-1")
    assert [row["round"] for row in read(tmp_path / "out/run-1/devices/pi-2.csv")] == ["1", "2", "3"]


def test_an_earlier_export_is_replaced_only_when_told_to(pages, tmp_path):
    out = tmp_path / "out"
    export_history(pages, out)
    with pytest.raises(UsageError, match="holds an export already; --force replaces it"):
        export_history(pages, out, run="run-1")
    assert (out / "run-2").is_dir()
    export_history(pages, out, run="run-1", replace=True)
    assert not (out / "run-2").exists()
    assert not out.with_name("out.partial").exists()


@pytest.mark.parametrize("replace", [False, True])
def test_a_folder_of_somebody_else_stays_as_it_is(pages, tmp_path, replace):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("dear aunt")
    with pytest.raises(UsageError, match="is no export of the history; name a new folder"):
        export_history(pages, tmp_path / "mine", replace=replace)
    assert (tmp_path / "mine/letter.txt").read_text() == "dear aunt"


def test_what_fails_half_way_leaves_nothing_and_keeps_what_was_there(pages, tmp_path):
    out = tmp_path / "out"
    export_history(pages, out)

    def broken(kind, filters):
        if kind == "evaluations":
            raise StoreError("gone")
        return pages(kind, filters)

    with pytest.raises(StoreError, match="gone"):
        export_history(broken, out, replace=True)
    assert (out / "run-2/summary.json").is_file()
    assert not out.with_name("out.partial").exists()


def test_a_folder_that_cannot_be_written_is_one_line(pages, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        export_history(pages, tmp_path / "file" / "out")


def test_a_name_that_would_be_a_path_is_refused(store, pages, tmp_path):
    row = UpdateRow(assignment_id="x", device_id="../../evil", round=1, base_version=0, received_at=1.0)
    store.record_updates("run-1", [row])
    with pytest.raises(DataError, match="is no name of a run or device"):
        export_history(pages, tmp_path / "out")
    assert not (tmp_path / "out").exists()
