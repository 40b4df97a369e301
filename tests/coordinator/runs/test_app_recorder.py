"""A Flower app's rounds in a real store, by the metrics of its boards' replies."""

import numpy as np
import pytest

from edgefl.coordinator.runs.app_recorder import AppRecorder, compute_mean_metrics
from edgefl.coordinator.runs.history_writer import HistoryWriter
from edgefl.core.metrics import MAX_REPLY_METRICS, ReplyMetrics
from edgefl.core.types import Decision, TrainConfig, TrainInstruction, Update, UpdateMetrics
from edgefl.engine.progress import RoundCounter
from edgefl.storage.queries.history import read_history
from edgefl.storage.store import Store

METRICS = UpdateMetrics(iterations=1, num_examples=0, loss=None, compute_s=0.0, send_s=0.0, bytes_up=5, bytes_down=3)
TRAIN = {"a": ReplyMetrics(is_evaluation=False, num_examples=1, loss=4.0, values={"train_loss": 4.0, "lr": 0.5}),
         "b": ReplyMetrics(is_evaluation=False, num_examples=3, loss=2.0, values={"train_loss": 2.0})}  # fmt: skip
SCORES = {name: ReplyMetrics(is_evaluation=True, num_examples=count, loss=loss, accuracy=accuracy,
                             values={"loss": loss, "accuracy": accuracy})
          for name, count, loss, accuracy in (("a", 1, 5.0, 1.0), ("b", 3, 9.0, 0.0))}  # fmt: skip


class Book:
    """A recorder and its store, which may be opened again."""

    def __init__(self, store, unused=()):
        self.store, self.replies, self.now_s = store, {}, 0.0
        self.history = HistoryWriter(store, "r")
        self.recorder = AppRecorder(
            history=self.history, rounds=RoundCounter(versions_per_round=1), clock=lambda: 1000.0 + self.now_s,
            monotonic=lambda: self.now_s, read_reply=lambda update: self.replies[update.assignment_id],
            compute_metrics=lambda _: {"messages": 4.0}, unused_updates=unused,
        )  # fmt: skip

    def turn(self, number, kind, replies):
        """Boards answer a round's messages two seconds after they were sent."""
        self.send(number, kind, replies)
        self.answer(number, kind, replies)

    def send(self, number, kind, replies):
        for device, reply in replies.items():
            self.replies[f"{kind}{number}-{device}"] = reply
        plan = TrainConfig(iterations=1)
        self.recorder.on_decision(Decision(instructions=tuple(
            TrainInstruction(
                assignment_id=f"{kind}{number}-{device}", device_id=device, base_version=number - 1, plan=plan
            )
            for device in replies
        )))  # fmt: skip

    def answer(self, number, kind, devices):
        self.now_s += 2.0
        self.recorder.on_events([
            Update(assignment_id=f"{kind}{number}-{device}", device_id=device, base_version=number - 1,
                   tensors={"r": np.zeros(0)}, metrics=METRICS, received_s=self.now_s) for device in devices
        ])  # fmt: skip
        self.save()

    def save(self):
        self.recorder.on_commit()
        self.history.flush()

    def outcomes(self):
        return {row["assignment_id"]: row["outcome"] for row in self.rows("updates")}

    def rows(self, kind="rounds"):
        self.history.flush()
        return read_history(self.store, kind, run="r")


@pytest.fixture
def book(tmp_path):
    store = Store.open(tmp_path / "edgefl.db")
    store.add_run(run_id="r", name="r", task="flower-x", strategy="job", config={}, seed=1, submitted_at=1.0)
    yield Book(store)
    store.close()


def test_a_round_closes_with_the_next_with_means_weighted_by_examples(book):
    book.turn(1, "m", TRAIN)
    book.turn(1, "e", SCORES)
    assert [row["closed_at"] for row in book.rows()] == [None]
    book.turn(2, "m", TRAIN)
    first, second = book.rows()
    assert (first["round"], first["num_updates"], first["seconds"], second["closed_at"]) == (1, 4, 4.0, None)
    assert (first["train_loss"], first["loss"], first["accuracy"]) == (2.5, 8.0, 0.25)
    assert first["metrics"] == {"accuracy": 0.25, "loss": 8.0, "lr": 0.5, "train_loss": 2.5}
    assert book.store.get_run("r").accuracy == 0.25
    assert {row["round"] for row in book.rows("updates")} == {1, 2}


def test_the_last_round_closes_with_the_app_and_unused_replies_are_late(book):
    book.turn(1, "m", TRAIN)
    book.turn(3, "m", TRAIN)
    book.recorder.on_aggregation(1, ["m1-a", "m1-b", "m3-a"], None)
    book.recorder.on_finish()
    book.save()
    rows = book.rows()
    assert [(row["round"], row["closed_at"], row["facts"]) for row in rows] == [
        (1, 1002.0, None), (3, 1004.0, {"messages": 4.0})]  # fmt: skip
    assert book.outcomes() == {"m1-a": "used", "m1-b": "used", "m3-a": "used", "m3-b": "late"}
    assert (book.store.get_run("r").rounds, book.store.get_run("r").version) == (3, 1)


def test_in_an_app_that_is_stopped_the_replies_of_closed_rounds_stay_used_and_are_held_no_longer(book):
    for number in (1, 2, 3):
        book.turn(number, "m", TRAIN)
    recorder = book.recorder
    assert [*recorder._unused_updates] == ["m3-a", "m3-b"]
    assert (recorder._assignments, [*recorder._replies]) == ({}, [3])
    recorder.on_finish()
    book.save()
    assert [row["closed_at"] for row in book.rows()] == [1002.0, 1004.0, 1006.0]
    assert book.outcomes() == {f"m{number}-{name}": "late" if number == 3 else "used"
                               for number in (1, 2, 3) for name in TRAIN}  # fmt: skip


def test_a_round_that_is_closed_stays_as_it_is_and_a_reply_behind_its_end_is_used_if_the_app_had_it(book):
    book.turn(1, "m", TRAIN)
    book.turn(2, "m", {"a": TRAIN["a"]})
    first = book.rows()[0]
    book.turn(1, "e", SCORES)
    assert book.recorder.round_starts_s == {2: 2.0}
    assert [*book.recorder._replies] == [2]
    book.turn(3, "m", {"b": TRAIN["b"]})
    book.recorder.on_aggregation(1, ["m1-a", "m1-b", "m2-a", "e1-a", "m3-b"], None)
    book.recorder.on_finish()
    book.save()
    rows = book.rows()
    names = ("closed_at", "seconds", "metrics", "facts")
    assert [rows[0][name] for name in names] == [first[name] for name in names]
    assert [row["closed_at"] for row in rows] == [1002.0, 1006.0, 1008.0]
    used = dict.fromkeys(("m1-a", "m1-b", "m2-a", "e1-a", "m3-b"), "used")
    assert book.outcomes() == {**used, "e1-b": "late"}


def test_the_names_of_one_board_do_not_take_the_place_of_what_all_say():
    common = {"eval_loss": 1.0, "zeta": 2.0}
    rogue = {**{f"a{number:02}": 0.0 for number in range(30)}, "eval_loss": 1.0, "accuracy": 0.5}
    replies = [ReplyMetrics(is_evaluation=True, values=values) for values in (common, common, rogue)]
    found = compute_mean_metrics(replies)
    assert len(found) == MAX_REPLY_METRICS
    assert found.keys() >= {"eval_loss", "accuracy", "zeta", "a00", "a28"}
    assert "a29" not in found
