"""Tables of the docs are those of the code: the store's columns, codecs, strategies."""

import re
import sqlite3
from contextlib import closing

import pytest
from markdown_pages import PAGES, code, fences, inline_code, page, part, rows, tables

from edgefl.compression import codec_selection
from edgefl.compression.codec import make_codec
from edgefl.compression.registry import list_stages
from edgefl.coordinator.fleet import presence
from edgefl.core.analyses import ANALYSES
from edgefl.core.errors import CodecError
from edgefl.core.protocol import Heartbeat
from edgefl.core.types import Algorithm, TensorSpec, TrainConfig, UpdateStatus
from edgefl.flower.strategy_options import list_flower_strategies
from edgefl.storage.queries.columns import COLUMNS
from edgefl.storage.repositories.records import AssignmentRow, EvaluationRow, HeartbeatRow, RunStatus, UpdateRow
from edgefl.storage.repositories.rollouts import RolloutStage, RolloutStatus
from edgefl.storage.store import Store
from edgefl.strategies.registry import BUILT_IN_STRATEGIES
from edgefl.strategies.strategy_config import SCHEDULES
from edgefl.tasks.images import MODELS
from edgefl.tasks.registry import BUILT_IN, CONFIGURED, make_task

SHAPES = (TensorSpec(name="fc.weight", shape=(60, 50)), TensorSpec(name="fc.bias", shape=(60,)))


def section(title):
    """The text under a heading, in the one page that has it."""
    (found,) = [part(text, title) for text in PAGES.values() if re.search(rf"^#+ {title}$", text, re.MULTILINE)]
    return found


# The store

TYPES = {
    "TEXT": "text", "BIGINT": "integer", "INTEGER": "integer", "FLOAT": "number", "JSON": "JSON", "BLOB": "bytes",
    "VARCHAR(32)": "text",  # Alembic's own table
}  # fmt: skip


@pytest.fixture(scope="module")
def select(tmp_path_factory):
    """Asks a store in which `fast` waited for `slow` in round 7, and `slow` was gone for a while, then for good."""
    path = tmp_path_factory.mktemp("store") / "edgefl.db"
    with Store.open(path) as store:
        for run_id, at in (("old", 1000.0), ("new", 2000.0)):
            facts = {"name": "n", "task": "digits", "strategy": "fedavg", "config": {}, "seed": 7}
            store.add_run(run_id=run_id, submitted_at=at, **facts)
            fill(store, run_id, at)
        for at, kind, device in (
            (2000.0, "joined", "slow"), (2001.0, "online", "slow"), (2010.0, "gone", "slow"),
            (2012.0, "online", "fast"), (2013.5, "online", "slow"), (2020.0, "offline", "slow"),
        ):  # fmt: skip
            store.record_event(f"device-{kind}", "said so", at=at, device_id=device)
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        yield lambda query: connection.execute(query).fetchall()


def fill(store, run_id, at):
    store.open_round(run_id, 7, started_at=at, num_devices=2)
    for device, compute_s, wait_s, num_bytes in (("fast", 1.0, 8.0, 300), ("slow", 8.0, 1.0, 100)):
        facts = {"assignment_id": device, "device_id": device, "round": 7, "base_version": 6}
        update = UpdateRow(
            **facts, iterations=4, num_examples=10, bytes_up=num_bytes, bytes_down=2 * num_bytes, loss=1.0,
            compute_s=compute_s, send_s=0.5, wait_s=wait_s, received_at=at + 2,
            max_temperature_c=81.5 if device == "slow" else None,
        )  # fmt: skip
        store.record_assignments(run_id, [AssignmentRow(**facts, dispatched_at=at)])
        store.record_updates(run_id, [update])
    store.mark_applied(run_id, ["fast", "slow"], applied_version=6)
    store.close_round(run_id, 7, version=7, closed_at=at + 9)
    scores = [
        EvaluationRow(
            assignment_id=f"e-{source}-{device}", round=7, version=7, device_id=device, source=source, loss=1.0,
            accuracy=accuracy, num_examples=num_examples, at=at + 10,
        )
        for source, device, accuracy, num_examples in (
            ("coordinator", "own", 0.75, 100), ("device", "fast", 0.5, 30), ("device", "slow", 0.9, 10),
        )
    ]  # fmt: skip
    store.record_evaluations(run_id, scores)
    beat = HeartbeatRow(
        device_id="slow",
        at=at,
        heartbeat=Heartbeat(seq=1, session_no=1, uptime_s=9.0, temperature_c=81.5, run=run_id),
    )
    store.record_heartbeats([beat])


@pytest.mark.parametrize("kind", ["table", "view"])
def test_the_page_of_the_store_has_every_column_of_a_fresh_store_and_no_other(select, kind):
    text = part(page("store"), f"{kind.title()}s")
    told = {
        name: {
            column: cells[1] if kind == "table" else ""
            for cells in rows(part(text, name))
            for column in code(cells[0])
        }
        for name in re.findall(r"^### (\w+)$", text, re.MULTILINE)
    }
    names = select(f"SELECT name FROM sqlite_master WHERE type = '{kind}' AND name NOT LIKE 'sqlite_%'")
    columns = {name: select(f"PRAGMA table_info({name})") for (name,) in names}
    assert told == {
        name: {row[1]: TYPES[row[2]] if kind == "table" else "" for row in found} for name, found in columns.items()
    }


def test_the_columns_of_the_history_are_columns_of_the_views(select):
    for kind in ("runs", "rounds", "slow", "updates", "devices", "heartbeats"):
        assert set(COLUMNS[kind]) <= {row[1] for row in select(f"PRAGMA table_info(v_{kind})")}, kind


ANSWERS = {
    "wait": [("fast", 8.0, 1.0, 0.5), ("slow", 1.0, 8.0, 0.5)],
    "bytes": [("fast", 300, 600, 1), ("slow", 100, 200, 1)],
    "accuracy": [(7, "coordinator", 0.75, 1), (7, "device", pytest.approx(0.6), 2)],
    "away": [
        ("slow", "1970-01-01 00:33:30", "device-gone", "said so", 3.5),
        ("slow", "1970-01-01 00:33:40", "device-offline", "said so", None),
    ],
    "heat": [
        ("slow", "new", 2.0, 81.5), ("fast", "new", 0.25, None),
        ("slow", "old", 2.0, 81.5), ("fast", "old", 0.25, None),
    ],
}  # fmt: skip


def test_every_query_of_the_page_answers_and_each_answer_is_right(select):
    answers = [select(query) for query in fences(page("store"), "sql")]
    assert len(answers) == len(ANSWERS)
    for name, expected in ANSWERS.items():
        assert expected in answers, name


def test_every_status_outcome_and_presence_is_named():
    text = part(page("store"), "Tables")
    for word in (*RunStatus, *UpdateStatus, *presence.DevicePresence, *RolloutStatus, *RolloutStage):
        assert f"`{word}`" in text, word


# Codecs


@pytest.mark.parametrize(
    ("title", "kind"), [("Tensor stages", "tensors"), ("Value stages", "values"), ("Lossless stages", "lossless")]
)
def test_the_stages_are_those_of_the_registry_with_what_they_promise(title, kind):
    listing = {row.name: row for row in list_stages() if row.kind == kind and row.name != "delta"}
    told = {re.split(r"[:\[]", text)[0]: cells for cells in rows(section(title)) for text in code(cells[0])}
    # The page's list of all stages is made from the registry; here it says more of those that it recommends.
    assert told.keys() <= listing.keys()
    for name, cells in told.items():
        for cell, promise in zip(
            cells[2:4], (not listing[name].is_biased, listing[name].is_contraction), strict=False
        ):
            assert cell not in {"yes", "no"} or (cell == "yes") is promise, name


def test_the_codecs_that_are_recommended_are_codecs_and_what_is_said_of_auto_is_so():
    lines = [text.replace("\\|", "|") for row in rows(section("Which one")) for text in code(row[1])]
    for line in [line.removeprefix("down = ").strip('"') for line in lines]:
        if not line.startswith("delta") and line not in {codec_selection.AUTO, "signsgd"}:
            assert make_codec(line, SHAPES), line
    text = " ".join(section("Auto").split())
    (fractions,) = [
        re.findall(r"0\.\d+", entry) for entry in re.findall(r"\*\*Candidates\*\* are (.+?)\. Yours", text)
    ]
    assert (
        "ef|fp16",
        "ef|int8",
        *(f"ef|topk:{fraction}|int8" for fraction in fractions),
    ) == codec_selection.CANDIDATES
    for own in re.findall(r"`(auto:.+?)`", text):
        assert all(make_codec(spec, SHAPES) for spec in codec_selection.parse_auto_candidates(own))
    (bits,) = map(int, re.findall(r"BITS from (\d) on", page("compression")))
    assert make_codec(f"ef|qsgd:{bits}", SHAPES)
    with pytest.raises(CodecError, match="ef would pile it up"):
        make_codec(f"ef|qsgd:{bits - 1}", SHAPES)


# Strategies


def test_strategies_are_those_of_the_registry_and_of_flower():
    table = {code(row[0])[0]: row[1] for row in rows(section("Built-in strategies")) if code(row[0])}
    assert set(table) == set(BUILT_IN_STRATEGIES)
    assert set(table.values()) == {"synchronous", "asynchronous", "decentralised"}
    named = {
        name for name in code(" ".join(section("Flower's strategies").split("\n\n")[1].split())) if name[0].isupper()
    }
    assert {f"flwr:{name}" for name in named | {"FedAdam"}} == set(list_flower_strategies())


def test_analyses_are_those_of_the_code_with_their_rounds():
    table = {code(row[0])[0]: row[1] for row in rows(section("Analyses"))}
    assert set(table) == set(ANALYSES)
    fixed = {
        name: found for name in ANALYSES if isinstance(found := getattr(ANALYSES[name], "num_rounds", None), int)
    }
    assert {name: int(table[name]) for name in fixed} == fixed


def test_local_algorithms_and_schedules_are_all_named():
    everything = {word for text in PAGES.values() for word in inline_code(text)}
    assert set(map(str, Algorithm)) <= everything
    assert set(SCHEDULES) <= everything


# Tasks


def test_every_task_and_network_of_images_is_in_a_table_with_its_defaults_and_sizes():
    listed = {code(name)[0]: last for name, *_, last in rows(part(page("tasks"), "Tasks"))}
    defaults = {name: TrainConfig(**make_task(name).defaults) for name in {*BUILT_IN} - CONFIGURED}
    assert listed == {name: f"{plan.learning_rate:g}, {plan.batch_size}" for name, plan in defaults.items()}
    sizes = {code(row[0])[0]: row[1:3] for row in tables(part(page("tasks"), "Networks"))[0]}
    assert sizes == {
        model: [f"{_count_parameters(task, model):,}" for task in ("mnist", "cifar-10")] for model in MODELS
    }


def _count_parameters(task, model):
    return sum(spec.size for spec in make_task(task, {"model": model}).shapes())
