from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from edgefl.watchdog import LoopLife, Notifier, watched


class Manager:
    """Stands for systemd: a datagram socket that keeps what it is told."""

    def __init__(self, folder):
        self.address = str(folder / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)

    def next(self, timeout_s):
        self._socket.settimeout(timeout_s)
        try:
            return self._socket.recv(4096).decode()
        except TimeoutError:
            return None

    def close(self):
        self._socket.close()


@pytest.fixture
def manager(tmp_path):
    manager = Manager(tmp_path)
    yield manager
    manager.close()


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_ready_beats_and_stopping_come_in_this_order(manager):
    with watched(Notifier(address=manager.address, watchdog_s=0.2), LoopLife()):
        assert manager.next(5) == "READY=1"
        assert manager.next(5) == "WATCHDOG=1"
    told = []
    while (word := manager.next(0.1)) is not None:
        told.append(word)
    assert told[-1] == "STOPPING=1"


def test_beats_end_when_the_loop_is_stuck_and_come_again_with_it(manager):
    life = LoopLife()
    with watched(Notifier(address=manager.address, watchdog_s=0.4), life):
        deadline_s = time.monotonic() + 60
        while manager.next(0.5) is not None:  # the loop, which is this one, does not come round
            assert time.monotonic() < deadline_s, "a stuck loop went on beating"
        life.beat()
        assert manager.next(5) == "WATCHDOG=1"


def test_without_a_watchdog_it_only_says_ready_and_stopping(manager):
    with watched(Notifier(address=manager.address), LoopLife()):
        pass
    assert [manager.next(5), manager.next(5), manager.next(0.1)] == ["READY=1", "STOPPING=1", None]


def test_outside_of_systemd_nothing_is_told_and_nothing_fails(tmp_path, caplog):
    Notifier().tell("READY=1")
    assert not caplog.records
    Notifier(address=str(tmp_path / "nobody")).tell("READY=1")
    assert "cannot be told READY=1" in caplog.text


def test_an_abstract_socket_is_reached():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0edgefl-test-{os.getpid()}")
        listener.settimeout(5)
        Notifier(address=f"@edgefl-test-{os.getpid()}").tell("READY=1")
        assert listener.recv(100) == b"READY=1"


def test_what_systemd_set_is_taken_out_of_the_environment():
    environment = {
        "NOTIFY_SOCKET": "/run/n",
        "WATCHDOG_USEC": "180000000",
        "WATCHDOG_PID": str(os.getpid()),
        "A": "b",
    }
    assert Notifier.from_environment(environment) == Notifier(address="/run/n", watchdog_s=180.0)
    assert environment == {"A": "b"}


@pytest.mark.parametrize(
    "found", [{"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "soon"}, {}]
)
def test_a_watchdog_that_is_not_for_this_process_is_none(found):
    assert Notifier.from_environment({"NOTIFY_SOCKET": "/run/n", **found}).watchdog_s is None


def test_a_loop_at_leisure_must_come_round():
    clock = Clock()
    life = LoopLife(clock=clock)
    clock.now = 9.0
    assert life.is_alive(10)
    clock.now = 11.0
    assert not life.is_alive(10)
    life.beat()
    assert life.is_alive(10)


def test_work_that_waits_is_given_its_time_and_no_more():
    clock = Clock()
    life = LoopLife(clock=clock, quiet_work_s=1000)
    entered, leave = threading.Event(), threading.Event()

    def work():
        with life.working():
            entered.set()
            leave.wait(30)

    worker = threading.Thread(target=work)
    worker.start()
    assert entered.wait(60)
    clock.now = 500.0
    assert life.is_alive(10)
    clock.now = 1100.0
    assert not life.is_alive(10)
    life.beat()  # an iteration was done
    assert life.is_alive(10)
    leave.set()
    worker.join()


def test_work_that_computes_is_alive_however_long_it_takes():
    clock = Clock()
    life = LoopLife(clock=clock, quiet_work_s=1.0)
    entered, leave = threading.Event(), threading.Event()

    def work():
        with life.working():
            entered.set()
            while not leave.is_set():
                sum(range(1000))

    worker = threading.Thread(target=work)
    worker.start()
    assert entered.wait(60)
    life.is_alive(1)
    deadline_s = time.monotonic() + 60
    for now in (1.5, 3.0, 4.5):
        # The clock of the loop is ours, that of the processor is real: let it run for a share of 1.5 s.
        _let_it_compute(worker, 0.05, deadline_s)
        clock.now = now
        assert life.is_alive(1)
    leave.set()
    worker.join()
    clock.now = 10.0
    assert not life.is_alive(1), "a thread that is gone computes no more"


def _let_it_compute(worker, seconds, deadline_s):
    clock = time.pthread_getcpuclockid(worker.ident or 0)
    until_s = time.clock_gettime(clock) + seconds
    while time.clock_gettime(clock) < until_s:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_after_the_work_the_loop_must_come_round_again():
    clock = Clock()
    life = LoopLife(clock=clock, quiet_work_s=1000)
    with life.working():
        clock.now = 600.0
    clock.now = 605.0
    assert life.is_alive(10)
    clock.now = 611.0
    assert not life.is_alive(10)


def test_a_child_does_not_speak_for_its_parent(manager):
    program = (
        "import os, subprocess, sys\n"
        "from edgefl.watchdog import LoopLife, Notifier, watched\n"
        "with watched(Notifier.from_environment(), LoopLife()):\n"
        "    subprocess.run([sys.executable, '-c', 'import os; raise SystemExit(\"NOTIFY_SOCKET\" in os.environ)'],"
        " check=True)\n"
    )
    environment = {**os.environ, "NOTIFY_SOCKET": manager.address}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=30)
    assert manager.next(5) == "READY=1"
