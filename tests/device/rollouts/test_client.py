"""Orders one at a time; what calls one off, and fetching anew, is in tests of the models and installations."""

import contextlib
import threading

import pytest
from peer_boards import eventually

from edgefl.core.errors import StoreFullError
from edgefl.core.types import derive_rng
from edgefl.device.rollouts.client import BackgroundTaskQueue


@contextlib.contextmanager
def at_work(carry_out, failures, *, calls_off=True):
    errands = BackgroundTaskQueue(
        "work",
        carry_out,
        on_failure=lambda *told: failures.append(told),
        rng=derive_rng("t"),
        should_cancel_running=calls_off,
    )
    errands.start()
    yield errands
    errands.stop(10.0)


def test_what_one_order_breaks_does_not_keep_the_next():
    errors, begun, failures = [ValueError("nobody thought of this"), StoreFullError("no room for the note")], [], []

    def carry_out(order):
        begun.append(order)
        if errors:
            raise errors.pop(0)

    with at_work(carry_out, failures) as errands:
        for order in ("bad", "full", "good"):
            errands.add(order)
            eventually(lambda order=order: begun[-1:] == [order])
    ((order, error),) = failures
    assert (order, str(error)) == ("bad", "nobody thought of this")


@pytest.mark.parametrize("calls_off", [False, True])
def test_orders_count_once_and_wait_for_their_turn_unless_they_call_off(calls_off):
    begun, goes_on = [], threading.Event()

    def carry_out(order):
        begun.append(order)
        assert goes_on.wait(10.0)

    with at_work(carry_out, [], calls_off=calls_off) as errands:
        errands.add("first")
        eventually(lambda: begun)
        for order in ("second", "second", *(() if calls_off else ("first",)), "third"):
            errands.add(order)
        assert (errands.num_waiting(), errands.is_cancelled()) == (2, calls_off)
        goes_on.set()
        eventually(lambda: begun[-1] == "third")
    assert begun == ["first", "second", "third"]
