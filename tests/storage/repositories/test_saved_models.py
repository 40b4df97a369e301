"""Kept models: their order, which one a person means, and whose file nobody names."""

from dataclasses import replace

import pytest

from edgefl.core.errors import NotFoundError
from edgefl.storage.repositories.records import SavedModelRow
from edgefl.storage.repositories.saved_models import find_model, find_orphaned_models, list_models, save_model_rows


def sha(number):
    return f"{number:04x}" + "a" * 60


def row(version, *, accuracy=None, number=None, sha256=None, quality=None):
    return SavedModelRow(
        version=version, round=version if number is None else number, last_record=10 * version,
        sha256=sha256 or sha(version), bytes_file=100, at=1000.0 + version, accuracy=accuracy, quality=quality,
    )  # fmt: skip


@pytest.fixture
def two_runs(store):
    store.submit("run-1", name="first", submitted_at=1.0, config={"task": {"model": "mlp"}, "run": {}})
    store.submit("run-2", name="second", submitted_at=2.0, config={"run": {"local_test_fraction": 0.25}})
    store.submit("run-3", name="without", submitted_at=3.0)
    save_model_rows(store, "run-2", [row(version=9, sha256=sha(0x1234))], [])
    save_model_rows(store, "run-1", [row(3), row(1, accuracy=0.75), row(2, accuracy=0.75)], [])
    return store


def test_models_come_oldest_run_first_with_what_is_needed_to_use_them(two_runs):
    rows = list_models(two_runs)
    assert [(r["run_id"], r["version"]) for r in rows] == [("run-1", 1), ("run-1", 2), ("run-1", 3), ("run-2", 9)]
    assert [(r["latest"], r["best"]) for r in rows] == [(False, False), (False, True), (True, False), (True, False)]
    assert (rows[0]["name"], rows[0]["task"], rows[0]["task_options"]) == ("first", "digits", {"model": "mlp"})
    assert [r["test_fraction"] for r in rows] == [0.1, 0.1, 0.1, 0.25]
    assert "config" not in rows[0]


def test_of_one_run_only_its_own(two_runs):
    assert [r["version"] for r in list_models(two_runs, "first")] == [1, 2, 3]
    assert list_models(two_runs, "latest") == []
    with pytest.raises(NotFoundError, match="no run 'zz'"):
        list_models(two_runs, "zz")


@pytest.mark.parametrize(
    ("text", "run", "version"),
    [
        ("0002", None, 2),
        ("first:2", None, 2),
        ("run-1:best", None, 2),
        ("best", "first", 2),
        ("latest", None, 9),
        ("1", "first", 1),
        ("first", None, 3),
        ("1234", None, 9),
        (" 0002 ", None, 2),
    ],
)
def test_a_person_s_words_find_the_model(two_runs, text, run, version):
    assert find_model(two_runs, text, run)["version"] == version


@pytest.mark.parametrize(
    ("text", "run", "words"),
    [
        ("000", None, "no model '000': a model is the beginning of its SHA-256"),
        ("", None, "no model ''"),
        ("dead", None, "no kept model begins with 'dead'"),
        ("1234", "first", "no kept model of run 'first' begins with '1234'"),
        ("first:7", None, "no kept model of round 7; kept are those of round 1, 2, 3"),
        ("second:best", None, "no model whose accuracy is known"),
        ("without:latest", None, "run 'without' has no kept model yet"),
        ("run-", None, "several runs begin with 'run-'"),
        ("first:worst", None, "no model 'first:worst'"),
    ],
)
def test_what_no_model_has_is_said_with_what_would_be_right(two_runs, text, run, words):
    with pytest.raises(NotFoundError, match=words):
        find_model(two_runs, text, run)


def test_a_beginning_that_several_models_share_is_refused_and_one_file_of_two_runs_is_not(two_runs):
    save_model_rows(two_runs, "run-2", [row(4, sha256="0002" + "b" * 60), row(5, sha256=sha(3))], [])
    with pytest.raises(
        NotFoundError, match="several models begin with '0002', among them 0002aaaaaaaaaaaa and 0002b"
    ):
        find_model(two_runs, "0002")
    assert find_model(two_runs, "0003")["sha256"] == sha(3)


def test_rows_are_written_and_dropped_together(two_runs):
    save_model_rows(two_runs, "run-1", [row(4), row(2, accuracy=0.5)], [1, 3])
    assert [(r["version"], r["accuracy"]) for r in list_models(two_runs, "run-1")] == [(2, 0.5), (4, None)]
    assert [r["version"] for r in list_models(two_runs, "run-2")] == [9], "another run's are left alone"


def test_what_a_row_or_a_run_file_names_is_named(two_runs):
    two_runs.submit("run-4", config={"run": {"init": f"models/{sha(7)}.safetensors"}}, submitted_at=4.0)
    asked = {sha(1), sha(7), sha(8), sha(0x1234)}
    assert find_orphaned_models(two_runs, asked) == {sha(8)}
    save_model_rows(two_runs, "run-1", [], [1])
    assert find_orphaned_models(two_runs, asked) == {sha(1), sha(8)}
    assert find_orphaned_models(two_runs, set()) == set()
    for run in ("run-1", "run-2"):
        save_model_rows(two_runs, run, [], [1, 2, 3, 9])
    with pytest.raises(NotFoundError, match="there is no kept model yet"):
        find_model(two_runs, "latest")


def test_the_best_of_a_run_goes_by_quality_where_one_of_its_models_has_it(two_runs):
    save_model_rows(two_runs, "run-3", [row(1, accuracy=0.9), row(2, quality=-2.5), row(3, quality=-1.5)], [])
    save_model_rows(two_runs, "run-3", [row(4, quality=-3.0)], [])
    best = {r["run_id"]: r["version"] for r in list_models(two_runs) if r["best"]}
    assert best == {"run-1": 2, "run-3": 3}


def test_of_versions_that_end_with_one_record_each_is_judged_by_itself(two_runs):
    rows = [replace(row(version, accuracy=accuracy), last_record=7) for version, accuracy in ((1, 0.9), (2, 0.5))]
    save_model_rows(two_runs, "run-3", [*rows, replace(row(3, accuracy=0.1), last_record=6)], [])
    found = [(r["version"], r["latest"], r["best"]) for r in list_models(two_runs, "run-3")]
    assert found == [(1, False, True), (2, False, False), (3, True, False)]
    assert find_model(two_runs, "run-3:best")["version"] == 1
