"""The recorder over a real store and a real journal."""

import contextlib

import numpy as np
import pytest

from edgefl.compression.codec import make_codec
from edgefl.compression.decoding import decode_body
from edgefl.coordinator.runs.ledger import Ledger
from edgefl.coordinator.runs.recorder import Recorder
from edgefl.errors import JournalError, StoreFullError, StrategyError
from edgefl.storage.journal import WalJournal
from edgefl.storage.queries import history
from edgefl.storage.rewinding import counted_so_far
from edgefl.storage.store import Store
from edgefl.tally import RoundCount, Tally
from edgefl.types import (
    Assignment,
    Decision,
    Evaluated,
    Evaluation,
    LocalPlan,
    Lost,
    Outcome,
    TensorSpec,
    Update,
    UpdateMetrics,
    derived_rng,
)

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
        self.path = root / "edgefl.db"
        self.store = Store.open(self.path)
        self.store.add_run(
            run_id="r", name="r", task="digits", strategy="fedavg", config={}, seed=1, submitted_at=1.0
        )
        self.wal = WalJournal(root / "journal", lambda body: decode_body(body, SHAPES))
        self.ledger = Ledger(self.store, "r")
        self.recorder = Recorder(
            wal=self.wal,
            ledger=self.ledger,
            rounds=RoundCount(versions_per_round=versions_per_round),
            clock=lambda: 1000.0 + self.now_s + self.jump_s,
            monotonic=lambda: self.now_s,
            on_version=self.versions.append,
            flagged=lambda: self.flagged,
            **options,
        )

    def order(self, version, *devices):
        orders = tuple(
            Assignment(
                assignment_id=f"v{version}-{device}",
                device_id=device,
                base_version=version,
                plan=LocalPlan(epochs=1.0),
            )
            for device in devices
        )
        self.recorder.decided(Decision(orders=orders))
        self.recorder.commit()
        return orders

    def evaluate(self, version, *devices, subject=""):
        orders = tuple(
            Evaluation(
                assignment_id=f"e{version}-{device}{subject}",
                device_id=device,
                version=version,
                round=version,
                subject=subject,
            )
            for device in devices
        )
        self.recorder.decided(Decision(orders=orders))
        self.recorder.commit()

    def receive(self, *events):
        return self.recorder.received(events)

    def close_round(self, version, *names):
        self.recorder.aggregated(version, names, f"state {version}")
        self.recorder.commit()

    def rows(self, kind):
        self.ledger.flush()
        return history(self.store, kind, run="r")


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
    body = CODEC.encode({"w": np.ones(3, np.float32)}, derived_rng(0))
    measured = {"iterations": 4, "num_examples": 10, "loss": 0.5, "compute_s": 2.0, "send_s": 0.25}
    return Update(
        assignment_id=f"v{version}-{device}",
        device_id=device,
        base_version=version,
        tensors=decode_body(body, SHAPES),
        metrics=UpdateMetrics(**{**measured, "bytes_up": len(body), "bytes_down": 100, **metrics}),
        body=body,
        received_s=received_s,
    )


def evaluated(version, device, source, accuracy, num_examples=10, subject=""):
    return Evaluated(
        assignment_id=f"e{version}-{device}{subject}",
        subject=subject,
        device_id=device,
        version=version,
        round=version,
        source=source,
        num_examples=num_examples,
        loss=1.0,
        accuracy=accuracy,
    )


@pytest.mark.parametrize("jump_s", [43_200.0, -43_200.0])
def test_a_round_is_as_long_as_it_was_though_the_clock_is_set_meanwhile(book, jump_s):
    book.order(0, "a")
    book.jump_s = jump_s
    book.now_s = 7.0
    book.receive(update(0, "a", received_s=7.0))
    book.close_round(1, "v0-a")
    assert [row["seconds"] for row in book.rows("rounds")] == [7.0]
    assert counted_so_far(book.store, "r").seconds == 7.0


def test_a_round_that_began_before_its_run_went_on_is_as_long_as_from_there(book):
    (order,) = book.order(0, "a")
    opened_s, book.now_s, book.jump_s = dict(book.recorder.opened_s), 3.0, 900.0
    book.recorder.go_on([order], Tally(), opened_s)
    book.receive(update(0, "a", received_s=3.0))
    book.close_round(1, "v0-a")
    assert [row["seconds"] for row in book.rows("rounds")] == [3.0]


def test_two_rounds_of_two_devices_are_two_rounds_and_four_updates_with_all_figures(book):
    for version in (0, 1):
        start_s = 10.0 * version
        book.now_s = start_s
        book.order(version, "a", "b")
        book.now_s = start_s + 1.0
        book.receive(update(version, "a", received_s=start_s + 1.0, loss=0.4))
        book.now_s = start_s + 3.0
        book.receive(update(version, "b", received_s=start_s + 3.0, loss=0.8, num_examples=30))
        book.close_round(version + 1, f"v{version}-a", f"v{version}-b")
    rounds = book.rows("rounds")
    assert [(r["round"], r["version"], r["num_updates"], r["num_devices"]) for r in rounds] == [
        (1, 1, 2, 2),
        (2, 2, 2, 2),
    ]
    assert [(r["started_at"], r["closed_at"]) for r in rounds] == [(1000.0, 1003.0), (1010.0, 1013.0)]
    assert rounds[0]["train_loss"] == pytest.approx((0.4 * 10 + 0.8 * 30) / 40)
    assert rounds[0]["bytes_down"] == 200
    rows = book.rows("updates")
    assert [(u["device_id"], u["round"], u["base_version"], u["applied_version"], u["staleness"]) for u in rows] == [
        ("a", 1, 0, 0, 0),
        ("b", 1, 0, 0, 0),
        ("a", 2, 1, 1, 0),
        ("b", 2, 1, 1, 0),
    ]
    assert {u["outcome"] for u in rows} == {"used"}
    assert [u["wait_s"] for u in rows] == [2.0, 0.0, 2.0, 0.0]
    first = rows[0]
    assert (first["iterations"], first["num_examples"], first["loss"]) == (4, 10, 0.4)
    assert (first["compute_s"], first["send_s"], first["bytes_down"]) == (2.0, 0.25, 100)
    assert first["bytes_up"] == len(update(0, "a").body)
    assert (first["dispatched_at"], first["received_at"]) == (1000.0, 1001.0)
    book.ledger.flush()
    run = book.store.run("r")
    assert (run.rounds, run.version) == (2, 2)


def test_updates_come_back_readable_from_the_journal_and_without_their_body(book):
    book.order(0, "a")
    (kept,) = book.receive(update(0, "a"))
    book.recorder.commit()
    assert kept.body is None
    assert kept.tensors["w"].tolist() == [1.0] * 3


def test_an_update_that_is_not_used_is_late_at_the_end_of_the_run(book):
    book.order(0, "a", "b")
    book.receive(update(0, "a"))
    book.close_round(1, "v0-a")
    book.receive(update(0, "b"))
    book.recorder.commit()
    assert [row["outcome"] for row in book.rows("updates")] == ["used", None]
    book.recorder.finish()
    rows = book.rows("updates")
    assert [row["outcome"] for row in rows] == ["used", "late"]
    assert rows[1]["loss"] == 0.5


def test_a_round_s_traffic_holds_what_came_after_it_had_closed_whenever_rows_are_written(open_book):
    book = open_book()
    book.order(0, "a", "b")
    book.receive(update(0, "a"))
    book.close_round(1, "v0-a")
    book.ledger.flush()
    book.receive(update(0, "b"))
    book.recorder.commit()
    book.ledger.flush()
    book.recorder.finish()
    (row,) = book.rows("rounds")
    assert (row["num_updates"], row["num_devices"], row["bytes_down"]) == (1, 2, 200)
    assert row["bytes_up"] == 2 * len(update(0, "a").body)


def test_an_update_that_is_used_a_version_later_says_how_stale_it_was(book):
    book.order(0, "a", "b")
    book.receive(update(0, "a"), update(0, "b"))
    book.close_round(1, "v0-a")
    book.order(1, "a")
    book.close_round(2, "v0-b")
    assert [(u["assignment_id"], u["applied_version"], u["staleness"]) for u in book.rows("updates")][:2] == [
        ("v0-a", 0, 0),
        ("v0-b", 1, 1),
    ]


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.FAILED, Outcome.REFUSED])
def test_what_brought_no_update_is_written_with_the_reason(book, outcome):
    book.order(0, "a", "b")
    book.receive(Lost(device_id="b", assignment_id="v0-b", outcome=outcome, reason="it fell into a pond"))
    book.recorder.commit()
    row = next(row for row in book.rows("updates") if row["device_id"] == "b")
    assert (row["outcome"], row["reason"], row["round"]) == (str(outcome), "it fell into a pond", 1)
    assert row["dispatched_at"] == 1000.0
    (event,) = book.rows("events")
    assert (event["kind"], event["device_id"]) == ("assignment-lost", "b")


def test_an_evaluation_that_is_lost_is_an_event_even_when_nothing_else_happens(book):
    book.evaluate(1, "judge")
    book.receive(Lost(device_id="judge", assignment_id="e1-judge", outcome=Outcome.LOST, reason="gone"))
    book.recorder.commit()
    assert [event["kind"] for event in book.rows("events")] == ["assignment-lost"]
    assert book.rows("updates") == []


def test_evaluations_are_kept_with_their_source(book):
    book.evaluate(1, "own", "pi")
    book.receive(evaluated(1, "own", "coordinator", 0.75), evaluated(1, "pi", "device", 0.5))
    book.recorder.commit()
    rows = sorted(book.rows("evaluations"), key=lambda row: row["device_id"])
    assert [(row["source"], row["version"], row["round"], row["accuracy"]) for row in rows] == [
        ("coordinator", 1, 1, 0.75),
        ("device", 1, 1, 0.5),
    ]
    assert rows[0]["num_examples"] == 10


def test_the_runs_accuracy_is_the_evaluators_or_the_mean_of_the_devices(book):
    book.evaluate(1, "a", "b")
    book.receive(evaluated(1, "a", "device", 1.0, 30), evaluated(1, "b", "device", 0.0, 10))
    book.recorder.commit()
    book.ledger.flush()
    assert book.store.run("r").accuracy == 0.75
    book.evaluate(2, "own", "a")
    book.receive(evaluated(2, "own", "coordinator", 0.5), evaluated(2, "a", "device", 1.0))
    book.recorder.commit()
    book.ledger.flush()
    assert book.store.run("r").accuracy == 0.5


def test_a_late_evaluation_of_an_older_version_does_not_turn_the_accuracy_back(book):
    book.evaluate(1, "own")
    book.evaluate(2, "own")
    for version, accuracy in ((2, 0.9), (1, 0.1)):
        book.receive(evaluated(version, "own", "coordinator", accuracy))
        book.recorder.commit()
    book.ledger.flush()
    assert book.store.run("r").accuracy == 0.9
    assert len(book.rows("evaluations")) == 2


def test_a_version_without_work_of_its_own_is_a_round_too(book):
    book.order(0, "a", "b")
    book.receive(update(0, "a"), update(0, "b"))
    book.close_round(1, "v0-a")
    book.close_round(2, "v0-b")
    assert [(row["round"], row["num_updates"]) for row in book.rows("rounds")] == [(1, 1), (2, 1)]


def test_nothing_is_in_the_store_before_it_is_in_the_journal(book):
    book.order(0, "a")
    book.receive(update(0, "a"))
    book.recorder.aggregated(1, ["v0-a"], None)
    assert [row["outcome"] for row in book.rows("updates")] == [None]
    book.wal.close()
    with pytest.raises(JournalError):
        book.recorder.commit()
    assert [row["outcome"] for row in book.rows("updates")] == [None]
    assert book.rows("rounds")[0]["closed_at"] is None


def test_every_version_is_told(book):
    book.order(0, "a")
    book.receive(update(0, "a"))
    book.close_round(1, "v0-a")
    assert book.versions == [1]


def test_a_turn_without_news_writes_nothing(book):
    before = book.wal.last_record
    for _ in range(3):
        book.receive()
        book.recorder.decided(Decision())
        book.recorder.commit()
    assert book.wal.last_record == before
    assert book.rows("updates") == book.rows("events") == []


def test_rows_that_cannot_be_written_are_written_later(book):
    ledger = Ledger(FullStore(), "r")
    book.recorder._ledger = ledger
    book.order(0, "a", "b")
    with pytest.raises(StoreFullError):
        ledger.flush()
    book.receive(update(0, "a"), update(0, "b"))
    book.close_round(1, "v0-a", "v0-b")
    ledger._store = book.store
    ledger.flush()
    assert [(row["round"], row["num_updates"]) for row in book.rows("rounds")] == [(1, 2)]
    assert {row["outcome"] for row in book.rows("updates")} == {"used"}
    assert {row["dispatched_at"] for row in book.rows("updates")} == {1000.0}


def test_what_a_device_measured_besides_is_kept(book):
    book.order(0, "a")
    book.receive(update(0, "a", extra={"gap": 0.5}))
    book.recorder.commit()
    assert book.rows("updates")[0]["metrics"] == {"gap": 0.5}


def test_how_a_board_was_is_kept_with_its_update_until_it_is_used_and_after(book):
    vitals = {
        "max_temperature_c": 83.2, "throttled": "throttled", "signal_dbm": -80.0, "link_bits_per_s": 6e6,
        "energy_j": 5.0, "paced_s": 2.5,
    }  # fmt: skip
    book.order(0, "a")
    book.receive(update(0, "a", **vitals))
    book.recorder.commit()
    for _ in ("received", "used"):
        (row,) = book.rows("updates")
        assert {name: row[name] for name in vitals} == vitals
        assert row["ended_at"] == row["received_at"] == 1000.0
        if row["outcome"] is None:
            book.recorder.aggregated(1, ["v0-a"], None)
            book.recorder.commit()


def test_an_assignment_that_is_given_up_ends_when_it_is(book):
    book.order(0, "a")
    book.now_s = 30.0
    book.receive(Lost(device_id="a", assignment_id="v0-a", outcome=Outcome.LOST, reason="gone"))
    book.recorder.commit()
    (row,) = book.rows("updates")
    assert (row["received_at"], row["ended_at"]) == (None, 1030.0)


def test_a_device_that_is_flagged_is_an_event_once_with_the_reason(book):
    for version in range(3):
        book.order(version, "a", "b")
        refused = {"outcome": Outcome.REFUSED, "reason": f"norm {version}"}
        book.flagged |= {"b"} if version else set()
        book.receive(
            Lost(device_id="a", assignment_id=f"v{version}-a", **refused),
            Lost(device_id="b", assignment_id=f"v{version}-b", **refused),
        )
        book.recorder.commit()
    events = [(row["kind"], row["device_id"], row["message"]) for row in book.rows("events")]
    assert [event for event in events if event[0] == "device-flagged"] == [("device-flagged", "b", "norm 1")]
    assert len(events) == 6 + 1


def test_that_a_device_is_flagged_is_not_told_again_behind_a_checkpoint_that_knows_it(book):
    book.flagged.add("b")
    book.recorder.go_on([], Tally(), {})
    book.order(0, "b")
    refused = {"outcome": Outcome.REFUSED, "reason": "norm 1", "is_strike": True}
    book.receive(Lost(device_id="b", assignment_id="v0-b", **refused))
    book.recorder.commit()
    assert [row["kind"] for row in book.rows("events")] == ["assignment-lost"]


def test_an_update_that_never_came_cannot_be_used(book):
    book.order(0, "a")
    book.receive(update(0, "a"))
    book.close_round(1, "v0-a")
    for name in ("v0-a", "v9-z"):
        with pytest.raises(StrategyError, match=f"used: the strategy names '{name}'"):
            book.recorder.aggregated(2, [name], None)


def apply(book, *names):
    """Applies updates one by one, as an asynchronous strategy does."""
    for name in names:
        version = book.versions[-1] + 1 if book.versions else 1
        book.close_round(version, name)


def test_an_asynchronous_round_is_so_many_versions_and_closes_with_its_last(open_book):
    book = open_book(versions_per_round=3)
    book.order(0, "a", "b")
    book.receive(update(0, "a"), update(0, "b"))
    book.now_s = 2.0
    apply(book, "v0-a", "v0-b")
    assert [(row["round"], row["closed_at"]) for row in book.rows("rounds")] == [(1, None)]
    book.order(2, "a")
    book.receive(update(2, "a"))
    book.now_s = 5.0
    apply(book, "v2-a")
    (row,) = book.rows("rounds")
    assert (row["round"], row["version"], row["num_updates"], row["num_devices"]) == (1, 3, 3, 2)
    assert (row["started_at"], row["closed_at"]) == (1000.0, 1005.0)
    rows = {row["assignment_id"]: row for row in book.rows("updates")}
    assert [(rows[name]["applied_version"], rows[name]["staleness"]) for name in ("v0-a", "v0-b", "v2-a")] == [
        (0, 0),
        (1, 1),
        (2, 0),
    ]


def test_an_update_counts_in_the_round_that_it_was_applied_in_and_not_in_that_of_its_base(open_book):
    book = open_book(versions_per_round=2)
    book.order(0, "a", "b", "slow")
    book.receive(update(0, "a"), update(0, "b"))
    apply(book, "v0-a", "v0-b")
    book.order(2, "a")
    book.receive(update(0, "slow"), update(2, "a"))
    apply(book, "v0-slow", "v2-a")
    rows = {row["assignment_id"]: (row["round"], row["staleness"]) for row in book.rows("updates")}
    assert rows == {"v0-a": (1, 0), "v0-b": (1, 1), "v0-slow": (2, 2), "v2-a": (2, 1)}
    assert [(row["round"], row["num_updates"]) for row in book.rows("rounds")] == [(1, 2), (2, 2)]


def test_without_a_number_a_round_is_as_many_versions_as_devices_were_asked_first(open_book):
    book = open_book(versions_per_round=None)
    book.evaluate(0, "judge")
    book.order(0, "a", "b", "c")
    book.order(0, "d")
    book.receive(*(update(0, device) for device in "abcd"))
    apply(book, "v0-a", "v0-b", "v0-c", "v0-d")
    assert [(row["round"], row["num_updates"]) for row in book.rows("rounds")] == [(1, 3)]


def test_the_round_that_is_not_whole_closes_at_the_end_of_the_run(open_book):
    book = open_book(versions_per_round=3)
    book.order(0, "a", "b", "c", "d")
    book.receive(*(update(0, device) for device in "abcd"))
    apply(book, "v0-a", "v0-b", "v0-c", "v0-d")
    book.now_s = 9.0
    book.recorder.finish()
    assert [(row["round"], row["version"], row["num_updates"]) for row in book.rows("rounds")] == [
        (1, 3, 3),
        (2, 4, 1),
    ]
    assert book.rows("rounds")[1]["closed_at"] == 1009.0
    book.recorder.finish()
    assert (book.store.run("r").rounds, book.store.run("r").version) == (2, 4)


NODE_COLUMNS = ("accuracy", "node_accuracy", "worst_node_accuracy")


def test_a_round_has_the_accuracy_of_the_average_and_beside_it_that_of_the_nodes(book):
    book.order(0, "a", "b")
    book.receive(update(0, "a"), update(0, "b"))
    book.close_round(1, "v0-a", "v0-b")
    for subject in ("", "a", "b"):
        book.evaluate(1, "judge", subject=subject)
    book.receive(evaluated(1, "judge", "evaluator", 0.25, subject="a"))
    book.receive(evaluated(1, "judge", "evaluator", 0.9))
    book.recorder.commit()
    (row,) = book.rows("rounds")
    assert [row[name] for name in NODE_COLUMNS] == [0.9, None, None], "one node is still to come"
    book.receive(evaluated(1, "judge", "evaluator", 0.75, subject="b"))
    book.recorder.commit()
    (row,) = book.rows("rounds")
    assert [row[name] for name in NODE_COLUMNS] == [0.9, 0.5, 0.25]
    assert book.store.run("r").accuracy == 0.9
    assert [row["subject"] for row in book.rows("evaluations")] == ["a", "", "b"]


def test_nodes_that_never_answer_leave_the_figures_of_those_that_did_at_the_end(book):
    book.order(0, "a")
    book.receive(update(0, "a"))
    book.close_round(1, "v0-a")
    for subject in ("a", "b", "c"):
        book.evaluate(1, "judge", subject=subject)
    book.receive(
        evaluated(1, "judge", "evaluator", 0.5, subject="a"),
        Lost(device_id="judge", assignment_id="e1-judgeb", outcome=Outcome.LOST, reason="gone"),
    )
    book.recorder.finish()
    (row,) = book.rows("rounds")
    assert [row[name] for name in NODE_COLUMNS] == [None, 0.5, 0.5]


def test_what_a_strategy_tells_of_a_round_stands_in_its_row_at_its_last_version(open_book):
    book = open_book(versions_per_round=2, facts=lambda state: {"disagreement": len(state)})
    book.order(0, "a", "b", "c")
    book.receive(*(update(0, device) for device in "abc"))
    for version, device in enumerate("abc", 1):
        book.recorder.aggregated(version, [f"v0-{device}"], "x" * version)
    book.recorder.finish()
    assert [row["facts"] for row in book.rows("rounds")] == [{"disagreement": 2.0}, {"disagreement": 3.0}]


def test_a_round_of_a_strategy_that_tells_nothing_has_no_facts(book):
    book.order(0, "a")
    book.receive(update(0, "a"))
    book.close_round(1, "v0-a")
    assert [(row["facts"], row["node_accuracy"]) for row in book.rows("rounds")] == [(None, None)]


@pytest.mark.parametrize("meanwhile", ["nothing", "published", "written"])
def test_figures_that_come_after_a_round_was_closed_leave_its_facts(open_book, meanwhile):
    book = open_book(facts=lambda _: {"disagreement": 0.5})
    book.order(0, "a")
    book.evaluate(1, "judge", subject="a")
    book.receive(update(0, "a"))
    book.recorder.aggregated(1, ["v0-a"], None)
    if meanwhile != "nothing":
        book.recorder.commit()
    if meanwhile == "written":
        book.ledger.flush()
    book.receive(evaluated(1, "judge", "evaluator", 0.25, subject="a"))
    book.recorder.commit()
    (row,) = book.rows("rounds")
    assert (row["facts"], row["node_accuracy"], row["worst_node_accuracy"]) == ({"disagreement": 0.5}, 0.25, 0.25)
