"""Orders one at a time: what a newer one calls off, what breaks, and what a stop leaves."""

import threading
from collections.abc import Callable

import pytest

from edgefl.device import errands as module
from edgefl.device.errands import CalledOffError, Errands
from edgefl.errors import DataError, NetworkError, StoreFullError
from edgefl.types import derived_rng

WITHIN_S = 10.0


class Work:
    """What orders are carried out, and what becomes of them."""

    def __init__(self, *, calls_off=True):
        self.begun = []
        self.failures = []
        self.does: Callable[[str], None] = lambda order: None
        self.news = threading.Condition()
        self.errands = Errands(
            "work", self._carry_out, on_failure=self._failed, rng=derived_rng("t"), calls_off=calls_off
        )
        self.errands.start()

    def until(self, condition):
        with self.news:
            assert self.news.wait_for(condition, WITHIN_S), (self.begun, self.failures)

    def _carry_out(self, order):
        with self.news:
            self.begun.append(order)
            self.news.notify_all()
        self.does(order)

    def _failed(self, order, error):
        with self.news:
            self.failures.append((order, str(error)))
            self.news.notify_all()


@pytest.fixture
def work(monkeypatch):
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.01)
    made = Work()
    yield made
    made.errands.stop(WITHIN_S)


def test_a_newer_order_calls_off_the_one_that_waits_for_its_connection(work):
    away, ended = threading.Event(), []

    def fetch():
        away.set()
        raise NetworkError("away")

    def does(order):
        if order == "first":
            try:
                work.errands.until_done(fetch, what=order, on_away=lambda: None)
            except CalledOffError:
                ended.append(order)
                raise

    work.does = does
    work.errands.add("first")
    assert away.wait(WITHIN_S)
    work.errands.add("second")
    work.until(lambda: work.begun == ["first", "second"])
    assert (ended, work.failures) == (["first"], [])


def test_what_one_order_breaks_does_not_keep_the_next(work):
    def does(order):
        if order == "bad":
            raise ValueError("nobody thought of this")
        if order == "full":
            raise StoreFullError("no room for the note")

    work.does = does
    for order in ("bad", "full", "good"):
        work.errands.add(order)
        work.until(lambda order=order: order in work.begun)
    assert work.failures == [("bad", "nobody thought of this")]


def test_orders_that_call_nothing_off_wait_for_their_turn_and_count_once():
    work, goes_on = Work(calls_off=False), threading.Event()

    def does(_order):
        assert goes_on.wait(WITHIN_S)

    work.does = does
    work.errands.add("first")
    work.until(lambda: work.begun)
    for order in ("second", "first", "third", "second"):
        work.errands.add(order)
    assert work.errands.num_waiting() == 2
    work.errands.check_wanted()
    goes_on.set()
    work.until(lambda: work.begun[-1] == "third")
    work.errands.stop(WITHIN_S)
    assert work.begun == ["first", "second", "third"]


def test_a_broken_connection_is_tried_again_and_damage_once_more_only(work):
    answers = [NetworkError("away"), NetworkError("away"), DataError("damaged"), "whole"]
    told = []

    def attempt():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert work.errands.until_done(attempt, what="it", on_away=lambda: told.append("away")) == "whole"
    assert told == ["away", "away"]
    answers += [DataError("damaged"), DataError("damaged again")]
    with pytest.raises(DataError, match="damaged again"):
        work.errands.until_done(attempt, what="it", on_away=lambda: None)


def test_a_stop_ends_a_wait_at_once_and_keeps_the_order_for_the_next_life(work):
    ended = threading.Event()

    def does(order):
        try:
            work.errands.sleep(60.0)
        except CalledOffError:
            ended.set()
            raise

    work.does = does
    work.errands.add("first")
    work.until(lambda: work.begun)
    work.errands.stop(WITHIN_S)
    assert ended.is_set()
    assert work.errands.is_called_off()
