"""docs/reference/store.md describes the store as it is; links lead somewhere, and no text speaks of one machine."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from markdown_pages import code, part, rows

from edgefl.coordinator.fleet import presence
from edgefl.storage.columns import COLUMNS
from edgefl.storage.deployment_records import DeploymentStatus, DeviceStage
from edgefl.storage.heartbeat_rows import BUCKET_S, RAW_S
from edgefl.storage.records import DispatchRow, EvaluationRow, HeartbeatRow, RunStatus, UpdateRow
from edgefl.storage.store import Store
from edgefl.types import Outcome

ROOT = Path(__file__).parents[1]
DOCS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
STORE = (ROOT / "docs" / "reference" / "store.md").read_text()

TYPES = {
    "TEXT": "text",
    "BIGINT": "integer",
    "INTEGER": "integer",
    "FLOAT": "number",
    "JSON": "JSON",
    "BLOB": "bytes",
}
TYPES |= {"VARCHAR(32)": "text"}  # Alembic's own table


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which `fast` waited for `slow` in round 7, and `slow` was gone for a while and then for good."""
    path = tmp_path_factory.mktemp("store") / "edgefl.db"
    with Store.open(path) as store:
        for run_id, at in (("old", 1000.0), ("new", 2000.0)):
            store.add_run(
                run_id=run_id, name="n", task="digits", strategy="fedavg", config={}, seed=7, submitted_at=at
            )  # fmt: skip
            fill(store, run_id, at)
        for at, kind, device in (
            (2000.0, "joined", "slow"), (2001.0, "online", "slow"), (2010.0, "gone", "slow"),
            (2012.0, "online", "fast"), (2013.5, "online", "slow"), (2020.0, "offline", "slow"),
        ):  # fmt: skip
            store.record_event(f"device-{kind}", "said so", at=at, device_id=device)
    return path


def fill(store: Store, run_id: str, at: float) -> None:
    store.open_round(run_id, 7, started_at=at, num_devices=2)
    made = [("fast", 1.0, 8.0, 300), ("slow", 8.0, 1.0, 100)]
    store.record_dispatches(
        run_id,
        [DispatchRow(assignment_id=d, device_id=d, round=7, base_version=6, dispatched_at=at) for d, *_ in made],
    )
    store.record_updates(
        run_id,
        [
            UpdateRow(
                assignment_id=device, device_id=device, round=7, base_version=6, iterations=4, num_examples=10,
                bytes_up=num_bytes, bytes_down=2 * num_bytes, compute_s=compute_s, send_s=0.5, wait_s=wait_s,
                loss=1.0, received_at=at + 2, max_temperature_c=81.5 if device == "slow" else None,
            )
            for device, compute_s, wait_s, num_bytes in made
        ],
    )  # fmt: skip
    store.mark_applied(run_id, ["fast", "slow"], applied_version=6)
    store.close_round(run_id, 7, version=7, closed_at=at + 9)
    store.record_evaluations(
        run_id,
        [
            EvaluationRow(
                assignment_id=f"e-{source}-{device}", round=7, version=7, device_id=device, source=source, loss=1.0,
                accuracy=accuracy, num_examples=num_examples, at=at + 10,
            )
            for source, device, accuracy, num_examples in (
                ("coordinator", "own", 0.75, 100), ("device", "fast", 0.5, 30), ("device", "slow", 0.9, 10),
            )
        ],
    )  # fmt: skip
    beat = HeartbeatRow(device_id="slow", at=at, seq=1, session_no=1, uptime_s=9.0, temperature_c=81.5, run=run_id)
    store.record_heartbeats([beat])


def select(database: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return connection.execute(query).fetchall()


def names(database: Path, kind: str) -> set[str]:
    query = f"SELECT name FROM sqlite_master WHERE type = '{kind}' AND name NOT LIKE 'sqlite_%'"
    return {str(name) for (name,) in select(database, query)}


def described(title: str) -> Iterator[tuple[str, list[list[str]]]]:
    for name in re.findall(r"^### (\w+)$", part(STORE, title), re.MULTILINE):
        yield name, rows(part(STORE, name))


def test_store_md_describes_every_table_and_column_of_a_fresh_store_and_no_other(database: Path) -> None:
    told = {
        table: {name: kind for cell, kind, *_ in cells for name in code(cell)} for table, cells in described("Tables")
    }
    there = {
        table: {str(row[1]): TYPES[str(row[2])] for row in select(database, f"PRAGMA table_info({table})")}
        for table in names(database, "table")
    }
    assert told == there


def test_store_md_describes_every_view_and_column_of_a_fresh_store_and_no_other(database: Path) -> None:
    told = {view: sorted(name for cell, *_ in cells for name in code(cell)) for view, cells in described("Views")}
    there = {
        view: sorted(str(row[1]) for row in select(database, f"PRAGMA table_info({view})"))
        for view in names(database, "view")
    }
    assert told == there


def test_the_columns_of_the_history_are_columns_of_the_views(database: Path) -> None:
    for kind in ("runs", "rounds", "slow", "updates", "devices", "heartbeats"):
        there = {str(row[1]) for row in select(database, f"PRAGMA table_info(v_{kind})")}
        assert set(COLUMNS[kind]) <= there, kind


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("waited longest", [("fast", 8.0, 1.0, 0.5), ("slow", 1.0, 8.0, 0.5)]),
        ("Bytes by device", [("fast", 300, 600, 1), ("slow", 100, 200, 1)]),
        ("Accuracy by round", [(7, "coordinator", 0.75, 1), (7, "device", pytest.approx(0.6), 2)]),
        (
            "Who was away",
            [
                ("slow", "1970-01-01 00:33:30", "device-gone", "said so", 3.5),
                ("slow", "1970-01-01 00:33:40", "device-offline", "said so", None),
            ],
        ),
        (
            "heat",
            [("slow", "new", 2.0, 81.5), ("fast", "new", 0.25, None), ("slow", "old", 2.0, 81.5),
             ("fast", "old", 0.25, None)],
        ),
    ],
)  # fmt: skip
def test_a_query_of_store_md_answers_its_question(
    database: Path, words: str, expected: list[tuple[object, ...]]
) -> None:
    (query,) = re.findall(rf"{words}(?:(?!```).)*```sql\n(.+?)```", STORE, re.DOTALL)
    assert select(database, query) == expected


def test_every_query_of_store_md_is_tried_above() -> None:
    assert len(re.findall("```sql", STORE)) == 5


def test_store_md_names_every_status_outcome_and_presence() -> None:
    for word in (*RunStatus, *Outcome, *presence.DeviceState, *DeploymentStatus, *DeviceStage):
        assert f"`{word}`" in part(STORE, "Tables"), word


def test_store_md_s_retention_is_the_store_s() -> None:
    assert (RAW_S, BUCKET_S) == (24 * 3600, 5 * 60), "store.md says a day and five minutes"


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", path.read_text()):
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        assert there.exists(), target
        headings = re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in headings}


def test_no_text_names_a_path_of_the_machine_that_it_was_written_on() -> None:
    a_board_s = (
        "/home/pi/",
        "/var/",
        "/opt/edgefl/",
        "/opt/nvidia/",
        "/bin/",
        "/boot/",
        "/run/",
        "/srv/",
        "/data/",
        "/etc/",
        "/usr/",
        "/dev/",
        "/proc/",
        "/sys/",
        "/path/to/",
    )
    a_route = ("/v1/", "/edgefl/", "/healthz", "/metrics", "/predict", "/model/")
    shipped = [*DOCS, ROOT / "Makefile", *(path for path in (ROOT / "provisioning").rglob("*") if path.is_file())]
    for path in shipped:
        text = re.sub(r'"(\$\w+)"', r"\1", path.read_text())  # "$folder"/name of a script
        for found in re.findall(r"(?<![\w./~…:<>})*+-])/[a-z][\w.+-]*(?:/[\w.+-]*)*", text):
            is_bare = found in {"/home", "/opt", "/root", "/tmp"}
            assert is_bare or f"{found}/".startswith((*a_board_s, *a_route)), f"{path.name}: {found}"
