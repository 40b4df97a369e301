"""Conditions: what they choose, and that a bad one is one clear line and never SQL."""

import pytest
from filled_store import FilledStore

from edgefl.core.errors import UsageError
from edgefl.core.types import UpdateStatus
from edgefl.storage.queries.columns import COLUMNS, JSON_COLUMNS, is_text_column
from edgefl.storage.queries.filters import parse_conditions
from edgefl.storage.queries.history import read_history
from edgefl.storage.repositories.records import UpdateRow
from edgefl.storage.tables import Base


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    with FilledStore.open(tmp_path_factory.mktemp("three") / "edgefl.db") as store:
        yield with_three_updates(store, store.submit("run-1"))


def with_three_updates(store, run_id):
    made = (("a", "used", 5, None), ("b", "lost", None, "disk full; 100%_x'"), ("c", None, 0, "ok"))
    rows = [
        UpdateRow(
            assignment_id=name, device_id=name, round=1, base_version=0, staleness=staleness, reason=reason,
            outcome=None if outcome is None else UpdateStatus(outcome), received_at=1.0,
        )
        for name, outcome, staleness, reason in made
    ]  # fmt: skip
    store.record_updates(run_id, rows)
    return store


@pytest.mark.parametrize(
    ("conditions", "chosen"),
    [
        (["staleness>3"], "a"),
        ([" staleness >= 0 "], "ac"),
        (["staleness<=0"], "c"),
        (["staleness!=5"], "bc"),
        (["outcome=lost"], "b"),
        (["outcome==lost"], "b"),
        (["outcome!=lost"], "ac"),
        (["outcome<>lost"], "ac"),
        (["outcome=null"], "c"),
        (["outcome!=null"], "ab"),
        (["outcome='null'"], ""),
        (["reason~%_x'"], "b"),
        (["reason~_"], "b"),
        (["staleness>3", "outcome=used"], "a"),
        (["staleness>3", "outcome=lost"], ""),
        (["reason=' OR 1=1 --"], ""),
        (["received_at=1.0"], "abc"),
    ],
)
def test_a_condition_chooses_what_it_says(three, conditions, chosen):
    assert "".join(row["device_id"] for row in read_history(three, "updates", where=conditions)) == chosen


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense>3", "cannot be chosen by 'nonsense'; they have run_id, round"),
        ("staleness", "a condition is COLUMN"),
        ("staleness>", "staleness is a number"),
        ("staleness>three", "staleness is a number, got 'three'"),
        ("staleness>nan", "staleness is a number"),
        ("staleness>null", "only be compared by = and !="),
        ("metrics=1", "cannot be chosen by 'metrics'"),
        ("1=1; DROP TABLE updates", "cannot be chosen by '1'"),
        ("staleness>3 OR 1=1", "staleness is a number"),
        ("x" * 400, "a condition is COLUMN"),
    ],
)
def test_a_bad_condition_is_one_line_that_says_what_would_be_right(three, text, words):
    with pytest.raises(UsageError) as error:
        read_history(three, "updates", where=[text])
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", sorted(COLUMNS))
def test_every_column_of_every_kind_can_be_chosen_by(three, kind):
    for name in COLUMNS[kind]:
        if name in JSON_COLUMNS or (name in {"run_id", "day"} and "device_id" in COLUMNS[kind] and
                                  "num_assignments" in COLUMNS[kind]) or (
                                  kind == "stale" and name in {"run_id", "day"}):  # fmt: skip
            continue
        assert isinstance(read_history(three, kind, where=[f"{name}!=null"]), list)


def test_what_is_text_here_is_text_in_the_tables():
    for kind in ("runs", "rounds", "updates", "devices", "heartbeats", "events", "evaluations"):
        columns = Base.metadata.tables[kind].columns
        for name in set(COLUMNS[kind]) & set(columns.keys()) - JSON_COLUMNS:
            assert (str(columns[name].type) == "TEXT") == is_text_column(kind, name), f"{kind}.{name}"


def test_sums_have_the_key_that_they_are_by_and_no_other():
    assert parse_conditions("traffic", "day", ["day>=2026-01-01"])
    with pytest.raises(UsageError, match="they have day, num_assignments"):
        parse_conditions("traffic", "day", ["device_id=a"])
