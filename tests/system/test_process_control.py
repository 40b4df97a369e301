from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from edgefl.system.process_control import on_stop_signal


def test_a_signal_stops_once_and_outside_the_handler():
    stopped, threads = threading.Event(), list[threading.Thread]()

    def stop():
        threads.append(threading.current_thread())
        stopped.set()

    with on_stop_signal(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped.wait(60)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def test_a_signal_that_comes_while_the_lock_of_stop_is_held_ends_in_no_deadlock():
    stopping, lock = threading.Event(), threading.Lock()

    def stop():
        with lock:
            stopping.set()

    with on_stop_signal(stop):
        with lock:
            os.kill(os.getpid(), signal.SIGTERM)
        assert stopping.wait(60)


def test_afterwards_the_handlers_are_as_before_and_no_thread_is_left():
    before, threads = signal.getsignal(signal.SIGTERM), threading.active_count()
    with on_stop_signal(lambda: None):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    assert threading.active_count() == threads


def test_a_child_ends_when_the_process_that_started_it_is_killed():
    program = (
        "import subprocess, sys, time\n"
        "from edgefl.system.process_control import exit_with_parent\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "child = subprocess.Popen(sleep, preexec_fn=exit_with_parent)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s and _is_running(child):
        time.sleep(0.02)
    assert not _is_running(child)


def test_nothing_is_loaded_between_fork_and_exec():
    program = (
        "import ctypes\n"
        "from edgefl.system.process_control import exit_with_parent\n"
        "del ctypes.CDLL, ctypes.PyDLL\n"
        "exit_with_parent()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_process_opens_more_files_than_it_was_given_at_first():
    program = (
        "import resource, sys, os\n"
        "from edgefl.system.process_control import raise_file_limit\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "assert raise_file_limit() == hard\n"
        "files = [os.pipe() for _ in range(100)]\n"
        "print(len(files))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "100", done.stderr
