import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from edgefl.system.systemd import LivenessMonitor, SystemdNotifier, run_watchdog


class Manager:
    """Stands for systemd: a datagram socket that keeps what it is told."""

    def __init__(self, folder):
        self.address = str(folder / "notify")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.address)

    def next(self, timeout_s):
        self.socket.settimeout(timeout_s)
        try:
            return self.socket.recv(4096).decode()
        except TimeoutError:
            return None


@pytest.fixture
def manager(tmp_path):
    manager = Manager(tmp_path)
    yield manager
    manager.socket.close()


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_ready_beats_and_stopping_come_in_this_order_and_no_beats_without_a_watchdog(manager):
    with run_watchdog(SystemdNotifier(address=manager.address, watchdog_s=0.2), LivenessMonitor()):
        assert [manager.next(5), manager.next(5)] == ["READY=1", "WATCHDOG=1"]
    told = []
    while (word := manager.next(0.1)) is not None:
        told.append(word)
    assert told[-1] == "STOPPING=1"
    with run_watchdog(SystemdNotifier(address=manager.address), LivenessMonitor()):
        pass
    assert [manager.next(5), manager.next(5), manager.next(0.1)] == ["READY=1", "STOPPING=1", None]


def test_beats_end_when_the_loop_is_stuck_and_come_again_with_it(manager):
    life = LivenessMonitor()
    with run_watchdog(SystemdNotifier(address=manager.address, watchdog_s=0.4), life):
        deadline_s = time.monotonic() + 60
        while manager.next(0.5) is not None:  # the loop, which is this one, does not come round
            assert time.monotonic() < deadline_s, "a stuck loop went on beating"
        life.record_progress()
        assert manager.next(5) == "WATCHDOG=1"


def test_outside_of_systemd_nothing_is_told_and_nothing_fails(tmp_path, caplog):
    SystemdNotifier().notify("READY=1")
    assert not caplog.records
    SystemdNotifier(address=str(tmp_path / "nobody")).notify("READY=1")
    assert "cannot be told READY=1" in caplog.text


def test_an_abstract_socket_is_reached():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0edgefl-test-{os.getpid()}")
        listener.settimeout(5)
        SystemdNotifier(address=f"@edgefl-test-{os.getpid()}").notify("READY=1")
        assert listener.recv(100) == b"READY=1"


OWN = {"WATCHDOG_PID": str(os.getpid())}


@pytest.mark.parametrize(
    ("found", "watchdog_s"),
    [
        ({"WATCHDOG_USEC": "180000000", **OWN}, 180.0),
        ({"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_what_systemd_set_for_this_process_is_taken_out_of_the_environment(found, watchdog_s):
    environment = {"NOTIFY_SOCKET": "/run/n", "A": "b", **found}
    assert SystemdNotifier.from_environment(environment) == SystemdNotifier(address="/run/n", watchdog_s=watchdog_s)
    assert environment == {"A": "b"}


def test_a_loop_at_leisure_must_come_round_after_work_too():
    clock = Clock()
    life = LivenessMonitor(clock=clock, work_timeout_s=1000)
    for now, is_alive in ((9.0, True), (11.0, False)):
        clock.now = now
        assert life.is_alive(10) is is_alive
    life.record_progress()
    assert life.is_alive(10)
    with life.track_work():
        clock.now = 600.0
    for now, is_alive in ((605.0, True), (611.0, False)):
        clock.now = now
        assert life.is_alive(10) is is_alive


@contextmanager
def at_work(life, work):
    """A thread that works in the loop's place until the block is over."""
    entered, leave = threading.Event(), threading.Event()

    def run():
        with life.track_work():
            entered.set()
            work(leave)

    worker = threading.Thread(target=run)
    worker.start()
    assert entered.wait(60)
    yield worker
    leave.set()
    worker.join()


def test_work_that_waits_is_given_its_time_and_no_more():
    clock = Clock()
    life = LivenessMonitor(clock=clock, work_timeout_s=1000)
    with at_work(life, lambda leave: leave.wait(30)):
        for now, is_alive in ((500.0, True), (1100.0, False)):
            clock.now = now
            assert life.is_alive(10) is is_alive
        life.record_progress()  # an iteration was done
        assert life.is_alive(10)


def test_work_that_computes_is_alive_however_long_it_takes():
    def compute(leave):
        while not leave.is_set():
            sum(range(1000))

    clock = Clock()
    life = LivenessMonitor(clock=clock, work_timeout_s=1.0)
    with at_work(life, compute) as worker:
        life.is_alive(1)
        cpu, deadline_s = time.pthread_getcpuclockid(worker.ident), time.monotonic() + 60
        for now in (1.5, 3.0, 4.5):
            # The clock of the loop is ours, that of the processor is real: let it run for a share of 1.5 s.
            until_s = time.clock_gettime(cpu) + 0.05
            while time.clock_gettime(cpu) < until_s:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            clock.now = now
            assert life.is_alive(1)
    clock.now = 10.0
    assert not life.is_alive(1), "a thread that is gone computes no more"


CHILD = """
import subprocess, sys
from edgefl.system.systemd import LivenessMonitor, SystemdNotifier, run_watchdog
with run_watchdog(SystemdNotifier.from_environment(), LivenessMonitor()):
    program = 'import os; raise SystemExit("NOTIFY_SOCKET" in os.environ)'
    subprocess.run([sys.executable, "-c", program], check=True)
"""


def test_a_child_does_not_speak_for_its_parent(manager):
    environment = {**os.environ, "NOTIFY_SOCKET": manager.address}
    subprocess.run([sys.executable, "-c", CHILD], env=environment, check=True, timeout=30)
    assert manager.next(5) == "READY=1"
