"""The recorder over a real store and a real journal."""

import contextlib
import re
from pathlib import Path

import numpy as np
import pytest

from edgefl.compression.codec import decode_body, make_codec
from edgefl.coordinator.runs.history_recorder import HistoryRecorder
from edgefl.coordinator.runs.history_writer import HistoryWriter
from edgefl.core.errors import JournalError, StoreFullError, StrategyError
from edgefl.core.types import (
    ClippedUpdate,
    Decision,
    EvaluateInstruction,
    EvaluateResult,
    InstructionFailed,
    TensorSpec,
    TrainConfig,
    TrainInstruction,
    Update,
    UpdateMetrics,
    UpdateStatus,
    derive_rng,
)
from edgefl.engine.progress import ProgressTracker, RoundCounter
from edgefl.engine.round_loop import RunLog
from edgefl.storage.journal.wal_journal import WalJournal
from edgefl.storage.queries.history import read_history
from edgefl.storage.rollback import get_progress
from edgefl.storage.store import Store

SHAPES = (TensorSpec(name="w", shape=(3,)),)
CODEC = make_codec("dense", SHAPES)


class FullStore:
    """A store on a disk without room."""

    def batch(self):
        raise StoreFullError("no room")


class Book:
    """A recorder, its store and journal, and a clock that is set by hand."""

    def __init__(self, root, versions_per_round=1, **options):
        self.now_s, self.versions, self.flagged, self.jump_s = 0.0, [], set(), 0.0
        self.store = Store.open(root / "edgefl.db")
        self.store.add_run(
            run_id="r", name="r", task="digits", strategy="fedavg", config={}, seed=1, submitted_at=1.0
        )
        self.wal = WalJournal(root / "journal", lambda body: decode_body(body, SHAPES))
        self.ledger = HistoryWriter(self.store, "r")
        self.recorder = HistoryRecorder(
            history=self.ledger, rounds=RoundCounter(versions_per_round=versions_per_round),
            clock=lambda: 1000.0 + self.now_s + self.jump_s, monotonic=lambda: self.now_s,
            on_version=self.versions.append, get_blocked=lambda: self.flagged, **options,
        )  # fmt: skip
        self.log, self.progress = RunLog(self.wal, [self.recorder]), ProgressTracker()

    def decide(self, *orders):
        self.log.record_decision(Decision(instructions=orders))
        self.log.commit()
        self.progress.record_dispatch(orders, self.now_s)
        return orders

    def order(self, version, *devices):
        return self.decide(*(
            TrainInstruction(assignment_id=f"v{version}-{device}", device_id=device, base_version=version,
                       plan=TrainConfig(epochs=1.0))
            for device in devices
        ))  # fmt: skip

    def evaluate(self, version, *devices, subject=""):
        self.decide(*(
            EvaluateInstruction(assignment_id=f"e{version}-{device}{subject}", device_id=device, version=version,
                       round=version, subject=subject)
            for device in devices
        ))  # fmt: skip

    def receive(self, *events):
        """Takes events and commits; returns what the journal made of them."""
        kept = self.log.record_events(events)
        for score in [score for event in events for score in self.progress.record_event(event)]:
            self.log.record_score(score)
        self.log.commit()
        return kept

    def finish(self):
        """Ends the run, as the loop and its executor do."""
        for score in self.progress.nodes.complete_pending():
            self.log.record_score(score)
        self.log.finish()
        self.ledger.finish()

    def aggregate(self, version, *names, state=None):
        self.log.record_aggregation(version, names, state)
        self.log.commit()

    def round_of(self, version, *devices, **metrics):
        """A whole round: ordered, answered and aggregated."""
        self.order(version, *devices)
        self.receive(*(update(version, device, **metrics) for device in devices))
        self.aggregate(version + 1, *(f"v{version}-{device}" for device in devices))

    def rows(self, kind, *columns):
        """Rows of the history, or only these columns of them."""
        self.ledger.flush()
        rows = read_history(self.store, kind, run="r")
        return [tuple(row[name] for name in columns) for row in rows] if columns else rows

    def run(self):
        self.ledger.flush()
        return self.store.get_run("r")


@pytest.fixture
def open_book(tmp_path):
    with contextlib.ExitStack() as closers:

        def make(**options):
            made = Book(tmp_path, **options)
            closers.callback(made.store.close)
            closers.callback(made.wal.close)
            return made

        yield make


@pytest.fixture
def book(open_book):
    return open_book()


def update(version, device, *, received_s=0.0, **metrics):
    body = CODEC.encode({"w": np.ones(3, np.float32)}, derive_rng(0))
    measured = {"iterations": 4, "num_examples": 10, "loss": 0.5, "compute_s": 2.0, "send_s": 0.25}
    return Update(
        assignment_id=f"v{version}-{device}", device_id=device, base_version=version,
        tensors=decode_body(body, SHAPES), body=body, received_s=received_s,
        metrics=UpdateMetrics(**{**measured, "bytes_up": len(body), "bytes_down": 100, **metrics}),
    )  # fmt: skip


BYTES_UP = len(update(0, "a").body)


def evaluated(version, device, source, accuracy, num_examples=10, subject=""):
    return EvaluateResult(
        assignment_id=f"e{version}-{device}{subject}", subject=subject, device_id=device, version=version,
        round=version, source=source, num_examples=num_examples, loss=1.0, accuracy=accuracy,
    )  # fmt: skip


def gone(name, device, outcome=UpdateStatus.LOST, reason="gone", **more):
    return InstructionFailed(device_id=device, assignment_id=name, outcome=outcome, reason=reason, **more)


@pytest.mark.parametrize("jump_s", [43_200.0, -43_200.0])
def test_a_round_is_as_long_as_it_was_though_the_clock_is_set_meanwhile(book, jump_s):
    book.order(0, "a")
    book.jump_s, book.now_s = jump_s, 7.0
    book.receive(update(0, "a", received_s=7.0))
    book.aggregate(1, "v0-a")
    assert book.rows("rounds", "seconds") == [(7.0,)]
    assert get_progress(book.store, "r").elapsed_s == 7.0


def test_a_round_that_began_before_its_run_went_on_is_as_long_as_from_there(book):
    (order,) = book.order(0, "a")
    opened_s, book.now_s, book.jump_s = dict(book.recorder.round_starts_s), 3.0, 900.0
    book.recorder.resume([order], 0, opened_s)
    book.receive(update(0, "a", received_s=3.0))
    book.aggregate(1, "v0-a")
    assert book.rows("rounds", "seconds") == [(3.0,)]


def test_two_rounds_of_two_devices_are_two_rounds_and_four_updates_with_all_figures(book):
    for version in (0, 1):
        start_s = book.now_s = 10.0 * version
        book.order(version, "a", "b")
        book.now_s = start_s + 1.0
        book.receive(update(version, "a", received_s=start_s + 1.0, loss=0.4))
        book.now_s = start_s + 3.0
        book.receive(update(version, "b", received_s=start_s + 3.0, loss=0.8, num_examples=30))
        book.aggregate(version + 1, f"v{version}-a", f"v{version}-b")
    assert book.rows("rounds", "round", "version", "num_updates", "num_devices", "started_at", "closed_at") == [
        (1, 1, 2, 2, 1000.0, 1003.0), (2, 2, 2, 2, 1010.0, 1013.0),
    ]  # fmt: skip
    first = book.rows("rounds")[0]
    assert first["train_loss"] == pytest.approx((0.4 * 10 + 0.8 * 30) / 40)
    assert (first["bytes_down"], first["facts"], first["node_accuracy"]) == (200, None, None)
    names = ("device_id", "round", "base_version", "applied_version", "staleness", "outcome", "wait_s")
    assert book.rows("updates", *names) == [
        ("a", 1, 0, 0, 0, "used", 2.0), ("b", 1, 0, 0, 0, "used", 0.0),
        ("a", 2, 1, 1, 0, "used", 2.0), ("b", 2, 1, 1, 0, "used", 0.0),
    ]  # fmt: skip
    names = ("iterations", "num_examples", "loss", "compute_s", "send_s", "bytes_down", "bytes_up", "dispatched_at")
    assert book.rows("updates", *names)[0] == (4, 10, 0.4, 2.0, 0.25, 100, BYTES_UP, 1000.0)
    assert book.rows("updates", "received_at")[0] == (1001.0,)
    assert (book.run().rounds, book.run().version, book.versions) == (2, 2, [1, 2])


def test_updates_come_back_readable_from_the_journal_and_without_their_body(book):
    book.order(0, "a")
    (kept,) = book.receive(update(0, "a"))
    assert kept.body is None
    assert kept.tensors["w"].tolist() == [1.0] * 3


def test_an_update_that_is_not_used_is_late_at_the_end_and_counts_in_its_round_s_traffic(book):
    book.order(0, "a", "b")
    book.receive(update(0, "a"))
    book.aggregate(1, "v0-a")
    book.ledger.flush()
    book.receive(update(0, "b"))
    assert book.rows("updates", "outcome") == [("used",), (None,)]
    book.finish()
    assert book.rows("updates", "outcome", "loss") == [("used", 0.5), ("late", 0.5)]
    assert book.rows("rounds", "num_updates", "num_devices", "bytes_down", "bytes_up") == [(1, 2, 200, 2 * BYTES_UP)]


def test_an_update_that_is_used_a_version_later_says_how_stale_it_was(book):
    book.order(0, "a", "b")
    book.receive(update(0, "a"), update(0, "b"))
    book.aggregate(1, "v0-a")
    book.order(1, "a")
    book.aggregate(2, "v0-b")
    assert book.rows("updates", "assignment_id", "applied_version", "staleness")[:2] == [
        ("v0-a", 0, 0), ("v0-b", 1, 1),
    ]  # fmt: skip
    assert book.rows("rounds", "round", "num_updates") == [(1, 1), (2, 1)]


@pytest.mark.parametrize("outcome", [UpdateStatus.LOST, UpdateStatus.FAILED, UpdateStatus.REJECTED])
def test_what_brought_no_update_is_written_with_the_reason_and_when_it_was_given_up(book, outcome):
    book.order(0, "a", "b")
    book.evaluate(1, "judge")
    book.now_s = 30.0
    book.receive(gone("v0-b", "b", outcome, "it fell into a pond"))
    row = next(row for row in book.rows("updates") if row["device_id"] == "b")
    assert (row["outcome"], row["reason"], row["round"]) == (str(outcome), "it fell into a pond", 1)
    assert (row["dispatched_at"], row["received_at"], row["ended_at"]) == (1000.0, None, 1030.0)
    book.receive(gone("e1-judge", "judge"))
    kind = "update-rejected" if outcome is UpdateStatus.REJECTED else "assignment-failed"
    assert book.rows("events", "kind", "device_id") == [(kind, "b"), ("assignment-failed", "judge")]
    assert len(book.rows("updates")) == 2, "an evaluation is no update"


def test_evaluations_are_kept_with_their_source_and_the_accuracy_is_the_evaluators_or_the_mean_of_the_devices(book):
    book.evaluate(1, "a", "b")
    book.receive(evaluated(1, "a", "device", 1.0, 30), evaluated(1, "b", "device", 0.0, 10))
    assert book.run().accuracy == 0.75
    book.evaluate(2, "own", "a")
    book.receive(evaluated(2, "own", "coordinator", 0.5), evaluated(2, "a", "device", 1.0))
    assert book.run().accuracy == 0.5
    names = ("device_id", "source", "version", "round", "accuracy", "num_examples")
    assert sorted(book.rows("evaluations", *names)) == [
        ("a", "device", 1, 1, 1.0, 30), ("a", "device", 2, 2, 1.0, 10), ("b", "device", 1, 1, 0.0, 10),
        ("own", "coordinator", 2, 2, 0.5, 10),
    ]  # fmt: skip


def test_a_late_evaluation_of_an_older_version_does_not_turn_the_accuracy_back(book):
    book.evaluate(1, "own")
    book.evaluate(2, "own")
    for version, accuracy in ((2, 0.9), (1, 0.1)):
        book.receive(evaluated(version, "own", "coordinator", accuracy))
    assert (book.run().accuracy, len(book.rows("evaluations"))) == (0.9, 2)


def test_nothing_is_in_the_store_before_it_is_in_the_journal(book):
    book.order(0, "a")
    book.log.record_events([update(0, "a")])
    book.log.record_aggregation(1, ["v0-a"], None)
    assert book.rows("updates", "outcome") == [(None,)]
    book.wal.close()
    with pytest.raises(JournalError):
        book.log.commit()
    assert book.rows("updates", "outcome") == [(None,)]
    assert book.rows("rounds", "closed_at") == [(None,)]


def test_a_turn_without_news_writes_nothing(book):
    before = book.wal.last_record
    for _ in range(3):
        book.receive()
        book.decide()
    assert book.wal.last_record == before
    assert book.rows("updates") == book.rows("events") == []


def test_rows_that_cannot_be_written_are_written_later(book):
    ledger = HistoryWriter(FullStore(), "r")
    book.recorder._history = ledger
    book.order(0, "a", "b")
    with pytest.raises(StoreFullError):
        ledger.flush()
    book.receive(update(0, "a"), update(0, "b"))
    book.aggregate(1, "v0-a", "v0-b")
    ledger._store = book.store
    ledger.flush()
    assert book.rows("rounds", "round", "num_updates") == [(1, 2)]
    assert book.rows("updates", "outcome", "dispatched_at") == [("used", 1000.0)] * 2


def test_what_a_device_measured_and_how_its_board_was_is_kept_until_its_update_is_used_and_after(book):
    vitals = {
        "max_temperature_c": 83.2, "throttled": "throttled", "signal_dbm": -80.0, "link_bits_per_s": 6e6,
        "energy_j": 5.0, "paced_s": 2.5,
    }  # fmt: skip
    book.order(0, "a")
    shard = {"shard_version": "0000000000ff", "shard_examples": 40}
    book.receive(update(0, "a", extra={"gap": 0.5}, **vitals, **shard))
    for outcome in (None, "used"):
        (row,) = book.rows("updates")
        assert {name: row[name] for name in vitals} == vitals
        assert (row["metrics"], row["outcome"]) == ({"gap": 0.5, **shard}, outcome)
        assert row["ended_at"] == row["received_at"] == 1000.0
        if outcome is None:
            book.aggregate(1, "v0-a")


def test_a_device_that_is_flagged_is_an_event_once_with_the_reason_and_not_behind_a_checkpoint_that_knows_it(book):
    for version in range(3):
        book.order(version, "a", "b")
        book.flagged |= {"b"} if version else set()
        book.receive(*(gone(f"v{version}-{name}", name, UpdateStatus.REJECTED, f"norm {version}") for name in "ab"))
    events = book.rows("events", "kind", "device_id", "message")
    assert [event for event in events if event[0] == "device-quarantined"] == [("device-quarantined", "b", "norm 1")]
    assert len(events) == 6 + 1
    book.recorder.resume([], 0, {})
    book.order(3, "b")
    book.receive(gone("v3-b", "b", UpdateStatus.REJECTED, "norm 3", is_strike=True))
    assert book.rows("events", "kind")[7:] == [("update-rejected",)]


def test_what_the_guard_did_is_an_event_with_device_assignment_and_reason_that_page_and_docs_know(book):
    book.order(0, "a", "b")
    book.flagged |= {"b"}
    book.recorder.on_clipped(ClippedUpdate(assignment_id="v0-a", device_id="a", reason="12 times the usual norm"))
    book.receive(gone("v0-b", "b", UpdateStatus.REJECTED, "cosine -0.9"))
    events = book.rows("events", "kind", "device_id", "message")
    assert events == [
        ("update-clipped", "a", "v0-a: 12 times the usual norm"),
        ("update-rejected", "b", "v0-b: cosine -0.9"),
        ("device-quarantined", "b", "cosine -0.9"),
    ]
    root = Path(__file__).parents[3]
    page = root / "edgefl/coordinator/api/page"
    shown = [
        re.search(rf"const {name} = /(.*)/;", (page / file).read_text())[1]
        for name, file in (("GUARDED", "run.js"), ("ALARMING", "events.js"))
    ]
    for kind, _, _ in events:
        assert all(re.search(pattern, kind) for pattern in shown), kind
        assert f"`{kind}`" in (root / "docs/reference/store.md").read_text(), kind


def test_an_update_that_never_came_cannot_be_used(book):
    book.round_of(0, "a")
    for name in ("v0-a", "v9-z"):
        with pytest.raises(StrategyError, match=f"used: the strategy names '{name}'"):
            book.log.record_aggregation(2, [name], None)


def apply(book, *names):
    """Applies updates one by one, as an asynchronous strategy does."""
    for name in names:
        book.aggregate(book.versions[-1] + 1 if book.versions else 1, name)


def test_an_asynchronous_round_is_so_many_versions_and_closes_with_its_last_or_with_the_run(open_book):
    book = open_book(versions_per_round=3)
    book.order(0, "a", "b")
    book.receive(update(0, "a"), update(0, "b"))
    book.now_s = 2.0
    apply(book, "v0-a", "v0-b")
    assert book.rows("rounds", "round", "closed_at") == [(1, None)]
    book.order(2, "a")
    book.receive(update(2, "a"))
    book.now_s = 5.0
    apply(book, "v2-a")
    names = ("round", "version", "num_updates", "num_devices", "started_at", "closed_at")
    assert book.rows("rounds", *names) == [(1, 3, 3, 2, 1000.0, 1005.0)]
    assert set(book.rows("updates", "assignment_id", "applied_version", "staleness")) == {
        ("v0-a", 0, 0), ("v0-b", 1, 1), ("v2-a", 2, 0),
    }  # fmt: skip
    book.order(3, "a")
    book.receive(update(3, "a"))
    apply(book, "v3-a")
    book.now_s = 9.0
    for _ in range(2):
        book.finish()
        assert book.rows("rounds", "round", "version", "num_updates", "closed_at")[1:] == [(2, 4, 1, 1009.0)]
    assert (book.run().rounds, book.run().version) == (2, 4)


def test_an_update_counts_in_the_round_that_it_was_applied_in_and_not_in_that_of_its_base(open_book):
    book = open_book(versions_per_round=2)
    book.order(0, "a", "b", "slow")
    book.receive(update(0, "a"), update(0, "b"))
    apply(book, "v0-a", "v0-b")
    book.order(2, "a")
    book.receive(update(0, "slow"), update(2, "a"))
    apply(book, "v0-slow", "v2-a")
    assert set(book.rows("updates", "assignment_id", "round", "staleness")) == {
        ("v0-a", 1, 0), ("v0-b", 1, 1), ("v0-slow", 2, 2), ("v2-a", 2, 1),
    }  # fmt: skip
    assert book.rows("rounds", "round", "num_updates") == [(1, 2), (2, 2)]


def test_without_a_number_a_round_is_as_many_versions_as_devices_were_asked_first(open_book):
    book = open_book(versions_per_round=None)
    book.evaluate(0, "judge")
    book.order(0, "a", "b", "c")
    book.order(0, "d")
    book.receive(*(update(0, device) for device in "abcd"))
    apply(book, "v0-a", "v0-b", "v0-c", "v0-d")
    assert book.rows("rounds", "round", "num_updates") == [(1, 3)]


NODE_COLUMNS = ("accuracy", "node_accuracy", "worst_node_accuracy")


def test_a_round_has_the_accuracy_of_the_average_and_beside_it_that_of_the_nodes(book):
    book.round_of(0, "a", "b")
    for subject in ("", "a", "b"):
        book.evaluate(1, "judge", subject=subject)
    book.receive(evaluated(1, "judge", "evaluator", 0.25, subject="a"))
    book.receive(evaluated(1, "judge", "evaluator", 0.9))
    assert book.rows("rounds", *NODE_COLUMNS) == [(0.9, None, None)], "one node is still to come"
    book.receive(evaluated(1, "judge", "evaluator", 0.75, subject="b"))
    assert book.rows("rounds", *NODE_COLUMNS) == [(0.9, 0.5, 0.25)]
    assert book.run().accuracy == 0.9
    assert book.rows("evaluations", "subject") == [("a",), ("",), ("b",)]


def test_nodes_that_never_answer_leave_the_figures_of_those_that_did_at_the_end(book):
    book.round_of(0, "a")
    for subject in ("a", "b", "c"):
        book.evaluate(1, "judge", subject=subject)
    book.receive(evaluated(1, "judge", "evaluator", 0.5, subject="a"), gone("e1-judgeb", "judge"))
    book.finish()
    assert book.rows("rounds", *NODE_COLUMNS) == [(None, 0.5, 0.5)]


def test_what_a_strategy_tells_of_a_round_stands_in_its_row_at_its_last_version(open_book):
    book = open_book(versions_per_round=2, compute_metrics=lambda state: {"disagreement": len(state)})
    book.order(0, "a", "b", "c")
    book.receive(*(update(0, device) for device in "abc"))
    for version, device in enumerate("abc", 1):
        book.log.record_aggregation(version, [f"v0-{device}"], "x" * version)
    book.finish()
    assert book.rows("rounds", "facts") == [({"disagreement": 2.0},), ({"disagreement": 3.0},)]


@pytest.mark.parametrize("meanwhile", ["nothing", "published", "written"])
def test_figures_that_come_after_a_round_was_closed_leave_its_facts(open_book, meanwhile):
    book = open_book(compute_metrics=lambda _: {"disagreement": 0.5})
    book.order(0, "a")
    book.evaluate(1, "judge", subject="a")
    book.log.record_events([update(0, "a")])
    book.log.record_aggregation(1, ["v0-a"], None)
    if meanwhile != "nothing":
        book.log.commit()
    if meanwhile == "written":
        book.ledger.flush()
    book.receive(evaluated(1, "judge", "evaluator", 0.25, subject="a"))
    assert book.rows("rounds", "facts", *NODE_COLUMNS[1:]) == [({"disagreement": 0.5}, 0.25, 0.25)]


def test_the_first_version_of_too_few_updates_for_a_robust_rule_is_an_event_and_later_ones_are_not(open_book):
    book = open_book(needed_updates=2)
    book.round_of(0, "a", "b")
    assert book.rows("events", "kind") == []
    for version in (1, 2):
        book.round_of(version, "a")
    ((kind, message),) = book.rows("events", "kind", "message")
    assert kind == "too-few-updates"
    assert message.startswith("version 2: the robust rule needs 2 updates a round")
    assert "and gets 1:" in message
