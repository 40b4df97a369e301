from __future__ import annotations

import os
import signal
import threading

from edgefl.coordinator.signals import on_stop_signal as coordinator_s
from edgefl.device.signals import on_stop_signal as device_s


def test_a_signal_stops_once_and_outside_the_handler() -> None:
    for on_stop_signal in (coordinator_s, device_s):
        stopped, threads = threading.Event(), list[threading.Thread]()

        def stop(stopped: threading.Event = stopped, threads: list[threading.Thread] = threads) -> None:
            threads.append(threading.current_thread())
            stopped.set()

        with on_stop_signal(stop):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            assert stopped.wait(5)
        assert len(threads) == 1
        assert threads[0] is not threading.main_thread()


def test_a_signal_that_comes_while_the_lock_of_stop_is_held_ends_in_no_deadlock() -> None:
    stopping, lock = threading.Event(), threading.Lock()

    def stop() -> None:
        with lock:
            stopping.set()

    with coordinator_s(stop):
        with lock:
            os.kill(os.getpid(), signal.SIGTERM)
        assert stopping.wait(5)


def test_afterwards_the_handlers_are_as_before_and_no_thread_is_left() -> None:
    before, threads = signal.getsignal(signal.SIGTERM), threading.active_count()
    with coordinator_s(lambda: None):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    assert threading.active_count() == threads
